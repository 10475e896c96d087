// SPDX-License-Identifier: BSL-1.0
// Ranks that die, or have no room, while a checkpoint is written: process ranks, whose limits are their own.
#include <joinable/checkpoint/checkpoint.hpp>

#include <csignal>
#include <string>
#include <vector>

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include <support/folder.hpp>
#include <support/numbers.hpp>
#include <support/process_ranks.hpp>
#include <support/strided_param.hpp>
#include <support/volume.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/data_parallel.hpp>

namespace {

off_t last_written = -1; // this process dies when it writes beyond this byte of a file

} // namespace

/// Instead of the system's.
extern "C" ssize_t pwrite(int file, void const* from, std::size_t bytes, off_t at) {
    if (last_written >= 0 && at + static_cast<off_t>(bytes) > last_written) {
        std::raise(SIGKILL);
    }
    return static_cast<ssize_t>(::syscall(SYS_pwrite64, file, from, bytes, at));
}

namespace {

using namespace joinable_tests;
using joinable::Adam;
using joinable::Checkpoint;
using joinable::CommunicationError;
using joinable::DistributedDataParallel;
using joinable::DType;
using joinable::Join;
using joinable::participants;
using joinable::PeerFailed;
using joinable::ProcessCommunicator;
using joinable::Shape;
using joinable::ZeroRedundancyOptimizer;

/// One for each rank that owns something, 8 KB each.
std::vector<StridedParam> make() {
    std::vector<StridedParam> params;
    for (int i = 0; i < 8; ++i) {
        Shape const extents{2'000};
        params.push_back({{{DType::f32, extents, Shape{1}}, {DType::f32, extents, Shape{1}}, {}}});
    }
    return params;
}

/// From now on this process can write no more than `bytes` bytes into any file: the system would send SIGXFSZ, which
/// kills it.
void limit_files(::rlim_t bytes) {
    std::signal(SIGXFSZ, SIG_DFL);
    ::rlimit const none{0, 0};
    ::setrlimit(RLIMIT_CORE, &none);
    ::rlimit limit{};
    ::getrlimit(RLIMIT_FSIZE, &limit);
    limit.rlim_cur = bytes;
    ::setrlimit(RLIMIT_FSIZE, &limit);
}

/// Writes once; then `before_second(rank)` happens, and a second write begins. With `in_guard` by a participant,
/// when all ranks but 0 have run out of inputs.
template <class F>
void write_twice(
    ProcessCommunicator& comm, std::string const& name, bool in_guard, F const& before_second
) {
    auto params = make();
    ZeroRedundancyOptimizer zero{comm, params, Adam{}};
    Checkpoint save{zero, name};
    if (!in_guard) {
        save.write();
        comm.barrier();
        before_second();
        save.write();
        return;
    }
    DistributedDataParallel ddp{comm, params};
    Join guard{participants(ddp, zero, save)};
    for (int round = 0; round < (comm.rank() == 0 ? 2 : 1); ++round) {
        ddp.forward([] {});
        ddp.backward([&](auto ready) {
            for (std::size_t i = params.size(); i-- > 0;) {
                params[i].need_grad();
                ready(i);
            }
        });
        zero.step();
        save.step();
        if (round == 0) {
            before_second();
        }
    }
    guard.finish();
}

TEST_CASE("a rank that is killed while it writes is named by all others, and the old file stays") {
    for (bool const in_guard : {false, true}) {
        for (int const world : groups_of_participants({2, 3, 4, 8})) {
            for (int culprit = 0; culprit < world; culprit += world / 2) {
                CAPTURE(in_guard);
                CAPTURE(world);
                CAPTURE(culprit);
                Folder const folder;
                std::string const name = folder.file("model");
                std::string const expected = "rank " + std::to_string(culprit) +
                                             " failed: its process was killed by signal " +
                                             std::to_string(SIGKILL);
                auto const body = [&](ProcessCommunicator& comm) {
                    std::string before;
                    try {
                        write_twice(comm, name, in_guard, [&] {
                            before = contents_of(name);
                            if (comm.rank() == culprit) {
                                last_written = 1024;
                            }
                        });
                    } catch (PeerFailed const& error) {
                        CHECK(error.what() == expected);
                        CHECK(contents_of(name) == before);
                        throw;
                    }
                };
                CHECK_THROWS_WITH_AS(
                    run_process_ranks({world}, body), expected.c_str(), PeerFailed
                );
                CHECK(contents_of(name).size() > 8 * 3 * 8'000);
                // rank 0 removes what it made, where it lives
                CHECK(folder.names().size() == (culprit == 0 ? 2 : 1));
                run_process_ranks(
                    {2},
                    [&](ProcessCommunicator& comm) { // and the next training writes
                        auto params = make();
                        ZeroRedundancyOptimizer zero{comm, params, Adam{}};
                        Checkpoint save{zero, name};
                        save.read();
                        save.write();
                    }
                );
                CHECK(folder.names() == std::vector<std::string>{"model"});
            }
        }
    }
}

TEST_CASE("a rank without room for what it owns fails all, and nothing of its file is left") {
    for (bool const in_guard : {false, true}) {
        for (int const world : groups_of_participants({1, 2, 3, 4, 8})) {
            for (int culprit = 0; culprit < world; culprit += 1 + world / 2) {
                CAPTURE(in_guard);
                CAPTURE(world);
                CAPTURE(culprit);
                Folder const folder;
                std::string const name = folder.file("model");
                run_process_ranks({world}, [&](ProcessCommunicator& comm) {
                    std::string before;
                    std::string failure;
                    try {
                        write_twice(comm, name, in_guard, [&] {
                            before = contents_of(name);
                            if (comm.rank() == culprit) {
                                limit_files(1024);
                            }
                        });
                    } catch (CommunicationError const& error) {
                        failure = error.what();
                    }
                    CHECK(failure.find(name + ".part: File too large") != std::string::npos);
                    CHECK(contents_of(name) == before);
                });
                CHECK(folder.names() == std::vector<std::string>{"model"});
            }
        }
    }
}

} // namespace
