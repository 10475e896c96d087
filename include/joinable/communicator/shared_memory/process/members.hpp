// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <joinable/communicator/detail/background_thread.hpp>
#include <joinable/communicator/detail/ranks.hpp>
#include <joinable/communicator/shared_memory/board/arrival_line.hpp>
#include <joinable/communicator/shared_memory/board/board.hpp>
#include <joinable/communicator/shared_memory/board/first_reason.hpp>
#include <joinable/communicator/shared_memory/board/tuning.hpp>
#include <joinable/communicator/shared_memory/process/shared_object.hpp>
#include <joinable/config.hpp>
#include <joinable/detail/hash.hpp>

#include <cerrno>
#include <pthread.h>
#include <unistd.h>

/// @file
/// The members of a group whose processes have no parent that watches them: the beginning of its
/// shared-memory object.

namespace joinable { inline namespace v0 { namespace detail {

/// A rank's place in the group. A thread of the rank holds a robust mutex while the rank takes part.
/// If its process dies, in whatever way, the system marks the mutex for the next process that tries
/// it. That works between containers, too, where process numbers mean nothing.
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

    /// Returns false if another process has this rank. The thread that calls this also calls leave().
    [[nodiscard]] bool enter() noexcept {
        // Lock the mutex first: once others see that this rank is here, they can also detect its
        // death. Until then only another process of this rank tries the mutex.
        int const locked = pthread_mutex_trylock(&alive_);
        if (locked != 0 && locked != EOWNERDEAD) {
            return false;
        }
        if (process() != 0) { // it has died or left: this mutex does not change
            pthread_mutex_unlock(&alive_);
            return false;
        }
        if (locked == EOWNERDEAD) { // it died before other ranks saw it
            pthread_mutex_consistent(&alive_);
        }
        process_.store(static_cast<int>(getpid()));
        has_come_.store(true);
        return true;
    }
    /// Says that this rank is here but will not take part. The others treat it as dead.
    void fail() noexcept { has_failed_.store(true); }
    [[nodiscard]] bool has_failed() const noexcept { return has_failed_.load(); }
    /// Says that this rank no longer takes part.
    void leave() noexcept {
        has_left_.store(true);
        pthread_mutex_unlock(&alive_);
    }

    [[nodiscard]] bool has_come() const noexcept { return has_come_.load(); }
    [[nodiscard]] bool has_left() const noexcept { return has_left_.load(); }
    /// The process number in its own namespace; 0 before it enters.
    [[nodiscard]] int process() const noexcept { return process_.load(); }

