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
#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/communicator/tcp/detail/socket.hpp>
#include <joinable/config.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The messages between ranks and the hub after the handshake.
enum class FrameKind : std::uint8_t {
    // a rank to the hub
    arrival,    ///< in the next collective, with the rank's contribution
    abort,      ///< with an AbortReason
    leave,      ///< the last frame
    keep_alive, ///< extends waits for this rank to one more deadline
    overdue,    ///< waited for a deadline: count, in ns; bytes: what the rank was doing
    question,   ///< which ranks are missing in a collective?
    credit,     ///< only says how much was read, as every frame does
    // the hub to a rank
    start,  ///< all ranks have arrived
    result, ///< of the next collective
    end,    ///< with the AbortReason that all ranks throw
    wait,   ///< answers overdue: `count` ns more, as the missing ranks are working
    answer, ///< to a question: the missing ranks
};

/// Precedes every message. All ranks run on machines with the same byte order.
struct FrameHeader {
    FrameKind kind = FrameKind::credit;
    Collective collective = Collective::barrier;
    DType dtype = DType::u8;
    ReduceOp op = ReduceOp::sum;
    std::int32_t root = 0;
    std::uint64_t sequence = 0; ///< of the collective
    std::uint64_t count = 0;
    std::uint64_t bytes = 0;    ///< of the body
    std::uint64_t consumed = 0; ///< bytes that the sender has read from this connection
};
static_assert(std::is_trivially_copyable_v<FrameHeader> && sizeof(FrameHeader) == 40);

/// The sequence number of the meeting of all ranks, before the first collective.
inline constexpr std::uint64_t meeting = ~std::uint64_t{0};
/// In its place, a wait for one rank beside the collectives.
[[nodiscard]] constexpr std::uint64_t wait_for_rank(int rank) noexcept {
    return meeting - 1 - static_cast<std::uint64_t>(rank);
}
[[nodiscard]] constexpr bool is_wait_for_rank(std::uint64_t sequence, int size) noexcept {
    return sequence < meeting && sequence >= wait_for_rank(size - 1);
}
/// The maximum size of one collective's data, per rank.
inline constexpr std::size_t most_frame_bytes = std::size_t{1} << 30U;
/// A rank has at most so many collectives in flight. The hub refuses a further one.
inline constexpr std::size_t most_in_flight = 64;

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

[[nodiscard]] bool are_ranks(std::vector<int> const& numbers, int size) noexcept;
[[nodiscard]] std::vector<int> unpacked_ranks(std::span<std::byte const> bytes);
[[nodiscard]] inline std::string unpacked_text(std::span<std::byte const> bytes) {
    return {reinterpret_cast<char const*>(bytes.data()), bytes.size()};
}

/// Where to put the next bytes of a body of `bytes` bytes, of which `done` have come. The memory
/// grows with `done`, so a header alone costs next to nothing.
[[nodiscard]] std::span<std::byte>
room_in(std::vector<std::byte>& body, std::uint64_t bytes, std::uint64_t done);

/// How the other side broke the protocol.
struct ProtocolError {
    std::string what = {};
};

/// The data waiting to be sent on a connection, in order. If the other side is lost, it accepts and
/// discards everything; the reader of that connection detects the loss.
class Outbox {
public:
    /// Has room for a frame without a body, so a rank can leave without memory.
    Outbox() { waiting_.reserve(sizeof(FrameHeader)); }

    /// Sends at once as much as the kernel accepts and `limit` permits. `limit` counts bytes from
    /// the start of the connection.
    /// @throws std::bad_alloc  nothing of the frame was sent, nor will be.
    void send(
        Socket const& socket,
        std::span<std::byte const> head,
        std::span<std::byte const> body,
        std::uint64_t limit = no_limit
    );
    void flush(Socket const& socket, std::uint64_t limit = no_limit);
    [[nodiscard]] bool is_empty() const noexcept { return begin_ == waiting_.size(); }
    /// Whether more can be sent as soon as the kernel accepts it.
    [[nodiscard]] bool is_blocked(std::uint64_t limit = no_limit) const noexcept {
        return !is_empty() && sent_ < limit;
    }

    /// The number of bytes that the other side may have read.
    [[nodiscard]] std::uint64_t sent() const noexcept { return sent_; }

    static constexpr std::uint64_t no_limit = ~std::uint64_t{0};

private:
    std::size_t count(std::optional<std::size_t> taken, std::size_t given) noexcept {
        sent_ += taken.value_or(given);
        return taken.value_or(given);
    }

    std::vector<std::byte> waiting_;
    std::size_t begin_ = 0; ///< of the waiting data
    std::uint64_t sent_ = 0;
};

/// Assembles frames from a connection. They may come in pieces, or many at once.
class Inbox {
public:
    /// `place(header, done)` returns where the body goes, starting with byte `done`: at least one
    /// byte if any are left, else nothing. It is called with 0 for each header first, and then
    /// whenever that place is full. `take(header)` is called when the frame is complete. Returns
    /// false if nothing more will come. Either may throw; then reading stops, and the next call
    /// begins with the same call.
    template <class Place, class Take>
    [[nodiscard]] bool read(Socket const& socket, Place const& place, Take const& take) {
        parse(place, take); // what could not be taken before, also if nothing more comes
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
            if (*got < into.size()) { // the kernel has no more
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
                done_ = 0;
                place_ = place(std::as_const(header_), done_);
                begin_ += sizeof header_; // not if that throws
                has_header_ = true;
            }
            std::size_t const piece = (std::min)(place_.size(), end_ - begin_);
            if (piece != 0) {
                std::memcpy(place_.data(), buffer_.data() + begin_, piece);
            }
            begin_ += piece;
            fill(piece);
            if (done_ == header_.bytes) {
                take(std::as_const(header_));
                has_header_ = false; // not if that throws
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
    std::uint64_t done_ = 0;     ///< of the body
    std::span<std::byte> place_; ///< for the next bytes of the body
    std::uint64_t consumed_ = 0;
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/tcp/detail/impl/frame.ipp>
#endif
