// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/nccl/detail/control.hpp>
#include <joinable/communicator/nccl/detail/rank.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable::inline v0::detail {

/// What each rank says that it is about to do, as words that a sum over ranks gathers: a rank writes
/// its own part, the others' are zero.
class NcclSaid {
public:
    NcclSaid(int size, bool has_tables)
        : ranks_{static_cast<std::size_t>(size)}, stride_{2 + (has_tables ? 2 * ranks_ : 0)},
          words_(ranks_ * stride_) {}

    void say(int rank, Descriptor const& said, Counts sends, Counts expects) {
        std::span<std::uint64_t> const mine = of(rank);
        mine[0] = static_cast<std::uint64_t>(said.collective) |
                  static_cast<std::uint64_t>(said.dtype) << 8U |
                  static_cast<std::uint64_t>(said.op) << 16U |
                  static_cast<std::uint64_t>(said.has_counts) << 24U |
                  static_cast<std::uint64_t>(said.root) << 32U;
        mine[1] = said.has_counts ? 0 : said.count;
        if (has_tables()) {
            std::copy(sends.begin(), sends.end(), mine.subspan(2).begin());
            std::copy(expects.begin(), expects.end(), mine.subspan(2 + ranks_).begin());
        }
    }
    [[nodiscard]] std::span<std::uint64_t> words() noexcept { return words_; }

    [[nodiscard]] Descriptor said_by(int rank) {
        std::uint64_t const word = of(rank)[0];
        return {
            static_cast<Collective>(word & 0xffU),
            static_cast<DType>(word >> 8U & 0xffU),
            static_cast<ReduceOp>(word >> 16U & 0xffU),
            static_cast<int>(word >> 32U),
            static_cast<std::size_t>(of(rank)[1]),
            (word >> 24U & 1U) != 0
        };
    }
    /// Elements that `from` has for `to`.
    [[nodiscard]] std::uint64_t sent(std::size_t from, std::size_t to) const {
        return words_[from * stride_ + 2 + to];
    }
    /// Elements that `to` expects of `from`.
    [[nodiscard]] std::uint64_t expected(std::size_t from, std::size_t to) const {
        return words_[to * stride_ + 2 + ranks_ + from];
    }
    [[nodiscard]] std::size_t ranks() const noexcept { return ranks_; }
    [[nodiscard]] bool has_tables() const noexcept { return stride_ > 2; }

private:
    [[nodiscard]] std::span<std::uint64_t> of(int rank) {
        return std::span{words_}.subspan(static_cast<std::size_t>(rank) * stride_, stride_);
    }

    std::size_t ranks_;
    std::size_t stride_;
    std::vector<std::uint64_t> words_;
};

/// Why what the ranks said does not fit together, if it does not: the same on every rank.
[[nodiscard]] inline std::optional<AbortReason> disagreement(NcclSaid& said) {
    AbortReason reason{FailureKind::mismatch, {}, {}};
    Descriptor const first = said.said_by(0);
    for (int rank = 1; rank < static_cast<int>(said.ranks()); ++rank) {
        if (Descriptor const other = said.said_by(rank); !(other == first)) {
            reason.ranks.push_back(rank);
            reason.message += concat(", rank ", rank, " ", other.text());
        }
    }
    if (!reason.ranks.empty()) {
        reason.message =
            concat("ranks run different collectives: rank 0 ", first.text(), reason.message);
        return reason;
    }
    for (std::size_t from = 0; said.has_tables() && from < said.ranks(); ++from) {
        for (std::size_t to = 0; to < said.ranks(); ++to) {
            if (said.sent(from, to) != said.expected(from, to)) {
                reason.ranks = {static_cast<int>(from), static_cast<int>(to)};
                reason.message = concat(
                    "counts differ in ",
                    first.text(),
                    ": rank ",
                    from,
                    " has ",
                    said.sent(from, to),
                    " elements for rank ",
                    to,
                    ", which expects ",
                    said.expected(from, to)
                );
                return reason;
            }
        }
    }
    return std::nullopt;
}

/// Compares what all ranks are about to do. Collective over the control communicator, blocks.
/// @throws Mismatch  on all ranks, after aborting.
inline void
agree_on_collective(NcclRank& rank, Descriptor const& mine, Counts sends, Counts expects) {
    std::optional<AbortReason> reason;
    rank.over_control([&](NcclControl& control) {
        // Ranks may differ in whether they have tables, so the sum cannot have them at once.
        NcclSaid said{rank.size(), false};
        said.say(rank.rank(), mine, {}, {});
        control.sum(said.words());
        reason = disagreement(said);
        if (!reason && mine.has_counts) {
            NcclSaid tables{rank.size(), true};
            tables.say(rank.rank(), mine, sends, expects);
            control.sum(tables.words());
            reason = disagreement(tables);
        }
    });
    if (reason) {
        rank.fail(*reason);
    }
}

} // namespace joinable::inline v0::detail
