// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/shared_memory/group/mailbox.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION PendingMessage& write_message(
    std::byte* memory, bool is_send, int tag, ConstBuffer data, std::uint64_t data_place
) noexcept {
    auto* const pending = ::new (memory) PendingMessage{};
    pending->is_send = is_send;
    pending->dtype = data.dtype;
    pending->tag = tag;
    pending->count = data.count;
    pending->data = data_place;
    return *pending;
}

JOINABLE_DEFINITION PendingMessage*
Mailbox::find(Board& board, bool is_send, int tag) const noexcept {
    for (std::uint64_t place = first_; place != 0;) {
        PendingMessage& pending = at(board, place);
        if (pending.is_send != is_send && pending.tag == tag) {
            return &pending;
        }
        place = pending.next;
    }
    return nullptr;
}

JOINABLE_DEFINITION void Mailbox::append(Board& board, PendingMessage& pending) noexcept {
    std::uint64_t const place = board.place_of(&pending);
    (last_ == 0 ? first_ : at(board, last_).next) = place;
    last_ = place;
}

JOINABLE_DEFINITION void Mailbox::remove(Board& board, PendingMessage& pending) noexcept {
    std::uint64_t const place = board.place_of(&pending);
    std::uint64_t before = 0;
    for (std::uint64_t other = first_; other != place; other = at(board, other).next) {
        before = other;
    }
    (before == 0 ? first_ : at(board, before).next) = pending.next;
    last_ = last_ == place ? before : last_;
}

}}} // namespace joinable::v0::detail
