// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/tcp/detail/collectives.hpp>

#include <joinable/communicator/detail/reasons.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION bool
OpenCollectives::is_arrival(FrameHeader const& header, int rank) const noexcept {
    bool const is_known = header.collective <= Collective::barrier &&
                          static_cast<std::size_t>(header.dtype) < dtype_count &&
                          static_cast<std::size_t>(header.op) < reduce_op_count &&
                          header.root >= 0 && static_cast<std::size_t>(header.root) < size_;
    std::size_t const element = is_known ? size_of(header.dtype) : 1;
    return is_known && header.count <= most_frame_bytes / element &&
           header.sequence == first_ + place_of_next(rank) &&
           header.sequence < first_ + most_in_flight &&
           header.bytes == (contributes(header, rank) ? header.count * element : 0);
}

JOINABLE_DEFINITION std::span<std::byte>
OpenCollectives::place(FrameHeader const& header, int rank, std::uint64_t done) {
    std::size_t const at = place_of_next(rank);
    if (at == open_.size()) {
        open_.emplace_back(size_);
    }
    return room_in(open_[at].bodies[as_index(rank)], header.bytes, done);
}

JOINABLE_DEFINITION void OpenCollectives::arrive(FrameHeader const& header, int rank) {
    Open& open = open_[place_of_next(rank)];
    open.signatures[as_index(rank)] =
        Descriptor{header.collective, header.dtype, header.op, header.root, header.count};
    ++open.arrived;
}

JOINABLE_DEFINITION std::optional<AbortReason> OpenCollectives::disagreement() const {
    auto const signature_of = [this](int rank) -> Descriptor const& {
        return *open_.front().signatures[as_index(rank)];
    };
    return find_difference(static_cast<int>(size_), signature_of);
}

JOINABLE_DEFINITION std::vector<int> OpenCollectives::missing(std::uint64_t sequence) const {
    std::size_t const at = sequence - first_;
    return ranks_where(static_cast<int>(size_), [&](int rank) {
        return at >= open_.size() || !open_[at].signatures[as_index(rank)];
    });
}

JOINABLE_DEFINITION std::size_t OpenCollectives::place_of_next(int rank) const noexcept {
    std::size_t at = 0;
    while (at < open_.size() && open_[at].signatures[as_index(rank)]) {
        ++at;
    }
    return at;
}

}}} // namespace joinable::v0::detail
