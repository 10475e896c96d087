// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/type_name.hpp>
#include <joinable/hook/join_hook.hpp>
#include <joinable/hook/keywords.hpp>
#include <joinable/hook/ordering.hpp>
#include <joinable/join/detail/local_rounds.hpp>
#include <joinable/join/detail/occupation.hpp>
#include <joinable/join/detail/session.hpp>
#include <joinable/join/parameter_claims.hpp>

namespace joinable { inline namespace v0 {

inline bool Round::is_active(int rank) const {
    return session_ == nullptr ||
           session_->is_active(is_of_group_ ? session_->groups()->member(rank, position_) : rank);
}

inline void Round::hold() {
    if (session_ != nullptr) {
        session_->hold(position_);
    }
}

inline void Round::done() {
    if (session_ != nullptr) {
        session_->done();
    }
}

namespace detail {
class Attachment;
class WindowOf;

Session* session_of(JoinState const& state) noexcept;
ControlCommunicator* words_of(JoinState const& state) noexcept;
RoundNotice const* announced_round(JoinState const& state);

/// Where the window of a participant ends outside a guard.
enum class WindowEnd : std::uint8_t {
    opening,   ///< where a round that syncs opens
    reduction, ///< where WindowOf::end() is called: the round may be opened anew before
};
} // namespace detail

/// The state that a joinable class owns: whether it is inside a guard, and inside which one, and what its
/// rank accumulated since the last round that synced. A new state is inside none.
class JoinState {
public:
    JoinState() = default;
    JoinState(JoinState const&) = delete;
    JoinState& operator=(JoinState const&) = delete;
    /// In a guard, it ends the guard: its hooks refer to the participant.
    ~JoinState() {
        if (attached_ != nullptr) {
            *attached_ = nullptr;
        }
        if (session_ != nullptr) {
            session_->lose_participant(position_);
        }
    }

private:
    friend class detail::Attachment;
    friend class detail::WindowOf;
    friend class PendingRound;
    friend detail::Session* detail::session_of(JoinState const& state) noexcept;
    friend detail::ControlCommunicator* detail::words_of(JoinState const& state) noexcept;
    friend RoundNotice const* detail::announced_round(JoinState const& state);

    /// The round of a participant outside enabled guards. Adds the weight that the state holds.
    /// @throws ContractViolation  see Window::require_continued.
    Round open_alone(int world_size, RoundNotice const& given, detail::WindowEnd end) {
        RoundNotice const notice =
            local_rounds_ == nullptr ? given : local_rounds_->announce(position_, given);
        detail::Window const& window = has_window_of_guard_ ? local_rounds_->reduced() : window_;
        Round const round = local_rounds_ == nullptr
                                ? Round::outside_guard(world_size, notice, window)
                                : local_rounds_->round_of(world_size, notice, window);
        bool const ends = round.will_sync() && end == detail::WindowEnd::opening;
        if (!has_window_of_guard_) {
            std::uint64_t const own = detail::own_weight(notice);
            window_.require_continued(notice, own);
            if (!round.will_sync() || ends) {
                window_.pass(ends, notice, own);
            }
        }
        if (ends && local_rounds_ != nullptr) {
            local_rounds_->end_window(position_);
        }
        return round;
    }

    JoinState** attached_ = nullptr; ///< where a guard has the address of this state
    detail::Session* session_ = nullptr;
    detail::ControlCommunicator* words_ = nullptr; ///< see Session::words()
    std::uint64_t guards_ = 0;                     ///< how many there were, this one included
    detail::Window window_;       ///< outside guards, and in guards that are not enabled
    bool may_be_cleared_ = false; ///< a guard has begun or ended since the last backward pass
    std::size_t position_ = 0;
    detail::LocalRounds* local_rounds_ = nullptr; ///< of a guard that is not enabled
    bool has_window_of_guard_ = false;            ///< there, because it sees some rounds only
};

namespace detail {

/// The window of a participant, inside a guard and outside. Users may clear the gradients of an incomplete
/// window where an epoch begins. They need not say so, because the participant looks.
class WindowOf {
public:
    explicit WindowOf(JoinState& state) noexcept : state_{state} {}

