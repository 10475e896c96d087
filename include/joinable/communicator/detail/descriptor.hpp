// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <joinable/communicator/communicator.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The maximum number of ranks of a host communicator: a root must fit into 13 bits of an arrival.
inline constexpr int max_ranks = 1 << 13;

enum class Collective : std::uint8_t {
    all_reduce,
    broadcast,
    barrier,
    reduce,
    all_gather,
    reduce_scatter,
    gather,
    scatter,
    all_to_all,
    scaled_all_reduce,
    scaled_reduce_scatter,
};
/// No rank requests it, but ranks that split a communicator compare it with what the others do.
inline constexpr Collective split_collective{11};

[[nodiscard]] constexpr std::string_view name_of(Collective collective) noexcept {
    constexpr std::string_view names[] = {
        "all_reduce",
        "broadcast",
        "barrier",
        "reduce",
        "all_gather",
        "reduce_scatter",
        "gather",
        "scatter",
        "all_to_all",
        "scaled all_reduce",
        "scaled reduce_scatter",
        "split",
    };
    return names[static_cast<std::size_t>(collective)];
}

[[nodiscard]] constexpr bool is_scaled(Collective collective) noexcept {
    return collective == Collective::scaled_all_reduce ||
           collective == Collective::scaled_reduce_scatter;
}

/// Describes the collective that a rank is about to run. It must be the same on all ranks.
struct Descriptor {
    Collective collective = Collective::barrier;
    DType dtype = DType::u8;
    ReduceOp op = ReduceOp::sum;
    int root = 0;
    std::size_t count = 0;   ///< elements of one rank's share, or of all if there are no shares
    bool has_counts = false; ///< shares differ; tables have them, and `count` is not compared
    double factor = 1.0;     ///< of a scaled sum: differs between ranks, so it is not compared

    friend bool operator==(Descriptor const& a, Descriptor const& b) noexcept {
        return a.collective == b.collective && a.dtype == b.dtype && a.op == b.op &&
               a.root == b.root && a.has_counts == b.has_counts &&
               (a.has_counts || a.count == b.count);
    }

    /// Collective, dtype, operation and root as one number, with the root in the highest bits. It
    /// has 24 bits if there are at most max_ranks.
    [[nodiscard]] constexpr std::uint64_t word() const noexcept {
        static_assert(dtype_count <= 16, "a dtype has four bits");
        static_assert(reduce_op_count <= 8, "an operation has three bits");
        return static_cast<std::uint64_t>(collective) | static_cast<std::uint64_t>(dtype) << 4U |
               static_cast<std::uint64_t>(op) << 8U | static_cast<std::uint64_t>(root) << 11U;
    }
    [[nodiscard]] static constexpr Descriptor
    of_word(std::uint64_t word, std::size_t count, bool has_counts) noexcept {
        return {
            static_cast<Collective>(word & 0xfU),
            static_cast<DType>(word >> 4U & 0xfU),
            static_cast<ReduceOp>(word >> 8U & 0x7U),
            static_cast<int>(word >> 11U),
            count,
            has_counts
        };
    }

    /// The whole signature, in words that ranks compare.
    [[nodiscard]] constexpr std::array<std::uint64_t, 2> words() const noexcept {
        return {word() | (has_counts ? by_counts : 0), count};
    }
    [[nodiscard]] static constexpr Descriptor of_words(std::span<std::uint64_t const> words
    ) noexcept {
        return of_word(
            words[0] & ~by_counts, static_cast<std::size_t>(words[1]), (words[0] & by_counts) != 0
        );
    }

    [[nodiscard]] bool is_reduction() const noexcept {
        return collective == Collective::all_reduce || collective == Collective::reduce ||
               collective == Collective::reduce_scatter || is_scaled(collective);
    }

    /// Whether it looks like a sum of agreement_words. A sum of yours may look the same, so only texts ask.
    [[nodiscard]] bool is_agreement() const noexcept {
        return collective == Collective::all_reduce && dtype == DType::u64 && op == ReduceOp::sum &&
               count == agreement_words;
    }

    [[nodiscard]] std::string text() const {
        std::string phrase = concat(name_of(collective));
        if (has_counts) {
            phrase += concat(" by counts of ", joinable::name_of(dtype));
        } else if (collective != Collective::barrier && collective != split_collective) {
            phrase += concat(" of ", count, " ", joinable::name_of(dtype));
        }
        if (is_reduction()) {
            phrase += concat(" with ", joinable::name_of(op));
        }
        if (collective == Collective::broadcast || collective == Collective::scatter) {
            phrase += concat(" from rank ", root);
        }
        if (collective == Collective::reduce || collective == Collective::gather) {
            phrase += concat(" to rank ", root);
        }
        if (is_agreement()) {
            phrase += " (a guard's roll call or entry, or the making of a model)";
        }
        return phrase;
    }

private:
    static constexpr std::uint64_t by_counts = std::uint64_t{1} << 63U;
};

}}} // namespace joinable::v0::detail
