// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <optional>

#include <joinable/communicator/detail/comparison.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/nccl/detail/control.hpp>
#include <joinable/communicator/nccl/detail/rank.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Compares the calls that all ranks are about to make. Collective over the control communicator;
/// blocks.
/// @throws Mismatch  on all ranks, after aborting.
inline void agree_on_collective(NcclRank& rank, Request const& mine) {
    std::optional<AbortReason> reason;
    rank.over_control([&](NcclControl& control) {
        Descriptor const& signature = mine.signature;
        int const size = control.size();
        reason = difference_of_signatures(size, control.gather(signature.words()));
        if (!reason && signature.has_counts) {
            auto const tables = words_of_tables(mine.sends, mine.expects, size);
            reason = difference_of_tables(signature, size, control.gather(tables));
        }
    });
    if (reason) {
        rank.fail(*reason);
    }
}

}}} // namespace joinable::v0::detail
