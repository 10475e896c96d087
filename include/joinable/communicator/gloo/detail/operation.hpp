// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <joinable/communicator/detail/comparison.hpp>
#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/ranks.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/tcp/communicator.hpp>
#include <joinable/detail/hash.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The words that ranks sum when they arrive in a collective: each rank's Descriptor::words(), then for
/// each rank what others send to it less what it expects from them, by hashes, and then a few words
/// of data. The hashes add up to 0 unless tables of counts differ.
class GlooArrival {
public:
    static constexpr std::size_t most_data = 8; ///< a roll call has seven

    GlooArrival(Descriptor const& own, int rank, int size)
        : words_(3 * static_cast<std::size_t>(size) + most_data), size_{size}, signature_{own} {
        std::memcpy(&at(2 * rank), own.words().data(), sizeof own.words());
    }

    /// @pre of at most `most_data` words
    void take_data(ConstBuffer data) noexcept {
        if (data.count != 0) {
            std::memcpy(&at(3 * size_), data.data, data.bytes());
        }
    }
    void give_data(Buffer data) noexcept {
        if (data.count != 0) {
            std::memcpy(data.data, &at(3 * size_), data.bytes());
        }
    }

    void add_counts(int rank, PartSizes const& sends, PartSizes const& expects) {
        for (int other = 0; other < size_; ++other) {
            at(2 * size_ + other) += hash_of(rank, other, sends[other]);
            at(2 * size_ + rank) -= hash_of(other, rank, expects[other]);
        }
    }
    [[nodiscard]] Buffer buffer() noexcept { return {words_.data(), words_.size(), DType::u64}; }

    /// @pre the words have been summed over all ranks
    [[nodiscard]] std::optional<AbortReason> difference() const {
        auto const signatures = std::span{words_}.first(2 * static_cast<std::size_t>(size_));
        if (auto const reason = difference_of_signatures(size_, signatures)) {
            return reason;
        }
        auto ranks = ranks_where(size_, [&](int rank) { return at(2 * size_ + rank) != 0; });
        if (ranks.empty()) {
            return std::nullopt;
        }
        std::string text = concat(
            "counts differ in ",
            signature_.text(),
            ": other ranks do not have for ",
            ranks_text(ranks),
            " what is expected there"
        );
        return AbortReason{FailureKind::mismatch, std::move(ranks), std::move(text)};
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
    Descriptor signature_;
};

/// One collective of this rank, from its post until the user and all ranks have done with it.
struct GlooOperation {
    enum class State {
        posted,
        complete,
        broken, ///< Gloo refused it, or this rank has closed its connections
    };

    GlooOperation(Request const& asked, std::uint64_t its_number, int rank, int size)
        : request{asked}, number{its_number}, arrival{asked.signature, rank, size} {
        if (goes_with_arrival()) {
            arrival.take_data(asked.in);
        }
        if (asked.signature.has_counts) {
            arrival.add_counts(rank, asked.sends, asked.expects);
            kept_.keep(request.sends, request.expects, size); // the caller's tables may end
        }
    }
    GlooOperation(GlooOperation const&) = delete;
    GlooOperation& operator=(GlooOperation const&) = delete;

    /// Whether the words of the arrival are all that it needs.
    [[nodiscard]] bool goes_with_arrival() const noexcept {
        auto const& signature = request.signature;
        return signature.collective == Collective::barrier ||
               (signature.collective == Collective::all_reduce && signature.dtype == DType::u64 &&
                signature.op == ReduceOp::sum && signature.count <= GlooArrival::most_data);
    }
    /// Whether it is over only when all ranks have arrived. Gloo moves nothing for those without
    /// elements, so it waits for nobody.
    [[nodiscard]] bool needs_arrivals() const noexcept {
        auto const& signature = request.signature;
        return goes_with_arrival() || signature.has_counts || signature.count == 0;
    }

    Request request;
    std::uint64_t number;
    GlooArrival arrival;
    std::optional<TcpWork> arriving; ///< the sum of `arrival`
    bool is_compared = false;        ///< all ranks have arrived, and in the same collective
    bool is_released = false;        ///< by the user
    WaitClock stalled;               ///< since all ranks have arrived, or Gloo has refused it
    std::uint64_t moved = 0;         ///< GlooLane::moved() when that time began
    State state = State::posted;     ///< guarded by the rank's mutex, as is the text
    std::string error;

private:
    KeptTables kept_;
};

}}} // namespace joinable::v0::detail
