// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

#include <joinable/communicator/shared_memory/board/board.hpp>
#include <joinable/config.hpp>
#include <joinable/tensor/buffer.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// One side of a message: a send that waits for its receive, or a receive that waits for its send.
/// It lies in memory of the rank that wrote it.
struct alignas(64) PendingMessage {
    enum class State : std::uint8_t { waiting, taken, done };

    std::atomic<State> state{State::waiting}; ///< taken: the other side copies
    bool is_send = false;
    DType dtype = DType::u8;
    std::int32_t tag = 0;
    std::uint64_t count = 0;
    std::uint64_t data = 0; ///< an offset from the board; a send only reads it
    std::uint64_t next = 0; ///< offset of the next message in the mailbox; 0 is none
};

/// Not a template's member: nvcc 13 would look there for an operator new with an alignment.
PendingMessage& write_message(
    std::byte* memory, bool is_send, int tag, ConstBuffer data, std::uint64_t data_place
) noexcept;

/// The messages from one rank to another: messages of either side that wait for the other side, in
/// the order in which they were written. It lies in memory that processes share and holds no
/// addresses; zeros are an empty mailbox. Its lock only concerns two ranks that would wait for each
/// other anyway, and no data is copied while it is held.
class Mailbox {
public:
    [[nodiscard]] bool try_lock() noexcept { return lock_.exchange(1) == 0; }
    void unlock() noexcept { lock_.store(0); }

    /// The other side's oldest message with this tag; null if there is none. Linear in the waiting
    /// messages. @pre locked; so for all members below
    [[nodiscard]] PendingMessage* find(Board& board, bool is_send, int tag) const noexcept;
    void append(Board& board, PendingMessage& pending) noexcept;
    void remove(Board& board, PendingMessage& pending) noexcept;

private:
    static PendingMessage& at(Board& board, std::uint64_t place) noexcept {
        return *std::launder(reinterpret_cast<PendingMessage*>(board.place_at(place)));
    }

    std::atomic<std::uint32_t> lock_{0};
    std::uint64_t first_ = 0; ///< offsets of messages; 0 is none
    std::uint64_t last_ = 0;
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/group/impl/mailbox.ipp>
#endif
