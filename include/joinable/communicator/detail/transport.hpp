// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <concepts>
#include <optional>
#include <type_traits>
#include <vector>

#include <joinable/communicator/detail/work_of.hpp>
#include <joinable/error.hpp>

/// @file
/// A transport: one class for a rank, which models Transport, and a communicator that derives from RankMembers and from
/// the collectives that it has (collective_members.hpp). The rank's works are those of WorkOf.

namespace joinable { inline namespace v0 { namespace detail {

/// One rank of a transport. Collectives start in a function of the communicator, post(); works ask the rank whether
/// they are complete; the rank's destructor, or a close() of its own, ends it.
template <class Rank>
concept Transport =
    std::derived_from<Rank, HasWorks> &&
    requires(Rank& rank, AbortReason const& reason, std::chrono::nanoseconds deadline) {
        { rank.rank() } -> std::same_as<int>;
        { rank.size() } -> std::same_as<int>;
        { rank.is_renumbered() } -> std::same_as<bool>;
        rank.abort(reason); // tells the others
        { rank.is_aborted() } -> std::same_as<bool>;
        { rank.abort_reason() } -> std::convertible_to<std::optional<AbortReason>>; // has heard
        { rank.missing_ranks() } -> std::same_as<std::vector<int>>;
        rank.keep_alive();
        { rank.set_deadline(deadline) } -> std::same_as<std::chrono::nanoseconds>;
    };

/// The members of a communicator that ask its rank. `Derived` has own_rank(), which returns that; it may be private,
/// with this class as a friend.
template <class Derived>
class RankMembers {
public:
    [[nodiscard]] int rank() const noexcept { return own_rank_of(*this).rank(); }
    [[nodiscard]] int size() const noexcept { return own_rank_of(*this).size(); }
    /// Local. Whether its group numbers some ranks differently from the communicator that was split.
    [[nodiscard]] bool is_renumbered() const { return own_rank_of(*this).is_renumbered(); }

    /// Local. The first reason wins, as the class says; every wait that can no longer complete throws it.
    /// @throws ContractViolation  a process that the rank has forked calls this; with NCCL its copy ends instead.
    void abort(AbortReason const& reason) {
        ask(*this, [&](auto& own) { own.abort(reason); });
    }
    /// Local. A process that the rank has forked is refused, as by abort_reason(). NCCL and machines
    /// refuse it where they ask their control communicator or levels, so neither after a failure nor
    /// over a SelfCommunicator.
    [[nodiscard]] bool is_aborted() const {
        return ask(*this, [](auto& own) { return own.is_aborted(); });
    }
    /// Local. The reason that this rank has heard of.
    [[nodiscard]] std::optional<AbortReason> abort_reason() const {
        return ask(*this, [](auto& own) -> std::optional<AbortReason> {
            return own.abort_reason();
        });
    }

    /// Local; for waits that start later. Returns the deadline that was in force.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) {
        return ask(*this, [&](auto& own) { return own.set_deadline(deadline); });
    }
    /// Local. Ranks that wait for this one now wait for one more deadline from this call.
    void keep_alive() {
        ask(*this, [](auto& own) { own.keep_alive(); });
    }
    /// Local. The ranks that have not arrived in this rank's oldest unfinished collective.
    [[nodiscard]] std::vector<int> missing_ranks() const {
        return ask(*this, [](auto& own) { return own.missing_ranks(); });
    }

private:
    template <class Self>
    [[nodiscard]] static auto& own_rank_of(Self& self) noexcept {
        using Own = std::conditional_t<std::is_const_v<Self>, Derived const, Derived>;
        return static_cast<Own&>(self).own_rank();
    }
    /// f(rank), while other threads are kept from the rank as HasWorks::hold() says.
    template <class Self, class F>
    static auto ask(Self& self, F const& f) {
        auto& own = own_rank_of(self);
        static_assert(Transport<std::remove_cvref_t<decltype(own)>>);
        [[maybe_unused]] auto const held = own.hold();
        return f(own);
    }
};

}}} // namespace joinable::v0::detail
