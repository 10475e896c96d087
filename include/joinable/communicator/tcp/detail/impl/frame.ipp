// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/tcp/detail/frame.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION bool are_ranks(std::vector<int> const& numbers, int size) noexcept {
    return std::all_of(numbers.begin(), numbers.end(), [&](int number) {
        return number >= 0 && number < size;
    });
}

JOINABLE_DEFINITION std::vector<int> unpacked_ranks(std::span<std::byte const> bytes) {
    std::vector<int> ranks;
    for (; bytes.size() >= sizeof(std::int32_t); bytes = bytes.subspan(sizeof(std::int32_t))) {
        ranks.push_back(object_at<std::int32_t>(bytes));
    }
    return ranks;
}

JOINABLE_DEFINITION std::span<std::byte>
room_in(std::vector<std::byte>& body, std::uint64_t bytes, std::uint64_t done) {
    constexpr std::uint64_t least = 65'536;
    body.resize((std::min)(bytes, (std::max)(least, 2 * done)));
    return std::span{body}.subspan(done);
}

JOINABLE_DEFINITION void Outbox::send(
    Socket const& socket,
    std::span<std::byte const> head,
    std::span<std::byte const> body,
    std::uint64_t limit
) {
    // First: nothing may throw once the other side has a part of the frame. The pages of what the kernel takes at once
    // are never touched, and the memory stays, so frames of one size ask for it once.
    std::size_t const most = waiting_.size() + head.size() + body.size();
    if (most > waiting_.capacity()) {
        waiting_.reserve((std::max)(most, 2 * waiting_.capacity()));
    }
    if (is_empty() && sent_ + head.size() + body.size() <= limit) {
        std::size_t const taken = count(socket.send(head, body), head.size() + body.size());
        std::size_t const of_head = (std::min)(taken, head.size());
        head = head.subspan(of_head);
        body = body.subspan(taken - of_head);
    }
    waiting_.insert(waiting_.end(), head.begin(), head.end());
    waiting_.insert(waiting_.end(), body.begin(), body.end());
    flush(socket, limit);
}

JOINABLE_DEFINITION void Outbox::flush(Socket const& socket, std::uint64_t limit) {
    while (!is_empty() && sent_ < limit) {
        std::span const left = std::span{waiting_}.subspan(begin_);
        std::span const now = left.first(
            static_cast<std::size_t>((std::min<std::uint64_t>)(left.size(), limit - sent_))
        );
        std::size_t const taken = count(socket.send(now), now.size());
        if (taken == 0) {
            break;
        }
        begin_ += taken;
    }
    if (is_empty() || begin_ > waiting_.size() / 2) {
        waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<std::ptrdiff_t>(begin_));
        begin_ = 0;
    }
}

}}} // namespace joinable::v0::detail
