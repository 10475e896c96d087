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
    ops.swap(group.ops);
    if (auto const error = std::exchange(group.error, ncclSuccess); error != ncclSuccess) {
        return error;
    }
    std::unique_lock lock{mutex()};
    if (result == ncclSuccess && !ops.empty()) {
        if (!std::all_of(ops.begin(), ops.end(), [&](Op const& op) {
                return op.member == ops.front().member;
            })) {
            die("several communicators in a group, which the fake does not have");
        }
        result = launch(lock, ops);
    }
    return result;
}

} // extern "C"
