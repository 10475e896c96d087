// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/detail/scope.hpp>
#include <joinable/detail/type_name.hpp>
#include <joinable/join/detail/attachments.hpp>
#include <joinable/join/detail/entry.hpp>
#include <joinable/join/detail/hooks.hpp>
#include <joinable/join/detail/occupation.hpp>
#include <joinable/join/guarded_range.hpp>
#include <joinable/join/joinable.hpp>
#include <joinable/join/parameter_claims.hpp>
#include <joinable/join/participants.hpp>

namespace joinable { inline namespace v0 {

/// Lets ranks with different numbers of inputs run collectives together. A rank that has run out of
/// inputs shadows the collectives of the others until all ranks are done. A failure of one rank
/// becomes the same typed error on all ranks.
///
/// @code
/// joinable::Join guard{joinable::participants(ddp, step), {.end_policy = ...}, keyword = value};
/// // or {participants(...), control(comm), {...}, keyword = value}; all but the first are optional
/// for (auto const& batch : my_shard) { ddp.forward(...); ddp.backward(...); step.step(); }
/// auto const result = guard.finish();
/// @endcode
///
/// A participant's notification, next() or iterate() opens a round, in the same way on all ranks.
/// Construction, finish() and the destructor are collective. When an exception leaves the guard on
/// one rank, the others see PeerFailed. Between rounds they learn of it in their next roll call,
/// and the communicators stay usable; anywhere else the communicators are aborted. After the guard
/// itself has thrown it is over; once it is destroyed its participants can enter another one.
/// Cost: one sum of seven words per round, and one more message when a rank arrives or fails.
/// Nothing with known lengths (JoinOptions::inputs).
template <class... Js>
class Join { // not [[nodiscard]] itself: nvcc then warns of std::optional<Join>::emplace()
    using Sequence = hook_sequence<Js...>;
    using Hooks = detail::GuardHooks<Js...>;

public:
    /// Collective. After a throw nothing stays attached.
    /// @throws ContractViolation  a participant or a communicator is in another guard, a
    ///         participant is twice in this one, two participants average or step one parameter, or
    ///         the communicators differ in rank or size, or cannot keep the timeout.
    /// @throws PeerFailed  another rank's constructor threw.
    /// @throws Mismatch  the ranks construct different guards; the text names the first difference,
    ///         with both values.
    template <class... Ks>
    [[nodiscard("a Join guards until it is destroyed: give it a name")]]
    explicit Join(Participants<Js...> list, detail::KeywordArgument<Ks>... keywords)
        : Join{own_control(), list, {}, keywords...} {}

    template <class... Ks>
    [[nodiscard("a Join guards until it is destroyed: give it a name")]]
    Join(
        Participants<Js...> list,
        JoinOptions const& options,
        detail::KeywordArgument<Ks>... keywords
    )
        : Join{own_control(), list, options, keywords...} {}

    template <class Comm, class... Ks>
    [[nodiscard("a Join guards until it is destroyed: give it a name")]]
    Join(Participants<Js...> list, Control<Comm> control, detail::KeywordArgument<Ks>... keywords)
        : Join{erased(control.communicator), list, {}, keywords...} {}

    template <class Comm, class... Ks>
    [[nodiscard("a Join guards until it is destroyed: give it a name")]]
    Join(
        Participants<Js...> list,
        Control<Comm> control,
        JoinOptions const& options,
        detail::KeywordArgument<Ks>... keywords
    )
        : Join{erased(control.communicator), list, options, keywords...} {}

    Join(Join const&) = delete;
    Join& operator=(Join const&) = delete;

    /// Calls finish() unless that was done or an exception is in flight. May throw what finish()
    /// throws.
    ~Join() noexcept(false) {
        if (session_.has_lost_participant()) {
            lose_hooks();
            release();
            if (!unwinding_.has_begun()) {
                session_.require_told();
            }
            return;
        }
        if (!options_.enable || session_.is_over()) {
            return;
        }
        if (unwinding_.has_begun()) {
            session_.leave_by_exception();
        } else {
            finish();
        }
    }

