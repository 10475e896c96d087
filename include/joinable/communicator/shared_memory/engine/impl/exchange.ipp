// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/shared_memory/engine/exchange.hpp>

#include <algorithm>
#include <bit>
#include <cstring>

#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/reduction/reduce.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION int Exchange::blocks() const noexcept {
    switch (moved()) {
    case Collective::all_reduce:
    case Collective::broadcast:
    case Collective::barrier:
    case Collective::scaled_all_reduce:
    case Collective::reduce: return 1;
    case Collective::all_to_all: return board_.size() * board_.size();
    default: return board_.size();
    }
}

JOINABLE_DEFINITION std::size_t Exchange::size_of_block(int b) const noexcept {
    switch (moved()) {
    case Collective::all_gather: return share(b, 0);
    case Collective::gather: return share(b, signature_.root);
    case Collective::reduce_scatter:
    case Collective::scaled_reduce_scatter: return share(0, b);
    case Collective::scatter: return share(signature_.root, b);
    case Collective::all_to_all: return share(b / board_.size(), b % board_.size());
    default: return signature_.count;
    }
}

JOINABLE_DEFINITION Block Exchange::block(int b) const noexcept {
    std::size_t const size = size_of_block(b);
    auto const before = [&] {
        std::size_t sum = 0;
        for (int other = 0; other < b; ++other) {
            sum += size_of_block(other);
        }
        return sum;
    };
    switch (moved()) {
    case Collective::broadcast: return {size, signature_.root};
    case Collective::reduce: return {size, every_rank, signature_.root};
    case Collective::all_gather: return {size, b, every_rank, 0, before()};
    case Collective::gather: return {size, b, signature_.root, 0, before()};
    case Collective::reduce_scatter:
    case Collective::scaled_reduce_scatter: return {size, every_rank, b, before(), 0};
    case Collective::scatter: return {size, signature_.root, b, before(), 0};
    case Collective::all_to_all: {
        Block found{size, b / board_.size(), b % board_.size()};
        for (int rank = 0; rank < found.to; ++rank) {
            found.in_at += share(found.from, rank);
        }
        for (int rank = 0; rank < found.from; ++rank) {
            found.out_at += share(rank, found.to);
        }
        return found;
    }
    default: return {size};
    }
}

JOINABLE_DEFINITION void Exchange::run(std::size_t begin, std::size_t end) const {
    std::size_t first = 0; // of the block, in the same count
    for (int b = 0; b < blocks() && first < end; ++b) {
        std::size_t const size = size_of_block(b);
        std::size_t const from = (std::max)(begin, first);
        std::size_t const to = (std::min)(end, first + size);
        for (std::size_t at = from, after = from; at < to; at = after) {
            after = end_of_pieces(at, to);
            run_part(block(b), at - first, after - first);
        }
        first += size;
    }
}

JOINABLE_DEFINITION std::size_t Exchange::share(int from, int to) const noexcept {
    return signature_.has_counts ? board_.sends(from, sequence_)[static_cast<std::size_t>(to)]
                                 : signature_.count;
}

JOINABLE_DEFINITION BufferPieces Exchange::pieces_of(int rank) const noexcept {
    auto const& payload = board_.line(rank, sequence_).payload;
    return {
        reinterpret_cast<BufferPiece*>(board_.place_at(payload[ArrivalLine::in])),
        static_cast<std::size_t>(payload[ArrivalLine::pieces]),
        signature_.dtype
    };
}

JOINABLE_DEFINITION std::size_t
Exchange::end_of_pieces(std::size_t begin, std::size_t end) const noexcept {
    std::size_t const element = size_of(signature_.dtype);
    for (int rank = 0; rank < board_.size(); ++rank) {
        auto const pieces = rank == own_.rank ? own_.pieces : pieces_of(rank);
        if (pieces.number != 0) {
            end = (std::min)(end, pieces.at(begin * element).end / element);
        }
    }
    return end;
}

JOINABLE_DEFINITION std::byte*
Exchange::shared(int rank, std::size_t word, std::size_t offset) const noexcept {
    auto const& payload = board_.line(rank, sequence_).payload;
    bool const is_in_one_place = payload[word] != payload[ArrivalLine::in];
    if (auto const pieces = pieces_of(rank); pieces.number != 0 && !is_in_one_place) {
        return board_.place_at(pieces.address_of(offset));
    }
    std::uint64_t const ring = payload[ArrivalLine::ring];
    return board_.place_at(payload[word]) + (ring == 0 ? offset : offset % ring);
}

