// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/join/detail/occupation.hpp>

#include <algorithm>

#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void
Occupation::begin(std::vector<ControlCommunicator*> const& communicators, Session& session) {
    Occupied& occupied = in_guards();
    Lock const lock{occupied.busy};
    std::vector<Entry>& all = occupied.entries;
    for (ControlCommunicator const* communicator : communicators) {
        if (find(all, communicator->address()) != all.end()) {
            throw ContractViolation{
                "a second Join over a communicator that is "
                "inside a guard already; end that one first, or split() the communicator"
            };
        }
    }
    all.reserve(all.size() + communicators.size()); // or some could be recorded and others not
    for (ControlCommunicator const* communicator : communicators) {
        all.push_back({communicator->address(), &session});
    }
    occupied.count.store(all.size(), std::memory_order_release);
    session_ = &session;
}

JOINABLE_DEFINITION void Occupation::end() noexcept {
    if (session_ == nullptr) {
        return;
    }
    Occupied& occupied = in_guards();
    Lock const lock{occupied.busy};
    std::erase_if(occupied.entries, [this](Entry const& entry) {
        return entry.session == session_;
    });
    occupied.count.store(occupied.entries.size(), std::memory_order_release);
    session_ = nullptr;
}

JOINABLE_DEFINITION Session* Occupation::session_over(void const* communicator) noexcept {
    Occupied& occupied = in_guards();
    if (occupied.count.load(std::memory_order_acquire) == 0) {
        return nullptr;
    }
    Lock const lock{occupied.busy};
    auto const entry = find(occupied.entries, communicator);
    return entry == occupied.entries.end() ? nullptr : entry->session;
}

JOINABLE_DEFINITION std::vector<Occupation::Entry>::const_iterator
Occupation::find(std::vector<Entry> const& entries, void const* communicator) noexcept {
    return std::find_if(entries.begin(), entries.end(), [&](Entry const& entry) {
        return entry.communicator == communicator;
    });
}

}}} // namespace joinable::v0::detail
