// SPDX-License-Identifier: BSL-1.0
#include <joinable/cuda_kernels.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <support/layouts.hpp>
#include <support/numbers.hpp>

#include <joinable/bucket/compression/detail/steps.hpp>
#include <joinable/cuda.hpp>
#include <joinable/device/copy.hpp>
#include <joinable/device/squares.hpp>
#include <joinable/device/step.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/optimizer/state_arrays.hpp>
#include <joinable/optimizer/update_rule.hpp>

namespace joinable_tests {

/// A rule of a user, which cuda_kernels() is told of.
struct SignDescent {
    template <class T>
    struct Update {
        static constexpr std::size_t state_count = 0;
        T rate;
        __host__ __device__ void operator()(T& value, T& gradient, T*) const {
            value = gradient > T{0} ? value - rate : gradient < T{0} ? value + rate : value;
        }
    };
    double rate = 0.125;

    [[nodiscard]] std::span<std::string_view const> state_names() const { return {}; }
    template <class T>
    void update(joinable::UpdateRange<T> const& range) const {
        visit_update<T>(range.step, [&](auto const& update) {
            for (std::size_t i = 0; i < range.size; ++i) {
                T gradient = range.gradients[i];
                update(range.values[i], gradient, nullptr);
            }
        });
    }
    template <class T, class F>
    decltype(auto) visit_update(std::uint64_t, F const& f) const {
        return f(Update<T>{static_cast<T>(rate)});
    }
};

} // namespace joinable_tests

namespace {

using joinable::AnyView;
using joinable::DType;
using joinable::detail::CudaCopy;
using joinable::detail::CudaSquares;
using joinable::detail::DeviceUpdate;
using joinable_tests::counted;
using joinable_tests::Layout;
using joinable_tests::layouts;
using joinable_tests::Numbers;
using joinable_tests::OwnedTensor;
using joinable_tests::SignDescent;

/// Calls f(thread) for each thread of each block of the launches of all copies, one after another.
/// Returns how many launches there are.
template <class F>
int for_each_thread(std::vector<CudaCopy> const& copies, F const& f) {
    int launches = 0;
    auto const run = [&](auto const& batch) {
        ++launches;
        for (std::uint32_t block = 0; block < batch.first_block[batch.count]; ++block) {
            for (unsigned int thread = 0; thread < joinable::detail::block_threads; ++thread) {
                f([&] { joinable::detail::copy_range(range_of_block(batch, block), thread); });
            }
        }
        return cudaSuccess;
    };
    CHECK(joinable::detail::for_each_launch(copies.data(), copies.size(), run) == cudaSuccess);
    return launches;
}
/// What launches do, by the host.
void run_on_host(std::vector<CudaCopy> const& copies) {
    for_each_thread(copies, [](auto const& thread) { thread(); });
}

/// layouts(), and larger ones of more than a block.
std::vector<Layout> all_layouts() {
    auto all = layouts();
    all.push_back({{3, 7, 11, 13}, {1001, 143, 13, 1}, {1001, 1, 91, 7}}); // to channels_last
    all.push_back({{3, 7, 11, 13}, {1001, 1, 91, 7}, {1001, 143, 13, 1}}); // and back
    all.push_back({{60, 100}, {0, 1}, {100, 1}});
    all.push_back({{2049}, {1}, {2}});
    all.push_back({{2048}, {2}, {1}});
    return all;
}

/// Runs `run(copies)` over copies of all layouts and dtypes at once, with and without a factor, and
/// zeros, on tensors that `run` can write; compares with numbers that were scaled one by one. With
/// `reads_factor` the factor is in memory, and a factor of 0 has NaNs to overwrite.
template <class Run>
void check_kernel(
    std::vector<DType> const& dtypes, double factor, Run const& run, bool reads_factor = false
) {
    std::vector<OwnedTensor> sources;
    std::vector<OwnedTensor> targets;
    std::vector<Numbers> expected;
    std::vector<CudaCopy> copies;
    for (DType const dtype : dtypes) {
        for (Layout const& layout : all_layouts()) {
            for (bool const is_zero : {false, true}) {
                std::size_t const count = joinable::numel(layout.extents);
                sources.emplace_back(dtype, layout.extents, layout.from);
                targets.emplace_back(dtype, layout.extents, layout.to);
                joinable_tests::write(
                    sources.back().view(),
                    factor == 0.0 ? Numbers(count, std::nan("")) : counted(count)
                );
                joinable_tests::write(targets.back().view(), Numbers(count, 99.0));
                expected.push_back(joinable_tests::read(sources.back().view()));
                for (double& number : expected.back()) {
                    number = is_zero || factor == 0.0
                                 ? 0.0
                                 : joinable_tests::times(dtype, number, factor);
                }
                copies.push_back(joinable::detail::cuda_copy(
                    is_zero ? nullptr : sources.back().view().data(),
                    is_zero ? layout.to : layout.from,
                    reads_factor ? 99.0 : factor,
                    targets.back().view()
                ));
                copies.back().factor_at = reads_factor ? &factor : nullptr;
            }
        }
    }
    run(copies);
    for (std::size_t i = 0; i < targets.size(); ++i) {
        CHECK(joinable_tests::read(targets[i].view()) == expected[i]);
        CHECK(targets[i].has_its_gaps());
    }
}

std::vector<DType> const floats{DType::f16, DType::bf16, DType::f32, DType::f64};
std::vector<DType> const all{
    DType::f16,
    DType::bf16,
    DType::f32,
    DType::f64,
    DType::i8,
    DType::u8,
    DType::i32,
    DType::u32,
    DType::i64,
    DType::u64
};

TEST_CASE("what each thread of a launch does copies, scales and zeroes: run by the host") {
    check_kernel(all, 1.0, run_on_host);
    check_kernel(floats, 1.0 / 3.0, run_on_host);
}

TEST_CASE("a factor in memory is read when a launch runs: 1 copies bits, 0 writes zeros over NaN") {
    check_kernel(all, 1.0, run_on_host, true);
    for (double const factor : {1.0 / 3.0, 0.0, -0.0}) {
        check_kernel(floats, factor, run_on_host, true);
    }
}

TEST_CASE("indices of 64 bits lead to the places of those of 32") {
    for (Layout const& layout : all_layouts()) {
        std::size_t const count = joinable::numel(layout.extents);
        OwnedTensor const from{DType::i32, layout.extents, layout.from};
        OwnedTensor const to{DType::i32, layout.extents, layout.to};
        joinable_tests::write(from.view(), counted(count));
        auto const copy =
            joinable::detail::cuda_copy(from.view().data(), layout.from, 1.0, to.view());
        for (unsigned int thread = 0; thread < joinable::detail::block_threads; ++thread) {
            joinable::detail::move_elements<std::uint64_t>(
                copy, joinable::detail::CopyBits<std::uint32_t>{}, false, 0, count, thread
            );
        }
        CHECK(joinable_tests::read(to.view()) == joinable_tests::read(from.view()));
        CHECK(to.has_its_gaps());
    }
}

TEST_CASE("a tensor is scaled in place once") {
    std::vector<float> numbers(3 * joinable::detail::block_bytes / sizeof(float) + 5, 3.0F);
    AnyView const view{numbers.data(), DType::f32, {numbers.size()}, {1}};
    run_on_host({joinable::detail::cuda_copy(numbers.data(), {1}, 0.5, view)});
    CHECK(numbers == std::vector<float>(numbers.size(), 1.5F));
}

TEST_CASE("threads beyond the last element read no memory beyond it") {
    std::size_t const step = std::size_t{1} << 40U; // what lies there ends the program
    float const from = 3;
    float to = 0;
    CudaCopy const copy{&from, &to, 1.0, nullptr, 1, DType::f32, 4, 1, {{1, step, step}}};
    run_on_host({copy});
    CHECK(to == from);
}

/// Copies of elements side by side: each dtype, sizes around those of words and blocks, and places
/// around a word's alignment. They lie in one source and one target, with gaps between them.
class SideBySide {
public:
    SideBySide(std::vector<DType> const& dtypes, double factor, bool has_source = true)
        : factor_{factor} {
        for (DType const dtype : dtypes) {
            std::size_t const size = joinable::size_of(dtype);
            std::size_t const block = joinable::detail::block_bytes / size;
            std::size_t const word = 16 / size;
            for (std::size_t const count :
                 {std::size_t{1},
                  word - 1,
                  word,
                  2 * word + 1,
                  3 * word - 1,
                  4 * word,
                  std::size_t{300},
                  block - 1,
                  block,
                  block + 1,
                  2 * block + word + 1}) {
                for (std::size_t const from : {std::size_t{0}, std::size_t{1}, word - 1}) {
                    for (std::size_t const to : {std::size_t{0}, std::size_t{1}, word / 2 + 1}) {
                        add(dtype, count, has_source, from, to);
                    }
                }
            }
        }
        source_.resize(end_);
        std::uint32_t state = 1;
        for (std::byte& byte : source_) { // a float of them is neither NaN nor infinite
            state = state * 1664525U + 1013904223U;
            byte = static_cast<std::byte>(1 + (state >> 24U) % 0x40U);
        }
        target_.assign(end_, gap);
        expected_ = target_;
        for (CudaCopy const& copy : places_) {
            expect(copy);
        }
    }

