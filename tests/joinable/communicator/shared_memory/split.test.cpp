// SPDX-License-Identifier: BSL-1.0
// Groups of ranks as communicators of their own, and how failures travel between them.
#include <joinable/communicator/shared_memory/process.hpp>
#include <joinable/communicator/shared_memory/thread.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <malloc.h>

#include <doctest/doctest.h>
#include <support/keep_alive.hpp>
#include <support/process_ranks.hpp>
#include <support/shared.hpp>
#include <support/thrown_by.hpp>
#include <support/volume.hpp>
#include <support/wait_until.hpp>

namespace {

using namespace joinable_tests;
using joinable::DType;
using joinable::ReduceOp;

int sum_of_ones(auto& comm) {
    std::int32_t one = 1;
    comm.all_reduce({&one, 1, DType::i32}, ReduceOp::sum).wait();
    return one;
}

TEST_CASE("ranks of one color form a group, in the order of their keys") {
    run_all_ranks({1, 2, 3, 4, 8}, [](auto& comm) {
        for (int const colors : {1, 2, 3, 100}) {
            int const color = comm.rank() % colors;
            auto group = comm.split(color, -comm.rank()); // backwards
            int members = 0;
            int after = 0; // members of a higher rank come first
            for (int rank = color; rank < comm.size(); rank += colors) {
                ++members;
                after += rank > comm.rank() ? 1 : 0;
            }
            CHECK(group.size() == members);
            CHECK(group.rank() == after);
            CHECK(sum_of_ones(group) == members);
            CHECK(sum_of_ones(comm) == comm.size()); // both can be used in turn
            std::int32_t first = comm.rank();
            group.broadcast({&first, 1, DType::i32}, 0).wait();
            CHECK(first >= comm.rank());
            CHECK(first % colors == color);
            auto same = group.split(0, group.rank()); // a group of a group
            CHECK(same.rank() == group.rank());
            CHECK(sum_of_ones(same) == members);
        }
    });
}

/// Converts to a group that is made where it is kept.
template <class Comm>
struct Split {
    Comm& comm;
    operator Comm() const { return comm.split(0, comm.rank()); }
};

TEST_CASE("a communicator cannot be moved, as its type says, and a group is made by new and emplace"
) {
    run_all_ranks({2}, [](auto& comm) {
        using Comm = std::remove_reference_t<decltype(comm)>;
        CHECK_FALSE(std::is_copy_constructible_v<Comm>);
        CHECK_FALSE(std::is_move_constructible_v<Comm>);
        CHECK_FALSE((std::is_constructible_v<Comm, int>));
        std::unique_ptr<Comm> const owned{new Comm(comm.split(0, comm.rank()))};
        std::optional<Comm> kept;
        kept.emplace(Split<Comm>{comm});
        auto const made = std::make_unique<Comm>(Split<Comm>{comm});
        CHECK(sum_of_ones(*owned) == comm.size());
        CHECK(sum_of_ones(*kept) == comm.size());
        CHECK(sum_of_ones(*made) == comm.size());
    });
}

TEST_CASE("a split that a rank does not call times out, or is a Mismatch, by its name") {
    using namespace std::chrono_literals;
    run_all_ranks({2, 3}, [](auto& comm) {
        comm.barrier();
        comm.set_deadline(comm.rank() == 0 ? 100ms : 60s);
        // All others, because a rank that is to be in time might get no core for that long.
        bool const are_two = comm.size() == 3;
        check_thrown<joinable::TimedOut>(
            are_two ? std::vector{1, 2} : std::vector{1},
            std::string{are_two ? "ranks 1 and 2" : "rank 1"} +
                " did not arrive within 0.1 s, while rank 0 waits in split",
            [&] {
                if (comm.rank() == 0) {
                    auto const group = comm.split(0, 0);
                } else {
                    wait_until([&] { return comm.is_aborted(); });
                    comm.barrier();
                }
            }
        );
    });
    run_all_ranks({2}, [](auto& comm) {
        check_thrown<joinable::Mismatch>(
            std::vector{1},
            "ranks run different collectives: rank 0 split, rank 1 all_gather of 2 i32",
            [&] {
                if (comm.rank() == 0) {
                    auto const group = comm.split(0, 0);
                } else { // of as many elements
                    std::array<std::int32_t, 2> const mine{};
                    std::array<std::int32_t, 4> all{};
                    comm.all_gather({mine.data(), 2, DType::i32}, {all.data(), 4, DType::i32})
                        .wait();
                }
            }
        );
    });
}

TEST_CASE("equal keys keep the order of the ranks") {
    run_all_ranks({1, 2, 3, 4, 8}, [](auto& comm) {
        auto const group = comm.split(5, 0);
        CHECK(group.rank() == comm.rank());
        CHECK(group.size() == comm.size());
    });
}

TEST_CASE("a group inherits the deadline, and a negative color is refused") {
    run_all_ranks({1, 2}, [](auto& comm) {
        comm.set_deadline(std::chrono::seconds{17});
        auto group = comm.split(0, 0);
        CHECK(group.set_deadline(std::chrono::seconds{1}) == std::chrono::seconds{17});
        CHECK_THROWS_AS((void)comm.split(-1, 0), joinable::ContractViolation);
        comm.barrier();
    });
}

TEST_CASE("differences and leaving in a group say that its ranks have other numbers in the whole") {
    run_all_ranks({2, 3, 4}, [](auto& comm) {
        using Comm = std::remove_cvref_t<decltype(comm)>;
        std::array<std::int32_t, 2> words{};
        for (int const turn : {-1, 1}) { // backwards, and as they are
            auto const make = [&] {
                return std::unique_ptr<Comm>{new Comm(comm.split(0, turn * comm.rank()))};
            };
            auto const counts = make();
            auto const difference = thrown_by<joinable::Mismatch>([&] {
                std::size_t const count = counts->rank() == 0 ? 1 : 2;
                counts->all_reduce({words.data(), count, DType::i32}, ReduceOp::sum).wait();
            });
            CHECK(difference.is_renumbered() == (turn < 0));

            auto const left = make();
            auto leaving = make();
            if (leaving->rank() == 0) {
                leaving.reset();
                left->send({words.data(), 1, DType::i32}, 1).wait(); // the others may go on
            } else {
                auto const loss = thrown_by<joinable::PeerFailed>([&] {
                    leaving->receive({words.data(), 1, DType::i32}, 0).wait();
                });
                CHECK(loss.ranks() == std::vector{0});
                CHECK(loss.is_renumbered() == (turn < 0));
                if (left->rank() == 1) {
                    left->receive({words.data(), 1, DType::i32}, 0).wait();
                }
            }

            if (comm.size() == 2) {
                auto const sides = make();
                auto const sizes = thrown_by<joinable::Mismatch>([&] {
                    if (sides->rank() == 0) {
                        sides->send({words.data(), 1, DType::i32}, 1).wait();
                    } else {
                        sides->receive({words.data(), 2, DType::i32}, 0).wait();
                    }
                });
                CHECK(sizes.is_renumbered() == (turn < 0));
            }
            comm.barrier();
        }
    });
}

TEST_CASE("an abort reaches the groups that were split off, not the other way round") {
    run_all_ranks({2, 3, 4, 8}, [](auto& comm) {
        auto group = comm.split(comm.rank() % 2, comm.rank());
        auto deeper = group.split(0, 0);
        comm.barrier();
        if (comm.rank() == 0) {
            auto other = comm.split(0, 0);
            comm.barrier();
            comm.abort({joinable::FailureKind::peer_failed, {0}, "rank 0 gives up"});
            CHECK(other.is_aborted());
        } else {
            auto other = comm.split(0, 0);
            other.abort({joinable::FailureKind::peer_failed, {1}, "only here"});
            CHECK(!comm.is_aborted());
            comm.barrier();
            // Nobody else is in `deeper` forever: it ends because of the abort two levels above.
            CHECK_THROWS_WITH_AS(
                [&] {
                    while (true) {
                        deeper.barrier();
                    }
                }(),
                "rank 0 gives up",
                joinable::PeerFailed
            );
        }
        CHECK(deeper.is_aborted());
        CHECK(group.is_aborted());
        CHECK_THROWS_AS((void)comm.split(0, 0), joinable::PeerFailed);
    });
}

TEST_CASE("groups go on without a rank of the parent that has left") {
    run_all_ranks({3, 4, 8}, [](auto& comm) {
        auto group = comm.split(comm.rank() == 0 ? 0 : 1, comm.rank());
        if (comm.rank() == 0) {
            return;
        }
        while (!comm.is_aborted()) { // rank 0 has ended
            std::this_thread::yield();
        }
        CHECK(sum_of_ones(group) == comm.size() - 1);
    });
}

TEST_CASE("who leaves a group while others wait in it is named by its rank there") {
    run_all_ranks({4}, [](auto& comm) {
        std::optional<int> named;
        {
            auto group = comm.split(comm.rank() / 2, comm.rank());
            if (comm.rank() % 2 == 0) {
                try {
                    group.barrier();
                } catch (joinable::PeerFailed const& error) {
                    named = error.rank();
                }
                CHECK(named == 1);
            }
        }
        comm.barrier(); // the parent has no part in it
    });
}

TEST_CASE("an exception inside a group ends as the original one, whichever rank hears of it first"
) {
    for (int repeat = 0; repeat < 20; ++repeat) {
        Shared<std::atomic<int>> const failures;
        auto const body = [&](auto& comm) {
            try {
                auto group = comm.split(comm.rank() / 2, comm.rank());
                if (comm.rank() == 3) {
                    throw std::out_of_range{"no such word"};
                }
                group.barrier();
                comm.barrier();
            } catch (joinable::PeerFailed const&) {
                ++*failures;
                throw;
            }
        };
        CHECK_THROWS_WITH_AS(run_ranks({4}, body), "no such word", std::out_of_range);
        CHECK(*failures == 3);
        *failures = 0;
        CHECK_THROWS_WITH_AS(
            run_process_ranks({4}, body), "rank 3 failed: no such word", joinable::PeerFailed
        );
        CHECK(*failures == 3);
    }
}

TEST_CASE("an abort reaches a group whose parent all have left") {
    run_all_ranks({2, 3, 4, 8}, [](auto& comm) {
        auto deeper = comm.split(comm.rank() % 2, 0).split(0, 0);
        comm.barrier();
        if (comm.rank() == 0) {
            comm.abort({joinable::FailureKind::peer_failed, {0}, "rank 0 gives up"});
        }
        std::int32_t value = 0;
        CHECK_THROWS_WITH_AS( // nobody sends
            deeper.receive({&value, 1, DType::i32}, 0).wait(),
            "rank 0 gives up",
            joinable::PeerFailed
        );
        CHECK(deeper.is_aborted());
    });
}

TEST_CASE("a rank that leaves because of an abort is not what the others hear of") {
    run_all_ranks({3, 4, 8}, [](auto& comm) {
        using Comm = std::remove_reference_t<decltype(comm)>;
        std::vector<std::unique_ptr<Comm>> groups;
        for (int i = 0; i < 20; ++i) {
            groups.emplace_back(new Comm(comm.split(0, comm.rank())));
        }
        auto const oldest = groups.begin(); // the one that the abort reaches last
        if (comm.rank() == 0) {
            comm.abort({joinable::FailureKind::mismatch, {0}, "rank 0 gives up"});
            return;
        }
        if (comm.rank() == 1) {
            std::int32_t value = 0;
            CHECK_THROWS_AS( // nobody sends
                comm.receive({&value, 1, DType::i32}, 0).wait(),
                joinable::Mismatch
            );
            oldest->reset();
            return;
        }
        CHECK_THROWS_WITH_AS((*oldest)->barrier(), "rank 0 gives up", joinable::Mismatch);
    });
}

TEST_CASE(
    "a rank that fails in a group because of an abort around it is not what the others hear of"
) {
    for (bool const fails_beside_a_work : {false, true}) {
        run_all_ranks({3, 4, 8}, [&](auto& comm) {
            using Comm = std::remove_reference_t<decltype(comm)>;
            std::vector<std::unique_ptr<Comm>> groups;
            for (int i = 0; i < 20; ++i) {
                groups.emplace_back(new Comm(comm.split(0, comm.rank())));
            }
            auto& oldest = groups.front(); // the one that the abort reaches last
            std::int32_t value = 0;
            joinable::Buffer const buffer{&value, 1, DType::i32};
            if (comm.rank() == 0) {
                comm.abort({joinable::FailureKind::mismatch, {0}, "rank 0 gives up"});
                return;
            }
            auto const hear_of_it = [&] { comm.receive(buffer, 0).wait(); }; // nobody sends
            if (comm.rank() == 1 && fails_beside_a_work) {
                auto const fail = [&] {
                    auto const work = oldest->receive(buffer, 1);
                    hear_of_it();
                };
                CHECK_THROWS_AS(fail(), joinable::Mismatch);
            } else if (comm.rank() == 1) {
                auto const fail = [&] {
                    std::unique_ptr<Comm> const group = std::move(oldest);
                    hear_of_it();
                };
                CHECK_THROWS_AS(fail(), joinable::Mismatch);
            } else {
                CHECK_THROWS_WITH_AS(oldest->barrier(), "rank 0 gives up", joinable::Mismatch);
            }
        });
    }
}

TEST_CASE(
    "a rank that throws in a group is named on all, though another one of that group fails first"
) {
    Shared<std::atomic<bool>> const is_over;
    Shared<std::array<char, 200>> const text;
    struct WaitsAtTheEnd {
        std::atomic<bool> const* is_over; ///< null: it does not
        ~WaitsAtTheEnd() {
            wait_until([&] { return is_over == nullptr || is_over->load(); });
        }
    };
    auto const body = [&](auto& comm) {
        WaitsAtTheEnd const last{comm.rank() == 2 ? &*is_over : nullptr};
        auto group = comm.split(comm.rank() / 2, -comm.rank()); // 1 and 0, 3 and 2
        if (comm.rank() == 2) {                                 // 1 there
            throw std::out_of_range{"no such word"};
        }
        if (comm.rank() == 3) {
            group.barrier();
        }
        try {
            comm.barrier();
        } catch (joinable::PeerFailed const& error) {
            if (comm.rank() == 0) {
                CHECK(error.ranks() == std::vector{2});
                std::snprintf(text->data(), text->size(), "%s", error.what());
                *is_over = true;
            }
            throw;
        }
    };
    auto const check = [&] {
        CHECK(
            std::string{text->data()} ==
            "rank 2, in a group split off: rank 1 failed: an exception left the scope of its "
            "communicator"
        );
        *is_over = false;
    };
    CHECK_THROWS_WITH_AS(run_ranks({4}, body), "no such word", std::out_of_range);
    check();
    CHECK_THROWS_WITH_AS(
        run_process_ranks({4}, body), "rank 2 failed: no such word", joinable::PeerFailed
    );
    check();
}

TEST_CASE("a rank that leaves a group while another one waits in it is named on all as it ends") {
    Shared<std::atomic<int>> const heard;
    auto const body = [&](auto& comm) {
        {
            auto group = comm.split(comm.rank() / 2, -comm.rank()); // 1 and 0, 3 and 2
            if (comm.rank() == 3) {                                 // 0 there
                group.barrier();
            }
        }
        float value = 0;
        try {
            comm.receive({&value, 1, DType::f32}, comm.rank() ^ 1).wait();
        } catch (joinable::PeerFailed const& error) {
            bool const is_named =
                error.ranks() == std::vector{2} &&
                std::string{error.what()} ==
                    "rank 2, in a group split off: rank 1 left while rank 0 waits for it in barrier";
            *heard += is_named ? 1 : 0;
            throw;
        }
    };
    CHECK_THROWS_AS(run_ranks({4}, body), joinable::PeerFailed);
    CHECK(*heard == 3);
    CHECK_THROWS_AS(run_process_ranks({4}, body), joinable::PeerFailed);
    CHECK(*heard == 6);
}

TEST_CASE("groups end in any order, and none disturbs another") {
    run_all_ranks({1, 2, 3, 4, 8}, [](auto& comm) {
        using Comm = std::remove_reference_t<decltype(comm)>;
        std::vector<std::unique_ptr<Comm>> groups;
        for (int round = 0; round < 40; ++round) {
            auto const place = static_cast<std::size_t>(round * 7 % 5);
            groups.resize(5);
            Comm& from = groups[place] && round % 3 == 0 ? *groups[place] : comm;
            groups[(place + 2) % 5].reset(new Comm{from.split(0, -from.rank())});
            for (auto const& group : groups) {
                CHECK((!group || sum_of_ones(*group) == comm.size()));
            }
        }
    });
}

/// Every sanitizer's allocator has it, and nothing else.
extern "C" [[gnu::weak]] std::size_t __sanitizer_get_current_allocated_bytes();

/// The memory that this process uses, of the kind that communicators of this type share. 0 under the
/// sanitizers: mallinfo2() knows nothing of their allocators, and crashes under that of clang 14.
std::size_t bytes_in_use(joinable::ThreadCommunicator const&) {
    if (__sanitizer_get_current_allocated_bytes != nullptr) {
        return 0;
    }
    auto const info = mallinfo2();
    return info.uordblks + info.hblkhd;
}
std::size_t bytes_in_use(joinable::ProcessCommunicator const&) {
    std::ifstream maps{"/proc/self/smaps"};
    std::size_t kilobytes = 0;
    bool is_shared = false;
    for (std::string line; std::getline(maps, line);) {
        if (line.find("-") < line.find(":")) {
            is_shared = line.find("/dev/zero (deleted)") != std::string::npos ||
                        line.find("/dev/shm/") != std::string::npos;
        } else if (is_shared && line.rfind("Rss:", 0) == 0) {
            kilobytes += std::stoul(line.substr(4));
        }
    }
    REQUIRE(kilobytes != 0); // or that is no more what it is called
    return 1024 * kilobytes;
}

TEST_CASE("many groups and many more messages leave nothing behind") {
    run_all_ranks({2, 4}, [](auto& comm) {
        std::vector<double> values(10'000, 1.0);
        auto const pass_on = [&](auto& group, std::size_t n) {
            double theirs = 0;
            auto sending =
                group.send({values.data(), n, DType::f64}, (group.rank() + 1) % group.size());
            std::vector<double> in(n);
            group
                .receive(
                    {in.data(), n, DType::f64}, (group.rank() + group.size() - 1) % group.size()
                )
                .wait();
            sending.wait();
            theirs = in.back();
            REQUIRE(theirs == 1.0);
        };
        auto const make_groups = [&](int number) {
            for (int i = 0; i < number; ++i) {
                auto group = comm.split(i % 2 == 0 ? 0 : comm.rank() % 2, i % 3 * comm.rank());
                auto deeper = group.split(0, 0);
                pass_on(deeper, 1);
                sum_of_ones(group);
            }
        };
        auto const exchange = [&](int number) {
            for (int i = 0; i < number; ++i) {
                pass_on(comm, i % 100 == 0 ? values.size() : 1);
            }
        };
        make_groups(20);
        exchange(1000);
        comm.barrier();
        std::size_t const before = bytes_in_use(comm);
        make_groups(volume(500)); // and as many groups of groups
        exchange(volume(100'000) / comm.size());
        comm.barrier();
        std::size_t const after = bytes_in_use(comm);
        comm.barrier();
        CHECK(after < before + 4'000'000); // a few groups are given back late
    });
}

TEST_CASE("keep_alive extends what others wait, by one deadline from then on") {
    run_ranks_together({2, 3, 4, 8}, [](joinable::ThreadCommunicator& comm) {
        comm.barrier();
        comm.set_deadline(long_deadline);
        if (comm.rank() == 1) {
            stay_away_alive(comm);
        }
        comm.barrier();
        if (comm.rank() == 1) { // once is not for ever
            comm.keep_alive();
            wait_until([&] { return comm.is_aborted(); });
        }
        try {
            comm.barrier();
            FAIL_CHECK("no exception");
        } catch (joinable::TimedOut const& error) {
            CHECK(error.missing() == std::vector{1});
        }
    });
}

} // namespace
