// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <joinable/communicator/detail/board.hpp>
#include <joinable/communicator/detail/reduce.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

/// @file
/// What happens once all ranks have arrived in a collective: nothing here waits, and any rank can
/// do it for all.

namespace joinable::inline v0::detail {

/// Every rank computes the same from the same lines. @throws Mismatch  on all of them.
inline void require_agreement(Board& board, std::uint64_t sequence, Descriptor const& mine) {
    auto const said_by = [&](int rank) {
        ArrivalLine const& line = board.line(rank, sequence);
        return ArrivalLine::decode(line.word.load(std::memory_order_relaxed), line.payload);
    };
    bool agrees = true;
    for (int rank = 0; rank < board.size(); ++rank) {
        agrees = agrees && said_by(rank) == mine;
    }
    if (agrees) {
        return;
    }
    AbortReason reason{
        FailureKind::mismatch, {}, "ranks run different collectives: rank 0 " + said_by(0).text()
    };
    for (int rank = 1; rank < board.size(); ++rank) {
        if (!(said_by(rank) == said_by(0))) {
            reason.ranks.push_back(rank);
            reason.message += concat(", rank ", rank, " ", said_by(rank).text());
        }
    }
    board.abort(reason);
    throw_failure(reason);
}

/// A small message: every rank reads the payloads of all lines and combines them for itself.
inline void combine_lines(Board& board, std::uint64_t sequence, Descriptor const& said, void* out) {
    auto const payload_of = [&](int rank) -> void const* {
        return board.line(rank, sequence).payload.data();
    };
    if (said.count == 0) {
        return;
    }
    if (said.collective == Collective::broadcast) {
        std::memcpy(out, payload_of(said.root), said.count * size_of(said.dtype));
        return;
    }
    auto const store = [&](void const* tile, std::size_t, std::size_t n) {
        std::memcpy(out, tile, n * size_of(said.dtype)); // one tile holds a line
    };
    reduce_in_rank_order(said.dtype, said.op, board.size(), said.count, payload_of, store);
}

/// A large message is cut into `chunks` ranges of `chunk` elements, the same on every rank.
struct Cut {
    std::size_t total;
    std::size_t chunk;
    std::size_t chunks;

    Cut(Descriptor const& said, int world_size) noexcept {
        auto const ranks = static_cast<std::size_t>(world_size);
        bool const is_share = said.collective == Collective::all_gather ||
                              said.collective == Collective::reduce_scatter;
        total = is_share ? said.count * ranks : said.count;
        // Small enough that all ranks get some, large enough that claiming costs nothing.
        constexpr std::size_t smallest = std::size_t{16} << 10U;
        constexpr std::size_t largest = std::size_t{256} << 10U;
        std::size_t const element = size_of(said.dtype);
        chunk = std::clamp(total * element / (4 * ranks), smallest, largest) / element;
        chunks = (total + chunk - 1) / chunk;
    }
};

/// Computes the elements [begin, end) of a large collective for all ranks.
inline void run_chunk(
    Board& board, std::uint64_t sequence, Descriptor const& said, std::size_t begin, std::size_t end
) {
    std::size_t const element = size_of(said.dtype);
    auto const address = [&](int rank, std::size_t word) {
        // NOLINTNEXTLINE(performance-no-int-to-ptr): a rank of this process wrote it as an address
        return reinterpret_cast<std::byte*>(
            static_cast<std::uintptr_t>(board.line(rank, sequence).payload[word])
        );
    };
    auto const in = [&](int rank) { return address(rank, 1); };
    auto const copy_to = [&](int rank, std::size_t at, void const* from, std::size_t n) {
        std::byte* const target = address(rank, 2) + at * element;
        if (target != from) {
            std::memcpy(target, from, n * element);
        }
    };
    auto const reduce = [&](auto const& store) {
        auto const input = [&](int rank) -> void const* { return in(rank) + begin * element; };
        reduce_in_rank_order(said.dtype, said.op, board.size(), end - begin, input, store);
    };
    // Calls `part(rank, from, to)` for the ranks whose shares [from, to) meets.
    auto const for_each_share = [&](std::size_t from, std::size_t to, auto const& part) {
        while (from < to) {
            std::size_t const owner = from / said.count;
            std::size_t const stop = std::min(to, (owner + 1) * said.count);
            part(static_cast<int>(owner), from, stop);
            from = stop;
        }
    };
    switch (said.collective) {
    case Collective::all_reduce:
        reduce([&](void const* tile, std::size_t offset, std::size_t n) {
            for (int rank = 0; rank < board.size(); ++rank) {
                copy_to(rank, begin + offset, tile, n);
            }
        });
        break;
    case Collective::reduce_scatter:
        reduce([&](void const* tile, std::size_t offset, std::size_t n) {
            std::size_t const first = begin + offset;
            for_each_share(first, first + n, [&](int owner, std::size_t from, std::size_t to) {
                auto const* const source = static_cast<std::byte const*>(tile);
                copy_to(owner, from % said.count, source + (from - first) * element, to - from);
            });
        });
        break;
    case Collective::broadcast:
        for (int rank = 0; rank < board.size(); ++rank) {
            copy_to(rank, begin, in(said.root) + begin * element, end - begin);
        }
        break;
    case Collective::all_gather:
        for_each_share(begin, end, [&](int owner, std::size_t from, std::size_t to) {
            for (int rank = 0; rank < board.size(); ++rank) {
                copy_to(rank, from, in(owner) + from % said.count * element, to - from);
            }
        });
        break;
    case Collective::barrier: break;
    }
}

[[nodiscard]] inline bool
chunks_are_done(Board& board, std::uint64_t sequence, Descriptor const& said) noexcept {
    std::uint64_t const done = board.progress(sequence).done.load();
    return (done & ChunkProgress::count_mask) == Cut{said, board.size()}.chunks;
}

/// Computes chunks until none is left to claim. Whether all are done, by whomever.
inline bool run_chunks(Board& board, std::uint64_t sequence, Descriptor const& said) {
    Cut const cut{said, board.size()};
    ChunkProgress& progress = board.progress(sequence);
    auto const left = [&](std::uint64_t count) {
        return (count & ChunkProgress::count_mask) < cut.chunks;
    };
    while (left(progress.claimed.load(std::memory_order_relaxed))) {
        std::uint64_t const claimed = progress.claimed.fetch_add(1);
        if (!left(claimed)) {
            break;
        }
        std::size_t const begin =
            static_cast<std::size_t>(claimed & ChunkProgress::count_mask) * cut.chunk;
        run_chunk(board, sequence, said, begin, std::min(cut.total, begin + cut.chunk));
        if ((progress.done.fetch_add(1) & ChunkProgress::count_mask) + 1 == cut.chunks) {
            board.room.wake();
        }
    }
    return chunks_are_done(board, sequence, said);
}

} // namespace joinable::inline v0::detail
