// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>

namespace joinable { inline namespace v0 {

namespace detail {

template <class T>
concept times_rounds = requires(T& timeline, bool is_shadow) {
    { timeline.round(is_shadow) } -> std::move_constructible;
};
template <class T>
concept times_buckets = requires(T& timeline, std::size_t n) {
    { timeline.bucket(n, n) } -> std::move_constructible;
};

} // namespace detail

/// Who is told when a rank's rounds and buckets begin and end: what a profiler shows. Each expression
/// begins a range of time and returns an object with which it ends: also where a round fails, and in
/// any order.
///
/// `timeline` is an lvalue of `T`.
/// | expression                      | begins                                                       |
/// |---------------------------------|--------------------------------------------------------------|
/// | `timeline.round(is_shadow)`     | a training round: from where it is opened, or shadowed, to   |
/// |                                 | its end on this rank                                         |
/// | `timeline.bucket(index, bytes)` | a collective of a bucket, or of a part of it: from its launch|
/// |                                 | to its wait, as the host sees it                             |
///
/// Local; called by the thread that runs the round. Models: NoTimeline, NvtxTimeline (nvtx.hpp).
template <class T>
concept Timeline =
    std::default_initializable<T> && detail::times_rounds<T> && detail::times_buckets<T>;

/// Tells nobody, and costs nothing.
struct NoTimeline {
    struct Range {};
    static constexpr Range round(bool /*is_shadow*/) noexcept { return {}; }
    static constexpr Range bucket(std::size_t /*index*/, std::size_t /*bytes*/) noexcept {
        return {};
    }
};

}} // namespace joinable::v0
