// SPDX-License-Identifier: BSL-1.0
#include <joinable/participant/detail/module_state.hpp>

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/all_reducer.hpp>
#include <support/linear_model.hpp>
#include <support/meeting.hpp>
#include <support/recording_communicator.hpp>
#include <support/shared.hpp>
#include <support/volume.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/sharded/data_parallel.hpp>
#include <joinable/participant/step.hpp>

namespace {

using namespace joinable_tests;
using joinable::AnyView;
using joinable::BFloat16;
using joinable::buffers;
using joinable::BufferSync;
using joinable::DataParallelOptions;
using joinable::DistributedDataParallel;
using joinable::Join;
using joinable::participants;
using joinable::Round;

using Params = std::vector<Param<double>>;

/// Buffers of every kind, filled with a number of this rank.
struct Buffers {
    std::vector<std::vector<float>> floats{std::vector<float>(3), {}};
    std::vector<double> memory = std::vector<double>(12);
    std::vector<joinable::StridedView<double>> strided{joinable::as_strided(memory, {2, 3}, {6, 2})
    };
    std::vector<BFloat16> small = std::vector<BFloat16>(5);
    std::vector<std::int64_t> steps = std::vector<std::int64_t>(1);

    void fill(int value) {
        std::fill(floats[0].begin(), floats[0].end(), static_cast<float>(value));
        std::fill(memory.begin(), memory.end(), value);
        std::fill(small.begin(), small.end(), BFloat16{static_cast<float>(value)});
        steps[0] = value;
    }
    [[nodiscard]] joinable::BufferList list() {
        return buffers(floats, strided, std::vector{&small}, std::vector{&steps});
    }
    /// Whether all elements are `value`, those between the strided ones `gap`.
    [[nodiscard]] bool hold(int value, int gap) const {
        return floats[0] == std::vector<float>(3, static_cast<float>(value)) &&
               memory[2] == value && memory[10] == value && memory[1] == gap &&
               static_cast<float>(small[4]) == static_cast<float>(value) && steps[0] == value;
    }
};

/// One round: this rank's gradient is `gradient`.
template <class Ddp>
void train_once(Ddp& ddp, Params& params, double gradient, joinable::RoundNotice notice = {}) {
    ddp.forward([] {}, notice);
    ddp.backward([&](auto ready) {
        params[0].g(0) = gradient;
        ready(0);
    });
}

/// The number of inputs of a rank, in four shapes: ascending, descending, one without any, two last
/// joiners.
int inputs_of(int rank, int world, int shape) {
    switch (shape) {
    case 0: return 1 + 2 * rank;
    case 1: return 2 + 2 * (world - 1 - rank);
    case 2: return rank == 0 ? 0 : 1 + rank % 3;
    default: return rank < 2 ? 4 : 1;
    }
}
int rounds_of(int world, int shape) {
    int rounds = 0;
    for (int rank = 0; rank < world; ++rank) {
        rounds = std::max(rounds, inputs_of(rank, world, shape));
    }
    return rounds;
}
int last_joiner(int world, int shape) {
    int rank = world - 1;
    while (inputs_of(rank, world, shape) != rounds_of(world, shape)) {
        --rank;
    }
    return rank;
}

/// What a constructor says when it throws `Error`; empty when it does not throw.
template <class Error, class F>
std::string text_of(F const& f) {
    try {
        f();
    } catch (Error const& error) {
        return error.what();
    }
    return {};
}

TEST_CASE("a model starts with rank 0's parameters and buffers, of all dtypes and strides") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        params[0].value[0] = comm.rank();
        Buffers state;
        state.fill(7 + comm.rank());
        DistributedDataParallel ddp{comm, params, state.list()};
        CHECK(params[0].value[0] == 0);
        CHECK(state.hold(7, 7 + comm.rank()));
    });
}

