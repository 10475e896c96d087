// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/bucket/bucket_reduction.hpp>
#include <joinable/bucket/compression/detail/feedback.hpp>
#include <joinable/bucket/compression/detail/numbers.hpp>
#include <joinable/bucket/compression/detail/steps.hpp>
#include <joinable/communicator/any_work.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/detail/hash.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/device.hpp>
#include <joinable/device/host.hpp>
#include <joinable/device/scratch.hpp>
#include <joinable/device/step.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/shape.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

/// The matrices that PowerSgd keeps for a parameter.
struct LowRankFactors {
    MatrixSize size;          ///< of rank 0: it travels whole
    DType dtype = DType::f32; ///< of the matrices
    Arena right;              ///< of the last round, and of the next one: the same on all ranks
    Arena left;               ///< of this round, orthonormal: the same on all ranks
    Arena own_right;          ///< this rank's summand; before, the orthonormal matrix of this round
    Arena chunks;             ///< sums of chunks of rows, on a device
    bool is_started = false;
};

} // namespace detail

/// Sends each gradient as the product of two thin matrices: a gradient of n x m elements needs (n + m) x rank numbers, in
/// two sums. What the product leaves out is added to the rank's next gradient. Source: Vogels, Karimireddy and Jaggi,
/// "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019; the sums, and so the averages,
/// are those of PyTorch's powerSGD_hook. The rows of the matrix lie along the dimension of the largest stride.
/// Dimensions of extent 1 do not count. Gradients of one dimension, and those that would not get smaller by
/// `min_compression_rate`, travel whole, with the first sum. The averages delivered plus the residuals of all ranks are the
/// sum of the gradients, but for rounding. A bucket whose averages are not finite delivers them and leaves its residuals;
/// so does a round without contributors, which delivers zeros.
/// Buckets of a device are computed there by kernels (CudaDevice::use_kernels); without them the model is refused when it is
/// made. All memory is allocated by then.
/// Stream order: all of it runs on the device's stream, in order with the collectives; no call waits for it. Averages
/// differ from the host's by how this rank's products with its gradient are summed: in double. All else has the host's bits.
/// Complexity: 4 x PowerSgd::rank products for each element. Memory: two numbers for each element, and the thin matrices.
struct PowerSgd {
    static constexpr std::string_view name = "PowerSgd";
    static constexpr bool delivers = true;
    static constexpr std::size_t steps = 2;

    std::size_t rank = 1; ///< at least 1; at most as much as a matrix has
    /// Rounds that are summed whole before, shadowed ones, too.
    std::uint64_t start_iteration = 1000;
    double min_compression_rate = 2; ///< more than 0
    bool warm_start = true;          ///< each round begins with the result of the last one
    bool error_feedback = true;      ///< else what is left out is lost
    double epsilon = 1e-8; ///< added to the lengths by which vectors are divided; at least 0
    std::uint64_t seed = 0;

    std::uint64_t rounds = 0; ///< that were reduced
    detail::Feedback feedback{};
    detail::RunMemory messages{};
    /// Two numbers of f64 for a run: how many ranks contribute, and the same if the averages are finite, else 0.
    detail::RunMemory verdicts{};
    std::vector<detail::LowRankFactors> factors{}; ///< per parameter
    detail::Scratch row{detail::the_host()};       ///< of a product, on the host
    Device* device = nullptr;                      ///< of the buckets
    std::vector<detail::DeviceStep> listed{};      ///< what is computed next

