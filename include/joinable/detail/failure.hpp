// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <exception>
#include <string>
#include <vector>

#include <joinable/config.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// What peers should be told about an exception. A failure that came from other ranks keeps its
/// culprits; anything else has none yet, which stands for the rank that throws it.
AbortReason failure_of(std::exception_ptr const& error);

/// The reason of what the communicator threw by which ranks meet: what ended it for all of them.
AbortReason reason_of(std::exception_ptr const& error);

std::string failure_text(std::vector<int> const& ranks, std::string const& text);

/// The same, ready to be thrown elsewhere: without culprits it is `rank` that failed, unless all
/// ranks throw an error that names none.
AbortReason blamed_on(int rank, AbortReason reason);

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/detail/failure.ipp>
#endif
