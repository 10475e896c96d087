// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <joinable/detail/text.hpp>
#include <joinable/tensor/buffer.hpp>

namespace joinable::inline v0::detail {

inline std::string text_of(bool is_send, int tag, Buffer const& buffer) {
    return concat(
        is_send ? "a send of " : "a receive of ",
        buffer.count,
        " ",
        joinable::name_of(buffer.dtype),
        " with tag ",
        tag
    );
}

/// One side of a message: a send that waits for its receive, or the other way round.
struct Letter {
    enum class State : std::uint8_t { unused, waiting, done };

    bool is_send = false;
    int tag = 0;
    Buffer buffer; ///< of a send only read
    std::uint64_t number = 0;
    std::atomic<State> state{State::unused};

    [[nodiscard]] std::string text() const { return text_of(is_send, tag, buffer); }
};

/// The messages from one rank to another. Whoever comes second copies: so nothing has to make
/// progress, and whoever computes holds up nobody. Messages of one tag keep their order. The lock
/// is between two threads that would wait for each other anyway.
class Mailbox {
public:
    struct Posted {
        Letter* waiting = nullptr; ///< null: the other side was there, and the message is delivered
        std::string mismatch;      ///< why it cannot be delivered, if so
    };

    Posted post(bool is_send, int tag, Buffer buffer) {
        std::lock_guard const lock{mutex_};
        Letter* other = nullptr;
        Letter* unused = nullptr;
        for (auto const& letter : letters_) {
            Letter::State const state = letter->state.load();
            if (state == Letter::State::unused) {
                unused = letter.get();
            } else if (state == Letter::State::waiting && letter->is_send != is_send &&
                       letter->tag == tag && (other == nullptr || letter->number < other->number)) {
                other = letter.get();
            }
        }
        if (other == nullptr) {
            if (unused == nullptr) {
                unused = letters_.emplace_back(std::make_unique<Letter>()).get();
            }
            unused->is_send = is_send;
            unused->tag = tag;
            unused->buffer = buffer;
            unused->number = next_++;
            unused->state.store(Letter::State::waiting);
            return {unused, {}};
        }
        if (other->buffer.count != buffer.count || other->buffer.dtype != buffer.dtype) {
            return {nullptr, concat(text_of(is_send, tag, buffer), " meets ", other->text())};
        }
        Buffer const& from = is_send ? buffer : other->buffer;
        Buffer const& to = is_send ? other->buffer : buffer;
        if (from.count != 0) {
            std::memmove(to.data, from.data, from.bytes());
        }
        other->state.store(Letter::State::done);
        return {};
    }

    /// The owner needs its letter no longer. Whether it was delivered: if not, nobody touches its
    /// memory from now on.
    bool take_back(Letter& letter) {
        std::lock_guard const lock{mutex_};
        return letter.state.exchange(Letter::State::unused) == Letter::State::done;
    }

private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<Letter>> letters_; ///< as many as were ever under way at once
    std::uint64_t next_ = 0;
};

} // namespace joinable::inline v0::detail
