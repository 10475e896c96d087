// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <joinable/config.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/elements_on_host.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// When marks reach the reducer, if gradients are checked.
enum class CheckedMarks : std::uint8_t {
    after_pass, ///< where a bucket in flight changes gradients itself
    at_once,    ///< where the reducer leaves gradients as they are, or releases them
};

/// Finds gradients that still change after their ready(i), see DataParallelOptions::verify_ready.
class ReadyCheck {
public:
    /// @throws ContractViolation  gradients are on a device, where the host cannot read them.
    ReadyCheck(ParameterList parameters, Device& device, CheckedMarks marks);

    void begin() noexcept { marks_.clear(); }
    /// Calls `mark_ready(i)`, now or in release().
    template <class F>
    void mark(std::size_t i, F const& mark_ready) {
        if (is_at_once_) {
            mark_ready(i);
        }
        marks_.push_back({i, hash_of(i)}); // of no gradient, if it was released
    }

    /// Calls `mark_ready(i)` for each mark that mark() has kept, in order. If a gradient has several
    /// marks (a static graph), the last one counts.
    /// @throws ContractViolation  a gradient has changed since it was marked, or was made anew.
    template <class F>
    void release(F const& mark_ready) {
        require_unchanged();
        for (std::size_t k = 0; !is_at_once_ && k < marks_.size(); ++k) {
            mark_ready(marks_[k].i);
        }
        marks_.clear();
    }

private:
    static constexpr std::uint64_t no_gradient = 0;

    struct Mark {
        std::size_t i;
        std::uint64_t hash;
    };

    void require_unchanged();
    /// The hash of the elements in logical order, because a gradient may move and may have gaps
    /// between its elements.
    [[nodiscard]] std::uint64_t hash_of(std::size_t i);

    ParameterList parameters_;
    ElementsOnHost elements_;
    bool is_at_once_;
    std::vector<Mark> marks_;
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/participant/detail/impl/ready_check.ipp>
#endif