    /// For the other ranks: whether it died while it took part. Once true, this stays true. If the
    /// caller dies at any point in here, the next caller finds the same.
    [[nodiscard]] bool has_died() noexcept {
        if (has_failed()) {
            return true;
        }
        if (process() == 0 || has_left_.load()) {
            return false;
        }
        switch (pthread_mutex_trylock(&alive_)) {
        case 0: // it is entering or leaving now
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

/// The first bytes of the object. A process compares them before it maps the rest.
struct alignas(64) Heading {
    static constexpr std::uint64_t joinable_magic = 0x656c62616e696f6a; ///< "joinable"
    /// By what ranks lay out the memory that they share, and share the work on it.
    static constexpr std::uint64_t agreed[] = {
        library_version,
        sizeof(Member),
        sizeof(Board),
        Board::state_bytes(),
        sizeof(ArrivalLine),
        sizeof(StoredReason),
        Board::max_in_flight,
        tuning::slot_bytes,
        tuning::one_chunk_bytes,
        tuning::chunks_per_rank,
        tuning::largest_chunk_bytes,
        tuning::slice_bytes,
        tuning::crowded_slice_bytes,
        tuning::slices_per_ring,
        std::uint64_t{tuning::spins},
        std::uint64_t{tuning::crowded_spins},
        std::uint64_t{tuning::yields},
    };
    [[nodiscard]] static constexpr std::uint64_t layout_of(std::span<std::uint64_t const> numbers) {
        Hash hash;
        for (std::uint64_t const number : numbers) {
            hash.add(number);
        }
        return hash.value();
    }
    static std::uint64_t const own_layout; ///< differs between programs that cannot share memory

    std::uint64_t magic = joinable_magic;
    std::uint64_t layout = own_layout;
    std::uint64_t size = 0; ///< ranks
    std::uint64_t room = 0; ///< bytes per rank for buffers
};
inline constexpr std::uint64_t Heading::own_layout = Heading::layout_of(Heading::agreed);

/// The beginning of the object: the heading, then a Member for each rank. It exists before the rest
/// of the object, for which there may be no memory.
struct alignas(64) MemberTable {
    enum State : int { starting, ready, failed }; ///< of the rest, which rank 0 makes

    Heading heading;
    std::atomic<State> state{starting};
    StoredReason failure = {}; ///< why it failed

    [[nodiscard]] Member& member(int rank) noexcept {
        return std::launder(reinterpret_cast<Member*>(this + 1))[rank];
    }
    [[nodiscard]] std::vector<int> missing_ranks() {
        return ranks_where(static_cast<int>(heading.size), [&](int rank) {
            return !member(rank).has_come();
        });
    }
    static constexpr std::size_t used_bytes_for(int size) noexcept {
        return sizeof(MemberTable) + static_cast<std::size_t>(size) * sizeof(Member);
    }
    /// Where the rest begins: at a page, also on systems with pages of 64 KiB.
    static constexpr std::size_t bytes_for(int size) noexcept {
        constexpr std::size_t largest_page = std::size_t{64} << 10U;
        return (used_bytes_for(size) + largest_page - 1) / largest_page * largest_page;
    }
    static MemberTable& create(std::byte* memory, Heading const& heading) {
        auto* const table = ::new (memory) MemberTable{heading};
        ::new (static_cast<void*>(table + 1)) Member[heading.size];
        return *table;
    }
};

/// A rank's place in the table of an object. The destructor leaves. A thread that does nothing else
/// holds the place, so the thread that attaches may end before.
class Membership {
public:
    /// Takes the table unless another process has this rank: then it returns nothing.
    /// @throws CommunicationError  the system cannot start another thread.
    static std::optional<Membership> enter(Mapping&& table, int rank) {
        auto place = std::make_unique<Place>(at(table).member(rank));
        BackgroundThread thread{
            "the thread by which a rank is known to live",
            [held = place.get()] {
                bool const has_entered = held->member.enter();
                held->set(has_entered ? State::held : State::refused);
                if (has_entered) {
                    held->state.wait(State::held);
                    held->member.leave();
                }
            }
        };
        place->state.wait(State::starting);
        if (place->state.load() == State::refused) {
            return std::nullopt;
        }
        return Membership{std::move(table), std::move(place), std::move(thread)};
    }
    Membership(Membership&&) = default;
    Membership& operator=(Membership&&) = delete;
    ~Membership() {
        if (is_open()) {
            place_->set(State::given_back);
        }
    }

    [[nodiscard]] bool is_open() const noexcept { return place_ != nullptr; }
    [[nodiscard]] MemberTable& table() const noexcept { return at(table_); }
    [[nodiscard]] static MemberTable& at(Mapping const& memory) noexcept {
        return *std::launder(reinterpret_cast<MemberTable*>(memory.begin()));
    }

private:
    enum class State : int { starting, held, refused, given_back };
    struct Place {
        Member& member;
        std::atomic<State> state{State::starting};

        explicit Place(Member& of) noexcept : member{of} {}
        void set(State next) noexcept {
            state.store(next);
            state.notify_all();
        }
    };

    Membership(Mapping&& table, std::unique_ptr<Place> place, BackgroundThread&& thread) noexcept
        : table_{std::move(table)}, place_{std::move(place)}, thread_{std::move(thread)} {}

    Mapping table_;
    std::unique_ptr<Place> place_;
    BackgroundThread thread_; ///< ends before the others go
};

}}} // namespace joinable::v0::detail
