// SPDX-License-Identifier: BSL-1.0
// NCCL ranks whose control communicator goes by TCP, as torchrun starts them on several machines.
#include <joinable/nccl.hpp>
#include <joinable/tcp.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/meeting.hpp>
#include <support/nccl_ranks.hpp>
#include <support/wait_until.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/participant/action.hpp>

namespace {

using namespace joinable_tests;
using doctest::Contains;
using joinable::NcclCommunicator;
using joinable::ReduceOp;
using joinable::TcpCommunicator;

/// A rank that torchrun started: a thread here, with variables of its own.
class Started {
public:
    /// `listener` is rank 0's.
    Started(int rank, int size, std::uint16_t port, joinable::TcpListener* listener)
        : listener_{listener}, variables_{
                                   {"RANK", std::to_string(rank)},
                                   {"WORLD_SIZE", std::to_string(size)},
                                   {"LOCAL_RANK", std::to_string(rank)},
                                   {"LOCAL_WORLD_SIZE", std::to_string(size)},
                                   {"MASTER_ADDR", "127.0.0.1"},
                                   {"MASTER_PORT", std::to_string(port)},
                                   {"TORCHELASTIC_RUN_ID", "nccl by tcp"},
                                   {"JOINABLE_SECRET", "of the test"},
                               } {}

    void set(std::string const& name, std::string const& value) { variables_[name] = value; }

    [[nodiscard]] bool is(std::string const& name, std::string_view value) const {
        return variables_.at(name) == value;
    }

