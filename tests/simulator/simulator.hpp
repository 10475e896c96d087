// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <queue>
#include <stdexcept>
#include <string>
#include <vector>

#include <joinable/communicator/algorithms/detail/message_schedule.hpp>
#include <joinable/communicator/algorithms/detail/message_step.hpp>
#include <joinable/communicator/algorithms/plan.hpp>

namespace joinable_tests {

/// What a simulation found.
struct Simulated {
    double seconds = 0;                ///< when the last rank is done
    std::vector<std::size_t> messages; ///< that each rank has sent
    std::vector<std::size_t> elements; ///< in them
};

/// Sees what happens in a simulation, in an order that real ranks could have.
struct NoObserver {
    void
    message(int, joinable::detail::Transfer const&, int, joinable::detail::Transfer const&) const {}
    void combination(int, joinable::detail::Combination const&) const {}
};

/// Runs the steps of all ranks on a virtual clock. A message begins when both sides have posted it and both
/// ports are free: a rank sends one message and receives one at a time, whatever collectives it is in. It
/// takes alpha + bytes / B, and a combination takes C a byte, on a core that has nothing else to do.
///
/// Messages that wait for a port get it in the order in which they became ready.
/// @throws std::logic_error  ranks wait in a circle, or a rank receives a message of another length.
template <class Observer = NoObserver>
class Simulator {
public:
    Simulator(
        joinable::MessageCosts const& costs, std::size_t element_bytes, Observer observer = {}
    )
        : costs_{costs}, element_bytes_{static_cast<double>(element_bytes)}, observer_{observer} {}

    /// All ranks begin all of these collectives at once. They have the same ranks.
    Simulated run(std::initializer_list<joinable::detail::MessageSchedule const*> collectives) {
        begin((*collectives.begin())->ranks(), collectives.size());
        std::size_t collective = 0;
        for (joinable::detail::MessageSchedule const* schedule : collectives) {
            for (int rank = 0; rank < schedule->ranks(); ++rank) {
                add(collective, schedule->steps(rank));
            }
            ++collective;
        }
        return finish();
    }
    /// Rank 0 runs one collective and all other ranks run another one, by mistake.
    Simulated run_mixed(
        joinable::detail::MessageSchedule const& of_first,
        joinable::detail::MessageSchedule const& of_others
    ) {
        begin(of_first.ranks(), 1);
        for (int rank = 0; rank < of_first.ranks(); ++rank) {
            add(0, (rank == 0 ? of_first : of_others).steps(rank));
        }
        return finish();
    }

private:
    /// A rank has ended a step.
    struct Event {
        double seconds;
        std::size_t collective;
        int rank;

        friend bool operator<(Event const& a, Event const& b) { return a.seconds > b.seconds; }
    };
    struct Rank {
        joinable::detail::MessageSteps steps;
        joinable::detail::MessageStep step = {}; ///< without the messages that have been delivered
        double posted = 0;
        double end = 0;
    };
    struct Ports {
        double sends_until = 0;
        double receives_until = 0;
    };

    void begin(int ranks, std::size_t collectives) {
        auto const count = static_cast<std::size_t>(ranks);
        result_ = {0, std::vector<std::size_t>(count), std::vector<std::size_t>(count)};
        ranks_.assign(collectives, {});
        ports_.assign(count, {});
        running_ = count * collectives;
        keeps_order_ = collectives > 1;
        for (auto& of_collective : ranks_) {
            of_collective.reserve(count);
        }
    }
    void add(std::size_t collective, joinable::detail::MessageSteps const& steps) {
        ranks_[collective].push_back({steps});
    }
    Simulated finish() {
        for (std::size_t collective = 0; collective < ranks_.size(); ++collective) {
            for (int rank = 0; rank < static_cast<int>(ports_.size()); ++rank) {
                next_step(collective, rank, 0);
            }
        }
        run_events();
        if (running_ != 0) {
            throw std::logic_error{std::to_string(running_) + " ranks wait in a circle"};
        }
        return result_;
    }