    [[nodiscard]] std::vector<std::byte> const& source() const { return source_; }
    [[nodiscard]] std::vector<std::byte>& target() { return target_; }
    /// With the source and the target in memory that is aligned.
    [[nodiscard]] std::vector<CudaCopy>
    copies(std::byte const* source, std::byte* target, double const* factor_at = nullptr) const {
        std::vector<CudaCopy> copies = places_;
        for (CudaCopy& copy : copies) {
            copy.from = copy.from == nullptr ? nullptr : source + offset_of(copy.from);
            copy.to = target + offset_of(copy.to);
            copy.factor_at = factor_at;
            copy.factor = factor_at == nullptr ? factor_ : 99.0;
        }
        return copies;
    }
    /// Whether all elements have been written, and nothing else.
    [[nodiscard]] bool is_right() const { return target_ == expected_; }
    static constexpr std::byte gap{0xa5};

private:
    /// Places are numbers of bytes here, counted from 1 because null is no source.
    static std::size_t offset_of(void const* place) {
        return reinterpret_cast<std::uintptr_t>(place) - 1;
    }
    void add(DType dtype, std::size_t count, bool has_source, std::size_t from, std::size_t to) {
        std::size_t const size = joinable::size_of(dtype);
        auto const place = [&](std::size_t element) {
            return reinterpret_cast<void*>(end_ + element * size + 1);
        };
        AnyView const view{place(to), dtype, {count}, {1}};
        places_.push_back(
            joinable::detail::cuda_copy(has_source ? place(from) : nullptr, {1}, factor_, view)
        );
        end_ += (count * size + 64 + 15) / 16 * 16;
    }
    void expect(CudaCopy const& copy) {
        std::byte* const to = expected_.data() + offset_of(copy.to);
        if (copy.from == nullptr || factor_ == 0.0) {
            std::fill_n(to, copy.count * joinable::size_of(copy.dtype), std::byte{0});
            return;
        }
        // Aligned for the host, which is tested elsewhere.
        joinable::visit_dtype(copy.dtype, [&]<class T>(std::type_identity<T>) {
            auto const from = std::make_unique<T[]>(copy.count);
            auto const result = std::make_unique<T[]>(copy.count);
            std::memcpy(from.get(), source_.data() + offset_of(copy.from), copy.count * sizeof(T));
            joinable::scale_copy(
                AnyView{from.get(), copy.dtype, {copy.count}, {1}},
                factor_,
                AnyView{result.get(), copy.dtype, {copy.count}, {1}}
            );
            std::memcpy(to, result.get(), copy.count * sizeof(T));
        });
    }