TEST_CASE(
    "without sync_at_start each rank keeps what it has, and without broadcast_buffers its buffers"
) {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        params[0].value[0] = comm.rank();
        Buffers state;
        state.fill(7 + comm.rank());
        DistributedDataParallel keeps{comm, params, state.list(), {.sync_at_start = false}};
        CHECK(params[0].value[0] == comm.rank());
        CHECK(state.hold(7 + comm.rank(), 7 + comm.rank()));
        DistributedDataParallel ddp{comm, params, state.list(), {.broadcast_buffers = false}};
        {
            Join guard{participants(ddp)};
            for (int i = 0; i <= comm.rank(); ++i) {
                train_once(ddp, params, 0.0);
            }
            guard.finish();
        }
        CHECK(params[0].value[0] == 0);
        CHECK(state.hold(7 + comm.rank(), 7 + comm.rank()));
    });
}

TEST_CASE("ranks that joined earlier end with the model of the last rank that trained") {
    for (int const shape : {0, 1, 2, 3}) {
        for (bool const syncs : {true, false}) {
            over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
                if (comm.size() == 1 && shape == 2) {
                    return; // nobody has inputs
                }
                Params params = make_params<double>({1});
                Buffers state;
                DistributedDataParallel ddp{comm, params, state.list(), {.sync_at_end = syncs}};
                Join guard{participants(ddp)};
                int const inputs = inputs_of(comm.rank(), comm.size(), shape);
                for (int i = 0; i < inputs; ++i) {
                    train_once(ddp, params, comm.size());
                    params[0].value[0] += params[0].g(0); // only active ranks step
                    state.fill(16 * comm.rank() + i);     // after the last sync of buffers
                }
                auto const result = guard.finish();
                // Each active rank adds as many as are active: the sum over rounds so far.
                auto const sum_until = [&](int rounds) {
                    double sum = 0;
                    for (int round = 0; round < rounds; ++round) {
                        for (int rank = 0; rank < comm.size(); ++rank) {
                            sum += inputs_of(rank, comm.size(), shape) > round ? 1 : 0;
                        }
                    }
                    return sum;
                };
                int const rounds = rounds_of(comm.size(), shape);
                int const last = last_joiner(comm.size(), shape);
                CHECK(result.authoritative_rank == last);
                CHECK(params[0].value[0] == sum_until(syncs ? rounds : inputs));
                if (syncs) {
                    int const gap = inputs == 0 ? 0 : 16 * comm.rank() + inputs - 1;
                    CHECK(state.hold(16 * last + rounds - 1, gap));
                }
            });
        }
    }
}

TEST_CASE("with a step that joined ranks shadow the final sync changes no bit") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto const train = [&](bool syncs) {
            Params params = make_params<double>({1});
            params[0].value[0] = 0.1;
            std::vector<std::vector<double>> momentum(1, std::vector<double>(1));
            DistributedDataParallel ddp{comm, params, {.sync_at_end = syncs}};
            ddp.attach_state(momentum);
            joinable::Step step{comm, [&] {
                                    momentum[0][0] = 0.9 * momentum[0][0] + params[0].g(0);
                                    params[0].value[0] -= 0.1 * momentum[0][0];
                                }};
            Join guard{participants(ddp, step)};
            for (int i = 0; i < 1 + 2 * comm.rank() % 5; ++i) {
                train_once(ddp, params, std::sin(params[0].value[0] + comm.rank() + 0.1 * i));
                step.step();
            }
            guard.finish();
            return std::pair{params[0].value[0], momentum[0][0]};
        };
        auto const synced = train(true);
        CHECK(synced == train(false));
        CHECK(synced.second != 0.0);
    });
}

/// A running mean as batch normalisation keeps it, over uneven inputs; the oracle is serial.
constexpr double keep = 0.75;
double sample(int rank, int round) {
    return 1.0 + 0.5 * rank + 0.25 * round * round;
}

