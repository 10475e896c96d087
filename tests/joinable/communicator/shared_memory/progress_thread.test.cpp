// SPDX-License-Identifier: BSL-1.0
// Collectives get on while their ranks do something else: in waits for others, and beside them.
#include <joinable/communicator/progress_thread.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <support/board_group.hpp>
#include <support/forked.hpp>
#include <support/process_ranks.hpp>
#include <support/ranks.hpp>
#include <support/volume.hpp>
#include <support/wait_until.hpp>

#include <joinable/communicator/shared_memory/engine/endpoint.hpp>
#include <joinable/device/arena.hpp>

namespace {

using namespace joinable_tests;
using joinable::Arena;
using joinable::Buffer;
using joinable::DType;
using joinable::PeerFailed;
using joinable::ProgressThread;
using joinable::ReduceOp;
using joinable::detail::Board;
using joinable::detail::Collective;
using joinable::detail::Cut;
using joinable::detail::Descriptor;
using joinable::detail::Exchange;
using joinable::detail::Helper;

/// A communicator whose helper has a lock most of the time, as MPI's has.
class Locking {
public:
    class Helper {
    public:
        void run() {
            std::lock_guard const lock{mutex_};
            has_begun = true;
            while (!stops_) {
                std::this_thread::yield();
            }
        }
        void stop() {
            stops_ = true;
            std::lock_guard const lock{mutex_};
        }
        static inline std::atomic<bool> has_begun{false};

    private:
        std::mutex mutex_;
        std::atomic<bool> stops_{false};
    };
    [[nodiscard]] static Helper helper() { return {}; }
};

TEST_CASE(
    "a process that is forked beside a ProgressThread ends, though it does not have the thread"
) {
    Locking comm;
    ProgressThread progress{comm};
    wait_until(Locking::Helper::has_begun, true);
    CHECK(succeeds_in_fork([&] { std::destroy_at(&progress); }));
}

/// All ranks of a group in the hands of one thread, which decides which rank goes on. Posting never blocks.
class Puppets {
public:
    explicit Puppets(int size)
        : memory_{Board::bytes_for(size)},
          board_{Board::create(size, {memory_.data(), memory_.bytes()})} {
        for (int rank = 0; rank < size; ++rank) {
            ranks_.push_back(std::make_unique<Rank>(BoardGroup{board_}, rank));
        }
    }
    using Rank = joinable::detail::Endpoint<BoardGroup>;

    [[nodiscard]] int size() const { return board_.size(); }
    [[nodiscard]] Board& board() { return board_; }
    [[nodiscard]] Rank& rank(int rank) { return *ranks_[static_cast<std::size_t>(rank)]; }

    std::uint64_t post_sum(int rank, std::vector<std::int64_t>& values) {
        Buffer const buffer{values.data(), values.size(), DType::i64};
        return this->rank(rank).post({sum_of(values.size()), buffer, buffer});
    }
    /// Whether somebody has computed all of it, though nobody may know.
    [[nodiscard]] bool is_computed(std::uint64_t sequence, std::size_t count) {
        Descriptor const signature = sum_of(count);
        Cut const cut{Exchange{board_, sequence, signature}, sizeof(std::int64_t), size()};
        return chunks_are_done(board_, sequence, cut);
    }

private:
    static Descriptor sum_of(std::size_t count) {
        return {Collective::all_reduce, DType::i64, ReduceOp::sum, 0, count};
    }

