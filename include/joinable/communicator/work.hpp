// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>

namespace joinable { inline namespace v0 {

namespace detail {

template <class W>
concept has_wait = requires(W& work) { work.wait(); };

template <class W>
concept has_test = requires(W& work) {
    { work.test() } -> std::convertible_to<bool>;
};

} // namespace detail

/// A collective that was started and may not be complete.
///
/// `work` is an lvalue of `W`.
/// | expression    | result              | meaning                                                  |
/// |---------------|---------------------|----------------------------------------------------------|
/// | `work.wait()` |                     | returns when this rank's buffers are final; throws what  |
/// |               |                     | made the collective fail; waiting twice is fine          |
/// | `work.test()` | convertible to bool | makes progress without blocking; true once wait() would  |
/// |               |                     | return at once                                           |
///
/// Not checkable, still required: the buffers stay alive until wait() returned. A work that is
/// destroyed unfinished waits, and while unwinding aborts, so that no peer touches freed memory.
/// Models: CompletedWork, ThreadWork.
template <class W>
concept Work = std::move_constructible<W> && detail::has_wait<W> && detail::has_test<W>;

/// A work that was complete when it was started.
struct CompletedWork {
    void wait() const noexcept {}
    [[nodiscard]] bool test() const noexcept { return true; }
};

}} // namespace joinable::v0
