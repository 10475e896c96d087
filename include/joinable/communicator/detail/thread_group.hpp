// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include <joinable/communicator/arena.hpp>
#include <joinable/communicator/detail/board.hpp>
#include <joinable/communicator/detail/mailbox.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable::inline v0::detail {

/// What the threads of one group share: the board for collectives, a mailbox for each pair of
/// ranks, and the groups that were split from it.
class ThreadGroup {
public:
    explicit ThreadGroup(int size)
        : memory_{allocate(Board::bytes_for(size))},
          board_{Board::create(size, {memory_.get(), Board::bytes_for(size)})},
          mail_(static_cast<std::size_t>(size) * static_cast<std::size_t>(size)),
          has_left_(static_cast<std::size_t>(size)) {}

    [[nodiscard]] Board& board() noexcept { return board_; }

    [[nodiscard]] Mailbox& mailbox(int from, int to) noexcept {
        return mail_[static_cast<std::size_t>(from * board_.size() + to)];
    }

    /// `rank` ends the collectives, the messages, and the groups that were split from this one.
    void abort(AbortReason const& reason, int rank) {
        std::vector<std::shared_ptr<ThreadGroup>> children;
        {
            std::lock_guard const lock{mutex_};
            if (!aborted_with_) {
                aborted_with_ = reason;
                is_aborted_.store(true);
            }
            for (Child const& child : children_) {
                if (auto group = child.group.lock()) {
                    children.push_back(std::move(group));
                }
            }
        }
        board_.abort(reason, rank);
        board_.room.wake();
        for (auto const& child : children) {
            child->abort(reason, 0); // who it is there matters only where ranks can die
        }
    }

    /// `rank` takes part no longer: a collective cannot complete any more, but the others still
    /// have their messages and their groups without it.
    void leave(int rank) {
        has_left_[static_cast<std::size_t>(rank)].store(true);
        board_.abort(left(rank), rank);
        board_.room.wake();
    }

    /// Whether a message to or from `peer` that waits will never be delivered.
    [[nodiscard]] bool is_lost(int peer) const noexcept {
        return is_aborted_.load() || has_left_[static_cast<std::size_t>(peer)].load();
    }
    /// Why. @pre is_lost(peer)
    [[nodiscard]] AbortReason loss(int peer) {
        std::lock_guard const lock{mutex_};
        return aborted_with_ ? *aborted_with_ : left(peer);
    }

    /// Whether groups have been split from this one, whose errors name other numbers.
    [[nodiscard]] bool has_split() const noexcept { return has_split_.load(); }

    /// The group of `size` ranks that the collective `sequence` splits off by `color`: its first
    /// member makes it, and every member calls this once. Throws if this group was aborted.
    std::shared_ptr<ThreadGroup> child(std::uint64_t sequence, int color, int size) {
        std::lock_guard const lock{mutex_};
        if (aborted_with_) {
            throw_failure(*aborted_with_);
        }
        auto found = std::find_if(children_.begin(), children_.end(), [&](Child const& child) {
            return child.sequence == sequence && child.color == color;
        });
        if (found == children_.end()) {
            has_split_.store(true);
            std::erase_if(children_, [](Child const& child) { return child.group.expired(); });
            auto group = std::make_shared<ThreadGroup>(size);
            children_.push_back({sequence, color, size, group, group});
            found = std::prev(children_.end());
        }
        std::shared_ptr<ThreadGroup> group = found->group.lock();
        if (--found->expected == 0) {
            found->kept.reset();
        }
        return group;
    }

    /// Memory that all ranks have, zeroed. Each calls this once with the number of a collective; the
    /// first one makes it.
    [[nodiscard]] Arena share(std::uint64_t sequence, std::size_t bytes) {
        std::lock_guard const lock{mutex_};
        auto found = std::find_if(shared_.begin(), shared_.end(), [&](Shared const& shared) {
            return shared.sequence == sequence;
        });
        if (found == shared_.end()) {
            shared_.push_back({sequence, board_.size(), std::make_shared<Arena>(bytes)});
            found = std::prev(shared_.end());
        }
        using Owner = std::shared_ptr<Arena>;
        auto owner = std::make_unique<Owner>(found->memory);
        if (--found->expected == 0) {
            shared_.erase(found);
        }
        std::byte* const data = (*owner)->data();
        auto const release = [](void* its, std::byte*, std::size_t) noexcept {
            delete static_cast<Owner*>(its);
        };
        return {data, bytes, release, owner.release()};
    }

private:
    struct Shared {
        std::uint64_t sequence;
        int expected; ///< ranks that have not come yet, for whom it is kept
        std::shared_ptr<Arena> memory;
    };
    struct Child {
        std::uint64_t sequence;
        int color;
        int expected; ///< members that have not come yet, for whom it is kept
        std::shared_ptr<ThreadGroup> kept;
        std::weak_ptr<ThreadGroup> group;
    };

    struct Free {
        void operator()(std::byte* memory) const noexcept {
            ::operator delete(memory, std::align_val_t{alignof(Board)});
        }
    };
    using Memory = std::unique_ptr<std::byte, Free>;
    static Memory allocate(std::size_t bytes) {
        return Memory{
            static_cast<std::byte*>(::operator new(bytes, std::align_val_t{alignof(Board)}))
        };
    }
    static AbortReason left(int rank) {
        return {
            FailureKind::peer_failed,
            {rank},
            concat("rank ", rank, " left while others wait for it")
        };
    }

    Memory memory_;
    Board& board_;
    std::vector<Mailbox> mail_;
    std::vector<std::atomic<bool>> has_left_;
    std::atomic<bool> is_aborted_{false};
    std::atomic<bool> has_split_{false};
    std::mutex mutex_;
    std::optional<AbortReason> aborted_with_;
    std::vector<Child> children_;
    std::vector<Shared> shared_;
};

} // namespace joinable::inline v0::detail
