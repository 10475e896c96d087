// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <exception>
#include <functional>
#include <vector>

#include <joinable/communicator/shared_memory/thread.hpp>
#include <joinable/config.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

bool is_of_a_peer(std::exception_ptr const& error);

/// The first of the exceptions that ended the ranks' bodies, not those that other ranks threw because of
/// it. `named` are the ranks that the abort names.
std::exception_ptr
original(std::vector<std::exception_ptr> const& errors, std::vector<int> const& named, int first);

/// As run_threads(), which is called with so many types of bodies that it does nothing else.
void run_threads_of(int world_size, std::function<void(ThreadCommunicator&)> const& body);

} // namespace detail

/// Runs `body(ThreadCommunicator&)` on `world_size` threads, one rank each, and waits for all.
///
/// If a body throws, the others get PeerFailed from whatever they wait in, and the original
/// exception is rethrown here. A rank that returns while others wait for it is PeerFailed with its
/// number at once. A thread that is stuck in the caller's own code cannot be ended.
/// @throws ContractViolation  world_size is below 1.
template <class F>
void run_threads(int world_size, F body) {
    static_assert(
        std::invocable<F&, ThreadCommunicator&>,
        "run_threads: each rank calls body(ThreadCommunicator&), which this body does not take"
    );
    detail::run_threads_of(world_size, std::ref(body));
}

}} // namespace joinable::v0

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/run_threads.ipp>
#endif
