// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>

#include <joinable/agreement/agree.hpp>
#include <joinable/agreement/agreement_list.hpp>
#include <joinable/communicator/control.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Collective. Like agree(), but if ranks fail, ranks without an error throw the type of the lowest
/// failed rank's error: a file that one rank cannot write is the same failure on all.
inline void agree_alike(
    ControlCommunicator& control, AgreementList const& list, std::exception_ptr const& error
) {
    throw_if_any_failed(
        error,
        [&] {
            std::optional<AbortReason> failure = find_disagreement(control, list, error);
            if (failure && failure->kind == FailureKind::peer_failed) {
                FailureKind const own = error ? reason_of(error).kind : FailureKind::peer_failed;
                std::array<std::uint64_t, 1> kind{static_cast<std::uint64_t>(own)};
                control.broadcast(kind, failure->ranks.front());
                failure->kind = static_cast<FailureKind>(kind[0]);
            }
            return failure;
        },
        [&](AbortReason const& reason) { abort_for(control, reason); }
    );
}

/// Collective. Runs `work(list)` on every rank, then agrees on its exception and its entries in the
/// list.
template <class F>
void on_all_ranks(ControlCommunicator& control, F const& work) {
    AgreementList list;
    std::exception_ptr const error = exception_of([&] { work(list); });
    agree_alike(control, list, error);
}

/// Renews the deadline of the ranks that wait for this one, each time that it has gone through
/// another piece_bytes. Pieces are large, because a renewal is a message to every rank.
class DeadlineRenewal {
public:
    static constexpr std::size_t piece_bytes = std::size_t{8} << 20U;

    explicit DeadlineRenewal(ControlCommunicator& control) noexcept : control_{control} {}

    void has_passed(std::size_t bytes) {
        bytes_ += bytes;
        if (bytes_ >= piece_bytes) {
            bytes_ = 0;
            control_.keep_alive();
        }
    }

private:
    ControlCommunicator& control_;
    std::size_t bytes_ = 0; ///< since the last renewal
};

}}} // namespace joinable::v0::detail