TEST_CASE("a running mean follows the lowest active rank, sent before or after the forward pass") {
    for (BufferSync const position : {BufferSync::after_forward, BufferSync::before_forward}) {
        for (int const shape : {0, 1, 2, 3}) {
            over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
                int const world = comm.size();
                if (world == 1 && shape == 2) {
                    return;
                }
                bool const is_before = position == BufferSync::before_forward;
                std::vector<double> expected(static_cast<std::size_t>(world)); // per rank
                auto const run_serially = [&](int round) {
                    std::vector<std::size_t> active;
                    for (int rank = 0; rank < world; ++rank) {
                        if (inputs_of(rank, world, shape) > round) {
                            active.push_back(static_cast<std::size_t>(rank));
                        }
                    }
                    double const before = expected[active.front()];
                    for (std::size_t rank = 0; rank < expected.size(); ++rank) {
                        expected[rank] = is_before ? before : expected[rank];
                    }
                    for (std::size_t const rank : active) {
                        expected[rank] = keep * expected[rank] +
                                         (1 - keep) * sample(static_cast<int>(rank), round);
                    }
                    double const after = expected[active.front()];
                    for (std::size_t rank = 0; rank < expected.size(); ++rank) {
                        expected[rank] = is_before ? expected[rank] : after;
                    }
                };
                Params params = make_params<double>({1});
                std::vector<std::vector<double>> mean(1, std::vector<double>(1, 0.0));
                DistributedDataParallel ddp{comm, params, buffers(mean), {.buffer_sync = position}};
                auto const me = static_cast<std::size_t>(comm.rank());
                int const inputs = inputs_of(comm.rank(), world, shape);
                Join guard{participants(ddp)};
                for (int i = 0; i < inputs; ++i) {
                    ddp.forward([&] {
                        mean[0][0] = keep * mean[0][0] + (1 - keep) * sample(comm.rank(), i);
                    });
                    ddp.backward([](auto ready) { ready(0); });
                    run_serially(i);
                    CHECK(mean[0][0] == expected[me]);
                }
                guard.finish();
                for (int i = inputs; i < rounds_of(world, shape); ++i) {
                    run_serially(i);
                }
                CHECK(mean[0][0] == expected[static_cast<std::size_t>(last_joiner(world, shape))]);
            });
        }
    }
}

TEST_CASE(
    "all ranks issue the same collectives, and buffers only in rounds that sync" *
    doctest::skip(!ranks_share_memory)
) {
    for (BufferSync const position : {BufferSync::after_forward, BufferSync::before_forward}) {
        for (int const world : groups_of_participants({1, 2, 3, 4, 8})) {
            std::vector<std::vector<std::string>> traces(static_cast<std::size_t>(world));
            over_ranks({world}, [&](RankCommunicator& inner) {
                RecordingCommunicator comm{inner};
                Params params = make_params<double>({1});
                std::vector<std::vector<float>> running(2, std::vector<float>(5));
                DistributedDataParallel ddp{
                    comm, params, buffers(running), {.buffer_sync = position}
                };
                Join guard{participants(ddp)};
                comm.trace.clear();
                for (int i = 0; i < 1 + comm.rank(); ++i) {
                    ddp.forward([] {}, {.phase = joinable::Phase::evaluate});
                    train_once(ddp, params, 1.0, {.will_sync = false});
                    train_once(ddp, params, 1.0);
                }
                guard.finish();
                traces[static_cast<std::size_t>(comm.rank())] = comm.trace;
            });
            for (auto const& trace : traces) {
                CHECK(trace == traces.front());
                auto const sent = std::count(trace.begin(), trace.end(), "broadcast 10 f32");
                CHECK(sent == world + 1); // each round that syncs, and the end
            }
        }
    }
}

