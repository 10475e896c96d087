// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <chrono>
#include <climits>
#include <concepts>
#include <cstddef>
#include <string>
#include <string_view>
#include <type_traits>

#include <mpi.h>

#include <joinable/communicator/detail/polling.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/reduction/reduce.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/reduce_op.hpp>

/// @file
/// Maps datatypes, operations and errors to those of MPI.

namespace joinable { inline namespace v0 { namespace detail {

[[nodiscard]] inline std::string mpi_text(int code) {
    std::array<char, MPI_MAX_ERROR_STRING> text{};
    int length = 0;
    if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS) {
        return concat("error ", code);
    }
    return {text.data(), static_cast<std::size_t>(length)};
}

/// @throws CommunicationError  `code` is an error; with MPI's text.
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

/// 16-bit numbers travel as integers, which only our own operators combine.
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
    case DType::boolean: return MPI_UINT8_T;
    case DType::i16: return MPI_INT16_T;
    case DType::u16: return MPI_UINT16_T;
    case DType::c64: return MPI_C_FLOAT_COMPLEX;
    case DType::c128: return MPI_C_DOUBLE_COMPLEX;
    case DType::u64: break;
    }
    return MPI_UINT64_T;
}

/// The callback with which MPI combines numbers as the library does.
template <DType dtype, ReduceOp op>
void combine(void* in, void* in_out, int* count, MPI_Datatype*) {
    std::array<std::byte*, 2> const inputs{
        static_cast<std::byte*>(in), static_cast<std::byte*>(in_out)
    };
    auto const input = [&](std::size_t i) { return inputs[i]; };
    auto const output = [&](std::size_t) { return inputs[1]; };
    reduce_to(dtype, op, {2, input}, {1, output}, static_cast<std::size_t>(*count));
}

/// Our own operator. It lives until MPI is finalised.
template <DType dtype, ReduceOp op>
[[nodiscard]] MPI_Op own_operator() {
    static MPI_Op const made = [] {
        MPI_Op created = MPI_OP_NULL;
        check_mpi(MPI_Op_create(&combine<dtype, op>, 1, &created), "MPI_Op_create");
        return created;
    }();
    return made;
}
/// MPI's operator, or ours where MPI's does not combine numbers as the library does: 16-bit numbers are
/// computed in f32, each combination rounded, a product of complex numbers fuses nothing, MPICH 4.0 orders unsigned numbers as if they were signed, and a
/// NaN among floating-point numbers may end on some ranks only, or nowhere.
template <class T, ReduceOp op>
[[nodiscard]] MPI_Op operator_of([[maybe_unused]] MPI_Op standard) {
    constexpr bool orders = op == ReduceOp::min || op == ReduceOp::max;
    constexpr bool multiplies_complex = op == ReduceOp::product && complex_number<T>;
    if constexpr (!is_reducible(dtype_of<T>, op)) {
        return MPI_OP_NULL;
    } else if constexpr (is_half_precision(dtype_of<T>) || multiplies_complex ||
                         (orders && !std::signed_integral<T>)) {
        return own_operator<dtype_of<T>, op>();
    } else {
        return standard;
    }
}

/// @pre is_reducible(dtype, op)
[[nodiscard]] inline MPI_Op mpi_op_of(DType dtype, ReduceOp op) {
    return visit_dtype(dtype, [&]<class T>(std::type_identity<T>) -> MPI_Op {
        switch (op) {
        case ReduceOp::sum: return operator_of<T, ReduceOp::sum>(MPI_SUM);
        case ReduceOp::product: return operator_of<T, ReduceOp::product>(MPI_PROD);
        case ReduceOp::min: return operator_of<T, ReduceOp::min>(MPI_MIN);
        case ReduceOp::max: return operator_of<T, ReduceOp::max>(MPI_MAX);
        case ReduceOp::bit_and: return MPI_BAND; // integers only
        case ReduceOp::bit_or: break;
        }
        return MPI_BOR;
    });
}

/// The limits of one MPI call: elements in a count, and bytes in a displacement. Tests lower them.
struct MpiLimits {
    std::size_t most = INT_MAX;
};

/// An MPI type for `count` elements that start at byte `at_bytes` of a buffer, for when one of the
/// two does not fit into an int. The caller frees it.
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
    static_cast<void>(MPI_Type_free(&chunk)); // the made type keeps it
    check_mpi(code, "MPI_Type_create_struct");
    if (int const committed = MPI_Type_commit(&made); committed != MPI_SUCCESS) {
        static_cast<void>(MPI_Type_free(&made));
        check_mpi(committed, "MPI_Type_commit");
    }
    return made;
}

/// In the first millisecond there is no pause: each poll moves data, and MPI itself yields if it
/// knows that ranks share cores.
struct MpiPause : PollPause {
    MpiPause() noexcept : PollPause{std::chrono::milliseconds{1}} {}
};

}}} // namespace joinable::v0::detail
