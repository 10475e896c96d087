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

/// NCCL waits for that, without end.
/// @pre mutex() is locked
void require_no_graphs(Member const& member, char const* function) {
    if (std::any_of(member.nodes.begin(), member.nodes.end(), [](auto const& node) {
            return !node.expired();
        })) {
        die(std::string{function} + " was called while a CUDA graph has the communicator's kernels"
        );
    }
}

void make_handle(ncclComm_t* place, std::shared_ptr<Member> member) {
    *place = new ncclComm{std::move(member)};
    live().insert(*place);
}
/// Nothing that is under way goes on.
void end(Member& member) {
    member.is_ended = true;
    member.pending = nullptr;
    if (ncclComm_t* const place = std::exchange(member.making, nullptr)) {
        auto part = std::make_shared<Member>();
        part->world = std::make_shared<World>(1);
        part->error = ncclInternalError;
        make_handle(place, std::move(part));
    }
    changed().notify_all();
}
void free_handle(ncclComm_t comm) {
    end_windows(*comm->member);
    live().erase(comm);
    delete comm;
}

} // namespace

std::size_t live_communicators() {
    std::lock_guard const lock{mutex()};
    return live().size();
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
    return call("ncclCommInitRankConfig", [&]() -> ncclResult_t {
        std::unique_lock lock{mutex()};
        auto& world = worlds()[id.internal];
        if (!world) {
            world = std::make_shared<World>(ranks);
        }
        if (world->size != ranks || rank < 0 || rank >= ranks ||
            !world->joined.insert(rank).second) {
            return refuse(ncclInvalidArgument, "ranks that do not fit together");
        }
        auto member = std::make_shared<Member>();
        member->world = world;
        member->rank = rank;
        member->is_blocking = config == nullptr || config->blocking != 0; // undefined is blocking
        cudaGetDevice(&member->device);
        make_handle(comm, member);
        changed().notify_all();
        return start(lock, *member, [its = std::weak_ptr{member->world}] {
            auto const whole = its.lock();
            return static_cast<int>(whole->joined.size()) == whole->size;
        });
    });
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    return call(comm, "ncclCommFinalize", [&](auto& lock, Member& member) {
        if (auto const result = ready(member); result != ncclSuccess) {
            return result;
        }
        member.is_finalized = true;
        return start(lock, member, [&member] { return member.running == 0; });
    });
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    return call(comm, "ncclCommDestroy", [&](auto& lock, Member& member) {
        require_no_graphs(member, "ncclCommDestroy");
        // For ever, where a rank never comes.
        changed().wait(lock, [&] { return member.running == 0; });
        free_handle(comm);
        return ncclSuccess;
    });
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    ncclResult_t const result = begin("ncclCommAbort");
    if (group.depth != 0) {
        die("ncclCommAbort was called in an open group, which puts it off");
    }
    std::lock_guard const lock{mutex()};
    Member& member = member_of(comm, "ncclCommAbort");
    require_no_graphs(member, "ncclCommAbort");
    end(member);
    if (result == ncclSuccess) {
        free_handle(comm);
    }
    return result;
}
ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
    return call(comm, "ncclCommRevoke", [&](auto&, Member& member) {
        if (flags != 0 || member.is_revoked || member.is_finalized) {
            return refuse(ncclInvalidArgument, "it cannot be revoked");
        }
        member.is_revoked = true;
        end(member);
        return ncclSuccess;
    });
}

ncclResult_t
ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made, ncclConfig_t* config) {
    return call("ncclCommSplit", [&]() -> ncclResult_t {
        if (group.depth != 0) {
            die("ncclCommSplit in a group, which the fake does not have");
        }
        std::unique_lock lock{mutex()};
        Member& member = member_of(comm, "ncclCommSplit");
        if (auto const result = ready(member); result != ncclSuccess) {
            return result;
        }
        std::size_t const number = member.splits++;
        member.world->splits[number][member.rank] = {color, key};
        member.making = color == NCCL_SPLIT_NOCOLOR ? nullptr : made;
        changed().notify_all();
        bool const is_blocking = config == nullptr ? member.is_blocking : config->blocking != 0;
        return start(lock, member, [&member, number, color, made, is_blocking] {
            World& world = *member.world;
            auto const& said = world.splits[number];
            if (static_cast<int>(said.size()) != world.size) {
                return false;
            }
            *made = nullptr;
            member.making = nullptr;
            if (color == NCCL_SPLIT_NOCOLOR) {
                return true;
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
            part->world = child;
            part->device = member.device;
            part->is_blocking = is_blocking;
            for (std::size_t k = 0; k < order.size(); ++k) {
                part->rank = order[k].second == member.rank ? static_cast<int>(k) : part->rank;
            }
            make_handle(made, std::move(part));
            return true;
        });
    });
}

ncclResult_t ncclCommCount(ncclComm_t const comm, int* count) {
    return call(comm, "ncclCommCount", [&](auto&, Member const& member) {
        *count = member.world->size;
        return ncclSuccess;
    });
}
ncclResult_t ncclCommCuDevice(ncclComm_t const comm, int* device) {
    return call(comm, "ncclCommCuDevice", [&](auto&, Member const& member) {
        *device = member.device;
        return ncclSuccess;
    });
}
ncclResult_t ncclCommUserRank(ncclComm_t const comm, int* rank) {
    return call(comm, "ncclCommUserRank", [&](auto&, Member const& member) {
        *rank = member.rank;
        return ncclSuccess;
    });
}

} // extern "C"
