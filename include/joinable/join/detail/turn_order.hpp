// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <joinable/config.hpp>
#include <joinable/error.hpp>
#include <joinable/join/round.hpp>

namespace joinable { inline namespace v0 { namespace detail {

[[noreturn]] inline void throw_violation(std::string const& text) {
    throw ContractViolation{text};
}

/// The facts about a participant that a session needs.
struct ParticipantInfo {
    std::string
        name; ///< a copy: the end of a guard may come when the participant's own is destroyed
    std::string_view type = {};                 ///< the name of its class
    bool (*takes_part)(Round const&) = nullptr; ///< null: in every round
    std::string_view verb = {};                 ///< the member that notifies, if it is given
    bool steps = false;        ///< its hook is labelled labels::step or labels::shards
    bool leaves_local = false; ///< gradients: each rank steps by its own
};

/// The turns of participants inside a round. A part begins with the participant's notification. It
/// ends with the next participant's notification or, if it was held open, with done(). Positions
/// are in hook order.
class TurnOrder {
public:
    explicit TurnOrder(std::vector<ParticipantInfo> participants)
        : participants_{std::move(participants)} {}

    [[nodiscard]] std::size_t size() const noexcept { return participants_.size(); }
    [[nodiscard]] std::string name(std::size_t position) const;
    /// The name and what it called.
    [[nodiscard]] std::string call(std::size_t position) const;

    /// Whether a participant steps the model, on joined ranks too.
    [[nodiscard]] bool steps_joined_ranks() const noexcept {
        auto const any = [this](bool ParticipantInfo::* fact) {
            return std::any_of(participants_.begin(), participants_.end(), std::mem_fn(fact));
        };
        return any(&ParticipantInfo::steps) && !any(&ParticipantInfo::leaves_local);
    }
    [[nodiscard]] bool takes_part(std::size_t position, Round const& round) const {
        return sees_all(position) || participants_[position].takes_part(round);
    }
    [[nodiscard]] bool sees_all(std::size_t position) const noexcept {
        return participants_[position].takes_part == nullptr;
    }
    /// The first participant, from `from` on, that takes part in the round.
    [[nodiscard]] std::optional<std::size_t> first(Round const& round, std::size_t from = 0) const;
    /// The participant whose part comes next in the open round, if any.
    [[nodiscard]] std::optional<std::size_t> next() const {
        return round_ ? first(*round_, cursor_) : std::nullopt;
    }

    /// @throws ContractViolation  the participant takes no part in the round.
    void require_part(std::size_t position, Round const& round) const {
        if (!takes_part(position, round)) {
            throw_violation(takes_no_part(position, round));
        }
    }
    /// @throws ContractViolation  the round that `opener` announces begins with another
    ///         participant.
    void require_first(std::size_t opener, Round const& announced) const;

    void open(Round const& round) {
        round_ = round;
        cursor_ = 0;
    }
    void close() {
        round_.reset();
        done();
    }
    void begin(std::size_t position) {
        cursor_ = position + 1;
        is_open_ = true;
    }
    void hold(std::size_t position) { held_by_ = position; }
    void done() {
        held_by_.reset();
        is_open_ = false;
    }

    /// Begins the part of `position` in the open round. Returns false if `position` may open the
    /// next round; with `loop_opens_rounds` it may not.
    /// @throws ContractViolation  it is not its turn.
    bool take_turn(std::size_t position, bool loop_opens_rounds);

    /// @throws ContractViolation  a part is held open, or a participant is missing.
    void require_complete() const;

    /// Whether a part has begun and not ended. A part without done() ends with the next part.
    [[nodiscard]] bool is_open() const noexcept { return is_open_ || held_by_; }
    /// Whether no participant owes a collective.
    [[nodiscard]] bool are_complete() const { return !is_open_ && !held_by_ && !next(); }

private:
    [[nodiscard]] std::string_view verb(std::size_t position) const {
        return participants_[position].verb;
    }
    /// The end of a text: the order of the participants that take part in the round.
    [[nodiscard]] std::string order(Round const& round) const;
    [[nodiscard]] std::string takes_no_part(std::size_t position, Round const& round) const;

    std::vector<ParticipantInfo> participants_;
    std::optional<Round> round_;
    std::size_t cursor_ = 0; ///< parts before this position have begun
    std::optional<std::size_t> held_by_;
    bool is_open_ = false;
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/join/detail/impl/turn_order.ipp>
#endif
