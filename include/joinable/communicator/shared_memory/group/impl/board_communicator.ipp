// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/shared_memory/group/board_communicator.hpp>

#include <algorithm>
#include <cstdint>

#include <joinable/communicator/detail/checks.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/ranks.hpp>
#include <joinable/detail/text.hpp>

namespace joinable { inline namespace v0 { namespace detail {

template <class Rank, class Work>
BoardCommunicator<Rank, Work>::~BoardCommunicator() {
    if (!rank_.is_here()) {
        return;
    }
    if (unwinding_.has_begun()) {
        abort_for_exception(rank_, "the scope of its communicator");
    }
    rank_.group().leave(rank_.rank());
}

template <class Rank, class Work>
typename BoardCommunicator<Rank, Work>::Slot
BoardCommunicator<Rank, Work>::allot_slot(int color, int key) {
    check_color(color);
    auto const gather = [&](ConstBuffer in, Buffer out) { // errors call it split
        Request request = RequestsOf{rank_.rank(), rank_.size()}.all_gather(in, out);
        request.signature.collective = split_collective;
        post(request).wait();
    };
    GroupChoice const mine{color, key};
    std::vector<GroupChoice> all(as_index(rank_.size()));
    gather({&mine, 2, DType::i32}, {all.data(), 2 * all.size(), DType::i32});
    std::vector<int> const members = members_of(all, color);
    int const maker = members.front();
    std::uint64_t const made = rank_.rank() == maker ? rank_.make_group(members) : 0;
    std::vector<std::uint64_t> places(all.size());
    gather({&made, 1, DType::u64}, {places.data(), places.size(), DType::u64});
    std::uint64_t const place = places[as_index(maker)];
    if (place == 0) {
        throw CommunicationError{concat(
            "rank ",
            maker,
            " has no memory left that it shares, for a group of ",
            members.size(),
            " ranks: wait for what is under way, or leave groups before making new ones"
        )};
    }
    auto const slot = std::find(members.begin(), members.end(), rank_.rank());
    return {rank_.group().group_at(place), static_cast<int>(slot - members.begin())};
}

}}} // namespace joinable::v0::detail