    /// As TcpCommunicator::from_environment(), but of these variables.
    [[nodiscard]] TcpCommunicator attach() const {
        joinable::TcpOptions options = joinable::tcp_environment([&](std::string const& name) {
            auto const found = variables_.find(name);
            return found == variables_.end() ? nullptr : found->second.c_str();
        });
        options.connect_timeout = options.deadline = std::chrono::seconds{60};
        return options.rank == 0 && listener_ != nullptr
                   ? TcpCommunicator::attach(std::move(*listener_), options)
                   : TcpCommunicator::attach(options);
    }

private:
    joinable::TcpListener* listener_;
    std::map<std::string, std::string> variables_;
};

/// Runs `body(started)` in a thread for each rank.
template <class Body>
void run_started(std::initializer_list<int> sizes, Body const& body) {
    for (int const size : sizes) {
        joinable::TcpListener listener{"127.0.0.1"};
        std::uint16_t const port = listener.port();
        run_ranks({size}, [&](joinable::ThreadCommunicator& threads) {
            int const rank = threads.rank();
            body(Started{rank, size, port, rank == 0 ? &listener : nullptr});
        });
    }
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("ranks meet by TCP, take the device of their place, and reduce by NCCL") {
    run_started({1, 2, 3, 4}, [](Started const& started) {
        auto comm = NcclCommunicator::from_environment([&] { return started.attach(); });
        CHECK(comm.device() == comm.rank());
        Stream const stream;
        comm.set_stream(stream);
        int const n = comm.size();
        DeviceArray<double> const data{{comm.rank() + 1.0, -1.0}, stream};
        comm.all_reduce(data.buffer(), ReduceOp::sum).wait();
        CHECK(data.read(comm, stream) == std::vector{n * (n + 1) / 2.0, -1.0 * n});
        DeviceArray<int> const told{{comm.rank()}, stream};
        comm.broadcast(told.buffer(), n - 1).wait();
        CHECK(told.read(comm, stream) == std::vector{n - 1});
        comm.barrier();
        CHECK(comm.missing_ranks().empty());
    });
}

/// A rank with a communicator by TCP, which its guard has, too.
struct Rank {
    explicit Rank(Started const& started) : control{started.attach()} { comm.set_stream(stream); }
    /// `own` summed up over the active ranks.
    [[nodiscard]] int sum(int own) {
        DeviceArray<int> const value{{own}, stream};
        comm.all_reduce(value.buffer(), ReduceOp::sum).wait();
        return value.read(comm, stream)[0];
    }

    TcpCommunicator control;
    NcclCommunicator comm =
        NcclCommunicator::from_environment([this]() -> TcpCommunicator& { return control; });
    Stream stream; ///< of the device that the communicator made the current one
};

TEST_CASE("a guard's roll calls go by TCP where its sums go by NCCL") {
    run_started({1, 2, 3, 4}, [](Started const& started) {
        Rank rank{started};
        int const n = rank.comm.size();
        joinable::Action count{
            rank.comm, [&] { return rank.sum(1); }, [&] { static_cast<void>(rank.sum(0)); }
        };
        joinable::Join guard{joinable::participants(count), joinable::control(rank.control)};
        for (int input = 0; input <= rank.comm.rank(); ++input) { // rank r has r + 1 of them
            CHECK(count() == n - input);
        }
        joinable::JoinResult const result = guard.finish();
        CHECK(result.rounds == static_cast<std::size_t>(n));
        CHECK(result.last_joiners == std::vector{n - 1});
    });
}

TEST_CASE("a rank that throws in a round over NCCL and TCP is named on all others") {
    for (int const size : {2, 3, 4}) {
        for (int culprit = 0; culprit < size; ++culprit) {
            auto const run = [&] {
                Meeting begun{size};
                run_started({size}, [&](Started const& started) {
                    Rank rank{started};
                    begun.meet(); // nobody is in a constructor any more
                    joinable::Action count{
                        rank.comm,
                        [&] {
                            if (rank.comm.rank() == culprit) {
                                throw std::runtime_error{"bad batch"};
                            }
                            return rank.sum(1);
                        },
                        [&] { static_cast<void>(rank.sum(0)); }
                    };
                    auto const train = [&] {
                        joinable::Join guard{
                            joinable::participants(count), joinable::control(rank.control)
                        };
                        count();
                        guard.finish();
                    };
                    if (rank.comm.rank() == culprit) {
                        train();
                    } else {
                        try {
                            train();
                            FAIL_CHECK("a rank failed, and nobody was told");
                        } catch (joinable::PeerFailed const& error) {
                            CHECK(error.ranks() == std::vector{culprit});
                        }
                        CHECK(rank.comm.is_aborted());
                    }
                });
            };
            CHECK_THROWS_WITH_AS(run(), "bad batch", std::runtime_error);
        }
    }
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("a rank that ends before NCCL begins is named by those that wait for it") {
    run_started({2, 3, 4}, [](Started const& started) {
        TcpCommunicator control = started.attach();
        if (control.rank() == control.size() - 1) {
            return; // its connection ends
        }
        try {
            auto const comm =
                NcclCommunicator::from_environment([&]() -> TcpCommunicator& { return control; });
            FAIL_CHECK("it came to be without a rank");
        } catch (joinable::PeerFailed const& error) {
            CHECK(error.ranks() == std::vector{control.size() - 1});
        }
        CHECK(control.is_aborted());
    });
}

TEST_CASE("a rank that stays away from a collective of NCCL ends it by the deadline, by TCP") {
    for (int const size : {2, 4}) {
        Meeting posted{size};
        run_started({size}, [&](Started const& started) {
            Rank rank{started};
            DeviceArray<int> const data{{1}, rank.stream};
            bool const is_away = rank.comm.rank() == size - 1;
            std::optional<joinable::NcclWork> work;
            if (!is_away) {
                work.emplace(rank.comm.all_reduce(data.buffer(), ReduceOp::sum));
            }
            posted.meet();
            if (rank.comm.rank() == 0) { // gives up
                rank.comm.set_deadline(std::chrono::milliseconds{200});
            }
            auto const wait = [&] { is_away ? rank.control.barrier() : work->synchronize(); };
            CHECK_THROWS_WITH_AS(
                wait(), // "besides, ncclCommAbort failed" where that takes as long again
                Contains("no answer within 0.2 s, while rank 0 waits for a collective"),
                joinable::TimedOut
            );
        });
    }
}

TEST_CASE("a rank with another secret is refused, and disturbs no rank that has the right one") {
    run_started({2, 4}, [](Started started) {
        bool const is_other = started.is("RANK", "1");
        if (is_other) {
            started.set("JOINABLE_SECRET", "of another test");
            CHECK_THROWS_WITH_AS(
                static_cast<void>(NcclCommunicator::from_environment([&] {
                    return started.attach();
                })),
                Contains("expected the secret that rank 0 has"),
                joinable::ContractViolation
            );
            started.set("JOINABLE_SECRET", "of the test");
        }
        auto const comm = NcclCommunicator::from_environment([&] { return started.attach(); });
        CHECK(comm.device() == comm.rank());
    });
}

TEST_CASE("without a secret or an address NCCL ranks say what is to be set") {
    for (auto const& [name, text] : std::initializer_list<std::pair<std::string, std::string>>{
             {"JOINABLE_SECRET", "in JOINABLE_SECRET, but it is not set; set it on all ranks"},
             {"MASTER_ADDR", "expected the machine of rank 0 in MASTER_ADDR"},
             {"MASTER_PORT", "expected a free port of that machine in MASTER_PORT"},
         }) {
        Started started{1, 2, 1, nullptr};
        started.set("JOINABLE_JOB", "nccl by tcp");
        started.set(name, "");
        CHECK_THROWS_WITH_AS(
            static_cast<void>(NcclCommunicator::from_environment([&] { return started.attach(); })),
            Contains(text.c_str()),
            joinable::ContractViolation
        );
    }
}

} // namespace
