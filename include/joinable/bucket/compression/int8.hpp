// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include <joinable/bucket/bucket_reduction.hpp>
#include <joinable/bucket/compression/detail/blocks.hpp>
#include <joinable/bucket/compression/detail/feedback.hpp>
#include <joinable/bucket/compression/detail/numbers.hpp>
#include <joinable/communicator/any_work.hpp>
#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/device/host.hpp>
#include <joinable/device/scratch.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 {

/// Sends one byte for each element, and an f32 for each block of 256: the largest absolute value of the block is 127. Each
/// rank gets one part of the bucket from all others, adds it up, and sends the sum in the same form, so an element needs 2
/// bytes however many ranks there are. What rounding loses is added to the next gradients: by each rank what its own lost,
/// and by the rank of a part what the sum of that lost. The averages delivered plus the residuals of all ranks are the sum
/// of the gradients, but for rounding. A bucket whose averages are not finite delivers them and leaves its residuals; so
/// does a round without contributors, which delivers zeros. A block with a number that is not finite, or above 4e40,
/// becomes NaN. For buckets in host memory: for others the model is refused when it is made.
/// Complexity: linear in the elements. Memory: two numbers and two bytes for each, and 284 bytes for each parameter and
/// rank.
struct Int8Compression {
    static constexpr std::string_view name = "Int8Compression";
    static constexpr bool delivers = true;
    static constexpr std::size_t steps = 2;

    detail::Feedback feedback{};
    detail::RunMemory outgoing{};
    detail::RunMemory incoming{};
    /// The bytes that a run sends to each rank, and gets from it, by its first parameter.
    std::vector<std::vector<std::size_t>> sent{};
    std::vector<std::vector<std::size_t>> received{};
    detail::Scratch sums{detail::the_host()}; ///< of this rank's part of a run
    std::size_t own_rank = 0;
    std::size_t ranks = 0;

    template <Communicator Comm>
    [[nodiscard]] static bool scales(Comm&) noexcept {
        return false;
    }
    /// @throws ContractViolation  buckets are on a device.
    template <Communicator Comm>
    void prepare(Comm& comm, BucketParts parts) {
        static_assert(
            AllToAlls<Comm> && AllGathers<Comm>,
            "Int8Compression: this communicator has no all_to_all or no all_gather; give it both, or use "
            "Bf16Compression"
        );
        detail::require_host_buckets(comm, name);
        own_rank = static_cast<std::size_t>(comm.rank());
        ranks = static_cast<std::size_t>(comm.size());
        feedback.prepare(detail::the_host(), parts);
        auto const bytes = [](BucketPart const& part) {
            return detail::bytes_of_blocks(part.count);
        };
        outgoing.prepare(comm, parts, ranks * sizeof(Flag), bytes);
        // The parts of ranks differ by one block.
        std::size_t const more = sizeof(Flag) + detail::bytes_of_blocks(detail::numbers_of_block);
        incoming.prepare(comm, parts, ranks * more, bytes);
        prepare_counts(parts);
    }
    template <Communicator Comm>
    [[nodiscard]] AnyWork
    start(Comm& comm, BucketRun const& run, double /*factor*/, bool contributes) {
        std::byte* const message = outgoing.of(run);
        detail::visit_number(run.buffer.dtype, [&]<class T>(T) {
            write_parts<T>(run, contributes, message);
        });
        std::size_t const first = run.parts[0].parameter;
        std::size_t expected = 0;
        for (std::size_t rank = 0; rank < ranks; ++rank) {
            sent[first][rank] = bytes_of(run, rank);
            expected += received[first][rank] = bytes_of(run, own_rank);
        }
        return AnyWork{comm.all_to_all(
            ConstBuffer{message, total_of(run), DType::u8},
            Buffer{incoming.of(run), expected, DType::u8},
            std::span<std::size_t const>{sent[first]},
            std::span<std::size_t const>{received[first]}
        )};
    }
    template <Communicator Comm>
    [[nodiscard]] AnyWork advance(Comm& comm, BucketRun const& run, std::size_t /*step*/) {
        std::byte* const message = outgoing.of(run);
        detail::visit_number(run.buffer.dtype, [&]<class T>(T) { add_parts<T>(run, message); });
        std::size_t const first = run.parts[0].parameter;
        return AnyWork{comm.all_gather(
            ConstBuffer{message, bytes_of(run, own_rank), DType::u8},
            Buffer{incoming.of(run), total_of(run), DType::u8},
            std::span<std::size_t const>{sent[first]}
        )};
    }
    template <Communicator Comm>
    void finish(Comm&, BucketRun const& run) {
        detail::visit_number(run.buffer.dtype, [&]<class T>(T) { deliver<T>(run); });
    }

    /// Multiplies what this rank keeps, after the scale of the loss was multiplied by `factor`. Between rounds. Local.
    void scale_residuals(double factor) { feedback.scale(factor); }

