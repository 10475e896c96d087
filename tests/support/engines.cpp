// SPDX-License-Identifier: BSL-1.0
#include <support/engines.hpp>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include <doctest/doctest.h>
#include <support/offsets.hpp>
#include <support/process_ranks.hpp>
#include <support/ranks.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/step.hpp>

namespace {

using joinable_tests::EngineNet;
using MakeNet = std::function<std::unique_ptr<EngineNet>()>;

constexpr double rate = 0.4;

std::vector<std::vector<int>> batches_of(int rank, int world) {
    std::vector<std::vector<int>> batches;
    int sample = 100 * rank;
    int const count = world > 1 && rank == 1 ? 0 : 2 + rank % 3;
    for (int b = 0; b < count; ++b) {
        std::vector<int>& batch = batches.emplace_back();
        for (int i = 0; i <= (rank + 2 * b) % 5; ++i) {
            batch.push_back(sample++);
        }
    }
    return batches;
}

std::vector<double> train_alone(MakeNet const& make, int world) {
    auto const net = make();
    for (std::size_t round = 0;; ++round) {
        std::vector<int> samples;
        for (int rank = 0; rank < world; ++rank) {
            auto const batches = batches_of(rank, world);
            if (round < batches.size()) {
                samples.insert(samples.end(), batches[round].begin(), batches[round].end());
            }
        }
        if (samples.empty()) {
            return net->numbers();
        }
        net->backward(samples);
        net->descend(rate);
    }
}

template <class Comm>
std::vector<double> train_together(MakeNet const& make, Comm& comm) {
    auto const net = make();
    if (comm.rank() != 0) {
        net->backward({7});
        net->descend(0.1);
    }
    // So that each rank ends with what its own steps made of its values.
    joinable::DistributedDataParallel ddp{comm, net->parameters(), {.sync_at_end = false}};
    CHECK(net->numbers() == make()->numbers());
    joinable::Step step{comm, [&] { net->descend(rate); }};
    joinable::Join guard{joinable::participants(ddp, step)};
    for (std::vector<int> const& batch : batches_of(comm.rank(), comm.size())) {
        ddp.forward([] {}, {.weight = batch.size()});
        ddp.backward([&](auto ready) {
            net->backward(batch);
            for (std::size_t i = 0; i < 4; ++i) {
                ready(i);
            }
        });
        step.step();
    }
    guard.finish();
    return net->numbers();
}

template <class Comm>
void check_rank(MakeNet const& make, Comm& comm) {
    std::vector<double> const alone = train_alone(make, comm.size());
    std::vector<double> const together = train_together(make, comm);
    std::vector<double> const before = make()->numbers();
    REQUIRE(alone.size() == 4 * 3 + 4 + 2 * 4 + 2);
    REQUIRE(together.size() == alone.size());
    for (std::size_t i = 0; i < alone.size(); ++i) {
        CHECK(std::abs(together[i] - alone[i]) < 1e-13);
        CHECK(std::abs(before[i] - alone[i]) > 1e-6);
    }
}

} // namespace

void joinable_tests::check_layout(
    joinable::AnyView const& view,
    joinable::Shape const& extents,
    joinable::Shape const& strides,
    std::vector<void const*> const& elements
) {
    CHECK(view.extents() == extents);
    CHECK(view.strides() == strides);
    std::vector<std::size_t> const offsets = offsets_of(extents, strides);
    REQUIRE(elements.size() == offsets.size());
    for (std::size_t i = 0; i < elements.size(); ++i) {
        auto const* const data = static_cast<std::byte const*>(view.data());
        CHECK(elements[i] == data + offsets[i] * size_of(view.dtype()));
    }
}

void joinable_tests::check_training(MakeNet const& make) {
    run_ranks({1, 2, 3, 4, 8}, [&](joinable::ThreadCommunicator& comm) { check_rank(make, comm); });
    run_process_ranks(
        {3},
        [&](joinable::ProcessCommunicator& comm) { check_rank(make, comm); },
        {.other_threads = true} // of a BLAS, which starts its own again in a forked process
    );
}
