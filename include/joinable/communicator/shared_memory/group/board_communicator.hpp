// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <utility>
#include <vector>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/checks.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/shared_memory/engine/helper.hpp>
#include <joinable/communicator/shared_memory/group/group.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable::inline v0::detail {

/// The members that communicators over a board have in common. `Rank` is a GroupRank, and `Work`
/// what its collectives and messages return. What the members promise is said of the communicators.
template <class Rank, class Work>
class BoardCommunicator {
public:
    BoardCommunicator(BoardCommunicator const&) = delete;
    BoardCommunicator& operator=(BoardCommunicator const&) = delete;

    [[nodiscard]] int rank() const noexcept { return rank_.rank(); }
    [[nodiscard]] int size() const noexcept { return rank_.size(); }

    /// In place.
    Work all_reduce(Buffer buffer, ReduceOp op) {
        check_memory(buffer);
        check_reduction(buffer, op);
        return post({Collective::all_reduce, buffer.dtype, op, 0, buffer.count}, buffer, buffer);
    }

    /// In place, of each rank's buffer times a factor of its own, in one pass. Only with `sum`. Products
    /// are rounded before they are added, those of 16-bit numbers to float.
    Work all_reduce(Buffer buffer, ReduceOp op, double factor) {
        check_memory(buffer);
        check_scaled(buffer, op);
        Descriptor said{Collective::scaled_all_reduce, buffer.dtype, op, 0, buffer.count};
        said.factor = factor;
        return post(said, buffer, buffer);
    }

    /// In place at the root; the other buffers keep what they have.
    Work reduce(Buffer buffer, ReduceOp op, int root) {
        check_memory(buffer);
        check_reduction(buffer, op);
        check_root(root, size());
        return post({Collective::reduce, buffer.dtype, op, root, buffer.count}, buffer, buffer);
    }

    Work broadcast(Buffer buffer, int root) {
        check_memory(buffer);
        check_root(root, size());
        return post(
            {Collective::broadcast, buffer.dtype, ReduceOp::sum, root, buffer.count}, buffer, buffer
        );
    }

    void barrier() { post({}, {}, {}).wait(); }

    /// `out` is `size()` times `in`; `in` may be this rank's part of `out`.
    Work all_gather(ConstBuffer in, Buffer out) {
        check_share(in, out, size());
        check_place(in, out, in.count * index());
        return post({Collective::all_gather, in.dtype, ReduceOp::sum, 0, in.count}, in, out);
    }
    /// Rank r contributes counts[r] elements; the same counts on every rank.
    Work all_gather(ConstBuffer in, Buffer out, std::span<std::size_t const> counts) {
        check_counts(counts, in, out, rank(), size());
        check_place(in, out, offset_of(counts, index()));
        return post_counts(
            {Collective::all_gather, in.dtype},
            in,
            out,
            [&](auto sends, auto expects) {
                std::fill(sends.begin(), sends.end(), in.count);
                std::copy(counts.begin(), counts.end(), expects.begin());
            }
        );
    }