    double factor_;
    std::vector<CudaCopy> places_;
    std::size_t end_ = 64;
    std::vector<std::byte> source_;
    std::vector<std::byte> target_;
    std::vector<std::byte> expected_;
};
/// Calls check(copies, factor_at) for copies, zeros and factors in arguments and in memory.
template <class Check>
void for_each_side_by_side(Check const& check) {
    double const third = 1.0 / 3.0;
    double const zero = 0.0;
    double const one = 1.0;
    check(SideBySide{all, 1.0}, nullptr);
    check(SideBySide{{DType::u8, DType::i64}, 1.0, false}, nullptr);
    check(SideBySide{floats, third}, nullptr);
    check(SideBySide{floats, third}, &third);
    check(SideBySide{floats, 0.0}, &zero);
    check(SideBySide{all, 1.0}, &one);
}

TEST_CASE("elements side by side are moved in words, wherever they begin and end: run by the host"
) {
    for_each_side_by_side([](SideBySide copies, double const* factor_at) {
        run_on_host(copies.copies(copies.source().data(), copies.target().data(), factor_at));
        CHECK(copies.is_right());
    });
}

TEST_CASE("words are aligned in the target, and all that is read of the source is a part of it") {
    for (std::uintptr_t from = 1024; from < 1040; ++from) {
        for (std::uintptr_t to = 2048; to < 2064; ++to) {
            for (unsigned int bytes = 0; bytes < 200; ++bytes) {
                auto const [before, words, shift] =
                    joinable::detail::words_of_block(from, to, bytes);
                CHECK(words + 4 > bytes / 16); // at most 3 are left out
                if (words != 0) {
                    CHECK((to + before) % 16 == 0);
                    CHECK((from + before - shift) % 16 == 0);
                    CHECK(shift < 16);
                    CHECK(before - shift <= bytes);
                    unsigned int const read = words + (shift == 0 ? 0 : 1);
                    CHECK(before - shift + read * 16 <= bytes);
                    CHECK(before + words * 16 <= bytes);
                }
            }
        }
    }
}

TEST_CASE("one thread writes each byte of a copy, once") {
    constexpr std::size_t most = joinable::detail::block_bytes + 100;
    std::vector<std::byte> const source(most + 16, std::byte{1}); // both aligned as words are
    std::vector<std::byte> target(most + 16);
    for (std::size_t const bytes : {std::size_t{1}, std::size_t{50}, std::size_t{5000}, most}) {
        for (std::size_t const from : {0, 5, 15}) {
            for (std::size_t const to : {0, 15}) {
                AnyView const view{target.data() + to, DType::u8, {bytes}, {1}};
                std::vector<int> written(target.size());
                for_each_thread(
                    {joinable::detail::cuda_copy(source.data() + from, {1}, 1.0, view)},
                    [&](auto const& thread) {
                        thread();
                        for (std::size_t i = 0; i < target.size(); ++i) {
                            written[i] += static_cast<int>(target[i]);
                        }
                        std::fill(target.begin(), target.end(), std::byte{0});
                    }
                );
                std::vector<int> expected(target.size());
                std::fill_n(expected.begin() + static_cast<std::ptrdiff_t>(to), bytes, 1);
                CHECK(written == expected);
            }
        }
    }
}

TEST_CASE("a launch has room for as many copies as its comment says") {
    CHECK(joinable::detail::few_copies == 92);
    CHECK(joinable::detail::many_copies == (CUDART_VERSION >= 12010 ? 744 : 92));
    CHECK(joinable::detail::strided_in_launch == 16);
    auto const launches_of = [](std::size_t side_by_side, std::size_t strided) {
        std::vector<float> const from(2);
        std::vector<float> to(4);
        AnyView const wide{to.data(), DType::f32, {2}, {2}};
        AnyView const whole{to.data(), DType::f32, {2}, {1}};
        std::vector<CudaCopy> copies(
            side_by_side, joinable::detail::cuda_copy(from.data(), {1}, 1.0, whole)
        );
        copies.resize(
            side_by_side + strided, joinable::detail::cuda_copy(from.data(), {1}, 1.0, wide)
        );
        return for_each_thread(copies, [](auto const&) {});
    };
    CHECK(launches_of(0, 0) == 0);
    CHECK(launches_of(92, 0) == 1);
    CHECK(launches_of(744, 0) == (CUDART_VERSION >= 12010 ? 1 : 9));
    CHECK(launches_of(745, 0) == (CUDART_VERSION >= 12010 ? 2 : 9));
    CHECK(launches_of(0, 17) == 2);
    CHECK(launches_of(1, 1) == 2);
}

/// Runs the blocks of all launches of steps, on the host: whole blocks, in the order of their lanes.
void run_on_host(std::vector<joinable::detail::DeviceStep> const& steps) {
    namespace inner = joinable::detail;
    auto const run = [&](auto const& take, auto const& block) {
        CHECK(
            inner::for_each_batch<inner::StepBatch>(
                steps.data(),
                steps.size(),
                [&](inner::StepBatch const& batch) {
                    for (std::uint32_t k = 0; k < batch.first_block[batch.count]; ++k) {
                        block(range_of_block(batch, k));
                    }
                    return cudaSuccess;
                },
                take
            ) == cudaSuccess
        );
    };
    CHECK(
        inner::for_each_kind([&]<inner::StepKind kind>() {
            run(inner::TakeKind{kind},
                [](auto const& range) { inner::run_step<kind>(inner::HostBlock{}, range); });
            if (kind == inner::StepKind::multiply_left) {
                run(inner::TakeChunks{}, [](auto const& range) {
                    inner::add_chunks(inner::HostBlock{}, range.item.step, range.begin, range.end);
                });
            }
            return cudaSuccess;
        }) == cudaSuccess
    );
}

/// Numbers of a dtype in memory, which steps read and write.
class StepNumbers {
public:
    StepNumbers(DType dtype, std::size_t count, std::uint64_t seed) : tensor_{dtype, {count}, {1}} {
        Numbers numbers(count);
        for (std::size_t i = 0; i < count; ++i) {
            numbers[i] = joinable::detail::random_number<double>(seed, i);
        }
        joinable_tests::write(tensor_.view(), numbers);
    }
    [[nodiscard]] void* data() const { return tensor_.view().data(); }
    [[nodiscard]] joinable::Buffer buffer() const {
        return {data(), tensor_.view().numel(), tensor_.view().dtype()};
    }
    [[nodiscard]] Numbers numbers() const { return joinable_tests::read(tensor_.view()); }

private:
    OwnedTensor tensor_;
};

TEST_CASE("steps of reductions on a device compute what the host does: run by the host") {
    using joinable::detail::DeviceStep;
    using joinable::detail::StepKind;
    for (DType const dtype : floats) {
        for (joinable::detail::MatrixSize const size :
             {joinable::detail::MatrixSize{3, 4, 1}, {300, 5, 2}, {5, 700, 3}, {700, 300, 2}}) {
            CAPTURE(joinable::name_of(dtype));
            DType const number = dtype == DType::f64 ? DType::f64 : DType::f32;
            double const bound = number == DType::f64 ? 1e-12 : 1e-5;
            std::size_t const elements = size.rows * size.columns;
            std::size_t const lefts = size.rank * size.rows;
            std::size_t const rights = size.rank * size.columns;
            // On a device, and on the host.
            struct Memory {
                StepNumbers from, matrix, sum, left, right, own_left, own_right, product, rest,
                    room, random;
                double verdicts[3] = {1, 1, 0};
            };
            auto const make = [&] {
                return Memory{
                    {dtype, elements, 1},
                    {number, elements, 2},
                    {number, elements, 3},
                    {number, lefts, 4},
                    {number, rights, 5},
                    {number, lefts, 6},
                    {number, rights, 7},
                    {dtype, elements, 8},
                    {number, elements, 9},
                    {number, joinable::detail::numbers_of_chunks(size) + size.columns, 10},
                    {number, rights, 11}
                };
            };
            auto const steps_of = [&](Memory& memory) {
                auto const base = [&](StepKind kind, void const* from, void* to) {
                    DeviceStep step{.kind = kind, .dtype = number, .from_dtype = dtype};
                    step.from = from;
                    step.to = to;
                    step.left = memory.left.data();
                    step.right = memory.right.data();
                    step.room = memory.room.data();
                    step.number = 1e-8;
                    step.seed = 12;
                    step.size = size;
                    step.count = elements;
                    return step;
                };
                DeviceStep random = base(StepKind::fill_random, nullptr, memory.random.data());
                random.count = rights;
                DeviceStep orthogonal = base(StepKind::orthogonalize, nullptr, memory.right.data());
                DeviceStep add = base(StepKind::add, memory.from.data(), memory.sum.data());
                add.left = memory.matrix.data();
                DeviceStep product = base(StepKind::multiply, nullptr, memory.product.data());
                product.dtype = dtype;
                DeviceStep note =
                    base(StepKind::note_not_finite, memory.product.data(), &memory.verdicts[0]);
                DeviceStep keep =
                    base(StepKind::keep_rows, memory.random.data(), memory.own_right.data());
                keep.only_if = &memory.verdicts[0];
                DeviceStep rest =
                    base(StepKind::subtract, memory.matrix.data(), memory.rest.data());
                rest.only_if = &memory.verdicts[1];
                return std::vector<DeviceStep>{
                    joinable::detail::cast_step(
                        memory.from.buffer(), 1.0 / 3, memory.from.buffer()
                    ),
                    random,
                    orthogonal,
                    add,
                    base(StepKind::multiply_right, memory.matrix.data(), memory.own_left.data()),
                    base(StepKind::multiply_left, memory.matrix.data(), memory.own_right.data()),
                    product,
                    note,
                    keep,
                    rest
                };
            };
            Memory device = make();
            Memory host = make();
            run_on_host(steps_of(device));
            for (DeviceStep const& step : steps_of(host)) {
                joinable::detail::compute_on_host(step);
            }
            CHECK(device.from.numbers() == host.from.numbers());
            CHECK(device.random.numbers() == host.random.numbers());
            CHECK(device.right.numbers() == host.right.numbers());
            CHECK(device.sum.numbers() == host.sum.numbers());
            CHECK(device.product.numbers() == host.product.numbers());
            CHECK(device.own_right.numbers() == host.own_right.numbers());
            CHECK(device.own_right.numbers() == device.random.numbers());
            CHECK(device.rest.numbers() == host.rest.numbers());
            CHECK(device.verdicts[0] == 1);
            // The products with a matrix have an order of their own.
            Numbers const matrix = device.matrix.numbers();
            Numbers const right = device.right.numbers();
            Numbers const left = device.left.numbers();
            Numbers const own_left = device.own_left.numbers();
            for (std::size_t k = 0; k < lefts; ++k) {
                double sum = 0;
                for (std::size_t j = 0; j < size.columns; ++j) {
                    sum += matrix[k % size.rows * size.columns + j] *
                           right[k / size.rows * size.columns + j];
                }
                CHECK(std::abs(own_left[k] - sum) < bound * static_cast<double>(size.columns));
            }
            DeviceStep products = steps_of(device)[5];
            run_on_host({products});
            Numbers const own_right = device.own_right.numbers();
            for (std::size_t k = 0; k < rights; ++k) {
                double sum = 0;
                for (std::size_t i = 0; i < size.rows; ++i) {
                    sum += matrix[i * size.columns + k % size.columns] *
                           left[k / size.columns * size.rows + i];
                }
                CHECK(std::abs(own_right[k] - sum) < bound * static_cast<double>(size.rows));
            }
            // What is not finite is noted, and nothing is kept then.
            Numbers numbers = device.product.numbers();
            numbers.back() = std::nan("");
            joinable_tests::write({device.product.data(), dtype, {elements}, {1}}, numbers);
            Numbers const before = device.rest.numbers();
            DeviceStep note = steps_of(device)[7];
            DeviceStep rest = steps_of(device)[9];
            rest.only_if = &device.verdicts[0];
            rest.left = device.own_left.data();
            DeviceStep none = steps_of(device)[6];
            none.only_if = &device.verdicts[2];
            run_on_host({note, rest});
            CHECK(device.verdicts[0] == 0);
            CHECK(device.rest.numbers() == before);
            run_on_host({none});
            CHECK(device.product.numbers() == Numbers(elements));
        }
    }
}

TEST_CASE(
    "a cast computes in the wider type and rounds once, from each type to each: run by the host"
) {
    for (DType const from_dtype : floats) {
        for (DType const to_dtype : floats) {
            StepNumbers const from{from_dtype, 5000, 1};
            StepNumbers const device{to_dtype, 5000, 2};
            StepNumbers const host{to_dtype, 5000, 3};
            run_on_host({joinable::detail::cast_step(from.buffer(), 1.0 / 3, device.buffer())});
            joinable::detail::compute_on_host(
                joinable::detail::cast_step(from.buffer(), 1.0 / 3, host.buffer())
            );
            CHECK(device.numbers() == host.numbers());
            run_on_host({joinable::detail::cast_step({}, 3.0, {device.data(), 1, to_dtype})});
            CHECK(device.numbers()[0] == 3.0);
        }
    }
}

/// Arrays that a rule steps, one after another: values, gradients, masters, then state.
struct Stepped {
    static constexpr std::size_t arrays = 3;
    DType dtype;
    std::size_t count;
    std::vector<std::byte> values;
    std::vector<std::byte> gradients;
    std::vector<std::byte> masters;
    std::vector<std::byte> state;

