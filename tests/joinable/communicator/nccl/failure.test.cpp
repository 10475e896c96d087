// SPDX-License-Identifier: BSL-1.0
#include <joinable/nccl.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/forked.hpp>
#include <support/keep_alive.hpp>
#include <support/meeting.hpp>
#include <support/nccl_ranks.hpp>
#include <support/volume.hpp>
#include <support/wait_until.hpp>

#include <joinable/communicator/control.hpp>
#include <joinable/communicator/self.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/per_device.hpp>

namespace {

using namespace joinable_tests;
using doctest::Contains;
using joinable::NcclCommunicator;
using joinable::ReduceOp;
using joinable::detail::concat;

/// That of the one rank of a test that gives up, from when the others have arrived on.
constexpr std::chrono::milliseconds soon{300};

/// What `call` throws, which must be an `Expected`.
template <class Expected, class Call>
std::optional<Expected> thrown(Call const& call) {
    try {
        call();
        FAIL_CHECK("it threw nothing");
    } catch (Expected const& error) {
        return error;
    } catch (std::exception const& other) {
        FAIL_CHECK("it threw something else: ", std::string{other.what()});
    }
    return {};
}

/// A control communicator that can do what must be, and no more.
class Aborting {
public:
    explicit Aborting(joinable::ThreadCommunicator& comm) noexcept : comm_{comm} {}
    [[nodiscard]] int rank() const noexcept { return comm_.rank(); }
    [[nodiscard]] int size() const noexcept { return comm_.size(); }
    auto all_reduce(joinable::Buffer buffer, ReduceOp op) {
        return Work{comm_.all_reduce(buffer, op), after_sum};
    }
    auto broadcast(joinable::Buffer buffer, int root) { return comm_.broadcast(buffer, root); }
    void barrier() { comm_.barrier(); }
    void abort(joinable::AbortReason const& reason) { comm_.abort(reason); }
    [[nodiscard]] bool is_aborted() const {
        before_answer();
        return comm_.is_aborted();
    }

    std::function<void()> after_sum = [] {};
    std::function<void()> before_answer = [] {}; ///< of is_aborted()

protected:
    [[nodiscard]] std::optional<joinable::AbortReason> reason() const {
        return comm_.abort_reason();
    }

private:
    struct Work {
        joinable::ThreadWork inner;
        std::function<void()> const& after;
        void wait() {
            inner.wait();
            after();
        }
        [[nodiscard]] bool test() { return inner.test(); }
    };

