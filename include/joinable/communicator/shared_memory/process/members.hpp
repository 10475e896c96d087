// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include <joinable/communicator/shared_memory/board/board.hpp>
#include <joinable/communicator/shared_memory/board/stored_reason.hpp>
#include <joinable/config.hpp>

#include <cerrno>
#include <pthread.h>
#include <unistd.h>

/// @file
/// Who is in a group whose processes have no parent that watches them: what lies at the beginning of
/// its shared-memory object.

namespace joinable { inline namespace v0 { namespace detail {

/// A rank's place in the group. The rank holds a robust mutex as long as it takes part: if the
/// thread that locked it dies, in whatever way, the system marks the mutex for the process that tries
/// it next. That works between containers, too, where process numbers mean nothing.
class alignas(64) Member {
public:
    Member() noexcept {
        pthread_mutexattr_t attributes{};
        pthread_mutexattr_init(&attributes);
        pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(&alive_, &attributes);
        pthread_mutexattr_destroy(&attributes);
    }

    /// The thread of this rank that attaches calls it. False: another process is this rank.
    [[nodiscard]] bool enter() noexcept {
        // The mutex comes first: from the moment at which others see that this rank is here, they see
        // its death, too. Until then nobody tries the mutex but another process of this rank.
        int const locked = pthread_mutex_trylock(&alive_);
        if (locked != 0 && locked != EOWNERDEAD) {
            return false;
        }
        if (process() != 0) { // one that died, or has left: this mutex stays as it is
            pthread_mutex_unlock(&alive_);
            return false;
        }
        if (locked == EOWNERDEAD) { // one that died before anybody saw it
            pthread_mutex_consistent(&alive_);
        }
        process_.store(static_cast<int>(getpid()));
        has_come_.store(true);
        return true;
    }
    /// It is here, and will not take part: the others hear of it as of a death.
    void fail() noexcept { has_failed_.store(true); }
    [[nodiscard]] bool has_failed() const noexcept { return has_failed_.load(); }
    /// It takes part no longer; `entered` is the thread that did so. False: this is another thread,
    /// and the memory has to stay mapped until that one has ended.
    [[nodiscard]] bool leave(pthread_t entered) noexcept {
        has_left_.store(true);
        return pthread_equal(entered, pthread_self()) != 0 && pthread_mutex_unlock(&alive_) == 0;
    }

    [[nodiscard]] bool has_come() const noexcept { return has_come_.load(); }
    [[nodiscard]] bool has_left() const noexcept { return has_left_.load(); }
    /// Its number where it runs; 0 before it comes.
    [[nodiscard]] int process() const noexcept { return process_.load(); }

    /// Whether it died while it took part; for the other ranks. Once true it stays so: should the one
    /// who looks die at any point in here, then the next one finds the same.
    [[nodiscard]] bool has_died() noexcept {
        if (has_failed()) {
            return true;
        }
        if (process() == 0 || has_left_.load()) {
            return false;
        }
        switch (pthread_mutex_trylock(&alive_)) {
        case 0: // it is just coming or leaving
            pthread_mutex_unlock(&alive_);
            return false;
        case EOWNERDEAD:
            pthread_mutex_unlock(&alive_); // unrepaired: from now on it is ENOTRECOVERABLE
            return true;
        case ENOTRECOVERABLE: return true;
        default: return false;
        }
    }

private:
    std::atomic<int> process_{0};
    std::atomic<bool> has_come_{false};
    std::atomic<bool> has_left_{false};
    std::atomic<bool> has_failed_{false};
    pthread_mutex_t alive_{};
};

/// The first bytes of the object: what a process compares before it maps the rest.
struct alignas(64) Heading {
    static constexpr std::uint64_t joinable_magic = 0x656c62616e696f6a; ///< "joinable"
    /// Differs between programs that lay out the memory differently.
    static constexpr std::uint64_t own_layout = std::uint64_t{library_version} << 32U |
                                                std::uint64_t{sizeof(Member)} << 20U |
                                                std::uint64_t{sizeof(Board)};

    std::uint64_t magic = joinable_magic;
    std::uint64_t layout = own_layout;
    std::uint64_t size = 0; ///< ranks
    std::uint64_t room = 0; ///< bytes for the buffers of each
};

/// The beginning of the object: the heading, then a Member for each rank. It is there before the rest
/// is, for which there may be no memory.
struct alignas(64) MemberTable {
    enum State : int { starting, ready, failed }; ///< the rest of the object, which rank 0 makes

    Heading heading;
    std::atomic<State> state{starting};
    StoredReason failure = {}; ///< why it failed

    [[nodiscard]] Member& member(int rank) noexcept {
        return std::launder(reinterpret_cast<Member*>(this + 1))[rank];
    }
    [[nodiscard]] std::vector<int> missing_ranks() {
        std::vector<int> ranks;
        for (int rank = 0; rank < static_cast<int>(heading.size); ++rank) {
            if (!member(rank).has_come()) {
                ranks.push_back(rank);
            }
        }
        return ranks;
    }
    static constexpr std::size_t bytes_for(int size) noexcept {
        constexpr std::size_t page = 4096;
        std::size_t const bytes =
            sizeof(MemberTable) + static_cast<std::size_t>(size) * sizeof(Member);
        return (bytes + page - 1) / page * page;
    }
    static MemberTable& create(std::byte* memory, Heading const& heading) {
        auto* const table = ::new (memory) MemberTable{heading};
        ::new (static_cast<void*>(table + 1)) Member[heading.size];
        return *table;
    }
};

}}} // namespace joinable::v0::detail
