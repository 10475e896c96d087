// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <gpu/common.hpp>

#include <joinable/communicator/shared_memory/thread.hpp>
#include <joinable/cuda.hpp>
#include <joinable/error.hpp>

namespace joinable_gpu {

/// An event without times, of the current device.
class OrderEvent {
public:
    OrderEvent() {
        cudaEvent_t event = nullptr;
        cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
        event_ = {event, [](cudaEvent_t e) { cudaEventDestroy(e); }};
    }
    void record(cudaStream_t stream) const { cuda(cudaEventRecord(event_.get(), stream)); }
    /// Later work on the stream runs after the event.
    void order(cudaStream_t later) const { cuda(cudaStreamWaitEvent(later, event_.get(), 0)); }
    [[nodiscard]] bool has_passed() const {
        cudaError_t const error = cudaEventQuery(event_.get());
        if (error == cudaErrorNotReady) {
            static_cast<void>(cudaGetLastError());
            return false;
        }
        cuda(error);
        return true;
    }

private:
    std::shared_ptr<CUevent_st> event_;
};

/// Makes a stream busy.
using Spin = std::function<void(cudaStream_t)>;

/// A collective of all ranks. `error` and `has_run` are the host function's.
struct PinnedOperation {
    struct Part {
        joinable::ThreadCommunicator* ranks = nullptr;
        std::function<joinable::ThreadWork()> call; ///< over pinned memory
        int device = 0;
        cudaStream_t up = nullptr; ///< on which the result goes to the device
        void const* result = nullptr;
        joinable::Buffer out;
        Spin const* spin = nullptr;
        OrderEvent ready; ///< what this rank contributes is in pinned memory
        OrderEvent done;  ///< the result is on the device
    };

    std::vector<std::unique_ptr<Part>> parts;
    std::size_t posted = 0;
    bool is_launched = false;
    std::exception_ptr error;
    std::atomic<bool> has_run = false;
};

/// Where thread ranks meet. The last rank that posts a collective launches it for all: no stream and
/// no host function waits for work that is not launched yet, so one GPU is enough for all ranks.
class PinnedBoard {
public:
    PinnedBoard(int size, int device) : size_{static_cast<std::size_t>(size)}, device_{device} {}

    std::shared_ptr<PinnedOperation>
    post(std::uint64_t number, int rank, std::unique_ptr<PinnedOperation::Part> part) {
        std::lock_guard const lock{mutex_};
        if (is_closed_) {
            throw joinable::PeerFailed{{}, "another rank has left"};
        }
        while (!running_.empty() && running_.front()->has_run) {
            running_.pop_front();
        }
        auto& open = open_[number];
        if (!open) {
            open = std::make_shared<PinnedOperation>();
            open->parts.resize(size_);
        }
        auto operation = open;
        operation->parts[static_cast<std::size_t>(rank)] = std::move(part);
        if (++operation->posted == size_) {
            open_.erase(number);
            running_.push_back(operation); // a host function may not destroy events
            launch(*operation);
            operation->is_launched = true;
            launched_.notify_all();
        }
        return operation;
    }
    /// Blocks, and calls `look()` now and then, which may throw.
    template <class Look>
    void wait_for_launch(PinnedOperation const& operation, Look const& look) {
        std::unique_lock lock{mutex_};
        while (!launched_.wait_for(lock, std::chrono::milliseconds{1}, [&] {
            return operation.is_launched;
        })) {
            look();
        }
    }
    /// A rank leaves: what it has posted may not be launched any more.
    void close() {
        std::lock_guard const lock{mutex_};
        is_closed_ = true;
    }
    [[nodiscard]] bool is_launched(PinnedOperation const& operation) {
        std::lock_guard const lock{mutex_};
        return operation.is_launched;
    }
    ~PinnedBoard() { cudaStreamSynchronize(stream_); }
    PinnedBoard(PinnedBoard const&) = delete;
    PinnedBoard& operator=(PinnedBoard const&) = delete;

private:
    void launch(PinnedOperation& operation) {
        joinable::detail::CurrentCudaDevice const current{device_};
        for (auto const& part : operation.parts) {
            part->ready.order(stream_);
        }
        cuda(cudaLaunchHostFunc(stream_, &run, &operation));
        OrderEvent const summed;
        summed.record(stream_);
        for (auto const& part : operation.parts) {
            joinable::detail::CurrentCudaDevice const theirs{part->device};
            summed.order(part->up);
            if (part->out.count != 0) {
                (*part->spin)(part->up);
                cuda(cudaMemcpyAsync(
                    part->out.data,
                    part->result,
                    part->out.bytes(),
                    cudaMemcpyHostToDevice,
                    part->up
                ));
            }
            part->done.record(part->up);
        }
    }
    /// All ranks have posted, so one thread does what all of them do.
    static void CUDART_CB run(void* data) {
        auto& operation = *static_cast<PinnedOperation*>(data);
        try {
            std::vector<joinable::ThreadWork> works;
            for (auto const& part : operation.parts) {
                if (part->call) {
                    works.push_back(part->call());
                }
            }
            for (joinable::ThreadWork& work : works) {
                work.wait();
            }
        } catch (...) {
            operation.error = std::current_exception();
        }
        operation.has_run = true;
    }