TEST_CASE("buffers are sent however a round is opened, and by rank 0 where no guard is enabled") {
    for (BufferSync const position : {BufferSync::after_forward, BufferSync::before_forward}) {
        over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
            Params params = make_params<double>({1});
            std::vector<std::vector<std::int64_t>> source(1, std::vector<std::int64_t>(1));
            DistributedDataParallel ddp{comm, params, buffers(source), {.buffer_sync = position}};
            auto const check_source = [&](std::size_t lowest) {
                source[0][0] = comm.rank();
                train_once(ddp, params, 1.0);
                CHECK(source[0][0] == static_cast<std::int64_t>(lowest));
            };
            check_source(0);
            {
                Join guard{participants(ddp), {.enable = false}};
                check_source(0);
                source[0][0] = comm.rank();
                guard.finish();
                CHECK(source[0][0] == comm.rank());
            }
            // Rank r has r + 1 inputs: the lowest rank of a round is the round's number.
            std::vector<int> const inputs(static_cast<std::size_t>(1 + comm.rank()));
            {
                Join guard{participants(ddp)};
                for (std::size_t round = 0; round < inputs.size(); ++round) {
                    CHECK(guard.next(true));
                    check_source(round);
                }
                guard.finish();
            }
            {
                Join guard{participants(ddp)};
                std::size_t round = 0;
                for ([[maybe_unused]] int const i : guard.iterate(joinable::look_ahead, inputs)) {
                    check_source(round++);
                }
                guard.finish();
            }
            {
                Join guard{participants(ddp), {.inputs = inputs.size()}};
                for (std::size_t round = 0; round < inputs.size(); ++round) {
                    check_source(round);
                }
                guard.finish();
            }
            CHECK(source[0][0] == comm.size() - 1);
        });
    }
}

TEST_CASE("under throw_early no pass runs for a round that is not held: buffers stay where they are"
) {
    for (BufferSync const position : {BufferSync::after_forward, BufferSync::before_forward}) {
        for (bool const skips_last : {false, true}) { // in place of the pass
            over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
                std::vector<Param<double>> params = make_params<double>({1});
                std::vector<std::vector<double>> moments{{0.0}};
                DistributedDataParallel ddp{
                    comm, params, buffers(moments), {.buffer_sync = position}
                };
                int ended_early = 0;
                try {
                    Join guard{participants(ddp), {.end_policy = joinable::EndPolicy::throw_early}};
                    for (int i = 0; i < 2 + comm.rank(); ++i) {
                        if (skips_last && i == 2) {
                            ddp.skip();
                            continue;
                        }
                        ddp.forward([&] {
                            comm.barrier(); // a collective of the engine's, as batch norm has
                            moments[0][0] += 1.0;
                        });
                        ddp.backward([&](auto ready) { ready(0); });
                    }
                    guard.finish();
                } catch (joinable::EarlyTermination const&) {
                    ++ended_early;
                }
                CHECK(ended_early == (comm.size() == 1 ? 0 : 1));
                CHECK(moments[0][0] == 2.0);
            });
        }
    }
}

TEST_CASE("nobody else communicates between a forward pass that waited and its backward pass") {
    for (bool const is_before : {true, false}) { // waits for buffers, or has nothing to wait for
        for (int const world : {1, 2}) {
            Shared<Meeting> forwarded{world};
            over_ranks({world}, [&](RankCommunicator& comm) {
                Params params = make_params<double>({1});
                std::vector<std::vector<float>> running(1, std::vector<float>(3));
                auto const position =
                    is_before ? BufferSync::before_forward : BufferSync::after_forward;
                DistributedDataParallel ddp{
                    comm, params, buffers(running), {.buffer_sync = position}
                };
                AllReducer reducer{comm};
                auto const train = [&] {
                    Join guard{participants(ddp, reducer)};
                    if (!is_before) {
                        CHECK(guard.next(true));
                    }
                    ddp.forward([] {});
                    forwarded->meet(); // who is refused first ends what others are in
                    reducer();
                };
                CHECK(
                    text_of<joinable::ContractViolation>(train).find("is held open") !=
                    std::string::npos
                );
            });
        }
    }
}

