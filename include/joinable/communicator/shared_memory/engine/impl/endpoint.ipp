// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/shared_memory/engine/endpoint.hpp>

#include <algorithm>
#include <bit>

#include <joinable/communicator/shared_memory/engine/exchange.hpp>

namespace joinable { inline namespace v0 { namespace detail {

template <class Group, class Memory>
Endpoint<Group, Memory>::Endpoint(Group group, int rank, Memory memory) noexcept
    : group_{group}, board_{group_.board()}, rank_{rank}, memory_{std::move(memory)} {}

template <class Group, class Memory>
std::uint64_t Endpoint<Group, Memory>::post(Request const& request) {
    auto const& [signature, in, out, sends, expects, pieces] = request;
    make_room(signature);
    std::uint64_t const sequence = next_;
    std::size_t const bytes = signature.count * size_of(signature.dtype);
    bool const is_small = detail::is_small(signature);
    bool const is_on_line = is_small && bytes <= ArrivalLine::inline_bytes;
    pending_of(sequence) = {signature, out.data, is_small, is_on_line};
    ArrivalLine& line = board_.line(rank_, sequence);
    std::uint64_t old = line.word.load(std::memory_order_acquire); // of the reason, if frozen
    if ((old & ArrivalLine::frozen) != 0) {
        throw_reason(signature);
    }
    if (!is_on_line) {
        line.payload[ArrivalLine::count] = signature.count;
    }
    if (!is_small) {
        std::size_t const ring = Slices::fit(signature.collective) ? Slices::ring_bytes(board_) : 0;
        while (
            !(pieces.number == 0 ? memory_.lend(sequence, in, out, ring)
                                 : memory_.lend_pieces(sequence, pieces, ring))
        ) {
            if (retired_ == next_) {
                throw ContractViolation{
                    "a collective finds no place in the memory that a rank shares: wait for "
                    "messages and for collectives of other groups that are under way"
                };
            }
            finish(retired_);
        }
        LentAddresses const at =
            pieces.number == 0 ? memory_.lent(sequence, in, out) : memory_.lent(sequence, pieces);
        for (std::size_t k = 0; k < at.pieces; ++k) {
            BufferPiece& piece = static_cast<BufferPiece*>(const_cast<void*>(at.in))[k];
            piece.at = board_.place_of(piece.data());
        }
        line.payload[ArrivalLine::in] = board_.place_of(at.in);
        line.payload[ArrivalLine::out] = board_.place_of(at.out);
        line.payload[ArrivalLine::factor] = std::bit_cast<std::uint64_t>(signature.factor);
        line.payload[ArrivalLine::ring] = at.ring;
        line.payload[ArrivalLine::pieces] = at.pieces;
        if (signature.has_counts) {
            auto const mine = board_.sends(rank_, sequence);
            reserve_once(counts_, sequence, mine.data(), 2 * mine.size_bytes());
            sends.copy_to(mine);
            expects.copy_to(board_.expects(rank_, sequence));
        }
        board_.progress(rank_, sequence).reset();
    } else if (in.count != 0) {
        auto* const place = contribution(board_, sequence, rank_, is_on_line);
        if (!is_on_line) {
            reserve_once(slots_, sequence, place, tuning::slot_bytes);
        }
        std::memcpy(place, in.data, bytes);
    }
    std::uint64_t const word = ArrivalLine::encode(sequence, signature, is_on_line);
    if (!line.word.compare_exchange_strong(old, word)) { // frozen meanwhile: aborted
        throw_reason(signature);
    }
    ++next_;
    board_.room.wake();
    if (!is_small && board_.helpers_room.has_sleepers() &&
        arrival_of(sequence) == Arrival::complete) {
        board_.helpers_room.wake(); // the last rank to arrive does this
    }
    return sequence;
}

template <class Group, class Memory>
bool Endpoint<Group, Memory>::test(std::uint64_t sequence) {
    if (progress(sequence)) {
        return true;
    }
    Pending& pending = pending_of(sequence);
    auto const has_polled_too_long = [&](auto const& holding_up, char const* to_do) {
        return this->has_polled_too_long(pending.polled, holding_up, to_do, [&] {
            return "waits in " + pending.signature.text();
        });
    };
    if (!pending.has_agreed) {
        return has_polled_too_long([&] { return board_.missing(sequence); }, "arrive") &&
               progress(sequence); // throws unless all have arrived meanwhile
    }
    if (!Memory::needs_slices) {
        return false; // a thread never stops for long
    }
    if (pending.is_sliced && !board_.is_aborted()) {
        return has_polled_too_long([&] { return holding_up_slices(sequence); }, "copy a slice") &&
               progress(sequence);
    }
    if (!pending.polled.reaches(deadline_)) {
        return false;
    }
    pending.polled = {};
    if (pending.is_sliced) {
        give_up_on_slices(sequence);
    }
    give_up_on_computing(sequence);
    return progress(sequence);
}

template <class Group, class Memory>
bool Endpoint<Group, Memory>::progress(std::uint64_t sequence) {
    Pending const& pending = pending_of(sequence);
    bool const is_first =
        !is_done(sequence) && (!pending.has_agreed || has_own_share(sequence, pending));
    if (try_finish(sequence, is_first ? 1 : size())) {
        return true;
    }
    advance_others(sequence);
    group_.look_for_deaths(); // a rank that polls may never wait
    return false;
}

template <class Group, class Memory>
bool Endpoint<Group, Memory>::try_finish(std::uint64_t sequence, int shares) {
    if (is_done(sequence)) {
        return true;
    }
    Pending& pending = pending_of(sequence);
    if (!pending.has_agreed) {
        switch (arrival_of(sequence)) {
        case Arrival::waiting: return false;
        case Arrival::never: throw_reason(pending.signature);
        case Arrival::complete: break;
        }
        if (auto const reason = disagreement(board_, sequence, pending.signature)) {
            pending.is_refused = true;
            group_.abort(*reason, rank_);
            throw_failure(board_.here(*reason));
        }
        pending.is_sliced = !pending.is_small && Pipeline::is_needed(board_, sequence);
        if (pending.is_sliced) {
            pending.pipeline = Pipeline{board_, sequence, pending.signature};
        } else if (!pending.is_small) {
            pending.cut =
                Cut{Exchange{board_, sequence, pending.signature},
                    size_of(pending.signature.dtype),
                    size()};
        }
        pending.has_agreed = true;
        pending.polled = {}; // not the time before the last rank came
    }
    if (pending.is_small) {
        combine_contributions(
            board_, sequence, pending.signature, pending.is_on_line, rank_, pending.out
        );
    } else if (pending.is_sliced) {
        std::uint64_t const moved = pending.pipeline.moved();
        if (!pending.pipeline.advance(board_, pending.signature, rank_, memory_)) {
            if (pending.pipeline.moved() != moved) {
                pending.polled = {};
            }
            if (is_patience_over_ || pending.pipeline.is_lost(board_, rank_)) {
                give_up(sequence);
                if (!pending.pipeline.is_in_use(board_)) {
                    throw_lost(sequence);
                }
            }
            return false;
        }
        memory_.give_back(sequence);
    } else if (run_chunks(board_, sequence, pending.signature, pending.cut, rank_, shares)) {
        memory_.give_back(sequence);
    } else if (shares == size() && chunks_are_lost(board_, sequence, pending.cut)) {
        throw_lost(sequence);
    } else {
        return false;
    }
    pending.is_done = true;
    retire();
    return true;
}

template <class Group, class Memory>
void Endpoint<Group, Memory>::finish(std::uint64_t sequence) {
    if (try_finish(sequence, size())) {
        return;
    }
    Pending const& pending = pending_of(sequence);
    wait_for_others(
        // Where the wait has completed it, others may have reused its lines.
        [&] { return arrival_of(sequence) != Arrival::waiting || is_done(sequence); },
        [&] { return board_.missing(sequence); },
        "arrive",
        [&] { return "waits in " + pending.signature.text(); }
    );
    while (!try_finish(sequence, size())) { // all ranks have arrived
        if (pending.is_sliced) {
            wait_for_slices(sequence);
            continue;
        }
        auto const is_over = [&] { // the last chunks are being computed
            return chunks_are_done(board_, sequence, pending.cut) ||
                   chunks_are_lost(board_, sequence, pending.cut);
        };
        // A thread never stops for long, and even a late one still writes to this rank's buffer.
        if (!wait(is_over, deadline_) && Memory::needs_slices) {
            give_up_on_computing(sequence);
        }
    }
}

template <class Group, class Memory>
template <class Ready, class HoldingUp, class Does>
void Endpoint<Group, Memory>::wait_for_others(
    Ready const& ready, HoldingUp const& holding_up, char const* to_do, Does const& does
) {
    std::chrono::nanoseconds left = deadline_;
    while (!wait(ready, left)) {
        std::vector<int> overdue = holding_up();
        if (overdue.empty()) {
            return;
        }
        left = take_overdue(overdue);
        if (!overdue.empty()) {
            abort_for(overdue, to_do, does());
        }
    }
}

template <class Group, class Memory>
template <class HoldingUp, class Does>
bool Endpoint<Group, Memory>::has_polled_too_long(
    WaitClock& polled, HoldingUp const& holding_up, char const* to_do, Does const& does
) {
    if (!polled.reaches(deadline_)) {
        return false;
    }
    std::vector<int> overdue = holding_up();
    polled.extend(deadline_, take_overdue(overdue));
    if (!overdue.empty()) {
        abort_for(overdue, to_do, does());
    }
    return !overdue.empty();
}

template <class Group, class Memory>
template <class Ready>
bool Endpoint<Group, Memory>::wait(Ready const& ready, std::chrono::nanoseconds deadline) {
    for (;;) {
        std::uint64_t other = next_;
        auto const is_ready_or_free = [&] { return ready() || (other = find_other()) != next_; };
        if (!board_.room.wait(is_ready_or_free, deadline, [&] {
                return group_.look_for_deaths();
            })) {
            return false;
        }
        if (other == next_) {
            return true;
        }
        advance_other(other);
    }
}

template <class Group, class Memory>
std::chrono::nanoseconds Endpoint<Group, Memory>::take_overdue(std::vector<int>& overdue) const {
    return take_ranks_at_work(overdue, deadline_, [&](int rank) {
        return std::chrono::steady_clock::time_point{
            std::chrono::steady_clock::duration{board_.alive_at(rank).load()}
        };
    });
}

template <class Group, class Memory>
void Endpoint<Group, Memory>::reserve_once(
    std::uint64_t& reserved, std::uint64_t sequence, void const* data, std::size_t bytes
) {
    std::uint64_t const bit = std::uint64_t{1} << sequence % Board::max_in_flight;
    if ((reserved & bit) == 0) {
        group_.reserve(data, bytes);
        reserved |= bit;
    }
}

template <class Group, class Memory>
void Endpoint<Group, Memory>::give_up_on_computing(std::uint64_t sequence) {
    std::vector<int> const overdue = board_.computing(sequence);
    if (!overdue.empty()) {
        abort_for(overdue, "finish its share", "waits in " + pending_of(sequence).signature.text());
    }
    for (int const rank : overdue) {
        board_.give_up_on(rank);
    }
}

template <class Group, class Memory>
void Endpoint<Group, Memory>::throw_lost(std::uint64_t sequence) {
    std::vector<int> const computing = board_.computing(sequence); // no other rank will begin to
    if (!std::all_of(computing.begin(), computing.end(), [&](int rank) {
            return board_.is_dead(rank);
        })) {
        memory_.keep(sequence, board_);
    }
    throw_reason(pending_of(sequence).signature);
}

template <class Group, class Memory>
void Endpoint<Group, Memory>::wait_for_slices(std::uint64_t sequence) {
    Pipeline const& pipeline = pending_of(sequence).pipeline;
    auto const is_over = [&] {
        return is_done(sequence) || pipeline.can_advance(board_, rank_) ||
               (pipeline.is_lost(board_, rank_) &&
                (!has_given_up(sequence) || !pipeline.is_in_use(board_)));
    };
    wait_for_others(
        is_over,
        [&] { return holding_up_slices(sequence); },
        "copy a slice",
        [&] { return "waits in " + pending_of(sequence).signature.text(); }
    );
    if (!is_over()) {
        give_up_on_slices(sequence);
    }
}

template <class Group, class Memory>
std::vector<int> Endpoint<Group, Memory>::holding_up_slices(std::uint64_t sequence) {
    Pipeline const& pipeline = pending_of(sequence).pipeline;
    bool const may_go_on = board_.is_aborted() || pipeline.can_advance(board_, rank_);
    return may_go_on ? std::vector<int>{} : pipeline.holding_up(board_, rank_);
}

template <class Group, class Memory>
void Endpoint<Group, Memory>::give_up_on_slices(std::uint64_t sequence) {
    is_patience_over_ = true;
    give_up(sequence);
    throw_lost(sequence);
}

template <class Group, class Memory>
void Endpoint<Group, Memory>::give_up(std::uint64_t sequence) noexcept {
    if (!has_given_up(sequence)) {
        board_.progress(rank_, sequence).has_given_up.store(true);
        board_.room.wake();
    }
}

template <class Group, class Memory>
void Endpoint<Group, Memory>::make_room(Descriptor const& signature) {
    constexpr std::uint64_t max_in_flight = Board::max_in_flight;
    if (next_ < max_in_flight + all_retired_) {
        return;
    }
    if (retired_ + max_in_flight <= next_) {
        finish(retired_);
    }
    auto const others_have_room = [&] {
        all_retired_ = next_;
        for (int rank = 0; rank < size(); ++rank) {
            all_retired_ = (std::min)(all_retired_, board_.release(rank));
        }
        return next_ < max_in_flight + all_retired_ || board_.is_aborted();
    };
    wait_for_others(
        others_have_room,
        [&] { return board_.holding_up(next_); },
        "finish a collective",
        [] { return "posts another one"; }
    );
    if (board_.is_aborted()) {
        throw_reason(signature);
    }
}

template <class Group, class Memory>
bool Endpoint<Group, Memory>::can_compute(std::uint64_t sequence) noexcept {
    Pending const& pending = pending_of(sequence);
    return !pending.is_small && !pending.is_done && !pending.is_refused &&
           arrival_of(sequence) == Arrival::complete &&
           (!pending.has_agreed ||
            (pending.is_sliced ? pending.pipeline.can_advance(board_, rank_)
                               : has_unclaimed(board_, sequence, pending.cut)));
}

template <class Group, class Memory>
bool Endpoint<Group, Memory>::has_slices(std::uint64_t sequence) noexcept {
    Pending const& pending = pending_of(sequence);
    return can_compute(sequence) &&
           (pending.has_agreed ? pending.is_sliced : Pipeline::is_needed(board_, sequence));
}

template <class Group, class Memory>
void Endpoint<Group, Memory>::advance_others(std::uint64_t but) noexcept {
    for (std::uint64_t other = retired_; Memory::needs_slices && other != next_; ++other) {
        if (other != but && has_slices(other)) {
            advance_other(other);
        }
    }
}

template <class Group, class Memory>
void Endpoint<Group, Memory>::advance_other(std::uint64_t sequence) noexcept {
    try {
        static_cast<void>(try_finish(sequence, size()));
    } catch (...) { // NOLINT(bugprone-empty-catch): its own wait() throws it
    }
}

template <class Group, class Memory>
typename Endpoint<Group, Memory>::Arrival Endpoint<Group, Memory>::arrival_of(std::uint64_t sequence
) noexcept {
    for (int rank = 0; rank < size(); ++rank) {
        std::uint64_t const word = board_.line(rank, sequence).word.load();
        if ((word & ArrivalLine::sequence_mask) != (sequence & ArrivalLine::sequence_mask)) {
            return (word & ArrivalLine::frozen) != 0 ? Arrival::never : Arrival::waiting;
        }
    }
    return Arrival::complete;
}

template <class Group, class Memory>
void Endpoint<Group, Memory>::retire() noexcept {
    std::uint64_t retired = retired_;
    while (retired < next_ && pending_of(retired).is_done) {
        ++retired;
    }
    if (retired != retired_) {
        retired_ = retired;
        board_.retired(rank_).store(retired);
        board_.room.wake();
    }
}

}}} // namespace joinable::v0::detail
