// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>

#include <joinable/config.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// A function from an index to a value, or none. Refers to the given function.
template <class T>
class Numbered {
public:
    Numbered() = default;
    template <class Function>
    Numbered(std::size_t number, Function const& function) noexcept
        : size_{number}, function_{&function}, call_{[](void const* called, std::size_t i) {
              return (*static_cast<Function const*>(called))(i);
          }} {}

    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    [[nodiscard]] T operator[](std::size_t i) const { return call_(function_, i); }

private:
    std::size_t size_ = 0;
    void const* function_ = nullptr;
    T (*call_)(void const*, std::size_t) = nullptr;
};
/// The addresses of all ranks' inputs, or of the outputs.
using Places = Numbered<std::byte*>;
/// The factors by which inputs are multiplied before they are added. May be empty.
using Factors = Numbered<double>;

/// Combines `count` elements of all inputs in rank order and writes them to every output. The bits
/// do not depend on which rank computes them or on how the work was divided. There is at least one
/// input and one output, and is_reducible(dtype, op). An output may be one of the inputs; otherwise they do not overlap. With
/// factors it is a sum of floating-point or complex numbers, each multiplied and rounded first. 16-bit numbers
/// are multiplied as floats.
void reduce_to(
    DType dtype,
    ReduceOp op,
    Places const& inputs,
    Places const& outputs,
    std::size_t count,
    Factors const& factors = {},
    InstructionSet set = instruction_set()
);

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/reduction/impl/reduce.ipp>
#endif
