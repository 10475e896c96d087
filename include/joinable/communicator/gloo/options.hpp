// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <variant>

#include <joinable/communicator/communicator.hpp>

namespace joinable { inline namespace v0 {

/// The ranks of a job meet through a file that all of them can reach. Rank 0 writes it and removes
/// it when all ranks have come; it may replace what an earlier job left. The other ranks wait for
/// the file, and look again while nobody answers where an earlier job's file leads. A path is used
/// by one job at a time. The file has the secret of the job, so only its owner can read it; ranks
/// ignore a link, and a file that another user owns, or may read or write.
struct GlooFile {
    std::string path;
};

namespace detail {

/// The ranks of a job meet at a port of rank 0's machine. See TcpOptions, which has the same
/// members and says what the secret keeps out.
struct GlooHub {
    std::string job;
    std::string address; ///< of rank 0's machine
    std::uint16_t port = 0;
    std::string secret;
};

} // namespace detail

/// One rank of a group, for GlooCommunicator. Everything but the rank and its address is the same
/// on all ranks.
struct GlooOptions {
    int rank = 0;
    int size = 1;
    std::variant<GlooFile, detail::GlooHub> store = {};
    /// An address or name of this rank's machine by which the others reach it. If empty, it is the
    /// address from which this rank reaches rank 0. Rank 0 that writes a file then takes the name
    /// of its host.
    std::string address = {};
    std::chrono::nanoseconds connect_timeout = default_deadline; ///< for construction
    /// Applies to all waits after that. If all ranks have posted a collective in time, its data has
    /// one more deadline, which begins again with each message that has passed. So each message
    /// must pass within the deadline: a broadcast between two ranks, each part of an all_gather or
    /// all_to_all, and each send(). A slow link may need a longer deadline. If no message of a
    /// collective passes in time, all ranks throw CommunicationError, which says between which
    /// ranks no data moved.
    std::chrono::nanoseconds deadline = default_deadline;
};

}} // namespace joinable::v0
