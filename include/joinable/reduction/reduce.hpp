// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>

#include <joinable/config.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Something by number, or nothing. Refers to the function that was given.
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
/// Addresses of the inputs of all ranks, or of the places where the result is wanted.
using Places = Numbered<std::byte*>;
/// By which the inputs are multiplied before they are added; without any they are not.
using Factors = Numbered<double>;

/// Combines `count` elements of all inputs in rank order and writes them to every output. Which
/// rank computes it and how it was cut change no bit. There is at least one input, and one output.
/// An output may be one of the inputs; otherwise they do not overlap. With factors it is a sum of
/// floating-point numbers, each of them multiplied and rounded before; numbers of 16 bits are
/// multiplied as floats.
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
#include <joinable/reduction/reduce.ipp>
#endif