    Stepped(DType type, std::size_t size) : dtype{type}, count{size} {
        Numbers of_values;
        Numbers of_gradients;
        for (std::size_t i = 0; i < size; ++i) {
            of_values.push_back(static_cast<double>(i * 37 % 101) / 53.0 - 0.9);
            of_gradients.push_back(static_cast<double>(i * 61 % 89) / 37.0 - 1.1);
        }
        DType const computed = joinable::size_of(dtype) == 2 ? DType::f32 : dtype;
        values = bytes_of(dtype, of_values);
        gradients = bytes_of(dtype, of_gradients);
        masters = bytes_of(DType::f32, of_values);
        state = bytes_of(computed, Numbers(arrays * size));
    }
    static std::vector<std::byte> bytes_of(DType dtype, Numbers const& numbers) {
        std::vector<std::byte> bytes(numbers.size() * joinable::size_of(dtype) + 1); // never null
        joinable_tests::write(AnyView{bytes.data(), dtype, {numbers.size()}, {1}}, numbers);
        return bytes;
    }
    [[nodiscard]] DeviceUpdate update(std::uint64_t step) {
        void* const own = joinable::size_of(dtype) == 2 ? masters.data() : nullptr;
        return {values.data(), gradients.data(), own, state.data(), count, count, step, dtype};
    }
    bool operator==(Stepped const&) const = default;
};

/// What launches do, by the host: each thread of each block, one after another. Returns how many.
template <class Rule>
int step_by_threads(Rule const& rule, std::vector<DeviceUpdate> const& updates) {
    using namespace joinable::detail;
    int launches = 0;
    auto const step =
        [&]<class Stored>(DeviceUpdate const* first, std::size_t some, Stored const*) {
            using Number = typename StoredElement<Stored>::Number;
            return rule.template visit_update<Number>(first->step, [&](auto const& update) {
                for (std::size_t next = 0; next < some;) {
                    UpdateBatch batch;
                    next += fill_batch(batch, first + next, some - next);
                    ++launches;
                    for (std::uint32_t block = 0; block < batch.first_block[batch.count]; ++block) {
                        for (unsigned int thread = 0; thread < block_threads; ++thread) {
                            update_in_block<Stored>(batch, update, block, thread);
                        }
                    }
                }
                return cudaSuccess;
            });
        };
    CHECK(for_each_step(updates.data(), updates.size(), step) == cudaSuccess);
    return launches;
}

template <class F>
void for_each_rule(F const& f) {
    f(joinable::Sgd{.learning_rate = 0.1, .weight_decay = 0.01});
    f(joinable::Sgd{.learning_rate = 0.1, .momentum = 0.9, .dampening = 0.1, .maximize = true});
    f(joinable::Sgd{.learning_rate = 0.1, .momentum = 0.9, .nesterov = true});
    f(joinable::Adam{.learning_rate = 0.02, .weight_decay = 0.1});
    f(joinable::Adam{.learning_rate = 0.02, .amsgrad = true});
    f(joinable::AdamW{.learning_rate = 0.02, .weight_decay = 0.1, .amsgrad = true});
}

/// Each dtype with few and many elements, which begin at step 1 and at step 5.
std::vector<Stepped> all_stepped() {
    std::vector<Stepped> all;
    for (DType const dtype : {DType::f16, DType::bf16, DType::f32, DType::f64}) {
        for (std::size_t const count : {0, 1, 300, 2048, 5000}) {
            all.emplace_back(dtype, count);
        }
    }
    return all;
}
std::vector<DeviceUpdate> updates_of(std::vector<Stepped>& stepped, std::uint64_t step) {
    std::vector<DeviceUpdate> updates;
    for (std::size_t i = 0; i < stepped.size(); ++i) {
        updates.push_back(stepped[i].update(step + (i % 5 == 4 ? 4 : 0)));
    }
    return updates;
}

TEST_CASE("what each thread of a launch does steps by the bits of the host: run by the host") {
    for_each_rule([](auto const& rule) {
        std::vector<Stepped> by_threads = all_stepped();
        std::vector<Stepped> by_rule = all_stepped();
        for (std::uint64_t step = 1; step <= 3; ++step) {
            // For each dtype one launch of four parameters and one of the last, which has more steps.
            CHECK(step_by_threads(rule, updates_of(by_threads, step)) == 8);
            for (DeviceUpdate const& update : updates_of(by_rule, step)) {
                auto const erased = joinable::detail::device_rule(rule);
                erased.on_host(erased.settings, update);
            }
            CHECK(by_threads == by_rule);
        }
    });
}

TEST_CASE("masters are loaded from values, whose bits stay") {
    std::vector<Stepped> stepped;
    stepped.emplace_back(DType::f16, 3000);
    stepped.emplace_back(DType::bf16, 3000);
    for (Stepped& one : stepped) {
        auto const values = one.values;
        one.masters.assign(one.masters.size(), std::byte{0});
        DeviceUpdate update = one.update(1);
        update.gradients = update.values;
        step_by_threads(joinable::detail::LoadMasters{}, {update});
        CHECK(one.values == values);
        AnyView const view{one.values.data(), one.dtype, {one.count}, {1}};
        AnyView const masters{one.masters.data(), DType::f32, {one.count}, {1}};
        CHECK(joinable_tests::read(masters) == joinable_tests::read(view));
    }
}

TEST_CASE("kernels know the rules of the library, and those that they are told of") {
    auto const knows = [](joinable::CudaKernels const& kernels, auto const& rule) {
        return kernels.has_rule(joinable::detail::device_rule(rule));
    };
    joinable::CudaKernels const plain = joinable::cuda_kernels();
    joinable::CudaKernels const more = joinable::cuda_kernels<SignDescent>();
    for_each_rule([&](auto const& rule) {
        CHECK(knows(plain, rule));
        CHECK(knows(more, rule));
    });
    CHECK(knows(plain, joinable::detail::LoadMasters{}));
    CHECK(!knows(plain, SignDescent{}));
    CHECK(knows(more, SignDescent{}));
    std::vector<Stepped> by_threads = all_stepped();
    std::vector<Stepped> by_rule = all_stepped();
    step_by_threads(SignDescent{}, updates_of(by_threads, 1));
    SignDescent const rule;
    for (DeviceUpdate const& update : updates_of(by_rule, 1)) {
        joinable::detail::device_rule(rule).on_host(&rule, update);
    }
    CHECK(by_threads == by_rule);
}

TEST_CASE("an update's arguments fit into a launch") {
    CHECK(sizeof(joinable::detail::UpdateBatch) + 256 <= 4096);
}

/// Tensors of all layouts and some sizes, with numbers of many magnitudes, and their sums.
struct Squared {
    std::vector<OwnedTensor> tensors;
    std::vector<double> sums;

