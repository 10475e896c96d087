// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/shared_memory/run_threads.hpp>

#include <atomic>
#include <cstddef>
#include <memory>
#include <thread>

#include <joinable/communicator/shared_memory/board/group_memory.hpp>
#include <joinable/communicator/shared_memory/group/group.hpp>
#include <joinable/communicator/shared_memory/group/group_storage.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION bool is_of_a_peer(std::exception_ptr const& error) {
    try {
        std::rethrow_exception(error);
    } catch (PeerFailed const&) {
        return true;
    } catch (...) {
        return false;
    }
}

JOINABLE_DEFINITION std::exception_ptr
original(std::vector<std::exception_ptr> const& errors, std::vector<int> const& named, int first) {
    std::vector<int> ranks = named;
    if (first >= 0) {
        ranks.push_back(first);
    }
    std::exception_ptr found;
    auto const look_at = [&](std::exception_ptr const& error) {
        if (error && (!found || (is_of_a_peer(found) && !is_of_a_peer(error)))) {
            found = error;
        }
    };
    for (int const rank : ranks) {
        if (static_cast<std::size_t>(rank) < errors.size()) { // any code may abort, with any ranks
            look_at(errors[static_cast<std::size_t>(rank)]);
        }
    }
    for (std::exception_ptr const& error : errors) {
        look_at(error);
    }
    return found;
}

JOINABLE_DEFINITION void
run_threads_of(int world_size, std::function<void(ThreadCommunicator&)> const& body) {
    auto const storage = std::make_shared<GroupStorage<Heap>>();
    Group const group = storage->make(all_numbers(world_size), 0).value();
    std::vector<std::exception_ptr> errors(static_cast<std::size_t>(world_size));
    std::atomic<int> first_to_throw{-1};
    auto const run = [&](int rank) {
        ThreadCommunicator comm{group, rank, storage};
        try {
            body(comm);
        } catch (...) {
            errors[static_cast<std::size_t>(rank)] = std::current_exception();
            int expected = -1;
            first_to_throw.compare_exchange_strong(expected, rank);
            comm.abort(reason_of_exit(group, rank, failure_of(std::current_exception())));
        }
    };
    {
        std::vector<std::jthread> threads;
        threads.reserve(static_cast<std::size_t>(world_size));
        try {
            for (int rank = 1; rank < world_size; ++rank) {
                threads.emplace_back(run, rank);
            }
        } catch (...) { // no more threads: the started ones must not wait for them
            group.abort(
                {FailureKind::communication, {}, "a thread for a rank could not be started"}, 0
            );
            throw;
        }
        run(0);
    }
    if (auto const error =
            original(errors, own_ranks(group.board().reason()), first_to_throw.load())) {
        std::rethrow_exception(error);
    }
}

}}} // namespace joinable::v0::detail
