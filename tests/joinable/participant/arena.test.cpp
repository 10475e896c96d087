// SPDX-License-Identifier: BSL-1.0
// Gradients of process ranks are reduced where they are: buckets lie in memory that ranks share.
#include <joinable/participant/data_parallel.hpp>

#include <cstddef>
#include <new>
#include <vector>

#include <doctest/doctest.h>
#include <support/linear_model.hpp>
#include <support/ranks.hpp>
#include <support/recording_communicator.hpp>
#include <support/segment_ranks.hpp>
#include <support/volume.hpp>

#include <joinable/join/guard.hpp>

namespace {

using namespace joinable_tests;

using Params = std::vector<Param<float>>;
constexpr std::size_t numel = 40'000; // per parameter, of three: several chunks of a collective
constexpr std::size_t small = 16'384; ///< bytes: what ranks agree on, and the order of gradients

/// Rank r has 2 + r rounds. Gradients depend on values, so that a wrong bit stays and spreads.
template <class Comm>
std::vector<float> train(Comm& comm, joinable::DataParallelOptions const& options) {
    Params params =
        make_params({numel, numel + 1, numel + 2}, 1.0F + static_cast<float>(comm.rank()));
    std::vector<std::vector<float>> running(1);
    running[0].assign(numel, static_cast<float>(comm.rank()));
    joinable::DistributedDataParallel ddp{comm, params, joinable::buffers(running), options};
    joinable::Join join{joinable::participants(ddp)};
    for (int round = 0; round < 2 + comm.rank(); ++round) {
        ddp.forward([&] { running[0][0] += 1.0F; });
        ddp.backward([&](auto ready) {
            for (std::size_t k = params.size(); k-- > 0;) {
                Param<float>& p = params[k];
                float* const gradient = &p.g(0);
                float const* const value = p.value.data();
                for (std::size_t i = 0; i < p.value.size(); ++i) {
                    gradient[i] = value[i] / 3.0F + static_cast<float>(i % 7) -
                                  static_cast<float>(comm.rank()) / 7.0F;
                }
                ready(k);
            }
        });
        for (Param<float>& p : params) {
            float const* const gradient = &p.g(0);
            float* const value = p.value.data();
            for (std::size_t i = 0; i < p.value.size(); ++i) {
                value[i] -= 0.1F * gradient[i];
            }
        }
    }
    join.finish();
    std::vector<float> all = running[0];
    for (Param<float> const& p : params) {
        all.insert(all.end(), p.value.begin(), p.value.end());
    }
    return all;
}

TEST_CASE(
    "data-parallel process ranks copy no view and no gradient twice, and train as thread ranks do"
) {
    for (bool const are_views : {false, true}) {
        joinable::DataParallelOptions options;
        options.gradient_as_bucket_view = are_views;
        options.bucket_cap_bytes = 200'000; // two buckets, cut anew after the first round
        for (int const world : groups_of_participants({1, 2, 3, 4, 8})) {
            std::vector<std::vector<float>> of_threads(static_cast<std::size_t>(world));
            run_ranks({world}, [&](joinable::ThreadCommunicator& comm) {
                of_threads[static_cast<std::size_t>(comm.rank())] = train(comm, options);
            });
            SegmentRanks ranks{world};
            ranks.run([&](joinable::ProcessCommunicator& comm) {
                CHECK(train(comm, options) == of_threads[static_cast<std::size_t>(comm.rank())]);
            });
            for (int rank = 0; rank < world; ++rank) {
                // Gradients on the heap pass through shared memory, where the other ranks read them.
                std::size_t const of_gradients = are_views ? 0 : 3 * (numel + 2) * sizeof(float);
                CHECK(ranks.copied(rank) < of_gradients + small);
            }
        }
    }
}

/// A rank that has memory for so many buffers.
class SmallMemory : public RecordingCommunicator<joinable::ThreadCommunicator> {
public:
    using RecordingCommunicator::RecordingCommunicator;
    [[nodiscard]] joinable::Arena allocate(std::size_t bytes, std::size_t alignment) {
        if (bytes != 0 && left-- == 0) {
            throw std::bad_alloc{};
        }
        return joinable::Arena{bytes, alignment};
    }
    int left = 100;
};

/// Tries `build` with memory for ever more buffers on `culprit`, until there is enough. Returns how
/// often it failed: on all ranks, which go on with the same communicator.
template <class Build>
int failures_until_there_is_memory(SmallMemory& comm, int culprit, Build const& build) {
    bool const is_culprit = comm.rank() == culprit;
    for (int failures = 0;; ++failures) {
        comm.left = is_culprit ? failures : 100;
        try {
            build();
            comm.left = 100;
            return failures;
        } catch (std::bad_alloc const&) {
            CHECK(is_culprit);
        } catch (joinable::PeerFailed const& failure) {
            CHECK(!is_culprit);
            CHECK(failure.ranks() == std::vector{culprit});
        }
    }
}

TEST_CASE("a rank without memory for a model or its state fails on all, which then try again") {
    for (int const size : groups_of_participants({1, 2, 3, 4, 8})) {
        for (int const culprit : {0, size - 1}) {
            run_ranks({size}, [&](joinable::ThreadCommunicator& inner) {
                SmallMemory comm{inner};
                Params params = make_params({3, 4}, static_cast<float>(comm.rank()));
                std::vector<std::vector<float>> running(1, std::vector<float>(2));
                int const failures = failures_until_there_is_memory(comm, culprit, [&] {
                    joinable::DistributedDataParallel{comm, params, joinable::buffers(running)};
                });
                CHECK(failures == 3); // for buckets, for buffers, and for rank 0's values
                joinable::DistributedDataParallel ddp{comm, params, joinable::buffers(running)};
                CHECK(params[1].value == std::vector<float>(4, 0.0F));
                std::vector<std::vector<float>> state(1, std::vector<float>(2, 7.0F));
                CHECK(failures_until_there_is_memory(comm, culprit, [&] {
                          ddp.attach_state(state);
                      }) == 1);
            });
        }
    }
}

} // namespace
