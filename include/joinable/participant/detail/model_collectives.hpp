// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <optional>
#include <string_view>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/join/joinable.hpp>
#include <joinable/join/round.hpp>

namespace joinable { inline namespace v0 { namespace detail {

class ModelCollectives;

/// The communicator of collectives that a model issues within its passes, as seen by the participant that
/// runs the passes.
class ModelCommunicator {
public:
    ModelCommunicator(ModelCommunicator const&) = delete;
    ModelCommunicator& operator=(ModelCommunicator const&) = delete;

protected:
    ModelCommunicator() = default;
    inline ~ModelCommunicator();

    /// The rounds of the participant that it is attached to; null if there is none.
    [[nodiscard]] ModelCollectives* rounds() const noexcept { return rounds_; }

private:
    friend class ModelCollectives;

    /// The communicator that it was split from.
    [[nodiscard]] virtual void const* parent() const noexcept = 0;
    /// Collective over all ranks: joined ranks are in follow(). Ends a section of the passes.
    virtual void end_section(Round const& round) = 0;
    /// Collective. Called on a joined rank. Runs the collectives of the active ranks until a section of
    /// their passes ends.
    virtual void follow(Round const& round) = 0;

    ModelCollectives* rounds_ = nullptr;
};

/// The collectives that a participant's model issues in its passes. A round has one or two sections. The
/// second one begins where all ranks run a collective of the participant and wait for it. Joined ranks
/// follow each section step by step.
class ModelCollectives {
public:
    /// `state` is the participant's.
    explicit ModelCollectives(JoinState& state) noexcept : state_{state} {}
    ModelCollectives(ModelCollectives const&) = delete;
    ModelCollectives& operator=(ModelCollectives const&) = delete;
    ~ModelCollectives() {
        if (attached_ != nullptr) {
            attached_->rounds_ = nullptr;
        }
    }

    /// @throws ContractViolation  see GradientParticipant::attach_collectives.
    void attach(ModelCommunicator& collectives, void const* communicator) {
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

    [[nodiscard]] Session* session() const noexcept { return session_of(state_); }
    void agree_on(AgreementList& list) const {
        if (attached_ != nullptr) { // ranks that have not called it lack this item
            list.add("attach_collectives()", "called");
        }
    }
    /// The round of the pass that this rank runs, if it runs one.
    [[nodiscard]] std::optional<PendingRound>& pending() noexcept { return pending_; }
    /// Whether joined ranks follow. A round then lasts until its passes have ended.
    [[nodiscard]] bool are_followed() const noexcept {
        return attached_ != nullptr && session() != nullptr;
    }
    /// @throws ContractViolation  a rank without a pass cannot go on with the others.
    void require_pass(std::string_view verb) const {
        if (attached_ != nullptr) {
            throw ContractViolation{concat(
                verb,
                " cannot follow the collectives that other ranks run in their passes over a shadowed() "
                "communicator; let the exception leave the guard, or give the model an empty batch"
            )};
        }
    }

    // -- active ranks ----------------------------------------------------------------------------

    /// A pass begins; it may issue collectives.
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
    /// Forgets the pass of a round that failed.
    void reset() noexcept { pending_.reset(); }

    // -- joined ranks ----------------------------------------------------------------------------

    void follow(Round const& round) {
        if (attached_ != nullptr &&
            round.active_count() != 0) { // else only accumulated gradients travel
            attached_->follow(round);
        }
    }

private:
    friend ModelCommunicator;

    JoinState& state_;
    ModelCommunicator* attached_ = nullptr;
    std::optional<PendingRound> pending_; ///< in a pass
};

inline ModelCommunicator::~ModelCommunicator() {
    if (rounds_ != nullptr) {
        rounds_->attached_ = nullptr;
    }
}

}}} // namespace joinable::v0::detail
