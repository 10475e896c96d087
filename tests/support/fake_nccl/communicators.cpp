// SPDX-License-Identifier: BSL-1.0
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <support/fake_nccl/calls.hpp>
#include <support/fake_nccl/fake_nccl.hpp>
#include <support/fake_nccl/windows.hpp>
#include <support/fake_nccl/world.hpp>

namespace joinable_tests::fake_nccl {

namespace {

std::map<std::string, std::shared_ptr<World>>& worlds() { // by unique id, until all have come
    static auto* const all = new std::map<std::string, std::shared_ptr<World>>;
    return *all;
}
std::atomic<std::uint64_t> ids{0};
std::atomic<int> forced_blocking{-1};

/// What a configuration says, unless the environment says otherwise.
bool is_blocking(ncclConfig_t const* config, bool otherwise) {
    if (forced_blocking >= 0) {
        return forced_blocking != 0;
    }
    return config == nullptr ? otherwise : config->blocking != 0; // undefined is blocking
}

void make_handle(ncclComm_t* place, std::shared_ptr<Member> member) {
    *place = new ncclComm{std::move(member)};
    live().insert(*place);
}
/// A handle that is good for nothing but to be aborted.
void make_broken_handle(ncclComm_t* place, Member const& member) {
    auto part = std::make_shared<Member>();
    part->process = member.process;
    part->world = std::make_shared<World>(1);
    part->state = ncclInternalError;
    make_handle(place, std::move(part));
}
bool has_graphs(Member const& member) {
    return std::any_of(member.nodes.begin(), member.nodes.end(), [](auto const& node) {
        return !node.expired();
    });
}
/// NCCL waits for them without end, or after ncclCommFinalize frees what they use.
void require_no_graphs(Member const& member, char const* function) {
    if (has_graphs(member)) {
        die(std::string{function} + " was called while a CUDA graph has the communicator's kernels"
        );
    }
}
void free_handle(ncclComm_t comm) {
    end_windows(*comm->member);
    live().erase(comm);
    delete comm;
    changed().notify_all();
}

} // namespace

void force_blocking(int value) {
    forced_blocking = value;
}
std::size_t live_communicators() {
    std::lock_guard const lock{mutex()};
    return live().size();
}
void wait_for_aborts() {
    std::unique_lock lock{mutex()};
    changed().wait(lock, [] {
        return std::none_of(live().begin(), live().end(), [](ncclComm_t comm) {
            return comm->member->is_ended && !holds_aborts(*comm->member->process);
        });
    });
}
void forget_communicators() {
    std::lock_guard const lock{mutex()};
    while (!live().empty()) {
        free_handle(*live().begin());
    }
}

} // namespace joinable_tests::fake_nccl

using namespace joinable_tests::fake_nccl;

extern "C" {

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    return call("ncclGetUniqueId", [&]() -> ncclResult_t {
        *id = {};
        std::snprintf(id->internal, sizeof id->internal, "fake %d", static_cast<int>(++ids));
        return ncclSuccess;
    });
}

