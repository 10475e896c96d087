// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/checks.hpp>
#include <joinable/communicator/detail/thread_rank.hpp>
#include <joinable/communicator/thread_work.hpp>
#include <joinable/detail/text.hpp>

namespace joinable::inline v0 {

/// Ranks are threads of this process: made by run_threads(), one object per rank.
///
/// Reductions combine every element in rank order, so results are the same bit for bit whoever
/// arrives first. Everything is asynchronous: whoever waits or tests does the work for all, so a
/// rank that computes holds up nobody. Up to 64 collectives are in flight, further ones finish the
/// oldest. Ranks compare what they are about to do in every collective. No allocation, no lock and
/// no system call in a collective unless a rank waits long.
///
/// All members that take buffers throw ContractViolation before any data moves when counts or
/// dtypes do not fit, a root is no rank, memory is missing or overlaps, or floats are combined bit
/// by bit. Buffers are the caller's until the work has been waited for; spans of counts are copied.
class ThreadCommunicator {
public:
    /// For run_threads and split.
    ThreadCommunicator(
        std::shared_ptr<detail::ThreadGroup> group,
        int rank,
        std::chrono::nanoseconds deadline = default_deadline
    ) noexcept
        : rank_{std::move(group), rank} {
        rank_.set_deadline(deadline);
    }
    ThreadCommunicator(ThreadCommunicator const&) = delete;
    ThreadCommunicator& operator=(ThreadCommunicator const&) = delete;

    /// The rank leaves its group: whoever waits for it gets PeerFailed.
    ~ThreadCommunicator() {
        if (std::uncaught_exceptions() > exceptions_) {
            rank_.abort_for_exception("the scope of its communicator");
        }
        rank_.group().leave(rank());
    }

    [[nodiscard]] int rank() const noexcept { return rank_.rank(); }
    [[nodiscard]] int size() const noexcept { return rank_.size(); }

    /// In place.
    ThreadWork all_reduce(Buffer buffer, ReduceOp op) {
        detail::check_memory(buffer);
        detail::check_reduction(buffer, op);
        return post(
            {detail::Collective::all_reduce, buffer.dtype, op, 0, buffer.count},
            buffer.data,
            buffer.data
        );
    }

    /// In place at the root; the other buffers keep what they have.
    ThreadWork reduce(Buffer buffer, ReduceOp op, int root) {
        detail::check_memory(buffer);
        detail::check_reduction(buffer, op);
        detail::check_root(root, size());
        return post(
            {detail::Collective::reduce, buffer.dtype, op, root, buffer.count},
            buffer.data,
            buffer.data
        );
    }

    ThreadWork broadcast(Buffer buffer, int root) {
        detail::check_memory(buffer);
        detail::check_root(root, size());
        return post(
            {detail::Collective::broadcast, buffer.dtype, ReduceOp::sum, root, buffer.count},
            buffer.data,
            buffer.data
        );
    }

    void barrier() { post({}, nullptr, nullptr).wait(); }

    /// `out` is `size()` times `in`; `in` may be this rank's part of `out`.
    ThreadWork all_gather(ConstBuffer in, Buffer out) {
        detail::check_share(in, out, size());
        detail::check_place(in, out, in.count * index());
        return post(
            {detail::Collective::all_gather, in.dtype, ReduceOp::sum, 0, in.count},
            in.data,
            out.data
        );
    }
    /// Rank r contributes counts[r] elements; the same counts on every rank.
    ThreadWork all_gather(ConstBuffer in, Buffer out, std::span<std::size_t const> counts) {
        detail::check_counts(counts, in, out, rank(), size());
        detail::check_place(in, out, detail::offset_of(counts, index()));
        return post_counts(
            {detail::Collective::all_gather, in.dtype},
            in,
            out,
            [&](auto sends, auto expects) {
                std::fill(sends.begin(), sends.end(), in.count);
                std::copy(counts.begin(), counts.end(), expects.begin());
            }
        );
    }

