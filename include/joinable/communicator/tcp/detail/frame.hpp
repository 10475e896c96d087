// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/communicator/tcp/detail/socket.hpp>
#include <joinable/config.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// What ranks and the hub tell each other, once they have shaken hands.
enum class FrameKind : std::uint8_t {
    // a rank to the hub
    arrival,    ///< in the next collective; with what the rank contributes
    abort,      ///< with an AbortReason
    leave,      ///< nothing comes after it
    keep_alive, ///< ranks that wait for this one do so for one more deadline
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
/// The most that follows any other header: a reason that names every rank, with the longest text.
inline constexpr std::size_t most_told_bytes = sizeof(FailureKind) + sizeof(std::uint32_t) +
                                               max_ranks * sizeof(std::int32_t) + most_reason_text;

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

/// A text as it is sent, with a mark where it is cut.
[[nodiscard]] std::string sendable(std::string_view text);
[[nodiscard]] bool are_ranks(std::vector<int> const& numbers, int size) noexcept;

/// As bytes: kind, number of ranks, ranks, text. Numbers that are no ranks are left out.
[[nodiscard]] std::vector<std::byte> packed(AbortReason reason);
[[nodiscard]] std::vector<int> unpacked_ranks(std::span<std::byte const> bytes);
[[nodiscard]] inline std::string unpacked_text(std::span<std::byte const> bytes) {
    return {reinterpret_cast<char const*>(bytes.data()), bytes.size()};
}
/// Nothing, unless it is what packed() makes.
[[nodiscard]] std::optional<AbortReason> unpacked_reason(std::span<std::byte const> bytes);

/// Where the next of the `bytes` bytes of a body go, of which `done` have come. The memory grows with
/// those: a header alone costs next to nothing.
[[nodiscard]] std::span<std::byte>
room_in(std::vector<std::byte>& body, std::uint64_t bytes, std::uint64_t done);

/// What the other side broke the protocol by.
struct ProtocolError {
    std::string what = {};
};

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
    );
    void flush(Socket const& socket, std::uint64_t limit = no_limit);
    [[nodiscard]] bool is_empty() const noexcept { return begin_ == waiting_.size(); }
    /// Whether more can be sent as soon as the kernel takes it.
    [[nodiscard]] bool is_blocked(std::uint64_t limit = no_limit) const noexcept {
        return !is_empty() && sent_ < limit;
    }

    /// How many bytes the other side may have read.
    [[nodiscard]] std::uint64_t sent() const noexcept { return sent_; }

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
    /// `place(header, done)` says where what follows the header goes from byte `done` on: at least one
    /// of those that are left, or nothing where none is. It is called with 0 for each header first, and
    /// then whenever that place is full. `take(header)` is called when everything is there. False:
    /// nothing more will come. Either may throw; then nothing more is read.
    template <class Place, class Take>
    [[nodiscard]] bool read(Socket const& socket, Place const& place, Take const& take) {
        for (;;) {
            bool const is_direct = begin_ == end_ && place_.size() >= buffer_.size();
            std::span<std::byte> const into = is_direct ? place_ : std::span{buffer_}.subspan(end_);
            std::optional<std::size_t> const got = socket.receive(into);
            if (!got) {
                return false;
            }
            consumed_ += *got;
            if (is_direct) {
                fill(*got);
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
                done_ = 0;
                place_ = place(std::as_const(header_), done_);
                has_header_ = true;
            }
            std::size_t const piece = (std::min)(place_.size(), end_ - begin_);
            if (piece != 0) {
                std::memcpy(place_.data(), buffer_.data() + begin_, piece);
            }
            begin_ += piece;
            fill(piece);
            if (done_ == header_.bytes) {
                has_header_ = false;
                take(std::as_const(header_));
                continue;
            }
            if (place_.empty()) {
                place_ = place(std::as_const(header_), done_);
            }
            if (begin_ == end_) {
                break;
            }
        }
        std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
        end_ -= begin_;
        begin_ = 0;
    }
    void fill(std::size_t bytes) noexcept {
        place_ = place_.subspan(bytes);
        done_ += bytes;
    }

    std::vector<std::byte> buffer_ = std::vector<std::byte>(16'384);
    std::size_t begin_ = 0;
    std::size_t end_ = 0;
    FrameHeader header_;
    bool has_header_ = false;
    std::uint64_t done_ = 0;     ///< of what follows the header
    std::span<std::byte> place_; ///< where the next of it goes
    std::uint64_t consumed_ = 0;
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/tcp/detail/frame.ipp>
#endif
