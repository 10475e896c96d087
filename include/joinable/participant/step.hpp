// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <string_view>
#include <type_traits>
#include <utility>

#include <joinable/communicator/communicator.hpp>
#include <joinable/join/joinable.hpp>

namespace joinable { inline namespace v0 {

/// Makes a plain optimizer a participant: `Step step{comm, [&] { optimizer.step(model); }};`.
///
/// Active ranks call step() once in every round that syncs. Joined ranks run the same body on the
/// same reduced gradients, so parameters and optimizer state stay equal on all ranks without any
/// message. A learning rate that changes must be set in the body, because joined ranks do not run the
/// loop. Runs after labels::gradients. `body` may take the Round. To skip the step if no rank
/// had a gradient, return if `round.contributor_count() == 0`, which is the same on all ranks.
///
/// Beside NoReduction or a PeriodicAverage each rank steps by its own gradients, so the body runs on active ranks only.
template <class Comm, class Body>
class Step {
    static_assert(
        !std::is_same_v<Comm, detail::NoCommunicator>,
        "Step: the communicator comes first, as in Step step{comm, [&] { optimizer.step(model); }}"
    );
    static_assert(models_communicator<Comm>());
    static_assert(
        std::invocable<Body&> || std::invocable<Body&, Round const&>,
        "Step: the body is a function that takes nothing or the Round, as in Step step{comm, [&] { "
        "optimizer.step(model); }}"
    );

public:
    Step(Comm& comm, Body body) : comm_{comm}, body_{std::move(body)} {}

    /// Local, apart from the notification.
    /// @throws ContractViolation  the round of the guard, enabled or not, does not sync: ranks would step
    ///         apart.
    void step() {
        Round const round = notify_join_context(*this);
        detail::run_part(*this, round, [&] { run(round); });
    }
    /// Runs the closure once, then step(), and returns what the closure returned, such as the loss. The closure runs
    /// the passes; joined ranks do not run it.
    template <class Closure>
    decltype(auto) step(Closure&& closure) {
        return detail::step_after(*this, std::forward<Closure>(closure), [this] { step(); });
    }

    class Hook {
    public:
        using label = labels::step;
        using runs_after = labels_of<labels::gradients>;

        explicit Hook(Step& step) noexcept : step_{step} {}
        static bool takes_part(Round const& round) noexcept { return round.will_sync(); }
        void main_hook(Round const& round) {
            auto const* const session = detail::session_of(step_.state_);
            if (session == nullptr || session->steps_joined_ranks()) {
                step_.run(round);
            }
        }
        void post_hook(bool) noexcept {}

    private:
        Step& step_;
    };

    [[nodiscard]] Hook join_hook(arguments<keywords<>> const&) noexcept { return Hook{*this}; }
    [[nodiscard]] Comm& join_communicator() noexcept { return comm_; }
    [[nodiscard]] JoinState& join_state() noexcept { return state_; }
    [[nodiscard]] std::string_view join_name() const noexcept { return "Step"; }
    static constexpr std::string_view join_verb = "step()";

private:
    void run(Round const& round) {
        if constexpr (std::invocable<Body&, Round const&>) {
            body_(round);
        } else {
            body_();
        }
    }

    Comm& comm_;
    Body body_;
    JoinState state_;
};

template <class Comm, class Body>
Step(Comm&, Body) -> Step<Comm, Body>;
/// Explains which argument is missing.
template <class Body>
Step(Body) -> Step<detail::NoCommunicator, Body>;

}} // namespace joinable::v0
