// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/tcp/detail/socket.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// What ranks and the hub tell each other, once they have shaken hands.
enum class FrameKind : std::uint8_t {
    // a rank to the hub
    arrival,    ///< in the next collective; with what the rank contributes
    abort,      ///< with an AbortReason
    leave,      ///< nothing comes after it
    keep_alive, ///< whoever waits for this rank does so for one more deadline
    overdue, ///< has waited for a deadline: count is that, in ns, bytes are the words that say for what
    question, ///< who is missing in a collective?
    credit,   ///< tells how much was read, as every frame does
    // the hub to a rank
    start,  ///< all ranks have come
    result, ///< of the next collective
    end,    ///< with the AbortReason that all ranks throw
    wait,   ///< answers overdue: for another `count` ns, as those that are missing are at work
    answer, ///< to a question: the ranks
};

/// Stands before every message. All ranks run on machines with one order of bytes.
struct FrameHeader {
    FrameKind kind = FrameKind::credit;
    Collective collective = Collective::barrier;
    DType dtype = DType::u8;
    ReduceOp op = ReduceOp::sum;
    std::int32_t root = 0;
    std::uint64_t sequence = 0; ///< of the collective that it is about
    std::uint64_t count = 0;
    std::uint64_t bytes = 0;    ///< of what follows
    std::uint64_t consumed = 0; ///< bytes that the sender has read of this connection
};
static_assert(std::is_trivially_copyable_v<FrameHeader> && sizeof(FrameHeader) == 40);

/// The sequence number that stands for the meeting of all ranks, before there is a collective.
inline constexpr std::uint64_t meeting = ~std::uint64_t{0};
/// The most that one collective moves, per rank.
inline constexpr std::size_t most_frame_bytes = std::size_t{1} << 30U;

template <class T>
[[nodiscard]] std::span<std::byte const> bytes_of(T const& object) noexcept {
    static_assert(std::is_trivially_copyable_v<T>);
    return std::as_bytes(std::span{&object, 1});
}
template <class T>
[[nodiscard]] T object_at(std::span<std::byte const> bytes) noexcept {
    static_assert(std::is_trivially_copyable_v<T>);
    T object;
    std::memcpy(&object, bytes.data(), sizeof object);
    return object;
}

/// As bytes: kind, number of ranks, ranks, text.
[[nodiscard]] inline std::vector<std::byte> packed(AbortReason const& reason) {
    std::vector<std::byte> bytes;
    auto const append = [&](std::span<std::byte const> part) {
        bytes.insert(bytes.end(), part.begin(), part.end());
    };
    append(bytes_of(reason.kind));
    append(bytes_of(static_cast<std::uint32_t>(reason.ranks.size())));
    for (int const rank : reason.ranks) {
        append(bytes_of(static_cast<std::int32_t>(rank)));
    }
    append(std::as_bytes(std::span{reason.message}));
    return bytes;
}
[[nodiscard]] inline std::vector<int> unpacked_ranks(std::span<std::byte const> bytes) {
    std::vector<int> ranks;
    for (; bytes.size() >= sizeof(std::int32_t); bytes = bytes.subspan(sizeof(std::int32_t))) {
        ranks.push_back(object_at<std::int32_t>(bytes));
    }
    return ranks;
}
[[nodiscard]] inline std::string unpacked_text(std::span<std::byte const> bytes) {
    return {reinterpret_cast<char const*>(bytes.data()), bytes.size()};
}
[[nodiscard]] inline AbortReason unpacked_reason(std::span<std::byte const> bytes) {
    AbortReason reason;
    constexpr std::size_t fixed = sizeof reason.kind + sizeof(std::uint32_t);
    if (bytes.size() < fixed) {
        return reason;
    }
    reason.kind = object_at<FailureKind>(bytes);
    std::size_t const ranks =
        (std::min<std::size_t>)(object_at<std::uint32_t>(bytes.subspan(sizeof reason.kind)) *
                                    sizeof(std::int32_t),
                                bytes.size() - fixed);
    reason.ranks = unpacked_ranks(bytes.subspan(fixed, ranks));
    reason.message = unpacked_text(bytes.subspan(fixed + ranks));
    return reason;
}

