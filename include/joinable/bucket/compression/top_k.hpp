// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string_view>
#include <type_traits>
#include <vector>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/bucket/bucket_reduction.hpp>
#include <joinable/bucket/compression/detail/feedback.hpp>
#include <joinable/bucket/compression/detail/numbers.hpp>
#include <joinable/communicator/any_work.hpp>
#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/host.hpp>
#include <joinable/device/scratch.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 {

/// Sends of each gradient only the elements that are largest in absolute value, with their indices, by one all-gather. All
/// others are added to the rank's next gradient. Source: Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", 2018.
/// Of n elements it sends max(1, density x n), as 8 bytes each (12 of f64); a number that is not finite counts as the
/// largest. Entries are added in rank order. A bucket for which that would be more bytes than its own, from all ranks
/// together, travels whole. The averages delivered plus the residuals of all ranks are the sum of the gradients, but for
/// rounding. A bucket whose averages are not finite delivers them and leaves its residuals; so does a round without
/// contributors, which delivers zeros; but a bucket that travels whole sends what is left of a time when it did not. For
/// buckets in host memory: for others the model is refused when it is made.
/// Complexity: linear in the elements. Memory: two numbers and an index for each.
struct TopK {
    static constexpr std::string_view name = "TopK";
    static constexpr bool delivers = true;

    double density = 0.01; ///< in (0, 1]

    detail::Feedback feedback{};
    detail::RunMemory sent{};
    detail::RunMemory received{};
    std::vector<bool> is_sparse{};            ///< per bucket
    std::vector<std::size_t> kept{};          ///< per parameter: how many of its elements are sent
    std::vector<std::uint32_t> order{};       ///< of the elements of one gradient
    detail::Scratch sums{detail::the_host()}; ///< of a gradient

    template <Communicator Comm>
    [[nodiscard]] static bool scales(Comm&) noexcept {
        return false;
    }
    /// @throws ContractViolation  the density is out of range, a gradient has 2^32 elements or more, or buckets are on a
    ///         device.
    template <Communicator Comm>
    void prepare(Comm& comm, BucketParts parts) {
        static_assert(
            AllGathers<Comm>,
            "TopK: this communicator has no all_gather; give it one, or use PowerSgd"
        );
        detail::require_host_buckets(comm, name);
        if (!(density > 0 && density <= 1)) {
            throw ContractViolation{detail::concat(
                "TopK: density is ",
                density,
                "; give the part of the elements that is sent, above 0 and at most 1"
            )};
        }
        std::size_t longest = 0;
        for (BucketPart const& part : parts) {
            longest = (std::max)(longest, part.count);
        }
        if (longest > UINT32_MAX) {
            throw ContractViolation{
                "TopK: a gradient has more elements than 32 bits can count; use PowerSgd"
            };
        }
        feedback.prepare(detail::the_host(), parts);
        auto const ranks = static_cast<std::size_t>(comm.size());
        find_kept(parts, ranks);
        auto const words = [&](BucketPart const& part) {
            return is_sparse[part.bucket] ? words_of(part) * sizeof(Word) : 0;
        };
        sent.prepare(comm, parts, sizeof(Word), words);
        received.prepare(comm, parts, ranks * sizeof(Word), [&](BucketPart const& part) {
            return ranks * words(part);
        });
        order.resize(longest);
        static_cast<void>(sums.data(longest * sizeof(double))); // rounds allocate nothing
    }
    template <Communicator Comm>
    [[nodiscard]] AnyWork
    start(Comm& comm, BucketRun const& run, double /*factor*/, bool contributes) {
        if (!is_sparse[run.bucket]) {
            detail::visit_number(run.buffer.dtype, [&]<class T>(T) { write_all<T>(run); });
            return AnyWork{comm.all_reduce(run.buffer, ReduceOp::sum)};
        }
        auto* const message = sent.of<Word>(run);
        std::size_t count = 0;
        detail::visit_number(run.buffer.dtype, [&]<class T>(T) {
            count = write_largest<T>(run, contributes, message);
        });
        auto const ranks = static_cast<std::size_t>(comm.size());
        return AnyWork{comm.all_gather(
            ConstBuffer{message, count, DType::u32},
            Buffer{received.of(run), ranks * count, DType::u32}
        )};
    }
    template <Communicator Comm>
    void finish(Comm& comm, BucketRun const& run) {
        detail::visit_number(run.buffer.dtype, [&]<class T>(T) {
            deliver<T>(run, static_cast<std::size_t>(comm.size()));
        });
    }
    void agree_on(AgreementList& list) const { list.add("density", density); }

    /// Multiplies what this rank keeps, after the scale of the loss was multiplied by `factor`. Between rounds. Local.
    void scale_residuals(double factor) { feedback.scale(factor); }

    /// The residuals, for a Checkpoint.
    void save(ReductionState& state) const { feedback.save(state); }
    static void load(ReductionState const& /*state*/) noexcept {}

private:
    using Word = std::uint32_t;

