// SPDX-License-Identifier: BSL-1.0
#pragma once

// What NCCL ranks have besides sums: groups, messages, an engine's handle, other ways for roll calls, refusals.

#include <cstdio>
#include <memory>
#include <optional>
#include <utility>

#include <gpu/common.hpp>
#include <nccl.h>

#include <joinable/tcp.hpp>

namespace joinable_gpu {

/// That f() throws Error with a text that has `part`.
template <class Error, class F>
void expect_refused(std::string const& part, F const& f) {
    try {
        f();
    } catch (Error const& error) {
        std::string const text = error.what();
        expect(text.find(part) != std::string::npos, "'" + text + "' does not say '" + part + "'");
        return;
    }
    expect(false, "nothing was refused with '" + part + "'");
}

/// That the sum of `own` over the ranks of `comm` is `sum`.
template <class Comm>
void expect_sum(Comm& comm, cudaStream_t stream, float own, float sum) {
    DeviceArray<float> const array{std::vector<float>(100, own), stream};
    comm.all_reduce(array.buffer(), joinable::ReduceOp::sum).wait();
    for (float const value : array.read(comm, stream)) {
        expect(value == sum, "a sum is " + std::to_string(value) + ", not " + std::to_string(sum));
    }
}
/// The sum of 1 to n.
[[nodiscard]] inline float sum_to(int n) {
    return static_cast<float>(n * (n + 1) / 2);
}

/// Ranks of even numbers, and of odd ones.
template <class Hosts>
void check_split(Rank<Hosts>& rank) {
    int const parity = rank.hosts.rank() % 2;
    joinable::NcclCommunicator group = rank.comm.split(parity, rank.hosts.rank());
    int const size = (rank.hosts.size() + 1 - parity) / 2;
    expect(
        group.size() == size && group.rank() == rank.hosts.rank() / 2, "split: ranks of a group"
    );
    expect_sum(group, rank.stream, static_cast<float>(group.rank() + 1), sum_to(size));
}

/// Around a ring in one group, and from rank 0 to the last.
template <class Hosts>
void check_messages(Rank<Hosts>& rank) {
    int const n = rank.hosts.size();
    int const before = (rank.hosts.rank() + n - 1) % n;
    DeviceArray<int> const mine{{rank.hosts.rank(), -rank.hosts.rank()}, rank.stream};
    DeviceArray<int> const other{2};
    {
        auto group = rank.comm.group();
        auto sent = rank.comm.send(mine.buffer(), (rank.hosts.rank() + 1) % n);
        auto received = rank.comm.receive(other.buffer(), before);
        group.end();
        sent.wait();
        received.wait();
    }
    expect(
        other.read(rank.comm, rank.stream) == std::vector{before, -before},
        "a message around a ring"
    );
    if (n > 1 && rank.hosts.rank() == 0) {
        rank.comm.send(mine.buffer(), n - 1).wait();
    } else if (n > 1 && rank.hosts.rank() == n - 1) {
        rank.comm.receive(other.buffer(), 0).wait();
        expect(other.read(rank.comm, rank.stream) == std::vector{0, 0}, "a message from rank 0");
    }
}

/// Mistakes that are refused before anything reaches NCCL, and leave the communicator as it was.
template <class Hosts>
void check_bad_input(Rank<Hosts>& rank) {
    using joinable::ContractViolation;
    using joinable::DType;
    using joinable::ReduceOp;
    DeviceArray<float> const array{std::vector<float>(8), rank.stream};
    std::vector<float> host(8);
    expect_refused<ContractViolation>("host memory", [&] {
        rank.comm.all_reduce({host.data(), host.size(), DType::f32}, ReduceOp::sum).wait();
    });
    expect_refused<ContractViolation>("null", [&] {
        rank.comm.all_reduce({nullptr, 8, DType::f32}, ReduceOp::sum).wait();
    });
    expect_refused<ContractViolation>("bit_and", [&] {
        rank.comm.all_reduce({array.buffer().data, 8, DType::i32}, ReduceOp::bit_and).wait();
    });
    expect_refused<ContractViolation>("root", [&] {
        rank.comm.broadcast(array.buffer(), rank.hosts.size()).wait();
    });
    expect_refused<ContractViolation>("color", [&] { static_cast<void>(rank.comm.split(-1, 0)); });
    expect_sum(
        rank.comm, rank.stream, static_cast<float>(rank.hosts.rank() + 1), sum_to(rank.hosts.size())
    );
}

/// An engine's own communicator, as ncclCommInitRankConfig makes it.
class EnginesHandle {
public:
    template <class Hosts>
    EnginesHandle(Hosts& hosts, bool is_blocking) {
        ncclUniqueId id{};
        if (hosts.rank() == 0) {
            expect(ncclGetUniqueId(&id) == ncclSuccess, "ncclGetUniqueId");
        }
        hosts.broadcast({&id, sizeof id, joinable::DType::u8}, 0).wait();
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = is_blocking ? 1 : 0;
        ncclResult_t state = ncclCommInitRankConfig(&comm, hosts.size(), id, hosts.rank(), &config);
        while (state == ncclInProgress) {
            expect(ncclCommGetAsyncError(comm, &state) == ncclSuccess, "ncclCommGetAsyncError");
        }
        expect(state == ncclSuccess, "an engine's communicator");
    }
    EnginesHandle(EnginesHandle const&) = delete;
    EnginesHandle& operator=(EnginesHandle const&) = delete;
    ~EnginesHandle() {
        if (comm != nullptr) {
            ncclCommDestroy(comm);
        }
    }

