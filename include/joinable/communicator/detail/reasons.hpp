// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/ranks.hpp>
#include <joinable/config.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/dtype.hpp>

/// @file
/// The reasons why a collective ends on all ranks, in the same words for every transport.

namespace joinable { inline namespace v0 { namespace detail {

/// The maximum length of a reason's text between ranks, in bytes.
inline constexpr std::size_t most_reason_text = 4000;

/// The bytes of a packed reason before its ranks: kind, has_left, how many bytes have the bits of ranks, origin.
inline constexpr std::size_t bytes_before_ranks = 8;
/// The maximum of a packed reason: it names every rank, with the longest text.
inline constexpr std::size_t most_told_bytes =
    bytes_before_ranks + max_ranks / 8 + most_reason_text;

/// Stores a reason as bytes, which another process may read. A text that has no room is cut, and what is no
/// rank is omitted. Returns how many bytes it takes.
/// @pre there is room for all ranks and some text
[[nodiscard]] std::size_t pack(AbortReason const& reason, std::span<std::byte> into) noexcept;
[[nodiscard]] std::vector<std::byte>
packed(AbortReason const& reason, std::size_t most = most_told_bytes);
/// Nothing, unless pack() could have made it.
[[nodiscard]] std::optional<AbortReason> unpacked_reason(std::span<std::byte const> bytes);

/// `rank` has finished with its communicator. Ranks that wait throw it as in_words_of() says.
[[nodiscard]] inline AbortReason reason_of_leaving(int rank) {
    return {
        FailureKind::peer_failed,
        {rank},
        concat("rank ", rank, " left while others wait for it"),
        -1,
        true
    };
}

/// The reason in the words of `rank`, if ranks have left while it waits in `what`; empty: in nothing.
[[nodiscard]] inline AbortReason
in_words_of(int rank, std::string const& what, AbortReason reason) {
    if (reason.has_left && !what.empty() && !own_ranks(reason).empty()) {
        reason.message = concat(
            ranks_text(reason.ranks),
            " left while rank ",
            rank,
            " waits for ",
            reason.ranks.size() == 1 ? "it" : "them",
            " in ",
            what
        );
    }
    return reason;
}

/// Whether an exception that was thrown for `told` has the kind and the ranks of `thrown`.
[[nodiscard]] inline bool is_same_failure(AbortReason const& told, AbortReason const& thrown) {
    bool const has_ranks =
        told.kind != FailureKind::communication && told.kind != FailureKind::contract;
    return told.kind == thrown.kind && (!has_ranks || own_ranks(told) == thrown.ranks);
}

/// The ranks `overdue` "did not <do>" in time, while `rank` does what `meanwhile` says.
[[nodiscard]] inline AbortReason reason_of_delay(
    std::vector<int> const& overdue,
    std::string_view to_do,
    std::chrono::nanoseconds deadline,
    int rank,
    std::string const& meanwhile
) {
    double const seconds = std::chrono::duration<double>(deadline).count();
    return {
        FailureKind::timed_out,
        overdue,
        concat(
            ranks_text(overdue),
            " did not ",
            to_do,
            " within ",
            seconds,
            " s, while rank ",
            rank,
            " ",
            meanwhile
        )
    };
}

/// One side of a message.
[[nodiscard]] inline std::string
text_of_message(bool is_send, int tag, std::uint64_t count, DType dtype) {
    return concat(
        is_send ? "a send of " : "a receive of ",
        count,
        " ",
        joinable::name_of(dtype),
        " with tag ",
        tag
    );
}
/// The two sides of a message differ: `mine` on `rank`, `theirs` on `peer`.
[[nodiscard]] inline AbortReason
reason_of_messages(int rank, int peer, std::string const& mine, std::string const& theirs) {
    return {
        FailureKind::mismatch,
        both_ranks(rank, peer),
        concat("messages between rank ", rank, " and rank ", peer, ": ", mine, " meets ", theirs)
    };
}

/// Why ranks cannot run their collectives together, if these differ. `signature_of(rank)` is that rank's
/// Descriptor, or has text() and is_agreement() as a Descriptor has. Ranks that have the same ones find the same reason.
template <class SignatureOf>
[[nodiscard]] std::optional<AbortReason>
find_difference(int size, SignatureOf const& signature_of) {
    auto const first = signature_of(0);
    AbortReason reason{FailureKind::mismatch, {}, {}};
    bool agrees = first.is_agreement(); // some rank
    for (int rank = 1; rank < size; ++rank) {
        if (auto const other = signature_of(rank); !(other == first)) {
            agrees = agrees || other.is_agreement();
            reason.ranks.push_back(rank);
            reason.message += concat(", rank ", rank, " ", other.text());
        }
    }
    if (reason.ranks.empty()) {
        return std::nullopt;
    }
    reason.message =
        concat("ranks run different collectives: rank 0 ", first.text(), reason.message);
    if (agrees) {
        reason.message +=
            "; joined ranks follow only the participants of their guard: give any other collective to an "
            "Action or to shadowed(comm), and enter the same guards on all ranks, one after another";
    }
    return reason;
}

/// The same for tables of counts. sent(from, to) is what `from` sends to `to`, and expected(from,
/// to) is what `to` expects from `from`.
template <class Sent, class Expected>
[[nodiscard]] std::optional<AbortReason> find_difference_of_counts(
    int size, Descriptor const& signature, Sent const& sent, Expected const& expected
) {
    for (int from = 0; from < size; ++from) {
        for (int to = 0; to < size; ++to) {
            if (sent(from, to) != expected(from, to)) {
                return AbortReason{
                    FailureKind::mismatch,
                    both_ranks(from, to),
                    concat(
                        "counts differ in ",
                        signature.text(),
                        ": rank ",
                        from,
                        " has ",
                        sent(from, to),
                        " elements for rank ",
                        to,
                        ", which expects ",
                        expected(from, to)
                    )
                };
            }
        }
    }
    return std::nullopt;
}

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/detail/impl/reasons.ipp>
#endif
