// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/bucket/broadcast_coalesced.hpp>

#include <algorithm>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION CoalescedBroadcast::CoalescedBroadcast(
    TensorList tensors, std::size_t piece_bytes, std::string_view what, BufferMemory const& memory
)
    : tensors_{std::move(tensors), what, memory.id()}, memory_{memory} {
    std::vector<AnyView> const& views = current_views();
    if (views.empty()) {
        return;
    }
    std::array<std::size_t, 1> const limits{{piece_bytes}};
    std::vector<std::size_t> memory_bytes; // as arenas_
    auto const place_of = [&](std::size_t p, DeviceId device) {
        return 2 * memory_.device().position(device) + p % 2;
    };
    for (auto& members : compute_bucket_assignment_by_size(views, limits).buckets) {
        DeviceId const device = views[members.front()].device();
        Bucket piece{{nullptr, 0, views[members.front()].dtype()}, std::move(members), {}};
        for (std::size_t const member : piece.parameters) {
            piece.buffer.count += views[member].numel();
        }
        if (piece.buffer.count != 0) {
            std::size_t const k = place_of(pieces_.size(), device);
            memory_bytes.resize((std::max)(memory_bytes.size(), k + 1));
            memory_bytes[k] = (std::max)(memory_bytes[k], piece.buffer.bytes());
            pieces_.push_back(std::move(piece));
        }
    }
    for (std::size_t k = 0; k < memory_bytes.size(); ++k) {
        arenas_.push_back(memory_.allocate(memory_bytes[k], k / 2));
    }
    for (std::size_t p = 0; p < pieces_.size(); ++p) {
        DeviceId const device = views[pieces_[p].parameters.front()].device();
        std::byte* place = arenas_[place_of(p, device)].data();
        pieces_[p].buffer.data = place;
        for (std::size_t const member : pieces_[p].parameters) {
            Shape const& extents = views[member].extents();
            DType const dtype = views[member].dtype();
            pieces_[p].views.emplace_back(
                place, dtype, extents, row_major_strides(extents), device
            );
            place += views[member].numel() * size_of(dtype);
        }
    }
}

}}} // namespace joinable::v0::detail
