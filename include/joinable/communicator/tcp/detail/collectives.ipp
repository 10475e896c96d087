// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/tcp/detail/collectives.hpp>

#include <joinable/communicator/detail/reasons.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION bool
OpenCollectives::is_arrival(FrameHeader const& said, int rank) const noexcept {
    bool const is_known = said.collective <= Collective::barrier &&
                          static_cast<std::size_t>(said.dtype) < dtype_count &&
                          static_cast<std::size_t>(said.op) < reduce_op_count && said.root >= 0 &&
                          static_cast<std::size_t>(said.root) < size_;
    std::size_t const element = is_known ? size_of(said.dtype) : 1;
    return is_known && said.count <= most_frame_bytes / element &&
           said.sequence == first_ + place_of_next(rank) && said.sequence < first_ + most_open &&
           said.bytes == (contributes(said, rank) ? said.count * element : 0);
}

JOINABLE_DEFINITION std::span<std::byte>
OpenCollectives::place(FrameHeader const& said, int rank, std::uint64_t done) {
    std::size_t const at = place_of_next(rank);
    if (at == open_.size()) {
        open_.emplace_back(size_);
    }
    return room_in(open_[at].bodies[index(rank)], said.bytes, done);
}

JOINABLE_DEFINITION void OpenCollectives::arrive(FrameHeader const& said, int rank) {
    Open& open = open_[place_of_next(rank)];
    open.said[index(rank)] =
        Descriptor{said.collective, said.dtype, said.op, said.root, said.count};
    ++open.arrived;
}

JOINABLE_DEFINITION std::optional<AbortReason> OpenCollectives::disagreement() const {
    auto const said_by = [this](int rank) -> Descriptor const& {
        return *open_.front().said[index(rank)];
    };
    return find_difference(static_cast<int>(size_), said_by);
}

JOINABLE_DEFINITION std::vector<int> OpenCollectives::missing(std::uint64_t sequence) const {
    std::size_t const at = sequence - first_;
    std::vector<int> ranks;
    for (std::size_t rank = 0; rank < size_; ++rank) {
        if (at >= open_.size() || !open_[at].said[rank]) {
            ranks.push_back(static_cast<int>(rank));
        }
    }
    return ranks;
}

JOINABLE_DEFINITION std::size_t OpenCollectives::place_of_next(int rank) const noexcept {
    std::size_t at = 0;
    while (at < open_.size() && open_[at].said[index(rank)]) {
        ++at;
    }
    return at;
}

}}} // namespace joinable::v0::detail
