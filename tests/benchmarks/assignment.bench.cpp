// SPDX-License-Identifier: BSL-1.0
// Nanoseconds per tensor of bucket assignment with the default caps.
#include <benchmark/benchmark.h>

#include <cstddef>
#include <vector>

#include <joinable/bucket/assignment.hpp>
#include <joinable/tensor/any_view.hpp>

namespace {

void bucket_assignment(benchmark::State& state) {
    auto const count = static_cast<std::size_t>(state.range(0));
    std::vector<joinable::AnyView> views;
    for (std::size_t i = 0; i < count; ++i) { // sizes like those of a convolutional network
        std::size_t const numel = i % 3 == 0 ? 147'456 : 256;
        views.emplace_back(
            nullptr, joinable::DType::f32, joinable::Shape{numel}, joinable::Shape{1}
        );
    }
    for (auto _ : state) {
        benchmark::DoNotOptimize(joinable::compute_bucket_assignment_by_size(
            views, {std::size_t{1} << 20U, std::size_t{25} << 20U}
        ));
    }
    state.counters["per tensor"] = benchmark::Counter(
        static_cast<double>(count),
        benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert
    );
}
BENCHMARK(bucket_assignment)->Arg(160)->Arg(1000)->Arg(10'000);

} // namespace