    template <class T>
    static constexpr std::size_t words_of_entry = 1 + sizeof(T) / sizeof(Word);

    [[nodiscard]] std::size_t kept_of(BucketPart const& part) const noexcept {
        return kept[part.parameter];
    }
    [[nodiscard]] std::size_t words_of(BucketPart const& part) const noexcept {
        return kept_of(part) * (1 + detail::number_size(part.dtype) / sizeof(Word));
    }
    /// From sizes alone. A density that changes later counts from the next call on.
    void find_kept(BucketParts parts, std::size_t ranks) {
        for (BucketPart const& part : parts) {
            auto const wanted = static_cast<std::size_t>(density * static_cast<double>(part.count));
            detail::of_parameter(kept, part.parameter) =
                (std::min)((std::max)(wanted, std::size_t{1}), part.count);
        }
        is_sparse.clear();
        for (std::size_t k = 0; k < parts.size();) {
            std::size_t const bucket = parts[k].bucket;
            std::size_t entries = 0;
            std::size_t whole = 0;
            for (; k < parts.size() && parts[k].bucket == bucket; ++k) {
                entries += words_of(parts[k]) * sizeof(Word);
                whole += parts[k].count * size_of(parts[k].dtype);
            }
            is_sparse.push_back(ranks * entries < whole);
        }
    }

    /// A bucket that travels whole takes what was left out while it was cut otherwise.
    template <class T>
    void write_all(BucketRun const& run) {
        for (std::size_t k = 0; k < run.parts.size(); ++k) {
            detail::cast_from<T>(feedback.add<T>(run, k), run.part(k));
        }
    }
    /// Whether this rank contributes, then an index and a number for each entry. Returns the number of words.
    template <class T>
    std::size_t write_largest(BucketRun const& run, bool contributes, Word* message) {
        std::size_t at = 0;
        message[at++] = contributes ? 1 : 0;
        for (std::size_t k = 0; k < run.parts.size(); ++k) {
            T const* const inputs = feedback.add<T>(run, k);
            std::size_t const entries = kept_of(run.parts[k]);
            auto const begin = order.begin();
            auto const end = begin + static_cast<std::ptrdiff_t>(run.parts[k].count);
            std::iota(begin, end, Word{0});
            auto const key_of = [&](Word i) { // numbers that are not finite have the largest bits
                using Bits = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;
                Bits bits;
                std::memcpy(&bits, inputs + i, sizeof(T));
                return static_cast<Bits>(bits << 1);
            };
            auto const middle = begin + static_cast<std::ptrdiff_t>(entries);
            if (middle != end) {
                std::nth_element(begin, middle, end, [&](Word a, Word b) {
                    auto const of_a = key_of(a);
                    auto const of_b = key_of(b);
                    return of_a != of_b ? of_a > of_b : a < b;
                });
            }
            for (std::size_t e = 0; e < entries; ++e, at += words_of_entry<T>) {
                message[at] = order[e];
                std::memcpy(message + at + 1, inputs + order[e], sizeof(T));
            }
        }
        return at;
    }
    template <class T>
    void deliver(BucketRun const& run, std::size_t ranks) {
        if (!is_sparse[run.bucket]) {
            std::fill_n(feedback.inputs<T>(run), run.buffer.count, T{0});
            feedback.keep_if_finite<T>(run);
            return;
        }
        Word const* const message = received.of<Word>(run);
        std::size_t words = 1;
        for (BucketPart const& part : run.parts) {
            words += kept_of(part) * words_of_entry<T>;
        }
        std::size_t contributors = 0;
        for (std::size_t rank = 0; rank < ranks; ++rank) {
            contributors += message[rank * words];
        }
        if (contributors == 0) {
            detail::write_zeros(run.buffer);
            return;
        }
        Word const* const own = sent.of<Word>(run);
        std::size_t at = 1;
        for (std::size_t k = 0; k < run.parts.size(); ++k) {
            std::size_t const entries = kept_of(run.parts[k]);
            add_entries<T>(run.part(k), message + at, words, ranks, entries);
            T* const inputs = feedback.inputs<T>(run, k);
            for (std::size_t e = 0; e < entries; ++e, at += words_of_entry<T>) {
                inputs[own[at]] = 0; // it was sent
            }
        }
        feedback.keep_if_finite<T>(run);
    }
    template <class T>
    void add_entries(
        Buffer to, Word const* first, std::size_t words, std::size_t ranks, std::size_t entries
    ) {
        T* const result = reinterpret_cast<T*>(sums.data(to.count * sizeof(T)));
        std::fill_n(result, to.count, T{0});
        for (std::size_t rank = 0; rank < ranks; ++rank) {
            for (std::size_t e = 0; e < entries; ++e) {
                Word const* const entry = first + rank * words + e * words_of_entry<T>;
                T number;
                std::memcpy(&number, entry + 1, sizeof(T));
                result[entry[0]] += number;
            }
        }
        detail::cast_from<T>(result, to);
    }
};

}} // namespace joinable::v0
