// SPDX-License-Identifier: BSL-1.0
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_nccl/arithmetic.hpp>
#include <support/fake_nccl/calls.hpp>
#include <support/fake_nccl/rendezvous.hpp>
#include <support/fake_nccl/windows.hpp>
#include <support/fake_nccl/world.hpp>

namespace joinable_tests::fake_nccl {

namespace {

/// Its rank has ended, though its stream may not have found that out yet: it takes part no more.
bool is_lost(Running const& running) {
    return running.is_lost || running.op.member->is_ended;
}

void meet(World& world, std::size_t number, int rank, Request const& request) {
    auto& meeting = world.meetings[number];
    meeting[rank] = request;
    if (static_cast<int>(meeting.size()) != world.size) {
        return;
    }
    std::vector<Op> ops;
    for (auto const& [other, running] : meeting) {
        if (is_lost(*running) || !running->op.fits(request->op)) {
            return; // for ever
        }
        ops.push_back(running->op);
    }
    check_places(ops);
    run_collective(ops);
    for (auto const& [other, running] : meeting) {
        running->is_done = true;
    }
    world.meetings.erase(number);
}
void meet_message(World& world, int rank, Request const& request) {
    bool const sends = request->op.kind == Kind::send;
    std::pair const way{sends ? rank : request->op.peer, sends ? request->op.peer : rank};
    (sends ? world.sends : world.receives)[way].push_back(request);
    auto& from = world.sends[way];
    auto& to = world.receives[way];
    while (!from.empty() && !to.empty()) {
        Running& sent = *from.front();
        Running& received = *to.front();
        if (is_lost(sent) || is_lost(received) || sent.op.count != received.op.count ||
            sent.op.type != received.op.type) {
            return; // for ever
        }
        std::memmove(received.op.out, sent.op.in, sent.op.count * size_of(sent.op.type));
        sent.is_done = received.is_done = true;
        from.pop_front();
        to.pop_front();
    }
}
/// A kernel: all operations of a launch at once.
void run(Member& member, std::vector<Op> const& ops, std::vector<std::size_t> const& numbers) {
    std::unique_lock lock{mutex()};
    std::vector<Request> requests;
    for (std::size_t k = 0; k < ops.size() && !member.is_ended; ++k) {
        requests.push_back(std::make_shared<Running>(Running{ops[k]}));
        if (ops[k].is_message()) {
            meet_message(*member.world, member.rank, requests.back());
        } else {
            meet(*member.world, numbers[k], member.rank, requests.back());
        }
    }
    changed().notify_all();
    changed().wait(lock, [&] {
        return member.is_ended || std::all_of(requests.begin(), requests.end(), [](auto const& r) {
                   return r->is_done;
               });
    });
    for (auto const& request : requests) {
        request->is_lost = !request->is_done;
    }
    --member.running;
    changed().notify_all();
}
/// Messages of a rank to itself whose buffers are one are nothing; each needs its other side.
ncclResult_t drop_messages_to_itself(std::vector<Op>& ops) {
    int const me = ops[0].member->rank;
    std::vector<void const*> sent;
    std::vector<void const*> received;
    for (Op const& op : ops) {
        if (op.is_message() && op.peer == me) {
            bool const sends = op.kind == Kind::send;
            (sends ? sent : received).push_back(sends ? op.in : op.out);
        }
    }
    if (sent.size() != received.size()) {
        return ncclInvalidUsage;
    }
    std::size_t sends = 0;
    std::size_t receives = 0;
    std::erase_if(ops, [&](Op const& op) {
        if (!op.is_message() || op.peer != me) {
            return false;
        }
        std::size_t const pair = op.kind == Kind::send ? sends++ : receives++;
        return sent[pair] == received[pair];
    });
    return ncclSuccess;
}
/// @pre mutex() is locked
std::vector<std::size_t> next_numbers(Member& member, std::vector<Op> const& ops) {
    std::vector<std::size_t> numbers;
    for (Op const& op : ops) {
        numbers.push_back(op.is_message() ? 0 : member.collectives++);
    }
    return numbers;
}
/// Where the stream captures, the operations get their numbers at each launch of the graph. A graph
/// of one capture fits only those of the same capture on the other ranks, as NCCL demands.
/// @pre mutex() is locked
bool capture(std::shared_ptr<Member> const& member, std::vector<Op> ops) {
    for (Op& op : ops) {
        op.capture = member->captured + 1;
    }
    auto const node = std::make_shared<std::vector<Op> const>(std::move(ops));
    auto const has = fake_cuda::capture(node->front().stream, [member, node] {
        std::lock_guard const lock{mutex()};
        ++member->running;
        // A copy: what runs does not keep the node alive.
        return [member, ops = *node, numbers = next_numbers(*member, *node)] {
            run(*member, ops, numbers);
        };
    });
    if (has) {
        ++member->captured;
        member->nodes.push_back(node);
    }
    return has;
}

/// NCCL makes the communicator's device current before it launches kernels, but those of one rank.
void put(Member const& member, bool is_alone, Op const& op, std::function<void()> kernel) {
    bool const is_copy = !op.is_scaled; // which a stream of any device takes
    if (!is_alone || (is_copy && op.stream != nullptr)) {
        fake_cuda::enqueue(member.device, op.stream, std::move(kernel));
        return;
    }
    int current = 0;
    static_cast<void>(cudaGetDevice(&current));
    if (!is_copy && op.stream == nullptr && current != member.device) {
        die("a kernel of one rank on the null stream of another device than its memory's");
    }
    fake_cuda::enqueue(op.stream, std::move(kernel));
}

} // namespace

ncclResult_t put_on_stream(std::vector<Op> ops) {
    std::shared_ptr<Member> const member = ops[0].member;
    if (auto const result = drop_messages_to_itself(ops); result != ncclSuccess) {
        member->text = "Trying to send to self without a matching recv, or the other way round";
        return refuse(result, member->text);
    }
    bool const is_alone = member->world->size == 1 && !ops.empty() && !ops[0].is_message();
    if (is_alone && !ops[0].is_scaled && ops[0].in == ops[0].out) {
        return ncclSuccess; // nothing is to be done
    }
    if (ops.empty() || capture(member, ops)) {
        return ncclSuccess;
    }
    ++member->running;
    try {
        auto const numbers = next_numbers(*member, ops);
        put(*member, is_alone, ops[0], [member, ops, numbers] { run(*member, ops, numbers); });
    } catch (std::runtime_error const& error) {
        --member->running;
        member->text = error.what();
        return refuse(ncclUnhandledCudaError, member->text);
    }
    return ncclSuccess;
}
ncclResult_t launch(std::unique_lock<std::mutex>& lock, std::vector<Op> ops, char const* function) {
    Member& member = *ops[0].member;
    return start(lock, member, function, [ops = std::move(ops)] { return put_on_stream(ops); });
}

} // namespace joinable_tests::fake_nccl