    ncclComm_t comm = nullptr;
};

/// An engine lends its communicator, has it back, and uses it; a blocking one is refused on all ranks.
template <class Hosts>
void check_lent(Hosts& hosts) {
    take_device(hosts);
    Stream const stream;
    float const own = static_cast<float>(hosts.rank() + 1);
    {
        EnginesHandle engine{hosts, false};
        joinable::NcclCommunicatorRef lent{hosts, engine.comm, stream};
        expect_sum(lent, stream, own, sum_to(hosts.size()));
        engine.comm = lent.give_back();
        int ranks = 0;
        expect(
            engine.comm != nullptr && ncclCommCount(engine.comm, &ranks) == ncclSuccess &&
                ranks == hosts.size(),
            "a handle that was given back"
        );
    }
    EnginesHandle const blocking{hosts, true};
    expect_refused<joinable::ContractViolation>("blocking", [&] {
        joinable::NcclCommunicatorRef const lent{hosts, blocking.comm, stream};
    });
}

/// A guard over ranks with 1, 2, ... inputs that sum 1 each; roll calls go by `control`.
template <class Control>
void expect_rounds(joinable::NcclCommunicator& comm, Control& control, cudaStream_t stream) {
    float total = 0;
    auto const add = [&](float own) {
        DeviceArray<float> const array{std::vector<float>(1, own), stream};
        comm.all_reduce(array.buffer(), joinable::ReduceOp::sum).wait();
        total += array.read(comm, stream)[0];
    };
    joinable::Action count{comm, [&] { add(1); }, [&] { add(0); }};
    joinable::Join guard{joinable::participants(count), joinable::control(control)};
    for (int input = 0; input <= comm.rank(); ++input) {
        count();
    }
    auto const result = guard.finish();
    expect(result.rounds == static_cast<std::size_t>(comm.size()), "a guard's number of rounds");
    expect(total == sum_to(comm.size()), "a guard's sum over all inputs");
}

/// Roll calls that go through NCCL itself.
template <class Hosts>
void check_staged(Rank<Hosts>& rank) {
    joinable::StagedNcclCommunicator staged{rank.comm};
    expect_rounds(rank.comm, staged, rank.stream);
}

/// Ranks that meet by TCP, as on several machines: NCCL's control communicator and the guard's.
template <class Hosts>
void check_tcp_control(Hosts& hosts) {
    take_device(hosts);
    std::optional<joinable::TcpListener> listener;
    std::uint64_t port = 0;
    if (hosts.rank() == 0) {
        port = listener.emplace("127.0.0.1").port();
    }
    hosts.broadcast({&port, 1, joinable::DType::u64}, 0).wait();
    joinable::TcpOptions options;
    options.rank = hosts.rank();
    options.size = hosts.size();
    options.job = "a check on GPUs";
    options.address = "127.0.0.1";
    options.port = static_cast<std::uint16_t>(port);
    options.secret = std::to_string(port);
    auto control = listener ? joinable::TcpCommunicator::attach(std::move(*listener), options)
                            : joinable::TcpCommunicator::attach(options);
    Stream const stream;
    joinable::NcclCommunicator comm{
        control, {.stream = stream, .deadline = std::chrono::seconds{30}}
    };
    expect_rounds(comm, control, stream);
}

/// `check` compares what ranks are about to do: all throw before NCCL sees it.
template <class Hosts>
void check_mismatch(Hosts& hosts) {
    take_device(hosts);
    Stream const stream;
    joinable::NcclCommunicator comm{
        hosts, {.stream = stream, .deadline = std::chrono::seconds{30}, .check = true}
    };
    DeviceArray<float> const array{std::vector<float>(8), stream};
    std::size_t const count = hosts.rank() == hosts.size() - 1 ? 7 : 8;
    expect_refused<joinable::Mismatch>("rank " + std::to_string(hosts.size() - 1), [&] {
        comm.all_reduce(array.part(0, count), joinable::ReduceOp::sum).wait();
    });
}

} // namespace joinable_gpu
