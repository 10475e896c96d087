// SPDX-License-Identifier: BSL-1.0
#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include <nccl.h>
#include <support/fake_nccl/calls.hpp>
#include <support/fake_nccl/rendezvous.hpp>
#include <support/fake_nccl/world.hpp>

using namespace joinable_tests::fake_nccl;

extern "C" {

ncclResult_t ncclGroupStart() {
    return call("ncclGroupStart", [&]() -> ncclResult_t {
        ++group.depth;
        return ncclSuccess;
    });
}
ncclResult_t ncclGroupEnd() {
    if (group.depth == 0) {
        return refuse(ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
    }
    ncclResult_t result = begin("ncclGroupEnd");
    if (--group.depth > 0) {
        return result;
    }
    std::vector<Op> ops;
    std::vector<std::shared_ptr<Member>> members;
    ops.swap(group.ops);
    members.swap(group.members);
    std::unique_lock lock{mutex()};
    if (auto const error = std::exchange(group.error, ncclSuccess); result == ncclSuccess) {
        result = error;
    }
    if (result != ncclSuccess) {
        for (auto const& member : members) {
            poison(*member, result);
        }
        return result;
    }
    if (!ops.empty()) {
        if (!std::all_of(ops.begin(), ops.end(), [&](Op const& op) {
                return op.member == ops.front().member;
            })) {
            die("several communicators in a group, which the fake does not have");
        }
        Member const& member = *ops.front().member;
        result = launch(lock, ops, "ncclGroupEnd");
        return member.is_blocking ? result : ncclInProgress; // already, whatever the state is
    }
    return result;
}

} // extern "C"
