// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <string_view>
#include <vector>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/bucket/all_reduce.hpp>
#include <joinable/bucket/bucket_reduction.hpp>
#include <joinable/bucket/compression/detail/feedback.hpp>
#include <joinable/bucket/compression/detail/steps.hpp>
#include <joinable/device/device.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

inline constexpr std::array<std::string_view, 4> cast_names{
    "CastTo<f16>", "CastTo<bf16>", "CastTo<f32>", "CastTo<f64>"
};

} // namespace detail

/// Sends gradients as elements of another type, by the reduction `Next`: as f16 or bf16 they need half of the bytes of
/// f32, and 16-bit gradients as f32 are summed without rounding each sum. Each gradient is multiplied by the factor in
/// f32, or in f64 if one of the types is that, and rounded; the average is rounded again when it comes back. What rounding
/// loses is not kept. A number of f64 is rounded to f32 before it is rounded to f16 or bf16, so one that is within 2^-24 of
/// itself of the middle between two numbers of 16 bits may become the farther one. Allocates buckets of the other type
/// once. Buckets of a device are cast there, to the host's bits, by kernels (CudaDevice::use_kernels); without them the
/// model is refused when it is made.
/// Stream order: casts run on the device's stream, in order with the collectives; no call waits for them.
template <DType To, class Next = AllReduce>
struct CastTo {
    static_assert(is_floating_point(To), "CastTo: expected DType::f16, bf16, f32 or f64");
    static_assert( // one that keeps feedback sends numbers of f32
        !is_half_precision(To) || !requires(Next& next) { next.feedback; },
        "CastTo: PowerSgd, TopK and Int8Compression send the same bytes whatever a bucket holds; give them alone"
    );
    static_assert(
        detail::sends_runs<Next>,
        "CastTo: NoReduction sends nothing, so there is nothing to cast; give NoReduction alone"
    );

    static constexpr std::string_view name = detail::cast_names[static_cast<std::size_t>(To)];
    static constexpr bool delivers = Next::delivers;
    static constexpr bool rounds_factors = false; ///< it multiplies before the sum, in f32 or f64
    static constexpr std::size_t steps = detail::steps_of<Next>;

    Next next{};
    detail::RunMemory memory{};
    std::vector<BucketPart> parts{};     ///< of the other type
    std::vector<std::size_t> place_of{}; ///< per parameter: in parts
    Device* device = nullptr;            ///< of the buckets

    template <Communicator Comm>
    [[nodiscard]] static bool scales(Comm&) noexcept {
        return true;
    }
    template <Communicator Comm>
    void prepare(Comm& comm, BucketParts given) {
        device = &detail::computing_device(comm, name);
        memory.prepare(comm, given, 0, [](BucketPart const& part) {
            return part.dtype == To ? 0 : part.count * size_of(To);
        });
        parts.assign(given.begin(), given.end());
        for (std::size_t k = 0; k < parts.size(); ++k) {
            detail::of_parameter(place_of, parts[k].parameter) = k;
            parts[k].dtype = To;
        }
        if constexpr (detail::prepares_runs<Next, Comm>) {
            next.prepare(comm, BucketParts{parts.data(), parts.size()});
        }
    }
    template <Communicator Comm>
    [[nodiscard]] auto start(Comm& comm, BucketRun const& run, double factor, bool contributes) {
        BucketRun const other = cast(run);
        detail::compute(*device, detail::cast_step(run.buffer, factor, other.buffer));
        return next.start(comm, other, 1.0, contributes);
    }
    template <Communicator Comm>
        requires(steps > 1)
    [[nodiscard]] auto advance(Comm& comm, BucketRun const& run, std::size_t step) {
        return next.advance(comm, cast(run), step);
    }
    template <Communicator Comm>
    void finish(Comm& comm, BucketRun const& run) {
        BucketRun const other = cast(run);
        next.finish(comm, other);
        if (other.buffer.data != run.buffer.data) {
            detail::compute(*device, detail::cast_step(other.buffer, 1.0, run.buffer));
        }
    }
    void end_iteration() {
        if constexpr (requires { next.end_iteration(); }) {
            next.end_iteration();
        }
    }
    void agree_on(AgreementList& list) const { detail::agree_on_reduction(list, next); }
    void save(ReductionState& state)
        requires detail::saves_state<Next>
    {
        next.save(state);
    }
    void load(ReductionState const& state)
        requires detail::saves_state<Next>
    {
        next.load(state);
    }

private:
    [[nodiscard]] BucketRun cast(BucketRun const& run) const {
        std::size_t const first = place_of[run.parts[0].parameter];
        void* const data = run.buffer.dtype == To ? run.buffer.data : memory.of(run);
        return {run.bucket, {data, run.buffer.count, To}, {parts.data() + first, run.parts.size()}};
    }
};

/// Sends f16, which PyTorch's fp16_compress_hook does: f32 gradients need half of the bytes. Numbers of more than 65,504
/// become infinite, and those below 6e-8 zero.
template <class Next = AllReduce>
using Fp16Compression = CastTo<DType::f16, Next>;
/// Sends bf16: half of the bytes of f32, its range, and 8 bits of its precision.
template <class Next = AllReduce>
using Bf16Compression = CastTo<DType::bf16, Next>;

}} // namespace joinable::v0
