// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/bucket/bucket.hpp>
#include <joinable/bucket/memory.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/config.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/tensor/tensor_list.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

/// Copies tensors from one rank to all, many in one broadcast, as often as needed. The packing is
/// planned once. Addresses and strides of tensors are read on each run.
class CoalescedBroadcast {
public:
    /// Local. Plans pieces; a piece closes with the tensor by which it reaches `piece_bytes`.
    /// Allocates up to two pieces on each device of `memory`, where the tensors must be, too. Error texts call a
    /// tensor `what`.
    /// @throws ContractViolation  a tensor is missing (a null pointer), on another device, or has elements that
    ///                            share memory.
    explicit CoalescedBroadcast(
        TensorList tensors,
        std::size_t piece_bytes,
        std::string_view what = "tensor",
        BufferMemory const& memory = {}
    );

    /// Collective over `comm`. All ranks must have planned for tensors of the same extents and
    /// dtypes in the same order; strides may differ. Blocks until this rank's tensors are written.
    /// At most two pieces are in flight; no allocation.
    /// @throws ContractViolation  what current_views() throws, before anything is sent.
    /// @throws what the communicator throws; tensors that were not reached are unchanged.
    template <Communicator Comm>
    void run(Comm& comm, int root) {
        std::vector<AnyView> const& views = current_views();
        bool const is_root = comm.rank() == root;
        Device& device = memory_.device();
        auto const move = [&](Bucket const& piece) {
            for (std::size_t k = 0; k < piece.views.size(); ++k) {
                AnyView const& tensor = views[piece.parameters[k]];
                is_root ? device.copy(tensor, piece.views[k]) : device.copy(piece.views[k], tensor);
            }
        };
        using BroadcastWork = std::remove_cvref_t<decltype(comm.broadcast(Buffer{}, root))>;
        std::array<std::optional<BroadcastWork>, 2> works;
        for (std::size_t p = 0; p < pieces_.size() + 2; ++p) {
            std::optional<BroadcastWork>& work = works[p % 2];
            if (work) {
                work->wait();
                work.reset();
                if (!is_root) {
                    move(pieces_[p - 2]);
                }
            }
            if (p < pieces_.size()) {
                if (is_root) {
                    move(pieces_[p]);
                }
                device.submit(); // the previous contents of these arenas have been read
                // nvcc 13 warns of a dropped reference to a work, too
                static_cast<void>(work.emplace(comm.broadcast(pieces_[p].buffer, root)));
            }
        }
        device.finish();
    }

    [[nodiscard]] TensorList const& tensors() const noexcept { return tensors_.tensors(); }
    /// See FixedTensors::views.
    std::vector<AnyView> const& current_views() { return tensors_.views(); }

private:
    FixedTensors tensors_;
    BufferMemory memory_;
    std::vector<Arena> arenas_;  ///< of each device, for pieces of even and of odd index
    std::vector<Bucket> pieces_; ///< the ones that are not empty, with row-major views
};

} // namespace detail

/// Copies tensors from `root` to all ranks: makes a CoalescedBroadcast and runs it once. `tensors`
/// is a range that joinable::buffers() takes. Collective.
template <Communicator Comm, class Tensors>
void broadcast_coalesced(Comm& comm, Tensors&& tensors, std::size_t buffer_bytes, int root) {
    detail::CoalescedBroadcast{
        detail::tensor_list(std::forward<Tensors>(tensors)),
        buffer_bytes,
        "tensor",
        detail::BufferMemory{comm}
    }.run(comm, root);
}

}} // namespace joinable::v0

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/bucket/impl/broadcast_coalesced.ipp>
#endif
