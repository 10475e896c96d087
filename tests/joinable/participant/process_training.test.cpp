// SPDX-License-Identifier: BSL-1.0
// Trainings of process ranks with uneven inputs: their results, and how the others end when a rank is
// killed or stopped at any place of a round.
#include <joinable/participant/data_parallel.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include <unistd.h>

#include <doctest/doctest.h>
#include <support/linear_model.hpp>
#include <support/process_ranks.hpp>
#include <support/shared.hpp>
#include <support/time_of_death.hpp>
#include <support/volume.hpp>
#include <support/wait_until.hpp>

#include <joinable/communicator/shared_memory/run_processes.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/participant/step.hpp>

namespace {

using namespace joinable_tests;
using namespace std::chrono_literals;
using joinable::DistributedDataParallel;
using joinable::EndPolicy;
using joinable::Join;
using joinable::participants;
using joinable::ProcessCommunicator;
using joinable::Round;

// -- the training ------------------------------------------------------------------------------------

constexpr std::size_t elements = 5; // of two parameters, each a bucket
using Values = std::array<double, elements>;

/// How many inputs a rank has: 2, 4, 3, 2, ...
std::size_t inputs_of(int rank) {
    return 2 + static_cast<std::size_t>(2 * rank % 3);
}
std::size_t most_inputs(int world) {
    std::size_t most = 0;
    for (int rank = 0; rank < world; ++rank) {
        most = std::max(most, inputs_of(rank));
    }
    return most;
}
std::uint64_t weight_of(int rank, std::size_t input) {
    return 1 + (static_cast<std::uint64_t>(rank) + 2 * input) % 3;
}
/// The gradient of the mean over an input, with respect to one element. It depends on the element's value,
/// so an error of one step shows in the next.
double gradient_of(double value, std::size_t element, int rank, std::size_t input) {
    double const x = 1.0 + 0.25 * rank - 0.5 * static_cast<double>(input);
    return value * x + 0.125 * static_cast<double>(element);
}
constexpr double rate = 0.1;

/// The union of all inputs on one rank, for so many rounds.
Values train_serially(int world, std::size_t rounds, bool is_weighted) {
    Values values;
    values.fill(1.0);
    for (std::size_t round = 0; round < rounds; ++round) {
        for (std::size_t i = 0; i < elements; ++i) {
            double sum = 0;
            double weights = 0;
            for (int rank = 0; rank < world; ++rank) {
                if (round < inputs_of(rank)) {
                    double const weight =
                        is_weighted ? static_cast<double>(weight_of(rank, round)) : 1.0;
                    sum += weight * gradient_of(values[i], i, rank, round);
                    weights += weight;
                }
            }
            values[i] -= rate * sum / (is_weighted ? weights : world);
        }
    }
    return values;
}

/// Places in the script of a rank, in their order within a round.
enum class Place {
    start,     ///< the guard is entered
    roll_call, ///< before the round is announced
    forward,   ///< in the forward pass
    answered,  ///< the roll call is: also where a joined rank begins to shadow
    backward,  ///< in the backward pass, a bucket is on its way
    step,      ///< all gradients are there: also where a joined rank steps
    post_hook  ///< of a participant before the model
};
/// Is told of each place and its round.
using At = std::function<void(Place, std::size_t round)>;

/// A participant that only has a post hook.
class AtPostHook {
public:
    AtPostHook(ProcessCommunicator& comm, At const& at) : comm_{comm}, at_{at} {}

