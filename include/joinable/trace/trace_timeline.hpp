// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <joinable/bucket/timeline.hpp>

namespace joinable { inline namespace v0 {

/// The kind of a TraceEvent.
enum class TraceKind : std::uint32_t {
    round,        ///< a training round with an input of this rank; `value` is its number
    shadow_round, ///< a training round that this rank shadowed; `value` is its number
    forward,
    backward,
    roll_call, ///< from announcing a round to its verdict
    wait,      ///< blocked in a roll call
    bucket,    ///< the collective of bucket `index`, of `value` bytes; on a device only its launch
    sample,    ///< a number of the program at the moment `begin`, see TraceTimeline::sample()
};

/// A range of time on one rank. Times are nanoseconds of std::chrono::steady_clock. Plain bytes
/// without gaps, so that ranks can send it.
struct TraceEvent {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    std::uint64_t value = 0;
    std::uint32_t index = 0;
    TraceKind kind = TraceKind::round;

    /// The number of a sample.
    [[nodiscard]] constexpr double number() const noexcept { return std::bit_cast<double>(value); }

    friend constexpr bool operator==(TraceEvent const&, TraceEvent const&) = default;
};

/// Records rounds, passes, buckets and roll calls of one rank, in memory that start() reserves.
/// write_trace() writes the events of all ranks to a file for Perfetto; write_picture() draws them.
///
/// @code
/// joinable::DistributedDataParallel<Comm, joinable::AllReduce, joinable::TraceTimeline> ddp{
///     comm, model.parameters()};
/// ddp.timeline().start(100'000);
/// // ... train ...
/// joinable::write_trace(comm, ddp.timeline(), "run.json");
/// @endcode
///
/// Nothing is recorded before start(); a range then costs one test. A recorded range costs two readings of
/// the clock and no allocation. (NoTimeline costs nothing.) A range that ends when the memory is full is
/// counted but not kept, so a full trace shows the beginning of the run. Rounds, including shadowed ones,
/// are numbered from 0 during the lifetime of this object, so a round has the same number on all ranks. A forward pass
/// that is made again, outside of a guard or after its notice was refused, counts again, and a group of groups_of()
/// without an active rank counts none.
///
/// Times are those of the host. On a device, a bucket's range ends when the engine's stream has been told to
/// wait for the bucket, which says nothing about when the device reduces it. Use NvtxTimeline with a profiler.
///
/// Local; one thread at a time. It must outlive its ranges.
class TraceTimeline {
    using Clock = std::chrono::steady_clock;

public:
    /// Recorded when it ends.
    class [[nodiscard]] Range {
    public:
        Range(Range&& other) noexcept
            : timeline_{std::exchange(other.timeline_, nullptr)}, start_{other.start_},
              event_{other.event_} {}
        Range& operator=(Range&&) = delete;
        ~Range() {
            if (timeline_ != nullptr && timeline_->is_recording_ && timeline_->starts_ == start_) {
                event_.end = ticks(Clock::now());
                timeline_->add(event_);
            }
        }

    private:
        friend class TraceTimeline;
        Range(
            TraceTimeline& timeline,
            TraceKind kind,
            std::uint64_t value = 0,
            std::uint32_t index = 0
        ) noexcept
            : timeline_{timeline.is_recording_ ? &timeline : nullptr}, start_{timeline.starts_} {
            if (timeline_ != nullptr) {
                event_ = {ticks(Clock::now()), 0, value, index, kind};
            }
        }

        TraceTimeline* timeline_;
        std::uint64_t start_; ///< by which it is recorded
        TraceEvent event_;
    };

    TraceTimeline() = default;
    TraceTimeline(TraceTimeline const&) = delete;
    TraceTimeline& operator=(TraceTimeline const&) = delete;

    /// Discards recorded events and records up to `capacity` new ones, of 32 bytes each. A training round
    /// takes four, and one more for each bucket, each wait and each sample.
    /// @throws std::bad_alloc  nothing has changed.
    void start(std::size_t capacity) {
        std::vector<TraceEvent> events(capacity); // writes to all pages, so none is mapped later
        events_.swap(events);
        count_ = 0;
        dropped_ = 0;
        ++starts_;
        is_recording_ = true;
    }
    /// Records nothing more, nor the ranges that have begun. Recorded events stay.
    void stop() noexcept { is_recording_ = false; }

    /// Records a number of the program, such as the loss of a batch: pictures draw its mean over ranks as a
    /// curve below the lanes, and traces for Perfetto have it as a counter of the rank.
    void sample(double number) noexcept {
        if (is_recording_) {
            std::int64_t const now = ticks(Clock::now());
            add({now, now, std::bit_cast<std::uint64_t>(number), 0, TraceKind::sample});
        }
    }

    /// The recorded events, in the order in which they ended.
    [[nodiscard]] std::span<TraceEvent const> events() const noexcept {
        return {events_.data(), count_};
    }
    /// How many events ended after the memory was full.
    [[nodiscard]] std::uint64_t dropped() const noexcept { return dropped_; }

    // The members of a Timeline.

    Range round(bool is_shadow) noexcept {
        return {*this, is_shadow ? TraceKind::shadow_round : TraceKind::round, rounds_++};
    }
    Range bucket(std::size_t index, std::size_t bytes) noexcept {
        return {*this, TraceKind::bucket, bytes, static_cast<std::uint32_t>(index)};
    }
    Range forward() noexcept { return {*this, TraceKind::forward}; }
    Range backward() noexcept { return {*this, TraceKind::backward}; }
    Range roll_call() noexcept { return {*this, TraceKind::roll_call}; }
    void waited(Clock::time_point begin, Clock::time_point end) noexcept {
        if (is_recording_) {
            add({ticks(begin), ticks(end), 0, 0, TraceKind::wait});
        }
    }

private:
    static std::int64_t ticks(Clock::time_point time) noexcept {
        return std::chrono::nanoseconds{time.time_since_epoch()}.count();
    }
    void add(TraceEvent const& event) noexcept {
        if (count_ < events_.size()) {
            events_[count_++] = event;
        } else {
            ++dropped_;
        }
    }

    std::vector<TraceEvent> events_; ///< room for the capacity
    std::size_t count_ = 0;          ///< recorded events, at the front
    std::uint64_t dropped_ = 0;
    std::uint64_t rounds_ = 0;
    std::uint64_t starts_ = 0;
    bool is_recording_ = false;
};
static_assert(Timeline<TraceTimeline>);

}} // namespace joinable::v0
