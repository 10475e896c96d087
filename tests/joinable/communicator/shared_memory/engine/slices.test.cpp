// SPDX-License-Identifier: BSL-1.0
// Large collectives of ranks that do not reach each other's buffers: they move in slices.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include <support/gate.hpp>
#include <support/named_ranks.hpp>
#include <support/process_ranks.hpp>
#include <support/shared.hpp>
#include <support/wait_until.hpp>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/make_arena.hpp>
#include <joinable/communicator/progress_thread.hpp>
#include <joinable/communicator/shared_memory/board/board.hpp>
#include <joinable/communicator/shared_memory/engine/slices.hpp>
#include <joinable/communicator/shared_memory/process.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/dtype.hpp>

namespace {

using joinable::Arena;
using joinable::Buffer;
using joinable::DType;
using joinable::PeerFailed;
using joinable::ProcessCommunicator;
using joinable::ReduceOp;
using joinable_tests::Gate;
using joinable_tests::run_named_ranks;
using joinable_tests::run_process_ranks;
using joinable_tests::Shared;
using joinable_tests::wait_until;

/// Above what a rank stages at once, however many cores there are; the last slice is cut short.
constexpr std::size_t many = 700'001; // of at least 4 bytes

/// Elements of one rank, in memory that only it reaches, or in an arena.
template <class T>
struct Elements {
    template <class Comm, class Function>
    Elements(Comm& comm, bool is_in_arena, std::size_t number, Function const& element)
        : memory{is_in_arena ? joinable::make_arena(comm, number * sizeof(T)) : Arena{number * sizeof(T)}},
          count{number} {
        T* const elements = data();
        for (std::size_t i = 0; i < count; ++i) {
            elements[i] = element(i);
        }
    }
    [[nodiscard]] T* data() const { return reinterpret_cast<T*>(memory.data()); }
    [[nodiscard]] Buffer buffer() const { return {data(), count, joinable::dtype_of<T>}; }
    template <class Function>
    [[nodiscard]] bool are(Function const& expected) const {
        T const* const elements = data();
        for (std::size_t i = 0; i < count; ++i) {
            if (elements[i] != expected(i)) {
                return false;
            }
        }
        return true;
    }