    /// Inside a guard, that of all its participants.
    [[nodiscard]] Window const& window() const noexcept {
        return state_.session_ != nullptr    ? state_.session_->window()
               : state_.has_window_of_guard_ ? state_.local_rounds_->window()
                                             : state_.window_;
    }
    /// The gradients that an owner that averages holds before a guard. `are_cleared()` looks at its gradients.
    template <class F>
    [[nodiscard]] Accumulated before_guard(F const& are_cleared) const {
        return state_.attached_ != nullptr || window().is_empty() ? Accumulated::none
               : are_cleared()                                    ? Accumulated::zeros
                                                                  : Accumulated::numbers;
    }
    /// Before a guard begins. `holds_zeros`: what was not forgotten is zeros, so these are gradients.
    void begin_guard(bool holds_zeros) noexcept {
        if (state_.attached_ == nullptr) { // else another guard may refuse it
            state_.may_be_cleared_ = !holds_zeros || window().is_empty();
        }
    }
    /// Whether gradients that hold something may have been cleared.
    [[nodiscard]] bool may_be_cleared() const noexcept { return state_.may_be_cleared_; }
    /// The first backward pass after a guard has begun or ended begins now, or its batch is skipped.
    void stop_looking() noexcept { state_.may_be_cleared_ = false; }
    /// The gradients were cleared, before or after the pass of the last round.
    /// @throws ContractViolation  ranks have been told of the window's weight.
    void clear(bool in_round) {
        if (state_.session_ != nullptr) {
            state_.session_->clear_window(in_round);
        }
        if (state_.local_rounds_ != nullptr) {
            state_.local_rounds_->clear_window(state_.position_, in_round);
        }
        state_.window_.clear(in_round);
    }
    /// Before clear(), where the user says that gradients were cleared.
    /// @throws ContractViolation  a round of an enabled guard is open or announced.
    void require_between_rounds() const {
        if (state_.session_ != nullptr) {
            state_.session_->require_between_rounds();
        }
    }
    /// Gradients were reduced. Inside a guard the window ended when the round was agreed on.
    void end() noexcept {
        stop_looking();
        if (state_.local_rounds_ != nullptr) {
            state_.local_rounds_->end_window(state_.position_);
        }
        state_.window_ = {};
    }

private:
    JoinState& state_;
};

} // namespace detail

/// Describes a guard to a participant that enters it.
struct GuardView {
    bool carries_accumulated; ///< JoinOptions::carry_accumulated
    bool steps;               ///< a hook is labelled labels::step or labels::shards
    bool shards;              ///< a hook is labelled labels::shards
    bool reduces;             ///< a hook is labelled labels::gradients
    /// Each rank steps by its own gradients: a participant has leaves_gradients_local(), which returns true.
    bool leaves_local;
    bool weighs; ///< JoinOptions::weight_per_input is given
    /// The addresses of the values whose gradients are averaged. Incomplete if a participant that
    /// averages has no list_averaged(std::vector<void const*>&) const.
    std::vector<void const*> averaged;
    bool lists_all_averaged;
};

namespace detail {

inline Session* session_of(JoinState const& state) noexcept {
    return state.session_;
}

/// By which the owner of `state` sums words over its ranks: see Session::words(). Null outside of guards, too.
inline ControlCommunicator* words_of(JoinState const& state) noexcept {
    return state.words_;
}

/// The notice by which next(), iterate() or an earlier participant opened the round in which the owner of `state`
/// has yet to take part; null if there is none. Local.
inline RoundNotice const* announced_round(JoinState const& state) {
    return state.session_ != nullptr        ? state.session_->announced_round(state.position_)
           : state.local_rounds_ != nullptr ? state.local_rounds_->announced_round(state.position_)
                                            : nullptr;
}
/// The same, if it announced a batch. Null if that is skipped.
inline RoundNotice const* announced_batch(JoinState const& state) {
    RoundNotice const* const notice = announced_round(state);
    return notice != nullptr && !notice->skips ? notice : nullptr;
}

/// Called before the owner of `state` communicates; error texts call it `name`.
/// @throws ContractViolation  its communicator is inside a guard, but the owner is not, and no part
///         of a participant of that guard is open.
template <class Comm>
void require_listed(JoinState const& state, Comm const& comm, std::string_view name) {
    if (session_of(state) == nullptr) {
        require_unguarded(identity_of(comm), name);
    }
}

template <class J>
struct join_keywords_of : std::type_identity<keywords<>> {};
template <class J>
    requires requires { typename J::join_keywords; }
struct join_keywords_of<J> : std::type_identity<typename J::join_keywords> {};

template <class J>
using arguments_of = arguments<typename join_keywords_of<J>::type>;

template <class J>
concept has_join_hook = requires(J& joinable, arguments_of<J> const& args) {
    requires std::is_object_v<decltype(joinable.join_hook(args))>;
};
template <class J>
concept has_join_communicator = requires(J& joinable) {
    requires std::is_lvalue_reference_v<decltype(joinable.join_communicator())>;
    requires Communicator<std::remove_reference_t<decltype(joinable.join_communicator())>>;
};
template <class J>
concept has_join_state = requires(J& joinable) {
    { joinable.join_state() } -> std::same_as<JoinState&>;
};
// A member that is declared in another way is called, too, so that the compiler reports the error.
template <class J>
concept has_join_name =
    requires(J const& joinable) { joinable.join_name(); } || requires { &J::join_name; };
template <class J>
concept has_join_verb = requires { std::string_view{J::join_verb}; };
/// The name of a participant in error texts. Valid as long as the participant and its name.
template <class J>
std::string_view join_name_of(J const& joinable) {
    if constexpr (has_join_name<J>) {
        static_assert(
            lasting_text<decltype(joinable.join_name())>,
            "Joinable: join_name() must be 'std::string_view join_name() const', a view of a text that the "
            "class keeps"
        );
        return joinable.join_name();
    } else {
        return class_name<J>();
    }
}

template <class J>
concept has_agree_on = requires(J const& joinable, AgreementList& list) {
    joinable.agree_on(list);
} || requires { &J::agree_on; };

template <class J>
concept has_check_guard = requires(J const& joinable, GuardView const& view) {
    joinable.check_guard(view);
} || requires { &J::check_guard; };

template <class J>
concept has_list_claims = requires(J const& joinable, ParameterClaims& claims) {
    joinable.list_claims(claims);
} || requires { &J::list_claims; };

template <class Keywords>
inline constexpr bool are_comparable = true;
template <class... Ks>
inline constexpr bool are_comparable<keywords<Ks...>> =
    ((compares_values<Ks> || is_per_rank<Ks> || is_agreeable<typename Ks::value_type>()) && ...);

} // namespace detail

/// The hook that a joinable returns.
template <detail::has_join_hook J>
using join_hook_t =
    decltype(std::declval<J&>().join_hook(std::declval<detail::arguments_of<J> const&>()));

/// The communicator of a joinable.
template <detail::has_join_communicator J>
using join_communicator_t =
    std::remove_reference_t<decltype(std::declval<J&>().join_communicator())>;

/// A class that can take part in a guard.
///
/// `joinable` is an lvalue of `J`.
/// | expression                     | result        | meaning                                       |
/// |--------------------------------|---------------|-----------------------------------------------|
/// | `joinable.join_hook(args)`     | JoinHook      | what joined ranks run in its place; local;    |
/// |                                |               | `args` is arguments<J::join_keywords>, and no |
/// |                                |               | member join_keywords means keywords<>         |
/// | `joinable.join_communicator()` | Communicator& | the communicator of its collectives           |
/// | `joinable.join_state()`        | JoinState&    | a member that it owns                         |
/// | `joinable.join_name()`         | string_view   | its name in texts, the same on every rank;    |
/// | (optional, const)              |               | default: the name of the class                |
/// | `J::join_verb`                 | string_view   | the member that notifies, for texts, such as  |
/// | (optional)                     |               | "step()"                                      |
/// | `joinable.agree_on(list)`      |               | adds to an AgreementList what must be the     |
/// | (optional, const)              |               | same on every rank that enters a guard        |
/// | `joinable.check_guard(view)`   |               | throws if it cannot take part in the guard    |
/// | (optional, const)              |               | that a GuardView describes                    |
/// | `joinable.list_claims(claims)` |               | adds to ParameterClaims the parameters that   |
/// | (optional, const)              |               | it averages or steps                          |
///
/// Not checkable, but required: the class calls notify_join_context or announce_round before its
/// collectives of a round.
template <class J>
concept Joinable = detail::has_join_hook<J> && JoinHook<join_hook_t<J>> &&
                   detail::has_join_communicator<J> && detail::has_join_state<J>;

/// Says in one sentence why a class is not Joinable.
template <class J>
consteval bool models_joinable() {
    static_assert(
        detail::has_join_hook<J>,
        "Joinable: expected a member 'join_hook(arguments<join_keywords>)' that returns a JoinHook by value"
    );
    if constexpr (detail::has_join_hook<J>) {
        [[maybe_unused]] constexpr bool is_hook = models_join_hook<join_hook_t<J>>();
    }
    static_assert(
        detail::has_join_communicator<J>,
        "Joinable: expected a member 'join_communicator()' that returns a Communicator by reference"
    );
    static_assert(
        detail::has_join_state<J>, "Joinable: expected a member 'JoinState& join_state()'"
    );
    static_assert(
        detail::are_comparable<typename detail::join_keywords_of<J>::type>,
        "Joinable: ranks cannot compare the values of a keyword in join_keywords; give the keyword "
        "'static void agree_on(AgreementList&, V const&)', or 'static constexpr bool per_rank = "
        "true' where ranks may differ"
    );
    return Joinable<J>;
}

/// A round that was announced and may not be answered yet. Outside a guard it is always answered.
class PendingRound {
public:
    PendingRound() = default;

