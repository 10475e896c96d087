// SPDX-License-Identifier: BSL-1.0
#include <cstddef>
#include <cstring>
#include <type_traits>
#include <vector>

#include <nccl.h>
#include <support/fake_nccl/arithmetic.hpp>
#include <support/fake_nccl/calls.hpp>
#include <support/fake_nccl/world.hpp>
#include <support/for_each_type.hpp>

#include <joinable/tensor/dtype.hpp>

namespace joinable_tests::fake_nccl {

joinable::DType dtype(ncclDataType_t type) {
    switch (type) {
    case ncclInt8: return joinable::DType::i8;
    case ncclUint8: return joinable::DType::u8;
    case ncclInt32: return joinable::DType::i32;
    case ncclUint32: return joinable::DType::u32;
    case ncclInt64: return joinable::DType::i64;
    case ncclUint64: return joinable::DType::u64;
    case ncclFloat16: return joinable::DType::f16;
    case ncclFloat32: return joinable::DType::f32;
    case ncclFloat64: return joinable::DType::f64;
    case ncclBfloat16: return joinable::DType::bf16;
    default: die("an element type that the fake does not have");
    }
}

namespace {

template <class T>
T combine(ncclRedOp_t op, T a, T b) {
    if constexpr (std::is_class_v<T>) { // 16 bits compute in float
        return T{combine(op, static_cast<float>(a), static_cast<float>(b))};
    } else {
        switch (op) {
        case ncclSum: return static_cast<T>(a + b);
        case ncclProd: return static_cast<T>(a * b);
        case ncclMin: return b < a ? b : a;
        case ncclMax: return a < b ? b : a;
        default: die("an operation that the fake does not have");
        }
    }
}
template <class T>
T number(double value) {
    if constexpr (std::is_class_v<T>) {
        return T{static_cast<float>(value)};
    } else {
        return static_cast<T>(value);
    }
}
/// The elements from `first` on of all ranks' inputs, in rank order.
std::vector<std::byte> reduced(std::vector<Op> const& ops, std::size_t first, std::size_t count) {
    std::vector<std::byte> result(count * size_of(ops[0].type));
    joinable_tests::visit_real(dtype(ops[0].type), [&]<class T>(std::type_identity<T>) {
        // 16 bits add up in float and are rounded once, as where switches add; rings round at each rank.
        using Total = std::conditional_t<std::is_class_v<T>, float, T>;
        auto const input = [&](Op const& op, std::size_t i) {
            T const element = static_cast<T const*>(op.in)[first + i];
            T factor = number<T>(op.factor);
            if (op.scalar != nullptr) {
                std::memcpy(&factor, op.scalar, sizeof(T));
            }
            return static_cast<Total>(op.is_scaled ? combine(ncclProd, element, factor) : element);
        };
        for (std::size_t i = 0; i < count; ++i) {
            Total sum = input(ops[0], i);
            for (std::size_t rank = 1; rank < ops.size(); ++rank) {
                sum = combine(ops[0].op, sum, input(ops[rank], i));
            }
            T const total{sum};
            std::memcpy(result.data() + i * sizeof(T), &total, sizeof(T));
        }
    });
    return result;
}
void write(void* to, std::vector<std::byte> const& bytes) {
    std::memcpy(to, bytes.data(), bytes.size());
}

} // namespace

void run_collective(std::vector<Op> const& ops) {
    Op const& first = ops[0];
    std::size_t const bytes = first.count * size_of(first.type);
    auto const root = static_cast<std::size_t>(first.peer);
    switch (first.kind) {
    case Kind::all_reduce: {
        auto const sum = reduced(ops, 0, first.count);
        for (Op const& op : ops) {
            write(op.out, sum);
        }
        break;
    }
    case Kind::reduce: write(ops[root].out, reduced(ops, 0, first.count)); break;
    case Kind::broadcast:
        for (Op const& op : ops) {
            std::memmove(op.out, ops[root].in, bytes);
        }
        break;
    case Kind::all_gather:
        for (Op const& op : ops) {
            for (std::size_t rank = 0; rank < ops.size(); ++rank) {
                std::memmove(static_cast<std::byte*>(op.out) + rank * bytes, ops[rank].in, bytes);
            }
        }
        break;
    case Kind::reduce_scatter: {
        std::vector<std::vector<std::byte>> parts; // before any is written: in place is allowed
        for (std::size_t rank = 0; rank < ops.size(); ++rank) {
            parts.push_back(reduced(ops, rank * first.count, first.count));
        }
        for (std::size_t rank = 0; rank < ops.size(); ++rank) {
            write(ops[rank].out, parts[rank]);
        }
        break;
    }
    case Kind::send:
    case Kind::receive: break;
    }
}

} // namespace joinable_tests::fake_nccl
