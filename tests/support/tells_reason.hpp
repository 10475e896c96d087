// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <joinable/communicator/communicator.hpp>
#include <joinable/error.hpp>

namespace joinable_tests {

/// Collective. The last rank aborts, and all ranks can then say why.
template <class Comm>
void check_tells_reason(Comm& comm) {
    static_assert(joinable::TellsReason<Comm>);
    comm.barrier();
    CHECK_FALSE(comm.abort_reason());
    int const last = comm.size() - 1;
    std::string const text = "rank " + std::to_string(last) + " has had enough";
    auto const run = [&] {
        comm.barrier(); // the abort may overtake its end
        if (comm.rank() == last) {
            comm.abort({joinable::FailureKind::timed_out, {last}, text});
        }
        comm.barrier();
    };
    CHECK_THROWS_WITH_AS(run(), text.c_str(), joinable::TimedOut);
    for (int look = 0; look < 2; ++look) {
        auto const reason = comm.abort_reason();
        REQUIRE(reason);
        CHECK(reason->kind == joinable::FailureKind::timed_out);
        CHECK(reason->ranks == std::vector{last});
        CHECK(reason->message == text);
        CHECK(reason->origin == -1);
        CHECK_FALSE(reason->has_left);
        CHECK(comm.is_aborted());
        comm.abort({joinable::FailureKind::mismatch, {0}, "the first reason wins"});
    }
}

/// Rank `leaver` has left, and this rank's collectives have thrown that.
template <class Comm>
void check_tells_who_has_left(Comm const& comm, int leaver) {
    auto const reason = comm.abort_reason();
    REQUIRE(reason);
    CHECK(reason->kind == joinable::FailureKind::peer_failed);
    CHECK(reason->ranks == std::vector{leaver});
    CHECK(reason->has_left);
}

} // namespace joinable_tests
