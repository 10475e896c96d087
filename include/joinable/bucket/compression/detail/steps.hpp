// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>

#include <joinable/bucket/compression/detail/low_rank.hpp>
#include <joinable/bucket/compression/detail/numbers.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/device_of.hpp>
#include <joinable/config.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/device.hpp>
#include <joinable/device/step.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The host, or one device with kernels.
/// @throws ContractViolation
template <Communicator Comm>
[[nodiscard]] Device& computing_device(Comm& comm, std::string_view name) {
    Device& device = device_of(comm);
    if (device.id().kind == DeviceKind::several) {
        throw ContractViolation{concat(
            name,
            ": PerDevice has several devices, whose kernels it does not run; average by AllReduce, or make a "
            "model for each device"
        )};
    }
    if (!is_on_host(device) && !device.can_compute()) {
        throw ContractViolation{concat(
            name,
            ": the device of these gradients has no kernels; give its use_kernels() what "
            "joinable::cuda_kernels() returns, or use AllReduce"
        )};
    }
    return device;
}

template <class T>
JOINABLE_LOOP void orthogonalize_on_host(DeviceStep const& step) noexcept {
    auto const [rows, columns, rank] = step.size;
    static_cast<void>(rows);
    orthogonalize(HostBlock{}, static_cast<T*>(step.to), rank, columns, step.number);
}
template <class T>
JOINABLE_LOOP void keep_rows_on_host(DeviceStep const& step) noexcept {
    std::size_t const count = step.size.columns;
    for (std::size_t r = 0; r < step.size.rank; ++r) {
        T const* const row = static_cast<T const*>(step.from) + r * count;
        if (inner_product(HostBlock{}, row, row, count) > 0) {
            std::copy_n(row, count, static_cast<T*>(step.to) + r * count);
        }
    }
}
template <class T>
void multiply_on_host(DeviceStep const& step) {
    auto const* const left = static_cast<T const*>(step.left);
    auto const* const right = static_cast<T const*>(step.right);
    auto* const row = static_cast<T*>(step.room);
    std::size_t const columns = step.size.columns;
    std::size_t const row_bytes = columns * joinable::size_of(step.dtype);
    auto* at = static_cast<std::byte*>(step.to);
    for (std::size_t i = 0; i < step.size.rows; ++i, at += row_bytes) {
        if (size_of(step.dtype) == sizeof(T)) {
            product_row(step.size, left, right, i, reinterpret_cast<T*>(at));
        } else {
            product_row(step.size, left, right, i, row);
            cast_from(row, Buffer{at, columns, step.dtype});
        }
    }
}
template <class T>
void subtract_on_host(DeviceStep const& step) {
    auto* const row = static_cast<T*>(step.room);
    std::size_t const columns = step.size.columns;
    auto const* from = static_cast<T const*>(step.from);
    auto* to = static_cast<T*>(step.to);
    for (std::size_t i = 0; i < step.size.rows; ++i, from += columns, to += columns) {
        product_row(
            step.size, static_cast<T const*>(step.left), static_cast<T const*>(step.right), i, row
        );
        for (std::size_t j = 0; j < columns; ++j) {
            to[j] = from[j] - row[j];
        }
    }
}

/// Runs a step in host memory.
inline void compute_on_host(DeviceStep const& step) {
    bool const is_off = step.only_if != nullptr && *step.only_if == 0;
    Buffer const elements{const_cast<void*>(step.from), step.count, step.from_dtype};
    visit_number(step.dtype, [&]<class T>(T) {
        auto const* const from = static_cast<T const*>(step.from);
        auto* const to = static_cast<T*>(step.to);
        switch (step.kind) {
        case StepKind::cast:
            if (step.count == 0) { // of a tensor without elements, which may have no memory
                return;
            }
            visit_floating(step.dtype, [&]<class To>(std::type_identity<To>) {
                double const one = step.number;
                cast_to(
                    step.from == nullptr ? Buffer{const_cast<double*>(&one), 1, DType::f64}
                                         : elements,
                    step.from == nullptr ? 1.0 : step.number,
                    static_cast<To*>(step.to)
                );
            });
            return;
        case StepKind::fill_random:
            for (std::size_t i = 0; i < step.count; ++i) {
                to[i] = random_number<T>(step.seed, i);
            }
            return;
        case StepKind::orthogonalize: orthogonalize_on_host<T>(step); return;
        case StepKind::add: {
            auto const* const other = static_cast<T const*>(step.left);
            cast_to(elements, 1.0, to);
            for (std::size_t i = 0; i < step.count; ++i) {
                to[i] += other[i];
            }
            return;
        }
        case StepKind::multiply_right:
            multiply_right(step.size, from, static_cast<T const*>(step.right), to);
            return;
        case StepKind::multiply_left:
            multiply_left(step.size, from, static_cast<T const*>(step.left), to);
            return;
        case StepKind::multiply:
            if (is_off) {
                std::memset(
                    step.to, 0, step.size.rows * step.size.columns * joinable::size_of(step.dtype)
                );
            } else {
                multiply_on_host<T>(step);
            }
            return;
        case StepKind::note_not_finite:
            if (!are_finite(elements)) {
                *static_cast<double*>(step.to) = 0;
            }
            return;
        case StepKind::keep_rows:
            if (!is_off) {
                keep_rows_on_host<T>(step);
            }
            return;
        case StepKind::subtract:
            if (!is_off) {
                subtract_on_host<T>(step);
            }
            return;
        }
    });
}

/// Runs steps where their memory is: on the host in the order of the list, on a device as Device::compute().
inline void compute(Device& device, std::span<DeviceStep const> steps) {
    if (is_on_host(device)) {
        for (DeviceStep const& step : steps) {
            compute_on_host(step);
        }
    } else {
        device.compute(steps.data(), steps.size());
    }
}
inline void compute(Device& device, DeviceStep const& step) {
    compute(device, std::span{&step, 1});
}

[[nodiscard]] inline DeviceStep cast_step(Buffer from, double factor, Buffer to) {
    return {
        .kind = StepKind::cast,
        .dtype = to.dtype,
        .from_dtype = from.dtype,
        .from = from.data,
        .to = to.data,
        .number = factor,
        .count = to.count
    };
}

}}} // namespace joinable::v0::detail
