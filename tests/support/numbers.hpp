// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <type_traits>
#include <vector>

#include <support/for_each_type.hpp>
#include <support/offsets.hpp>

#include <joinable/tensor/any_view.hpp>

// Elements of any floating-point dtype as doubles, which hold all of them exactly, and the
// arithmetic of the dtypes: 16 bits compute in float and round once.

namespace joinable_tests {

using Numbers = std::vector<double>;

/// Calls f(element, type) with what `T` computes in.
template <class F>
double with_arithmetic(joinable::DType dtype, F const& f) {
    return joinable::visit_dtype(dtype, [&]<class T>(std::type_identity<T>) -> double {
        if constexpr (!joinable::detail::floating_number<T>) {
            return f(double{});
        } else if constexpr (sizeof(T) == 2) {
            return static_cast<double>(static_cast<float>(T{static_cast<float>(f(float{}))}));
        } else {
            return static_cast<double>(f(T{}));
        }
    });
}

inline double plus(joinable::DType dtype, double a, double b) {
    return with_arithmetic(dtype, [&]<class A>(A) {
        return static_cast<A>(a) + static_cast<A>(b);
    });
}
inline double times(joinable::DType dtype, double a, double factor) {
    return with_arithmetic(dtype, [&]<class A>(A) {
        return static_cast<A>(static_cast<A>(a) * static_cast<A>(factor));
    });
}
/// Added up in this order, rounded to the dtype at the end.
inline double sum_of(joinable::DType dtype, Numbers const& numbers) {
    return with_arithmetic(dtype, [&]<class A>(A) {
        A total = static_cast<A>(numbers.front());
        for (std::size_t i = 1; i < numbers.size(); ++i) {
            total = static_cast<A>(total + static_cast<A>(numbers[i]));
        }
        return total;
    });
}

/// The sum of what ranks have, each times its factor. A factor of 0 takes nothing, not even a NaN. With `sums_scale` the
/// communicator multiplies what it sums, which rounds numbers of 16 bits once.
inline double scaled_sum_of(
    joinable::DType dtype, Numbers const& numbers, Numbers const& factors, bool sums_scale
) {
    bool const rounds_once =
        sums_scale && (dtype == joinable::DType::f16 || dtype == joinable::DType::bf16);
    Numbers terms;
    for (std::size_t r = 0; r < numbers.size(); ++r) {
        terms.push_back(
            factors[r] == 0.0 ? 0.0
            : rounds_once     ? static_cast<float>(numbers[r]) * static_cast<float>(factors[r])
                              : times(dtype, numbers[r], factors[r])
        );
    }
    return sum_of(dtype, terms);
}

/// In row-major order. By pointers, as offsets_of().
inline Numbers read(joinable::AnyView const& view) {
    Numbers numbers;
    visit_real(view.dtype(), [&]<class T>(std::type_identity<T>) {
        std::vector<std::size_t> const offsets = offsets_of(view.extents(), view.strides());
        numbers.resize(offsets.size());
        std::size_t const* offset = offsets.data();
        T const* const data = static_cast<T const*>(view.data());
        double* const end = numbers.data() + numbers.size();
        for (double* to = numbers.data(); to != end; ++to) {
            T const& element = data[*offset++];
            if constexpr (sizeof(T) == 2) {
                *to = static_cast<double>(static_cast<float>(element));
            } else {
                *to = static_cast<double>(element);
            }
        }
    });
    return numbers;
}
inline void write(joinable::AnyView const& view, Numbers const& numbers) {
    visit_real(view.dtype(), [&]<class T>(std::type_identity<T>) {
        std::vector<std::size_t> const offsets = offsets_of(view.extents(), view.strides());
        double const* next = numbers.data();
        T* const data = static_cast<T*>(view.data());
        std::size_t const* const end = offsets.data() + offsets.size();
        for (std::size_t const* offset = offsets.data(); offset != end; ++offset) {
            if constexpr (!std::is_arithmetic_v<T>) {
                data[*offset] = T{static_cast<float>(*next++)};
            } else {
                data[*offset] = static_cast<T>(*next++);
            }
        }
    });
}

/// Memory of its own for a tensor with any strides, and a mark in the gaps between its elements.
class OwnedTensor {
public:
    OwnedTensor(
        joinable::DType dtype, joinable::Shape const& extents, joinable::Shape const& strides
    )
        : bytes_(reach(extents, strides) * joinable::size_of(dtype), gap),
          view_{bytes_.data(), dtype, extents, strides} {
        write(view_, Numbers(view_.numel()));
    }

    OwnedTensor(OwnedTensor&&) = default;
    OwnedTensor& operator=(OwnedTensor&&) = default;

    [[nodiscard]] joinable::AnyView const& view() const noexcept { return view_; }
    /// Whether nobody wrote between elements.
    [[nodiscard]] bool has_its_gaps() const {
        std::vector<bool> is_element(bytes_.size());
        for (std::size_t const offset : offsets_of(view_.extents(), view_.strides())) {
            for (std::size_t b = 0; b < joinable::size_of(view_.dtype()); ++b) {
                is_element[offset * joinable::size_of(view_.dtype()) + b] = true;
            }
        }
        for (std::size_t b = 0; b < bytes_.size(); ++b) {
            if (!is_element[b] && bytes_[b] != gap) {
                return false;
            }
        }
        return true;
    }

private:
    static constexpr std::byte gap{0xa5};
    static std::size_t reach(joinable::Shape const& extents, joinable::Shape const& strides) {
        std::size_t last = 0;
        for (std::size_t const offset : offsets_of(extents, strides)) {
            last = offset + 1 > last ? offset + 1 : last;
        }
        return last + 1; // never null
    }

    std::vector<std::byte> bytes_;
    joinable::AnyView view_;
};

} // namespace joinable_tests