    Squared() {
        for (DType const dtype : floats) {
            for (Layout const& layout : layouts()) {
                add(dtype, layout.extents, layout.to);
            }
            for (int const count : {255, 2048, 2049, 70000}) {
                add(dtype, {static_cast<std::size_t>(count)}, {1});
            }
        }
        sums.assign(tensors.size(), 0.0);
    }
    void add(DType dtype, joinable::Shape const& extents, joinable::Shape const& strides) {
        tensors.emplace_back(dtype, extents, strides);
        Numbers numbers;
        for (std::size_t i = 0; i < tensors.back().view().numel(); ++i) {
            numbers.push_back(
                std::sin(static_cast<double>(i + 1)) * static_cast<double>(1 << i * 7 % 11)
            );
        }
        joinable_tests::write(tensors.back().view(), numbers);
    }
    [[nodiscard]] std::vector<CudaSquares> squares(std::vector<double>& partials) {
        std::vector<CudaSquares> list;
        std::size_t runs = 0;
        for (std::size_t i = 0; i < tensors.size(); ++i) {
            AnyView const& view = tensors[i].view();
            joinable::detail::IndexOrder const order{view.extents(), view.strides()};
            list.push_back({view.data(), &sums[i], nullptr, view.numel(), order, view.dtype()});
            runs += joinable::detail::square_blocks(view.numel());
        }
        partials.assign(runs, 99.0);
        double* next = partials.data();
        for (CudaSquares& one : list) {
            one.partials = next;
            next += joinable::detail::square_blocks(one.count);
        }
        return list;
    }
    /// The host's sums, which are tested elsewhere.
    void check() const {
        for (std::size_t i = 0; i < tensors.size(); ++i) {
            CHECK(sums[i] == joinable::detail::sum_of_squares(tensors[i].view()));
        }
    }
};

/// What a block's threads do with their lanes, one after another.
template <class Lane>
double fold_by_threads(Lane const& lane) {
    std::vector<double> lanes;
    for (unsigned int thread = 0; thread < joinable::detail::block_threads; ++thread) {
        lanes.push_back(lane(thread));
    }
    for (std::size_t half = lanes.size() / 2; half != 0; half /= 2) {
        for (std::size_t thread = 0; thread < half; ++thread) {
            joinable::detail::fold_lane(lanes.data(), half, thread);
        }
    }
    return lanes.front();
}

TEST_CASE("what each thread of a launch does sums squares by the bits of the host: run by the host"
) {
    Squared squared;
    std::vector<double> partials;
    std::vector<CudaSquares> const list = squared.squares(partials);
    int launches = 0;
    auto const error = joinable::detail::for_each_batch<joinable::detail::SquaresBatch>(
        list.data(),
        list.size(),
        [&](joinable::detail::SquaresBatch const& batch) {
            ++launches;
            for (std::uint32_t block = 0; block < batch.first_block[batch.count]; ++block) {
                joinable::detail::keep_run(
                    batch, block, fold_by_threads([&](unsigned int thread) {
                        return joinable::detail::lane_of_run(batch, block, thread);
                    })
                );
            }
            for (std::uint32_t i = 0; i < batch.count; ++i) {
                *batch.items[i].sum += fold_by_threads([&](unsigned int thread) {
                    return joinable::detail::lane_of_tensor(batch.items[i], thread);
                });
            }
            return cudaSuccess;
        }
    );
    CHECK(error == cudaSuccess);
    CHECK(launches == 4); // 72 tensors with elements, 22 at a time
    squared.check();
}

bool has_no_gpu() {
    int count = 0;
    return cudaGetDeviceCount(&count) != cudaSuccess || count == 0;
}

TEST_CASE("the kernels step by the bits of the host on a GPU" * doctest::skip(has_no_gpu())) {
    cudaStream_t stream = nullptr;
    REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    auto const step_there = [&](auto const& rule, std::vector<Stepped>& stepped, std::uint64_t step
                            ) {
        std::vector<DeviceUpdate> updates = updates_of(stepped, step);
        std::vector<std::pair<void*, std::vector<std::byte>*>> blocks;
        auto const upload = [&](std::vector<std::byte>& from) {
            void* block = nullptr;
            REQUIRE(cudaMalloc(&block, from.size()) == cudaSuccess);
            REQUIRE(
                cudaMemcpyAsync(block, from.data(), from.size(), cudaMemcpyHostToDevice, stream) ==
                cudaSuccess
            );
            blocks.emplace_back(block, &from);
            return block;
        };
        for (std::size_t i = 0; i < updates.size(); ++i) {
            updates[i].values = upload(stepped[i].values);
            updates[i].gradients = upload(stepped[i].gradients);
            updates[i].masters =
                updates[i].masters == nullptr ? nullptr : upload(stepped[i].masters);
            updates[i].state = upload(stepped[i].state);
        }
        REQUIRE(
            joinable::cuda_kernels<SignDescent>().update(
                joinable::detail::device_rule(rule), updates.data(), updates.size(), stream
            ) == cudaSuccess
        );
        for (auto const& [block, to] : blocks) {
            REQUIRE(
                cudaMemcpyAsync(to->data(), block, to->size(), cudaMemcpyDeviceToHost, stream) ==
                cudaSuccess
            );
        }
        REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
        for (auto const& [block, to] : blocks) {
            (void)cudaFree(block);
        }
    };
    auto const check = [&](auto const& rule) {
        std::vector<Stepped> there = all_stepped();
        std::vector<Stepped> here = all_stepped();
        for (std::uint64_t step = 1; step <= 3; ++step) {
            step_there(rule, there, step);
            for (DeviceUpdate const& update : updates_of(here, step)) {
                joinable::detail::device_rule(rule).on_host(&rule, update);
            }
            CHECK(there == here);
        }
    };
    for_each_rule(check);
    check(SignDescent{});
    (void)cudaStreamDestroy(stream);
}

TEST_CASE(
    "the kernels sum squares by the bits of the host on a GPU" * doctest::skip(has_no_gpu())
) {
    cudaStream_t stream = nullptr;
    REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    for (int time = 0; time < 3; ++time) { // always the same
        Squared squared;
        std::vector<double> partials;
        std::vector<CudaSquares> list = squared.squares(partials);
        std::vector<void*> blocks;
        auto const upload = [&](void const* from, std::size_t bytes) {
            void* block = nullptr;
            REQUIRE(cudaMalloc(&block, bytes + 1) == cudaSuccess);
            REQUIRE(
                cudaMemcpyAsync(block, from, bytes, cudaMemcpyHostToDevice, stream) == cudaSuccess
            );
            blocks.push_back(block);
            return block;
        };
        auto* const sums =
            static_cast<double*>(upload(squared.sums.data(), squared.sums.size() * sizeof(double)));
        auto* next =
            static_cast<double*>(upload(partials.data(), partials.size() * sizeof(double)));
        for (std::size_t i = 0; i < list.size(); ++i) {
            CudaSquares& one = list[i];
            std::size_t const reach = one.count == 0 ? 0 : one.order.place_of(one.count - 1) + 1;
            one.from = upload(one.from, reach * joinable::size_of(one.dtype));
            one.sum = sums + i;
            one.partials = next;
            next += joinable::detail::square_blocks(one.count);
        }
        REQUIRE(
            joinable::cuda_kernels().sum_squares(list.data(), list.size(), stream) == cudaSuccess
        );
        REQUIRE(
            cudaMemcpyAsync(
                squared.sums.data(),
                sums,
                squared.sums.size() * sizeof(double),
                cudaMemcpyDeviceToHost,
                stream
            ) == cudaSuccess
        );
        REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
        for (void* const block : blocks) {
            (void)cudaFree(block);
        }
        squared.check();
    }
    (void)cudaStreamDestroy(stream);
}

/// Memory of the GPU, freed at the end.
class GpuMemory {
public:
    explicit GpuMemory(std::size_t bytes) {
        REQUIRE(cudaMalloc(&data_, bytes + 1) == cudaSuccess); // never null
    }
    GpuMemory(GpuMemory const&) = delete;
    GpuMemory& operator=(GpuMemory const&) = delete;
    GpuMemory(GpuMemory&& other) noexcept : data_{std::exchange(other.data_, nullptr)} {}
    GpuMemory& operator=(GpuMemory&&) = delete;
    ~GpuMemory() { (void)cudaFree(data_); }