    /// `in` is `size()` times `out`; `out` may be this rank's part of `in`.
    ThreadWork reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op) {
        detail::check_share(out, in, size());
        detail::check_place(out, in, out.count * index());
        detail::check_reduction(in, op);
        return post(
            {detail::Collective::reduce_scatter, in.dtype, op, 0, out.count}, in.data, out.data
        );
    }
    /// Rank r receives counts[r] elements; the same counts on every rank.
    ThreadWork
    reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op, std::span<std::size_t const> counts) {
        detail::check_counts(counts, out, in, rank(), size());
        detail::check_place(out, in, detail::offset_of(counts, index()));
        detail::check_reduction(in, op);
        return post_counts(
            {detail::Collective::reduce_scatter, in.dtype, op},
            in,
            out,
            [&](auto sends, auto expects) {
                std::copy(counts.begin(), counts.end(), sends.begin());
                std::fill(expects.begin(), expects.end(), out.count);
            }
        );
    }

    /// At the root `out` is `size()` times `in`, and `in` may be its part; elsewhere `out` is not
    /// looked at.
    ThreadWork gather(ConstBuffer in, Buffer out, int root) {
        detail::check_memory(in);
        detail::check_root(root, size());
        if (rank() == root) {
            detail::check_share(in, out, size());
            detail::check_place(in, out, in.count * index());
        }
        return post(
            {detail::Collective::gather, in.dtype, ReduceOp::sum, root, in.count}, in.data, out.data
        );
    }
    /// Rank r contributes counts[r] elements; only the root's counts are looked at.
    ThreadWork gather(ConstBuffer in, Buffer out, int root, std::span<std::size_t const> counts) {
        detail::check_memory(in);
        detail::check_root(root, size());
        if (rank() == root) {
            detail::check_counts(counts, in, out, rank(), size());
            detail::check_place(in, out, detail::offset_of(counts, index()));
        }
        return post_counts(
            {detail::Collective::gather, in.dtype, ReduceOp::sum, root},
            in,
            out,
            [&](auto sends, auto expects) {
                sends[static_cast<std::size_t>(root)] = in.count;
                if (rank() == root) {
                    std::copy(counts.begin(), counts.end(), expects.begin());
                }
            }
        );
    }

    /// At the root `in` is `size()` times `out`, and `out` may be its part; elsewhere `in` is not
    /// looked at.
    ThreadWork scatter(ConstBuffer in, Buffer out, int root) {
        detail::check_memory(out);
        detail::check_root(root, size());
        if (rank() == root) {
            detail::check_share(out, in, size());
            detail::check_place(out, in, out.count * index());
        }
        return post(
            {detail::Collective::scatter, out.dtype, ReduceOp::sum, root, out.count},
            in.data,
            out.data
        );
    }
    /// Rank r receives counts[r] elements; only the root's counts are looked at.
    ThreadWork scatter(ConstBuffer in, Buffer out, int root, std::span<std::size_t const> counts) {
        detail::check_memory(out);
        detail::check_root(root, size());
        if (rank() == root) {
            detail::check_counts(counts, out, in, rank(), size());
            detail::check_place(out, in, detail::offset_of(counts, index()));
        }
        return post_counts(
            {detail::Collective::scatter, out.dtype, ReduceOp::sum, root},
            in,
            out,
            [&](auto sends, auto expects) {
                if (rank() == root) {
                    std::copy(counts.begin(), counts.end(), sends.begin());
                }
                expects[static_cast<std::size_t>(root)] = out.count;
            }
        );
    }

    /// Part r of `in` goes to rank r, where it is the part of this rank in `out`. Both have the
    /// same count, a multiple of `size()`; they do not overlap.
    ThreadWork all_to_all(ConstBuffer in, Buffer out) {
        detail::check_parts(in, out, size());
        detail::check_apart(in, out);
        std::size_t const share = in.count / static_cast<std::size_t>(size());
        return post(
            {detail::Collective::all_to_all, in.dtype, ReduceOp::sum, 0, share}, in.data, out.data
        );
    }
    /// counts_in[r] elements go to rank r, counts_out[r] come from it.
    ThreadWork all_to_all(
        ConstBuffer in,
        Buffer out,
        std::span<std::size_t const> counts_in,
        std::span<std::size_t const> counts_out
    ) {
        detail::check_same_dtype(in, out);
        detail::check_counts(counts_in, in, size());
        detail::check_counts(counts_out, out, size());
        detail::check_apart(in, out);
        return post_counts(
            {detail::Collective::all_to_all, in.dtype},
            in,
            out,
            [&](auto sends, auto expects) {
                std::copy(counts_in.begin(), counts_in.end(), sends.begin());
                std::copy(counts_out.begin(), counts_out.end(), expects.begin());
            }
        );
    }

    /// Not collective. Complete when rank `to` has received it: messages between two ranks with one
    /// tag arrive in their order. Both sides say the same count and dtype, else Mismatch on both.
    ThreadWork send(ConstBuffer buffer, int to, int tag = 0) {
        detail::check_memory(buffer);
        detail::check_rank("destination", to, size());
        // A send is only read from; both sides of a message share one type.
        Buffer const read{const_cast<void*>(buffer.data), buffer.count, buffer.dtype};
        return {rank_, rank_.post_message(true, to, tag, read), to};
    }
    /// Not collective. The other side of send().
    ThreadWork receive(Buffer buffer, int from, int tag = 0) {
        detail::check_memory(buffer);
        detail::check_rank("source", from, size());
        return {rank_, rank_.post_message(false, from, tag, buffer), from};
    }

    /// Collective, blocks. The ranks of one `color` (>= 0) form a group, in the order of their
    /// `key`, then of their rank here. It inherits the deadline. An abort of this communicator
    /// reaches it, not the other way round; errors name the ranks of the group in which they occur.
    [[nodiscard]] ThreadCommunicator split(int color, int key) {
        if (color < 0) {
            throw ContractViolation{
                detail::concat("split needs a color of at least 0, but was given ", color)
            };
        }
        std::array<std::int32_t, 2> const mine{color, key};
        std::vector<std::array<std::int32_t, 2>> all(static_cast<std::size_t>(size()));
        auto work =
            all_gather({mine.data(), 2, DType::i32}, {all.data(), 2 * all.size(), DType::i32});
        work.wait();
        auto const before = [&](int a, int b) {
            return std::pair{all[static_cast<std::size_t>(a)][1], a} <
                   std::pair{all[static_cast<std::size_t>(b)][1], b};
        };
        int members = 0;
        int place = 0;
        for (int other = 0; other < size(); ++other) {
            bool const is_member = all[static_cast<std::size_t>(other)][0] == color;
            members += is_member ? 1 : 0;
            place += is_member && before(other, rank()) ? 1 : 0;
        }
        return {rank_.group().child(work.sequence_, color, members), place, rank_.deadline()};
    }

    /// Local. The first reason wins; every wait that cannot complete any more throws it.
    void abort(AbortReason const& reason) { rank_.group().abort(reason); }
    [[nodiscard]] bool is_spent() const noexcept { return rank_.group().board().is_spent(); }

    /// Local; for waits that start later. Returns the deadline that was in force.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return rank_.set_deadline(deadline);
    }
    /// Local. Whoever waits for this rank does so for one more deadline from now.
    void keep_alive() noexcept { rank_.keep_alive(); }

    /// Local. Who has not arrived in this rank's oldest unfinished collective.
    [[nodiscard]] std::vector<int> missing() const { return rank_.missing(); }

private:
    [[nodiscard]] std::size_t index() const noexcept { return static_cast<std::size_t>(rank()); }

    ThreadWork post(detail::Descriptor const& said, void const* in, void* out) {
        return {rank_, rank_.post(said, in, out, [](auto, auto) {})};
    }
    template <class Tell>
    ThreadWork post_counts(detail::Descriptor said, ConstBuffer in, Buffer out, Tell const& tell) {
        said.has_counts = true;
        return {rank_, rank_.post(said, in.data, out.data, [&](auto sends, auto expects) {
                    std::fill(sends.begin(), sends.end(), std::size_t{0});
                    std::fill(expects.begin(), expects.end(), std::size_t{0});
                    tell(sends, expects);
                })};
    }

    detail::ThreadRank rank_;
    int exceptions_ = std::uncaught_exceptions();
};

} // namespace joinable::inline v0