    struct Hook {
        AtPostHook& owner;
        using runs_before = joinable::labels_of<joinable::labels::gradients>;
        static bool takes_part(Round const&) noexcept { return false; }
        void main_hook() {}
        void post_hook(bool) { owner.at_(Place::post_hook, 0); }
    };
    Hook join_hook(joinable::arguments<joinable::keywords<>> const&) { return {*this}; }
    ProcessCommunicator& join_communicator() { return comm_; }
    joinable::JoinState& join_state() { return state_; }

private:
    ProcessCommunicator& comm_;
    At const& at_;
    joinable::JoinState state_;
};

struct Training {
    EndPolicy policy = EndPolicy::drain;
    bool is_weighted = false;
    bool syncs_at_end = true;
};
/// What is left of it on one rank.
struct Trained {
    Values values;
    std::size_t rounds;
    std::size_t own_rounds;
    bool is_complete;      ///< finish() returned
    bool was_stopped;      ///< it said so
    bool has_thrown_early; ///< EarlyTermination
};

void train(
    ProcessCommunicator& comm,
    Training const& training,
    Trained& trained,
    At const& at = [](Place, std::size_t) {}
) {
    auto params = make_params<double>({3, 2}, 1.0 + comm.rank());
    auto const element = [&](std::size_t i) -> Param<double>& { return params[i < 3 ? 0 : 1]; };
    DistributedDataParallel ddp{
        comm,
        params,
        {.bucket_cap_bytes = 8,
         .first_bucket_bytes = 8,
         .rebuild_buckets = false,
         .sync_at_end = training.syncs_at_end}
    };
    ddp.set_buffer_hook([&](ProcessCommunicator&, auto const&, Round const& round) {
        at(Place::answered, round.number());
    });
    joinable::Step step{comm, [&](Round const& round) {
                            at(Place::step, round.number());
                            for (std::size_t i = 0; i < elements; ++i) {
                                std::size_t const k = i < 3 ? i : i - 3;
                                element(i).value[k] -= rate * element(i).g(k);
                            }
                        }};
    AtPostHook post{comm, at};
    auto const round = [&](std::size_t input, joinable::RoundNotice const& notice) {
        ddp.forward([&] { at(Place::forward, input); }, notice);
        ddp.backward([&](auto ready) {
            for (std::size_t i = elements; i-- > 0;) {
                std::size_t const k = i < 3 ? i : i - 3;
                element(i).g(k) = gradient_of(element(i).value[k], i, comm.rank(), input);
                if (i == 3) {
                    ready(1);
                    at(Place::backward, input);
                }
            }
            ready(0);
        });
        step.step();
    };
    auto const notice_of = [&](std::size_t input) {
        joinable::RoundNotice notice;
        if (training.is_weighted) {
            notice.weight = weight_of(comm.rank(), input);
        }
        return notice;
    };
    try {
        Join guard{participants(post, ddp, step), {.end_policy = training.policy}};
        at(Place::start, 0);
        std::vector<std::size_t> inputs(inputs_of(comm.rank()));
        std::iota(inputs.begin(), inputs.end(), std::size_t{0});
        if (training.policy == EndPolicy::stop_at_first) {
            for (std::size_t const input : guard.iterate(inputs, notice_of)) {
                round(input, {});
            }
        } else {
            for (std::size_t const input : inputs) {
                at(Place::roll_call, input);
                round(input, notice_of(input));
            }
        }
        auto const result = guard.finish();
        trained.is_complete = true;
        trained.was_stopped = result.stopped_early;
        trained.rounds = result.rounds;
        trained.own_rounds = result.own_rounds;
    } catch (joinable::EarlyTermination const&) {
        trained.has_thrown_early = true;
    }
    for (std::size_t i = 0; i < elements; ++i) {
        trained.values[i] = element(i).value[i < 3 ? i : i - 3];
    }
}

TEST_CASE("process ranks with uneven inputs train as one rank does, by every policy and average") {
    for (EndPolicy const policy :
         {EndPolicy::drain, EndPolicy::stop_at_first, EndPolicy::throw_early}) {
        for (bool const is_weighted : {false, true}) {
            for (int const world : {1, 2, 3, 4, 8}) {
                for (bool const is_named : {false, true}) {
                    auto const ranks = static_cast<std::size_t>(world);
                    auto const trained = joinable::shared_buffer<Trained>(ranks);
                    auto const body = [&](ProcessCommunicator& comm) {
                        Training const training{policy, is_weighted, false};
                        train(comm, training, trained[static_cast<std::size_t>(comm.rank())]);
                    };
                    is_named ? run_named_ranks({world}, body) : run_process_ranks({world}, body);
                    CAPTURE(name_of(policy));
                    CAPTURE(is_weighted);
                    CAPTURE(world);
                    CAPTURE(is_named);
                    bool const is_even = world == 1;
                    std::size_t const rounds =
                        policy == EndPolicy::drain ? most_inputs(world) : inputs_of(0);
                    Values const expected = train_serially(world, rounds, is_weighted);
                    for (std::size_t rank = 0; rank < ranks; ++rank) {
                        Trained const& one = trained[rank];
                        bool const throws = policy == EndPolicy::throw_early && !is_even;
                        CHECK(one.has_thrown_early == throws);
                        CHECK(one.is_complete != throws);
                        CHECK(one.was_stopped == (policy == EndPolicy::stop_at_first && !is_even));
                        if (one.is_complete) {
                            CHECK(one.rounds == rounds);
                            CHECK(
                                one.own_rounds ==
                                std::min(rounds, inputs_of(static_cast<int>(rank)))
                            );
                        }
                        for (std::size_t i = 0; i < elements; ++i) {
                            CHECK(one.values[i] == doctest::Approx(expected[i]).epsilon(1e-12));
                            CHECK(one.values[i] == trained[0].values[i]);
                        }
                    }
                }
            }
        }
    }
}

// -- faults ------------------------------------------------------------------------------------------

/// Where a rank is killed or stopped.
struct Fault {
    Place place;
    std::size_t round;
    int culprit;
};

/// In every round at every place, by turns of the ranks that come there; joined ones, too.
std::vector<Fault> faults_of(int world) {
    std::vector<Fault> faults;
    std::size_t turn = 0;
    for (std::size_t round = 0; round < most_inputs(world); ++round) {
        std::vector<int> active;
        std::vector<int> joined;
        for (int rank = 0; rank < world; ++rank) {
            (round < inputs_of(rank) ? active : joined).push_back(rank);
        }
        for (Place const place :
             {Place::roll_call, Place::forward, Place::answered, Place::backward, Place::step}) {
            faults.push_back({place, round, active[turn++ % active.size()]});
            if (!joined.empty() && (place == Place::answered || place == Place::step)) {
                faults.push_back({place, round, joined[turn++ % joined.size()]});
            }
        }
    }
    faults.push_back({Place::post_hook, 0, static_cast<int>(turn) % world});
    return faults;
}

/// What the ranks of one training with a fault tell each other, and the test.
struct Told {
    std::atomic<bool> has_happened{false};
    std::atomic<pid_t> culprit{0};
    TimeOfDeath time;
    std::atomic<int> heard{0}; ///< the others
    std::atomic<int> named{0}; ///< the culprit, in what they throw