    /// Announces on behalf of the owner of `state`: see announce_round.
    PendingRound(
        JoinState& state,
        int world_size,
        RoundNotice const& notice,
        detail::WindowEnd end = detail::WindowEnd::opening
    ) {
        if (state.session_ != nullptr) {
            state_ = &state;
            guard_ = state.guards_;
            state.session_->announce(state.position_, notice);
            return;
        }
        local_ = state.open_alone(world_size, notice, end);
    }

    /// Blocks until all ranks have opened the round; call it before the first collective.
    /// @throws PeerFailed, Mismatch, EarlyTermination  the ranks agreed on it; the guard is over.
    /// @throws TimedOut  and other errors of the communicator; the guard is over.
    /// @throws ContractViolation  the guard has been destroyed.
    [[nodiscard]] Round wait() {
        if (state_ == nullptr) {
            return local_;
        }
        if (!is_in_guard()) {
            throw ContractViolation{
                "the guard in which this round was announced has ended; wait() for a round before its guard ends"
            };
        }
        return state_->session_->answer(state_->position_);
    }

    /// Whether gradients will be reduced, according to this rank's announcement. Local.
    [[nodiscard]] bool will_sync() const noexcept {
        return is_in_guard() ? state_->session_->announced_sync() : local_.will_sync();
    }

