// SPDX-License-Identifier: BSL-1.0
#pragma once

// joinable in single headers, for projects that copy files. Generated from include/joinable by
// single_include/amalgamate.py: change the headers there, not this file.

#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <queue>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "join.hpp"

// ---- joinable/participant/detail/kept_state.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// A copy of what a reduction keeps of each parameter, made before it is prepared for other ones. Local.
template <class Reduction>
class KeptState {
public:
    KeptState(Reduction& reduction, Device& device) : device_{&device} {
        if constexpr (saves_state<Reduction>) {
            ReductionState state;
            reduction.save(state);
            for (ReductionTensor const& tensor : state.tensors) {
                Arena elements = device.allocate_staging(bytes_of(tensor));
                if (elements.bytes() != 0) {
                    device.download(tensor.data, elements.data(), bytes_of(tensor));
                }
                tensors_.push_back({tensor, std::move(elements)});
            }
        }
    }

    /// Once it is prepared for other parameters: parameter `i` takes what was kept of parameter `was(i)`, an index or
    /// an optional one, if dtype and extents are the same, and otherwise begins from zeros.
    template <class F>
    void write(Reduction& reduction, F const& was) {
        if constexpr (saves_state<Reduction>) {
            ReductionState state;
            reduction.save(state);
            for (ReductionTensor const& tensor : state.tensors) {
                std::optional<std::size_t> const former = was(tensor.parameter);
                if (bytes_of(tensor) == 0) {
                    continue;
                }
                Arena const whole = device_->allocate_staging(bytes_of(tensor)); // zeros
                for (Kept& kept : tensors_) {
                    if (former == kept.tensor.parameter && tensor.name == kept.tensor.name &&
                        tensor.dtype == kept.tensor.dtype &&
                        tensor.extents == kept.tensor.extents) {
                        copy(
                            view_of(kept.tensor, kept.elements.data()),
                            view_of(tensor, whole.data())
                        );
                    }
                }
                device_->upload(whole.data(), tensor.data, bytes_of(tensor));
                device_->download(tensor.data, whole.data(), bytes_of(tensor)); // it ends here
            }
            reduction.load(state);
        }
    }

private:
    struct Kept {
        ReductionTensor tensor; ///< its address is that of before
        Arena elements;         ///< on the host
    };

    static std::size_t bytes_of(ReductionTensor const& tensor) noexcept {
        return numel(tensor.extents) * size_of(tensor.dtype);
    }
    static AnyView view_of(ReductionTensor const& tensor, std::byte* elements) {
        return {elements, tensor.dtype, tensor.extents, tensor.strides};
    }

    Device* device_;
    std::vector<Kept> tensors_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/participant/detail/relisted.hpp

#ifndef JOINABLE_PARTICIPANT_DETAIL_RELISTED_HPP_PART_1
#define JOINABLE_PARTICIPANT_DETAIL_RELISTED_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// A list of parameters in the place of one before: which is which. Local.
class Relisted {
public:
    Relisted() = default;
    /// A parameter is the first one of the same name that no other one is. Without a name it is the one whose value is
    /// at the same address, unless that one has other memory now. With `same_objects` the lists are the same. A
    /// value at the address of before is another one if `is_replaced(i)` says so of parameter `i` before.
    Relisted(
        ListedModel const& before,
        ParameterList const& now,
        bool same_objects,
        std::function<bool(std::size_t)> const& is_replaced = {}
    );

    [[nodiscard]] std::size_t size() const noexcept { return was_.size(); }
    /// The index of parameter `i` in the list before, if it is there.
    [[nodiscard]] std::optional<std::size_t> was(std::size_t i) const { return was_[i]; }
    /// Whether ranks have the same value of it, because it lies where they have trained it, or was sent and is frozen
    /// still. One of the same name that lies elsewhere may be another layer.
    [[nodiscard]] bool is_equal(std::size_t i) const { return is_equal_[i]; }

    /// Whether it was trained before, with the same dtype and extents: then state of it may be moved.
    [[nodiscard]] bool was_trained(std::size_t i) const { return was_trained_[i]; }

