// SPDX-License-Identifier: BSL-1.0
#include <joinable/nccl.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <support/fake_cuda/device_model.hpp>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_nccl/memory.hpp>
#include <support/keep_alive.hpp>
#include <support/meeting.hpp>
#include <support/nccl_ranks.hpp>
#include <support/wait_until.hpp>

#include <joinable/join.hpp>

namespace {

using namespace joinable_tests;
using doctest::Contains;
using joinable::Arena;
using joinable::NcclCommunicator;
using joinable::ReduceOp;

static_assert(joinable::RegistersArenas<NcclCommunicator>);
static_assert(joinable::RegistersArenas<joinable::NcclCommunicatorRef>);
static_assert(joinable::detail::symmetric_window == NCCL_WIN_COLL_SYMMETRIC);
static_assert(joinable::detail::window_alignment == NCCL_WIN_REQUIRED_ALIGNMENT);

void check_nothing_is_left() {
    fake_cuda::drain();
    CHECK(fake_nccl::live_memory() == 0);
    CHECK(fake_nccl::live_registrations() == 0);
    CHECK(fake_nccl::live_communicators() == 0);
    CHECK(fake_cuda::live_allocations() == 0);
}

/// How often this thread, which may be that of other tests, has registered a window since.
class Registrations {
public:
    [[nodiscard]] std::size_t since() const {
        return fake_nccl::calls("ncclCommWindowRegister") - before_;
    }

private:
    std::size_t before_ = fake_nccl::calls("ncclCommWindowRegister");
};

joinable::Buffer floats(Arena const& arena, std::size_t first, std::size_t count) {
    return {arena.data() + first * sizeof(float), count, joinable::DType::f32};
}
bool is_zero(Arena const& arena) {
    joinable_tests::fake_cuda::DeviceCode const code;
    return std::all_of(arena.data(), arena.data() + arena.bytes(), [](std::byte byte) {
        return byte == std::byte{0};
    });
}

TEST_CASE("an arena is zeroed device memory, aligned as asked for, and its collectives are right") {
    run_nccl_ranks({1, 2, 3, 4, 8}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        Registrations const registrations;
        for (std::size_t const alignment :
             {std::size_t{1}, std::size_t{64}, std::size_t{1} << 16U}) {
            Arena const arena = comm.allocate(4000, alignment);
            CHECK(arena.bytes() == 4000);
            CHECK(reinterpret_cast<std::uintptr_t>(arena.data()) % alignment == 0);
            CHECK(is_zero(arena));
            CHECK(comm.register_arena(arena));
            CHECK(comm.register_arena(arena)); // once more is nothing
            std::vector<float> const mine(3, static_cast<float>(comm.rank() + 1));
            std::vector<float> sums(3);
            cuda(
                cudaMemcpyAsync(arena.data() + 400, mine.data(), 12, cudaMemcpyHostToDevice, stream)
            );
            comm.all_reduce(floats(arena, 100, 3), ReduceOp::sum).wait();
            cuda(
                cudaMemcpyAsync(sums.data(), arena.data() + 400, 12, cudaMemcpyDeviceToHost, stream)
            );
            comm.synchronize();
            int const total = comm.size() * (comm.size() + 1) / 2;
            CHECK(sums == std::vector(3, static_cast<float>(total)));
        }
        CHECK(registrations.since() == 3);
        CHECK(comm.allocate(0).data() == nullptr);
        CHECK_THROWS_AS((void)comm.allocate(8, 3), joinable::ContractViolation);
    });
    CHECK(fake_nccl::registered_collectives() >= 12); // three alignments, sizes from 2 on
    check_nothing_is_left();
}

TEST_CASE("arenas of different sizes are a Mismatch on all ranks, which go on") {
    run_nccl_ranks({2, 4, 8}, [](NcclCommunicator& comm, auto&, cudaStream_t) {
        int const last = comm.size() - 1;
        Arena const arena = comm.allocate(comm.rank() == last ? 128 : 64);
        try {
            comm.register_arena(arena);
            FAIL_CHECK("no exception");
        } catch (joinable::Mismatch const& error) {
            CHECK(error.ranks() == std::vector{last});
            CHECK(std::string{error.what()}.starts_with(
                "ranks register arenas of different sizes: rank 0 of 64 bytes"
            ));
        }
        CHECK_FALSE(comm.is_aborted());
        CHECK(comm.register_arena(comm.allocate(64)));
        if (comm.size() > 2) {
            NcclCommunicator group = comm.split(comm.rank() == 0 ? 0 : 1, 0);
            Arena const other = group.allocate(group.rank() == 1 ? 128 : 64);
            if (comm.rank() != 0) {
                try {
                    group.register_arena(other);
                    FAIL_CHECK("no exception");
                } catch (joinable::Mismatch const& error) {
                    CHECK(error.ranks() == std::vector{1});
                    CHECK(error.is_renumbered()); // it is rank 2 of all
                }
            }
        }
    });
    check_nothing_is_left();
}