/// What waits to be sent on a connection, in its order. The other side may be lost: then it takes
/// everything and keeps nothing, and who reads that connection learns it.
class Outbox {
public:
    /// Sends at once what the kernel takes and `limit` permits, in bytes since the beginning.
    void send(
        Socket const& socket,
        std::span<std::byte const> head,
        std::span<std::byte const> body,
        std::uint64_t limit = no_limit
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
    void flush(Socket const& socket, std::uint64_t limit = no_limit) {
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
            waiting_.erase(
                waiting_.begin(), waiting_.begin() + static_cast<std::ptrdiff_t>(begin_)
            );
            begin_ = 0;
        }
    }
    [[nodiscard]] bool is_empty() const noexcept { return begin_ == waiting_.size(); }
    /// Whether more can be sent as soon as the kernel takes it.
    [[nodiscard]] bool is_blocked(std::uint64_t limit = no_limit) const noexcept {
        return !is_empty() && sent_ < limit;
    }

    static constexpr std::uint64_t no_limit = ~std::uint64_t{0};

private:
    std::size_t count(std::optional<std::size_t> taken, std::size_t given) noexcept {
        sent_ += taken.value_or(given);
        return taken.value_or(given);
    }

    std::vector<std::byte> waiting_;
    std::size_t begin_ = 0; ///< of what waits
    std::uint64_t sent_ = 0;
};

/// Takes frames from a connection, as they come: in pieces, or many at once.
class Inbox {
public:
    /// `place(header)` says where what follows the header goes, `take(header, body)` is called when it
    /// is there. False: nothing more will come. Either may throw; then nothing more is read.
    template <class Place, class Take>
    [[nodiscard]] bool read(Socket const& socket, Place const& place, Take const& take) {
        for (;;) {
            bool const is_direct = begin_ == end_ && body_.size() - filled_ >= buffer_.size();
            std::span<std::byte> const into =
                is_direct ? body_.subspan(filled_) : std::span{buffer_}.subspan(end_);
            std::optional<std::size_t> const got = socket.receive(into);
            if (!got) {
                return false;
            }
            consumed_ += *got;
            if (is_direct) {
                filled_ += *got;
            } else {
                end_ += *got;
            }
            parse(place, take);
            if (*got < into.size()) { // there was no more
                return true;
            }
        }
    }
    [[nodiscard]] std::uint64_t consumed() const noexcept { return consumed_; }

private:
    template <class Place, class Take>
    void parse(Place const& place, Take const& take) {
        for (;;) {
            if (!has_header_) {
                if (end_ - begin_ < sizeof header_) {
                    break;
                }
                header_ = object_at<FrameHeader>(std::span{buffer_}.subspan(begin_));
                begin_ += sizeof header_;
                body_ = place(std::as_const(header_));
                filled_ = 0;
                has_header_ = true;
            }
            std::size_t const piece = (std::min)(body_.size() - filled_, end_ - begin_);
            if (piece != 0) {
                std::memcpy(body_.data() + filled_, buffer_.data() + begin_, piece);
            }
            filled_ += piece;
            begin_ += piece;
            if (filled_ < body_.size()) {
                break;
            }
            has_header_ = false;
            auto const body = std::exchange(body_, {});
            filled_ = 0;
            take(std::as_const(header_), body);
        }
        std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
        end_ -= begin_;
        begin_ = 0;
    }

    std::vector<std::byte> buffer_ = std::vector<std::byte>(16'384);
    std::size_t begin_ = 0;
    std::size_t end_ = 0;
    FrameHeader header_;
    bool has_header_ = false;
    std::span<std::byte> body_;
    std::size_t filled_ = 0;
    std::uint64_t consumed_ = 0;
};

}}} // namespace joinable::v0::detail