    template <class T = std::byte>
    [[nodiscard]] T* data() const {
        return static_cast<T*>(data_);
    }
    void upload(void const* from, std::size_t bytes) const {
        REQUIRE(cudaMemcpy(data_, from, bytes, cudaMemcpyHostToDevice) == cudaSuccess);
    }
    void download(void* to, std::size_t bytes) const {
        REQUIRE(cudaMemcpy(to, data_, bytes, cudaMemcpyDeviceToHost) == cudaSuccess);
    }

private:
    void* data_ = nullptr;
};
void run_on_gpu(std::vector<CudaCopy> const& copies) {
    REQUIRE(
        joinable::cuda_kernels().run(copies.data(), copies.size(), cudaStreamPerThread) ==
        cudaSuccess
    );
    REQUIRE(cudaStreamSynchronize(cudaStreamPerThread) == cudaSuccess);
}

TEST_CASE("all kernels load on a GPU" * doctest::skip(has_no_gpu())) {
    CHECK(joinable::cuda_kernels<SignDescent>().load() == cudaSuccess);
}

TEST_CASE(
    "the kernels copy, scale and zero by any strides on a GPU" * doctest::skip(has_no_gpu())
) {
    auto const run = [](std::vector<CudaCopy> const& copies) {
        std::vector<CudaCopy> there = copies;
        std::vector<GpuMemory> blocks;
        auto const upload = [&](void const* from, std::size_t bytes) {
            blocks.emplace_back(bytes);
            blocks.back().upload(from, bytes);
            return blocks.back().data();
        };
        auto const reach = [](CudaCopy const& copy, std::size_t CudaCopy::Level::* step) {
            std::size_t last = 0;
            for (std::size_t l = 0; l < copy.levels; ++l) {
                last += copy.level[l].extent == 0
                            ? 0
                            : (copy.level[l].extent - 1) * copy.level[l].*step;
            }
            return (last + 1) * joinable::size_of(copy.dtype);
        };
        for (CudaCopy& copy : there) {
            copy.to = upload(copy.to, reach(copy, &CudaCopy::Level::to));
            if (copy.from != nullptr) {
                copy.from = upload(copy.from, reach(copy, &CudaCopy::Level::from));
            }
            if (copy.factor_at != nullptr) {
                copy.factor_at =
                    reinterpret_cast<double const*>(upload(copy.factor_at, sizeof(double)));
            }
        }
        run_on_gpu(there);
        for (std::size_t i = 0; i < copies.size(); ++i) {
            std::size_t const bytes = reach(copies[i], &CudaCopy::Level::to);
            REQUIRE(
                cudaMemcpy(copies[i].to, there[i].to, bytes, cudaMemcpyDeviceToHost) == cudaSuccess
            );
        }
    };
    check_kernel(all, 1.0, run);
    check_kernel(floats, 1.0 / 3.0, run);
    check_kernel(all, 1.0, run, true);
    check_kernel(floats, 1.0 / 3.0, run, true);
    check_kernel(floats, 0.0, run, true);
}

TEST_CASE(
    "elements side by side are moved in words, wherever they begin and end: on a GPU" *
    doctest::skip(has_no_gpu())
) {
    for_each_side_by_side([](SideBySide copies, double const* factor_at) {
        std::size_t const bytes = copies.target().size();
        GpuMemory const source{bytes};
        GpuMemory const target{bytes};
        GpuMemory const factor{sizeof(double)};
        source.upload(copies.source().data(), bytes);
        target.upload(copies.target().data(), bytes);
        if (factor_at != nullptr) {
            factor.upload(factor_at, sizeof(double));
            factor_at = factor.data<double>();
        }
        run_on_gpu(copies.copies(source.data(), target.data(), factor_at));
        target.download(copies.target().data(), bytes);
        CHECK(copies.is_right());
    });
}

__host__ __device__ std::uint8_t byte_at(std::size_t place) {
    return static_cast<std::uint8_t>((place * 0x9e3779b97f4a7c15U) >> 56U);
}
__global__ void write_bytes(std::uint8_t* to, std::size_t count) {
    for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
         i += std::size_t{gridDim.x} * blockDim.x) {
        to[i] = byte_at(i);
    }
}
/// Counts bytes that are not those of every `step`-th place from `first` on.
__global__ void count_wrong(
    std::uint8_t const* bytes,
    std::size_t count,
    std::size_t first,
    std::size_t step,
    unsigned long long* wrong
) {
    for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
         i += std::size_t{gridDim.x} * blockDim.x) {
        if (bytes[i] != byte_at(first + i * step)) {
            atomicAdd(wrong, 1ULL);
        }
    }
}

