// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <joinable/communicator/detail/ranks.hpp>
#include <joinable/communicator/tcp/detail/frame.hpp>
#include <joinable/config.hpp>
#include <joinable/error.hpp>
#include <joinable/reduction/reduce.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The collectives in which some but not all ranks have arrived. Ranks arrive in order, so the
/// oldest completes first.
class OpenCollectives {
public:
    explicit OpenCollectives(int size) : size_{static_cast<std::size_t>(size)} {}

    /// Whether a rank may send this header. If so, its size is right.
    [[nodiscard]] bool is_arrival(FrameHeader const& header, int rank) const noexcept;
    /// Whether a rank sends data with its arrival.
    [[nodiscard]] static bool contributes(FrameHeader const& header, int rank) noexcept {
        return header.collective == Collective::all_reduce ||
               (header.collective == Collective::broadcast && header.root == rank);
    }

    /// Whether the rank has arrived in this collective, or in a later one.
    [[nodiscard]] bool has_arrived(std::uint64_t sequence, int rank) const noexcept {
        return sequence < first_ + place_of_next(rank);
    }

    /// Where `rank` puts its contribution, starting with byte `done`.
    /// @pre is_arrival(header, rank), and the rank has no other unfinished arrival
    [[nodiscard]] std::span<std::byte>
    place(FrameHeader const& header, int rank, std::uint64_t done);
    /// Call this when the body is complete.
    void arrive(FrameHeader const& header, int rank);

    [[nodiscard]] bool is_complete() const noexcept {
        return !open_.empty() && open_.front().arrived == size_;
    }
    /// Why the oldest collective cannot run. @pre is_complete()
    [[nodiscard]] std::optional<AbortReason> disagreement() const;
    /// Runs the oldest collective, and calls `give(rank, sequence, body)` for each rank, for rank 0
    /// last.
    /// @pre is_complete()
    template <class Give>
    void finish(Give const& give) {
        Open open = std::move(open_.front());
        open_.pop_front();
        std::uint64_t const sequence = first_++;
        Descriptor const& signature = *open.signatures.front();
        std::size_t const root = as_index(signature.root);
        if (signature.collective == Collective::all_reduce && signature.count != 0) {
            auto const in = [&](std::size_t rank) { return open.bodies[rank].data(); };
            auto const out = [&](std::size_t) { return open.bodies[0].data(); };
            reduce_to(signature.dtype, signature.op, {size_, in}, {1, out}, signature.count);
        }
        for (std::size_t rank = size_; rank-- > 0;) {
            bool const is_given = signature.collective == Collective::all_reduce ||
                                  (signature.collective == Collective::broadcast && rank != root);
            std::span<std::byte const> const body{open.bodies[root]};
            give(static_cast<int>(rank), sequence, is_given ? body : body.first(0));
        }
    }

    [[nodiscard]] bool is_finished(std::uint64_t sequence) const noexcept {
        return sequence < first_;
    }
    /// The ranks that have not arrived. @pre not is_finished(sequence)
    [[nodiscard]] std::vector<int> missing(std::uint64_t sequence) const;

private:
    struct Open {
        explicit Open(std::size_t size) : signatures(size), bodies(size) {}

        std::vector<std::optional<Descriptor>> signatures; ///< from those that have arrived
        std::vector<std::vector<std::byte>> bodies;
        std::size_t arrived = 0;
    };

    [[nodiscard]] std::size_t place_of_next(int rank) const noexcept;

    std::size_t size_;
    std::uint64_t first_ = 0; ///< sequence number of the oldest collective
    std::deque<Open> open_;
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/tcp/detail/impl/collectives.ipp>
#endif