    joinable::ThreadCommunicator& comm_;
};

/// It also tells why it was aborted.
struct Telling : Aborting {
    using Aborting::Aborting;
    [[nodiscard]] std::optional<joinable::AbortReason> abort_reason() const { return reason(); }
};

/// Its ranks are on several machines, so it shares no memory, as MPI's does not there.
struct OnSeveralMachines : Telling {
    using Telling::Telling;
    [[nodiscard]] joinable::Arena share(std::size_t) {
        barrier();
        throw joinable::ContractViolation{"expected all ranks on one machine"};
    }
};
static_assert(joinable::SharesMemory<OnSeveralMachines>);

TEST_CASE("a rank that never comes is named on all ranks, and nothing of NCCL is left") {
    for (int const world : {2, 4, 8}) {
        std::atomic<int> waiting{0};
        run_nccl_ranks({world}, [&](NcclCommunicator& comm, auto& hosts, cudaStream_t stream) {
            int const last = comm.size() - 1;
            DeviceArray<float> const data{{1.0F, 2.0F}, stream};
            DeviceArray<float> const copy{2};
            auto const check = [&](auto const& wait) {
                auto const error = thrown<joinable::TimedOut>(wait);
                REQUIRE(error);
                CHECK(error->missing() == std::vector{last});
                CHECK(std::string{error->what()}.starts_with(
                    concat("rank ", last, " did not arrive within 0.3 s")
                ));
            };
            if (comm.rank() == last) {
                check([&] { hosts.barrier(); }); // where it is instead: it is told there
            } else {
                auto work = comm.all_reduce(data.buffer(), ReduceOp::sum);
                work.wait();
                cuda(cudaMemcpyAsync(
                    copy.buffer().data, data.buffer().data, 8, cudaMemcpyDeviceToDevice, stream
                ));
                ++waiting;
                if (comm.rank() == 0) { // gives up, when the last one is the only one to miss
                    wait_until(waiting, last);
                    comm.set_deadline(soon);
                }
                check([&] { comm.synchronize(); });
                check([&] { work.wait(); }); // again, the same
                check([&] { static_cast<void>(work.test()); });
            }
            CHECK(comm.is_aborted());
            check([&] { static_cast<void>(comm.all_reduce(data.buffer(), ReduceOp::sum)); });
            check([&] { comm.barrier(); });
            check([&] { static_cast<void>(comm.group()); });
            CHECK(comm.native_handle() == nullptr);
            cuda(cudaStreamSynchronize(stream)); // not stuck any more
        });
    }
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("a loop of tests beside a rank that never comes ends at the deadline") {
    for (int const world : {2, 4}) {
        std::atomic<int> waiting{0};
        run_nccl_ranks({world}, [&](NcclCommunicator& comm, auto& hosts, cudaStream_t stream) {
            int const last = comm.size() - 1;
            DeviceArray<float> const data{{1.0F, 2.0F}, stream};
            auto const error = thrown<joinable::TimedOut>([&] {
                if (comm.rank() == last) {
                    hosts.barrier();
                }
                auto work = comm.all_reduce(data.buffer(), ReduceOp::sum);
                ++waiting;
                if (comm.rank() == 0) {
                    wait_until(waiting, last);
                    comm.set_deadline(soon);
                }
                wait_until([&] { return work.test(); });
            });
            REQUIRE(error);
            CHECK(error->missing() == std::vector{last});
            cuda(cudaStreamSynchronize(stream));
        });
    }
}

TEST_CASE("words of the host that go by a device end with the sum that its stream is behind") {
    for (int const world : {2, 4, 8}) {
        std::atomic<int> waiting{0};
        run_nccl_ranks({world}, [&](NcclCommunicator& comm, auto& hosts, cudaStream_t stream) {
            int const last = comm.size() - 1;
            DeviceArray<float> const data{{1.0F, 2.0F}, stream};
            auto const error = thrown<joinable::TimedOut>([&] {
                if (comm.rank() == last) {
                    hosts.barrier();
                }
                comm.all_reduce(data.buffer(), ReduceOp::sum).wait();
                ++waiting;
                if (comm.rank() == 0) { // gives up, when the last one is the only one to miss
                    wait_until(waiting, last);
                    comm.set_deadline(soon);
                }
                std::uint64_t word = 1;
                joinable::detail::HostCollectives words{comm};
                words.all_reduce({&word, 1, joinable::DType::u64}, ReduceOp::sum).wait();
            });
            REQUIRE(error);
            CHECK(error->missing() == std::vector{last});
            cuda(cudaStreamSynchronize(stream));
        });
    }
}

TEST_CASE("a rank that says something else than the others is no rank that is missing") {
    Meeting posted{2};
    run_nccl_ranks({2}, [&](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        DeviceArray<float> const data{{1.0F, 2.0F}, stream};
        auto work = comm.all_reduce(data.part(0, comm.rank() == 0 ? 1 : 2), ReduceOp::sum);
        posted.meet();
        if (comm.rank() == 0) { // gives up
            comm.set_deadline(soon);
        }
        auto const error = thrown<joinable::TimedOut>([&] { work.synchronize(); });
        REQUIRE(error);
        CHECK(error->missing().empty());
        CHECK(std::string{error->what()}.starts_with("all ranks arrived, but nothing came"));
    });
}

TEST_CASE("a rank that the network has lost is named as soon as the control communicator knows it"
) {
    run_ranks({2, 3, 4}, [](joinable::ThreadCommunicator& hosts) {
        cuda(cudaSetDevice(hosts.rank()));
        Telling control{hosts};
        NcclCommunicator comm{control};
        hosts.barrier();
        int asked = 0;
        if (hosts.rank() == 0) { // its network is the first to notice
            fake_nccl::fail_async(comm.native_handle(), ncclRemoteError, "closed by remote peer");
            control.before_answer = [&] {
                if (++asked == 5) {
                    hosts.abort({joinable::FailureKind::peer_failed, {1}, "rank 1 was killed"});
                }
            };
        }
        if (auto const error = thrown<joinable::PeerFailed>([&] { comm.barrier(); })) {
            CHECK(error->rank() == 1);
            CHECK(std::string{error->what()} == "rank 1 was killed");
        }
        CHECK((hosts.rank() != 0 || asked >= 5));
    });
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("ranks whose control communicator does not tell why it was aborted say that") {
    run_ranks({2, 3, 4}, [](joinable::ThreadCommunicator& hosts) {
        cuda(cudaSetDevice(hosts.rank()));
        Aborting control{hosts};
        NcclCommunicator comm{control};
        if (hosts.rank() == 0) {
            comm.abort({joinable::FailureKind::peer_failed, {0}, "rank 0 has had enough"});
            CHECK_THROWS_WITH_AS(comm.barrier(), "rank 0 has had enough", joinable::PeerFailed);
        } else {
            wait_until([&] { return hosts.is_aborted(); });
            CHECK_THROWS_WITH_AS(
                comm.barrier(),
                "another rank aborted, and the control communicator does not tell why: use one that "
                "models TellsReason",
                joinable::CommunicationError
            );
        }
        CHECK(comm.abort_reason().has_value());
    });
}

TEST_CASE("an asynchronous error ends all ranks with NCCL's text") {
    for (auto const result : {ncclSystemError, ncclInternalError, ncclRemoteError}) {
        auto const body = [&](NcclCommunicator& comm, Meeting& complete, cudaStream_t stream) {
            DeviceArray<float> const data{{1.0F}, stream};
            comm.all_reduce(data.buffer(), ReduceOp::sum).synchronize();
            complete.meet();
            if (comm.rank() == 0) {
                fake_nccl::fail_async(comm.native_handle(), result, "NET/Socket: lost peer 7");
            }
            auto const check = [&](auto const& call) {
                std::string text;
                if (result == ncclRemoteError) {
                    auto const error = thrown<joinable::PeerFailed>(call);
                    text = error ? error->what() : "";
                } else {
                    auto const error = thrown<joinable::CommunicationError>(call);
                    text = error ? error->what() : "";
                }
                CHECK(
                    text == concat(
                                "rank 0: an asynchronous error: ",
                                ncclGetErrorString(result),
                                ": NET/Socket: lost peer 7"
                            )
                );
            };
            check([&] {
                for (;;) { // until it is told
                    comm.all_reduce(data.buffer(), ReduceOp::sum).synchronize();
                }
            });
        };
        for (int const world : {1, 3}) {
            Meeting complete{world};
            run_nccl_ranks({world}, [&](auto& comm, auto&, cudaStream_t stream) {
                body(comm, complete, stream);
            });
        }
    }
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("a call that NCCL refuses ends all ranks with its name") {
    run_nccl_ranks({3}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        DeviceArray<float> const data{{1.0F}, stream};
        if (comm.rank() == 1) {
            fake_nccl::fail_next("ncclAllReduce", ncclUnhandledCudaError);
        }
        auto const error = thrown<joinable::CommunicationError>([&] {
            comm.all_reduce(data.buffer(), ReduceOp::sum).synchronize();
        });
        REQUIRE(error);
        CHECK(
            std::string{error->what()} ==
            "rank 1: all_reduce: unhandled cuda error (run with NCCL_DEBUG=INFO for details): "
            "ncclAllReduce was told to fail"
        );
    });
    run_nccl_ranks({2}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        DeviceArray<float> const data{{1.0F, 2.0F}, stream};
        DeviceArray<float> const out{2};
        if (comm.rank() == 1) {
            fake_nccl::fail_next("ncclSend", ncclInternalError); // within a group
        }
        auto const error = thrown<joinable::CommunicationError>([&] {
            comm.all_to_all(data.buffer(), out.buffer()).synchronize();
        });
        REQUIRE(error);
        CHECK(std::string{error->what()}.starts_with("rank 1: all_to_all: internal error"));
    });
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("an error of CUDA ends all ranks, whichever call has it") {
    for (std::size_t later = 0; later < 24; ++later) {
        CAPTURE(later);
        Meeting complete{2};
        run_nccl_ranks({2}, [&](NcclCommunicator& comm, auto&, cudaStream_t stream) {
            DeviceArray<float> const data{{1.0F}, stream};
            auto work = comm.all_reduce(data.buffer(), ReduceOp::sum);
            work.synchronize();
            complete.meet();
            if (comm.rank() == 0) {
                fake_cuda::fail_next(cudaErrorIllegalAddress, later);
            }
            auto const error = thrown<joinable::CommunicationError>([&] {
                for (;;) {
                    auto other = comm.all_reduce(data.buffer(), ReduceOp::sum); // a second event
                    comm.all_reduce(data.buffer(), ReduceOp::sum).wait();
                    comm.synchronize();
                }
            });
            REQUIRE(error);
            std::string const text = error->what();
            CHECK(text.starts_with("rank 0: cuda"));
            CHECK(text.find("an illegal memory access") != std::string::npos);
            CHECK_NOTHROW(work.wait()); // what was complete stays so
        });
    }
    fake_cuda::relaunch();
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("a rank that throws is PeerFailed on all others, with its text") {
    Meeting complete{4};
    auto const run = [&] {
        run_nccl_ranks({4}, [&](NcclCommunicator& comm, auto&, cudaStream_t stream) {
            DeviceArray<float> const data{{1.0F}, stream};
            comm.all_reduce(data.buffer(), ReduceOp::sum).synchronize();
            complete.meet(
            ); // or the exception could end this one on a rank that has not seen its end
            if (comm.rank() == 2) {
                throw std::runtime_error{"bad batch"};
            }
            auto const error = thrown<joinable::PeerFailed>([&] {
                comm.all_reduce(data.buffer(), ReduceOp::sum).synchronize();
            });
            REQUIRE(error);
            CHECK(error->rank() == 2);
            CHECK(
                std::string{error->what()} ==
                "rank 2 failed: an exception left the scope of its communicator"
            );
        });
    };
    CHECK_THROWS_WITH_AS(run(), "bad batch", std::runtime_error);
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("unwinding aborts and destroys nothing, whatever is under way") {
    for (std::string const open : {"work", "work in a group", "group"}) {
        std::string const what = open == "group" ? "a group of collectives" : "a collective";
        auto const run = [&] {
            run_nccl_ranks({2}, [&](NcclCommunicator& comm, auto&, cudaStream_t stream) {
                DeviceArray<float> const data{{1.0F}, stream};
                if (comm.rank() == 1) {
                    auto const error = thrown<joinable::PeerFailed>([&] { comm.barrier(); });
                    REQUIRE(error);
                    CHECK(error->rank() == 0);
                    CHECK(error->what() == "rank 0 failed: an exception left " + what);
                    return;
                }
                if (open == "group") {
                    auto const group = comm.group();
                    throw std::runtime_error{"mid-group"};
                }
                if (open == "work in a group") {
                    auto const group = comm.group();
                    auto const work = comm.all_reduce(data.buffer(), ReduceOp::sum);
                    throw std::runtime_error{"mid-group"};
                }
                auto const work = comm.all_reduce(data.buffer(), ReduceOp::sum);
                throw std::runtime_error{"mid-step"};
            });
        };
        CHECK_THROWS_AS(run(), std::runtime_error);
        CHECK(fake_nccl::live_communicators() == 0);
    }
}

TEST_CASE("an abort that fails is told, and the handle is not used again") {
    run_nccl_ranks({2}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        DeviceArray<float> const data{{1.0F}, stream};
        if (comm.rank() == 1) {
            fake_nccl::fail_next("ncclCommAbort", ncclSystemError);
            comm.abort({joinable::FailureKind::peer_failed, {1}, "enough"});
        }
        auto const error = thrown<joinable::PeerFailed>([&] {
            comm.all_reduce(data.buffer(), ReduceOp::sum).synchronize();
        });
        REQUIRE(error);
        CHECK(
            std::string{error->what()} == (comm.rank() == 0
                                               ? "enough"
                                               : "enough; besides, ncclCommAbort failed on rank 1: "
                                                 "unhandled system error (run with "
                                                 "NCCL_DEBUG=INFO for details)")
        );
        comm.abort({joinable::FailureKind::timed_out, {0}, "again"}); // the first reason wins
        CHECK_THROWS_AS(comm.barrier(), joinable::PeerFailed);
    });
    CHECK(fake_nccl::live_communicators() == 1);
    fake_nccl::forget_communicators();
}

TEST_CASE("an abort that does not return ends all ranks at the deadline, and goes on alone") {
    run_nccl_ranks({1, 2}, [](NcclCommunicator& comm, auto& hosts, cudaStream_t stream) {
        DeviceArray<float> const data{{1.0F}, stream};
        auto work = comm.all_reduce(data.buffer(), ReduceOp::sum);
        hosts.barrier(); // all have come so far
        fake_nccl::hold_aborts(true);
        comm.set_deadline(std::chrono::milliseconds{20});
        comm.abort({joinable::FailureKind::peer_failed, {0}, "enough"});
        CHECK_THROWS_WITH_AS(
            comm.barrier(), Contains("enough"), joinable::PeerFailed
        ); // that of the first reason
        if (comm.size() == 1) {
            CHECK_THROWS_WITH_AS(
                comm.barrier(),
                "enough; besides, ncclCommAbort failed on rank 0: NCCL operation in progress",
                joinable::PeerFailed
            );
        }
        CHECK(comm.native_handle() == nullptr);
        CHECK(fake_nccl::live_communicators() != 0);
        fake_nccl::hold_aborts(false);
    });
    fake_nccl::wait_for_aborts();
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("a work that was complete before an abort stays complete") {
    Meeting complete{2};
    run_nccl_ranks({2}, [&](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        DeviceArray<float> const data{{1.0F}, stream};
        auto work = comm.all_reduce(data.buffer(), ReduceOp::sum);
        wait_until([&] { return work.test(); });
        complete.meet();
        comm.abort({joinable::FailureKind::peer_failed, {0}, "later"});
        CHECK(work.test());
        CHECK_NOTHROW(work.wait());
        CHECK_NOTHROW(work.synchronize());
    });
}

TEST_CASE("misuse is refused before any data moves, and leaves the communicator usable") {
    run_nccl_ranks({2}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        DeviceArray<int> const data{{1, 2}, stream};
        auto const refused = [&](auto const& call, char const* text) {
            CHECK_THROWS_WITH_AS(call(), Contains(text), joinable::ContractViolation);
        };
        std::vector<int> host(2);
        auto const sum = [&](joinable::Buffer buffer) {
            return [&comm, buffer] { static_cast<void>(comm.all_reduce(buffer, ReduceOp::sum)); };
        };
        refused(
            sum({host.data(), 2, joinable::DType::i32}),
            "was given host memory for 2 i32; copy it to the device"
        );
        refused(sum({nullptr, 2, joinable::DType::i32}), "null pointer for 2 elements");
        CHECK_NOTHROW(comm.all_reduce({nullptr, 0, joinable::DType::i32}, ReduceOp::sum).wait());

        int const other = 1 - comm.device();
        cuda(cudaSetDevice(other));
        DeviceArray<int> const there{2};
        cuda(cudaSetDevice(comm.device()));
        refused(sum(there.buffer()), "was given memory of device");

        refused(
            [&] { static_cast<void>(comm.all_reduce(data.buffer(), ReduceOp::bit_or)); },
            "NCCL does not reduce with bit_or; use sum, product, min or max"
        );
        DeviceArray<float> const floats{{1.0F, 2.0F}, stream};
        refused(
            [&] { static_cast<void>(comm.all_reduce(floats.buffer(), ReduceOp::bit_and)); },
            "needs integers"
        );
        refused([&] { static_cast<void>(comm.broadcast(data.buffer(), 2)); }, "root 2 is no rank");
        refused([&] { static_cast<void>(comm.send(data.buffer(), -1)); }, "destination -1");
        refused(
            [&] { static_cast<void>(comm.all_gather(data.buffer(), data.buffer())); }, "2 times"
        );
        refused(
            [&] { static_cast<void>(comm.all_to_all(data.buffer(), data.buffer())); }, "overlap"
        );
        refused(
            [&] {
                std::vector<std::size_t> const counts{1, 2};
                static_cast<void>(comm.scatter(data.buffer(), data.part(0, 1), comm.rank(), counts)
                );
            },
            "add up"
        );
        refused([&] { static_cast<void>(comm.split(-1, 0)); }, "color of at least 0");
        {
            auto const group = comm.group();
            refused([&] { static_cast<void>(comm.split(0, 0)); }, "a group of this communicator");
        }
        {
            joinable::SelfCommunicator alone;
            NcclCommunicator other_comm{alone};
            auto const group = comm.group();
            refused(
                [&] { static_cast<void>(other_comm.broadcast(data.buffer(), 0)); },
                "a group of another NCCL communicator is open"
            );
        }
        {
            cudaGraph_t graph = nullptr;
            cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
            refused(sum(data.buffer()), "captures a CUDA graph");
            cuda(cudaStreamEndCapture(stream, &graph));
            cuda(cudaGraphDestroy(graph));
        }
        {
            cuda(cudaSetDevice(7));
            Stream const elsewhere; // of one that was destroyed, nobody can know
            cuda(cudaSetDevice(comm.device()));
            comm.set_stream(elsewhere);
            refused(sum(data.buffer()), "give set_stream() one of device");
            comm.set_stream(stream);
        }
        comm.all_reduce(data.buffer(), ReduceOp::sum).wait();
        CHECK(data.read(comm, stream) == std::vector{2, 4});
    });
}

TEST_CASE("check compares what ranks are about to do and throws Mismatch on all of them") {
    auto const all_differ = [](auto const& call, std::vector<int> const& ranks, char const* text) {
        run_nccl_ranks(
            {3},
            {.deadline = std::chrono::seconds{60}, .check = true},
            [&](NcclCommunicator& comm, auto&, cudaStream_t stream) {
                DeviceArray<float> const data{{1.0F, 2.0F, 3.0F}, stream};
                comm.all_reduce(data.buffer(), ReduceOp::sum).synchronize();
                auto const error = thrown<joinable::Mismatch>([&] { call(comm, data.buffer()); });
                REQUIRE(error);
                CHECK(error->ranks() == ranks);
                CHECK(std::string{error->what()} == text);
                CHECK(comm.is_aborted());
            }
        );
    };
    all_differ(
        [](NcclCommunicator& comm, joinable::Buffer data) {
            data.count -= comm.rank() == 1 ? 1U : 0U;
            static_cast<void>(comm.all_reduce(data, ReduceOp::sum));
        },
        {1},
        "ranks run different collectives: rank 0 all_reduce of 3 f32 with sum, rank 1 all_reduce "
        "of "
        "2 f32 with sum"
    );
    all_differ(
        [](NcclCommunicator& comm, joinable::Buffer data) {
            data.dtype = comm.rank() == 2 ? joinable::DType::i32 : data.dtype;
            static_cast<void>(comm.reduce(data, ReduceOp::max, comm.rank() == 1 ? 1 : 0));
        },
        {1, 2},
        "ranks run different collectives: rank 0 reduce of 3 f32 with max to rank 0, rank 1 reduce "
        "of "
        "3 f32 with max to rank 1, rank 2 reduce of 3 i32 with max to rank 0"
    );
    all_differ(
        [](NcclCommunicator& comm, joinable::Buffer data) {
            if (comm.rank() == 0) {
                static_cast<void>(comm.broadcast(data, 2));
            } else {
                static_cast<void>(comm.all_reduce(data, ReduceOp::min));
            }
        },
        {1, 2},
        "ranks run different collectives: rank 0 broadcast of 3 f32 from rank 2, rank 1 all_reduce "
        "of "
        "3 f32 with min, rank 2 all_reduce of 3 f32 with min"
    );
    all_differ(
        [](NcclCommunicator& comm, joinable::Buffer data) {
            // Rank 0 has 2 elements for rank 2, which expects 1 of each.
            std::vector<std::size_t> const sends{1, 0, comm.rank() == 0 ? 2U : 1U};
            std::vector<std::size_t> const expects(3, comm.rank() == 1 ? 0 : 1);
            std::size_t const sent = sends[0] + sends[2];
            std::size_t const expected = expects[0] * 3;
            DeviceArray<float> const out{3};
            static_cast<void>(comm.all_to_all(
                {data.data, sent, data.dtype}, out.part(0, expected), sends, expects
            ));
        },
        {0, 2},
        "counts differ in all_to_all by counts of f32: rank 0 has 2 elements for rank 2, which "
        "expects "
        "1"
    );
    auto const gather_by_counts = [](NcclCommunicator& comm, std::size_t count) {
        DeviceArray<float> const in{count};
        DeviceArray<float> const out{3};
        joinable::Buffer const whole = comm.rank() == 0 ? out.buffer() : joinable::Buffer{};
        std::vector<std::size_t> const counts(3, 1);
        static_cast<void>(comm.gather(in.buffer(), whole, 0, counts));
    };
    all_differ(
        [&](NcclCommunicator& comm, joinable::Buffer) {
            gather_by_counts(comm, comm.rank() == 2 ? 2 : 1);
        },
        {0, 2},
        "counts differ in gather by counts of f32 to rank 0: rank 2 has 2 elements for rank 0, "
        "which expects 1"
    );
    all_differ(
        [](NcclCommunicator& comm, joinable::Buffer) {
            // Rank 1 has 2 elements for itself, and expects 1.
            std::vector<std::size_t> sends(3, 1);
            sends[1] += comm.rank() == 1 ? 1U : 0U;
            std::vector<std::size_t> const expects(3, 1);
            DeviceArray<float> const in{comm.rank() == 1 ? 4U : 3U};
            DeviceArray<float> const out{3};
            static_cast<void>(comm.all_to_all(in.buffer(), out.buffer(), sends, expects));
        },
        {1},
        "counts differ in all_to_all by counts of f32: rank 1 has 2 elements for rank 1, which "
        "expects 1"
    );
}

TEST_CASE("check finds nothing where ranks agree") {
    run_nccl_ranks(
        {1, 2, 4},
        {.deadline = std::chrono::seconds{60}, .check = true},
        [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
            auto const ranks = static_cast<std::size_t>(comm.size());
            std::vector<std::size_t> counts;
            std::vector<int> joined;
            for (std::size_t rank = 0; rank < ranks; ++rank) {
                counts.push_back(rank);
                joined.insert(joined.end(), rank, static_cast<int>(rank));
            }
            auto const me = static_cast<std::size_t>(comm.rank());
            DeviceArray<int> const own{std::vector(me, comm.rank()), stream};
            DeviceArray<int> const all{joined.size()};
            comm.all_gather(own.buffer(), all.buffer(), counts).wait();
            CHECK(all.read(comm, stream) == joined);
            comm.reduce_scatter(all.buffer(), own.buffer(), ReduceOp::max, counts).wait();
            CHECK(own.read(comm, stream) == std::vector(me, comm.rank()));
            comm.gather(own.buffer(), all.buffer(), 0, counts).wait();
            comm.scatter(all.buffer(), own.buffer(), 0, counts).wait();
            CHECK(own.read(comm, stream) == std::vector(me, comm.rank()));
            comm.broadcast(own.part(0, 0), 0).wait();
            comm.barrier();
        }
    );
}

TEST_CASE("ranks that cannot begin say so together and leave the control communicator usable") {
    auto const check = [](auto const& break_it, char const* text) {
        run_ranks({1, 3}, [&](joinable::ThreadCommunicator& hosts) {
            cuda(cudaSetDevice(hosts.rank()));
            bool const is_broken = hosts.rank() == hosts.size() - 1;
            if (is_broken) {
                break_it();
            }
            if (is_broken) {
                CHECK_THROWS_WITH_AS(
                    NcclCommunicator{hosts}, Contains(text), joinable::CommunicationError
                );
            } else {
                auto const error = thrown<joinable::PeerFailed>([&] { NcclCommunicator{hosts}; });
                REQUIRE(error);
                CHECK(error->ranks() == std::vector{hosts.size() - 1});
                CHECK(std::string{error->what()}.find(text) != std::string::npos);
            }
            CHECK_FALSE(hosts.is_aborted());
            hosts.barrier();
        });
    };
    check([] { fake_cuda::fail_next(cudaErrorNoDevice); }, "cudaGetDevice failed");
    check(
        [] { fake_cuda::fail_next(cudaErrorMemoryAllocation, 2); },
        "cudaStreamCreate failed: out of memory"
    );
    check(
        [] { fake_nccl::fail_next("ncclGetVersion", ncclSystemError); },
        "ncclGetVersion failed: unhandled system error"
    );
    run_ranks({2}, [&](joinable::ThreadCommunicator& hosts) {
        cuda(cudaSetDevice(hosts.rank()));
        if (hosts.rank() == 0) {
            fake_nccl::fail_next("ncclGetUniqueId", ncclSystemError);
            CHECK_THROWS_WITH_AS(
                NcclCommunicator{hosts}, Contains("ncclGetUniqueId"), joinable::CommunicationError
            );
        } else {
            CHECK_THROWS_WITH_AS(
                NcclCommunicator{hosts}, Contains("ncclGetUniqueId"), joinable::PeerFailed
            );
        }
    });
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("a library that is older than the header is refused") {
    fake_nccl::set_version(21805);
    joinable::SelfCommunicator alone;
    CHECK_THROWS_WITH_AS(
        NcclCommunicator{alone},
        Contains("but the library that it runs with is NCCL 2.18.5"),
        joinable::CommunicationError
    );
    fake_nccl::set_version(NCCL_VERSION_CODE);
    CHECK_NOTHROW(NcclCommunicator{alone});
}

TEST_CASE("ranks that do not come to the constructor are TimedOut") {
    run_ranks({2}, [](joinable::ThreadCommunicator& hosts) {
        cuda(cudaSetDevice(hosts.rank()));
        if (hosts.rank() == 0) {
            auto const error = thrown<joinable::TimedOut>([&] {
                NcclCommunicator{hosts, {.deadline = std::chrono::milliseconds{200}}};
            });
            REQUIRE(error);
            CHECK(error->missing() == std::vector{1});
        } else {
            wait_until([&] { return hosts.is_aborted(); });
        }
    });
}

TEST_CASE("joining that NCCL refuses ends all ranks, and that never ends is TimedOut") {
    run_ranks({3}, [](joinable::ThreadCommunicator& hosts) {
        cuda(cudaSetDevice(hosts.rank()));
        if (hosts.rank() == 1) {
            fake_nccl::fail_next("ncclCommInitRankConfig", ncclInternalError);
        }
        CHECK_THROWS_WITH_AS(
            NcclCommunicator{hosts},
            Contains("rank 1: ncclCommInitRankConfig: internal error"),
            joinable::CommunicationError
        );
    });
    fake_nccl::set_polls_in_progress(1 << 30);
    joinable::SelfCommunicator alone;
    CHECK_THROWS_WITH_AS(
        (NcclCommunicator{alone, {.deadline = std::chrono::milliseconds{20}}}),
        Contains("no answer within 0.02 s, while rank 0 joins the communicator"),
        joinable::TimedOut
    );
    fake_nccl::set_polls_in_progress(1);
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("a group that NCCL refuses when it goes out of scope is told by what is in it") {
    run_nccl_ranks({1, 2, 3, 4, 8}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        DeviceArray<float> const data{{1.0F}, stream};
        int const last = comm.size() - 1;
        auto const post = [&] {
            auto const group = comm.group();
            auto work = comm.all_reduce(data.buffer(), ReduceOp::sum);
            if (comm.rank() == last) {
                fake_nccl::fail_next("ncclGroupEnd", ncclSystemError);
            }
            return work;
        };
        CHECK_THROWS_WITH_AS(
            post().synchronize(),
            Contains(concat("rank ", last, ": ncclGroupEnd: unhandled system error").c_str()),
            joinable::CommunicationError
        );
        CHECK(comm.is_aborted());
    });
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("what NCCL starts and does not finish ends all ranks with its text") {
    auto const ends_all = [](char const* function, auto const& call) {
        CAPTURE(function);
        run_nccl_ranks({2, 3}, [&](NcclCommunicator& comm, auto&, cudaStream_t stream) {
            DeviceArray<float> const data{{1.0F}, stream};
            if (comm.rank() == 1) {
                fake_nccl::fail_later(function, ncclSystemError);
            }
            auto const error =
                thrown<joinable::CommunicationError>([&] { call(comm, data.buffer()); });
            REQUIRE(error);
            std::string const text = error->what();
            CHECK(text.starts_with("rank 1: an asynchronous error"));
            CHECK(text.find(concat(function, " was told to fail later")) != std::string::npos);
            CHECK(comm.is_aborted());
        });
        CHECK(fake_nccl::live_communicators() == 0);
    };
    ends_all("ncclAllReduce", [](NcclCommunicator& comm, joinable::Buffer data) {
        comm.all_reduce(data, ReduceOp::sum).synchronize();
    });
    ends_all("ncclGroupEnd", [](NcclCommunicator& comm, joinable::Buffer data) {
        auto group = comm.group();
        auto work = comm.all_reduce(data, ReduceOp::sum);
        group.end();
        work.synchronize();
    });
    ends_all("ncclCommSplit", [](NcclCommunicator& comm, joinable::Buffer) {
        static_cast<void>(comm.split(0, 0));
    });
}

TEST_CASE("joining that fails later ends all ranks, and nothing of NCCL is left") {
    run_ranks({3}, [](joinable::ThreadCommunicator& hosts) {
        cuda(cudaSetDevice(hosts.rank()));
        if (hosts.rank() == 1) {
            fake_nccl::fail_later("ncclCommInitRankConfig", ncclSystemError);
        }
        CHECK_THROWS_WITH_AS(
            NcclCommunicator{hosts},
            Contains("rank 1: an asynchronous error while it joins the communicator"),
            joinable::CommunicationError
        );
    });
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("a communicator whose end fails is aborted on all ranks, not destroyed") {
    for (bool const is_late : {false, true}) {
        for (char const* const function : {"ncclCommFinalize", "the network"}) {
            Meeting complete{2};
            run_nccl_ranks({2}, [&](NcclCommunicator& comm, auto&, cudaStream_t stream) {
                DeviceArray<float> const data{{1.0F}, stream};
                comm.all_reduce(data.buffer(), ReduceOp::sum).synchronize();
                complete.meet();
                if (comm.rank() == 1 && std::string{function} == "the network") {
                    fake_nccl::fail_async(comm.native_handle(), ncclInternalError, "no proxy");
                } else if (comm.rank() == 1) {
                    (is_late ? fake_nccl::fail_later
                             : fake_nccl::fail_next)(function, ncclSystemError);
                }
            });
            CHECK(fake_nccl::live_communicators() == 0);
        }
    }
}

/// How the calling thread's communicators have ended.
struct Ends {
    std::size_t destroyed = fake_nccl::calls("ncclCommDestroy");
    std::size_t aborted = fake_nccl::calls("ncclCommAbort");
    bool operator==(Ends const&) const = default;
};

TEST_CASE("a communicator that has nothing to do is destroyed when NCCL has finished with it") {
    fake_nccl::set_polls_in_progress(20);
    run_ranks({1, 2, 4}, [](joinable::ThreadCommunicator& hosts) {
        cuda(cudaSetDevice(hosts.rank()));
        Ends expected;
        {
            NcclCommunicator comm{hosts};
        }
        ++expected.destroyed;
        CHECK((Ends{} == expected));
    });
    fake_nccl::set_polls_in_progress(1);
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("a communicator whose network fails after all ranks have finished is aborted") {
    run_ranks({1, 2, 4}, [](joinable::ThreadCommunicator& hosts) {
        cuda(cudaSetDevice(hosts.rank()));
        Aborting control{hosts};
        Ends expected;
        {
            NcclCommunicator comm{control};
            control.after_sum = [handle = comm.native_handle()] {
                fake_nccl::fail_async(handle, ncclRemoteError, "link down");
            };
        }
        ++expected.aborted;
        CHECK((Ends{} == expected));
    });
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("a message of a rank to itself needs its other side in the same group") {
    run_nccl_ranks({1, 2}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        DeviceArray<int> const from{{comm.rank() + 1}, stream};
        DeviceArray<int> const to{{0}, stream};
        auto group = comm.group();
        auto const sent = comm.send(from.buffer(), comm.rank());
        auto received = comm.receive(to.buffer(), comm.rank());
        group.end();
        received.wait();
        CHECK(to.read(comm, stream) == std::vector{comm.rank() + 1});
        for (bool const sends : {false, true}) {
            auto const call = [&] {
                auto const work = sends ? comm.send(from.buffer(), comm.rank())
                                        : comm.receive(to.buffer(), comm.rank());
            };
            CHECK_THROWS_WITH_AS(
                call(),
                Contains("needs its other side in the same group"),
                joinable::ContractViolation
            );
        }
        CHECK_FALSE(comm.is_aborted());
    });
}

TEST_CASE("a split that fails on one rank ends all of them, and nothing of NCCL is left") {
    run_nccl_ranks({2, 3}, [](NcclCommunicator& comm, auto&, cudaStream_t) {
        if (comm.rank() == 1) {
            fake_nccl::fail_next("ncclCommSplit", ncclInternalError);
        }
        CHECK_THROWS_WITH_AS(
            static_cast<void>(comm.split(0, 0)),
            Contains("rank 1: ncclCommSplit: internal error"),
            joinable::CommunicationError
        );
    });
    CHECK(fake_nccl::live_communicators() == 0);
}

TEST_CASE("a split that NCCL finishes after a late abort is aborted, too") {
    for (int const world : {1, 2, 3, 4, 8}) {
        run_ranks({world}, [&](joinable::ThreadCommunicator& hosts) {
            cuda(cudaSetDevice(hosts.rank()));
            auto comm = std::make_unique<NcclCommunicator>(hosts);
            hosts.barrier();
            fake_nccl::hold_aborts(true);
            comm->set_deadline(soon);
            if (hosts.rank() == world - 1) { // the others wait for it in NCCL
                (world == 1 ? fake_nccl::fail_later
                            : fake_nccl::fail_next)("ncclCommSplit", ncclInternalError);
            }
            CHECK_THROWS_AS(static_cast<void>(comm->split(0, 0)), joinable::Error);
            comm.reset();
            fake_nccl::hold_aborts(false); // NCCL writes the handle of the group now
        });
        wait_until([] { return fake_nccl::live_communicators() == 0; });
    }
}

TEST_CASE("a rank that ends before the others does not keep them from ending") {
    Meeting complete{2};
    auto const run = [&] {
        run_nccl_ranks({2}, [&](NcclCommunicator& comm, auto&, cudaStream_t stream) {
            DeviceArray<float> const data{{1.0F}, stream};
            comm.all_reduce(data.buffer(), ReduceOp::sum).synchronize();
            complete.meet();
            if (comm.rank() == 0) {
                comm.set_deadline(soon);
                auto const work = comm.all_reduce(data.buffer(), ReduceOp::sum);
                return; // without waiting, and rank 1 never comes to it
            }
        });
    };
    CHECK_NOTHROW(run());
    CHECK(fake_nccl::live_communicators() == 0);
}

static_assert(joinable::RenewsDeadline<NcclCommunicator>);
static_assert(joinable::RenewsDeadline<joinable::NcclCommunicatorRef>);

TEST_CASE("a rank that keeps itself alive is waited for by collectives and by barriers") {
    together({1, 2, 3, 4, 8}, [](int world) {
        run_nccl_ranks({world}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
            DeviceArray<int> const data{{1}, stream};
            comm.barrier();
            comm.set_deadline(long_deadline);
            for (bool const is_barrier : {false, true}) {
                if (comm.rank() == 1) {
                    stay_away_alive(comm);
                }
                if (is_barrier) {
                    comm.barrier();
                } else {
                    comm.all_reduce(data.buffer(), ReduceOp::sum).synchronize();
                }
            }
            if (comm.rank() == 1) { // once is not for ever
                comm.keep_alive();
                wait_until([&] { return comm.is_aborted(); });
                return;
            }
            if (comm.size() == 1) {
                comm.keep_alive();
                return;
            }
            auto const error = thrown<joinable::TimedOut>([&] {
                comm.all_reduce(data.buffer(), ReduceOp::sum).synchronize();
            });
            REQUIRE(error);
            CHECK(error->missing() == std::vector{1});
        });
    });
}

TEST_CASE("a rank that has come and whose stream is late can keep itself alive, too") {
    together({2, 4}, [](int world) {
        run_nccl_ranks({world}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
            DeviceArray<int> const data{{1}, stream};
            comm.barrier();
            comm.set_deadline(long_deadline);
            std::atomic<bool> is_late{comm.rank() == 1};
            fake_cuda::enqueue(stream, [&] { wait_until(is_late, false); });
            auto work = comm.all_reduce(data.buffer(), ReduceOp::sum);
            if (comm.rank() == 1) {
                stay_away_alive(comm);
                is_late = false;
            }
            work.synchronize();
            CHECK(data.read(comm, stream) == std::vector{comm.size()});
        });
    });
}

TEST_CASE("keep_alive says what it needs of the control communicator") {
    run_ranks({1, 2}, [](joinable::ThreadCommunicator& hosts) {
        cuda(cudaSetDevice(hosts.rank()));
        Aborting control{hosts};
        NcclCommunicator comm{control};
        CHECK_THROWS_WITH_AS(
            comm.keep_alive(),
            "keep_alive() reaches the ranks that wait through the control communicator, but that "
            "models neither RenewsDeadline nor SharesMemory: use one that does",
            joinable::ContractViolation
        );
        // What a trace or a checkpoint asks while it writes a large file.
        auto const renews = []<class Comm>(Comm& of_ranks) {
            return joinable::detail::ControlOver<Comm&>{of_ranks}.keep_alive();
        };
        CHECK_FALSE(renews(comm));
        joinable::StagedNcclCommunicator staged{comm};
        CHECK_FALSE(renews(staged));
        joinable::PerDevice devices{comm};
        CHECK_FALSE(renews(devices));
        NcclCommunicator other{hosts};
        CHECK(renews(other));
    });
}

TEST_CASE("ranks on several machines do without memory that a control communicator shares on one") {
    run_ranks({1, 2, 4}, [](joinable::ThreadCommunicator& hosts) {
        cuda(cudaSetDevice(hosts.rank()));
        Stream const stream;
        OnSeveralMachines control{hosts};
        NcclCommunicator comm{control, {.stream = static_cast<cudaStream_t>(stream)}};
        DeviceArray<int> const data{{1}, stream};
        comm.all_reduce(data.buffer(), ReduceOp::sum).wait();
        CHECK(comm.missing_ranks().empty());
        CHECK(data.read(comm, stream) == std::vector{comm.size()});
        CHECK_FALSE(comm.is_aborted());
    });
}

TEST_CASE("a process that a rank over NCCL has forked calls nothing of NCCL, and cannot go on as it"
) {
    if (joinable_tests::sanitizer == joinable_tests::Sanitizer::address) {
        return; // a thread of the fakes may hold a lock of the sanitizer's allocator, which the child then waits for
    }
    run_nccl_ranks({1}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        DeviceArray<float> const array{std::vector<float>{2}, stream};
        auto work = comm.all_reduce(array.buffer(), ReduceOp::sum);
        NcclCommunicator group = comm.split(0, 0);
        joinable::Arena arena = comm.allocate(64);
        CHECK(comm.register_arena(arena));
        joinable::Arena unregistered = comm.allocate(64);
        CHECK(cudaDeviceSynchronize() == cudaSuccess); // no thread of the fakes is at work
        CHECK(succeeds_in_fork([&] {
            auto const count = [] {
                std::size_t sum = 0;
                for (char const* const function :
                     {"ncclCommFinalize",
                      "ncclCommDestroy",
                      "ncclCommAbort",
                      "ncclCommWindowDeregister",
                      "ncclMemFree"}) {
                    sum += fake_nccl::calls(function);
                }
                return sum;
            };
            std::size_t const before = count();
            CHECK_THROWS_AS(work.wait(), joinable::ContractViolation);
            CHECK_THROWS_AS(
                (comm.all_reduce(array.buffer(), ReduceOp::sum).wait()), joinable::ContractViolation
            );
            CHECK_THROWS_AS(comm.keep_alive(), joinable::ContractViolation);
            std::destroy_at(&work);
            std::destroy_at(&arena);
            std::destroy_at(&unregistered);
            std::destroy_at(&group);
            comm.abort({});
            std::destroy_at(&comm);
            CHECK(count() == before);
        }));
        work.wait();
        CHECK(array.read(comm, stream) == std::vector<float>{2});
        comm.barrier();
    });
}

} // namespace
