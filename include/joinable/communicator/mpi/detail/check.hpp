// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include <mpi.h>

#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/communicator/mpi/detail/api.hpp>
#include <joinable/communicator/mpi/detail/operation.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

/// @file
/// The optional comparison before data moves, and that before ranks block inside MPI.

namespace joinable { inline namespace v0 { namespace detail {

/// Sums the words that ranks compare.
inline void sum_words(MpiOperation& operation, MPI_Comm comm) {
    std::span<std::uint64_t> const words = operation.comparison.words();
    MPI_Request& request = operation.tables.requests.emplace_back(MPI_REQUEST_NULL);
    check_mpi(
        MPI_Iallreduce(
            MPI_IN_PLACE,
            words.data(),
            static_cast<int>(words.size()),
            MPI_UINT64_T,
            MPI_SUM,
            comm,
            &request
        ),
        "MPI_Iallreduce"
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
[[nodiscard]] constexpr std::string_view name_of(MpiMeeting kind) noexcept {
    return kind == MpiMeeting::split   ? "split"
           : kind == MpiMeeting::share ? "share"
                                       : "another collective";
}
/// `words` has two words from each rank: its MpiMeeting, or a word of another collective, and one
/// more.
[[nodiscard]] inline std::optional<AbortReason>
difference_of_meetings(std::span<std::uint64_t const> words) {
    struct Meeting {
        MpiMeeting word;

        bool operator==(Meeting const&) const = default;
        [[nodiscard]] static bool is_agreement() noexcept { return false; }
        [[nodiscard]] std::string_view text() const noexcept { return name_of(word); }
    };
    return find_difference(static_cast<int>(words.size() / 2), [&](int rank) {
        return Meeting{static_cast<MpiMeeting>(words[2 * static_cast<std::size_t>(rank)])};
    });
}

}}} // namespace joinable::v0::detail
