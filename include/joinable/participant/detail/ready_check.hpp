// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include <joinable/detail/hash.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Finds gradients that still change after their ready(i), see DataParallelOptions::verify_ready. It keeps
/// the marks of a backward pass back until the pass has ended: a bucket on its way changes gradients itself.
class ReadyCheck {
public:
    /// @throws ContractViolation  gradients are on a device, where the host reads nothing.
    ReadyCheck(ParameterList parameters, DeviceId device) : parameters_{std::move(parameters)} {
        if (device != DeviceId{}) {
            throw ContractViolation{concat(
                "DataParallelOptions::verify_ready reads gradients from the host, but this "
                "communicator's are on ",
                to_text(device),
                "; leave it off"
            )};
        }
    }

    void begin() noexcept { marks_.clear(); }
    void mark(std::size_t i) { marks_.push_back({i, hash_of(i)}); }

    /// Calls `mark_ready(i)` for each mark, in the order of the marks. Of several marks of one gradient
    /// (a static graph) the last one counts.
    /// @throws ContractViolation  a gradient is not what it was when it was marked.
    template <class F>
    void release(F const& mark_ready) {
        std::vector<bool> is_checked(parameters_.size());
        for (auto mark = marks_.rbegin(); mark != marks_.rend(); ++mark) {
            if (mark->i >= parameters_.size() || is_checked[mark->i]) {
                continue;
            }
            is_checked[mark->i] = true;
            if (hash_of(mark->i) != mark->hash) {
                throw ContractViolation{concat(
                    "the gradient of ",
                    describe_parameter(parameters_, mark->i),
                    " changed after ready(",
                    mark->i,
                    "); call ready when nothing is added to it any more (libtorch: from a hook "
                    "after accumulation, not from register_hook)"
                )};
            }
        }
        for (Mark const& mark : marks_) {
            mark_ready(mark.i);
        }
        marks_.clear();
    }

private:
    struct Mark {
        std::size_t i;
        std::uint64_t hash;
    };

    /// Of elements in logical order: a gradient may move, and have gaps between its elements.
    [[nodiscard]] std::uint64_t hash_of(std::size_t i) const {
        AnyView const gradient = i < parameters_.size() ? parameters_[i].grad() : AnyView{};
        if (!gradient || !has_memory(gradient)) {
            return 0; // what is wrong with it the reducer says
        }
        Hash hash;
        add(hash, static_cast<char const*>(gradient.data()), gradient, 0);
        return hash.value();
    }
    static void add(Hash& hash, char const* data, AnyView const& view, std::size_t dimension) {
        std::size_t const element = size_of(view.dtype());
        if (dimension == view.extents().size()) {
            hash.add(std::string_view{data, element});
            return;
        }
        for (std::size_t i = 0; i < view.extents()[dimension]; ++i) {
            add(hash, data + i * view.strides()[dimension] * element, view, dimension + 1);
        }
    }

    ParameterList parameters_;
    std::vector<Mark> marks_;
};

}}} // namespace joinable::v0::detail
