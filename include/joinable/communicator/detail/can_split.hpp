// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>

namespace joinable { inline namespace v0 { namespace detail {

template <class C>
concept says_whether_it_splits = requires(C const& comm) {
    { comm.can_split() } -> std::same_as<bool>;
};

/// Whether it has split(), and its transport too, if it stands for one that is known when the program runs. Local, the
/// same on all ranks.
template <Communicator Comm>
[[nodiscard]] bool can_split(Comm const& comm) {
    if constexpr (says_whether_it_splits<Comm>) {
        return comm.can_split();
    } else {
        return has_split<Comm>;
    }
}

}}} // namespace joinable::v0::detail