TEST_CASE("where a rank has no memory of NCCL all go on without registration") {
    run_nccl_ranks({1, 2, 3, 4, 8}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        Registrations const registrations;
        bool const is_last = comm.rank() == comm.size() - 1;
        if (is_last) {
            fake_nccl::fail_next("ncclMemAlloc", ncclInvalidUsage);
        }
        Arena const arena = comm.allocate(64);
        CHECK(is_zero(arena));
        CHECK_FALSE(comm.register_arena(arena));
        Arena const own = comm.device_memory().allocate(64, 64); // not by the communicator
        CHECK_FALSE(comm.register_arena(own));
        CHECK(registrations.since() == 0);
        comm.all_reduce(floats(arena, 0, 16), ReduceOp::sum).wait();
        cuda(cudaStreamSynchronize(stream));
    });
    check_nothing_is_left();
}

/// Of this rank, until this goes.
class WindowsHere {
public:
    explicit WindowsHere(fake_nccl::Windows made) { fake_nccl::set_windows(made); }
    WindowsHere(WindowsHere const&) = delete;
    WindowsHere& operator=(WindowsHere const&) = delete;
    ~WindowsHere() { fake_nccl::set_windows(fake_nccl::Windows::symmetric); }
};

TEST_CASE("where a rank or all have no windows, nobody keeps one") {
    using fake_nccl::Windows;
    for (bool const on_all : {false, true}) {
        run_nccl_ranks({1, 2, 3, 4, 8}, [&](NcclCommunicator& comm, auto&, cudaStream_t) {
            bool const has_none = on_all || comm.rank() == 0;
            WindowsHere const windows{has_none ? Windows::none : Windows::local};
            Arena const arena = comm.allocate(64);
            CHECK_FALSE(comm.register_arena(arena));
            comm.barrier();
            CHECK(fake_nccl::live_registrations() == 0);
            comm.all_reduce(floats(arena, 0, 16), ReduceOp::sum).synchronize();
        });
    }
    run_nccl_ranks({1, 2, 4}, [](NcclCommunicator& comm, auto&, cudaStream_t) {
        WindowsHere const windows{Windows::local};
        Arena const arena = comm.allocate(64);
        CHECK(comm.register_arena(arena));
        comm.all_reduce(floats(arena, 0, 16), ReduceOp::sum).synchronize();
    });
    check_nothing_is_left();
}

TEST_CASE("windows on some ranks only, for which NCCL would wait for ever, end at the deadline") {
    run_nccl_ranks({2, 4}, [](NcclCommunicator& comm, auto&, cudaStream_t) {
        bool const has_none = comm.rank() == 0;
        WindowsHere const windows{
            has_none ? fake_nccl::Windows::none : fake_nccl::Windows::symmetric
        };
        Arena const arena = comm.allocate(64);
        comm.barrier();
        comm.set_deadline(has_none ? std::chrono::seconds{60} : std::chrono::seconds{1});
        CHECK_THROWS_AS((void)comm.register_arena(arena), joinable::TimedOut);
        CHECK(comm.is_aborted());
    });
    check_nothing_is_left();
}

TEST_CASE("a registration that fails on one rank ends all of them with its text") {
    auto const ends_all = [](auto const& fail, std::string const& text) {
        for (int const world : {2, 3, 8}) {
            run_nccl_ranks({world}, [&](NcclCommunicator& comm, auto&, cudaStream_t) {
                if (comm.rank() == 1) {
                    fail();
                }
                Arena const arena = comm.allocate(64);
                CHECK_THROWS_WITH_AS(
                    (void)comm.register_arena(arena),
                    Contains(text.c_str()),
                    joinable::CommunicationError
                );
                CHECK(comm.is_aborted());
                CHECK_THROWS_AS((void)comm.register_arena(arena), joinable::CommunicationError);
            });
        }
    };
    for (auto const result : {ncclInvalidArgument, ncclSystemError, ncclUnhandledCudaError}) {
        // NCCL returns success, and it is the state that says that a window was refused.
        ends_all(
            [&] { fake_nccl::fail_later("ncclCommWindowRegister", result); },
            std::string{"rank 1: an asynchronous error while it registers an arena: "} +
                ncclGetErrorString(result)
        );
    }
    ends_all(
        [] { fake_nccl::fail_next("ncclCommWindowRegister", ncclSystemError); },
        "rank 1: the registration of an arena: unhandled system error"
    );
    check_nothing_is_left();
}