TEST_CASE("copies of 3 GiB, and from places beyond 4 GiB, on a GPU" * doctest::skip(has_no_gpu())) {
    constexpr std::size_t count = (std::size_t{3} << 30U) + 5;
    std::size_t free = 0;
    std::size_t total = 0;
    REQUIRE(cudaMemGetInfo(&free, &total) == cudaSuccess);
    if (free < 3 * count + (std::size_t{1} << 30U)) {
        MESSAGE("skipped: the GPU has no room for 10 GiB");
        return;
    }
    GpuMemory const source{2 * count};
    GpuMemory const target{count + 1};
    GpuMemory const wrong{sizeof(unsigned long long)};
    write_bytes<<<4096, 256>>>(source.data<std::uint8_t>(), 2 * count);
    struct Case {
        std::size_t from, to, step;
    };
    for (auto const [from, to, step] :
         {Case{0, 0, 1}, Case{1, 0, 1}, Case{2, 1, 1}, Case{0, 0, 2}}) {
        REQUIRE(cudaMemset(target.data(), 0, count + 1) == cudaSuccess);
        unsigned long long found = 0;
        wrong.upload(&found, sizeof(found));
        REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
        AnyView const view{target.data() + to, DType::u8, {count}, {1}};
        run_on_gpu({joinable::detail::cuda_copy(source.data() + from, {step}, 1.0, view)});
        count_wrong<<<4096, 256>>>(
            target.data<std::uint8_t>() + to, count, from, step, wrong.data<unsigned long long>()
        );
        wrong.download(&found, sizeof(found));
        CHECK(found == 0);
    }
}

} // namespace
