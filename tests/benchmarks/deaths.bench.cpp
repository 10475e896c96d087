// SPDX-License-Identifier: BSL-1.0
// How long it takes until all others know that a rank was killed: it is killed at a random moment of a
// training with uneven inputs, and each of the others throws PeerFailed. The time is that from the kill
// until the last of them has caught it.
//
//     bench_deaths [--busy LOOPS] [--kills KILLS] [--kinds forked,named,tcp] [--ranks 2,4,8]
//
// A line for each kind and number of ranks: "<kind> <ranks> <busy loops> <kills> <median> <90 %> <99 %>
// <maximum>", in milliseconds. Busy loops are processes that compute beside the ranks and never sleep.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <random>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <joinable/join.hpp>
#include <joinable/tcp.hpp>

namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr auto deadline = 60s; ///< far beyond what is measured
constexpr std::int64_t rounds_before_a_kill = 5;

/// What a rank tells the others: they read it when it has ended, or as an atomic number.
struct Seat {
    std::int64_t process = 0;
    std::int64_t rounds = 0;
    std::int64_t heard_at = 0; ///< as the steady clock counts; 0: it has thrown nothing
    std::int64_t killed_at = 0;
};
using Seats = std::span<Seat>;

void tell(std::int64_t& number, std::int64_t value) {
    std::atomic_ref{number}.store(value);
}
std::int64_t told(std::int64_t& number) {
    return std::atomic_ref{number}.load();
}
std::int64_t now() {
    return Clock::now().time_since_epoch().count();
}