    Rank& at(std::size_t collective, int rank) {
        return ranks_[collective][static_cast<std::size_t>(rank)];
    }
    void finish_step(std::size_t collective, int rank) {
        Rank const& state = at(collective, rank);
        if (state.step.send.is_none() && state.step.receive.is_none()) {
            put({state.end, collective, rank});
        }
    }
    // Ranks of one collective never wait for a port, so their times do not depend on the order of events: the
    // one in which ranks are neighbours is the fastest.
    void put(Event const& event) {
        if (keeps_order_) {
            in_order_.push(event);
        } else {
            ready_.push_back(event);
        }
    }
    void run_events() {
        for (std::vector<Event> now; !ready_.empty();) {
            now.clear();
            now.swap(ready_);
            for (Event const& event : now) {
                next_step(event.collective, event.rank, event.seconds);
            }
        }
        while (!in_order_.empty()) {
            Event const event = in_order_.top();
            in_order_.pop();
            next_step(event.collective, event.rank, event.seconds);
        }
    }

    void next_step(std::size_t collective, int rank, double now) {
        Rank& state = at(collective, rank);
        for (;;) {
            joinable::detail::MessageStep& step = state.step;
            if (!state.steps.next(step)) {
                result_.seconds = (std::max)(result_.seconds, now);
                --running_;
                return;
            }
            state.posted = state.end = now;
            if (!step.combine.is_none()) {
                observer_.combination(rank, step.combine);
                state.end += costs_.combination(bytes(step.combine.range));
            }
            if (!state.step.send.is_none() || !state.step.receive.is_none()) {
                break;
            }
            if (keeps_order_) {
                return put({state.end, collective, rank});
            }
            now = state.end;
        }
        if (!state.step.send.is_none() &&
            at(collective, state.step.send.peer).step.receive.peer == rank) {
            deliver(collective, rank, state.step.send.peer);
        }
        if (!state.step.receive.is_none() &&
            at(collective, state.step.receive.peer).step.send.peer == rank) {
            deliver(collective, state.step.receive.peer, rank);
        }
    }
    void deliver(std::size_t collective, int from, int to) {
        Rank& sender = at(collective, from);
        Rank& receiver = at(collective, to);
        joinable::detail::Transfer const& sent = sender.step.send;
        if (sent.range.size() != receiver.step.receive.range.size()) {
            throw std::logic_error{"a message has another length for its receiver"};
        }
        observer_.message(from, sent, to, receiver.step.receive);
        Ports& out = ports_[static_cast<std::size_t>(from)];
        Ports& in = ports_[static_cast<std::size_t>(to)];
        double const start =
            std::max({sender.posted, receiver.posted, out.sends_until, in.receives_until});
        double const end = start + costs_.message(bytes(sent.range));
        out.sends_until = in.receives_until = end;
        sender.end = (std::max)(sender.end, end);
        receiver.end = (std::max)(receiver.end, end);
        ++result_.messages[static_cast<std::size_t>(from)];
        result_.elements[static_cast<std::size_t>(from)] += sent.range.size();
        sender.step.send.peer = receiver.step.receive.peer = joinable::detail::Transfer::nobody;
        finish_step(collective, from);
        finish_step(collective, to);
    }
    [[nodiscard]] double bytes(joinable::detail::ElementRange range) const {
        return static_cast<double>(range.size()) * element_bytes_;
    }

    joinable::MessageCosts costs_;
    double element_bytes_;
    Observer observer_;
    Simulated result_;
    std::vector<std::vector<Rank>> ranks_; ///< of each collective
    std::vector<Ports> ports_;
    std::size_t running_ = 0;
    bool keeps_order_ = false;
    std::vector<Event> ready_;
    std::priority_queue<Event> in_order_;
};

} // namespace joinable_tests
