// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include <joinable/bucket/bucket_reduction.hpp>
#include <joinable/bucket/compression/detail/numbers.hpp>
#include <joinable/bucket/compression/detail/steps.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/device_of.hpp>
#include <joinable/communicator/make_arena.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/device.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/shape.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// @throws ContractViolation  the communicator moves memory of a device.
template <class Comm>
void require_host_buckets(Comm& comm, std::string_view name) {
    if (!is_on_host(device_of(comm))) {
        throw ContractViolation{concat(
            name,
            " computes on the host, but these gradients are on a device; use PowerSgd, Fp16Compression or "
            "AllReduce there"
        )};
    }
}

/// The element for a parameter. A list that is too short gets longer.
template <class T>
[[nodiscard]] T& of_parameter(std::vector<T>& list, std::size_t parameter) {
    if (list.size() <= parameter) {
        list.resize(parameter + 1);
    }
    return list[parameter];
}

/// Drops the elements for parameters that have no part any more.
template <class T>
void keep_parameters(std::vector<T>& list, BucketParts parts) {
    std::vector<T> kept(list.size());
    for (BucketPart const& part : parts) {
        if (part.parameter < list.size()) {
            kept[part.parameter] = std::move(list[part.parameter]);
        }
    }
    list = std::move(kept);
}

/// Memory that every run has to itself, because a bucket may travel in several runs.
class RunMemory {
public:
    /// Local. A run needs `of_run` bytes and `of_part(part)` for each part. `make(bytes)` returns an Arena.
    template <class F, class Make>
    void prepare(BucketParts parts, std::size_t of_run, F const& of_part, Make const& make) {
        begins_.clear();
        std::size_t bytes = 0;
        for (BucketPart const& part : parts) {
            of_parameter(begins_, part.parameter) = bytes;
            bytes += (of_run + of_part(part) + alignment - 1) / alignment * alignment;
        }
        if (arena_.bytes() < bytes) {
            arena_ = Arena{}; // not both at a time
            arena_ = make(bytes);
        }
    }
    /// For messages.
    template <Communicator Comm, class F>
    void prepare(Comm& comm, BucketParts parts, std::size_t of_run, F const& of_part) {
        prepare(parts, of_run, of_part, [&](std::size_t bytes) { return make_arena(comm, bytes); });
    }
    template <class T = std::byte>
    [[nodiscard]] T* of(BucketRun const& run) const noexcept {
        return reinterpret_cast<T*>(arena_.data() + begins_[run.parts[0].parameter]);
    }

private:
    static constexpr std::size_t alignment = Arena::default_alignment;

    Arena arena_;
    std::vector<std::size_t> begins_; ///< per parameter
};

/// The residuals: a reduction adds to this rank's next gradients the part of the last ones that it left out. A residual has a
/// number for each element, in the units of the average. Local.
class Feedback {
public:
    /// Keeps the residuals of parameters that it has, and drops those of others. All memory is the device's.
    void prepare(Device& device, BucketParts parts) {
        keep_parameters(residuals_, parts);
        device_ = &device;
        auto const make = [&](std::size_t bytes) {
            return device.allocate(bytes, Arena::default_alignment);
        };
        for (BucketPart const& part : parts) {
            Residual& mine = of_parameter(residuals_, part.parameter);
            if (mine.memory.bytes() != bytes_of(part)) {
                mine.memory = make(bytes_of(part));
            }
            mine.dtype = number_dtype(part.dtype);
            mine.extents = part.extents;
            mine.strides = part.strides;
        }
        inputs_.prepare(parts, 0, bytes_of, make);
    }

    /// Writes the sum of a part's gradient and residual to its place in inputs(). On the host, as all that follows but
    /// scale() and save().
    template <class T>
    T* add(BucketRun const& run, std::size_t k) {
        T* const to = inputs<T>(run, k);
        cast_to(run.part(k), 1.0, to);
        T const* const residual = this->residual<T>(run.parts[k].parameter);
        std::size_t const count = run.parts[k].count;
        for (std::size_t i = 0; i < count; ++i) {
            to[i] += residual[i];
        }
        return to;
    }
    /// The numbers of a run, from part `k` on.
    [[nodiscard]] std::byte* inputs(BucketRun const& run, std::size_t k) const noexcept {
        std::size_t const begin = run.parts[k].offset - run.parts[0].offset;
        return inputs_.of(run) + begin * number_size(run.buffer.dtype);
    }
    template <class T>
    [[nodiscard]] T* inputs(BucketRun const& run, std::size_t k = 0) const noexcept {
        return reinterpret_cast<T*>(inputs(run, k));
    }
    template <class T = std::byte>
    [[nodiscard]] T* residual(std::size_t parameter) const noexcept {
        return reinterpret_cast<T*>(residuals_[parameter].memory.data());
    }
    /// Makes what is left in the inputs of a part its residual.
    template <class T>
    void keep(BucketRun const& run, std::size_t k) {
        BucketPart const& part = run.parts[k];
        std::copy_n(inputs<T>(run, k), part.count, residual<T>(part.parameter));
    }
    /// The same for all parts of a run, provided that its averages are finite.
    template <class T>
    void keep_if_finite(BucketRun const& run) {
        if (are_finite(run.buffer)) {
            for (std::size_t k = 0; k < run.parts.size(); ++k) {
                keep<T>(run, k);
            }
        }
    }
    /// Multiplies all residuals.
    void scale(double factor) {
        for (Residual const& mine : residuals_) {
            std::size_t const count = mine.memory.bytes() / size_of(mine.dtype);
            Buffer const numbers{mine.memory.data(), count, mine.dtype};
            compute(*device_, cast_step(numbers, factor, numbers));
        }
    }
    /// Lists the residuals of parameters for which `is_kept(parameter)`.
    template <class F>
    void save(ReductionState& state, F const& is_kept) const {
        for (std::size_t parameter = 0; parameter < residuals_.size(); ++parameter) {
            auto const& [memory, dtype, extents, strides] = residuals_[parameter];
            if (memory.bytes() != 0 && is_kept(parameter)) {
                state.tensors.push_back(
                    {"residual",
                     parameter,
                     memory.data(),
                     dtype,
                     extents,
                     strides,
                     false,
                     device_->id()}
                );
            }
        }
    }
    void save(ReductionState& state) const {
        save(state, [](std::size_t) { return true; });
    }

private:
    static std::size_t bytes_of(BucketPart const& part) noexcept {
        return part.count * number_size(part.dtype);
    }

    struct Residual {
        Arena memory;
        DType dtype = DType::f32;
        Shape extents;
        Shape strides;
    };
    Device* device_ = nullptr;
    std::vector<Residual> residuals_; ///< per parameter
    RunMemory inputs_;
};

/// The gradients of a round to which no rank contributed.
inline void write_zeros(Buffer buffer) {
    std::memset(buffer.data, 0, buffer.bytes());
}

}}} // namespace joinable::v0::detail
