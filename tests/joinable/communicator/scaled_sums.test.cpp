// SPDX-License-Identifier: BSL-1.0
#include <joinable/communicator/scaled_sums.hpp>

#include <algorithm>
#include <cmath>
#include <string>

#include <doctest/doctest.h>

#include <joinable/communicator/shared_memory/thread.hpp>

namespace {

using joinable::DType;
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

} // namespace
