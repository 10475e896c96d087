// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include <nccl.h>

#include <joinable/communicator/nccl/detail/api.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The bytes of a number, of which a dtype takes as many as it has.
using NcclScalar = std::array<std::byte, 8>;

/// `value` rounded to the dtype, a floating-point one.
[[nodiscard]] inline NcclScalar nccl_scalar(DType dtype, double value) {
    NcclScalar scalar{};
    visit_dtype(dtype, [&]<class T>(std::type_identity<T>) {
        if constexpr (sizeof(T) == 2) {
            T const rounded{static_cast<float>(value)};
            std::memcpy(&scalar, &rounded, sizeof(T));
        } else {
            auto const rounded = static_cast<T>(value);
            std::memcpy(&scalar, &rounded, sizeof(T));
        }
    });
    return scalar;
}

/// A sum of what each rank multiplies with a factor of its own, on the way. NCCL reads the factor when
/// this is made, and needs this no longer than until the function that is given it has returned.
class NcclScaledSum {
public:
    /// The dtype is a floating-point one, to which the factor is rounded. NCCL has launched what came
    /// before.
    NcclScaledSum(ncclComm_t comm, DType dtype, double factor) : comm_{comm} {
        NcclScalar scalar = nccl_scalar(dtype, factor);
        result_ = ncclRedOpCreatePreMulSum(
            &op_, scalar.data(), nccl_type(dtype), ncclScalarHostImmediate, comm
        );
    }
    /// The factor is read from device memory, each time that the collective runs.
    NcclScaledSum(ncclComm_t comm, DType dtype, void* factor) : comm_{comm} {
        result_ = ncclRedOpCreatePreMulSum(&op_, factor, nccl_type(dtype), ncclScalarDevice, comm);
    }
    NcclScaledSum(NcclScaledSum const&) = delete;
    NcclScaledSum& operator=(NcclScaledSum const&) = delete;
    ~NcclScaledSum() {
        if (result_ == ncclSuccess) {
            static_cast<void>(ncclRedOpDestroy(op_, comm_));
        }
    }

    /// Whether there is an operation.
    [[nodiscard]] ncclResult_t result() const noexcept { return result_; }
    [[nodiscard]] ncclRedOp_t op() const noexcept { return op_; }

private:
    ncclComm_t comm_;
    ncclRedOp_t op_ = ncclSum;
    ncclResult_t result_;
};

}}} // namespace joinable::v0::detail