    /// The residuals, for a Checkpoint.
    void save(ReductionState& state) const { feedback.save(state); }
    static void load(ReductionState const& /*state*/) noexcept {}

private:
    using Flag = std::uint32_t; ///< how many ranks contribute; before each part

    /// A rank's part of a run, in elements.
    struct Part {
        std::size_t begin;
        std::size_t count;
    };
    [[nodiscard]] Part part_of(BucketRun const& run, std::size_t rank) const noexcept {
        std::size_t const count = run.buffer.count;
        std::size_t const blocks = detail::blocks_of(count);
        auto const begin_of = [&](std::size_t of) {
            std::size_t const block = blocks / ranks * of + (std::min)(of, blocks % ranks);
            return (std::min)(block * detail::numbers_of_block, count);
        };
        return {begin_of(rank), begin_of(rank + 1) - begin_of(rank)};
    }
    [[nodiscard]] std::size_t bytes_of(BucketRun const& run, std::size_t rank) const noexcept {
        return sizeof(Flag) + detail::bytes_of_blocks(part_of(run, rank).count);
    }
    [[nodiscard]] std::size_t total_of(BucketRun const& run) const noexcept {
        return ranks * sizeof(Flag) + detail::bytes_of_blocks(run.buffer.count);
    }
    void prepare_counts(BucketParts parts) {
        std::size_t parameters = 0;
        std::size_t longest = 0; // of a bucket
        for (BucketPart const& part : parts) {
            parameters = (std::max)(parameters, part.parameter + 1);
            longest = (std::max)(longest, part.offset + part.count);
        }
        sent.assign(parameters, std::vector<std::size_t>(ranks));
        received.assign(parameters, std::vector<std::size_t>(ranks));
        static_cast<void>(sums.data( // rounds allocate nothing
            (longest / ranks + 2 * detail::numbers_of_block) * sizeof(double)
        ));
    }

    /// Step 0: a part for each rank. What rounding loses stays in the inputs.
    template <class T>
    void write_parts(BucketRun const& run, bool contributes, std::byte* message) {
        for (std::size_t k = 0; k < run.parts.size(); ++k) {
            feedback.add<T>(run, k);
        }
        T* const inputs = feedback.inputs<T>(run);
        Flag const flag = contributes ? 1 : 0;
        for (std::size_t rank = 0; rank < ranks; ++rank) {
            auto const [begin, count] = part_of(run, rank);
            std::memcpy(message, &flag, sizeof flag);
            detail::write_blocks(inputs + begin, count, message + sizeof flag);
            message += bytes_of(run, rank);
        }
    }
    /// Step 1: the sum of this rank's part, in rank order.
    template <class T>
    void add_parts(BucketRun const& run, std::byte* message) {
        auto const [begin, count] = part_of(run, own_rank);
        T* const sum = reinterpret_cast<T*>(sums.data(count * sizeof(T)));
        std::fill_n(sum, count, T{0});
        Flag contributors = 0;
        std::byte const* part = incoming.of(run);
        for (std::size_t rank = 0; rank < ranks; ++rank) {
            contributors += flag_of(part);
            detail::read_blocks<T>(part + sizeof(Flag), count, [&](std::size_t i, T number) {
                sum[i] += number;
            });
            part += bytes_of(run, own_rank);
        }
        std::memcpy(message, &contributors, sizeof contributors);
        detail::write_blocks(sum, count, message + sizeof contributors);
        T* const lost = feedback.inputs<T>(run) + begin;
        for (std::size_t i = 0; i < count; ++i) {
            lost[i] += sum[i];
        }
    }
    template <class T>
    void deliver(BucketRun const& run) {
        std::byte const* part = incoming.of(run);
        if (flag_of(part) == 0) {
            detail::write_zeros(run.buffer);
            return;
        }
        auto* const to = static_cast<std::byte*>(run.buffer.data);
        detail::visit_floating(run.buffer.dtype, [&]<class E>(std::type_identity<E>) {
            for (std::size_t rank = 0; rank < ranks; ++rank) {
                auto const [begin, count] = part_of(run, rank);
                std::byte* const first = to + begin * sizeof(E);
                detail::read_blocks<T>(part + sizeof(Flag), count, [&](std::size_t i, T number) {
                    if constexpr (std::same_as<E, double>) {
                        detail::store<E>(first + i * sizeof(E), static_cast<E>(number));
                    } else {
                        detail::store<E>(
                            first + i * sizeof(E), static_cast<E>(static_cast<float>(number))
                        );
                    }
                });
                part += bytes_of(run, rank);
            }
        });
        feedback.keep_if_finite<T>(run);
    }
    [[nodiscard]] static Flag flag_of(std::byte const* part) noexcept {
        Flag flag;
        std::memcpy(&flag, part, sizeof flag);
        return flag;
    }
};

}} // namespace joinable::v0
