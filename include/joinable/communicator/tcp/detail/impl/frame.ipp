// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/tcp/detail/frame.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION std::string sendable(std::string_view text) {
    std::string sent{text};
    if (sent.size() > most_reason_text) {
        sent.resize(length_before_cut(text));
        sent += cut_mark;
    }
    return sent;
}

JOINABLE_DEFINITION bool are_ranks(std::vector<int> const& numbers, int size) noexcept {
    return std::all_of(numbers.begin(), numbers.end(), [&](int number) {
        return number >= 0 && number < size;
    });
}

JOINABLE_DEFINITION std::vector<std::byte> packed(AbortReason reason) {
    std::erase_if(reason.ranks, [](int rank) { return !are_ranks({rank}, max_ranks); });
    reason.ranks.resize((std::min)(reason.ranks.size(), std::size_t{max_ranks}));
    reason.message = sendable(reason.message);
    std::vector<std::byte> bytes(
        bytes_before_ranks + reason.ranks.size() * sizeof(std::int32_t) + reason.message.size()
    );
    auto end = bytes.begin();
    auto const append = [&](std::span<std::byte const> part) {
        end = std::copy(part.begin(), part.end(), end);
    };
    append(bytes_of(reason.kind));
    append(bytes_of(static_cast<std::uint8_t>(reason.has_left ? 1 : 0)));
    append(bytes_of(static_cast<std::int32_t>((std::max)(reason.origin, -1))));
    append(bytes_of(static_cast<std::uint32_t>(reason.ranks.size())));
    for (int const rank : reason.ranks) {
        append(bytes_of(static_cast<std::int32_t>(rank)));
    }
    append(std::as_bytes(std::span{reason.message}));
    return bytes;
}

JOINABLE_DEFINITION std::vector<int> unpacked_ranks(std::span<std::byte const> bytes) {
    std::vector<int> ranks;
    for (; bytes.size() >= sizeof(std::int32_t); bytes = bytes.subspan(sizeof(std::int32_t))) {
        ranks.push_back(object_at<std::int32_t>(bytes));
    }
    return ranks;
}

JOINABLE_DEFINITION std::optional<AbortReason> unpacked_reason(std::span<std::byte const> bytes) {
    AbortReason reason;
    if (bytes.size() < bytes_before_ranks) {
        return std::nullopt;
    }
    reason.kind = object_at<FailureKind>(bytes);
    auto const has_left = object_at<std::uint8_t>(bytes.subspan(1));
    reason.has_left = has_left == 1;
    reason.origin = object_at<std::int32_t>(bytes.subspan(2));
    std::size_t const ranks = object_at<std::uint32_t>(bytes.subspan(6));
    bytes = bytes.subspan(bytes_before_ranks);
    if (reason.kind > FailureKind::contract || has_left > 1 || reason.origin < -1 ||
        ranks > bytes.size() / sizeof(std::int32_t)) {
        return std::nullopt;
    }
    reason.ranks = unpacked_ranks(bytes.first(ranks * sizeof(std::int32_t)));
    reason.message = unpacked_text(bytes.subspan(ranks * sizeof(std::int32_t)));
    return are_ranks(reason.ranks, max_ranks) ? std::optional{std::move(reason)} : std::nullopt;
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