TEST_CASE("a rank that skips its batch sends and takes buffers as the others do") {
    enum class Fails : std::uint8_t { before, in_forward, between, in_backward };
    for (Fails const fails :
         {Fails::before, Fails::in_forward, Fails::between, Fails::in_backward}) {
        for (BufferSync const position : {BufferSync::after_forward, BufferSync::before_forward}) {
            for (int const culprit : {0, 1}) { // the source, and another
                over_ranks({2, 3, 4}, [&](RankCommunicator& comm) {
                    Params params = make_params<double>({1});
                    std::vector<std::vector<double>> mean(1, std::vector<double>(1));
                    DistributedDataParallel ddp{
                        comm,
                        params,
                        buffers(mean),
                        {.find_unused = fails == Fails::between, .buffer_sync = position}
                    };
                    Join guard{participants(ddp)};
                    for (int i = 0; i < 3; ++i) {
                        mean[0][0] = 10.0 * comm.rank() + i;
                        if (comm.rank() != culprit || i != 1) {
                            train_once(ddp, params, 1.0);
                        } else if (fails == Fails::before) {
                            ddp.skip();
                        } else {
                            auto const fail_in = [&](Fails stage) {
                                if (fails == stage) {
                                    throw std::domain_error{"bad batch"};
                                }
                            };
                            try {
                                ddp.forward([&] { fail_in(Fails::in_forward); });
                                ddp.backward(
                                    [&](auto const&) { fail_in(Fails::in_backward); },
                                    [&](std::size_t) { // which parameters are unused
                                        fail_in(Fails::between);
                                        return false;
                                    }
                                );
                            } catch (std::domain_error const&) {
                                ddp.skip();
                            }
                        }
                        CHECK(mean[0][0] == i); // rank 0's
                    }
                    CHECK(guard.finish().rounds == 3);
                });
            }
        }
    }
}

TEST_CASE("a buffer that got other memory is followed, one of another size refused on all ranks") {
    over_ranks({2, 3, 4}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        std::vector<std::vector<float>> running(2, std::vector<float>(3));
        DistributedDataParallel ddp{comm, params, buffers(running)};
        auto const train = [&](std::size_t size) {
            Join guard{participants(ddp)};
            for (int i = 0; i < 3; ++i) {
                running[1] = std::vector<float>(
                    comm.rank() == 1 && i == 2 ? size : 3, static_cast<float>(10 * comm.rank() + i)
                );
                train_once(ddp, params, 1.0);
                CHECK(running[1][0] == static_cast<float>(i));
            }
            guard.finish();
        };
        train(3);
        std::string const why =
            "buffer 1 was f32 (3), but now is f32 (4); it may move, but neither grow nor change";
        if (comm.rank() == 1) {
            CHECK(text_of<joinable::ContractViolation>([&] { train(4); }) == why);
        } else {
            CHECK(text_of<joinable::PeerFailed>([&] { train(4); }) == "rank 1 failed: " + why);
        }
    });
}

TEST_CASE("buffers that differ are refused on all ranks, with the first that does") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        bool const is_odd = comm.rank() == 1;
        auto const construct = [&](std::size_t count, std::size_t numel, bool is_double) {
            return text_of<joinable::Mismatch>([&] {
                Params params = make_params<double>({1});
                std::vector<std::vector<float>> floats(count, std::vector<float>(4));
                std::vector<std::vector<float>> last(1, std::vector<float>(numel));
                std::vector<std::vector<double>> doubles(1, std::vector<double>(numel));
                DistributedDataParallel ddp{
                    comm, params, is_double ? buffers(floats, doubles) : buffers(floats, last)
                };
            });
        };
        CHECK(
            construct(is_odd ? 1 : 2, 4, false) ==
            "models differ: number of buffers: rank 0 has 3, rank 1 has 2"
        );
        std::string const start = "models differ: buffer 2: rank 0 has f32 (4), rank 1 has ";
        CHECK(construct(2, is_odd ? 5 : 4, false) == start + "f32 (5)");
        CHECK(construct(2, 4, is_odd) == start + "f64 (4)");
        CHECK(construct(2, 4, false).empty()); // the communicator stays usable
    });
}

TEST_CASE("a missing buffer on one rank fails on all, before anything is sent") {
    over_ranks({2, 4}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        std::vector<float> running(3);
        std::vector<std::vector<float>*> pointers{&running, comm.rank() == 1 ? nullptr : &running};
        auto const construct = [&] {
            DistributedDataParallel ddp{comm, params, buffers(pointers)};
        };
        std::string const why = "buffer 1 is missing; give a pointer that is not null";
        if (comm.rank() == 1) {
            CHECK(text_of<joinable::ContractViolation>(construct) == why);
        } else {
            CHECK(text_of<joinable::PeerFailed>(construct) == "rank 1 failed: " + why);
        }
        comm.barrier();
    });
}

