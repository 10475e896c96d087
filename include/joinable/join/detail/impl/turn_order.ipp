// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/join/detail/turn_order.hpp>

#include <joinable/detail/text.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION std::string TurnOrder::name(std::size_t position) const {
    return concat("participant ", position, " (", participants_[position].name, ")");
}

JOINABLE_DEFINITION std::optional<std::size_t>
TurnOrder::first(Round const& round, std::size_t from) const {
    for (std::size_t i = from; i < participants_.size(); ++i) {
        if (takes_part(i, round)) {
            return i;
        }
    }
    return {};
}

JOINABLE_DEFINITION void
TurnOrder::require_first(std::size_t opener, Round const& announced) const {
    auto const expected = first(announced);
    if (!expected) {
        throw_violation(takes_no_part(opener, announced));
    }
    if (expected != opener) {
        if (round_) {
            require_part(opener, *round_);
        }
        throw_violation(
            call(opener) + " first in round " + to_text(announced.number()) +
            ", but the first one in hook order is " + name(*expected) + order(announced)
        );
    }
}

JOINABLE_DEFINITION bool TurnOrder::take_turn(std::size_t position, bool loop_opens_rounds) {
    if (held_by_) {
        throw_violation(concat(
            call(position),
            " while the part of ",
            name(*held_by_),
            " is held open; end that part first, as by skip() after a pass that threw",
            round_ ? order(*round_) : ""
        ));
    }
    auto const expected = next();
    if (expected == position) {
        begin(position);
        return true;
    }
    if (expected) {
        throw_violation(
            call(position) + " in round " + to_text(round_->number()) +
            ", but the next one in hook order is " + name(*expected) + order(*round_)
        );
    }
    if (loop_opens_rounds && round_) {
        require_part(position, *round_);
        throw_violation(
            call(position) + " again in round " + to_text(round_->number()) +
            "; call next() before each round"
        );
    }
    if (loop_opens_rounds) {
        throw_violation(concat(call(position), " before next() opened a round"));
    }
    return false;
}

JOINABLE_DEFINITION void TurnOrder::require_complete() const {
    if (held_by_) {
        throw_violation(concat(
            "the part of ",
            name(*held_by_),
            " in round ",
            round_->number(),
            " is still held open (a forward without its backward?)"
        ));
    }
    if (auto const missing = next()) {
        throw_violation(concat(
            name(*missing),
            " takes part in round ",
            round_->number(),
            ", but did not ",
            verb(*missing).empty() ? "notify" : "call ",
            verb(*missing),
            order(*round_)
        ));
    }
}

JOINABLE_DEFINITION std::string TurnOrder::call(std::size_t position) const {
    return name(position) +
           (verb(position).empty() ? " notified" : concat(" called ", verb(position)));
}

JOINABLE_DEFINITION std::string TurnOrder::order(Round const& round) const {
    std::string text;
    for (auto i = first(round); i; i = first(round, *i + 1)) {
        text += text.empty() ? "; the order of such a round is " : ", then ";
        text += verb(*i).empty() ? name(*i) : concat(verb(*i), " of ", name(*i));
    }
    return text;
}

JOINABLE_DEFINITION std::string
TurnOrder::takes_no_part(std::size_t position, Round const& round) const {
    return concat(
        name(position),
        " takes no part in round ",
        round.number(),
        round.will_sync() ? ", which syncs" : ", which does not sync",
        verb(position).empty() ? "; notify" : concat("; call ", verb(position)),
        " only in rounds that concern it"
    );
}

}}} // namespace joinable::v0::detail
