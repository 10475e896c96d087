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
/// |               |                     | return at once. A loop of tests ends as wait() does: ours |
/// |               |                     | throw TimedOut once the time between tests of this work, |
/// |               |                     | each gap counted as at most 10 ms, adds up to the        |
/// |               |                     | deadline, while some rank has not arrived                |
///
/// A work may have a member `bool progress()`, which is test() without that deadline: for callers that
/// test now and then amid other work, and wait in the end.
///
/// Not checkable, still required: the buffers stay alive until wait() returned. A work that is
/// destroyed unfinished waits, and while unwinding aborts, so that no peer touches freed memory.
/// Models: CompletedWork, ThreadWork.
template <class W>
concept Work = std::move_constructible<W> && detail::has_wait<W> && detail::has_test<W>;

namespace detail {

/// What a caller tests that will wait in the end: it has no deadline of its own.
template <Work W>
[[nodiscard]] bool make_progress(W& work) {
    if constexpr (requires { work.progress(); }) {
        return work.progress();
    } else {
        return work.test();
    }
}

} // namespace detail

/// A work that was complete when it was started.
struct CompletedWork {
    void wait() const noexcept {}
    [[nodiscard]] bool test() const noexcept { return true; }
};

}} // namespace joinable::v0