TEST_CASE(
    "a registration to which a rank does not come is TimedOut, and one that differs a Mismatch"
) {
    for (int const world : {2, 4}) {
        Meeting allocated{world - 1};
        run_nccl_ranks({world}, [&](NcclCommunicator& comm, auto&, cudaStream_t) {
            int const last = world - 1;
            if (comm.rank() == last) {
                wait_until([&] { return comm.is_aborted(); });
                return;
            }
            Arena const arena = comm.allocate(64);
            allocated.meet();
            if (comm.rank() == 0) { // gives up
                comm.set_deadline(long_deadline);
            }
            try {
                comm.register_arena(arena);
                FAIL_CHECK("no exception");
            } catch (joinable::TimedOut const& error) {
                CHECK(error.missing() == std::vector{last});
            }
        });
    }
    run_nccl_ranks({2, 4}, [](NcclCommunicator& comm, auto& hosts, cudaStream_t) {
        Arena const arena = comm.allocate(64);
        auto const call = [&] {
            comm.rank() == 0 ? hosts.barrier() : (void)comm.register_arena(arena);
        };
        CHECK_THROWS_AS(call(), joinable::Mismatch);
        CHECK(comm.is_aborted());
    });
    check_nothing_is_left();
}

TEST_CASE("an arena goes before its communicator, after it, or after an abort") {
    for (int const world : {1, 2, 4, 8}) {
        std::vector<Arena> left(static_cast<std::size_t>(world));
        run_nccl_ranks({world}, [&](NcclCommunicator& comm, auto&, cudaStream_t) {
            auto const rank = static_cast<std::size_t>(comm.rank());
            {
                Arena const arena = comm.allocate(64);
                CHECK(comm.register_arena(arena));
                auto work = comm.all_reduce(floats(arena, 0, 16), ReduceOp::sum);
                work.wait(); // has not run: the arena waits for it
            }
            left[rank] = comm.allocate(64);
            CHECK(comm.register_arena(left[rank]));
            comm.all_reduce(floats(left[rank], 0, 16), ReduceOp::sum).wait();
        });
        CHECK(fake_nccl::live_registrations() == 0);
        CHECK(fake_nccl::live_memory() == left.size());
        run_nccl_ranks({world}, [&](NcclCommunicator& comm, auto&, cudaStream_t) {
            Arena const arena = comm.allocate(64);
            CHECK(comm.register_arena(arena));
            comm.abort({joinable::FailureKind::peer_failed, {0}, "enough"});
            CHECK(comm.native_handle() == nullptr);
        });
        left.clear();
        check_nothing_is_left();
    }
}

TEST_CASE("an arena that goes during a late abort is freed after it") {
    for (bool const is_registered : {false, true}) {
        for (int const world : {1, 2, 3, 4, 8}) {
            Meeting gone{world};
            std::atomic<std::size_t> used{0};
            run_ranks({world}, [&](joinable::ThreadCommunicator& hosts) {
                cuda(cudaSetDevice(hosts.rank()));
                auto comm = std::make_unique<NcclCommunicator>(hosts);
                std::optional<Arena> arena{comm->allocate(64)};
                Registrations const registrations;
                if (is_registered) {
                    CHECK(comm->register_arena(*arena));
                }
                hosts.barrier();
                fake_nccl::hold_aborts(true);
                comm->set_deadline(std::chrono::milliseconds{300});
                if (is_registered) {
                    comm->abort({joinable::FailureKind::peer_failed, {0}, "enough"});
                } else {
                    if (hosts.rank() == world - 1) { // the others wait for it in NCCL
                        (world == 1
                             ? fake_nccl::fail_later
                             : fake_nccl::fail_next)("ncclCommWindowRegister", ncclSystemError);
                    }
                    CHECK_THROWS_AS((void)comm->register_arena(*arena), joinable::Error);
                }
                used += registrations.since();
                arena.reset();
                comm.reset();
                gone.meet();
                CHECK(fake_nccl::live_memory() == used);
                gone.meet();
                fake_nccl::hold_aborts(false); // NCCL writes the registration now
            });
            wait_until([] { return fake_cuda::live_allocations() == 0; }); // after NCCL's own count
            check_nothing_is_left();
        }
    }
}

TEST_CASE("an exception leaves the scope of an arena whose collective a peer never joins") {
    auto const run = [](int world) {
        run_nccl_ranks({world}, [](NcclCommunicator& comm, auto& hosts, cudaStream_t) {
            auto const begin = std::chrono::steady_clock::now();
            if (comm.rank() == 0) {
                Arena const arena = comm.allocate(64);
                CHECK(comm.register_arena(arena));
                comm.all_reduce(floats(arena, 0, 16), ReduceOp::sum).wait();
                throw std::runtime_error{"bad sample"};
            }
            Arena const arena = comm.allocate(64);
            CHECK(comm.register_arena(arena));
            CHECK_THROWS_AS(hosts.barrier(), joinable::PeerFailed);
            CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds{30});
        });
    };
    for (int const world : {2, 4}) {
        CHECK_THROWS_WITH_AS(run(world), "bad sample", std::runtime_error);
        check_nothing_is_left();
    }
}

