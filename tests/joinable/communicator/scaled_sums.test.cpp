// SPDX-License-Identifier: BSL-1.0
#include <joinable/communicator/scaled_sums.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/numbers.hpp>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/shared_memory/thread.hpp>

namespace {

using joinable::DType;
using namespace joinable_tests;
namespace detail = joinable::detail;

struct RoundingCommunicator : joinable::ThreadCommunicator {
    static constexpr bool rounds_factors = true;
};
struct DeviceCommunicator : joinable::ThreadCommunicator {
    using device_type = joinable::Device;
};
struct ExactDeviceCommunicator : DeviceCommunicator {
    static constexpr bool rounds_factors = false;
};
static_assert(!detail::rounds_factors<joinable::ThreadCommunicator>());
static_assert(detail::rounds_factors<RoundingCommunicator>());
static_assert(detail::rounds_factors<DeviceCommunicator>());
static_assert(!detail::rounds_factors<ExactDeviceCommunicator>());

bool is_refused(double factor, DType dtype) {
    try {
        detail::check_rounding(factor, dtype);
    } catch (joinable::ContractViolation const& error) {
        CHECK(std::string{error.what()}.find("call use_kernels()") != std::string::npos);
        return true;
    }
    return false;
}

TEST_CASE("a factor is refused where f16 holds it less closely than a gradient") {
    CHECK_FALSE(is_refused(0.0, DType::f16));
    int refused = 0;
    for (double divisor = 1; divisor < 1e9; divisor = std::floor(divisor * 1.1) + 1) {
        double const factor = 1 / divisor;
        // 11 bits, or as many as are above 2^-24
        int const last = std::max(std::ilogb(factor) - 10, -24);
        double const rounded = std::ldexp(std::nearbyint(std::ldexp(factor, -last)), last);
        CAPTURE(divisor);
        CHECK(is_refused(factor, DType::f16) == (std::abs(rounded - factor) > factor / 1024));
        CHECK(is_refused(-factor, DType::f16) == is_refused(factor, DType::f16));
        refused += is_refused(factor, DType::f16) ? 1 : 0;
        for (DType const dtype : {DType::bf16, DType::f32, DType::f64}) {
            CHECK_FALSE(is_refused(factor, dtype));
        }
    }
    CHECK(refused > 50);
}

/// Whether `got` is the sum of `factor * (rank + 1) * number` over ranks. Each term is rounded, and the
/// sum at each further rank.
[[maybe_unused]] bool
is_scaled_sum(Numbers const& got, DType dtype, int size, double factor, double number) {
    double const exact = factor * number * size * (size + 1) / 2;
    double const unit = dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
    return std::all_of(got.begin(), got.end(), [&](double sum) {
        return std::abs(sum - exact) <= (size + 1) * unit * exact;
    });
}

TEST_CASE("a sum that does not round factors is that of doubles, however small they are") {
    over_ranks({1, 2, 3, 4, 8}, []<class Comm>([[maybe_unused]] Comm& comm) {
        if constexpr (joinable::ScalesScatteredSums<Comm> && !detail::rounds_factors<Comm>()) {
            auto const size = static_cast<std::size_t>(comm.size());
            double const number = 4096; // times each rank, and a sum, in both dtypes
            for (double const tokens : {1e3, 3e6, 2e7, 4e7}) {
                double const factor = 1 / tokens;
                for (DType const dtype : {DType::f16, DType::bf16}) {
                    OwnedTensor const whole{dtype, {2 * size}, {1}};
                    OwnedTensor const part{dtype, {2}, {1}};
                    write(whole.view(), Numbers(2 * size, number * (comm.rank() + 1)));
                    joinable::Buffer const in{whole.view().data(), 2 * size, dtype};
                    joinable::Buffer const out{part.view().data(), 2, dtype};
                    comm.reduce_scatter(in, out, joinable::ReduceOp::sum, factor).wait();
                    CHECK(is_scaled_sum(read(part.view()), dtype, comm.size(), factor, number));
                    write(part.view(), Numbers(2));
                    std::vector<std::size_t> const counts(size, 2);
                    comm.reduce_scatter(in, out, joinable::ReduceOp::sum, factor, counts).wait();
                    CHECK(is_scaled_sum(read(part.view()), dtype, comm.size(), factor, number));
                    comm.all_reduce(in, joinable::ReduceOp::sum, factor).wait();
                    CHECK(is_scaled_sum(read(whole.view()), dtype, comm.size(), factor, number));
                }
            }
        }
    });
}

} // namespace
