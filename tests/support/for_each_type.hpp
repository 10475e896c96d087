// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>
#include <type_traits>

#include <support/volume.hpp>

#include <joinable/tensor/dtype.hpp>

namespace joinable_tests {

/// Calls `f.operator()<T>()` with every element type. Whether threads race does not depend on it, so the thread
/// sanitizer sees two.
template <class F>
void for_each_type(F const& f) {
    f.template operator()<float>();
    f.template operator()<std::uint8_t>();
    if constexpr (sanitizer != Sanitizer::thread) {
        f.template operator()<joinable::Half>();
        f.template operator()<joinable::BFloat16>();
        f.template operator()<double>();
        f.template operator()<std::int8_t>();
        f.template operator()<std::int32_t>();
        f.template operator()<std::uint32_t>();
        f.template operator()<std::int64_t>();
        f.template operator()<std::uint64_t>();
    }
}

/// Calls f(std::type_identity<T>{}) with the type of a dtype that is a real number.
template <class F>
void visit_real(joinable::DType dtype, F const& f) {
    joinable::visit_dtype(dtype, [&]<class T>(std::type_identity<T> type) {
        if constexpr (!joinable::detail::complex_number<T> && !std::is_same_v<T, bool>) {
            f(type);
        }
    });
}

} // namespace joinable_tests
