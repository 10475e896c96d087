// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <joinable/communicator/communicator.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/overlap.hpp>
#include <joinable/tensor/parameters.hpp>

/// @file
/// Finds ranks of one process that are about to train the same memory.

namespace joinable { inline namespace v0 { namespace detail {

/// The memory that one rank is about to train, and how texts name it.
struct TrainedMemory {
    struct Part {
        std::size_t parameter;
        bool is_gradient;
    };

    int rank = 0;
    std::uint64_t number = 0; ///< how many models the rank has made, this one included
    ParameterList parameters = {};
    std::vector<Part> parts = {};
    std::vector<AddressRange> ranges = {}; ///< of each part

    void add(Part part) {
        parts.push_back(part);
        ranges.push_back(AddressRange::of(view_of(parts.size() - 1), parts.size() - 1));
    }
    [[nodiscard]] AnyView view_of(std::size_t part) const {
        AnyParameter const& parameter = parameters[parts[part].parameter];
        return parts[part].is_gradient ? parameter.grad() : parameter.value();
    }
    /// "the gradient of parameter 3 (fc.weight)".
    [[nodiscard]] std::string text_of(std::size_t part) const {
        return (parts[part].is_gradient ? "the gradient of " : "the value of ") +
               describe_parameter(parameters, parts[part].parameter);
    }
};

/// One rank's access to the memory that the ranks of its process train, during the exchange in which
/// they agree on a model. A communicator whose ranks share a process has a member
/// `ModelTable* model_table()`, null if its ranks do not.
class ModelTable {
public:
    ModelTable() = default;
    ModelTable(ModelTable const&) = delete;
    ModelTable& operator=(ModelTable const&) = delete;

    /// Numbers the models of this rank. All ranks make the same ones.
    [[nodiscard]] std::uint64_t next() noexcept { return ++made_; }
    /// Enters what this rank trains; leave() follows. The last rank to enter sees all others.
    /// @throws ContractViolation  another rank trains some of it as well.
    virtual void enter(TrainedMemory const& memory) = 0;
    virtual void leave(TrainedMemory const& memory) noexcept = 0;

protected:
    ~ModelTable() = default;

private:
    std::uint64_t made_ = 0;
};

template <class Comm>
concept has_model_table = requires(Comm& comm) {
    { comm.model_table() } -> std::convertible_to<ModelTable*>;
};

/// The entry of a rank that makes a model, for as long as the exchange of the ranks lasts. Make it
/// on every rank, whatever fails there. Local.
class ModelEntry {
public:
    template <Communicator Comm>
    explicit ModelEntry(Comm& comm) {
        if constexpr (has_model_table<Comm>) {
            table_ = comm.model_table();
            memory_.rank = comm.rank();
            memory_.number = table_ == nullptr ? 0 : table_->next();
        }
    }
    ModelEntry(ModelEntry const&) = delete;
    ModelEntry& operator=(ModelEntry const&) = delete;
    ~ModelEntry() { leave(); }

    /// Whether the ranks are threads of one process.
    [[nodiscard]] bool is_of_threads() const noexcept { return table_ != nullptr; }

    /// Enters the gradients of trained parameters and, unless ranks may share them, their values.
    /// @throws ContractViolation  another rank trains some of that memory as well.
    void enter(ParameterList const& parameters, bool shares_values) {
        if (table_ == nullptr) {
            return;
        }
        memory_.parameters = parameters;
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            if (parameters[i].requires_grad()) {
                if (!shares_values) {
                    memory_.add({i, false});
                }
                memory_.add({i, true});
            }
        }
        is_entered_ = true;
        table_->enter(memory_);
    }
    /// The ranks have agreed or failed: memory may be freed and used again.
    void leave() noexcept {
        if (is_entered_) {
            is_entered_ = false;
            table_->leave(memory_);
        }
    }

private:
    ModelTable* table_ = nullptr;
    TrainedMemory memory_;
    bool is_entered_ = false;
};

}}} // namespace joinable::v0::detail