TEST_CASE("tensors that receivers could not write are refused on all ranks, the sender included") {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        std::vector<double> one(1);
        auto const repeated =
            joinable::as_strided(one, {4}, {0}); // as an engine expands a constant
        auto params = make_params<double>({1});
        auto const refusal_of = [](auto const& make) {
            return text_of<joinable::ContractViolation>(make);
        };
        std::string const why =
            " has elements that share memory (extents (4), strides (0)), so it cannot be ";
        std::string const written = why + "written; give a contiguous copy";
        CHECK(refusal_of([&] {
                  DistributedDataParallel{comm, params, buffers(repeated)};
              }) == "buffer 0" + written);
        DistributedDataParallel ddp{comm, params};
        CHECK(refusal_of([&] { ddp.attach_state(repeated); }) == "state tensor 0" + written);
        CHECK(refusal_of([&] {
                  joinable::broadcast_coalesced(comm, repeated, 8, 0);
              }) == "tensor 0" + written);
        struct Expanded {
            AnyView value, grad;
        };
        std::vector<double> gradient(4);
        std::vector<Expanded> model{{AnyView{repeated}, AnyView{gradient}}};
        CHECK(refusal_of([&] {
                  DistributedDataParallel{comm, model};
              }) == "parameter 0" + why + "trained; give it a contiguous copy");
        AnyView buffer{gradient};
        DistributedDataParallel moved{comm, params, buffers(std::vector{&buffer})};
        buffer = AnyView{repeated}; // an engine that expands it later
        CHECK(refusal_of([&] {
                  moved.forward([] {});
                  moved.backward([](auto ready) { ready(0); });
              }) == "buffer 0" + written);
    });
}

TEST_CASE("complex tensors of too many dimensions are refused on all ranks, before one is sent") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        std::vector<std::complex<double>> numbers(2, {1.0 + comm.rank(), 2.0 + comm.rank()});
        std::vector<std::size_t> extents(8, 1);
        extents[3] = 2;
        auto const eight = joinable::as_strided(numbers, extents, std::vector<std::size_t>(8, 1));
        extents.pop_back();
        auto const seven = joinable::as_strided(numbers, extents, std::vector<std::size_t>(7, 1));
        auto params = make_params<double>({1});
        auto const refusal_of = [](auto const& make) {
            return text_of<joinable::ContractViolation>(make);
        };
        std::string const why =
            "a tensor of complex numbers has at most 7 dimensions here, because its parts are "
            "one more, but this one has 8; merge two of them";
        CHECK(refusal_of([&] { DistributedDataParallel{comm, params, buffers(eight)}; }) == why);
        DistributedDataParallel ddp{comm, params};
        CHECK(refusal_of([&] { ddp.attach_state(eight); }) == why);
        CHECK(refusal_of([&] { joinable::broadcast_coalesced(comm, eight, 8, 0); }) == why);
        CHECK(numbers[1] == std::complex<double>{1.0 + comm.rank(), 2.0 + comm.rank()});
        DistributedDataParallel{comm, params, buffers(seven)};
        CHECK(numbers[1] == std::complex<double>{1.0, 2.0}); // of rank 0
    });
}

TEST_CASE("options of the state that differ are refused") {
    over_ranks({2, 3}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        bool const is_odd = comm.rank() == 1;
        auto const construct = [&](DataParallelOptions const& options) {
            DistributedDataParallel ddp{comm, params, buffers(), options};
        };
        DataParallelOptions changed[4];
        changed[0].broadcast_buffers = false;
        changed[1].buffer_sync = BufferSync::before_forward;
        changed[2].sync_at_start = false;
        changed[3].sync_at_end = false;
        for (DataParallelOptions const& options : changed) {
            CHECK_THROWS_AS(
                construct(is_odd ? options : DataParallelOptions{}), joinable::Mismatch
            );
        }
    });
}

