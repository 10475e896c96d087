// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <cstddef>
#include <string_view>
#include <vector>

#include <joinable/communicator/control.hpp>
#include <joinable/config.hpp>
#include <joinable/join/detail/session.hpp>

/// @file
/// The communicators that are inside guards.

namespace joinable { inline namespace v0 { namespace detail {

/// Allows a communicator in one guard at a time. With two guards, the roll calls of one could meet
/// those of the other, depending on the data. Communicators are classes of the user, so the record
/// is kept here, for this process.
class Occupation {
public:
    Occupation() = default;
    Occupation(Occupation const&) = delete;
    Occupation& operator=(Occupation const&) = delete;
    ~Occupation() { end(); }

    /// @throws ContractViolation  one of them is inside a guard.
    void begin(std::vector<ControlCommunicator*> const& communicators, Session& session);
    void end() noexcept;

    /// The guard that a communicator is inside of; null if none.
    [[nodiscard]] static Session* session_over(void const* communicator) noexcept;

private:
    struct Entry {
        void const* communicator;
        Session* session;
    };
    /// The communicators that are inside guards of this process.
    struct Occupied {
        std::atomic_flag busy{};
        std::atomic<std::size_t> count{0}; ///< the number of entries; 0 in programs without guards
        std::vector<Entry> entries;
    };
    static std::vector<Entry>::const_iterator
    find(std::vector<Entry> const& entries, void const* communicator) noexcept;
    static Occupied& in_guards() noexcept {
        static Occupied occupied;
        return occupied;
    }

    /// Held for a few dozen instructions.
    class Lock {
    public:
        explicit Lock(std::atomic_flag& busy) noexcept : busy_{busy} {
            while (busy_.test_and_set(std::memory_order_acquire)) {
                cpu_relax();
            }
        }
        Lock(Lock const&) = delete;
        Lock& operator=(Lock const&) = delete;
        ~Lock() { busy_.clear(std::memory_order_release); }

    private:
        std::atomic_flag& busy_;
    };

    Session* session_ = nullptr;
};

/// Called before an object outside the guard uses `communicator`. Error texts call it `name`.
/// @throws ContractViolation  the communicator is inside a guard, and joined ranks would not
///         follow.
inline void require_unguarded(void const* communicator, std::string_view name) {
    if (Session* const session = Occupation::session_over(communicator)) {
        session->require_followed(name);
    }
}

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/join/detail/impl/occupation.ipp>
#endif