ncclResult_t ncclCommInitRankConfig(
    ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config
) {
    *comm = nullptr; // also where it is refused at once
    return call("ncclCommInitRankConfig", [&]() -> ncclResult_t {
        require_no_group("ncclCommInitRankConfig");
        if (ranks < 1 || rank < 0 || rank >= ranks) {
            return refuse(ncclInvalidArgument, "Invalid rank requested");
        }
        std::unique_lock lock{mutex()};
        auto& world = worlds()[id.internal];
        if (!world) {
            world = std::make_shared<World>(ranks);
        }
        if (world->size != ranks || !world->joined.insert(rank).second) {
            die("ranks that do not fit together join a communicator, and wait for ever");
        }
        auto member = std::make_shared<Member>();
        member->process = this_process();
        member->world = world;
        member->rank = rank;
        member->is_blocking = is_blocking(config, true);
        cudaGetDevice(&member->device);
        make_handle(comm, member);
        changed().notify_all();
        auto const result =
            start(lock, *member, "ncclCommInitRankConfig", [its = std::weak_ptr{member->world}] {
                auto const whole = its.lock();
                bool const is_whole = static_cast<int>(whole->joined.size()) == whole->size;
                return is_whole ? ncclSuccess : ncclInProgress;
            });
        return or_state(*member, result);
    });
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    require_no_group("ncclCommFinalize");
    ncclResult_t const told = begin("ncclCommFinalize");
    std::unique_lock lock{mutex()};
    Member& member = member_of(comm, "ncclCommFinalize");
    ncclResult_t result = told == ncclSuccess ? ready(member) : told;
    if (result == ncclSuccess && member.is_finalized) {
        result = refuse(ncclInvalidArgument, "it is finalized");
    }
    if (result != ncclSuccess) {
        return poison(member, result);
    }
    member.is_finalized = true;
    result = start(lock, member, "ncclCommFinalize", [&member] {
        bool const is_idle = member.running == 0 && !has_graphs(member);
        return is_idle ? ncclSuccess : ncclInProgress;
    });
    return or_state(member, result);
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    require_no_group("ncclCommDestroy");
    std::unique_lock lock{mutex()};
    Member& member = member_of(comm, "ncclCommDestroy");
    if (auto const told = begin("ncclCommDestroy", *member.process); told != ncclSuccess) {
        return told;
    }
    if (ready(member) != ncclSuccess) {
        die("ncclCommDestroy of a communicator that is in progress or in an error state, which "
            "leaves a group open on its thread and frees nothing");
    }
    require_no_graphs(member, "ncclCommDestroy");
    // For ever, where a rank never comes.
    changed().wait(lock, [&] { return member.running == 0; });
    free_handle(comm);
    return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    require_no_group("ncclCommAbort");
    std::unique_lock lock{mutex()};
    Member& member = member_of(comm, "ncclCommAbort");
    ncclResult_t const result = begin("ncclCommAbort", *member.process);
    require_no_graphs(member, "ncclCommAbort");
    member.is_ended = true; // nothing that is under way goes on
    member.pending = nullptr;
    changed().notify_all();
    changed().wait(lock, [&] { return !holds_aborts(*member.process); });
    if (auto const write = std::exchange(member.last_write, nullptr)) {
        write();
    }
    if (result == ncclSuccess) {
        free_handle(comm);
    }
    return result;
}

ncclResult_t
ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made, ncclConfig_t* config) {
    require_no_group("ncclCommSplit");
    return call("ncclCommSplit", [&]() -> ncclResult_t {
        std::unique_lock lock{mutex()};
        Member& member = member_of(comm, "ncclCommSplit");
        if (auto const result = ready(member); result != ncclSuccess) {
            return result;
        }
        *made = nullptr;
        std::size_t const number = member.splits++;
        member.world->splits[number][member.rank] = {color, key};
        if (color != NCCL_SPLIT_NOCOLOR) {
            member.last_write = [&member, made] { make_broken_handle(made, member); };
        }
        changed().notify_all();
        bool const blocks = is_blocking(config, member.is_blocking);
        return start(lock, member, "ncclCommSplit", [&member, number, color, made, blocks] {
            World& world = *member.world;
            auto const& said = world.splits[number];
            if (static_cast<int>(said.size()) != world.size) {
                return ncclInProgress;
            }
            member.last_write = nullptr;
            if (color == NCCL_SPLIT_NOCOLOR) {
                return ncclSuccess;
            }
            std::vector<std::pair<int, int>> order; // keys and ranks of this color
            for (auto const& [rank, what] : said) {
                if (what.first == color) {
                    order.emplace_back(what.second, rank);
                }
            }
            std::sort(order.begin(), order.end());
            auto& child = world.children[{number, color}];
            if (!child) {
                child = std::make_shared<World>(static_cast<int>(order.size()));
            }
            auto part = std::make_shared<Member>();
            part->process = member.process;
            part->world = child;
            part->device = member.device;
            part->is_blocking = blocks;
            for (std::size_t k = 0; k < order.size(); ++k) {
                part->rank = order[k].second == member.rank ? static_cast<int>(k) : part->rank;
            }
            make_handle(made, std::move(part));
            return ncclSuccess;
        });
    });
}

ncclResult_t ncclCommCount(ncclComm_t const comm, int* count) {
    return call(comm, "ncclCommCount", [&](auto&, Member const& member) {
        auto const result = ready(member);
        if (result == ncclSuccess) {
            *count = member.world->size;
        }
        return result;
    });
}
ncclResult_t ncclCommCuDevice(ncclComm_t const comm, int* device) {
    return call(comm, "ncclCommCuDevice", [&](auto&, Member const& member) {
        auto const result = ready(member);
        if (result == ncclSuccess) {
            *device = member.device;
        }
        return result;
    });
}
ncclResult_t ncclCommUserRank(ncclComm_t const comm, int* rank) {
    return call(comm, "ncclCommUserRank", [&](auto&, Member const& member) {
        auto const result = ready(member);
        if (result == ncclSuccess) {
            *rank = member.rank;
        }
        return result;
    });
}

} // extern "C"