    Arena memory_;
    Board& board_;
    std::vector<std::unique_ptr<Rank>> ranks_;
};

/// Per rank as many numbers, its own one each.
std::vector<std::vector<std::int64_t>> numbers(int ranks, std::size_t count) {
    std::vector<std::vector<std::int64_t>> values;
    for (int rank = 0; rank < ranks; ++rank) {
        values.emplace_back(count, rank + 1);
    }
    return values;
}
std::int64_t sum_of_numbers(int ranks) {
    return std::int64_t{ranks} * (ranks + 1) / 2;
}

TEST_CASE("a helper of any rank computes for all of them, and nobody waits or tests meanwhile") {
    for (int const world : {1, 2, 3, 4, 8}) {
        for (int helped = 0; helped < world; ++helped) {
            Watchdog const watchdog{world};
            Puppets puppets{world};
            Helper helper{puppets.board(), helped};
            std::thread thread{[&] { helper.run(); }};
            constexpr std::size_t count = 50'000;
            for (std::uint64_t round = 0; round < 3; ++round) {
                auto values = numbers(world, count);
                for (int rank = 0; rank < world; ++rank) {
                    CHECK(puppets.post_sum(rank, values[static_cast<std::size_t>(rank)]) == round);
                }
                wait_until([&] { return puppets.is_computed(round, count); });
                for (int rank = 0; rank < world; ++rank) {
                    CHECK(puppets.rank(rank).test(round)); // now it looks
                    CHECK(
                        values[static_cast<std::size_t>(rank)] ==
                        std::vector(count, sum_of_numbers(world))
                    );
                }
            }
            helper.stop();
            thread.join();
        }
    }
}

TEST_CASE("a rank that waits for one collective computes others in which all have arrived") {
    for (int const world : {2, 3, 4, 8}) {
        Watchdog const watchdog{world};
        Puppets puppets{world};
        constexpr std::size_t count = 50'000;
        auto large = numbers(world, count);
        auto late = numbers(world, 1);
        for (int rank = 0; rank < world; ++rank) {
            puppets.post_sum(rank, large[static_cast<std::size_t>(rank)]);
        }
        puppets.post_sum(0, late[0]);
        std::thread waits{[&] { puppets.rank(0).finish(1); }};
        wait_until([&] { return puppets.is_computed(0, count); });
        for (int rank = 1; rank < world; ++rank) { // only now the others come
            puppets.post_sum(rank, late[static_cast<std::size_t>(rank)]);
        }
        waits.join();
        for (int rank = 0; rank < world; ++rank) {
            CHECK(puppets.rank(rank).test(0));
            CHECK(puppets.rank(rank).test(1));
            CHECK(
                large[static_cast<std::size_t>(rank)] == std::vector(count, sum_of_numbers(world))
            );
            CHECK(late[static_cast<std::size_t>(rank)].front() == sum_of_numbers(world));
        }
    }
}

TEST_CASE("collectives that ranks leave to their threads use every slot again and again") {
    run_all_ranks({1, 2, 3, 4, 8}, [](auto& comm) {
        std::optional<ProgressThread> thread;
        if (comm.rank() % 3 != 2) { // each rank decides for itself
            thread.emplace(comm);
        }
        constexpr std::size_t in_flight = 40;
        std::vector<std::vector<std::int64_t>> values(in_flight);
        for (int round = 0; round < (under_sanitizer ? 4 : 10); ++round) { // of 64 slots
            std::vector<joinable::work_of<decltype(comm)>> works;
            for (std::size_t k = 0; k < in_flight; ++k) { // small and large ones
                values[k].assign(k % 4 == 0 ? 3 : 1000 * k, comm.rank() + round);
                works.push_back(
                    comm.all_reduce({values[k].data(), values[k].size(), DType::i64}, ReduceOp::sum)
                );
            }
            for (std::size_t k = 0; k < in_flight; ++k) {
                works[in_flight - 1 - k].wait();
            }
            std::int64_t const sum =
                comm.size() * round + std::int64_t{comm.size()} * (comm.size() - 1) / 2;
            for (std::vector<std::int64_t> const& value : values) {
                CHECK(std::count(value.begin(), value.end(), sum) == std::ssize(value));
            }
        }
    });
}

TEST_CASE("a failure amid collectives that threads compute is told as ever, and nothing is touched"
) {
    for (int const world : {2, 3, 4, 8}) {
        for (int attempt = 0; attempt < 10; ++attempt) {
            CHECK_THROWS_WITH_AS(
                run_ranks(
                    {world},
                    [&](joinable::ThreadCommunicator& comm) {
                        ProgressThread const thread{comm};
                        for (int round = 0;; ++round) { // memory that is freed when it throws
                            std::vector<std::int64_t> values(100'000, round);
                            auto work = comm.all_reduce(
                                {values.data(), values.size(), DType::i64}, ReduceOp::sum
                            );
                            if (comm.rank() == 1 && round == attempt) {
                                throw std::runtime_error{"a bad sample"};
                            }
                            try {
                                work.wait();
                            } catch (PeerFailed const& error) {
                                CHECK(error.rank() == 1);
                                throw;
                            }
                        }
                    }
                ),
                "a bad sample",
                std::runtime_error
            );
        }
    }
}

} // namespace
