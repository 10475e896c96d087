// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/control.hpp>
#include <joinable/communicator/failure_report.hpp>
#include <joinable/config.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/error.hpp>

/// @file
/// The mechanism by which an error or a difference on one rank becomes an error on all ranks.

namespace joinable { inline namespace v0 { namespace detail {

inline constexpr int max_world_size = 1 << 18; ///< so that no sum of squares overflows
inline constexpr std::uint32_t digest_mask = (1U << 23) - 1;

/// Tells whether all of `count` ranks added the same value F < 2^23. The sum and the sum of squares
/// determine this, because the mean of squares equals the square of the mean only if all values are
/// equal.
struct Agreement {
    std::uint64_t sum = 0;
    std::uint64_t squares = 0;

    static Agreement of(std::uint32_t value) noexcept {
        return {value, static_cast<std::uint64_t>(value) * value};
    }
    [[nodiscard]] std::optional<std::uint32_t> value(std::uint64_t count) const noexcept;
};

/// The words of a sum that shows whether ranks have the same 64 bits: three agreements, on 22 bits
/// each.
struct HashAgreement {
    static constexpr std::size_t words = 6;

    static void write(std::uint64_t* to, std::uint64_t hash) noexcept;
    static bool is_common(std::uint64_t const* sum, std::uint64_t ranks) noexcept;
};

/// The questions that ranks ask each other after they found a difference, in messages of one size.
/// All ranks of `control` make the same calls.
class DifferenceReport : public FailureReport {
public:
    /// `count` ranks have a say, `lowest` is the lowest of them. A rank without a say adds nothing.
    DifferenceReport(ControlCommunicator& control, int lowest, std::uint64_t count, bool has_say)
        : FailureReport{control}, lowest_{lowest}, count_{count}, has_say_{has_say} {}

    /// The reason to throw after hashes of lists differed. It names the first item that differs.
    [[nodiscard]] AbortReason difference(AgreementList const& list);

private:
    static constexpr std::size_t slot_count = message_words / HashAgreement::words;
    static constexpr std::size_t label_bytes = 112;

    /// The index of the first item that differs; beyond the end of all lists if none does. Each slot of a
    /// message holds one item.
    [[nodiscard]] std::size_t first_difference(AgreementList const& list);

    [[nodiscard]] AgreementList::Item read_item(std::size_t at);
    /// Where the name begins in "models differ: parameter 3": after the title.
    [[nodiscard]] static std::size_t name_in(std::string const& label) {
        std::size_t const colon = label.find(": ");
        return colon == std::string::npos ? 0 : colon + 2;
    }
    /// "rank 1 compares models (parameter 3: f32)".
    [[nodiscard]] static std::string place_of(int rank, AgreementList::Item const& item);
    /// If the labels differ, the text has both, and their common title once.
    [[nodiscard]] std::string text_of(int other);

    int lowest_;
    std::uint64_t count_;
    bool has_say_;
};

/// Collective. Returns the reason to throw for ranks without an error, if a rank has an error or
/// lists differ. A rank with an error then throws its own. `tally` may point to two counts of 20 bits, which
/// become their sums. Throws what the communicator throws.
/// Complexity: without errors and differences one sum of seven words, and no allocation.
[[nodiscard]] std::optional<AbortReason> find_disagreement(
    ControlCommunicator& control,
    AgreementList const& list,
    std::exception_ptr const& local_error,
    std::uint64_t* tally = nullptr
);

/// Aborts because of an exception on this rank.
inline void abort_for(ControlCommunicator& control, AbortReason const& reason) {
    AbortReason const told = control.may_have_thrown(reason) ? reason : failure_in_group(reason);
    control.abort(blamed_on(control.rank(), told));
}

/// Collective. Returns if no rank has an error and all lists are equal. Otherwise all ranks throw:
/// a rank with a `local_error` that one, the others PeerFailed with its text. If lists differ, all
/// throw Mismatch, which names the first item that differs, two values of it and the ranks that
/// differ from rank 0. The communicator stays usable then; any other error has aborted it.
void agree(
    ControlCommunicator& control,
    AgreementList const& list,
    std::exception_ptr const& local_error = {}
);

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/agreement/impl/agree.ipp>
#endif
