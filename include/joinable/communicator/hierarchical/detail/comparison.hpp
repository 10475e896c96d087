// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/pair_counts.hpp>
#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/detail/hash.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/buffer.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Whether ranks send parts of one size, or tables say which.
[[nodiscard]] constexpr bool has_parts(Collective collective) noexcept {
    return collective == Collective::all_gather || collective == Collective::reduce_scatter ||
           collective == Collective::scaled_reduce_scatter || collective == Collective::gather ||
           collective == Collective::scatter;
}
/// Whether the parts of ranks become one buffer, and not the other way round.
[[nodiscard]] constexpr bool collects_parts(Collective collective) noexcept {
    return collective == Collective::all_gather || collective == Collective::gather;
}

/// What each rank is about to do, in words that ranks sum before they do it. All then find the same
/// difference, or none.
class Comparison {
public:
    Comparison() = default;
    /// `parts` is the rank's table, if it has one.
    Comparison(Request const& request, std::span<std::size_t const> parts, int rank, int size)
        : signature_{request.signature}, size_{size},
          words_((words_of_rank + 1) * static_cast<std::size_t>(size)) {
        std::uint64_t* const own = words_.data() + words_of_rank * static_cast<std::size_t>(rank);
        auto const signature = signature_.words();
        std::copy(signature.begin(), signature.end(), own);
        own[2] = collects_parts(signature_.collective) ? request.in.count : request.out.count;
        if (!signature_.has_counts || has_pairs(signature_)) {
            return;
        }
        if (is_for_all()) {
            Hash hash;
            for (std::size_t const part : parts) {
                hash.add(std::uint64_t{part});
            }
            own[3] = hash.value();
        }
        if (rank == holder()) {
            std::copy(parts.begin(), parts.end(), words_.data() + words_of_rank * parts.size());
        }
    }

    [[nodiscard]] std::span<std::uint64_t> words() noexcept { return words_; }
    /// Once they are summed: why ranks cannot run this together.
    [[nodiscard]] std::optional<AbortReason> difference() const {
        auto reason = find_difference(size_, [&](int rank) {
            auto const* const words = of(rank);
            return Shown{Descriptor::of_words({words, 2}), words[3]};
        });
        if (reason || !signature_.has_counts || has_pairs(signature_)) {
            return reason;
        }
        bool const collects = collects_parts(signature_.collective);
        auto const told = [&](int from, int to) {
            return (collects ? to : from) == holder() ? of(collects ? from : to)[2] : 0;
        };
        auto const in_table = [&](int from, int to) {
            return (collects ? to : from) == holder() ? of(size_)[collects ? from : to]
                                                      : std::uint64_t{0};
        };
        return collects ? find_difference_of_counts(size_, signature_, told, in_table)
                        : find_difference_of_counts(size_, signature_, in_table, told);
    }
    /// Once they are summed: the elements of each rank.
    [[nodiscard]] std::size_t part(int rank) const { return of(rank)[2]; }

private:
    static constexpr std::size_t words_of_rank = 4;

    struct Shown {
        Descriptor signature;
        std::uint64_t table; ///< its hash, if it must be the same on all ranks

        friend bool operator==(Shown const& a, Shown const& b) noexcept {
            return a.signature == b.signature && a.table == b.table;
        }
        [[nodiscard]] bool is_agreement() const noexcept { return signature.is_agreement(); }
        [[nodiscard]] std::string text() const {
            return table == 0 ? signature.text()
                              : concat(signature.text(), ", whose counts have the hash ", table);
        }
    };

    /// The rank whose table counts: for other roots it is the root's.
    [[nodiscard]] int holder() const noexcept { return signature_.root; }
    [[nodiscard]] bool is_for_all() const noexcept {
        return signature_.collective != Collective::gather &&
               signature_.collective != Collective::scatter;
    }
    /// The words of a rank; of `size_`, the table.
    [[nodiscard]] std::uint64_t const* of(int rank) const noexcept {
        return words_.data() + words_of_rank * static_cast<std::size_t>(rank);
    }

    Descriptor signature_;
    int size_ = 0;
    std::vector<std::uint64_t> words_;
};

}}} // namespace joinable::v0::detail
