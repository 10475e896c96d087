// SPDX-License-Identifier: BSL-1.0
// What a rank says of the reason for which its communicator was aborted.
#include <joinable/communicator/communicator.hpp>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/tells_reason.hpp>

#include <joinable/communicator/self.hpp>

namespace {

using namespace joinable_tests;

TEST_CASE("each rank tells why its communicator was aborted: the first reason") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) { check_tells_reason(comm); });
}

TEST_CASE("a single rank tells why it was aborted") {
    joinable::SelfCommunicator comm;
    check_tells_reason(comm);
}

} // namespace
