// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <optional>
#include <string_view>
#include <utility>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/join/joinable.hpp>
#include <joinable/join/round.hpp>

namespace joinable { inline namespace v0 { namespace detail {

class HiddenRounds;

/// The communicator of collectives that a model issues within its passes, as the participant sees it
/// that has the passes.
class HiddenCollectives {
public:
    HiddenCollectives(HiddenCollectives const&) = delete;
    HiddenCollectives& operator=(HiddenCollectives const&) = delete;

protected:
    HiddenCollectives() = default;
    inline ~HiddenCollectives();

    /// The round in whose passes this rank issues a collective; none where there is no guard.
    /// @throws ContractViolation  joined ranks would not follow. Else what PendingRound::wait throws.
    [[nodiscard]] inline std::optional<Round> enter_round() const;

private:
    friend class HiddenRounds;

    /// The communicator that it was split from.
    [[nodiscard]] virtual void const* parent() const noexcept = 0;
    /// Collective over active ranks and ranks that follow. A section of the passes is over.
    virtual void end_section(Round const& round) = 0;
    /// Collective. What a joined rank runs until a section of the others' passes is over.
    virtual void follow(Round const& round) = 0;

    HiddenRounds* rounds_ = nullptr;
};

/// The collectives that a participant's model issues in its passes. A round has one or two sections. The
/// second one begins where all ranks run a collective of the participant and wait for it. Joined ranks
/// follow each section step by step.
class HiddenRounds {
public:
    /// `state` is the participant's.
    explicit HiddenRounds(JoinState& state) noexcept : state_{state} {}
    HiddenRounds(HiddenRounds const&) = delete;
    HiddenRounds& operator=(HiddenRounds const&) = delete;
    ~HiddenRounds() {
        if (attached_ != nullptr) {
            attached_->rounds_ = nullptr;
        }
    }

    /// @throws ContractViolation  see DistributedDataParallel::attach_collectives.
    void attach(HiddenCollectives& collectives, void const* communicator) {
        char const* const why =
            collectives.parent() != communicator
                ? "attach_collectives() was given a shadowed() communicator of another communicator; "
                  "make it of the one that this participant has"
            : attached_ != nullptr || collectives.rounds_ != nullptr
                ? "a participant has one shadowed() communicator, which has one participant; give the "
                  "same one to all layers of the model"
                : nullptr;
        if (why != nullptr) {
            throw ContractViolation{why};
        }
        attached_ = &collectives;
        collectives.rounds_ = this;
    }

    [[nodiscard]] bool is_attached() const noexcept { return attached_ != nullptr; }
    /// Whether joined ranks follow: then a round goes on until its passes are over.
    [[nodiscard]] bool are_followed() const noexcept {
        return attached_ != nullptr && session_of(state_) != nullptr;
    }
    /// @throws ContractViolation  a rank without a pass cannot go on with the others.
    void require_pass(std::string_view verb) const {
        if (attached_ != nullptr) {
            throw ContractViolation{concat(
                verb,
                " cannot follow the collectives that other ranks run in their passes over a shadowed() "
                "communicator: let the exception leave the guard, or give the model an empty batch"
            )};
        }
    }

    // -- active ranks ----------------------------------------------------------------------------

    /// A pass begins, in which collectives may come.
    void begin(PendingRound const& pending) { pending_ = pending; }
    void end_section(Round const& round) {
        if (are_followed()) {
            attached_->end_section(round);
        }
    }
    /// The last pass of the round is over.
    void end(Round const& round) {
        pending_.reset();
        end_section(round);
    }
    /// Whatever has failed.
    void reset() noexcept { pending_.reset(); }

    // -- joined ranks ----------------------------------------------------------------------------

    void follow(Round const& round) {
        if (attached_ != nullptr) {
            attached_->follow(round);
        }
    }

private:
    friend class HiddenCollectives;

    JoinState& state_;
    HiddenCollectives* attached_ = nullptr;
    std::optional<PendingRound> pending_; ///< in a pass
};

inline HiddenCollectives::~HiddenCollectives() {
    if (rounds_ != nullptr) {
        rounds_->attached_ = nullptr;
    }
}

inline std::optional<Round> HiddenCollectives::enter_round() const {
    Session* const own = rounds_ == nullptr ? nullptr : session_of(rounds_->state_);
    Session* const session = own != nullptr ? own : Occupation::session_over(parent());
    if (session == nullptr || !session->runs_rounds()) {
        return {};
    }
    char const* const why =
        rounds_ == nullptr
            ? "a shadowed() communicator is used in a guard, but no participant has it, so "
              "joined ranks would not follow; call ddp.attach_collectives(it) before"
        : own == nullptr
            ? "a shadowed() communicator is used in a guard that does not list the participant "
              "that has it, so joined ranks would not follow; add that to participants(...)"
        : !rounds_->pending_
            ? "a shadowed() communicator is used outside of the passes of its participant, where joined "
              "ranks do not follow; use it between forward() and the end of the backward pass, or after "
              "finish()"
            : nullptr;
    if (why != nullptr) {
        session->record_failure(why); // the guard's user may not be in a verb of a participant
        throw ContractViolation{why};
    }
    Round round = rounds_->pending_->wait();
    round.hold(); // nobody else communicates until the passes are over
    return round;
}

}}} // namespace joinable::v0::detail
