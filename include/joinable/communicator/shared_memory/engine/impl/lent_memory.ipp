// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/shared_memory/engine/lent_memory.hpp>

#include <algorithm>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION bool
StagedMemory::lend(std::uint64_t sequence, ConstBuffer in, Buffer out, std::size_t ring) {
    bool const copies_in = !room_->reaches(in);
    bool const copies_out = !room_->reaches(out);
    bool const is_in_place = in.data == out.data && copies_in;
    std::size_t const in_bytes = copies_in ? in_cache_lines(in.bytes()) : 0;
    std::size_t const out_at = is_in_place ? 0 : in_bytes;
    std::size_t const out_end = copies_out ? out_at + in_cache_lines(out.bytes()) : 0;
    std::size_t const all = (std::max)(in_bytes, out_end);
    bool const is_sliced = ring != 0 && all > ring;
    std::size_t const bytes = is_sliced ? ring : all;
    require_room(bytes);
    std::byte* const copies = bytes == 0 ? nullptr : room_->allocate(bytes);
    if (bytes != 0 && copies == nullptr) {
        return false;
    }
    Loan& loan = loans_[sequence % loans_.size()];
    loan = {copies, bytes, {}, copies_in ? in : ConstBuffer{}, copies_out ? out : Buffer{}};
    if (is_sliced) {
        loan.at = {copies, copies, ring};
        return true;
    }
    loan.at = {copies_in ? copies : in.data, copies_out ? copies + out_at : out.data};
    copy(copies, loan.in.data, loan.in.bytes());
    return true;
}

JOINABLE_DEFINITION void StagedMemory::require_room(std::size_t bytes) const {
    if (bytes > room_->size()) {
        throw ContractViolation{concat(
            "a collective of ",
            bytes,
            " bytes does not fit in the ",
            room_->size(),
            " bytes that a process rank shares: cut it into smaller ones"
        )};
    }
}

/// Calls f(address, first, last) for each part of a buffer, or of pieces if that is empty, that has bytes [first, last)
/// of [begin, end).
template <class F>
void for_parts(
    ConstBuffer buffer, BufferPieces const& pieces, std::size_t begin, std::size_t end, F const& f
) {
    if (buffer.count != 0) {
        return f(static_cast<std::byte*>(const_cast<void*>(buffer.data)) + begin, begin, end);
    }
    for (std::size_t at = begin; at < end && pieces.number != 0;) {
        BufferPiece const& piece = pieces.at(at);
        std::size_t const last = (std::min)(end, piece.end);
        f(static_cast<std::byte*>(piece.data()) + (at - pieces.begin_of(piece)), at, last);
        at = last;
    }
}

JOINABLE_DEFINITION bool StagedMemory::are_in_reach(BufferPieces const& pieces) const noexcept {
    for (std::size_t k = 0; k < pieces.number; ++k) {
        BufferPiece const& piece = pieces.list[k];
        if (!room_->reaches({piece.data(), piece.end - pieces.begin_of(piece), DType::u8})) {
            return false;
        }
    }
    return true;
}

JOINABLE_DEFINITION bool
StagedMemory::lend_pieces(std::uint64_t sequence, BufferPieces const& pieces, std::size_t ring) {
    Buffer const out{pieces.out, pieces.count(), pieces.dtype};
    bool const has_out = pieces.out != nullptr;
    bool const is_list = (!has_out || room_->reaches(out)) && are_in_reach(pieces);
    std::size_t const of_list = pieces.number * sizeof(BufferPiece);
    std::size_t const all = in_cache_lines(is_list ? of_list : out.bytes());
    bool const is_sliced = !is_list && ring != 0 && all > ring;
    std::size_t const bytes = is_sliced ? ring : all;
    require_room(bytes);
    std::byte* const copies = room_->allocate(bytes);
    if (copies == nullptr) {
        return false;
    }
    Loan& loan = loans_[sequence % loans_.size()];
    if (is_list) {
        copy(copies, pieces.list, of_list);
        loan = {copies, bytes, {copies, has_out ? pieces.out : copies, 0, pieces.number}};
        return true;
    }
    // The sum as well, also if it goes to an arena: another rank writes faster into a few cache lines than there.
    loan = {
        copies, bytes, {copies, copies, is_sliced ? ring : 0}, {}, has_out ? out : Buffer{}, pieces
    };
    if (!is_sliced) {
        copy_in(sequence, 0, out.bytes());
    }
    return true;
}

JOINABLE_DEFINITION LentAddresses StagedMemory::own(std::uint64_t sequence) const noexcept {
    Loan const& loan = loans_[sequence % loans_.size()];
    return loan.at.ring == 0 ? loan.at : LentAddresses{loan.in.data, loan.out.data};
}

JOINABLE_DEFINITION void
StagedMemory::copy_in(std::uint64_t sequence, std::size_t begin, std::size_t end) noexcept {
    Loan const& loan = loans_[sequence % loans_.size()];
    auto const copy_part = [&](std::byte const* part, std::size_t first, std::size_t last) {
        copy(loan.copies + first % loan.bytes, part, last - first);
    };
    for_parts(loan.in, loan.parts, begin, end, copy_part);
}

JOINABLE_DEFINITION void
StagedMemory::copy_out(std::uint64_t sequence, std::size_t begin, std::size_t end) noexcept {
    Loan const& loan = loans_[sequence % loans_.size()];
    auto const* const from = static_cast<std::byte const*>(loan.at.out);
    auto const copy_part = [&](std::byte* part, std::size_t first, std::size_t last) {
        copy(part, from + first % loan.bytes, last - first);
    };
    for_parts(loan.out, loan.parts, begin, end, copy_part);
}

JOINABLE_DEFINITION void StagedMemory::give_back(std::uint64_t sequence) noexcept {
    Loan& loan = loans_[sequence % loans_.size()];
    if (loan.at.ring == 0) {
        bool const has_parts = loan.parts.number != 0;
        copy_out(
            sequence, 0, has_parts ? loan.parts.list[loan.parts.number - 1].end : loan.out.bytes()
        );
    }
    free(loan);
    loan = {};
}

JOINABLE_DEFINITION void StagedMemory::keep(std::uint64_t sequence, Board& board) noexcept {
    Loan& loan = loans_[sequence % loans_.size()];
    loan.is_kept = true;
    room_->keep_arena(loan.at.out);
    auto const* const pieces = reinterpret_cast<BufferPiece const*>(loan.copies);
    for (std::size_t k = 0; k < loan.at.pieces; ++k) {
        room_->keep_arena(board.place_at(pieces[k].at));
    }
}

}}} // namespace joinable::v0::detail