JOINABLE_DEFINITION void
Exchange::run_part(Block const& block, std::size_t begin, std::size_t end) const {
    std::size_t const element = size_of(signature_.dtype);
    auto const from = [&](std::size_t rank) {
        return input(static_cast<int>(rank), (block.in_at + begin) * element);
    };
    auto const to = [&](std::size_t k) {
        int const rank = block.to == every_rank ? static_cast<int>(k) : block.to;
        return output(rank, (block.out_at + begin) * element);
    };
    auto const ranks = static_cast<std::size_t>(board_.size());
    std::size_t const outputs = block.to == every_rank ? ranks : 1;
    bool const scales = is_scaled(signature_.collective);
    if (ranks == 1 && from(0) == to(0) && !scales) {
        return; // a sum over one rank needs no work
    }
    if (block.from == every_rank) {
        auto const factor = [&](std::size_t rank) {
            return std::bit_cast<double>(
                board_.line(static_cast<int>(rank), sequence_).payload[ArrivalLine::factor]
            );
        };
        reduce_to(
            signature_.dtype,
            signature_.op,
            {ranks, from},
            {outputs, to},
            end - begin,
            {scales ? ranks : 0, factor}
        );
        return;
    }
    std::byte const* const source = from(static_cast<std::size_t>(block.from));
    for (std::size_t k = 0; k < outputs; ++k) {
        if (std::byte* const target = to(k); target != source) {
            std::memcpy(target, source, (end - begin) * element);
        }
    }
}

JOINABLE_DEFINITION bool say_the_same(Board& board, std::uint64_t sequence) noexcept {
    ArrivalLine const& first = board.line(0, sequence);
    std::uint64_t const word = first.word.load(std::memory_order_relaxed) & ~ArrivalLine::frozen;
    for (int rank = 1; rank < board.size(); ++rank) {
        ArrivalLine const& line = board.line(rank, sequence);
        if ((line.word.load(std::memory_order_relaxed) & ~ArrivalLine::frozen) != word ||
            (ArrivalLine::tells_count(word) &&
             line.payload[ArrivalLine::count] != first.payload[ArrivalLine::count])) {
            return false;
        }
    }
    return true;
}

JOINABLE_DEFINITION std::optional<AbortReason>
disagreement(Board& board, std::uint64_t sequence, Descriptor const& mine) {
    auto const signature_of = [&](int rank) {
        ArrivalLine const& line = board.line(rank, sequence);
        return ArrivalLine::decode(line.word.load(std::memory_order_relaxed), line.payload);
    };
    if (!say_the_same(board, sequence)) {
        return find_difference(board.size(), signature_of);
    }
    if (!mine.has_counts) {
        return std::nullopt;
    }
    return find_difference_of_counts(
        board.size(),
        mine,
        [&](int from, int to) { return board.sends(from, sequence)[static_cast<std::size_t>(to)]; },
        [&](int from, int to) {
            return board.expects(to, sequence)[static_cast<std::size_t>(from)];
        }
    );
}

JOINABLE_DEFINITION std::byte*
contribution(Board& board, std::uint64_t sequence, int rank, bool is_on_line) noexcept {
    return is_on_line ? reinterpret_cast<std::byte*>(board.line(rank, sequence).payload.data())
                      : board.slot(rank, sequence);
}

JOINABLE_DEFINITION void combine_contributions(
    Board& board,
    std::uint64_t sequence,
    Descriptor const& signature,
    bool is_on_line,
    int rank,
    void* out
) {
    auto const contributed_by = [&](std::size_t from) {
        return contribution(board, sequence, static_cast<int>(from), is_on_line);
    };
    if (signature.count == 0 ||
        (signature.collective == Collective::reduce && rank != signature.root)) {
        return;
    }
    if (signature.collective == Collective::broadcast) {
        auto const* const from = contributed_by(static_cast<std::size_t>(signature.root));
        std::memcpy(out, from, signature.count * size_of(signature.dtype));
        return;
    }
    auto const in_place = [&](std::size_t) { return static_cast<std::byte*>(out); };
    auto const ranks = static_cast<std::size_t>(board.size());
    reduce_to(
        signature.dtype, signature.op, {ranks, contributed_by}, {1, in_place}, signature.count
    );
}

}}} // namespace joinable::v0::detail