    /// `in` is `size()` times `out`; `out` may be this rank's part of `in`.
    Work reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op) {
        check_share(out, in, size());
        check_place(out, in, out.count * index());
        check_reduction(in, op);
        return post({Collective::reduce_scatter, in.dtype, op, 0, out.count}, in, out);
    }
    /// Rank r receives counts[r] elements; the same counts on every rank.
    Work
    reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op, std::span<std::size_t const> counts) {
        check_counts(counts, out, in, rank(), size());
        check_place(out, in, offset_of(counts, index()));
        check_reduction(in, op);
        return post_counts(
            {Collective::reduce_scatter, in.dtype, op},
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
    Work gather(ConstBuffer in, Buffer out, int root) {
        check_memory(in);
        check_root(root, size());
        if (rank() == root) {
            check_share(in, out, size());
            check_place(in, out, in.count * index());
        }
        return post({Collective::gather, in.dtype, ReduceOp::sum, root, in.count}, in, out);
    }
    /// Rank r contributes counts[r] elements; only the root's counts are looked at.
    Work gather(ConstBuffer in, Buffer out, int root, std::span<std::size_t const> counts) {
        check_memory(in);
        check_root(root, size());
        if (rank() == root) {
            check_counts(counts, in, out, rank(), size());
            check_place(in, out, offset_of(counts, index()));
        }
        return post_counts(
            {Collective::gather, in.dtype, ReduceOp::sum, root},
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
    Work scatter(ConstBuffer in, Buffer out, int root) {
        check_memory(out);
        check_root(root, size());
        if (rank() == root) {
            check_share(out, in, size());
            check_place(out, in, out.count * index());
        }
        return post({Collective::scatter, out.dtype, ReduceOp::sum, root, out.count}, in, out);
    }
    /// Rank r receives counts[r] elements; only the root's counts are looked at.
    Work scatter(ConstBuffer in, Buffer out, int root, std::span<std::size_t const> counts) {
        check_memory(out);
        check_root(root, size());
        if (rank() == root) {
            check_counts(counts, out, in, rank(), size());
            check_place(out, in, offset_of(counts, index()));
        }
        return post_counts(
            {Collective::scatter, out.dtype, ReduceOp::sum, root},
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
    Work all_to_all(ConstBuffer in, Buffer out) {
        check_parts(in, out, size());
        check_apart(in, out);
        std::size_t const share = in.count / static_cast<std::size_t>(size());
        return post({Collective::all_to_all, in.dtype, ReduceOp::sum, 0, share}, in, out);
    }
    /// counts_in[r] elements go to rank r, counts_out[r] come from it.
    Work all_to_all(
        ConstBuffer in,
        Buffer out,
        std::span<std::size_t const> counts_in,
        std::span<std::size_t const> counts_out
    ) {
        check_same_dtype(in, out);
        check_counts(counts_in, in, size());
        check_counts(counts_out, out, size());
        check_apart(in, out);
        return post_counts(
            {Collective::all_to_all, in.dtype},
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
    Work send(ConstBuffer buffer, int to, int tag = 0) {
        check_memory(buffer);
        check_rank("destination", to, size());
        // A send is only read from; both sides of a message share one type.
        Buffer const read{const_cast<void*>(buffer.data), buffer.count, buffer.dtype};
        return {rank_, rank_.post_message(true, to, tag, read)};
    }
    /// Not collective. The other side of send().
    Work receive(Buffer buffer, int from, int tag = 0) {
        check_memory(buffer);
        check_rank("source", from, size());
        return {rank_, rank_.post_message(false, from, tag, buffer)};
    }

    /// Local. The first reason wins; every wait that cannot complete any more throws it.
    void abort(AbortReason const& reason) { rank_.abort(reason); }
    [[nodiscard]] bool is_spent() const noexcept { return rank_.group().is_spent(); }

    /// Local; for waits that start later. Returns the deadline that was in force.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return rank_.set_deadline(deadline);
    }
    /// Local. Whoever waits for this rank does so for one more deadline from now.
    void keep_alive() noexcept { rank_.keep_alive(); }

    /// Local. Who has not arrived in this rank's oldest unfinished collective.
    [[nodiscard]] std::vector<int> missing() const { return rank_.missing(); }

    /// For ProgressThread.
    [[nodiscard]] Helper helper() noexcept { return {rank_.group().board(), rank_.rank()}; }

protected:
    /// A place in a group that split() makes.
    struct Seat {
        Group group;
        int rank;
    };

    template <class... Arguments>
    explicit BoardCommunicator(Arguments&&... arguments)
        : rank_{std::forward<Arguments>(arguments)...} {}
    /// The rank leaves its group: whoever waits for it gets PeerFailed.
    ~BoardCommunicator() {
        if (std::uncaught_exceptions() > exceptions_) {
            rank_.abort_for_exception("the scope of its communicator");
        }
        rank_.group().leave(rank());
    }

    /// What split() does before there is a communicator.
    [[nodiscard]] Seat take_seat(int color, int key) {
        if (color < 0) {
            throw ContractViolation{
                concat("split needs a color of at least 0, but was given ", color)
            };
        }
        std::array<std::int32_t, 2> const mine{color, key};
        std::vector<std::array<std::int32_t, 2>> all(static_cast<std::size_t>(size()));
        all_gather({mine.data(), 2, DType::i32}, {all.data(), 2 * all.size(), DType::i32}).wait();
        std::vector<int> members;
        for (int other = 0; other < size(); ++other) {
            if (all[static_cast<std::size_t>(other)][0] == color) {
                members.push_back(other);
            }
        }
        std::sort(members.begin(), members.end(), [&](int a, int b) {
            return std::pair{all[static_cast<std::size_t>(a)][1], a} <
                   std::pair{all[static_cast<std::size_t>(b)][1], b};
        });
        int const maker = members.front();
        std::uint64_t const made = rank() == maker ? rank_.make_group(members) : 0;
        std::vector<std::uint64_t> places(all.size());
        all_gather({&made, 1, DType::u64}, {places.data(), places.size(), DType::u64}).wait();
        std::uint64_t const place = places[static_cast<std::size_t>(maker)];
        if (place == 0) {
            throw CommunicationError{concat(
                "rank ",
                maker,
                " has no memory left that it shares, for a group of ",
                members.size(),
                " ranks: wait for what is under way, or leave groups before making new ones"
            )};
        }
        auto const seat = std::find(members.begin(), members.end(), rank());
        return {rank_.group().group_at(place), static_cast<int>(seat - members.begin())};
    }

    Rank rank_;

private:
    int exceptions_ = std::uncaught_exceptions();

    [[nodiscard]] std::size_t index() const noexcept { return static_cast<std::size_t>(rank()); }

    Work post(Descriptor const& said, ConstBuffer in, Buffer out) {
        return post(said, in, out, [](auto, auto) {});
    }
    template <class Tell>
    Work post_counts(Descriptor said, ConstBuffer in, Buffer out, Tell const& tell) {
        said.has_counts = true;
        return post(said, in, out, [&](auto sends, auto expects) {
            std::fill(sends.begin(), sends.end(), std::size_t{0});
            std::fill(expects.begin(), expects.end(), std::size_t{0});
            tell(sends, expects);
        });
    }
    /// Leaves out what the collective does not look at on this rank.
    template <class Tell>
    Work post(Descriptor const& said, ConstBuffer in, Buffer out, Tell const& tell) {
        if (rank() != said.root) {
            switch (said.collective) {
            case Collective::broadcast:
            case Collective::scatter: in = {}; break;
            case Collective::reduce:
            case Collective::gather: out = {}; break;
            default: break;
            }
        }
        return {rank_, rank_.post(said, in, out, tell)};
    }
};

} // namespace joinable::inline v0::detail