    template <Communicator Comm>
    [[nodiscard]] static bool scales(Comm&) noexcept {
        return false;
    }
    /// @throws ContractViolation  a setting is out of range, or buckets are on a device without kernels.
    template <Communicator Comm>
    void prepare(Comm& comm, BucketParts parts) {
        device = &detail::computing_device(comm, name);
        require_settings();
        feedback.prepare(*device, parts);
        detail::keep_parameters(factors, parts);
        for (BucketPart const& part : parts) {
            prepare_factors(part);
        }
        listed.reserve(6 * parts.size() + 2); // rounds allocate nothing
        verdicts.prepare(
            parts,
            2 * sizeof(double),
            [](BucketPart const&) { return std::size_t{0}; },
            [&](std::size_t bytes) { return allocate(bytes); }
        );
        messages.prepare(comm, parts, sizeof(double), [&](BucketPart const& part) {
            return numbers_of(part) * detail::number_size(part.dtype);
        });
    }
    template <Communicator Comm>
    [[nodiscard]] AnyWork
    start(Comm& comm, BucketRun const& run, double /*factor*/, bool contributes) {
        if (!is_compressing()) {
            return AnyWork{comm.all_reduce(run.buffer, ReduceOp::sum)};
        }
        Buffer const message{
            messages.of(run), write_lefts(run, contributes), detail::number_dtype(run.buffer.dtype)
        };
        return AnyWork{comm.all_reduce(message, ReduceOp::sum)};
    }
    template <Communicator Comm>
    [[nodiscard]] AnyWork advance(Comm& comm, BucketRun const& run, std::size_t /*step*/) {
        std::size_t const count = is_compressing() ? write_rights(run) : 0;
        Buffer const message{messages.of(run), count, detail::number_dtype(run.buffer.dtype)};
        return count == 0 ? AnyWork{CompletedWork{}}
                          : AnyWork{comm.all_reduce(message, ReduceOp::sum)};
    }
    template <Communicator Comm>
    void finish(Comm&, BucketRun const& run) {
        if (is_compressing()) {
            deliver(run);
        }
    }
    void end_iteration() noexcept { ++rounds; }
    void agree_on(AgreementList& list) const {
        list.add("PowerSgd::rank", rank);
        list.add("PowerSgd::start_iteration", start_iteration);
        list.add("PowerSgd::min_compression_rate", min_compression_rate);
        list.add("PowerSgd::warm_start", warm_start);
        list.add("PowerSgd::error_feedback", error_feedback);
        list.add("PowerSgd::epsilon", epsilon);
        list.add("PowerSgd::seed", seed);
        list.add("PowerSgd::rounds", rounds);
    }

    /// Multiplies what this rank keeps, after the scale of the loss was multiplied by `factor`. Between rounds. Local; on a
    /// device in the order of its stream.
    void scale_residuals(double factor) { feedback.scale(factor); }

    /// The residuals, the right matrices and the count of rounds, for a Checkpoint.
    void save(ReductionState& state) {
        state.counts.push_back({"PowerSgd::rounds", &rounds});
        if (error_feedback) {
            feedback.save(state, [&](std::size_t i) { return factors[i].size.rank != 0; });
        }
        for (std::size_t i = 0; warm_start && i < factors.size(); ++i) {
            Factors const& mine = factors[i];
            auto const [rows, columns, most] = mine.size;
            if (most != 0) {
                Shape const extents{most, columns};
                Shape const strides = row_major_strides(extents);
                state.tensors.push_back(
                    {"warm_start",
                     i,
                     mine.right.data(),
                     mine.dtype,
                     extents,
                     strides,
                     true,
                     device->id()}
                );
            }
        }
    }
    /// Zeros are of a matrix that no round has begun with.
    void load(ReductionState const& /*state*/) {
        for (Factors& mine : factors) {
            if (mine.right.bytes() == 0) {
                continue;
            }
            Arena const bytes = device->allocate_staging(mine.right.bytes());
            device->download(mine.right.data(), bytes.data(), bytes.bytes());
            mine.is_started =
                std::any_of(bytes.data(), bytes.data() + bytes.bytes(), [](std::byte byte) {
                    return byte != std::byte{0};
                });
        }
    }

private:
    using Factors = detail::LowRankFactors;

    void require_settings() const {
        auto const refuse = [](std::string_view option, auto value, std::string_view wanted) {
            throw ContractViolation{
                detail::concat("PowerSgd: ", option, " is ", value, "; give ", wanted)
            };
        };
        if (rank == 0) {
            refuse("rank", rank, "1 or more");
        }
        if (!(min_compression_rate > 0) || !detail::is_finite(min_compression_rate)) {
            refuse("min_compression_rate", min_compression_rate, "a number above 0");
        }
        if (!(epsilon >= 0) || !detail::is_finite(epsilon)) {
            refuse("epsilon", epsilon, "0 or more");
        }
    }
    [[nodiscard]] bool is_compressing() const noexcept { return rounds >= start_iteration; }

