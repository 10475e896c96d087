// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/config.hpp>

/// @file
/// The checks of every communicator before any data moves. Checks of a rank's own arguments throw
/// ContractViolation on that rank. Checks across ranks throw Mismatch on all of them.

namespace joinable { inline namespace v0 { namespace detail {

void check_reduction(ConstBuffer buffer, ReduceOp op);

void check_scaled(ConstBuffer buffer, ReduceOp op);

void check_memory(ConstBuffer buffer);

/// `what` names the role of the rank: "root", "destination".
void check_rank(std::string_view what, int rank, int size);

/// `color` is that of a group that split() makes.
void check_color(int color);

inline void check_root(int root, int size) {
    check_rank("root", root, size);
}

void check_same_dtype(ConstBuffer a, ConstBuffer b);

void check_count(std::string_view what, std::size_t expected, std::size_t given);

[[nodiscard]] bool overlap(ConstBuffer a, ConstBuffer b) noexcept;

/// Any rank may write one part of a large message while another still reads the next. `part` must
/// therefore lie outside of `whole`, or start exactly at element `own` of it.
void check_place(ConstBuffer part, ConstBuffer whole, std::size_t own);

/// `in` and `out` have one part of equal size for each rank.
void check_parts(ConstBuffer in, ConstBuffer out, int size);

void check_apart(ConstBuffer in, ConstBuffer out);

/// `whole` must have `size` times as many elements as `part`, of the same dtype.
void check_share(ConstBuffer part, ConstBuffer whole, int size);

/// The number of elements before the share of `rank`.
[[nodiscard]] constexpr std::size_t offset_of(Counts counts, std::size_t rank) noexcept {
    std::size_t sum = 0;
    for (std::size_t const count : counts.first(rank)) {
        sum += count;
    }
    return sum;
}

/// `counts` must have one entry per rank, and their sum must be the elements of `whole`.
void check_counts(Counts counts, ConstBuffer whole, int size);

/// The same; `part` must also have this rank's count of elements.
void check_counts(Counts counts, ConstBuffer part, ConstBuffer whole, int rank, int size);

/// Checks that all ranks ask for the same number of bytes. `sizes` has what each rank asks for, by
/// rank. `doing` says what they do.
/// @throws Mismatch  on all ranks, because they compare the same sizes.
void check_same_size(
    std::span<std::uint64_t const> sizes,
    bool is_renumbered,
    std::string_view doing = "share memory"
);

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/detail/impl/checks.ipp>
#endif
