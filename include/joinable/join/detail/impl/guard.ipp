// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/join/detail/guard.hpp>

#include <algorithm>
#include <exception>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/error.hpp>
#include <joinable/join/detail/entry.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION Guard::Guard(
    Entrants entrants,
    HookOrder const& order,
    std::unique_ptr<ControlCommunicator> control,
    MakesGroups make_groups,
    JoinOptions const& options
)
    : options_{options}, order_{order}, control_{std::move(control)},
      entrants_{std::move(entrants)},
      session_{
          communicators(),
          infos(),
          make_groups == nullptr ? nullptr : make_groups(*control_, entrants_, order_.main),
          options
      } {
    if (!options_.enable) {
        check_options(options_);
        local_rounds_.begin(window_at_entry(entrants_), all_ranks().size());
        attach(local_rounds_);
        return;
    }
    AgreementList entry;
    Window window;
    std::exception_ptr const error = exception_of([&] {
        window = window_at_entry(entrants_);
        if (options_.inputs) {
            window.require_continued({.weight = options_.weight_per_input}, 0);
        }
        prepare();
        entry = entry_list(entrants_, order_, options_, session_.can_abort(), session_.groups());
        if (session_.groups() != nullptr) {
            session_.groups()->check_entry(entrants_, entry);
        }
    });
    session_.enter(entry, window, error);
    attach(session_);
}

JOINABLE_DEFINITION Guard::~Guard() noexcept(false) {
    bool const has_lost = session_.has_lost_participant();
    if (has_lost) {
        for (auto const& entrant : entrants_) {
            entrant->has_hook = entrant->has_hook && entrant->attachment.is_attached();
        }
        release();
    } else if (!options_.enable) {
        return;
    }
    if (!has_lost && !session_.is_over()) {
        unwinding_.has_begun() ? session_.leave_by_exception() : static_cast<void>(finish());
    } else if (!unwinding_.has_begun()) {
        session_.require_told();
    }
}

JOINABLE_DEFINITION JoinResult Guard::finish() {
    if (!options_.enable) {
        JoinResult result;
        result.rounds = result.own_rounds = local_rounds_.count();
        result.unsynced_rounds = local_rounds_.window().rounds;
        result.authoritative_rank = all_ranks().rank();
        result.last_joiners = {result.authoritative_rank};
        return result;
    }
    if (!session_.result()) {
        try {
            session_.finish(*this);
        } catch (...) {
            // Others may wait for what hooks have begun. Participants still say why the guard is over.
            if (session_.is_over()) {
                end_hooks();
            }
            throw;
        }
        release();
    }
    return *session_.result();
}

JOINABLE_DEFINITION void Guard::announce_ahead(std::optional<RoundNotice> const& notice) {
    if (options_.enable) {
        recorded([&] { session_.look_ahead(notice); });
    }
}

JOINABLE_DEFINITION bool Guard::next(bool have_input, RoundNotice const& notice, Opening opening) {
    if (!options_.enable) {
        if (have_input) {
            local_rounds_.open(notice);
        }
        return have_input;
    }
    return recorded([&] { return session_.next(have_input, notice, opening); });
}

JOINABLE_DEFINITION void Guard::keep_alive() const {
    for (ControlCommunicator* communicator : communicators()) {
        if (options_.enable && !communicator->keep_alive()) {
            throw ContractViolation{"Join::keep_alive() needs communicators that have it, and NCCL "
                                    "a control communicator that has it or shares memory"};
        }
    }
}

JOINABLE_DEFINITION std::vector<ControlCommunicator*> Guard::communicators() const {
    std::vector<ControlCommunicator*> distinct;
    auto const add = [&](ControlCommunicator* candidate) {
        auto const is_same = [&](auto* known) { return known->address() == candidate->address(); };
        if (candidate != nullptr && std::none_of(distinct.begin(), distinct.end(), is_same)) {
            distinct.push_back(candidate);
        }
    };
    add(control_.get());
    for (std::size_t const place : order_.main) {
        add(&entrants_[place]->control());
        add(entrants_[place]->shards.get());
    }
    return distinct;
}

JOINABLE_DEFINITION std::vector<ParticipantInfo> Guard::infos() const {
    std::vector<ParticipantInfo> infos;
    for (std::size_t const place : order_.main) {
        infos.push_back(entrants_[place]->info);
    }
    return infos;
}

JOINABLE_DEFINITION void Guard::prepare() {
    auto const all = communicators();
    check_options(options_);
    check_same_ranks(all, session_.groups() != nullptr);
    occupation_.begin(all, session_);
    check_entrants(entrants_, order_, options_);
    if (options_.timeout) {
        deadlines_.exchange(all, *options_.timeout);
    }
    for (auto const& entrant : entrants_) {
        entrant->make_hook();
    }
}

template <class Rounds>
void Guard::attach(Rounds& rounds) {
    for (std::size_t position = 0; position < order_.main.size(); ++position) {
        Entrant& entrant = *entrants_[order_.main[position]];
        bool const sees_all = session_.turns().sees_all(position);
        entrant.attachment.attach(entrant.state, rounds, {position, entrant.averages, sees_all});
    }
}

JOINABLE_DEFINITION void Guard::release() noexcept {
    for (auto const& entrant : entrants_) {
        entrant->attachment.detach();
    }
    end_hooks();
    deadlines_.restore();
    occupation_.end();
}

JOINABLE_DEFINITION void Guard::end_hooks() noexcept {
    for (auto const& entrant : entrants_) {
        entrant->end_hook();
    }
}

}}} // namespace joinable::v0::detail