    void happens() {
        culprit = getpid();
        time.happens();
        has_happened = true;
    }
    void hears(joinable::Error const& error, int by) {
        time.is_heard();
        auto const ranks = ranks_of(error);
        named += std::find(ranks.begin(), ranks.end(), by) != ranks.end() ? 1 : 0;
        ++heard;
    }

private:
    static std::vector<int> ranks_of(joinable::Error const& error) {
        if (auto const* const failed = dynamic_cast<joinable::PeerFailed const*>(&error)) {
            return failed->ranks();
        }
        auto const* const timed_out = dynamic_cast<joinable::TimedOut const*>(&error);
        return timed_out != nullptr ? timed_out->missing() : std::vector<int>{};
    }
};

/// What the others of a named group throw is said by how they end: 0.
int wait_for_all(Processes& processes, int world, int culprit) {
    int others = 0;
    for (int rank = 0; rank < world; ++rank) {
        int const how = processes.wait();
        if (rank == culprit) {
            CHECK(how == SIGKILL);
        } else {
            others += how == 0 ? 1 : 0;
        }
    }
    return others;
}

TEST_CASE("a rank that is killed anywhere in a training is named by all others at once") {
    for (bool const is_named : {false, true}) {
        for (int const world : groups_of_participants({2, 3, 4, 8})) {
            std::vector<TimeOfDeath::Clock::duration> delays;
            for (Fault const& fault : faults_of(world)) {
                CAPTURE(is_named);
                CAPTURE(world);
                CAPTURE(static_cast<int>(fault.place));
                CAPTURE(fault.round);
                CAPTURE(fault.culprit);
                Shared<Told> told;
                auto const body = [&](ProcessCommunicator& comm) {
                    Trained trained{};
                    try {
                        train(comm, {}, trained, [&](Place place, std::size_t round) {
                            if (place == fault.place && round == fault.round &&
                                comm.rank() == fault.culprit) {
                                told->happens();
                                std::raise(SIGKILL);
                            }
                        });
                    } catch (joinable::PeerFailed const& error) {
                        told->hears(error, fault.culprit);
                    }
                };
                if (is_named) {
                    std::string const job = fresh_job();
                    Processes processes;
                    for (int rank = 0; rank < world; ++rank) {
                        processes.start([&] {
                            auto comm = ProcessCommunicator::attach({rank, world, job, 60s});
                            body(comm);
                        });
                    }
                    CHECK(wait_for_all(processes, world, fault.culprit) == world - 1);
                } else {
                    CHECK_THROWS_WITH_AS(
                        run_process_ranks({world}, body),
                        joinable::detail::concat(
                            "rank ", fault.culprit, " failed: its process was killed by signal 9"
                        )
                            .c_str(),
                        joinable::PeerFailed
                    );
                }
                CHECK(told->heard == world - 1);
                CHECK(told->named == world - 1);
                delays.push_back(told->time.delay());
            }
            // Mostly some milliseconds, and some ten where ranks have found each other by a name.
            CHECK(most_of(delays) < 1s);
            CHECK(*std::max_element(delays.begin(), delays.end()) < 30s); // half of the deadline
        }
    }
}

/// Where a rank can wait for the culprit to be stopped, which needs nothing of it any more by then: what
/// it does next lacks the culprit.
bool is_gate(Fault const& fault, Place place, std::size_t round) {
    switch (fault.place) {
    case Place::roll_call:
    case Place::forward:
        return fault.round == 0 ? place == Place::start
                                : place == Place::step && round + 1 == fault.round;
    case Place::answered:
    case Place::backward: return place == Place::answered && round == fault.round;
    default: return place == fault.place && round == fault.round;
    }
}

TEST_CASE("a rank that is stopped anywhere in a training is named by all others at the deadline") {
    constexpr auto deadline = 50ms;
    for (int const world : groups_of_participants({2, 3, 4, 8})) {
        bool goes_on =
            false; // by turns: or it is killed, one deadline after the others have failed
        for (Fault const& fault : faults_of(world)) {
            goes_on = !goes_on;
            CAPTURE(world);
            CAPTURE(static_cast<int>(fault.place));
            CAPTURE(fault.round);
            CAPTURE(fault.culprit);
            CAPTURE(goes_on);
            Shared<Told> told;
            auto const body = [&](ProcessCommunicator& comm) {
                bool const is_culprit = comm.rank() == fault.culprit;
                bool const gives_up = comm.rank() == (fault.culprit + 1) % world;
                Trained trained{};
                try {
                    train(comm, {}, trained, [&](Place place, std::size_t round) {
                        if (is_culprit && place == fault.place && round == fault.round) {
                            comm.set_deadline(goes_on ? 60s : deadline);
                            told->happens();
                            std::raise(SIGSTOP);
                        }
                        if (gives_up && is_gate(fault, place, round)) {
                            wait_until(told->has_happened, true);
                            comm.set_deadline(deadline);
                        }
                    });
                } catch (joinable::TimedOut const& error) {
                    told->hears(error, fault.culprit);
                    if (!is_culprit) {
                        comm.set_deadline(deadline);
                        wait_until([&] { return told->heard >= world - 1; });
                    }
                    if (gives_up && goes_on) {
                        kill(told->culprit, SIGCONT);
                    }
                    throw;
                }
            };
            CHECK_THROWS_AS(run_process_ranks({world}, body), joinable::PeerFailed);
            CHECK(told->heard == (goes_on ? world : world - 1));
            CHECK(told->named == told->heard);
            CHECK(told->time.delay() >= deadline);
        }
    }
}

} // namespace