    /// Opens a round. Collective over the active ranks. With `have_input` false it sends nothing;
    /// finish() announces the end. Returns whether to run a round. False means to leave the loop,
    /// also when all ranks agreed to stop.
    /// @throws what a roll call throws: see PendingRound::wait.
    bool next(bool have_input, RoundNotice const& notice = {}) {
        return next(have_input, notice, detail::Opening::next);
    }

    /// Calls next() for each element of a range:
    /// `for (auto& batch : guard.iterate(batches, announce))`. `announce(element)` returns the
    /// RoundNotice of the element's round. A rank that leaves the loop by break joins.
    template <detail::is_range Range, class Announce = detail::DefaultNotice>
    [[nodiscard]] auto iterate(Range&& range, Announce announce = {}) {
        return detail::GuardedRange<Join, Range, Announce, false>{
            *this, std::forward<Range>(range), std::move(announce)
        };
    }

    /// Explains that a number of rounds is no range.
    template <class Given, class... More>
        requires(!detail::is_range<Given> && !std::same_as<Given, look_ahead_t const&>)
    [[nodiscard]] auto iterate(Given&&, More&&...) {
        static_assert(
            detail::is_range<Given>,
            "iterate: expected a range of inputs; for a number of rounds give std::views::iota(0, rounds)"
        );
        return std::array<int, 0>{};
    }
    /// Explains a notice in place of a function that returns one.
    template <class Range>
    [[nodiscard]] auto iterate(Range&&, RoundNotice const&) {
        static_assert(
            detail::never<Range>,
            "iterate: after the range comes a function that returns the notice of an element, such as "
            "[](auto const&) { return joinable::RoundNotice{.weight = 32}; }"
        );
        return std::array<int, 0>{};
    }

    /// The same for a forward range, one element early: each round's roll call is posted before the
    /// collectives of the previous round, so the answer is there when it is needed. A vote takes
    /// effect one round later. Leaving such a loop by break is a ContractViolation on all ranks,
    /// because the others already compute a round that this rank has announced. Call vote_stop()
    /// instead.
    template <class Range, class Announce = detail::DefaultNotice>
    [[nodiscard]] auto iterate(look_ahead_t, Range&& range, Announce announce = {}) {
        return detail::GuardedRange<Join, Range, Announce, true>{
            *this, std::forward<Range>(range), std::move(announce)
        };
    }

    /// Votes to stop all ranks together. The next roll call carries the vote, and no rank runs that
    /// round. Local.
    /// @throws ContractViolation  notifications open the rounds, or the guard is not enabled: it has no roll calls.
    void vote_stop() {
        recorded([&] { session_.vote_stop(); });
    }

    /// Tells the others that this rank is still working (a validation, a checkpoint). They wait for
    /// it one more deadline from now. Local.
    /// @throws ContractViolation  the control communicator has no keep_alive().
    void keep_alive()
        requires(RenewsDeadline<join_communicator_t<Js>> && ...)
    {
        for (detail::ControlCommunicator* communicator : communicators(Sequence{})) {
            if (options_.enable && !communicator->keep_alive()) {
                throw ContractViolation{"Join::keep_alive() needs a control communicator that has "
                                        "keep_alive() (see RenewsDeadline)"};
            }
        }
    }

    /// Local. Keeps the text that peers see if an exception leaves the guard in this round, in place of
    /// the exception's own.
    void fail(std::string_view text) { session_.fail(text); }

    [[nodiscard]] bool enabled() const noexcept { return options_.enable; }

    /// The round that was opened last.
    [[nodiscard]] Round const& round() const noexcept {
        return options_.enable ? session_.round() : local_rounds_.round();
    }

