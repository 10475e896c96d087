// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include <joinable/bucket/reducer.hpp>
#include <joinable/bucket/timeline.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/participant/detail/shard_reducer.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Averages gradients on all ranks, or to their owners: a Reducer or a ShardReducer.
template <Communicator Comm>
class ShardedReduction {
public:
    explicit ShardedReduction(std::unique_ptr<Reducer<Comm>> whole) : whole_{std::move(whole)} {}
    explicit ShardedReduction(std::unique_ptr<ShardReducer<Comm>> parts)
        : parts_{std::move(parts)} {}

    template <class Unused>
    void prepare_for_backward(double factor, Unused const& unused, int order_source) {
        visit([&](auto& r) { r.prepare_for_backward(factor, unused, order_source); });
    }
    void mark_accumulated(std::size_t i) {
        visit([&](auto& r) { r.mark_accumulated(i); });
    }
    void mark_ready(std::size_t i) {
        visit([&](auto& r) { r.mark_ready(i); });
    }
    void contribute_nothing() {
        visit([](auto& r) { r.contribute_nothing(); });
    }
    void finalize_backward() {
        visit([](auto& r) { r.finalize_backward(); });
    }
    void contribute_zeros(int order_source = 0, bool has_joined = false) {
        visit([&](auto& r) { r.contribute_zeros(order_source, has_joined); });
    }
    void contribute_accumulated(double factor, int order_source = 0, bool has_joined = false) {
        visit([&](auto& r) { r.contribute_accumulated(factor, order_source, has_joined); });
    }
    void register_memory() {
        visit([](auto& r) { r.register_memory(); });
    }
    void begin_guard() noexcept {
        visit([](auto& r) { r.begin_guard(); });
    }
    void end_guard() {
        visit([](auto& r) { r.end_guard(); });
    }
    void end_ranges() noexcept {
        visit([](auto& r) { r.end_ranges(); });
    }
    [[nodiscard]] NoTimeline& timeline() noexcept { return timeline_; }

private:
    template <class F>
    void visit(F const& f) {
        whole_ ? f(*whole_) : f(*parts_);
    }

    std::unique_ptr<Reducer<Comm>> whole_;
    std::unique_ptr<ShardReducer<Comm>> parts_;
    [[no_unique_address]] NoTimeline timeline_;
};

}}} // namespace joinable::v0::detail
