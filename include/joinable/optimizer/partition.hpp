// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string_view>
#include <vector>

#include <joinable/config.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 {

/// How the elements of a model are dealt out to ranks. The owner of an element keeps its optimizer
/// state and steps it.
enum class Partition : std::uint8_t {
    /// Whole parameters. From the largest to the smallest, each goes to the rank that owns the
    /// fewest elements so far; the lowest such rank wins ties.
    by_parameters,
    /// The same number of elements for each rank, across parameter boundaries, in the order in which
    /// they lie in memory. An owner copies a value that is not dense, and a gradient that is not laid
    /// out as its value, whole with each step; ZeroOptions::before_step refuses such gradients.
    flat,
};

/// The unit that is divided among the ranks.
enum class Sharding : std::uint8_t {
    /// Nothing. Each rank steps the whole model with the averages that all ranks have and with its
    /// own settings, which must be the same.
    none,
    /// The optimizer state: the first stage of ZeRO. A round sends one and a half times as many
    /// bytes as with `gradients`.
    optimizer,
    gradients, ///< also the averaged gradients, each only at its owner: the second stage
    /// Also the values; a pass gathers them while it uses them: the third stage. Needs `set_value`
    /// and `release_value` in parameter_traits.
    parameters,
};

[[nodiscard]] constexpr std::string_view name_of(Sharding sharding) noexcept {
    constexpr std::string_view names[] = {"none", "optimizer", "gradients", "parameters"};
    return names[static_cast<std::size_t>(sharding)];
}

namespace detail {

/// Whether the average of a gradient goes only to its owner.
[[nodiscard]] constexpr bool reduces_to_owners(Sharding sharding) noexcept {
    return sharding == Sharding::gradients || sharding == Sharding::parameters;
}

/// A run of elements of one parameter that one rank owns, in memory order.
struct ShardPiece {
    std::size_t parameter; ///< its index
    std::size_t begin;     ///< first element
    std::size_t size;      ///< number of elements
    int owner;
    std::size_t offset; ///< in the bucket, in elements
};

/// The unit of exchange: parameters of one dtype, in one part per rank, in rank order. A flat part
/// may end with padding that no rank owns, so that all parts are equal.
struct ShardBucket {
    DType dtype;
    std::vector<std::size_t> counts;     ///< elements of each rank's part
    std::vector<ShardPiece> pieces;      ///< by offset
    bool is_rows = false;                ///< of one parameter, whose gradients are rows
    std::size_t alone = std::size_t(-1); ///< bytes from which a piece travels alone, if all do not

    [[nodiscard]] std::size_t count() const noexcept {
        return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
    }
    /// The element at which a rank's part begins.
    [[nodiscard]] std::size_t offset_of(int rank) const noexcept {
        return std::accumulate(counts.begin(), counts.begin() + rank, std::size_t{0});
    }
};

/// An owner for each parameter, by the rule of Partition::by_parameters. `loads` holds the elements
/// of each rank and is updated. Complexity: O(n (log n + ranks)).
std::vector<int>
owners_by_size(std::span<std::size_t const> sizes, std::vector<std::size_t>& loads);

/// A parameter of at least this size travels alone if it has one owner: it is sent from where it
/// is, which saves two copies. A smaller one would wait longer for its turn than the copies take. Between threads, a
/// piece of a flat bucket does so, too.
inline constexpr std::size_t lone_bytes = std::size_t{64} << 10U;

/// Runs of parameters of one dtype, in list order, that reach `cap` bytes; `chosen` are indices. A
/// parameter of `alone` bytes or more, or whose gradients are rows, is a run of its own.
std::vector<std::vector<std::size_t>> runs_by_size(
    ParameterList const& parameters,
    std::span<std::size_t const> chosen,
    std::size_t cap,
    std::size_t alone
);

/// Cuts parts by the owners of whole parameters; `owners` has one entry for each parameter of the
/// list.
ShardBucket bucket_by_owners(
    ParameterList const& parameters,
    std::vector<std::size_t> run,
    std::span<int const> owners,
    std::size_t ranks
);

/// Cuts equal parts of whole cache lines.
ShardBucket flat_bucket(
    ParameterList const& parameters, std::vector<std::size_t> const& run, std::size_t ranks
);

} // namespace detail

}} // namespace joinable::v0

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/optimizer/impl/partition.ipp>
#endif
