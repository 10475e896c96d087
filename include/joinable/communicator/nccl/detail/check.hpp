// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <joinable/agreement/control.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/nccl/detail/control.hpp>
#include <joinable/communicator/nccl/detail/rank.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The calls that ranks are about to make, as words that all ranks gather.
class NcclSaid {
public:
    /// Collective. Either all ranks have tables of counts or none has.
    NcclSaid(ControlCommunicator& control, Request const& request, bool has_tables)
        : ranks_{static_cast<std::size_t>(control.size())},
          stride_{2 + (has_tables ? 2 * ranks_ : 0)} {
        Descriptor const& said = request.signature;
        std::vector<std::uint64_t> mine(stride_);
        mine[0] = said.word() | (said.has_counts ? by_counts : 0);
        mine[1] = said.count;
        if (has_tables) {
            request.sends.copy_to(std::span{mine}.subspan(2, ranks_));
            request.expects.copy_to(std::span{mine}.subspan(2 + ranks_));
        }
        words_ = control.gather(mine);
    }

    /// Why the ranks' calls do not match, or nothing; the same on every rank.
    [[nodiscard]] std::optional<AbortReason> disagreement() const {
        auto const size = static_cast<int>(ranks_);
        auto reason = find_difference(size, [this](int rank) { return said_by(rank); });
        if (!reason && has_tables()) {
            reason = find_difference_of_counts(
                size,
                said_by(0),
                [this](int from, int to) { return of(from)[2 + index(to)]; },
                [this](int from, int to) { return of(to)[2 + ranks_ + index(from)]; }
            );
        }
        return reason;
    }

private:
    [[nodiscard]] static std::size_t index(int rank) noexcept {
        return static_cast<std::size_t>(rank);
    }
    [[nodiscard]] bool has_tables() const noexcept { return stride_ > 2; }
    [[nodiscard]] std::span<std::uint64_t const> of(int rank) const {
        return std::span{words_}.subspan(index(rank) * stride_, stride_);
    }
    [[nodiscard]] Descriptor said_by(int rank) const {
        std::uint64_t const word = of(rank)[0];
        auto const count = static_cast<std::size_t>(of(rank)[1]);
        return Descriptor::of_word(word & ~by_counts, count, (word & by_counts) != 0);
    }

    static constexpr std::uint64_t by_counts = std::uint64_t{1} << 63U;

    std::size_t ranks_;
    std::size_t stride_;
    std::vector<std::uint64_t> words_;
};

/// Compares the calls that all ranks are about to make. Collective over the control communicator;
/// blocks.
/// @throws Mismatch  on all ranks, after aborting.
inline void agree_on_collective(NcclRank& rank, Request const& mine) {
    std::optional<AbortReason> reason;
    rank.over_control([&](NcclControl& control) {
        // Some ranks may have tables and others not, so tables are compared second.
        reason = NcclSaid{control, mine, false}.disagreement();
        if (!reason && mine.signature.has_counts) {
            reason = NcclSaid{control, mine, true}.disagreement();
        }
    });
    if (reason) {
        rank.fail(*reason);
    }
}

}}} // namespace joinable::v0::detail