TEST_CASE("a buffer hook replaces the broadcast, on joined ranks too: means over the active ranks"
) {
    for (BufferSync const position : {BufferSync::after_forward, BufferSync::before_forward}) {
        for (int const shape : {0, 1, 2, 3}) {
            over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
                int const world = comm.size();
                if (world == 1 && shape == 2) {
                    return;
                }
                Params params = make_params<double>({1});
                std::vector<std::vector<double>> mean(1, std::vector<double>(2));
                DistributedDataParallel ddp{comm, params, buffers(mean), {.buffer_sync = position}};
                std::vector<double> seen; // the mean after each round, on all ranks
                ddp.set_buffer_hook([&](RankCommunicator& over,
                                        std::vector<AnyView> const& all,
                                        Round const& round) {
                    CHECK(all.size() == 1);
                    CHECK(round.is_shadow() == !round.is_active(over.rank()));
                    if (round.is_shadow()) {
                        joinable::fill_zero(all[0]);
                    }
                    over.all_reduce(joinable::to_buffer(all[0]), joinable::ReduceOp::sum).wait();
                    auto const view = all[0].as<double>();
                    for (double& value : view) {
                        value /= round.active_count();
                    }
                    seen.push_back(view(1));
                });
                Join guard{participants(ddp)};
                for (int i = 0; i < inputs_of(comm.rank(), world, shape); ++i) {
                    mean[0][1] = sample(comm.rank(), i);
                    train_once(ddp, params, 1.0);
                }
                guard.finish();
                REQUIRE(seen.size() == static_cast<std::size_t>(rounds_of(world, shape)));
                for (int round = 0; round < rounds_of(world, shape); ++round) {
                    double sum = 0;
                    double active = 0;
                    for (int rank = 0; rank < world; ++rank) {
                        bool const is_active = inputs_of(rank, world, shape) > round;
                        sum += is_active ? sample(rank, round) : 0;
                        active += is_active ? 1 : 0;
                    }
                    CHECK(seen[static_cast<std::size_t>(round)] == doctest::Approx(sum / active));
                }
            });
        }
    }
}

TEST_CASE(
    "a buffer hook that throws on one rank, active or joined, reaches the others with its text"
) {
    for (int const culprit : {0, 1}) { // rank 0 joins after one round, rank 1 is active in all
        over_ranks({2, 3, 4}, [&](RankCommunicator& comm) {
            Params params = make_params<double>({1});
            std::vector<std::vector<float>> running(1, std::vector<float>(3));
            DistributedDataParallel ddp{comm, params, buffers(running)};
            ddp.set_buffer_hook([&](RankCommunicator&, auto const&, Round const& round) {
                if (comm.rank() == culprit && round.number() == 1) {
                    CHECK(round.is_shadow() == (culprit == 0));
                    throw std::domain_error{"no variance"};
                }
            });
            auto const train = [&] {
                Join guard{participants(ddp)};
                for (int i = 0; i < (comm.rank() == 0 ? 1 : 3); ++i) {
                    train_once(ddp, params, 1.0);
                }
                guard.finish();
            };
            if (comm.rank() == culprit) {
                CHECK_THROWS_AS(train(), std::domain_error);
            } else {
                CHECK(
                    text_of<joinable::PeerFailed>(train) ==
                    "rank " + std::to_string(culprit) + " failed: no variance"
                );
            }
        });
    }
}