/// A process that runs `body()` and ends with this one; its number.
template <class Body>
pid_t start(Body const& body) {
    std::fflush(nullptr);
    pid_t const process = fork();
    if (process != 0) {
        return process;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    try {
        body();
    } catch (std::exception const& error) {
        std::fprintf(stderr, "a process failed: %s\n", error.what());
        _exit(1);
    }
    _exit(0);
}
/// Whether it ended as it should.
bool has_ended_well(pid_t process) {
    int status = 0;
    waitpid(process, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

struct Param {
    std::vector<float> value = std::vector<float>(1000, 1.0F);
    std::vector<float> grad = std::vector<float>(1000);
};

/// Until some rank dies. Every fourth one has few inputs, and shadows the others.
template <class Comm>
void train(Comm& comm, Seat& seat) {
    std::vector<Param> params(4);
    joinable::DistributedDataParallel ddp{comm, params, {.bucket_cap_bytes = 8000}};
    joinable::Step step{comm, [&] {
                            for (Param& param : params) {
                                for (std::size_t i = 0; i < param.value.size(); ++i) {
                                    param.value[i] -= 0.01F * param.grad[i];
                                }
                            }
                            tell(seat.rounds, seat.rounds + 1);
                        }};
    joinable::Join guard{joinable::participants(ddp, step)};
    for (int input = 0; comm.rank() % 4 != 3 || input < 3; ++input) {
        ddp.forward([] {});
        ddp.backward([&](auto ready) {
            for (std::size_t k = params.size(); k-- > 0;) {
                for (std::size_t i = 0; i < params[k].grad.size(); ++i) {
                    params[k].grad[i] = params[k].value[i] * static_cast<float>(input % 3 - 1);
                }
                ready(k);
            }
        });
        step.step();
    }
    guard.finish();
}

/// Trains as one rank, and notes when it has heard of the death.
template <class Comm>
void run_rank(Comm& comm, Seats seats, int victim) {
    Seat& seat = seats[static_cast<std::size_t>(comm.rank())];
    tell(seat.process, getpid());
    try {
        train(comm, seat);
    } catch (joinable::PeerFailed const& error) {
        seat.heard_at = now();
        if (error.ranks() != std::vector{victim}) {
            throw;
        }
    }
}

/// Kills it within 20 ms after all ranks have trained for some rounds.
void kill_one(Seats seats, int victim, std::chrono::microseconds after) {
    for (Seat& seat : seats) {
        while (told(seat.rounds) < rounds_before_a_kill) {
            std::this_thread::sleep_for(1ms);
        }
    }
    std::this_thread::sleep_for(after);
    Seat& seat = seats[static_cast<std::size_t>(victim)];
    seat.killed_at = now();
    kill(static_cast<pid_t>(seat.process), SIGKILL);
}

void run_forked(Seats seats, int victim) {
    try {
        joinable::run_processes(static_cast<int>(seats.size()), [&](auto& comm) {
            comm.set_deadline(deadline);
            run_rank(comm, seats, victim);
        });
    } catch (joinable::PeerFailed const& error) {
        if (error.ranks() != std::vector{victim}) {
            throw;
        }
    }
}

/// `attach_and_run(rank)` in a process for each.
template <class AttachAndRun>
void run_each(Seats seats, int victim, AttachAndRun const& attach_and_run) {
    std::vector<pid_t> processes;
    for (int rank = 0; rank < static_cast<int>(seats.size()); ++rank) {
        processes.push_back(start([&] { attach_and_run(rank); }));
    }
    for (std::size_t rank = 0; rank < processes.size(); ++rank) {
        if (!has_ended_well(processes[rank]) && rank != static_cast<std::size_t>(victim)) {
            throw std::runtime_error{"rank " + std::to_string(rank) + " failed"};
        }
    }
}

void run_named(Seats seats, int victim) {
    static int jobs = 0;
    std::string const job = "deaths " + std::to_string(getpid()) + " " + std::to_string(jobs++);
    int const size = static_cast<int>(seats.size());
    run_each(seats, victim, [&](int rank) {
        auto comm = joinable::ProcessCommunicator::attach({rank, size, job, deadline});
        run_rank(comm, seats, victim);
    });
}

void run_tcp(Seats seats, int victim) {
    joinable::TcpListener listener{"127.0.0.1"};
    joinable::TcpOptions options;
    options.size = static_cast<int>(seats.size());
    options.job = "deaths";
    options.address = "127.0.0.1";
    options.port = listener.port();
    options.connect_timeout = deadline;
    options.deadline = deadline;
    run_each(seats, victim, [&](int rank) {
        options.rank = rank;
        joinable::TcpListener mine{std::move(listener)}; // of the others it closes their copy
        if (rank == 0) {
            auto comm = joinable::TcpCommunicator::attach(std::move(mine), options);
            run_rank(comm, seats, victim);
        } else {
            {
                joinable::TcpListener const closed{std::move(mine)};
            }
            auto comm = joinable::TcpCommunicator::attach(options);
            run_rank(comm, seats, victim);
        }
    });
}

/// In milliseconds.
double time_of_one(void (*run)(Seats, int), int ranks, std::mt19937& random) {
    auto const shared = joinable::shared_buffer<Seat>(static_cast<std::size_t>(ranks));
    Seats const seats{shared.data(), shared.size()};
    int const victim = std::uniform_int_distribution{0, ranks - 1}(random);
    std::chrono::microseconds const after{std::uniform_int_distribution{0, 20'000}(random)};
    pid_t const killer = start([&] { kill_one(seats, victim, after); });
    run(seats, victim);
    if (!has_ended_well(killer)) {
        throw std::runtime_error{"nobody was killed"};
    }
    std::int64_t last = 0;
    for (int rank = 0; rank < ranks; ++rank) {
        Seat const& seat = seats[static_cast<std::size_t>(rank)];
        if (rank != victim && seat.heard_at == 0) {
            throw std::runtime_error{"rank " + std::to_string(rank) + " has not heard of it"};
        }
        last = std::max(last, seat.heard_at);
    }
    std::int64_t const killed_at = seats[static_cast<std::size_t>(victim)].killed_at;
    return std::chrono::duration<double, std::milli>{Clock::duration{last - killed_at}}.count();
}

struct Kind {
    std::string_view name;
    void (*run)(Seats seats, int victim);
};
constexpr Kind kinds[] = {{"forked", run_forked}, {"named", run_named}, {"tcp", run_tcp}};

bool lists(std::string const& list, std::string_view word) {
    std::istringstream stream{list};
    for (std::string one; std::getline(stream, one, ',');) {
        if (one == word) {
            return true;
        }
    }
    return false;
}

} // namespace

int main(int count, char** arguments) {
    int busy = 0;
    int kills = 200;
    std::string chosen = "forked,named,tcp";
    std::string sizes = "2,4,8";
    for (int i = 1; i < count; i += 2) {
        std::string_view const name = arguments[i];
        char const* const value = i + 1 < count ? arguments[i + 1] : nullptr;
        if (value != nullptr && name == "--busy") {
            busy = std::atoi(value);
        } else if (value != nullptr && name == "--kills") {
            kills = std::max(1, std::atoi(value));
        } else if (value != nullptr && name == "--kinds") {
            chosen = value;
        } else if (value != nullptr && name == "--ranks") {
            sizes = value;
        } else {
            std::fputs("expected --busy, --kills, --kinds or --ranks, and a value\n", stderr);
            return 1;
        }
    }
    for (int i = 0; i < busy; ++i) {
        start([] {
            for (std::atomic<std::uint64_t> turns{0};; ++turns) {
            }
        });
    }
    std::mt19937 random; // the same victims and moments each time
    std::istringstream stream{sizes};
    for (std::string size; std::getline(stream, size, ',');) {
        int const ranks = std::atoi(size.c_str());
        for (Kind const& kind : kinds) {
            if (!lists(chosen, kind.name)) {
                continue;
            }
            std::vector<double> times;
            for (int i = 0; i < kills; ++i) {
                times.push_back(time_of_one(kind.run, ranks, random));
            }
            std::sort(times.begin(), times.end());
            auto const at = [&](double part) {
                return times[static_cast<std::size_t>(part * static_cast<double>(kills - 1))];
            };
            std::printf(
                "%s %d %d %d %.2f %.2f %.2f %.2f\n",
                kind.name.data(),
                ranks,
                busy,
                kills,
                at(0.5),
                at(0.9),
                at(0.99),
                times.back()
            );
            std::fflush(stdout);
        }
    }
}