TEST_CASE("an arena that goes while a peer never comes ends all at the deadline") {
    run_nccl_ranks({2, 3}, [](NcclCommunicator& comm, auto& hosts, cudaStream_t) {
        std::optional<Arena> arena{comm.allocate(64)};
        CHECK(comm.register_arena(*arena));
        if (comm.rank() != 0) {
            CHECK_THROWS_AS(hosts.barrier(), joinable::TimedOut);
            return;
        }
        comm.all_reduce(floats(*arena, 0, 16), ReduceOp::sum).wait();
        comm.set_deadline(std::chrono::milliseconds{300});
        arena.reset();
        CHECK(comm.is_aborted());
    });
    check_nothing_is_left();
}

TEST_CASE("a model's buckets are registered once, and shadow rounds use them") {
    for (bool const views : {false, true}) {
        for (int const world : {1, 2, 3, 4, 8}) {
            std::size_t const before = fake_nccl::registered_collectives();
            run_ranks({world}, [&](joinable::ThreadCommunicator& hosts) {
                Registrations const registrations;
                DeviceModel model{hosts.rank(), joinable::DType::f32};
                NcclCommunicator comm{
                    hosts, {.stream = model.stream(), .deadline = std::chrono::seconds{60}}
                };
                joinable::DistributedDataParallel ddp{
                    comm,
                    model.params,
                    {.bucket_cap_bytes = 64,
                     .first_bucket_bytes = 16,
                     .gradient_as_bucket_view = views,
                     .joined_gradients = joinable::JoinedGradients::kept}
                };
                CHECK(registrations.since() == 1);
                std::size_t const allocated = fake_nccl::calls("ncclMemAlloc");
                {
                    joinable::Join guard{joinable::participants(ddp), joinable::control(hosts)};
                    for (int batch = 0; batch <= hosts.rank(); ++batch) {
                        ddp.forward([] {});
                        ddp.backward([&](auto ready) { model.backward(batch, ready); });
                    }
                    CHECK(guard.finish().rounds == static_cast<std::size_t>(world));
                }
                CHECK(model.gradients() == model.averages(world - 1, {world - 1}, world));
                CHECK(registrations.since() == 1);
                // The end sends parameters through memory of its own.
                CHECK(fake_nccl::calls("ncclMemAlloc") <= allocated + 2);
            });
            // In each round at least one bucket: on all ranks in its window, or the fake had ended us.
            CHECK(fake_nccl::registered_collectives() >= before + static_cast<std::size_t>(world));
            check_nothing_is_left();
        }
    }
}

TEST_CASE("models that differ are told as before anything is registered") {
    run_ranks({2, 4}, [](joinable::ThreadCommunicator& hosts) {
        Registrations const registrations;
        DeviceModel model{hosts.rank(), joinable::DType::f32};
        NcclCommunicator comm{
            hosts, {.stream = model.stream(), .deadline = std::chrono::seconds{60}}
        };
        if (hosts.rank() == 1) {
            model.params.pop_back();
        }
        auto const make = [&] { joinable::DistributedDataParallel{comm, model.params}; };
        CHECK_THROWS_WITH_AS(make(), Contains("models differ: "), joinable::Mismatch);
        CHECK(registrations.since() == 0);
        CHECK_FALSE(comm.is_aborted());
    });
    check_nothing_is_left();
}

// What a header of NCCL has that came before windows, or before all registration.
namespace older {
struct Comm {
    int registered = 0;
};
ncclResult_t ncclCommRegister(Comm* comm, void* data, std::size_t bytes, void** made) {
    comm->registered += static_cast<int>(bytes);
    *made = data;
    return ncclSuccess;
}
ncclResult_t ncclCommDeregister(Comm* comm, void* made) {
    comm->registered = made == nullptr ? -1 : 0;
    return ncclSuccess;
}
} // namespace older
namespace oldest {
struct Comm {};
} // namespace oldest

TEST_CASE("headers without windows register as they can, and those without registration not") {
    static_assert(!joinable::detail::nccl_has_windows<older::Comm*>);
    static_assert(joinable::detail::nccl_has_windows<ncclComm_t>);
    older::Comm comm;
    int memory = 0;
    void* made = nullptr;
    CHECK(joinable::detail::nccl_register(&comm, &memory, 4, &made) == ncclSuccess);
    CHECK(made == &memory);
    CHECK(comm.registered == 4);
    joinable::detail::nccl_deregister(&comm, made);
    CHECK(comm.registered == 0);
    oldest::Comm none;
    CHECK(joinable::detail::nccl_register(&none, &memory, 4, &made) == ncclInvalidUsage);
}

} // namespace
