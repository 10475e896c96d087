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
/// | `work.wait()` |                     | returns when this rank's buffers are final; throws the   |
/// |               |                     | error that ended the collective; may be called again     |
/// | `work.test()` | convertible to bool | makes progress without blocking; true once wait() would  |
/// |               |                     | return at once                                           |
///
/// A loop of test() ends as wait() does. In this library it throws TimedOut while some rank has not
/// arrived, or a process has not done its part, once the time between tests adds up to the deadline.
/// Each gap counts as at most 10 ms.
///
/// A work may have a member `bool progress()`: test() without that deadline. It is for callers that
/// test occasionally during other work and finally wait.
///
/// Required, but not checkable: the buffers stay alive until wait() has returned. The destructor of
/// unfinished work waits; during unwinding it aborts. Either way no peer touches freed memory.
/// Models: CompletedWork, ThreadWork.
template <class W>
concept Work = std::move_constructible<W> && detail::has_wait<W> && detail::has_test<W>;

namespace detail {

/// Tests without a deadline, for a caller that will finally wait.
template <Work W>
[[nodiscard]] bool make_progress(W& work) {
    if constexpr (requires { work.progress(); }) {
        return work.progress();
    } else {
        return work.test();
    }
}

} // namespace detail

/// A work that was complete when it started.
struct CompletedWork {
    void wait() const noexcept {}
    [[nodiscard]] bool test() const noexcept { return true; }
};

}} // namespace joinable::v0
