// SPDX-License-Identifier: BSL-1.0
#pragma once

// What NCCL ranks have besides sums: groups, messages, an engine's handle, windows, other ways for roll calls,
// refusals, and their ends.

#include <algorithm>
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
    joinable::NcclCommunicator comm{control, {.stream = stream, .deadline = longest_wait}};
    expect_rounds(comm, control, stream);
}

/// `check` compares what ranks are about to do: all throw before NCCL sees it.
template <class Hosts>
void check_mismatch(Hosts& hosts) {
    take_device(hosts);
    Stream const stream;
    joinable::NcclCommunicator comm{
        hosts, {.stream = stream, .deadline = longest_wait, .check = true}
    };
    DeviceArray<float> const array{std::vector<float>(8), stream};
    std::size_t const count = hosts.rank() == hosts.size() - 1 ? 7 : 8;
    expect_refused<joinable::Mismatch>("rank " + std::to_string(hosts.size() - 1), [&] {
        comm.all_reduce(array.part(0, count), joinable::ReduceOp::sum).wait();
    });
}

/// That a communicator's memory of its own is a symmetric window, where that is so: returned. All ranks
/// find the same, and sums in it are right in any case.
template <class Hosts>
bool check_window(Rank<Hosts>& rank) {
    constexpr std::size_t count = 1000;
    joinable::Arena const arena = rank.comm.allocate(count * sizeof(float));
    bool const is_registered = rank.comm.register_arena(arena);
    std::vector<float> values(count, static_cast<float>(rank.hosts.rank() + 1));
    std::size_t const bytes = count * sizeof(float);
    cuda(cudaMemcpyAsync(arena.data(), values.data(), bytes, cudaMemcpyHostToDevice, rank.stream));
    rank.comm.all_reduce({arena.data(), count, joinable::DType::f32}, joinable::ReduceOp::sum)
        .wait();
    rank.comm.synchronize();
    cuda(cudaMemcpyAsync(values.data(), arena.data(), bytes, cudaMemcpyDeviceToHost, rank.stream));
    rank.comm.synchronize();
    for (float const value : values) {
        expect(value == sum_to(rank.hosts.size()), "a sum in an arena is " + exactly(value));
    }
    return is_registered;
}

enum class End { destroyed, aborted, aborted_with_a_window };

/// Makes `times` + 1 communicators one after another, and ends each by its destructor, or aborts it.
/// Each finds as much free memory as the first one left. Returns how much less the worst one found.
template <class Hosts>
std::size_t check_ends(Hosts& hosts, int times, End end) {
    // What CUDA gives in small pieces comes from blocks of 2 MiB, which it may cut differently. A handle
    // that ends by ncclCommAbort keeps the memory of its windows until the process ends, in pieces of
    // 2 MiB: ncclDevrFinalize releases no handle of memory (NCCL 2.28.9, dev_runtime.cc:110).
    constexpr std::size_t piece = std::size_t{2} << 20U;
    std::size_t const lost = end == End::aborted_with_a_window ? piece : 0;
    std::size_t first = 0;
    std::size_t least = 0;
    for (int time = 0; time <= times; ++time) {
        Hosts control = hosts.split(0, hosts.rank()); // it ends with what is aborted
        Rank<Hosts> rank{control};
        joinable::Arena const arena = rank.comm.allocate(1000);
        if (end != End::aborted) {
            static_cast<void>(rank.comm.register_arena(arena));
        }
        expect_sum(rank.comm, rank.stream, 1, static_cast<float>(hosts.size()));
        rank.comm
            .all_reduce({arena.data(), 100, joinable::DType::f32}, joinable::ReduceOp::sum, 0.5)
            .wait();
        rank.comm.synchronize();
        hosts.barrier(); // ranks may share a GPU
        std::size_t const free = free_memory();
        hosts.barrier();
        first = time == 0 ? free : first;
        least = time == 0 ? free : (std::min)(least, free);
        auto const before = static_cast<std::size_t>(time);
        expect(
            free + 2 * piece + lost * before >= first,
            "communicator " + std::to_string(time) + " finds " + std::to_string(free) +
                " free bytes, the first one " + std::to_string(first)
        );
        if (end != End::destroyed) {
            rank.comm.abort({joinable::FailureKind::peer_failed, {0}, "enough"});
            expect_refused<joinable::PeerFailed>("enough", [&] { rank.comm.barrier(); });
        }
    }
    return first - least;
}

} // namespace joinable_gpu
