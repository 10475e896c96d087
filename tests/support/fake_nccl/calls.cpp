// SPDX-License-Identifier: BSL-1.0
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include <nccl.h>
#include <support/fake_nccl/calls.hpp>
#include <support/fake_nccl/fake_nccl.hpp>
#include <support/fake_nccl/world.hpp>

namespace joinable_tests::fake_nccl {

namespace {

std::atomic<int> version{NCCL_VERSION_CODE};
std::atomic<int> polls_in_progress{1};
thread_local std::map<std::string, ncclResult_t> to_fail;
thread_local std::map<std::string, std::size_t> called;
thread_local std::string last_text;

/// Goes on with what is in progress.
ncclResult_t state_of(Member& member) {
    if (member.error != ncclSuccess) {
        return member.error;
    }
    if (member.pending) {
        if (member.polls > 0) {
            --member.polls;
            return ncclInProgress;
        }
        if (!member.pending()) {
            return member.error == ncclSuccess ? ncclInProgress : member.error;
        }
        member.pending = nullptr;
    }
    return ncclSuccess;
}

} // namespace

void fail_async(ncclComm_t comm, ncclResult_t result, std::string text) {
    std::lock_guard const lock{mutex()};
    Member& member = member_of(comm, "fail_async");
    member.error = result;
    member.text = std::move(text);
}
void fail_next(std::string function, ncclResult_t result) {
    to_fail[std::move(function)] = result;
}
void set_polls_in_progress(int polls) {
    polls_in_progress = polls;
}
void set_version(int code) {
    version = code;
}
std::size_t calls(std::string const& function) {
    return called[function];
}

void die(std::string const& text) {
    std::fprintf(stderr, "fake_nccl: %s\n", text.c_str());
    std::abort();
}
ncclResult_t begin(char const* function) {
    ++called[function];
    if (auto node = to_fail.extract(function); !node.empty()) {
        last_text = std::string{function} + " was told to fail";
        return node.mapped();
    }
    return ncclSuccess;
}
ncclResult_t refuse(ncclResult_t result, std::string text) {
    last_text = std::move(text);
    return result;
}

Member& member_of(ncclComm_t comm, char const* function) {
    if (!live().contains(comm)) {
        die(std::string{function} + " was given a communicator that is none, or was freed");
    }
    return *comm->member;
}
ncclResult_t ready(Member& member) {
    if (member.is_revoked) {
        return refuse(ncclInvalidUsage, "communicator was revoked");
    }
    if (member.error != ncclSuccess) {
        return refuse(member.error, member.text);
    }
    if (member.pending) {
        member.error = ncclInvalidArgument;
        member.text =
            "Attempt to use communicator before the previous operation returned ncclSuccess";
        return refuse(ncclInvalidArgument, member.text);
    }
    return ncclSuccess;
}
ncclResult_t
start(std::unique_lock<std::mutex>& lock, Member& member, std::function<bool()> go_on) {
    if (!member.is_blocking) {
        member.pending = std::move(go_on);
        member.polls = polls_in_progress;
        return ncclInProgress;
    }
    changed().wait(lock, [&] { return go_on() || member.error != ncclSuccess; });
    return member.error;
}

} // namespace joinable_tests::fake_nccl

using namespace joinable_tests::fake_nccl;

extern "C" {

ncclResult_t ncclGetVersion(int* code) {
    *code = version;
    return begin("ncclGetVersion");
}
char const* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error";
    case ncclSystemError: return "unhandled system error";
    case ncclInternalError: return "internal error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
    }
}
char const* ncclGetLastError(ncclComm_t comm) {
    std::lock_guard const lock{mutex()};
    if (comm != nullptr && live().contains(comm) && !comm->member->text.empty()) {
        last_text = comm->member->text;
    }
    return last_text.c_str();
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
    return call(comm, "ncclCommGetAsyncError", [&](auto&, Member& member) {
        *state = state_of(member);
        return ncclSuccess;
    });
}

} // extern "C"
