// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/bucket/bucket_reduction.hpp>
#include <joinable/bucket/compression/detail/feedback.hpp>
#include <joinable/bucket/compression/detail/low_rank.hpp>
#include <joinable/bucket/compression/detail/numbers.hpp>
#include <joinable/communicator/any_work.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/detail/hash.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/host.hpp>
#include <joinable/device/scratch.hpp>
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
    Arena own_right;          ///< this rank's summand
    bool is_started = false;
    double contributors = 0; ///< of the run that begins here

    template <class T>
    [[nodiscard]] static T* numbers(Arena const& arena) noexcept {
        return reinterpret_cast<T*>(arena.data());
    }
};

} // namespace detail

/// Sends each gradient as the product of two thin matrices: a gradient of n x m elements needs (n + m) x rank numbers, in
/// two sums. What the product leaves out is added to the rank's next gradient. Source: Vogels, Karimireddy and Jaggi,
/// "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019; the sums, and so the averages,
/// are those of PyTorch's powerSGD_hook. The rows of the matrix lie along the dimension of the largest stride.
/// Dimensions of extent 1 do not count. Gradients of one dimension, and those that would not get smaller by
/// `min_compression_rate`, travel whole, with the first sum. The averages delivered plus the residuals of all ranks are the
/// sum of the gradients, but for rounding. A bucket whose averages are not finite delivers them and leaves its residuals;
/// so does a round without contributors, which delivers zeros. For buckets in host memory: for others the model is refused
/// when it is made.
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
    std::vector<detail::LowRankFactors> factors{}; ///< per parameter
    detail::Scratch row{detail::the_host()};       ///< of a product

    template <Communicator Comm>
    [[nodiscard]] static bool scales(Comm&) noexcept {
        return false;
    }
    /// @throws ContractViolation  a setting is out of range, or buckets are on a device.
    template <Communicator Comm>
    void prepare(Comm& comm, BucketParts parts) {
        detail::require_host_buckets(comm, name);
        require_settings();
        feedback.prepare(parts);
        for (BucketPart const& part : parts) {
            prepare_factors(part);
        }
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
        Buffer message{messages.of(run), 0, detail::number_dtype(run.buffer.dtype)};
        detail::visit_number(run.buffer.dtype, [&]<class T>(T) {
            message.count = write_lefts(run, contributes, static_cast<T*>(message.data));
        });
        return AnyWork{comm.all_reduce(message, ReduceOp::sum)};
    }
    template <Communicator Comm>
    [[nodiscard]] AnyWork advance(Comm& comm, BucketRun const& run, std::size_t /*step*/) {
        Buffer message{messages.of(run), 0, detail::number_dtype(run.buffer.dtype)};
        if (is_compressing()) {
            detail::visit_number(run.buffer.dtype, [&]<class T>(T) {
                message.count = write_rights(run, static_cast<T*>(message.data));
            });
        }
        return message.count == 0 ? AnyWork{CompletedWork{}}
                                  : AnyWork{comm.all_reduce(message, ReduceOp::sum)};
    }
    template <Communicator Comm>
    void finish(Comm&, BucketRun const& run) {
        if (is_compressing()) {
            detail::visit_number(run.buffer.dtype, [&]<class T>(T) {
                deliver(run, messages.of<T>(run));
            });
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

    /// Multiplies what this rank keeps, after the scale of the loss was multiplied by `factor`. Between rounds. Local.
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
                    {"warm_start", i, mine.right.data(), mine.dtype, extents, strides, true}
                );
            }
        }
    }
    /// Zeros are of a matrix that no round has begun with.
    void load(ReductionState const& /*state*/) noexcept {
        for (Factors& mine : factors) {
            auto const bytes = std::span{mine.right.data(), mine.right.bytes()};
            mine.is_started = std::any_of(bytes.begin(), bytes.end(), [](std::byte byte) {
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
            mine.right = Arena{most * columns * size};
            mine.own_right = Arena{most * columns * size};
            mine.left = Arena{most * rows * size};
            mine.is_started = false;
        }
        static_cast<void>(row.data(columns * size)); // rounds allocate nothing
    }
    /// The most that a sum has of a parameter.
    [[nodiscard]] std::size_t numbers_of(BucketPart const& part) const noexcept {
        auto const [rows, columns, most] = factors[part.parameter].size;
        return most == 0 ? part.count : most * (std::max)(rows, columns);
    }

    /// Step 0: how many ranks contribute, what travels whole, and the left matrices. Returns the number of numbers.
    template <class T>
    std::size_t write_lefts(BucketRun const& run, bool contributes, T* message) {
        std::size_t at = 0;
        message[at++] = contributes ? T{1} : T{0};
        for (std::size_t k = 0; k < run.parts.size(); ++k) {
            BucketPart const& part = run.parts[k];
            Factors& mine = factors[part.parameter];
            if (mine.size.rank == 0) {
                detail::cast_to(run.part(k), 1.0, message + at);
                at += part.count;
                continue;
            }
            T* const right = Factors::numbers<T>(mine.right);
            if (!mine.is_started || !warm_start) {
                auto const number = detail::Hash{}.add(seed).add(part.parameter).add(rounds);
                detail::fill_random(right, mine.size.rank * mine.size.columns, number.value());
                mine.is_started = true;
            }
            detail::orthogonalize(right, mine.size.rank, mine.size.columns, epsilon);
            detail::multiply_right(mine.size, feedback.add<T>(run, k), right, message + at);
            at += mine.size.rank * mine.size.rows;
        }
        return at;
    }
    /// Step 1: takes what step 0 summed, and writes the right matrices.
    template <class T>
    std::size_t write_rights(BucketRun const& run, T* message) {
        std::size_t from = 0;
        factors[run.parts[0].parameter].contributors = static_cast<double>(message[from++]);
        for (std::size_t k = 0; k < run.parts.size(); ++k) {
            Factors& mine = factors[run.parts[k].parameter];
            if (mine.size.rank == 0) {
                detail::cast_from(message + from, run.part(k));
                from += run.parts[k].count;
                continue;
            }
            std::size_t const count = mine.size.rank * mine.size.rows;
            T* const left = Factors::numbers<T>(mine.left);
            std::copy_n(message + from, count, left);
            from += count;
            detail::orthogonalize(left, mine.size.rank, mine.size.rows, epsilon);
        }
        std::size_t at = 0;
        for_compressed(run, [&](std::size_t k, Factors& mine) {
            std::size_t const count = mine.size.rank * mine.size.columns;
            T* const right = Factors::numbers<T>(mine.own_right);
            T const* const inputs = feedback.inputs<T>(run, k);
            detail::multiply_left(mine.size, inputs, Factors::numbers<T>(mine.left), right);
            std::copy_n(right, count, message + at);
            at += count;
        });
        return at;
    }
    /// The products of the sums, and this rank's residuals.
    template <class T>
    void deliver(BucketRun const& run, T const* message) {
        if (factors[run.parts[0].parameter].contributors == 0) {
            detail::write_zeros(run.buffer);
            return;
        }
        std::size_t at = 0;
        for_compressed(run, [&](std::size_t k, Factors& mine) {
            write_product(run.part(k), mine, message + at);
            at += mine.size.rank * mine.size.columns;
        });
        if (!detail::are_finite(run.buffer)) {
            return;
        }
        at = 0;
        for_compressed(run, [&](std::size_t k, Factors& mine) {
            std::size_t const count = mine.size.columns;
            for (std::size_t r = 0; r < mine.size.rank; ++r, at += count) {
                // From zeros no later round would find a direction.
                if (detail::inner_product(message + at, message + at, count) > 0) {
                    std::copy_n(message + at, count, Factors::numbers<T>(mine.right) + r * count);
                }
            }
            if (error_feedback) {
                write_residual<T>(run, k, mine);
            }
        });
    }
    template <class F>
    void for_compressed(BucketRun const& run, F const& f) {
        for (std::size_t k = 0; k < run.parts.size(); ++k) {
            if (Factors& mine = factors[run.parts[k].parameter]; mine.size.rank != 0) {
                f(k, mine);
            }
        }
    }
    /// Room for a row of a product.
    template <class T>
    [[nodiscard]] T* row_of(Factors const& mine) {
        return reinterpret_cast<T*>(row.data(mine.size.columns * sizeof(T)));
    }
    template <class T>
    void write_product(Buffer to, Factors const& mine, T const* right) {
        T const* const left = Factors::numbers<T>(mine.left);
        auto* const bytes = static_cast<std::byte*>(to.data);
        std::size_t const row_bytes = mine.size.columns * joinable::size_of(to.dtype);
        for (std::size_t i = 0; i < mine.size.rows; ++i) {
            std::byte* const at = bytes + i * row_bytes;
            if (to.dtype == DType::f32 || to.dtype == DType::f64) {
                detail::product_row(mine.size, left, right, i, reinterpret_cast<T*>(at));
            } else {
                T* const wide = row_of<T>(mine);
                detail::product_row(mine.size, left, right, i, wide);
                detail::cast_from(wide, Buffer{at, mine.size.columns, to.dtype});
            }
        }
    }
    template <class T>
    void write_residual(BucketRun const& run, std::size_t k, Factors const& mine) {
        T const* const left = Factors::numbers<T>(mine.left);
        T const* const right = Factors::numbers<T>(mine.own_right);
        T* const inputs = feedback.inputs<T>(run, k);
        T* const product = row_of<T>(mine);
        for (std::size_t i = 0; i < mine.size.rows; ++i) {
            detail::product_row(mine.size, left, right, i, product);
            for (std::size_t j = 0; j < mine.size.columns; ++j) {
                inputs[i * mine.size.columns + j] -= product[j];
            }
        }
        feedback.keep<T>(run, k);
    }
};

}} // namespace joinable::v0
