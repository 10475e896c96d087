// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/tcp/communicator.hpp>
#include <joinable/detail/hash.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// What a rank is about to do, in one word that ranks compare.
struct GlooSignature {
    std::uint64_t word = 0;

    /// A word that no collective has: its dtype does not exist.
    static constexpr std::uint64_t split = 0xffU;

    [[nodiscard]] static GlooSignature of(Descriptor const& said) noexcept {
        return {
            said.word() | (said.has_counts ? 1ULL << 24U : 0U) | std::uint64_t{said.count} << 25U
        };
    }
    [[nodiscard]] std::string text() const {
        return word == split
                   ? "split"
                   : Descriptor::of_word(word & 0xff'ffffU, word >> 25U, (word >> 24U & 1U) != 0)
                         .text();
    }
    friend bool operator==(GlooSignature, GlooSignature) = default;
};

/// The words that ranks sum when they arrive in a collective: a signature from each rank, and for
/// each rank what others send to it less what it expects from them, by hashes. The latter is 0
/// unless tables of counts differ.
class GlooArrival {
public:
    GlooArrival(GlooSignature own, int rank, int size)
        : words_(2 * static_cast<std::size_t>(size)), size_{size} {
        at(rank) = own.word;
    }

    void add_counts(int rank, PartSizes const& sends, PartSizes const& expects) {
        for (int other = 0; other < size_; ++other) {
            at(size_ + other) += hash_of(rank, other, sends[other]);
            at(size_ + rank) -= hash_of(other, rank, expects[other]);
        }
    }
    [[nodiscard]] Buffer buffer() noexcept { return {words_.data(), words_.size(), DType::u64}; }

    /// @pre the words have been summed over all ranks
    [[nodiscard]] std::optional<AbortReason> difference() const {
        auto const said_by = [&](int rank) { return GlooSignature{at(rank)}; };
        if (auto const reason = find_difference(size_, said_by)) {
            return reason;
        }
        AbortReason reason{FailureKind::mismatch, {}, {}};
        for (int rank = 0; rank < size_; ++rank) {
            if (at(size_ + rank) != 0) {
                reason.ranks.push_back(rank);
            }
        }
        if (reason.ranks.empty()) {
            return std::nullopt;
        }
        reason.message = concat(
            "counts differ in ",
            said_by(0).text(),
            ": other ranks do not have for ",
            ranks_text(reason.ranks),
            " what is expected there"
        );
        return reason;
    }

private:
    [[nodiscard]] std::uint64_t& at(int place) noexcept {
        return words_[static_cast<std::size_t>(place)];
    }
    [[nodiscard]] std::uint64_t at(int place) const noexcept {
        return words_[static_cast<std::size_t>(place)];
    }
    [[nodiscard]] static std::uint64_t hash_of(int from, int to, std::size_t count) noexcept {
        return Hash{}
            .add(static_cast<std::uint64_t>(from))
            .add(static_cast<std::uint64_t>(to))
            .add(count)
            .value();
    }

    std::vector<std::uint64_t> words_;
    int size_;
};

/// One collective of this rank, from its post until the user and all ranks have done with it.
struct GlooOperation {
    enum class State {
        posted,
        complete,
        broken, ///< Gloo refused it, or this rank has closed its connections
    };

    GlooOperation(Request const& asked, std::uint64_t its_number, int rank, int size)
        : request{asked}, number{its_number},
          arrival{GlooSignature::of(asked.signature), rank, size} {
        if (asked.signature.has_counts) {
            arrival.add_counts(rank, asked.sends, asked.expects);
            keep(request.sends, send_sizes_, size); // the caller's tables may end
            keep(request.expects, expected_sizes_, size);
        }
    }
    GlooOperation(GlooOperation const&) = delete;
    GlooOperation& operator=(GlooOperation const&) = delete;

    /// Without any data Gloo does not wait for another rank, but the collective does.
    [[nodiscard]] bool moves_data() const noexcept {
        auto const& said = request.signature;
        return said.collective == Collective::barrier || (said.count != 0 && !said.has_counts);
    }

    Request request;
    std::uint64_t number;
    GlooArrival arrival;
    std::optional<TcpWork> arriving; ///< the sum of `arrival`
    bool is_compared = false;        ///< all ranks have arrived, and in the same collective
    bool is_released = false;        ///< by the user
    PolledTime stalled;              ///< since all ranks have arrived, or Gloo has refused it
    std::uint64_t progress = 0;      ///< of this rank, when that time began
    State state = State::posted;     ///< guarded by the rank's mutex, as is the text
    std::string error;

private:
    static void keep(PartSizes& sizes, std::vector<std::size_t>& table, int size) {
        table.resize(static_cast<std::size_t>(size));
        sizes.copy_to(std::span{table});
        sizes = PartSizes::of(table);
    }

    std::vector<std::size_t> send_sizes_;
    std::vector<std::size_t> expected_sizes_;
};

}}} // namespace joinable::v0::detail
