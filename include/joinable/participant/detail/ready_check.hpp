// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <joinable/config.hpp>
#include <joinable/detail/hash.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Finds gradients that still change after their ready(i), see DataParallelOptions::verify_ready.
/// It delays the marks of a backward pass until the pass has ended, because a bucket in flight
/// changes gradients itself.
class ReadyCheck {
public:
    /// @throws ContractViolation  gradients are on a device, where the host cannot read them.
    ReadyCheck(ParameterList parameters, DeviceId device);

    void begin() noexcept { marks_.clear(); }
    void mark(std::size_t i) { marks_.push_back({i, hash_of(i)}); }

    /// Calls `mark_ready(i)` for each mark, in order. If a gradient has several marks (a static
    /// graph), the last one counts.
    /// @throws ContractViolation  a gradient has changed since it was marked.
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

    /// The hash of the elements in logical order, because a gradient may move and may have gaps
    /// between its elements.
    [[nodiscard]] std::uint64_t hash_of(std::size_t i) const;
    static void add(Hash& hash, char const* data, AnyView const& view, std::size_t dimension);

    ParameterList parameters_;
    std::vector<Mark> marks_;
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/participant/detail/ready_check.ipp>
#endif
