// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/shared_memory/engine/helper.hpp>

#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/ranks.hpp>
#include <joinable/communicator/shared_memory/board/waiting.hpp>
#include <joinable/communicator/shared_memory/engine/chunks.hpp>
#include <joinable/communicator/shared_memory/engine/exchange.hpp>
#include <joinable/communicator/shared_memory/engine/slices.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void Helper::run() {
    auto const forever = end_of_wait(SleepThrough{}());
    while (!stops_.load()) {
        board_.helpers_room.sleep([&] { return stops_.load() || help(); }, forever);
    }
}

JOINABLE_DEFINITION bool Helper::help() {
    std::uint64_t const first = board_.retired(rank_).load();
    for (std::uint64_t k = 0; k < Board::max_in_flight; ++k) {
        std::uint64_t const sequence = first + k;
        if (!board_.has_arrived(rank_, sequence)) {
            return false;
        }
        if (have_all_arrived(sequence)) {
            bool const is_still_there = board_.begin_helping(rank_, sequence);
            bool const has_computed = is_still_there && compute(sequence);
            board_.end_computing(rank_, Worker::helper);
            board_.room.wake(); // a rank may wait for the slots
            if (has_computed) {
                return true;
            }
        }
    }
    return false;
}

JOINABLE_DEFINITION bool Helper::have_all_arrived(std::uint64_t sequence) noexcept {
    return !any_rank(board_.size(), [&](int rank) { return !board_.has_arrived(rank, sequence); });
}

JOINABLE_DEFINITION bool Helper::compute(std::uint64_t sequence) {
    ArrivalLine const& line = board_.line(rank_, sequence);
    Descriptor const signature = ArrivalLine::decode(line.word.load(), line.payload);
    if (is_small(signature) || disagreement(board_, sequence, signature)) {
        return false; // the rank itself aborts
    }
    if (Pipeline::is_needed(board_, sequence)) {
        return false; // it does not know the rank's own addresses
    }
    Cut const cut{Exchange{board_, sequence, signature}, size_of(signature.dtype), board_.size()};
    bool const has_some = has_unclaimed(board_, sequence, cut);
    if (has_some) {
        run_chunks(board_, sequence, signature, cut, rank_, board_.size(), Worker::helper);
    }
    return has_some;
}

}}} // namespace joinable::v0::detail