    Arena memory;
    std::size_t count;
};

/// Which ranks have their buffers in arenas.
using IsInArena = bool (*)(int rank);
constexpr std::array<IsInArena, 3> placements{
    [](int) { return false; },
    [](int rank) { return rank % 2 == 0; },
    [](int rank) { return rank != 0; },
};

/// All four kinds that move in slices, with sums that floats hold exactly.
template <class Comm>
void check_all(Comm& comm, std::size_t count, IsInArena is_in_arena) {
    int const world = comm.size();
    bool const in_arena = is_in_arena(comm.rank());
    auto const value = [](std::size_t i, int rank) {
        return static_cast<float>(i % 1009) + static_cast<float>(rank);
    };
    auto const mine = [&](std::size_t i) { return value(i, comm.rank()); };
    auto const sum = [&](std::size_t i) {
        return static_cast<float>(world) * static_cast<float>(i % 1009) +
               static_cast<float>(world * (world - 1) / 2);
    };
    {
        Elements<float> const values{comm, in_arena, count, mine};
        comm.all_reduce(values.buffer(), ReduceOp::sum).wait();
        CHECK(values.are(sum));
    }
    { // by factors 2, 4, ... of the ranks
        Elements<float> const values{comm, in_arena, count, [](std::size_t i) {
                                         return static_cast<float>(i % 1009);
                                     }};
        comm.all_reduce(values.buffer(), ReduceOp::sum, static_cast<double>(2U << comm.rank()))
            .wait();
        CHECK(values.are([&](std::size_t i) {
            return static_cast<float>((2U << world) - 2) * static_cast<float>(i % 1009);
        }));
    }
    int const root = world - 1;
    {
        Elements<float> const values{comm, in_arena, count, mine};
        comm.reduce(values.buffer(), ReduceOp::sum, root).wait();
        bool const is_root = comm.rank() == root;
        CHECK((is_root ? values.are(sum) : values.are(mine)));
    }
    {
        Elements<float> const values{comm, in_arena, count, mine};
        comm.broadcast(values.buffer(), root).wait();
        CHECK(values.are([&](std::size_t i) { return value(i, root); }));
    }
}

TEST_CASE("messages larger than a ring arrive whole, wherever each rank has its buffer") {
    run_process_ranks({1, 2, 3, 4, 8}, [](ProcessCommunicator& comm) {
        for (IsInArena const is_in_arena : placements) {
            check_all(comm, many, is_in_arena);
        }
    });
    run_named_ranks({2, 3}, [](ProcessCommunicator& comm) {
        check_all(comm, many, placements[0]);
    });
}

TEST_CASE("sizes around that of a slice and of a ring lose nothing") {
    run_process_ranks({2, 3}, [](ProcessCommunicator& comm) {
        constexpr std::size_t slice = joinable::detail::tuning::slice_bytes / sizeof(float);
        for (std::size_t const slices : {4U, 5U, 8U, 16U, 17U, 20U}) {
            for (std::size_t const more : {0U, 1U, 15U, 16U, 17U, 100U}) {
                std::size_t const count = slices * slice + more;
                Elements<float> const values{comm, false, count, [](std::size_t i) {
                                                 return static_cast<float>(i % 1009);
                                             }};
                comm.all_reduce(values.buffer(), ReduceOp::sum).wait();
                CHECK(values.are([&](std::size_t i) {
                    return static_cast<float>(comm.size()) * static_cast<float>(i % 1009);
                }));
            }
        }
    });
}

template <class T>
void check_type(ProcessCommunicator& comm) {
    Elements<T> const values{comm, false, 2 * many, [&](std::size_t i) {
                                 return static_cast<T>(static_cast<float>(
                                     (i + static_cast<std::size_t>(comm.rank())) % 100
                                 ));
                             }};
    comm.all_reduce(values.buffer(), ReduceOp::max).wait();
    auto const world = static_cast<std::size_t>(comm.size());
    CHECK(values.are([&](std::size_t i) {
        std::size_t largest = 0;
        for (std::size_t rank = 0; rank < world; ++rank) {
            largest = std::max(largest, (i + rank) % 100);
        }
        return static_cast<T>(static_cast<float>(largest));
    }));
}

TEST_CASE("elements of every size move in slices") {
    run_process_ranks({3}, [](ProcessCommunicator& comm) {
        check_type<std::int8_t>(comm);
        check_type<joinable::Half>(comm);
        check_type<std::int32_t>(comm);
        check_type<double>(comm);
    });
}

TEST_CASE("several are on their way, and each rank waits for them in an order of its own") {
    run_process_ranks({2, 3, 4}, [](ProcessCommunicator& comm) {
        constexpr std::size_t works_at_once = 6;
        for (int round = 0; round < 3; ++round) {
            std::vector<Elements<std::int32_t>> values;
            std::vector<joinable::ProcessWork> works;
            for (std::size_t k = 0; k < works_at_once; ++k) {
                std::size_t const count = k == 3 ? 10 : many + k;
                values.emplace_back(comm, k == 4, count, [&](std::size_t i) {
                    return static_cast<std::int32_t>(i + k);
                });
                works.push_back(comm.all_reduce(values[k].buffer(), ReduceOp::sum));
            }
            for (std::size_t k = 0; k < works_at_once; ++k) {
                std::size_t const at = (k + static_cast<std::size_t>(comm.rank())) % works_at_once;
                if (round == 1) {
                    while (!works[at].test()) {
                    }
                }
                works[at].wait();
                CHECK(values[at].are([&](std::size_t i) {
                    return comm.size() * static_cast<std::int32_t>(i + at);
                }));
            }
        }
    });
}

TEST_CASE("a thread that computes for its rank leaves slices to it") {
    run_process_ranks({2}, [](ProcessCommunicator& comm) {
        joinable::ProgressThread const progress{comm};
        check_all(comm, many, placements[0]);
        check_all(comm, many, placements[1]);
    });
}

TEST_CASE("a rank that does not come for its slices is named by all others at the deadline") {
    for (int const kind : {0, 1, 2, 3}) {
        int const slices = kind % 2;
        bool const tests = kind / 2 != 0;
        Shared<std::atomic<int>> waiting;
        Shared<std::atomic<int>> stopped;
        Shared<std::atomic<int>> turns;
        Shared<std::atomic<int>> heard;
        Shared<std::atomic<int>> named;
        Shared<std::array<char, 200>> text;
        try {
            run_process_ranks({3}, [&](ProcessCommunicator& comm) {
                std::vector<float> values(many, 1.0F);
                auto work = comm.all_reduce({values.data(), many, DType::f32}, ReduceOp::sum);
                ++*waiting;
                wait_until(*waiting, 3); // all have arrived
                if (comm.rank() == 1) {
                    if (slices != 0) {
                        CHECK(!work.test()); // its first slices are there
                    }
                    comm.set_deadline(std::chrono::milliseconds{100});
                    *stopped = 1;
                    std::raise(SIGSTOP);
                }
                wait_until(*stopped, 1);
                for (int turn = 1; turn <= 4; ++turn) { // as far as both get without it
                    CHECK(!work.test());
                    ++*turns;
                    wait_until([&] { return *turns >= 2 * turn; });
                }
                if (comm.rank() == 0) { // gives up
                    comm.set_deadline(std::chrono::milliseconds{200});
                }
                try {
                    while (tests && !work.test()) {
                    }
                    work.wait();
                } catch (joinable::TimedOut const& error) {
                    *named += error.missing() == std::vector{1} ? 1 : 0;
                    if (comm.rank() == 0) {
                        std::snprintf(text->data(), text->size(), "%s", error.what());
                    }
                    comm.set_deadline(std::chrono::milliseconds{100});
                    ++*heard;
                    wait_until(*heard, 2);
                    throw;
                }
            });
            FAIL_CHECK("no exception");
        } catch (PeerFailed const& error) {
            CHECK(error.rank() == 1);
        }
        CHECK(*named == 2);
        CHECK(
            std::string{text->data()} ==
            "rank 1 did not copy a slice within 0.2 s, while rank 0 waits in "
            "all_reduce of 700001 f32 with sum"
        );
    }
}

TEST_CASE("a collective in which all have arrived ends well, though a rank fails meanwhile") {
    run_process_ranks({2, 3}, [](ProcessCommunicator& comm) {
        Elements<std::int32_t> const values{comm, false, many, [](std::size_t i) {
                                                return static_cast<std::int32_t>(i);
                                            }};
        auto work = comm.all_reduce(values.buffer(), ReduceOp::sum);
        comm.barrier();
        if (comm.rank() == 0) {
            comm.abort({joinable::FailureKind::peer_failed, {0}, "it was enough"});
        }
        work.wait();
        CHECK(values.are([&](std::size_t i) { return comm.size() * static_cast<std::int32_t>(i); })
        );
        CHECK_THROWS_WITH_AS(comm.barrier(), "it was enough", PeerFailed);
    });
}

/// The rank's own share of the first slice.
std::span<std::byte> own_share(Elements<float> const& values, int rank, int world) {
    bool const is_crowded = static_cast<unsigned>(world) > std::thread::hardware_concurrency();
    namespace tuning = joinable::detail::tuning;
    std::size_t const share = (is_crowded ? tuning::crowded_slice_bytes : tuning::slice_bytes) /
                              static_cast<std::size_t>(world);
    return {values.memory.data() + static_cast<std::size_t>(rank) * share, share};
}

TEST_CASE("nobody touches an arena any more after a rank has heard that its slices are lost") {
    Shared<Gate> gate;
    Shared<std::atomic<bool>> is_over;
    Shared<std::atomic<int>> named;
    auto const run = [&](ProcessCommunicator& comm) {
        Elements<float> const values{comm, true, many, [](std::size_t) { return 1.0F; }};
        Elements<float> const elsewhere{comm, false, many, [](std::size_t) { return 1.0F; }};
        comm.barrier();
        if (comm.rank() == 1) {
            gate->close(own_share(elsewhere, 1, 3));
            CHECK_THROWS_AS(comm.all_reduce(elsewhere.buffer(), ReduceOp::sum).wait(), PeerFailed);
            *is_over = true;
            return;
        }
        auto work =
            comm.all_reduce((comm.rank() == 0 ? values : elsewhere).buffer(), ReduceOp::sum);
        while (!gate->is_reached) {
            static_cast<void>(work.test());
        }
        if (comm.rank() == 2) {
            std::raise(SIGKILL);
        }
        bool is_lost = false;
        auto const poll = [&] {
            try {
                static_cast<void>(work.test());
            } catch (PeerFailed const& error) {
                is_lost = true;
                *named = error.rank();
                std::fill(values.data(), values.data() + many, 5.0F);
            }
        };
        wait_until([&] { return comm.is_aborted(); });
        for (int i = 0; i < 100 && !is_lost; ++i) {
            poll();
        }
        gate->is_open = true;
        while (!is_lost) {
            poll();
        }
        wait_until([&] { return is_over->load(); });
        CHECK(values.are([](std::size_t) { return 5.0F; }));
    };
    CHECK_THROWS_WITH_AS(
        run_process_ranks({3}, run), "rank 2 failed: its process was killed by signal 9", PeerFailed
    );
    CHECK(*named == 2);
}

/// What rank 1 does with rank 0 when it is held.
enum class Held { slice, chunk_in_arena, chunk_in_copy, message };

/// Rank 0 and rank 1 begin it; rank 1 is held in it.
joinable::ProcessWork post_held(
    ProcessCommunicator& pair, Held held, Elements<float> const& in, Elements<float> const& out
) {
    switch (held) {
    case Held::slice:
    case Held::chunk_in_arena: return pair.all_reduce(out.buffer(), ReduceOp::sum);
    case Held::chunk_in_copy: return pair.all_gather(in.buffer(), out.buffer());
    case Held::message: break;
    }
    return pair.rank() == 0 ? pair.receive(out.buffer(), 1) : pair.send(in.buffer(), 0);
}

TEST_CASE("a rank that goes on after the deadline of others writes to no memory that they use again"
) {
    for (Held const held :
         {Held::slice, Held::chunk_in_arena, Held::chunk_in_copy, Held::message}) {
        CAPTURE(static_cast<int>(held));
        Shared<Gate> gate;
        Shared<std::atomic<bool>> has_begun;
        Shared<std::atomic<bool>> is_over;
        bool const takes_arena = held == Held::chunk_in_arena || held == Held::message;
        run_process_ranks({3}, [&](ProcessCommunicator& comm) {
            int const rank = comm.rank();
            auto rest = comm.split(rank == 1 ? 1 : 0, 0);
            std::unique_ptr<ProcessCommunicator> pair{
                new ProcessCommunicator(comm.split(rank == 2 ? 1 : 0, 0))
            };
            auto const five = [](std::size_t) { return 5.0F; };
            if (rank == 2) {
                Elements<float> const own{rest, false, 3 * many, five};
                Elements<float> const all{rest, false, 6 * many, five};
                wait_until(*is_over, true);
                rest.gather(own.buffer(), all.buffer(), 1).wait();
                CHECK(all.are(five));
                return;
            }
            { // what rank 1 has in arenas, only it finds closed
                bool const in_arena = rank == 0 ? takes_arena : held != Held::slice;
                Elements<float> const in{*pair, in_arena, many, [](std::size_t) { return 1.0F; }};
                std::size_t const size = held == Held::chunk_in_copy ? 2 * many : many;
                Elements<float> const out{*pair, in_arena, size, [](std::size_t) { return 1.0F; }};
                if (rank == 1) {
                    bool const reads_in = held == Held::chunk_in_copy || held == Held::message;
                    std::byte* const read = (reads_in ? in : out).memory.data();
                    gate->close(
                        held == Held::slice ? own_share(out, 1, 2)
                                            : std::span{read, many * sizeof(float)}
                    );
                    wait_until(*has_begun, true);
                    try {
                        post_held(*pair, held, in, out).wait();
                    } catch (joinable::TimedOut const&) { // it is told, unless it was a message
                    }
                    *is_over = true;
                    return;
                }
                auto work = post_held(*pair, held, in, out);
                *has_begun = true;
                while (!gate->is_reached) {
                    if (held == Held::slice) { // else rank 1 computes or copies alone
                        CHECK(!work.test());
                    }
                }
                pair->set_deadline(std::chrono::milliseconds{100});
                CHECK_THROWS_AS(work.wait(), joinable::TimedOut);
            }
            pair.reset();
            Elements<float> const again{rest, takes_arena, 3 * many, five};
            auto work = rest.gather(again.buffer(), {}, 1);
            gate->is_open = true;
            work.wait();
        });
    }
}

TEST_CASE("who has failed and does not come for its slices is given up, and gives up itself") {
    Shared<std::atomic<int>> failed;
    run_process_ranks({3}, [&](ProcessCommunicator& comm) {
        std::vector<float> values(many, 1.0F);
        auto work = comm.all_reduce({values.data(), many, DType::f32}, ReduceOp::sum);
        comm.barrier();
        if (comm.rank() == 2) {
            comm.abort({joinable::FailureKind::peer_failed, {2}, "it was enough"});
            wait_until(*failed, 2);
        } else if (comm.rank() == 0) { // gives up
            wait_until([&] { return comm.is_aborted(); });
            comm.set_deadline(std::chrono::milliseconds{100});
        }
        CHECK_THROWS_WITH_AS(work.wait(), "it was enough", PeerFailed);
        ++*failed;
        CHECK_THROWS_WITH_AS(work.wait(), "it was enough", PeerFailed);
    });
}

TEST_CASE("a rank that gives up several sums of a group that has failed waits one deadline for all"
) {
    for (int const way : {0, 1, 2}) { // destroys them; waits; tests
        CAPTURE(way);
        Shared<std::atomic<int>> arrived;
        Shared<std::atomic<bool>> is_over;
        run_process_ranks({2}, [&](ProcessCommunicator& comm) {
            constexpr std::chrono::milliseconds deadline{400};
            constexpr int sums = 12;
            std::vector<std::vector<float>> values(sums, std::vector<float>(many, 1.0F));
            std::vector<joinable::ProcessWork> works;
            for (std::vector<float>& one : values) {
                works.push_back(comm.all_reduce({one.data(), many, DType::f32}, ReduceOp::sum));
            }
            ++*arrived;
            wait_until(*arrived, 2);
            if (comm.rank() == 0) {
                wait_until(*is_over, true);
            } else {
                comm.set_deadline(deadline);
                comm.abort({joinable::FailureKind::peer_failed, {1}, "it was enough"});
            }
            auto const start = std::chrono::steady_clock::now();
            for (joinable::ProcessWork& work : works) {
                if (way == 1) {
                    CHECK_THROWS_WITH_AS(work.wait(), "it was enough", PeerFailed);
                } else if (way == 2) {
                    auto const poll = [&] {
                        while (!work.test()) {
                        }
                    };
                    CHECK_THROWS_WITH_AS(poll(), "it was enough", PeerFailed);
                }
            }
            works.clear();
            auto const took = std::chrono::steady_clock::now() - start;
            if (comm.rank() == 1) {
                CHECK(took >= deadline);
                CHECK(took < (sums - 1) * deadline);
                *is_over = true;
            }
        });
    }
}

TEST_CASE(
    "a rank that is overdue in the numbers of another group is not taken for one of this group"
) {
    Shared<Gate> gate;
    Shared<std::atomic<bool>> is_over;
    run_process_ranks({3}, [&](ProcessCommunicator& comm) {
        int const rank = comm.rank();
        auto pair = comm.split(rank == 1 ? 1 : 0, 0); // rank 2 is rank 1 there
        if (rank == 1) {
            wait_until(*is_over, true);
            return;
        }
        Elements<float> const values{pair, rank == 0, many, [](std::size_t) { return 1.0F; }};
        if (rank == 2) {
            gate->close(own_share(values, 1, 2));
        }
        auto work = pair.all_reduce(values.buffer(), ReduceOp::sum);
        if (rank == 0) {
            while (!gate->is_reached) {
                CHECK(!work.test());
            }
            comm.abort({joinable::FailureKind::timed_out, {1}, "rank 1 did not come"});
            CHECK(pair.is_aborted());
            bool is_lost = false;
            for (int i = 0; i < 100 && !is_lost; ++i) {
                try {
                    is_lost = work.test();
                } catch (joinable::TimedOut const&) {
                    is_lost = true; // while rank 2 still writes here
                }
            }
            CHECK(!is_lost);
            gate->is_open = true;
        }
        work.wait();
        CHECK(values.are([](std::size_t) { return 2.0F; }));
        if (rank == 0) {
            *is_over = true;
        }
    });
}

TEST_CASE("no rank names itself among those that hold up its slices, if another one has just come"
) {
    using joinable::detail::Board;
    Arena const memory{Board::bytes_for(3)};
    Board& board = Board::create(3, {memory.data(), memory.bytes()});
    joinable::detail::Descriptor const sum{
        joinable::detail::Collective::all_reduce, DType::f32, ReduceOp::sum, 0, many
    };
    joinable::detail::Pipeline const pipeline{board, 0, sum};
    using Ranks = std::vector<int>;
    // Ranks 0 and 1 have not lent the first slice. Then all have, and ranks 0 and 1 have not computed it.
    board.progress(2, 0).lent = 1;
    for (int turn = 0; turn < 2; ++turn) {
        CHECK(pipeline.holding_up(board, 0) == Ranks{1});
        CHECK(pipeline.holding_up(board, 1) == Ranks{0});
        CHECK(pipeline.holding_up(board, 2) == Ranks{0, 1});
        board.progress(0, 0).lent = 1;
        board.progress(1, 0).lent = 1;
        board.progress(2, 0).done = 1;
    }
}

} // namespace
