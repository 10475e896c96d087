// SPDX-License-Identifier: BSL-1.0
#include <joinable/communicator/shared_buffer.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <support/process_ranks.hpp>

#include <joinable/communicator/collectives.hpp>
#include <joinable/communicator/detail/shared_mapping.hpp>
#include <joinable/communicator/self.hpp>

namespace {

using namespace joinable_tests;
using joinable::Mismatch;
using joinable::ProcessCommunicator;
using joinable::shared_buffer;
using joinable::SharedBuffer;

/// What one rank tells the others: no dtype, and not one word.
struct Finding {
    int rank;
    double loss;
    char name[8];
};

TEST_CASE("what one rank writes in a shared buffer all ranks see, and it is zero at first") {
    run_all_ranks({1, 2, 3, 4, 8}, [](auto& comm) {
        std::size_t const page = 4096 / sizeof(std::uint64_t);
        std::size_t const count = page * static_cast<std::size_t>(comm.size()) + 3;
        auto const buffer = shared_buffer<std::uint64_t>(comm, count);
        CHECK(buffer.size() == count);
        CHECK(std::count(buffer.begin(), buffer.end(), 0U) == static_cast<std::ptrdiff_t>(count));
        comm.barrier();
        auto const rank = static_cast<std::size_t>(comm.rank());
        for (std::size_t i = rank; i < count; i += static_cast<std::size_t>(comm.size())) {
            buffer[i] = 1000 * i + rank;
        }
        comm.barrier();
        bool are_right = true;
        for (std::size_t i = 0; i < count; ++i) {
            are_right =
                are_right && buffer[i] == 1000 * i + i % static_cast<std::size_t>(comm.size());
        }
        CHECK(are_right);
        comm.barrier();
    });
}

TEST_CASE("ranks count together in a shared buffer by atomic references") {
    run_all_ranks({1, 2, 3, 4, 8}, [](auto& comm) {
        auto const counters = shared_buffer<int>(comm, 2);
        for (int i = 0; i < 10'000; ++i) {
            std::atomic_ref{counters[1]}.fetch_add(1, std::memory_order_relaxed);
        }
        comm.barrier();
        CHECK(counters[0] == 0);
        CHECK(counters[1] == 10'000 * comm.size());
        comm.barrier();
    });
}

TEST_CASE("shared buffers of a communicator are apart, and may be of structures or of nothing") {
    run_all_ranks({1, 2, 4}, [](auto& comm) {
        auto const findings = shared_buffer<Finding>(comm, static_cast<std::size_t>(comm.size()));
        auto const nothing = shared_buffer<double>(comm, 0);
        auto const numbers = shared_buffer<double>(comm, 1);
        CHECK(nothing.begin() == nothing.end());
        auto const rank = static_cast<std::size_t>(comm.rank());
        findings[rank] = {comm.rank() + 1, 0.5 * comm.rank(), "rank"};
        comm.barrier();
        CHECK(numbers[0] == 0.0);
        for (int other = 0; other < comm.size(); ++other) {
            Finding const& finding = findings[static_cast<std::size_t>(other)];
            CHECK(finding.rank == other + 1);
            CHECK(finding.loss == 0.5 * other);
            CHECK(std::string{finding.name} == "rank");
        }
        comm.barrier();
    });
}

TEST_CASE("a shared buffer is a tensor for collectives") {
    run_all_ranks({1, 2, 3, 4, 8}, [](auto& comm) {
        auto const world = static_cast<std::size_t>(comm.size());
        auto const all = shared_buffer<float>(comm, 5000 * world);
        std::vector<float> const mine(5000, 1.0F + static_cast<float>(comm.rank()));
        joinable::gather(comm, mine, all, 0).wait(); // one rank writes
        comm.barrier();
        for (std::size_t rank = 0; rank < world; ++rank) {
            CHECK(all[5000 * rank + 4999] == 1.0F + static_cast<float>(rank));
        }
        comm.barrier();
        joinable::all_reduce(comm, all).wait(); // all write the same, at their own time
        comm.barrier();
        for (std::size_t rank = 0; rank < world; ++rank) {
            CHECK(all[5000 * rank] == static_cast<float>((rank + 1) * world));
        }
        comm.barrier();
    });
}

TEST_CASE("a single rank has shared buffers, too") {
    joinable::SelfCommunicator comm;
    SharedBuffer<float> buffer = shared_buffer<float>(comm, 3);
    buffer[2] = 4.0F;
    SharedBuffer<float> moved{std::move(buffer)};
    CHECK(buffer.size() == 0); // NOLINT(bugprone-use-after-move): that is the question
    buffer = std::move(moved);
    CHECK(buffer[2] == 4.0F);
    static_assert(!std::is_copy_constructible_v<SharedBuffer<float>>);
}

TEST_CASE("ranks that share buffers of different sizes are all told, and go on") {
    run_all_ranks({2, 3, 8}, [](auto& comm) {
        std::string text =
            "ranks share memory of different sizes: rank 0 of 32 bytes, rank 1 of 64; "
            "give the same count of the same elements on every rank";
        CHECK_THROWS_WITH_AS(
            (void)shared_buffer<double>(comm, comm.rank() == 1 ? 8 : 4), text.c_str(), Mismatch
        );
        auto const buffer = shared_buffer<int>(comm, 1);
        std::atomic_ref{buffer[0]}.fetch_add(1);
        comm.barrier();
        CHECK(buffer[0] == comm.size());
    });
}

TEST_CASE("ranks of a group that share buffers of different sizes have numbers of their own") {
    run_all_ranks({2, 3, 4, 8}, [](auto& comm) {
        for (bool const is_renumbered : {false, true}) {
            auto group = comm.split(is_renumbered && comm.rank() == 0 ? 0 : 1, 0);
            if (group.size() > 1) {
                try {
                    (void)shared_buffer<int>(group, group.rank() == 1 ? 2 : 1);
                    FAIL_CHECK("no exception");
                } catch (Mismatch const& error) {
                    CHECK(error.ranks() == std::vector{1});
                    CHECK(error.is_renumbered() == is_renumbered);
                }
            }
        }
    });
}

TEST_CASE("more memory than there is fails on all ranks") {
    constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
    constexpr std::size_t too_many = std::size_t{1} << 60U;
    run_ranks({1, 3}, [](joinable::ThreadCommunicator& comm) {
        // Not a byte less, for which a sanitizer's allocator would end the program.
        CHECK_THROWS_AS((void)shared_buffer<char>(comm, most), std::bad_alloc);
        comm.barrier();
    });
    run_process_ranks({1, 3}, [](ProcessCommunicator& comm) {
        CHECK_THROWS_AS((void)shared_buffer<char>(comm, too_many), joinable::CommunicationError);
        comm.barrier();
        CHECK_THROWS_AS((void)shared_buffer<double>(comm, most / 4), joinable::ContractViolation);
    });
    CHECK_THROWS_AS((void)shared_buffer<char>(too_many), joinable::CommunicationError);
    CHECK_THROWS_AS((void)shared_buffer<double>(most / 4), joinable::ContractViolation);
}

/// What a test puts between a rank and its communicator: rank 0's process number is another process
/// here, as in another container. In the worst case it is this process, which has a file of its own
/// open by that number.
class InAnotherContainer {
public:
    InAnotherContainer(ProcessCommunicator& comm, int own_file)
        : comm_{&comm}, own_file_{own_file} {}
    [[nodiscard]] int rank() const { return comm_->rank(); }
    [[nodiscard]] int size() const { return comm_->size(); }
    auto all_gather(joinable::ConstBuffer in, joinable::Buffer out) {
        return comm_->all_gather(in, out);
    }
    auto all_reduce(joinable::Buffer buffer, joinable::ReduceOp op) {
        return comm_->all_reduce(buffer, op);
    }
    auto broadcast(joinable::Buffer buffer, int root) {
        auto work = comm_->broadcast(buffer, root);
        if (rank() != root) {
            work.wait();
            std::int64_t* const words = static_cast<std::int64_t*>(buffer.data);
            words[1] = getpid();
            words[2] = own_file_;
        }
        return work;
    }

private:
    ProcessCommunicator* comm_;
    int own_file_;
};

TEST_CASE(
    "a rank that finds another file in place of rank 0's does not map it, and all ranks are told"
) {
    run_process_ranks({2, 3}, [](ProcessCommunicator& comm) {
        int const own = memfd_create("own", MFD_CLOEXEC); // no byte of it may change
        REQUIRE(ftruncate(own, 4096) == 0);
        InAnotherContainer between{comm, own};
        std::string text;
        try {
            joinable::Arena const memory = joinable::detail::share_mapping(between, 4096);
            memory.data()[0] = std::byte{1};
        } catch (joinable::CommunicationError const& error) {
            text = error.what();
        }
        CHECK(text.find("rank 0's process number is another process") != std::string::npos);
        char first = 0;
        CHECK(pread(own, &first, 1, 0) == 1);
        CHECK(first == 0);
        comm.barrier();
        auto const buffer = shared_buffer<int>(comm, 1); // they go on
        std::atomic_ref{buffer[0]}.fetch_add(1);
        comm.barrier();
        CHECK(buffer[0] == comm.size());
        close(own);
    });
}

TEST_CASE("a shared buffer beyond the limit of file sizes is an error on all ranks, not a signal") {
    run_process_ranks({1, 3}, [](ProcessCommunicator& comm) {
        rlimit const small{1U << 20U, 1U << 20U};
        setrlimit(RLIMIT_FSIZE, &small);
        CHECK_THROWS_AS(
            (void)shared_buffer<char>(comm, (1U << 20U) + 1), joinable::CommunicationError
        );
        CHECK(shared_buffer<char>(comm, 1U << 20U).size() == 1U << 20U);
    });
}

// ---- how long it lives --------------------------------------------------------------------------

std::ptrdiff_t files_open() {
    return std::distance(
        std::filesystem::directory_iterator{"/proc/self/fd"}, std::filesystem::directory_iterator{}
    );
}
int mappings() {
    std::ifstream maps{"/proc/self/maps"};
    int number = 0;
    for (std::string line; std::getline(maps, line);) {
        number += line.find("memfd:joinable") != std::string::npos ? 1 : 0;
    }
    return number;
}

TEST_CASE("a shared buffer is there until the last rank has given it up, and nothing is left of it"
) {
    run_process_ranks({2, 3, 8}, [](ProcessCommunicator& comm) {
        std::ptrdiff_t const files = files_open();
        std::optional<SharedBuffer<int>> buffer = shared_buffer<int>(comm, 2000);
        CHECK(files_open() == files + 1); // for handle()
        CHECK(mappings() == 1);
        (*buffer)[static_cast<std::size_t>(comm.rank())] = 7;
        comm.barrier();
        if (comm.rank() != 1) { // also the rank that made it
            buffer.reset();
            CHECK(mappings() == 0);
            CHECK(files_open() == files);
        }
        auto const another = shared_buffer<int>(comm, 2000);
        another[0] = 3; // not where the first one was
        comm.barrier();
        if (comm.rank() == 1) {
            CHECK(std::count(buffer->begin(), buffer->end(), 7) == comm.size());
        }
    });
    std::vector<SharedBuffer<int>> kept(3);
    run_ranks({3}, [&](joinable::ThreadCommunicator& comm) {
        auto buffer = shared_buffer<int>(comm, 3);
        buffer[static_cast<std::size_t>(comm.rank())] = comm.rank();
        kept[static_cast<std::size_t>(comm.rank())] = std::move(buffer);
    });
    kept[0] = {};
    kept[1] = {};
    CHECK(std::vector<int>(kept[2].begin(), kept[2].end()) == std::vector<int>{0, 1, 2});
}

TEST_CASE("a buffer from before the ranks were made has their results") {
    auto const nothing = shared_buffer<float>(0);
    CHECK(nothing.size() == 0);
    for (int const world : {1, 2, 3, 4, 8}) {
        auto const results = shared_buffer<Finding>(static_cast<std::size_t>(world));
        auto const sum = shared_buffer<std::int64_t>(1);
        run_all_ranks({world}, [&](auto& comm) {
            results[static_cast<std::size_t>(comm.rank())] = {comm.size(), 1.5 * comm.rank(), {}};
            std::atomic_ref{sum[0]}.fetch_add(comm.rank() + 1);
        });
        CHECK(sum[0] == 3 * world * (world + 1) / 2); // threads, then processes of two kinds
        for (int rank = 0; rank < world; ++rank) {
            CHECK(results[static_cast<std::size_t>(rank)].rank == world);
            CHECK(results[static_cast<std::size_t>(rank)].loss == 1.5 * rank);
        }
    }
}

} // namespace
