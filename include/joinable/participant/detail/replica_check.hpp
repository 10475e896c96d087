// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <utility>

#include <joinable/agreement/control.hpp>
#include <joinable/config.hpp>
#include <joinable/device/elements_on_host.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Compares the values that ranks train, see DataParallelOptions::verify_replicas.
class ReplicaCheck {
public:
    /// Whose values are compared: those of ranks that `have_say`, of which `lowest` is the lowest.
    struct Ranks {
        int lowest;
        int count;
        bool has_say; ///< this rank
    };

    ReplicaCheck(ParameterList parameters, Device& device, std::size_t interval) noexcept
        : parameters_{std::move(parameters)}, elements_{device}, interval_{interval} {}

    /// Collective, in each training round that syncs. Compares in each `interval`-th one.
    void count_round(ControlCommunicator& control, Ranks const& ranks) {
        if ((rounds_ + 1) % interval_ == 0) {
            compare(control, ranks);
        }
        ++rounds_; // not if this rank failed: it may do its part by skip()
    }
    /// Collective; one sum of six words.
    /// @throws Mismatch  on all ranks: it names the ranks that differ from the lowest, and the first parameter.
    void compare(ControlCommunicator& control, Ranks const& ranks);

private:
    ParameterList parameters_;
    ElementsOnHost elements_;
    std::size_t interval_;
    std::size_t rounds_ = 0;
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/participant/detail/replica_check.ipp>
#endif
