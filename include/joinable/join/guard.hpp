// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <memory>
#include <string_view>
#include <tuple>
#include <utility>

#include <joinable/communicator/control.hpp>
#include <joinable/join/detail/entrant.hpp>
#include <joinable/join/detail/guard.hpp>
#include <joinable/join/guarded_range.hpp>
#include <joinable/join/joinable.hpp>
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
        : Join{own_control(), nullptr, list, {}, keywords...} {}

    template <class... Ks>
    [[nodiscard("a Join guards until it is destroyed: give it a name")]]
    Join(
        Participants<Js...> list,
        JoinOptions const& options,
        detail::KeywordArgument<Ks>... keywords
    )
        : Join{own_control(), nullptr, list, options, keywords...} {}

    template <class Comm, class... Ks>
    [[nodiscard("a Join guards until it is destroyed: give it a name")]]
    Join(Participants<Js...> list, Control<Comm> control, detail::KeywordArgument<Ks>... keywords)
        : Join{erased(control.communicator), control.make_groups, list, {}, keywords...} {}

    template <class Comm, class... Ks>
    [[nodiscard("a Join guards until it is destroyed: give it a name")]]
    Join(
        Participants<Js...> list,
        Control<Comm> control,
        JoinOptions const& options,
        detail::KeywordArgument<Ks>... keywords
    )
        : Join{erased(control.communicator), control.make_groups, list, options, keywords...} {}

    Join(Join const&) = delete;
    Join& operator=(Join const&) = delete;

    /// Calls finish() unless that was done or an exception is in flight. May throw what finish()
    /// throws.
    ~Join() noexcept(false) = default;

    /// Opens a round. Collective over the active ranks. With `have_input` false it sends nothing;
    /// finish() announces the end. Returns whether to run a round. False means to leave the loop,
    /// also when all ranks agreed to stop.
    /// @throws what a roll call throws: see PendingRound::wait.
    bool next(bool have_input, RoundNotice const& notice = {}) {
        return guard_.next(have_input, notice, detail::Opening::next);
    }

    /// Calls next() for each element of a range:
    /// `for (auto& batch : guard.iterate(batches, announce))`. `announce(element)` returns the
    /// RoundNotice of the element's round. A rank that leaves the loop by break joins.
    template <detail::is_range Range, class Announce = detail::DefaultNotice>
    [[nodiscard]] auto iterate(Range&& range, Announce announce = {}) {
        return detail::GuardedRange<Range, Announce, false>{
            guard_, std::forward<Range>(range), std::move(announce)
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
        return detail::GuardedRange<Range, Announce, true>{
            guard_, std::forward<Range>(range), std::move(announce)
        };
    }

    /// Votes to stop all ranks together. The next roll call carries the vote, and no rank runs that
    /// round. Local.
    /// @throws ContractViolation  notifications open the rounds, or the guard is not enabled: it has no roll calls.
    void vote_stop() { guard_.vote_stop(); }

    /// Tells the others that this rank is still working (a validation, a checkpoint). They wait for
    /// it one more deadline from now. Local.
    /// @throws ContractViolation  a communicator of the guard has no keep_alive(), or is one of NCCL
    ///         whose control communicator has none and shares no memory either.
    void keep_alive()
        requires(RenewsDeadline<join_communicator_t<Js>> && ...)
    {
        guard_.keep_alive();
    }

    /// Local. Keeps the text that peers see if an exception leaves the guard in this round, in place of
    /// the exception's own.
    void fail(std::string_view text) { guard_.fail(text); }

    [[nodiscard]] bool enabled() const noexcept { return guard_.enabled(); }

    /// The round that was opened last.
    [[nodiscard]] Round const& round() const noexcept { return guard_.round(); }

    /// Joins, shadows the others until all have joined or stopped, and runs the post hooks.
    /// Collective. Further calls return the same result.
    /// @throws what a roll call or a hook throws; the guard is over then.
    JoinResult finish() { return guard_.finish(); }

private:
    using MainOrder = detail::ordered_hooks<detail::MainPhase, join_hook_t<Js>...>;
    using PostOrder = detail::ordered_hooks<detail::PostPhase, join_hook_t<Js>...>;
    using Erased = std::unique_ptr<detail::ControlCommunicator>;

    template <class... Ks>
    Join(
        Erased control,
        detail::MakesGroups make_groups,
        Participants<Js...> const& list,
        JoinOptions const& options,
        detail::KeywordArgument<Ks> const&... keywords
    )
        : guard_{
              entrants(list, keywords...),
              {MainOrder::order.sequence, PostOrder::order.sequence},
              std::move(control),
              make_groups,
              options
          } {
        static_assert((check_keyword<Ks, Ks...>() && ...));
    }

    template <class Comm>
    static Erased erased(Comm& comm) {
        return std::make_unique<detail::ControlOver<Comm&>>(comm);
    }
    /// Without control() the roll calls use the first participant's communicator.
    static Erased own_control() {
        using First = std::tuple_element_t<MainOrder::order.sequence[0], std::tuple<Js...>>;
        static_assert(
            detail::reduces_host_memory<join_communicator_t<First>>,
            "Join: the communicator of the first participant in hook order reduces device memory "
            "only; add control(comm) after participants(...), with a host-side communicator"
        );
        return nullptr;
    }

    template <class... Ks>
    static detail::Entrants
    entrants(Participants<Js...> const& list, detail::KeywordArgument<Ks> const&... keywords) {
        return std::apply(
            [&](Js&... joinables) {
                detail::Entrants all;
                (all.push_back(detail::entrant_of(joinables, keywords...)), ...);
                return all;
            },
            list.joinables
        );
    }

    template <class K, class... Given>
    static consteval bool check_keyword() {
        return detail::check_keyword<
            K,
            (static_cast<std::size_t>(std::same_as<K, Given>) + ...),
            typename detail::join_keywords_of<Js>::type...>();
    }

    detail::Guard guard_;
};

}} // namespace joinable::v0
