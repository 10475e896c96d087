// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>

/// @file
/// What the files of the fake have in common: communicators, their ranks, and what is under way.

namespace joinable_tests::fake_nccl {

enum class Kind { all_reduce, broadcast, reduce, all_gather, reduce_scatter, send, receive };

struct Member;
struct Process; ///< see calls.cpp

struct Op {
    Kind kind;
    void const* in;
    void* out;
    std::size_t count;
    ncclDataType_t type;
    ncclRedOp_t op;
    int peer; ///< the root, or the other side
    std::shared_ptr<Member> member;
    cudaStream_t stream;
    double factor = 1.0;          ///< of this rank's input
    bool is_scaled = false;       ///< a sum of scaled inputs is another kernel than a sum
    void const* scalar = nullptr; ///< where the factor is read when the kernel runs
    std::size_t capture = 0;      ///< of a graph: which of the rank's captured operations; else 0

    [[nodiscard]] bool is_message() const { return kind == Kind::send || kind == Kind::receive; }
    [[nodiscard]] bool fits(Op const& other) const {
        return kind == other.kind && count == other.count && type == other.type && op == other.op &&
               peer == other.peer && is_scaled == other.is_scaled && capture == other.capture;
    }
};

/// An operation that is on its stream.
struct Running {
    Op op;
    bool is_done = false;
    bool is_lost = false; ///< its rank has gone
};
using Request = std::shared_ptr<Running>;

/// All ranks of a communicator.
struct World {
    explicit World(int ranks) : size{ranks} {}
    int size;
    std::set<int> joined;
    std::map<std::size_t, std::map<int, Request>> meetings;
    std::map<std::pair<int, int>, std::deque<Request>> sends;
    std::map<std::pair<int, int>, std::deque<Request>> receives;
    std::map<std::size_t, std::map<int, std::pair<int, int>>> splits; ///< colors and keys
    std::map<std::pair<std::size_t, int>, std::shared_ptr<World>> children;
    std::map<std::size_t, std::map<int, std::size_t>> windows; ///< bytes that ranks register
};

/// One rank; outlives its handle where a stream still has operations of it.
struct Member {
    std::shared_ptr<World> world;
    int rank = 0;
    int device = 0;
    bool is_blocking = false;
    bool is_ended = false; ///< aborted
    std::shared_ptr<Process> process;
    bool is_finalized = false;
    /// What the last operation left, as ncclCommGetAsyncError tells it: the last writer wins.
    ncclResult_t state = ncclSuccess;
    ncclResult_t network = ncclSuccess; ///< told where `state` is success
    std::string text;
    int polls = 0;
    /// An operation of a non-blocking communicator that is in progress: goes on, if it can.
    std::function<ncclResult_t()> pending;
    /// What the thread of an operation that is pending still writes when it is aborted.
    std::function<void()> last_write;
    std::size_t collectives = 0;
    std::size_t splits = 0;
    std::size_t windows = 0; ///< that it asked for
    int running = 0;         ///< launches on streams
    struct Factor {
        ncclDataType_t type;
        double value;
        void const* scalar; ///< where it is read later; null: now
    };
    std::map<int, Factor> factors; ///< of operators that are alive
    int operators = 0;             ///< that ever were
    std::size_t captured = 0;      ///< operations, in graphs
    /// What each node of a live graph runs.
    std::vector<std::weak_ptr<std::vector<Op> const>> nodes;
};

} // namespace joinable_tests::fake_nccl

/// The header declares it in the global namespace and leaves it to us.
struct ncclComm {
    std::shared_ptr<joinable_tests::fake_nccl::Member> member;
};

namespace joinable_tests::fake_nccl {

/// What a thread has said since its outermost ncclGroupStart.
struct Group {
    int depth = 0;
    std::vector<Op> ops;
    std::vector<std::shared_ptr<Member>> members; ///< that something was said of
    ncclResult_t error = ncclSuccess;
};
inline thread_local Group group;

// Never destroyed: threads of streams may outlive main().
inline std::mutex& mutex() {
    static auto* const one = new std::mutex;
    return *one;
}
inline std::condition_variable& changed() {
    static auto* const one = new std::condition_variable;
    return *one;
}
inline std::set<ncclComm_t>& live() {
    static auto* const all = new std::set<ncclComm_t>;
    return *all;
}

} // namespace joinable_tests::fake_nccl