    /// Joins, shadows the others until all have joined or stopped, and runs the post hooks.
    /// Collective. Further calls return the same result.
    /// @throws what a roll call or a hook throws; the guard is over then.
    JoinResult finish() {
        if (!options_.enable) {
            JoinResult result;
            result.rounds = result.own_rounds = local_rounds_.count();
            result.unsynced_rounds = local_rounds_.window().rounds;
            result.authoritative_rank = controls_.front()->rank();
            result.last_joiners = {result.authoritative_rank};
            return result;
        }
        if (!session_.result()) {
            session_.finish(*hooks_);
            release();
        }
        return *session_.result();
    }

private:
    template <class, class, class, bool>
    friend class detail::GuardedRange;

    using Erased = std::unique_ptr<detail::ControlCommunicator>;

    template <class Comm>
    static Erased erased(Comm& comm) {
        return std::make_unique<detail::ControlOver<Comm&>>(comm);
    }
    /// Without control() the roll calls use the first participant's communicator.
    static Erased own_control() {
        using Order = detail::ordered_hooks<detail::MainPhase, join_hook_t<Js>...>;
        using First = std::tuple_element_t<Order::order.sequence[0], std::tuple<Js...>>;
        static_assert(
            detail::reduces_host_memory<join_communicator_t<First>>,
            "Join: the communicator of the first participant in hook order reduces device memory "
            "only; add control(comm) after participants(...), with a host-side communicator"
        );
        return nullptr;
    }

    template <class... Ks>
    Join(
        Erased control,
        Participants<Js...> list,
        JoinOptions const& options,
        detail::KeywordArgument<Ks> const&... keywords
    )
        : options_{options}, control_{std::move(control)},
          controls_{std::apply(
              [](Js&... participant) {
                  return Controls{{erased(participant.join_communicator())...}};
              },
              list.joinables
          )},
          session_{communicators(Sequence{}), describe(list.joinables, Sequence{}), options} {
        static_assert((check_keyword<Ks, Ks...>() && ...));
        if (!options.enable) {
            detail::check_options(options_);
            local_rounds_.begin(window_of(list.joinables), controls_.front()->size());
            attach(list.joinables, local_rounds_, Sequence{});
            return;
        }
        AgreementList entry;
        detail::Window window;
        std::exception_ptr error;
        try {
            window = window_of(list.joinables);
            if (options_.inputs) {
                window.require_continued({.weight = options_.weight_per_input}, 0);
            }
            prepare(list.joinables, keywords...);
            entry = detail::entry_list(
                list.joinables,
                Sequence{},
                post_hook_sequence<Js...>{},
                options_,
                session_.can_abort(),
                keywords...
            );
        } catch (...) {
            error = std::current_exception();
        }
        session_.enter(entry, window, error);
        attach(list.joinables, session_, Sequence{});
    }

    /// Calls f(). An exception that it throws will leave the guard, and peers see its text.
    template <class F>
    decltype(auto) recorded(F const& f) {
        return session_.recorded(f);
    }
    void announce_ahead(std::optional<RoundNotice> const& notice) {
        if (options_.enable) {
            recorded([&] { session_.look_ahead(notice); });
        }
    }
    bool next(bool have_input, RoundNotice const& notice, detail::Opening opening) {
        if (!options_.enable) {
            if (have_input) {
                local_rounds_.open(notice);
            }
            return have_input;
        }
        return recorded([&] { return session_.next(have_input, notice, opening); });
    }

    /// Restores everything that the guard attached.
    void release() noexcept {
        for (detail::Attachment& attachment : attachments_) {
            attachment.detach();
        }
        hooks_.reset();
        deadlines_.restore();
        occupation_.end();
    }

    /// Hooks of destroyed participants refer to what was.
    void lose_hooks() noexcept {
        for (std::size_t i = 0; hooks_ && i < attachments_.size(); ++i) {
            hooks_->are_lost[i] = !attachments_[i].is_attached();
        }
    }

    using Controls = std::array<Erased, sizeof...(Js)>;

