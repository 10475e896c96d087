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

/// How the elements of a model are dealt out to ranks, which own them: an owner keeps their optimizer
/// state and steps them.
enum class Partition : std::uint8_t {
    /// Whole parameters: from the largest to the smallest, each to the rank that owns the fewest
    /// elements so far, the lowest of these.
    by_parameters,
    /// As many elements for each rank, whatever parameters they are of. Values and gradients have to
    /// be dense, and laid out alike.
    flat,
};

/// What each rank has only a part of.
enum class Sharding : std::uint8_t {
    /// Nothing: each rank steps the whole model by averages that all ranks have, and by its own settings, which
    /// have to be the same.
    none,
    /// The state of the optimizer: the first stage of ZeRO. A round sends one and a half times as many bytes as
    /// with `gradients`.
    optimizer,
    gradients, ///< the averages of gradients, too: each goes to its owner alone, the second stage
    /// The values, too: a pass gathers them while it uses them, the third stage. Needs `set_value` and
    /// `release_value` in parameter_traits.
    parameters,
};

[[nodiscard]] constexpr std::string_view name_of(Sharding sharding) noexcept {
    constexpr std::string_view names[] = {"none", "optimizer", "gradients", "parameters"};
    return names[static_cast<std::size_t>(sharding)];
}
/// Whether the average of a gradient goes to its owner alone.
[[nodiscard]] constexpr bool reduces_to_owners(Sharding sharding) noexcept {
    return sharding == Sharding::gradients || sharding == Sharding::parameters;
}

/// A run of elements of one parameter that one rank owns, in the order in which they lie in memory.
struct ShardPiece {
    std::size_t parameter; ///< its index
    std::size_t begin;     ///< first element
    std::size_t size;      ///< number of elements
    int owner;
    std::size_t offset; ///< in the bucket, in elements
};

/// What is exchanged at once: parameters of one dtype, in parts that lie one after another in rank
/// order. A flat part may end with elements of nobody, for all parts to be equal.
struct ShardBucket {
    DType dtype;
    std::vector<std::size_t> counts; ///< elements of each rank's part
    std::vector<ShardPiece> pieces;  ///< by offset

    [[nodiscard]] std::size_t count() const noexcept {
        return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
    }
    /// Where the part of a rank begins.
    [[nodiscard]] std::size_t offset_of(int rank) const noexcept {
        return std::accumulate(counts.begin(), counts.begin() + rank, std::size_t{0});
    }
};

namespace detail {

/// An owner for each of the parameters, by the rule of Partition::by_parameters. `loads` has the
/// elements of each rank before, and gets those after. Complexity: O(n (log n + ranks)).
std::vector<int>
owners_by_size(std::span<std::size_t const> sizes, std::vector<std::size_t>& loads);

/// A parameter of as many bytes travels alone where it has one owner: it is sent from where it is, and
/// saves two copies. A smaller one would wait longer for its turn than copies take.
inline constexpr std::size_t lone_bytes = std::size_t{64} << 10U;

/// Runs of parameters of one dtype, in list order, that reach `cap` bytes; `chosen` are indices. One of
/// `alone` bytes or more is a run of its own.
std::vector<std::vector<std::size_t>> runs_by_size(
    ParameterList const& parameters,
    std::span<std::size_t const> chosen,
    std::size_t cap,
    std::size_t alone
);

/// Parts by the owners of whole parameters; `owners` has one for each of the ParameterList.
ShardBucket bucket_by_owners(
    ParameterList const& parameters,
    std::vector<std::size_t> run,
    std::span<int const> owners,
    std::size_t ranks
);

/// Equal parts, of whole cache lines.
ShardBucket flat_bucket(
    ParameterList const& parameters, std::vector<std::size_t> const& run, std::size_t ranks
);

} // namespace detail

}} // namespace joinable::v0

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/optimizer/partition.ipp>
#endif