    [[nodiscard]] detail::MatrixSize size_of(BucketPart const& part) const {
        // Rows lie along the dimension of the largest stride; one of extent 1 has no stride.
        std::size_t rows = 1;
        std::size_t largest = 0;
        std::size_t dimensions = 0;
        for (std::size_t d = 0; d < part.extents.size(); ++d) {
            if (part.extents[d] == 1) {
                continue;
            }
            ++dimensions;
            if (part.strides[d] > largest) {
                largest = part.strides[d];
                rows = part.extents[d];
            }
        }
        if (dimensions < 2 || part.count == 0) {
            return {};
        }
        std::size_t const columns = part.count / rows;
        std::size_t const most = (std::min)({rank, rows, columns});
        double const sent = static_cast<double>(rows + columns) * static_cast<double>(most);
        bool const pays = sent * min_compression_rate < static_cast<double>(part.count);
        return pays ? detail::MatrixSize{rows, columns, most} : detail::MatrixSize{};
    }
    void prepare_factors(BucketPart const& part) {
        Factors& mine = detail::of_parameter(factors, part.parameter);
        auto const [rows, columns, most] = mine.size = size_of(part);
        mine.dtype = detail::number_dtype(part.dtype);
        std::size_t const size = detail::number_size(part.dtype);
        if (mine.right.bytes() != most * columns * size ||
            mine.left.bytes() != most * rows * size) {
            mine.right = allocate(most * columns * size);
            mine.own_right = allocate(most * columns * size);
            mine.left = allocate(most * rows * size);
            mine.is_started = false;
            if (!detail::is_on_host(*device)) {
                mine.chunks = allocate(detail::numbers_of_chunks(mine.size) * size);
            }
        }
        if (detail::is_on_host(*device)) {
            static_cast<void>(row.data(columns * size));
        }
    }
    [[nodiscard]] Arena allocate(std::size_t bytes) const {
        return device->allocate(bytes, Arena::default_alignment);
    }
    /// The most that a sum has of a parameter.
    [[nodiscard]] std::size_t numbers_of(BucketPart const& part) const noexcept {
        auto const [rows, columns, most] = factors[part.parameter].size;
        return most == 0 ? part.count : most * (std::max)(rows, columns);
    }

    using Kind = detail::StepKind;
    using Step = detail::DeviceStep;

    /// Where numbers lie in a message, one list after another.
    struct Message {
        std::byte* data;
        DType dtype;
        std::size_t count = 0;

        [[nodiscard]] Buffer next(std::size_t numbers) {
            std::size_t const begin = std::exchange(count, count + numbers);
            return {data + begin * joinable::size_of(dtype), numbers, dtype};
        }
    };
    [[nodiscard]] Message message_of(BucketRun const& run) const {
        return {messages.of(run), detail::number_dtype(run.buffer.dtype)};
    }
    static Buffer numbers(Factors const& mine, Arena const& arena) {
        return {arena.data(), arena.bytes() / joinable::size_of(mine.dtype), mine.dtype};
    }
    void compute_listed() {
        if (!listed.empty()) {
            detail::compute(*device, listed);
            listed.clear();
        }
    }

