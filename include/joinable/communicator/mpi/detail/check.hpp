// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include <mpi.h>

#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/communicator/mpi/detail/api.hpp>
#include <joinable/communicator/mpi/detail/operation.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

/// @file
/// The optional comparison before data moves: first of the signatures, then, in a collective with
/// counts, of the tables.

namespace joinable { inline namespace v0 { namespace detail {

/// Gathers the first `count` words of all ranks, and stores them after these, in rank order.
inline void gather_words(MpiOperation& operation, int count, MPI_Comm comm) {
    std::uint64_t* const words = operation.words.data();
    MPI_Request& request = operation.tables.requests.emplace_back(MPI_REQUEST_NULL);
    check_mpi(
        MPI_Iallgather(
            words, count, MPI_UINT64_T, words + count, count, MPI_UINT64_T, comm, &request
        ),
        "MPI_Iallgather"
    );
}

inline constexpr int mpi_said_words = 3;

inline void gather_said(MpiOperation& operation, int size, MPI_Comm comm) {
    Descriptor const said = operation.signature();
    operation.words.assign(mpi_said_words * (static_cast<std::size_t>(size) + 1), 0);
    operation.words[0] = said.word();
    operation.words[1] = said.count;
    operation.words[2] = said.has_counts ? 1 : 0;
    gather_words(operation, mpi_said_words, comm);
}
[[nodiscard]] inline std::optional<AbortReason>
difference_of_said(MpiOperation const& operation, int size) {
    return find_difference(size, [&](int rank) {
        auto const at = static_cast<std::size_t>(mpi_said_words * (rank + 1));
        auto const* const said = &operation.words[at];
        return Descriptor::of_word(said[0], said[1], said[2] != 0);
    });
}

/// The tables of a rank: the sizes that it sends to each rank, then those that it expects from
/// each.
inline void gather_tables(MpiOperation& operation, int size, MPI_Comm comm) {
    auto const ranks = static_cast<std::size_t>(size);
    operation.words.assign(2 * ranks * (ranks + 1), 0);
    for (int rank = 0; rank < size; ++rank) {
        operation.words[static_cast<std::size_t>(rank)] = operation.transfer.sends[rank];
        operation.words[static_cast<std::size_t>(size + rank)] = operation.transfer.expects[rank];
    }
    gather_words(operation, 2 * size, comm);
}
[[nodiscard]] inline std::optional<AbortReason>
difference_of_tables(MpiOperation const& operation, int size) {
    auto const word = [&](int of, int place) {
        return operation.words[static_cast<std::size_t>(2 * size * (of + 1) + place)];
    };
    return find_difference_of_counts(
        size,
        operation.signature(),
        [&](int from, int to) { return word(from, to); },
        [&](int from, int to) { return word(to, size + from); }
    );
}

/// The reason when ranks did not compare their collectives, all have posted one, and `rank` still
/// waits.
[[nodiscard]] inline AbortReason reason_of_stall(int rank, MpiOperation const& operation) {
    return {
        FailureKind::communication,
        {},
        concat(
            "all ranks have posted a collective, but MPI does not complete it; rank ",
            rank,
            " waits in ",
            operation.text(),
            ": MpiOptions{.check = true} tells whether the others do"
        )
    };
}

/// Why ranks meet before they block inside MPI. No other words have these values by chance.
enum class MpiMeeting : std::uint64_t {
    split = 0x7469'6c70'7326'494d,
    share = 0x6572'6168'7326'494d,
};
/// `words` has two words from each rank: its MpiMeeting, or a word of another collective, and one
/// more.
[[nodiscard]] inline std::optional<AbortReason>
difference_of_meetings(std::span<std::uint64_t const> words) {
    auto const text = [&](std::size_t rank) -> std::string_view {
        switch (static_cast<MpiMeeting>(words[2 * rank])) {
        case MpiMeeting::split: return "split";
        case MpiMeeting::share: return "share";
        }
        return "another collective";
    };
    AbortReason reason{FailureKind::mismatch, {}, {}};
    for (std::size_t rank = 1; rank < words.size() / 2; ++rank) {
        if (words[2 * rank] != words[0]) {
            reason.ranks.push_back(static_cast<int>(rank));
            reason.message += concat(", rank ", rank, " ", text(rank));
        }
    }
    if (reason.ranks.empty()) {
        return std::nullopt;
    }
    reason.message = concat("ranks run different collectives: rank 0 ", text(0), reason.message);
    return reason;
}

}}} // namespace joinable::v0::detail