    template <class K, class... Given>
    static consteval bool check_keyword() {
        return detail::check_keyword<
            K,
            (static_cast<std::size_t>(std::same_as<K, Given>) + ...),
            typename detail::join_keywords_of<Js>::type...>();
    }

    /// The distinct communicators: the control communicator, then the others in hook order. The
    /// first one serves the roll calls.
    template <std::size_t... Is>
    std::vector<detail::ControlCommunicator*> communicators(std::index_sequence<Is...>) const {
        std::vector<detail::ControlCommunicator*> distinct;
        auto const add = [&](detail::ControlCommunicator* candidate) {
            for (auto const* known : distinct) {
                if (known->address() == candidate->address()) {
                    return;
                }
            }
            distinct.push_back(candidate);
        };
        if (control_) {
            add(control_.get());
        }
        (add(controls_[Is].get()), ...);
        return distinct;
    }

    template <std::size_t... Is>
    static std::vector<detail::ParticipantInfo>
    describe(std::tuple<Js&...> const& joinables, std::index_sequence<Is...>) {
        return {Hooks::describe(std::get<Is>(joinables))...};
    }

    /// The local checks and the hooks. A failure here fails on all ranks in the entry exchange.
    template <class... Ks>
    void
    prepare(std::tuple<Js&...> const& joinables, detail::KeywordArgument<Ks> const&... keywords) {
        auto const all = communicators(Sequence{});
        detail::check_options(options_);
        detail::check_same_ranks(all);
        occupation_.begin(all, session_);
        GuardView view{};
        view.carries_accumulated = options_.carry_accumulated;
        view.steps = detail::steps_parameters<Js...>;
        view.reduces = detail::has_label<labels::gradients, Js...>;
        view.lists_all_averaged = true;
        std::apply(
            [&](Js&... participant) {
                (detail::list_averaged(participant, view), ...);
                detail::check_states({{&participant.join_state(), detail::type_name<Js>(), {}}...});
                check_claims(joinables, Sequence{});
                (detail::check_guard(participant, view), ...);
            },
            joinables
        );
        if (options_.timeout) {
            deadlines_.exchange(all, *options_.timeout);
        }
        hooks_ = std::make_unique<Hooks>(joinables, keywords...);
    }

    /// The batches that this rank has accumulated and not cleared.
    static detail::Window window_of(std::tuple<Js&...> const& joinables) {
        return std::apply(
            [](Js&... participant) {
                detail::forget_cleared(participant...);
                return detail::common_window({detail::NamedState{
                    &participant.join_state(),
                    detail::join_name_of(participant),
                    detail::averages_of(participant)
                }...});
            },
            joinables
        );
    }

    /// In hook order, by which texts number participants.
    template <std::size_t... Is>
    static void check_claims(std::tuple<Js&...> const& joinables, std::index_sequence<Is...>) {
        ParameterClaims claims;
        (detail::list_claims(std::get<Is>(joinables), claims), ...);
        claims.require_disjoint();
    }

    template <class Rounds, std::size_t... Is>
    void attach(std::tuple<Js&...> const& joinables, Rounds& rounds, std::index_sequence<Is...>) {
        std::size_t position = 0;
        auto const one = [&]<class J>(J& joinable, detail::Attachment& attachment) {
            constexpr bool sees_all = !detail::has_takes_part<join_hook_t<J>>;
            attachment.attach(
                joinable.join_state(), rounds, {position++, detail::averages_of(joinable), sees_all}
            );
        };
        (one(std::get<Is>(joinables), std::get<Is>(attachments_)), ...);
    }

    JoinOptions options_;
    detail::Unwinding unwinding_;
    Erased control_;
    Controls controls_;
    detail::Occupation occupation_;
    detail::Deadlines deadlines_;
    detail::Session session_;
    std::unique_ptr<Hooks> hooks_;
    detail::LocalRounds local_rounds_{options_, session_.turns()}; ///< used when it is not enabled
    std::array<detail::Attachment, sizeof...(Js)> attachments_;
};

}} // namespace joinable::v0