    std::size_t size_;
    int device_;
    Stream stream_{}; ///< of host functions
    std::mutex mutex_;
    std::condition_variable launched_;
    bool is_closed_ = false;
    std::map<std::uint64_t, std::shared_ptr<PinnedOperation>> open_; ///< some ranks have posted
    std::deque<std::shared_ptr<PinnedOperation>> running_;
};

struct PinnedOptions {
    joinable::CudaKernels kernels{};
    cudaStream_t caller = nullptr;
    /// Gradients are packed on a stream of the communicator, else on the caller's, as with NCCL.
    bool packs_apart = false;
    Spin spin = [](cudaStream_t) {}; ///< before each copy of a collective
    std::function<void(joinable::ConstBuffer)> on_post = [](joinable::ConstBuffer) {};
};

/// Thread ranks, also several of one GPU, whose collectives go through pinned memory, on streams of
/// their own. Otherwise as NcclCommunicator: a collective starts after the work on the caller's
/// stream, and wait() orders that stream, while the host goes on.
class PinnedCommunicator {
public:
    using device_type = joinable::CudaDevice;

    /// Collective. The device is the current one.
    PinnedCommunicator(joinable::ThreadCommunicator& hosts, PinnedOptions options)
        : ranks_{hosts.split(0, hosts.rank())}, options_{std::move(options)},
          device_{
              current_device(), options_.packs_apart ? pack_ : options_.caller, options_.caller
          },
          words_{*this, hosts} {
        device_.use_kernels(options_.kernels);
        if (rank() == 0) {
            board_ = std::make_shared<PinnedBoard>(size(), device_.id().index);
        }
        std::uint64_t address = reinterpret_cast<std::uintptr_t>(&board_);
        hosts.broadcast({&address, 1, joinable::DType::u64}, 0).wait();
        if (rank() != 0) {
            board_ = *reinterpret_cast<std::shared_ptr<PinnedBoard> const*>(address);
        }
        hosts.barrier();
    }
    PinnedCommunicator(PinnedCommunicator const&) = delete;
    PinnedCommunicator& operator=(PinnedCommunicator const&) = delete;
    ~PinnedCommunicator() {
        board_->close();
        for (cudaStream_t const stream : {cudaStream_t{down_}, cudaStream_t{up_}}) {
            cudaStreamSynchronize(stream);
        }
    }

    class Work {
    public:
        /// Later work on the caller's stream runs after the collective. The host waits until all
        /// ranks have posted it.
        void wait() {
            comm_->wait_for_launch(*operation_);
            part().done.order(comm_->device_.stream());
        }
        [[nodiscard]] bool test() {
            return comm_->board_->is_launched(*operation_) && part().done.has_passed();
        }
        /// Blocks until it is done, up to the deadline.
        void synchronize() {
            comm_->wait_for_launch(*operation_);
            comm_->wait_until([this] { return part().done.has_passed(); });
            if (operation_->error) {
                std::rethrow_exception(operation_->error);
            }
        }

