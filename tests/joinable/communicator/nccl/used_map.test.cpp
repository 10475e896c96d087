// SPDX-License-Identifier: BSL-1.0
// In a guard words go by the control communicator: with a map of used parameters, buckets leave while
// the device still computes the backward pass, on active ranks and on joined ones.
#include <joinable/nccl.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <initializer_list>
#include <stdexcept>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <support/fake_cuda/device_model.hpp>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/stream_communicator.hpp>
#include <support/meeting.hpp>
#include <support/nccl_ranks.hpp>
#include <support/ranks.hpp>
#include <support/volume.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/zero.hpp>

namespace {

using namespace joinable_tests;
using joinable::DType;
using joinable::NcclCommunicator;

/// Counts the buckets that a rank has begun to send.
struct CountingTimeline {
    std::atomic<int>* posted = nullptr;

    [[nodiscard]] int round(bool) const { return 0; }
    [[nodiscard]] int bucket(std::size_t, std::size_t) const {
        return posted == nullptr ? 0 : ++*posted;
    }
};
using Model =
    joinable::DistributedDataParallel<NcclCommunicator, joinable::AllReduce, CountingTimeline>;

constexpr int buckets = 4; ///< one for each parameter

joinable::DataParallelOptions options_of(bool is_static) {
    return {
        .bucket_cap_bytes = 16,
        .first_bucket_bytes = 16,
        .find_unused = !is_static,
        .static_graph = is_static,
        .joined_gradients = joinable::JoinedGradients::kept
    };
}

enum class Opens { notification, next, look_ahead, known_lengths };
constexpr std::initializer_list<Opens> all_ways{
    Opens::notification, Opens::next, Opens::look_ahead, Opens::known_lengths
};

/// Runs `inputs` rounds of body(round) in a guard of these participants.
template <class Control, class Body, class... Js>
void run_rounds(Opens opens, Control& control, int inputs, Body const& body, Js&... participants) {
    std::vector<int> numbers(static_cast<std::size_t>(inputs));
    for (int i = 0; i < inputs; ++i) {
        numbers[static_cast<std::size_t>(i)] = i;
    }
    joinable::JoinOptions options;
    if (opens == Opens::known_lengths) {
        options.inputs = numbers.size();
    }
    joinable::Join guard{
        joinable::participants(participants...), joinable::control(control), options
    };
    auto const loop = [&](auto&& range) {
        for (int const number : range) {
            body(number);
        }
    };
    if (opens == Opens::next) {
        loop(guard.iterate(numbers));
    } else if (opens == Opens::look_ahead) {
        loop(guard.iterate(joinable::look_ahead, numbers));
    } else {
        loop(numbers);
    }
    guard.finish();
}

/// Blocks a stream of the device until all ranks have posted so many buckets. Gives up after a
/// while, so that a test of what does not post them ends.
void compute_until(
    cudaStream_t stream, std::atomic<int>& posted, int count, std::atomic<bool>& was_late
) {
    fake_cuda::enqueue(stream, [&posted, &was_late, count] {
        auto const end = std::chrono::steady_clock::now() + std::chrono::seconds{20};
        while (posted < count && !was_late) {
            std::this_thread::sleep_for(std::chrono::microseconds{100});
            was_late = was_late || std::chrono::steady_clock::now() > end;
        }
    });
}

/// Parameter 1 is used by the last rank alone.
constexpr std::size_t rarely_used = 1;
std::vector<std::size_t> unused_on(int rank, int size) {
    return rank == size - 1 ? std::vector<std::size_t>{} : std::vector<std::size_t>{rarely_used};
}

template <class M>
void check_averages(M& model, int batch, int size) {
    std::vector<Numbers> expected = model.averages(batch, all_ranks(batch, size), size);
    expected[rarely_used] = model.averages(batch, {size - 1}, size)[rarely_used];
    CHECK(model.gradients() == expected);
}

TEST_CASE("buckets leave before the device has computed the pass, with a map of used parameters") {
    for (Opens const opens : all_ways) {
        for (bool const is_staged : {false, true}) {
            for (int const size : groups_of_participants({1, 2, 3, 4, 8})) {
                std::atomic<int> posted = 0;
                std::atomic<bool> was_late = false;
                Meeting in_pass{size};
                run_ranks({size}, [&](joinable::ThreadCommunicator& hosts) {
                    DeviceModel model{hosts.rank(), DType::f32};
                    NcclCommunicator comm{
                        hosts, {.stream = model.stream(), .deadline = std::chrono::seconds{60}}
                    };
                    comm.device_memory().use_kernels(host_kernels());
                    Model ddp{comm, model.params, options_of(false)};
                    int own = 0;
                    ddp.timeline().posted = &posted;
                    auto const unused = unused_on(hosts.rank(), size);
                    auto const round = [&](int batch) {
                        ddp.forward([] {});
                        compute_until(
                            model.stream(), posted, buckets * size * (batch + 1), was_late
                        );
                        int const before = posted;
                        ddp.backward(
                            [&](auto ready) {
                                model.backward(batch, [&](std::size_t i) {
                                    if (batch == 0 &&
                                        !is_staged) { // the map has been posted by all
                                        in_pass.meet();
                                    }
                                    own = posted - before;
                                    if (i != rarely_used || unused.empty()) {
                                        ready(i);
                                    }
                                });
                            },
                            unused
                        );
                        if (batch == 0 && !is_staged) {
                            CHECK(own > 0); // while the host ran the pass
                        }
                        check_averages(model, batch, size);
                    };
                    joinable::StagedNcclCommunicator staged{comm};
                    is_staged ? run_rounds(opens, staged, hosts.rank() + 1, round, ddp)
                              : run_rounds(opens, hosts, hosts.rank() + 1, round, ddp);
                });
                CHECK_FALSE(was_late);
                CHECK(posted == buckets * size * size);
                check_nothing_is_left();
            }
        }
    }
}

TEST_CASE("the first iteration of a static graph posts its buckets before the device is done") {
    for (int const size : groups_of_participants({1, 2, 3, 4, 8})) {
        std::atomic<int> posted = 0;
        std::atomic<bool> was_late = false;
        run_ranks({size}, [&](joinable::ThreadCommunicator& hosts) {
            DeviceModel model{hosts.rank(), DType::f32};
            NcclCommunicator comm{
                hosts, {.stream = model.stream(), .deadline = std::chrono::seconds{60}}
            };
            comm.device_memory().use_kernels(host_kernels());
            Model ddp{comm, model.params, options_of(true)};
            ddp.timeline().posted = &posted;
            auto const round = [&](int batch) {
                ddp.forward([] {});
                if (batch == 0) { // it cuts the buckets anew
                    auto const all = static_cast<int>(ddp.buckets().size()) * size;
                    compute_until(model.stream(), posted, all, was_late);
                }
                ddp.backward([&](auto ready) {
                    model.backward(batch, [&](std::size_t i) {
                        if (i != rarely_used || hosts.rank() == size - 1) {
                            ready(i);
                        }
                    });
                });
                check_averages(model, batch, size);
            };
            run_rounds(Opens::notification, hosts, hosts.rank() + 1, round, ddp);
        });
        CHECK_FALSE(was_late);
        check_nothing_is_left();
    }
}

TEST_CASE("two models of a guard send their maps in turn, and neither waits for the device") {
    for (Opens const opens : all_ways) {
        for (int const size : groups_of_participants({1, 2, 4})) {
            std::atomic<int> posted = 0;
            std::atomic<bool> was_late = false;
            run_ranks({size}, [&](joinable::ThreadCommunicator& hosts) {
                DeviceModel first{hosts.rank(), DType::f32};
                DeviceModel second{hosts.rank(), DType::f32};
                NcclCommunicator comm{
                    hosts, {.stream = first.stream(), .deadline = std::chrono::seconds{60}}
                };
                NcclCommunicator other{
                    hosts, {.stream = second.stream(), .deadline = std::chrono::seconds{60}}
                };
                comm.device_memory().use_kernels(host_kernels());
                other.device_memory().use_kernels(host_kernels());
                Model one{comm, first.params, options_of(false)};
                Model two{other, second.params, options_of(false)};
                one.timeline().posted = two.timeline().posted = &posted;
                auto const unused = unused_on(hosts.rank(), size);
                int batch = 0;
                int parts = 0;
                auto const part = [&](Model& ddp, DeviceModel& model) {
                    ddp.forward([] {});
                    compute_until(model.stream(), posted, buckets * size * ++parts, was_late);
                    ddp.backward(
                        [&](auto ready) {
                            model.backward(batch, [&](std::size_t i) {
                                if (i != rarely_used || unused.empty()) {
                                    ready(i);
                                }
                            });
                        },
                        unused
                    );
                };
                auto const round = [&](int number) {
                    batch = number;
                    part(one, first);
                    part(two, second);
                    check_averages(first, batch, size);
                    check_averages(second, batch, size);
                };
                run_rounds(opens, hosts, hosts.rank() + 1, round, one, two);
            });
            CHECK_FALSE(was_late);
            check_nothing_is_left();
        }
    }
}

TEST_CASE("what a sharded step shares in a guard waits neither for the engine nor for gradients") {
    for (bool const some_join : {true, false}) {   // joined ranks take settings
        for (bool const decides : {true, false}) { // by before_step
            for (int const size : groups_of_participants({1, 2, 3, 4, 8})) {
                std::atomic<int> stepped = 0;
                std::atomic<bool> was_late = false;
                run_ranks({size}, [&](joinable::ThreadCommunicator& hosts) {
                    DeviceModel model{hosts.rank(), DType::f32};
                    NcclCommunicator comm{
                        hosts, {.stream = model.stream(), .deadline = std::chrono::seconds{60}}
                    };
                    comm.device_memory().use_kernels(host_kernels());
                    joinable::DistributedDataParallel ddp{comm, model.params, options_of(false)};
                    joinable::ZeroOptions options;
                    if (decides) {
                        options.before_step = [](joinable::ShardGradients const&) { return true; };
                    }
                    joinable::ZeroRedundancyOptimizer zero{
                        comm, model.params, joinable::Sgd{.learning_rate = 0.5}, options
                    };
                    bool const has_joined = some_join && size > 1 && hosts.rank() == 0;
                    int const active = some_join && size > 1 ? size - 1 : size;
                    auto const round = [&](int batch) {
                        ddp.forward([] {});
                        compute_until(model.stream(), stepped, active * (batch + 1), was_late);
                        ddp.backward([&](auto ready) { model.backward(batch, ready); });
                        zero.step();
                        ++stepped;
                    };
                    run_rounds(Opens::notification, hosts, has_joined ? 0 : 3, round, ddp, zero);
                });
                CHECK_FALSE(was_late);
                check_nothing_is_left();
            }
        }
    }
}

TEST_CASE("a rank that throws beside a map is named on all ranks, joined ones too") {
    enum class Where { forward, before_the_first, after_the_first };
    for (Where const where : {Where::forward, Where::before_the_first, Where::after_the_first}) {
        for (Opens const opens : {Opens::notification, Opens::look_ahead, Opens::known_lengths}) {
            for (int const size : groups_of_participants({2, 3, 4, 8})) {
                int const culprit = size - 1;
                run_ranks({size}, [&](joinable::ThreadCommunicator& hosts) {
                    DeviceModel model{hosts.rank(), DType::f32};
                    NcclCommunicator comm{
                        hosts, {.stream = model.stream(), .deadline = std::chrono::seconds{60}}
                    };
                    comm.device_memory().use_kernels(host_kernels());
                    Model ddp{comm, model.params, options_of(false)};
                    auto const unused = unused_on(hosts.rank(), size);
                    auto const round = [&](int batch) {
                        bool const fails = hosts.rank() == culprit && batch == 1;
                        auto const fail_at = [&](Where here) {
                            if (fails && where == here) {
                                throw std::runtime_error{"bad sample"};
                            }
                        };
                        ddp.forward([&] { fail_at(Where::forward); });
                        ddp.backward(
                            [&](auto ready) {
                                fail_at(Where::before_the_first);
                                model.backward(batch, [&](std::size_t i) {
                                    if (i != rarely_used || unused.empty()) {
                                        ready(i);
                                    }
                                    fail_at(Where::after_the_first);
                                });
                            },
                            unused
                        );
                    };
                    // With two rounds at least for the one that fails, others have joined or not.
                    auto const train = [&] {
                        run_rounds(opens, hosts, hosts.rank() + 1, round, ddp);
                    };
                    if (hosts.rank() == culprit) {
                        CHECK_THROWS_WITH_AS(train(), "bad sample", std::runtime_error);
                    } else {
                        try {
                            train();
                            FAIL_CHECK("a rank failed, and nobody was told");
                        } catch (joinable::PeerFailed const& error) {
                            CHECK(error.ranks() == std::vector{culprit});
                        }
                    }
                });
                fake_cuda::drain();
            }
        }
    }
}

} // namespace