    /// Step 0: how many ranks contribute, what travels whole, and the left matrices. Returns the number of numbers.
    std::size_t write_lefts(BucketRun const& run, bool contributes) {
        listed.clear(); // those of a start that failed
        Message message = message_of(run);
        listed.push_back(detail::cast_step({}, contributes ? 1 : 0, message.next(1)));
        for (std::size_t k = 0; k < run.parts.size(); ++k) {
            BucketPart const& part = run.parts[k];
            Factors const& mine = factors[part.parameter];
            if (mine.size.rank == 0) {
                listed.push_back(detail::cast_step(run.part(k), 1.0, message.next(part.count)));
                continue;
            }
            Buffer const right = numbers(mine, mine.right);
            Buffer const direction = numbers(mine, mine.own_right); // until step 1
            if (!mine.is_started || !warm_start) {
                auto const number = detail::Hash{}.add(seed).add(part.parameter).add(rounds);
                listed.push_back(
                    {.kind = Kind::fill_random,
                     .dtype = mine.dtype,
                     .to = right.data,
                     .seed = number.value(),
                     .count = right.count}
                );
            }
            // If the averages are not finite, the next round begins with the same matrix.
            listed.push_back(detail::cast_step(right, 1.0, direction));
            listed.push_back(orthogonalize(mine, mine.own_right));
            std::byte* const inputs = feedback.inputs(run, k);
            listed.push_back(
                {.kind = Kind::add,
                 .dtype = mine.dtype,
                 .from_dtype = part.dtype,
                 .from = run.part(k).data,
                 .to = inputs,
                 .left = feedback.residual(part.parameter),
                 .count = part.count}
            );
            listed.push_back(
                {.kind = Kind::multiply_right,
                 .dtype = mine.dtype,
                 .from = inputs,
                 .to = message.next(mine.size.rank * mine.size.rows).data,
                 .right = direction.data,
                 .size = mine.size}
            );
        }
        compute_listed();
        for_compressed(run, [&](std::size_t, Factors& mine) { mine.is_started = true; });
        return message.count;
    }
    /// Step 1: takes what step 0 summed, and writes the right matrices.
    std::size_t write_rights(BucketRun const& run) {
        Message sums = message_of(run);
        Buffer const contributors = sums.next(1);
        auto* const verdict = verdicts.of<double>(run);
        for (std::size_t k = 0; k < 2; ++k) {
            listed.push_back(detail::cast_step(contributors, 1.0, {verdict + k, 1, DType::f64}));
        }
        for (std::size_t k = 0; k < run.parts.size(); ++k) {
            Factors const& mine = factors[run.parts[k].parameter];
            if (mine.size.rank == 0) {
                Buffer const to = run.part(k);
                listed.push_back(detail::cast_step(sums.next(to.count), 1.0, to));
                continue;
            }
            Buffer const left = numbers(mine, mine.left);
            listed.push_back(detail::cast_step(sums.next(left.count), 1.0, left));
            listed.push_back(orthogonalize(mine, mine.left));
            listed.push_back(
                {.kind = Kind::multiply_left,
                 .dtype = mine.dtype,
                 .from = feedback.inputs(run, k),
                 .to = mine.own_right.data(),
                 .left = left.data,
                 .room = mine.chunks.data(),
                 .size = mine.size}
            );
        }
        compute_listed();
        Message message = message_of(run);
        for_compressed(run, [&](std::size_t, Factors const& mine) {
            Buffer const right = numbers(mine, mine.own_right);
            listed.push_back(detail::cast_step(right, 1.0, message.next(right.count)));
        });
        compute_listed();
        return message.count;
    }
    /// The products of the sums, and this rank's residuals.
    void deliver(BucketRun const& run) {
        auto* const verdict = verdicts.of<double>(run);
        Message sums = message_of(run);
        for_compressed(run, [&](std::size_t k, Factors const& mine) {
            Step product = product_step(mine, sums.next(mine.size.rank * mine.size.columns).data);
            product.kind = Kind::multiply;
            product.dtype = run.buffer.dtype;
            product.to = run.part(k).data;
            product.only_if = verdict;
            listed.push_back(product);
        });
        if (listed.empty()) {
            return;
        }
        listed.push_back(
            {.kind = Kind::note_not_finite,
             .dtype = DType::f64,
             .from_dtype = run.buffer.dtype,
             .from = run.buffer.data,
             .to = verdict + 1,
             .count = run.buffer.count}
        );
        sums = message_of(run);
        for_compressed(run, [&](std::size_t k, Factors const& mine) {
            // From zeros no later round would find a direction.
            listed.push_back(
                {.kind = Kind::keep_rows,
                 .dtype = mine.dtype,
                 .from = sums.next(mine.size.rank * mine.size.columns).data,
                 .to = mine.right.data(),
                 .only_if = verdict + 1,
                 .size = mine.size}
            );
            if (error_feedback) {
                Step rest = product_step(mine, mine.own_right.data());
                rest.kind = Kind::subtract;
                rest.from = feedback.inputs(run, k);
                rest.to = feedback.residual(run.parts[k].parameter);
                rest.only_if = verdict + 1;
                listed.push_back(rest);
            }
        });
        compute_listed();
    }
    template <class F>
    void for_compressed(BucketRun const& run, F const& f) {
        for (std::size_t k = 0; k < run.parts.size(); ++k) {
            if (Factors& mine = factors[run.parts[k].parameter]; mine.size.rank != 0) {
                f(k, mine);
            }
        }
    }
    [[nodiscard]] Step orthogonalize(Factors const& mine, Arena const& matrix) const {
        std::size_t const count = numbers(mine, matrix).count;
        return {
            .kind = Kind::orthogonalize,
            .dtype = mine.dtype,
            .to = matrix.data(),
            .number = epsilon,
            .size = {1, count / mine.size.rank, mine.size.rank}
        };
    }
    /// The left matrix times a right one; the kind and the target are missing.
    [[nodiscard]] Step product_step(Factors const& mine, void const* right) {
        bool const needs_row = detail::is_on_host(*device);
        return {
            .kind = Kind::multiply,
            .dtype = mine.dtype,
            .left = mine.left.data(),
            .right = right,
            .room =
                needs_row ? row.data(mine.size.columns * joinable::size_of(mine.dtype)) : nullptr,
            .size = mine.size,
            .count = mine.size.rows * mine.size.columns
        };
    }
};

}} // namespace joinable::v0