    /// Outside a guard: the window that this round was to reduce was discarded, after it was announced. Local.
    void forget(detail::Window const& window) noexcept {
        local_.weight_ -= window.weight;
        local_.weight_sum_ -= window.weight;
        local_.accumulated_rounds_ = 0;
    }

    /// Whether wait() returns at once, because another participant opened the round or no guard is
    /// open. Local.
    [[nodiscard]] bool is_answered() const noexcept {
        return !is_in_guard() || state_->session_->is_answered();
    }

private:
    [[nodiscard]] bool is_in_guard() const noexcept {
        return state_ != nullptr && state_->session_ != nullptr && state_->guards_ == guard_;
    }

    JoinState* state_ = nullptr; ///< of the owner, if it was in a guard
    std::uint64_t guard_ = 0;    ///< which one of its guards
    Round local_;
};

/// Announces the collectives of a participant without waiting. The first participant of a round
/// opens it (posts the roll call); the others follow in hook order. Call it before the forward pass
/// and call wait() before the first collective, so that the roll call overlaps with the pass.
///
/// Collective over the active ranks; joined ranks follow by shadowing. While this rank shadows, the
/// call does nothing. Outside any guard it only records what accumulates until a round syncs. With
/// EndPolicy::throw_early it waits, because a rank that has run out ends the guard before the pass.
/// @throws ContractViolation  it is not this participant's turn, or the notice is refused; the text
///         names the participants. Also if the participant is in no guard, but its communicator is
///         in one, and no part of a participant of that guard is open: joined ranks would not
///         follow.
/// @throws what PendingRound::wait throws, with EndPolicy::throw_early.
template <class J>
PendingRound announce_round(J& joinable, RoundNotice notice = {}) {
    static_assert(models_joinable<J>());
    detail::require_listed(
        joinable.join_state(), joinable.join_communicator(), detail::join_name_of(joinable)
    );
    return {joinable.join_state(), joinable.join_communicator().size(), notice};
}

/// Announces the collectives of a participant and waits until all ranks have opened the round. See
/// announce_round and PendingRound::wait for the callers and the errors.
template <class J>
Round notify_join_context(J& joinable, RoundNotice notice = {}) {
    return announce_round(joinable, notice).wait();
}

namespace detail {

/// Keeps the text of a failure, and the exception being handled if there is one. Peers see it when
/// the exception leaves the guard. Local. Only the first record of a round counts; outside a guard
/// the call does nothing. Call it where a participant's verb catches an exception, then rethrow.
template <class J>
void record_failure(J& joinable, std::string_view text) {
    if (auto* const session = detail::session_of(joinable.join_state()); session != nullptr) {
        session->record_failure(text);
    }
}

/// Ends the guard or, outside of one, the communicator of the joinable, with the exception being handled as the reason.
/// Local. Call it after record_failure(), before the exception frees memory that other ranks use.
template <class J>
void fail_at_once(J& joinable) noexcept {
    if (auto* const session = session_of(joinable.join_state()); session != nullptr) {
        session->fail_at_once();
        return;
    }
    auto& comm = joinable.join_communicator();
    if constexpr (TellsReason<std::remove_cvref_t<decltype(comm)>>) {
        try {
            // If it was, the exception is of this communicator. Another one may number ranks otherwise.
            if (!comm.is_aborted()) {
                std::string const text = failure_of(std::current_exception()).message;
                comm.abort(blamed_on(comm.rank(), {FailureKind::peer_failed, {}, text}));
            }
        } catch (...) { // NOLINT(bugprone-empty-catch): the exception that is handled goes on
        }
    }
}

/// Discards what record_failure kept: the joinable has handled the failure, and the guard
/// continues.
template <class J>
void forget_failure(J& joinable) noexcept {
    if (auto* const session = session_of(joinable.join_state()); session != nullptr) {
        session->forget_failure();
    }
}

} // namespace detail

/// The order in which the main hooks of these joinables run: a std::index_sequence of their
/// positions in the argument list.
template <Joinable... Js>
using hook_sequence =
    typename detail::ordered_hooks<detail::MainPhase, join_hook_t<Js>...>::sequence;

/// The order of their post hooks.
template <Joinable... Js>
using post_hook_sequence =
    typename detail::ordered_hooks<detail::PostPhase, join_hook_t<Js>...>::sequence;

namespace detail {

/// Calls `first()`, then `then()`, and returns what `first` returned. Peers see what they throw, with its text.
template <class J, class F, class Then>
decltype(auto) run_then(J& joinable, F&& first, Then const& then) {
    try {
        if constexpr (std::is_void_v<std::invoke_result_t<F>>) {
            std::forward<F>(first)();
            then();
        } else {
            using Result = std::invoke_result_t<F>;
            Result&& result = std::forward<F>(first)();
            then();
            return static_cast<Result>(std::forward<Result>(result));
        }
    } catch (...) {
        record_failure(joinable, {});
        throw;
    }
}

/// Runs the collectives of a participant whose round has been opened, and ends its part.
template <class J, class F>
decltype(auto) run_part(J& joinable, Round round, F&& collectives) {
    return run_then(joinable, std::forward<F>(collectives), [&] { round.done(); });
}

/// step(closure) of a participant: runs the closure, then `step()`, and returns what the closure returned.
template <class J, class Closure, class F>
decltype(auto) step_after(J& joinable, Closure&& closure, F const& step) {
    static_assert(
        std::invocable<Closure>,
        "step: expected a function that takes nothing and runs the passes, as in optimizer.step([&] { ...; "
        "return loss; })"
    );
    if constexpr (std::invocable<Closure>) {
        return run_then(joinable, std::forward<Closure>(closure), step);
    }
}

} // namespace detail

}} // namespace joinable::v0
