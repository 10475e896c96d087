// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/bucket/bucket.hpp>
#include <joinable/communicator/communicator.hpp>

namespace joinable::inline v0 {

/// Copies tensors from `root` to all ranks, many in one broadcast: pieces of about `buffer_bytes`
/// are packed, at most two in flight, and unpacked. Collective; all ranks give tensors of the same
/// extents and dtypes in the same order, strided as they like. Blocks until this rank's are
/// written. `tensors` is a range of writable Tensors. Allocates two pieces.
/// @throws what the communicator throws; tensors not reached yet are unchanged.
template <Communicator Comm, class Tensors>
void broadcast_coalesced(Comm& comm, Tensors&& tensors, std::size_t buffer_bytes, int root) {
    std::vector<AnyView> views;
    for (auto&& tensor : tensors) {
        views.emplace_back(tensor);
    }
    if (views.empty()) {
        return;
    }
    std::array<std::size_t, 1> const limits{{buffer_bytes}};
    auto const assignment = compute_bucket_assignment_by_size(views, limits);

    struct Piece {
        std::optional<Arena> memory;
        std::vector<AnyView> places;
        std::vector<std::size_t> members;
        std::optional<std::remove_cvref_t<decltype(comm.broadcast(Buffer{}, root))>> work;
    };
    std::array<Piece, 2> pieces; // a piece's memory is released after its work, in any case
    auto const unpack = [&](Piece& piece) {
        if (piece.work) {
            piece.work->wait();
            piece.work.reset();
            for (std::size_t k = 0; k < piece.members.size(); ++k) {
                copy(piece.places[k], views[piece.members[k]]);
            }
        }
    };
    for (std::size_t b = 0; b < assignment.buckets.size(); ++b) {
        Piece& piece = pieces[b % 2];
        unpack(piece);
        piece.members = assignment.buckets[b];
        piece.places.clear();
        Buffer buffer{nullptr, 0, views[piece.members.front()].dtype()};
        for (std::size_t const member : piece.members) {
            buffer.count += views[member].numel();
        }
        if (!piece.memory || piece.memory->bytes() < buffer.bytes()) {
            piece.memory.emplace(buffer.bytes());
        }
        buffer.data = piece.memory->data();
        std::size_t offset = 0;
        for (std::size_t const member : piece.members) {
            AnyView const& view = views[member];
            piece.places.emplace_back(
                piece.memory->data() + offset,
                view.dtype(),
                view.extents(),
                row_major_strides(view.extents())
            );
            if (comm.rank() == root) {
                copy(view, piece.places.back());
            }
            offset += view.numel() * size_of(view.dtype());
        }
        // nvcc 13 warns of a dropped reference to a work, too
        static_cast<void>(piece.work.emplace(comm.broadcast(buffer, root)));
    }
    unpack(pieces[assignment.buckets.size() % 2]);
    unpack(pieces[(assignment.buckets.size() + 1) % 2]);
}

} // namespace joinable::inline v0
