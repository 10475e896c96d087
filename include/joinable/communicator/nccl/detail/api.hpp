// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <joinable/communicator/communicator.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/dtype.hpp>

/// @file
/// Maps the types and errors of NCCL and CUDA to those of this library, and back.

namespace joinable { inline namespace v0 { namespace detail {

static_assert(
    NCCL_VERSION_CODE >= NCCL_VERSION(2, 18, 1),
    "joinable/nccl.hpp needs NCCL 2.18.1 or later, which has ncclCommSplit"
);

/// NCCL has no complex numbers: those are two elements of this type. It has no integers of 16 bits and
/// no booleans either: the former are only moved, the latter are bytes.
[[nodiscard]] constexpr ncclDataType_t nccl_type(DType dtype) noexcept {
    constexpr std::array types{
        ncclFloat16,
        ncclBfloat16,
        ncclFloat32,
        ncclFloat64,
        ncclInt8,
        ncclUint8,
        ncclInt32,
        ncclUint32,
        ncclInt64,
        ncclUint64,
        ncclUint8,
        ncclFloat16,
        ncclFloat16,
        ncclFloat32,
        ncclFloat64,
    };
    static_assert(types.size() == dtype_count);
    return types[static_cast<std::size_t>(dtype)];
}

/// @throws ContractViolation  NCCL has no such operation on these elements.
[[nodiscard]] inline ncclRedOp_t nccl_op(DType dtype, ReduceOp op) {
    switch (op) {
    case ReduceOp::sum: return ncclSum;
    case ReduceOp::product:
        if (is_complex(dtype)) {
            throw ContractViolation{concat(
                "NCCL does not multiply ",
                name_of(dtype),
                "; sum the logarithms, or reduce on a communicator of the host"
            )};
        }
        return ncclProd;
    case ReduceOp::min: return ncclMin;
    case ReduceOp::max: return ncclMax;
    case ReduceOp::bit_and:
    case ReduceOp::bit_or: break;
    }
    throw ContractViolation{concat(
        "NCCL does not reduce with ",
        name_of(op),
        "; use sum, product, min or max, or reduce on a communicator of the host"
    )};
}

[[nodiscard]] constexpr bool is_error(ncclResult_t result) noexcept {
    return result != ncclSuccess && result != ncclInProgress;
}

/// NCCL's text for a result. The communicator may be null.
[[nodiscard]] inline std::string nccl_text(ncclResult_t result, ncclComm_t comm) {
    char const* const last = ncclGetLastError(comm);
    std::string_view const more = last == nullptr ? "" : last;
    return concat(ncclGetErrorString(result), more.empty() ? "" : ": ", more);
}

/// For calls that fail at once. The communicator may be null.
/// @throws CommunicationError
inline void check_nccl(ncclResult_t result, std::string_view call, ncclComm_t comm = nullptr) {
    if (is_error(result)) {
        throw CommunicationError{concat(call, " failed: ", nccl_text(result, comm))};
    }
}

/// For calls that fail only if the device or the driver does.
/// @throws CommunicationError
inline void check_cuda(cudaError_t error, std::string_view call) {
    if (error != cudaSuccess) {
        static_cast<void>(cudaGetLastError()); // else the next check reports it
        throw CommunicationError{concat(call, " failed: ", cudaGetErrorString(error))};
    }
}

/// "2.28.9".
[[nodiscard]] inline std::string nccl_version_text(int code) {
    int const major = code / 10'000;
    return concat(major, ".", code / 100 % 100, ".", code % 100);
}

/// @throws CommunicationError  the library is older than the header used for compilation.
inline void check_nccl_version() {
    int found = 0;
    check_nccl(ncclGetVersion(&found), "ncclGetVersion");
    if (found < NCCL_VERSION_CODE) {
        throw CommunicationError{concat(
            "this program was compiled for NCCL ",
            nccl_version_text(NCCL_VERSION_CODE),
            ", but the library that it runs with is NCCL ",
            nccl_version_text(found),
            ": install that version or a later one, or compile with the header of the library"
        )};
    }
}

/// `found` is CUDA's description of the buffer: NCCL's kernels on this device must reach it.
/// @throws ContractViolation
inline void
check_device_memory(ConstBuffer buffer, cudaPointerAttributes const& found, int device) {
    if (found.type != cudaMemoryTypeDevice && found.type != cudaMemoryTypeManaged) {
        throw ContractViolation{concat(
            "NCCL moves memory of device ",
            device,
            ", but was given host memory for ",
            buffer.count,
            " ",
            name_of(buffer.dtype),
            "; copy it to the device, or use a communicator of the host"
        )};
    }
    if (found.type == cudaMemoryTypeDevice && found.device != device) {
        throw ContractViolation{concat(
            "this communicator is on device ",
            device,
            ", but was given memory of device ",
            found.device,
            "; allocate it after cudaSetDevice(",
            device,
            ")"
        )};
    }
}

}}} // namespace joinable::v0::detail