    /// Lists what each one was, because ranks do the same with it.
    void agree_on(AgreementList& list, ParameterList const& now) const;

private:
    std::vector<std::optional<std::size_t>> was_;
    std::vector<bool> is_equal_;
    std::vector<bool> was_trained_;
};

/// Gradients that were cleared hold nothing.
/// @throws ContractViolation  refresh() was called too early.
template <class F>
void require_no_window(WindowOf const& window, F const& are_cleared) {
    if (!window.window().is_empty() && !are_cleared()) {
        throw ContractViolation{
            "refresh() was called while gradients hold batches that no round has reduced; call it after a round that "
            "syncs, clear the gradients, or call discard_window() before"
        };
    }
}

inline Relisted::Relisted(
    ListedModel const& before,
    ParameterList const& now,
    bool same_objects,
    std::function<bool(std::size_t)> const& is_replaced
)
    : was_(now.size()), is_equal_(now.size()), was_trained_(now.size()) {
    std::map<std::string, std::queue<std::size_t>, std::less<>> by_name;
    std::unordered_map<void const*, std::size_t> by_value;
    auto const& identities = before.identities();
    // Memory that a value has left may be another one's.
    auto const is_at = [&](void const* address, std::size_t i) {
        return address == identities[i].value && before.parameters()[i].value().data() == address;
    };
    for (std::size_t i = 0; i < identities.size(); ++i) {
        if (auto const& [name, value] = identities[i]; !name.empty()) {
            by_name[name].push(i);
        } else if (value != nullptr && is_at(value, i)) {
            by_value.emplace(value, i);
        }
    }
    for (std::size_t i = 0; i < now.size(); ++i) {
        AnyView const value = now[i].value();
        if (same_objects) {
            was_[i] = i;
        } else if (std::string_view const name = now[i].name(); !name.empty()) {
            auto const found = by_name.find(name);
            if (found != by_name.end() && !found->second.empty()) {
                was_[i] = found->second.front();
                found->second.pop();
            }
        } else if (auto const found = by_value.find(value.data()); found != by_value.end()) {
            was_[i] = found->second;
        }
        if (was_[i]) {
            ParameterState const& listed = before.listed()[*was_[i]];
            bool const is_alike =
                listed.dtype == value.dtype() && listed.extents == value.extents();
            bool const is_there = same_objects || (is_at(value.data(), *was_[i]) &&
                                                   !(is_replaced && is_replaced(*was_[i])));
            was_trained_[i] = is_alike && listed.requires_grad;
            is_equal_[i] =
                is_alike && is_there && (listed.requires_grad || !now[i].requires_grad());
        }
    }
}

inline void Relisted::agree_on(AgreementList& list, ParameterList const& now) const {
    list.begin_section("what a model before had differs: ");
    for (std::size_t i = 0; i < now.size(); ++i) {
        list.add(
            describe_parameter(now, i),
            !was_[i] ? std::string{"new"}
                     : concat("parameter ", *was_[i], " before", is_equal_[i] ? "" : ", to be sent")
        );
    }
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/participant/refresh.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Makes the model anew from a list of its parameters and then moves what it keeps of them.
template <class Comm, class Reduction, class Times>
struct Refresh<DistributedDataParallel<Comm, Reduction, Times>> {
    using Model = DistributedDataParallel<Comm, Reduction, Times>;

    static void run(Model& model) {
        model.require_outside("refresh()");
        ParameterList const list = model.listed_->parameters();
        relist(model, [&] { return list; }, model.module_->buffers(), {.same_objects = true});
    }
    template <class Parameters>
    static void run(Model& model, Parameters&& parameters) {
        model.require_outside("refresh()");
        auto const list = [&] {
            return joinable::parameters(std::forward<Parameters>(parameters));
        };
        relist(model, list, model.module_->buffers(), {});
    }
    template <class Parameters>
    static void run(Model& model, Parameters&& parameters, BufferList buffers) {
        model.require_outside("refresh()");
        auto const list = [&] {
            return joinable::parameters(std::forward<Parameters>(parameters));
        };
        relist(model, list, std::move(buffers), {.sends_buffers = true});
    }
    /// Explains arguments that are none of these.
    template <class Parameters, class Other, class... Rest>
        requires(!std::is_same_v<std::remove_cvref_t<Other>, BufferList> || sizeof...(Rest) != 0)
    static void run(Model&, Parameters&&, Other const&, Rest const&...) {
        static_assert(
            sizeof...(Rest) > 99,
            "refresh: it takes nothing, the parameters, or the parameters and buffers(ranges...); options are those "
            "of the constructor"
        );
    }

    struct How {
        bool same_objects = false;
        bool sends_buffers = false;
        /// Whether a parameter of before has got another value, perhaps at the same address.
        std::function<bool(std::size_t)> is_replaced = {};
        std::function<void()> accept = {
        }; ///< all ranks have accepted the list; the gradients are where they were
    };
    /// `list_parameters` may throw; the other ranks learn of it.
    static void relist(
        Model& model,
        std::function<ParameterList()> const& list_parameters,
        BufferList buffers,
        How how
    ) {
        auto former = std::exchange(model.model(), {});
        auto& reducer = *former.reducer_;
        Relisted relisted;
        std::optional<KeptState<Reduction>> kept;
        bool is_accepted = false;
        typename Model::Relisting const again{
            reducer.shared_reduction(),
            reducer.shared_timeline(),
            [&](ParameterList const& list, AgreementList& compared) {
                require_no_window(model.window(), [&] {
                    return are_cleared(list, device_of(model.comm_));
                });
                relisted = Relisted{*former.listed_, list, how.same_objects, how.is_replaced};
                relisted.agree_on(compared, list);
                model.module_->take_over(*former.module_, compared);
                model.former_.reserve(model.former_.size() + 1);
                kept.emplace(reducer.reduction(), device_of(model.comm_));
            },
            [&](std::size_t i) {
                return i == relisted.size() ? !how.sends_buffers : relisted.is_equal(i);
            },
            [&] {
                is_accepted = true;
                model.former_.push_back(std::move(former.reducer_));
                model.forget_window(false);
                if (how.accept) {
                    how.accept();
                }
                kept->write(reducer.reduction(), [&](std::size_t i) { return relisted.was(i); });
            }
        };
        DataParallelOptions const options = former.module_->options();
        try {
            model.list_model(list_parameters, std::move(buffers), options, again);
        } catch (...) {
            if (!is_accepted) {
                model.model() = std::move(former);
                if (kept) {
                    reducer.prepare_reduction();
                    kept->write(reducer.reduction(), [](std::size_t i) { return i; });
                }
            }
            throw;
        }
        std::erase_if(model.former_, [](auto const& one) { return !one->holds_gradients(); });
    }
};

}}} // namespace joinable::v0::detail

// ---- joinable/refresh.hpp

/// @file
/// DistributedDataParallel::refresh(), for models whose parameters become trainable or frozen, are added, or are
/// converted. In addition to <joinable/join.hpp>.
