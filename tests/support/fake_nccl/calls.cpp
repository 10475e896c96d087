// SPDX-License-Identifier: BSL-1.0
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include <nccl.h>
#include <support/fake_nccl/calls.hpp>
#include <support/fake_nccl/fake_nccl.hpp>
#include <support/fake_nccl/world.hpp>

namespace joinable_tests::fake_nccl {

/// What a test has said to a rank, which stands for a process.
struct Process {
    std::mutex mutex;
    std::map<std::string, ncclResult_t> to_fail;
    std::map<std::string, ncclResult_t> to_fail_later;
    std::map<std::string, std::size_t> called;
    std::atomic<bool> holds_aborts{false};
};

namespace {

std::atomic<int> version{NCCL_VERSION_CODE};
std::atomic<int> polls_in_progress{1};
thread_local std::string last_text;

/// Goes on with what is in progress.
ncclResult_t state_of(Member& member) {
    if (member.pending) {
        if (member.polls > 0) {
            --member.polls;
        } else if (auto const result = member.pending(); result != ncclInProgress) {
            member.pending = nullptr;
            member.state = result; // whatever was there
        }
    }
    return member.state == ncclSuccess ? member.network : member.state;
}

} // namespace

void fail_async(ncclComm_t comm, ncclResult_t result, std::string text) {
    std::lock_guard const lock{mutex()};
    Member& member = member_of(comm, "fail_async");
    member.network = result;
    member.text = std::move(text);
}
void fail_next(std::string function, ncclResult_t result) {
    Process& process = *this_process();
    std::lock_guard const lock{process.mutex};
    process.to_fail[std::move(function)] = result;
}
void fail_later(std::string function, ncclResult_t result) {
    Process& process = *this_process();
    std::lock_guard const lock{process.mutex};
    process.to_fail_later[std::move(function)] = result;
}
void set_polls_in_progress(int polls) {
    polls_in_progress = polls;
}
void set_version(int code) {
    version = code;
}
std::size_t calls(std::string const& function) {
    Process& process = *this_process();
    std::lock_guard const lock{process.mutex};
    return process.called[function];
}

void die(std::string const& text) {
    std::fprintf(stderr, "fake_nccl: %s\n", text.c_str());
    std::abort();
}
std::shared_ptr<Process> const& this_process() {
    thread_local auto const process = std::make_shared<Process>();
    return process;
}
void hold_aborts(bool holds) {
    {
        std::lock_guard const lock{mutex()};
        this_process()->holds_aborts = holds;
    }
    changed().notify_all();
}
bool holds_aborts(Process const& process) {
    return process.holds_aborts;
}
ncclResult_t begin(char const* function) {
    return begin(function, *this_process());
}
ncclResult_t begin(char const* function, Process& process) {
    std::lock_guard const lock{process.mutex};
    ++process.called[function];
    if (auto node = process.to_fail.extract(function); !node.empty()) {
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
ncclResult_t ready(Member const& member) {
    if (member.pending) {
        return refuse(
            ncclInvalidArgument,
            "Attempt to use communicator before the previous operation returned ncclSuccess"
        );
    }
    ncclResult_t const state = member.state == ncclSuccess ? member.network : member.state;
    return state == ncclSuccess ? state : refuse(state, member.text);
}
ncclResult_t poison(Member& member, ncclResult_t result) {
    if (result != ncclSuccess && !member.is_blocking) {
        member.state = result;
        member.text = last_text;
    }
    return result;
}
ncclResult_t start(
    std::unique_lock<std::mutex>& lock,
    Member& member,
    char const* function,
    std::function<ncclResult_t()> go_on
) {
    {
        Process& process = *this_process();
        std::lock_guard const its{process.mutex};
        if (auto node = process.to_fail_later.extract(function); !node.empty()) {
            go_on = [&member, function, result = node.mapped()] {
                member.text = std::string{function} + " was told to fail later";
                return result;
            };
        }
    }
    if (!member.is_blocking) {
        member.pending = std::move(go_on);
        member.polls = polls_in_progress;
        member.state = ncclInProgress;
        return ncclSuccess;
    }
    ncclResult_t result = ncclInProgress;
    changed().wait(lock, [&] { return (result = go_on()) != ncclInProgress; });
    return result == ncclSuccess ? result : refuse(result, member.text);
}
ncclResult_t or_state(Member const& member, ncclResult_t result) {
    return member.is_blocking || result != ncclSuccess ? result : member.state;
}
void require_no_group(char const* function) {
    if (group.depth != 0) {
        die(std::string{function} + " was called in an open group, which puts it off");
    }
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
    case ncclUnhandledCudaError:
        return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
        return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
    }
}
char const* ncclGetLastError(ncclComm_t comm) {
    std::lock_guard const lock{mutex()};
    if (comm != nullptr && live().contains(comm)) {
        Member const& member = *comm->member;
        bool const has_failed = (member.state != ncclSuccess && member.state != ncclInProgress) ||
                                member.network != ncclSuccess;
        last_text = has_failed ? member.text : last_text;
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