TEST_CASE("a buffer hook that some ranks have and others do not is refused at the guard's entry") {
    over_ranks({2, 3, 4}, [](RankCommunicator& comm) {
        auto const check = [&](auto& ddp) {
            if (comm.rank() != 0) {
                ddp.set_buffer_hook([](RankCommunicator&, auto const&, Round const&) {});
            }
            std::string const text =
                text_of<joinable::Mismatch>([&] { Join{participants(ddp)}.finish(); });
            CAPTURE(text);
            CHECK(text.find("set_buffer_hook()") != std::string::npos);
            ddp.set_buffer_hook({});
            CHECK_NOTHROW([&] { Join{participants(ddp)}.finish(); }());
        };
        Params params = make_params<double>({1});
        std::vector<std::vector<float>> running(1, std::vector<float>(3));
        DistributedDataParallel ddp{comm, params, buffers(running)};
        check(ddp);
        joinable::ShardedDataParallel sharded{
            comm, params, buffers(running), joinable::Sgd{}, joinable::ShardedOptions{}
        };
        check(sharded);
    });
}

TEST_CASE("hooks are set and state is attached outside guards and rounds only") {
    over_ranks({1}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        std::vector<std::vector<float>> running(1, std::vector<float>(3));
        DistributedDataParallel ddp{comm, params, buffers(running)};
        auto const both_throw = [&] {
            CHECK(
                text_of<joinable::ContractViolation>([&] { ddp.set_buffer_hook({}); }) ==
                "set_buffer_hook() was called in a guard or in a round; call it before, on every "
                "rank"
            );
            CHECK_THROWS_AS(ddp.attach_state(running), joinable::ContractViolation);
        };
        ddp.prepare_for_forward();
        both_throw();
        ddp.backward([](auto ready) { ready(0); });
        {
            Join guard{participants(ddp)};
            both_throw();
            guard.finish();
        }
        ddp.set_buffer_hook({});
        DistributedDataParallel without{
            comm, params, buffers(running), {.broadcast_buffers = false}
        };
        CHECK_THROWS_AS(without.set_buffer_hook({}), joinable::ContractViolation);
    });
}

TEST_CASE("attached state starts with rank 0's and ends with the last joiner's, with the model") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        Params params = make_params<double>({1});
        std::vector<std::vector<double>> momentum(2, std::vector<double>(3, comm.rank()));
        std::int64_t steps = 10 + comm.rank();
        DistributedDataParallel ddp{comm, params};
        ddp.attach_state(momentum);
        ddp.attach_state(std::vector{std::span{&steps, 1}});
        CHECK(momentum[1] == std::vector<double>(3, 0.0));
        CHECK(steps == 10);
        {
            Join guard{participants(ddp)};
            for (int i = 0; i < 1 + comm.rank(); ++i) {
                train_once(ddp, params, 1.0);
                ++steps;
                momentum[1] = std::vector<double>(3, 5.0 * static_cast<double>(steps));
            }
            guard.finish();
        }
        CHECK(steps == 10 + comm.size());
        CHECK(momentum[1] == std::vector<double>(3, 5.0 * static_cast<double>(steps)));
    });
}

TEST_CASE("attached state that differs or is missing is refused on all ranks, and not attached") {
    over_ranks({2, 4}, [](RankCommunicator& comm) {
        bool const is_odd = comm.rank() == 1;
        Params params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params};
        std::vector<std::vector<double>> momentum(is_odd ? 1 : 2, std::vector<double>(3));
        CHECK(text_of<joinable::Mismatch>([&] {
                  ddp.attach_state(momentum);
              }) == "models differ: number of state tensors: rank 0 has 2, rank 1 has 1");
        momentum.assign(2, std::vector<double>(3));
        momentum[1].resize(is_odd ? 4 : 3);
        CHECK(text_of<joinable::Mismatch>([&] {
                  ddp.attach_state(momentum);
              }) == "models differ: state tensor 1: rank 0 has f64 (3), rank 1 has f64 (4)");
        std::vector<std::vector<double>*> pointers{is_odd ? nullptr : &momentum[0]};
        if (is_odd) {
            CHECK_THROWS_AS(ddp.attach_state(pointers), joinable::ContractViolation);
        } else {
            CHECK_THROWS_AS(ddp.attach_state(pointers), joinable::PeerFailed);
        }
        momentum[0][0] = 1 + comm.rank();
        Join guard{participants(ddp)};
        train_once(ddp, params, 1.0);
        guard.finish();
        CHECK(momentum[0][0] == 1 + comm.rank());
    });
}

} // namespace
