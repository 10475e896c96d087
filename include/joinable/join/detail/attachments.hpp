// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <joinable/communicator/control.hpp>
#include <joinable/config.hpp>
#include <joinable/join/joinable.hpp>
#include <joinable/join/options.hpp>

/// @file
/// The changes that a guard makes outside itself, each undone by a destructor, and the checks
/// before them.

namespace joinable { inline namespace v0 { namespace detail {

/// Whether a participant averages gradients, and if so, what joined ranks do with theirs.
enum class Averages : std::uint8_t { none, gradients, but_leaves_joined_untouched };

/// How a participant takes part in a guard.
struct AttachedAs {
    std::size_t position; ///< in hook order
    Averages
        averages; ///< what its rank accumulated in the guard is the participant's when the guard ends
    bool sees_all; ///< whether it takes part in every round
};

/// Sets a participant's state for as long as its guard lives.
class Attachment {
public:
    Attachment() = default;
    Attachment(Attachment const&) = delete;
    Attachment& operator=(Attachment const&) = delete;
    ~Attachment() { detach(); }

    static bool is_attached(JoinState const& state) noexcept {
        return state.session_ != nullptr || state.local_rounds_ != nullptr;
    }
    void attach(JoinState& state, Session& session, AttachedAs const& as) noexcept {
        begin(state, as);
        state.session_ = &session;
        state.words_ = session.words(as.position);
        ++state.guards_;
    }
    /// For a guard that is not enabled. If the state is in another guard, this changes nothing.
    void attach(JoinState& state, LocalRounds& rounds, AttachedAs const& as) noexcept;

    void detach() noexcept;
    /// False, too, once the participant is destroyed.
    [[nodiscard]] bool is_attached() const noexcept { return attached_ != nullptr; }

private:
    void begin(JoinState& state, AttachedAs const& as) noexcept {
        attached_ = &state;
        state.attached_ = &attached_;
        averages_ = as.averages;
        state.position_ = as.position;
        forget_rounds();
    }
    /// A participant that averages nothing counts anew in each guard.
    void forget_rounds() noexcept {
        if (averages_ == Averages::none) {
            attached_->window_ = {};
        }
    }

    JoinState* attached_ = nullptr; ///< null, too, once the participant is destroyed
    Averages averages_ = Averages::none;
};

/// Restores the deadlines of communicators that a guard has overridden.
class Deadlines {
public:
    Deadlines() = default;
    Deadlines(Deadlines const&) = delete;
    Deadlines& operator=(Deadlines const&) = delete;
    ~Deadlines() { restore(); }

    /// @throws ContractViolation  a communicator has no deadline.
    void exchange(
        std::vector<ControlCommunicator*> const& communicators, std::chrono::nanoseconds deadline
    );
    void restore() noexcept;

private:
    struct Overridden {
        ControlCommunicator* communicator;
        std::chrono::nanoseconds deadline;
    };
    std::vector<Overridden> before_;
};

/// @throws ContractViolation  an option is out of its range.
void check_options(JoinOptions const& options);

/// @throws ContractViolation  communicators that are not of groups have different ranks, or too many.
void check_same_ranks(std::vector<ControlCommunicator*> const& communicators, bool has_groups);

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/join/detail/impl/attachments.ipp>
#endif
