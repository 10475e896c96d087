// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <optional>

#include <support/recording_communicator.hpp>

#include <joinable/communicator/shared_memory/thread.hpp>
#include <joinable/error.hpp>

namespace joinable_tests {

/// A communicator of a house engine: the least that an AnyCommunicator takes, without split(), deadlines and messages.
class HouseCommunicator : public CoreOnly<joinable::ThreadCommunicator> {
public:
    using CoreOnly::CoreOnly;
    void abort(joinable::AbortReason const& reason) { inner_.abort(reason); }
    [[nodiscard]] bool is_aborted() const { return inner_.is_aborted(); }
    [[nodiscard]] std::optional<joinable::AbortReason> abort_reason() const {
        return inner_.abort_reason();
    }
};

} // namespace joinable_tests
