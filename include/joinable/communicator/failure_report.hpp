// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/control.hpp>
#include <joinable/config.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

/// @file
/// How a failure on some ranks becomes an error on all of them.

namespace joinable { inline namespace v0 { namespace detail {

inline constexpr std::size_t text_bytes = 256; ///< of one rank's text, in any message

/// Writes a text that only one rank adds to the sum. A text that is too long ends with "...".
inline void write_text(std::span<std::uint64_t> words, std::string_view text) {
    std::string const written = cut_text(std::string{text}, 8 * words.size());
    std::memcpy(words.data(), written.data(), written.size());
}
std::string read_text(std::span<std::uint64_t const> words);

/// The ranks of a sum of one bit per rank, from `first` on.
inline void set_bit(std::span<std::uint64_t> words, int bit) {
    words[static_cast<std::size_t>(bit / 64)] |= std::uint64_t{1} << (bit % 64);
}
void append_bits(std::vector<int>& ranks, std::span<std::uint64_t const> words, int first);

/// Returns f() where the others expect no failure: they run collectives next. If it throws, these throw
/// PeerFailed with its text, provided that the communicator can abort.
template <Communicator Comm, class F>
decltype(auto) abort_if_throws(Comm& comm, F const& f) {
    try {
        return f();
    } catch (...) {
        if constexpr (Aborts<Comm>) {
            comm.abort(blamed_on(comm.rank(), failure_of(std::current_exception())));
        }
        throw;
    }
}

/// The questions by which ranks learn which of them failed, in messages of one size. All ranks of `control` make the
/// same calls.
class FailureReport {
public:
    explicit FailureReport(ControlCommunicator& control) noexcept : control_{control} {}

    /// The ranks for which `is_so` is true, ascending.
    [[nodiscard]] std::vector<int> ranks_with(bool is_so);

    /// The reason to throw after some ranks failed, the lowest with its `text`.
    [[nodiscard]] AbortReason failure(bool has_failed, std::string_view text);

    /// A reason that names ranks of `control`. Local.
    [[nodiscard]] AbortReason
    reason(FailureKind kind, std::vector<int> ranks, std::string message) const {
        AbortReason all{kind, std::move(ranks), std::move(message)};
        all.is_renumbered = control_.is_renumbered();
        return all;
    }

protected:
    static constexpr std::size_t message_words = 384;

    [[nodiscard]] std::span<std::uint64_t> place(std::size_t byte, std::size_t bytes) noexcept {
        return std::span{words_}.subspan(byte / 8, bytes / 8);
    }

    ControlCommunicator& control_;
    std::array<std::uint64_t, message_words> words_{};
};

/// Runs `exchange`, which returns why some ranks failed, and throws what this rank then throws.
/// If the exchange fails, `abort` gets the reason to tell the others. A rank's own error says more than
/// that others did not come to hear it.
template <class Exchange, class Abort>
void throw_if_any_failed(
    std::exception_ptr const& local_error, Exchange const& exchange, Abort const& abort
) {
    std::optional<AbortReason> failure;
    try {
        failure = exchange();
    } catch (...) {
        abort(local_error ? failure_of(local_error) : reason_of(std::current_exception()));
        std::rethrow_exception(local_error ? local_error : std::current_exception());
    }
    if (local_error) {
        std::rethrow_exception(local_error);
    }
    if (failure) {
        throw_failure(*failure);
    }
}

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/impl/failure_report.ipp>
#endif