    private:
        friend PinnedCommunicator;
        Work(PinnedCommunicator& comm, std::shared_ptr<PinnedOperation> operation)
            : comm_{&comm}, operation_{std::move(operation)} {}
        [[nodiscard]] PinnedOperation::Part const& part() const {
            return *operation_->parts[static_cast<std::size_t>(comm_->rank())];
        }
        PinnedCommunicator* comm_;
        std::shared_ptr<PinnedOperation> operation_;
    };

    [[nodiscard]] int rank() const { return ranks_.rank(); }
    [[nodiscard]] int size() const { return ranks_.size(); }
    Work all_reduce(joinable::Buffer buffer, joinable::ReduceOp op) {
        return start(buffer, buffer, [this, op](joinable::Buffer, joinable::Buffer host) {
            return ranks_.all_reduce(host, op);
        });
    }
    Work broadcast(joinable::Buffer buffer, int root) {
        return start(buffer, buffer, [this, root](joinable::Buffer, joinable::Buffer host) {
            return ranks_.broadcast(host, root);
        });
    }
    Work all_gather(joinable::ConstBuffer in, joinable::Buffer out) {
        return start(in, out, [this](joinable::Buffer part, joinable::Buffer whole) {
            return ranks_.all_gather(part, whole);
        });
    }
    Work all_gather(
        joinable::ConstBuffer in, joinable::Buffer out, std::span<std::size_t const> counts
    ) {
        return start(
            in,
            out,
            [this, all = std::vector(counts.begin(), counts.end())](
                joinable::Buffer part, joinable::Buffer whole
            ) { return ranks_.all_gather(part, whole, all); }
        );
    }
    Work reduce_scatter(joinable::ConstBuffer in, joinable::Buffer out, joinable::ReduceOp op) {
        return start(in, out, [this, op](joinable::Buffer whole, joinable::Buffer part) {
            return ranks_.reduce_scatter(whole, part, op);
        });
    }
    Work reduce_scatter(
        joinable::ConstBuffer in,
        joinable::Buffer out,
        joinable::ReduceOp op,
        std::span<std::size_t const> counts
    ) {
        return start(
            in,
            out,
            [this, op, all = std::vector(counts.begin(), counts.end())](
                joinable::Buffer whole, joinable::Buffer part
            ) { return ranks_.reduce_scatter(whole, part, op, all); }
        );
    }
    /// Words of the host, which need no stream.
    class Words {
    public:
        explicit Words(PinnedCommunicator& comm, joinable::ThreadCommunicator& hosts)
            : comm_{comm}, ranks_{hosts.split(0, hosts.rank())} {}
        joinable::ThreadWork all_reduce(joinable::Buffer words, joinable::ReduceOp op) {
            return ranks_.all_reduce(words, op);
        }
        joinable::ThreadWork broadcast(joinable::Buffer words, int root) {
            return ranks_.broadcast(words, root);
        }
        /// Blocks, up to the deadline. `to` is pinned.
        void download(void const* from, void* to, std::size_t bytes) {
            cudaStream_t const stream = comm_.device_.stream();
            joinable::detail::CurrentCudaDevice const current{comm_.device_.id().index};
            cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream));
            OrderEvent const copied;
            copied.record(stream);
            comm_.wait_until([&] { return copied.has_passed(); });
        }

    private:
        PinnedCommunicator& comm_;
        joinable::ThreadCommunicator ranks_;
    };
    [[nodiscard]] Words& host_words() noexcept { return words_; }
    void barrier() { start({}, {}, {}).synchronize(); }
    void abort(joinable::AbortReason const& reason) { ranks_.abort(reason); }
    [[nodiscard]] bool is_aborted() const { return ranks_.is_aborted(); }
    [[nodiscard]] joinable::CudaDevice& device_memory() noexcept { return device_; }

    /// From now on the caller makes and uses data on `caller`, as with NcclCommunicator.
    void set_stream(cudaStream_t caller) noexcept {
        options_.caller = caller;
        device_.set_streams(options_.packs_apart ? pack_ : caller, caller);
    }
    /// Blocks until the collectives and the work on the caller's stream have run, up to the
    /// deadline.
    void synchronize() {
        for (cudaStream_t const stream :
             {cudaStream_t{down_}, cudaStream_t{up_}, device_.stream(), options_.caller}) {
            wait_until([stream] { return is_idle(stream); });
        }
    }

