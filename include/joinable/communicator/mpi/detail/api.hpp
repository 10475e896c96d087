// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include <mpi.h>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/reduction/reduce.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/reduce_op.hpp>

/// @file
/// What MPI calls the things that a communicator moves, and what it says of errors.

namespace joinable { inline namespace v0 { namespace detail {

[[nodiscard]] inline std::string mpi_text(int code) {
    std::array<char, MPI_MAX_ERROR_STRING> text{};
    int length = 0;
    if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS) {
        return concat("error ", code);
    }
    return {text.data(), static_cast<std::size_t>(length)};
}

/// @throws CommunicationError  MPI refuses; with its text.
inline void check_mpi(int code, std::string_view call) {
    if (code != MPI_SUCCESS) {
        throw CommunicationError{concat(call, " failed: ", mpi_text(code))};
    }
}

[[nodiscard]] inline bool is_mpi_running() noexcept {
    int is_initialized = 0;
    int is_finalized = 0;
    static_cast<void>(MPI_Initialized(&is_initialized));
    static_cast<void>(MPI_Finalized(&is_finalized));
    return is_initialized != 0 && is_finalized == 0;
}

/// Numbers of 16 bits travel as integers, which only our own operators combine.
[[nodiscard]] inline MPI_Datatype mpi_type_of(DType dtype) noexcept {
    switch (dtype) {
    case DType::f16:
    case DType::bf16: return MPI_UINT16_T;
    case DType::f32: return MPI_FLOAT;
    case DType::f64: return MPI_DOUBLE;
    case DType::i8: return MPI_INT8_T;
    case DType::u8: return MPI_UINT8_T;
    case DType::i32: return MPI_INT32_T;
    case DType::u32: return MPI_UINT32_T;
    case DType::i64: return MPI_INT64_T;
    case DType::u64: break;
    }
    return MPI_UINT64_T;
}

/// What MPI calls to combine numbers of 16 bits: in f32, each combination rounded.
template <DType dtype, ReduceOp op>
void combine_halves(void* in, void* in_out, int* count, MPI_Datatype*) {
    std::array<std::byte*, 2> const inputs{
        static_cast<std::byte*>(in), static_cast<std::byte*>(in_out)
    };
    auto const input = [&](std::size_t i) { return inputs[i]; };
    auto const output = [&](std::size_t) { return inputs[1]; };
    reduce_to(dtype, op, {2, input}, {1, output}, static_cast<std::size_t>(*count));
}

/// An operator of our own, which lives as long as MPI.
template <DType dtype, ReduceOp op>
[[nodiscard]] MPI_Op half_operator() {
    static MPI_Op const made = [] {
        MPI_Op created = MPI_OP_NULL;
        check_mpi(MPI_Op_create(&combine_halves<dtype, op>, 1, &created), "MPI_Op_create");
        return created;
    }();
    return made;
}
template <DType dtype>
[[nodiscard]] MPI_Op half_operator(ReduceOp op) {
    switch (op) {
    case ReduceOp::product: return half_operator<dtype, ReduceOp::product>();
    case ReduceOp::min: return half_operator<dtype, ReduceOp::min>();
    case ReduceOp::max: return half_operator<dtype, ReduceOp::max>();
    default: break; // bits are combined of integers alone
    }
    return half_operator<dtype, ReduceOp::sum>();
}

[[nodiscard]] inline MPI_Op mpi_op_of(DType dtype, ReduceOp op) {
    if (is_half_precision(dtype)) {
        return dtype == DType::f16 ? half_operator<DType::f16>(op) : half_operator<DType::bf16>(op);
    }
    switch (op) {
    case ReduceOp::sum: return MPI_SUM;
    case ReduceOp::product: return MPI_PROD;
    case ReduceOp::min: return MPI_MIN;
    case ReduceOp::max: return MPI_MAX;
    case ReduceOp::bit_and: return MPI_BAND;
    case ReduceOp::bit_or: break;
    }
    return MPI_BOR;
}

/// The most that one call takes: elements of a count, and bytes of a displacement. Tests lower it.
struct MpiLimits {
    std::size_t most = INT_MAX;
};

/// A type of MPI for `count` elements that begin `at_bytes` behind the start of a buffer: where one of
/// the two does not fit into an int. The caller frees it.
[[nodiscard]] inline MPI_Datatype
type_of_part(DType dtype, std::size_t count, std::size_t at_bytes, std::size_t most) {
    MPI_Datatype const element = mpi_type_of(dtype);
    MPI_Datatype chunk = MPI_DATATYPE_NULL;
    check_mpi(MPI_Type_contiguous(static_cast<int>(most), element, &chunk), "MPI_Type_contiguous");
    std::array<int, 2> const lengths{
        static_cast<int>(count / most), static_cast<int>(count % most)
    };
    std::array<MPI_Aint, 2> const places{
        static_cast<MPI_Aint>(at_bytes),
        static_cast<MPI_Aint>(at_bytes + count / most * most * size_of(dtype))
    };
    std::array<MPI_Datatype, 2> const types{chunk, element};
    MPI_Datatype made = MPI_DATATYPE_NULL;
    int const code = MPI_Type_create_struct(2, lengths.data(), places.data(), types.data(), &made);
    static_cast<void>(MPI_Type_free(&chunk)); // the made type has it
    check_mpi(code, "MPI_Type_create_struct");
    if (int const committed = MPI_Type_commit(&made); committed != MPI_SUCCESS) {
        static_cast<void>(MPI_Type_free(&made));
        check_mpi(committed, "MPI_Type_commit");
    }
    return made;
}

}}} // namespace joinable::v0::detail
