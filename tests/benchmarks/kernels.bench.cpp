// SPDX-License-Identifier: BSL-1.0
// What copy, scale_copy, add and fill_zero move per second, beside memcpy of as many bytes. Each kernel
// runs on tensors that stay in the second-level cache and on ones beyond the last level. Built twice;
// `cmake --build <folder> --target bench_kernels_table` compares both builds in one table.
#include <benchmark/benchmark.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include <joinable/device/copy.hpp>

namespace {

using joinable::AnyView;
using joinable::DType;

/// Bytes of each of the two tensors: half a megabyte together, and four times a cache of 32 MiB.
constexpr std::size_t in_cache = std::size_t{256} << 10U;
constexpr std::size_t in_memory = std::size_t{64} << 20U;

/// Memory that starts at a page, filled with a normal number in all dtypes. The same in every run: a
/// new one each time would cost more than what is measured.
template <bool is_target>
std::byte* memory(std::size_t bytes) {
    constexpr std::size_t most = in_memory * (is_target ? 1 : 2);
    static std::byte* const data =
        static_cast<std::byte*>(std::memset(std::aligned_alloc(4096, most), 0x35, most));
    return is_target ? static_cast<std::byte*>(std::memset(data, 0x35, bytes)) : data;
}

void memcpy_of_as_many_bytes(benchmark::State& state, std::size_t bytes) {
    std::byte* const from = memory<false>(bytes);
    std::byte* const to = memory<true>(bytes);
    for (auto _ : state) {
        std::memcpy(to, from, bytes);
        benchmark::ClobberMemory();
    }
    state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(2 * bytes));
}

enum class Layout { contiguous, transposed, every_second };

/// A source and a dense target with powers of two as extents: the common ones, and the worst for caches.
/// `passes` counts the tensors read and written per element.
template <class Kernel>
void run(
    benchmark::State& state,
    Kernel const& kernel,
    DType dtype,
    Layout layout,
    std::size_t bytes,
    std::size_t passes
) {
    std::size_t const size = joinable::size_of(dtype);
    std::size_t const n = std::bit_floor(static_cast<std::size_t>(std::sqrt(bytes / size)));
    std::size_t const m = bytes / size / n;
    std::size_t const step = layout == Layout::every_second ? 2 : 1;
    AnyView const source{
        memory<false>(bytes * step),
        dtype,
        {n, m},
        layout == Layout::transposed ? joinable::Shape{1, n} : joinable::Shape{m * step, step}
    };
    AnyView const target{memory<true>(bytes), dtype, {n, m}, {m, 1}};
    for (auto _ : state) {
        kernel(source, target);
        benchmark::ClobberMemory();
    }
    state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(passes * bytes));
}

char const* name_of(Layout layout) {
    switch (layout) {
    case Layout::contiguous: return "";
    case Layout::transposed: return " transposed";
    case Layout::every_second: break;
    }
    return " every_second";
}

template <class Kernel>
void add_benchmarks(
    std::string const& name, std::size_t passes, Layout layout, Kernel const& kernel, auto... dtypes
) {
    for (std::size_t const bytes : {in_cache, in_memory}) {
        std::string const suffix = bytes == in_cache ? "/cache" : "/memory";
        (benchmark::RegisterBenchmark(
             (name + name_of(layout) + " " + std::string{joinable::name_of(dtypes)} + suffix)
                 .c_str(),
             [=](benchmark::State& state) { run(state, kernel, dtypes, layout, bytes, passes); }
         ),
         ...);
    }
}

[[maybe_unused]] bool const registered = [] {
    benchmark::RegisterBenchmark("memcpy/cache", memcpy_of_as_many_bytes, in_cache);
    benchmark::RegisterBenchmark("memcpy/memory", memcpy_of_as_many_bytes, in_memory);
    auto const copy = [](auto const& from, auto const& to) { joinable::copy(from, to); };
    auto const scale = [](auto const& from, auto const& to) {
        joinable::scale_copy(from, 0.5, to);
    };
    auto const add = [](auto const& from, auto const& to) { joinable::add(from, to); };
    auto const fill = [](auto const&, auto const& to) { joinable::fill_zero(to); };
    using enum DType;
    add_benchmarks("copy", 2, Layout::contiguous, copy, i8, bf16, f32, f64);
    add_benchmarks("copy", 2, Layout::transposed, copy, i8, bf16, f32, f64);
    add_benchmarks("copy", 2, Layout::every_second, copy, i8, bf16, f32, f64);
    add_benchmarks("scale_copy", 2, Layout::contiguous, scale, f16, bf16, f32, f64);
    add_benchmarks("scale_copy", 2, Layout::transposed, scale, f16, bf16, f32, f64);
    add_benchmarks("scale_copy", 2, Layout::every_second, scale, f16, bf16, f32, f64);
    add_benchmarks("add", 3, Layout::contiguous, add, f16, bf16, f32, f64, i8, i32, i64);
    add_benchmarks("add", 3, Layout::transposed, add, f16, bf16, f32, f64);
    add_benchmarks("fill_zero", 1, Layout::contiguous, fill, f32);
    return true;
}();

} // namespace