private:
    struct Block {
        joinable::Arena memory;
        std::shared_ptr<PinnedOperation> user; ///< null: none
    };

    static int current_device() {
        int device = 0;
        cuda(cudaGetDevice(&device));
        return device;
    }
    static bool is_idle(cudaStream_t stream) {
        cudaError_t const error = cudaStreamQuery(stream);
        if (error == cudaErrorNotReady) {
            static_cast<void>(cudaGetLastError());
            return false;
        }
        cuda(error);
        return true;
    }

    /// `call` gets the pinned memory of both; they are one where the buffers are one.
    Work start(
        joinable::ConstBuffer in,
        joinable::Buffer out,
        std::function<joinable::ThreadWork(joinable::Buffer, joinable::Buffer)> const& call
    ) {
        joinable::detail::CurrentCudaDevice const current{device_.id().index};
        options_.on_post(in);
        bool const is_in_place = in.data == out.data && in.count == out.count;
        std::size_t const first = is_in_place ? 0 : (in.bytes() + 63) / 64 * 64;
        Block& block = free_block(first + out.bytes());
        std::byte* const memory = block.memory.data();
        auto part = std::make_unique<PinnedOperation::Part>();
        part->ranks = &ranks_;
        if (call) {
            part->call = [call,
                          from = joinable::Buffer{memory, in.count, in.dtype},
                          to = joinable::Buffer{memory + first, out.count, out.dtype}] {
                return call(from, to);
            };
        }
        part->device = device_.id().index;
        part->up = up_;
        part->result = memory + first;
        part->out = out;
        part->spin = &options_.spin;
        OrderEvent const posted;
        posted.record(device_.stream());
        posted.order(down_);
        if (in.count != 0) {
            options_.spin(down_);
            cuda(cudaMemcpyAsync(memory, in.data, in.bytes(), cudaMemcpyDeviceToHost, down_));
        }
        part->ready.record(down_);
        block.user = board_->post(posted_++, rank(), std::move(part));
        return {*this, block.user};
    }
    Block& free_block(std::size_t bytes) {
        for (Block& block : blocks_) {
            if (block.memory.bytes() >= bytes && (!block.user || Work{*this, block.user}.test())) {
                return block;
            }
        }
        blocks_.push_back({device_.allocate_staging((std::max)(bytes, std::size_t{4096})), {}});
        return blocks_.back();
    }

    void wait_for_launch(PinnedOperation const& operation) {
        auto const end = std::chrono::steady_clock::now() + deadline;
        board_->wait_for_launch(operation, [&] {
            if (is_aborted()) {
                throw joinable::PeerFailed{{}, "another rank failed"};
            }
            check_time(end);
        });
    }
    template <class Done>
    void wait_until(Done const& done) {
        auto const end = std::chrono::steady_clock::now() + deadline;
        while (!done()) {
            check_time(end); // what is launched ends, also after a failure
            std::this_thread::sleep_for(std::chrono::microseconds{20});
        }
    }
    static void check_time(std::chrono::steady_clock::time_point end) {
        if (std::chrono::steady_clock::now() > end) {
            throw joinable::TimedOut{{}, "a collective through pinned memory does not end"};
        }
    }

    static constexpr std::chrono::seconds deadline{30};

    joinable::ThreadCommunicator ranks_; ///< the host functions'
    PinnedOptions options_;
    Stream down_{};
    Stream up_{};
    Stream pack_{};
    joinable::CudaDevice device_;
    std::shared_ptr<PinnedBoard> board_; ///< of all ranks
    std::uint64_t posted_ = 0;
    std::deque<Block> blocks_;
    Words words_;
};

} // namespace joinable_gpu
