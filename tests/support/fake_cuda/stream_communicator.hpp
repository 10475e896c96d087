// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include <support/fake_cuda/fake_cuda.hpp>

#include <joinable/bucket/compression/detail/numbers.hpp>
#include <joinable/bucket/compression/detail/steps.hpp>
#include <joinable/communicator/shared_memory/thread.hpp>
#include <joinable/cuda.hpp>
#include <joinable/device/copy.hpp>
#include <joinable/device/squares.hpp>
#include <joinable/device/step.hpp>

namespace joinable_tests {

/// Ranks of `Host`, each with a device of the fake and a stream on which its collectives run: they take
/// nothing but memory of that device.
template <class Host>
class StreamCommunicatorOf {
public:
    using device_type = joinable::CudaDevice;

    explicit StreamCommunicatorOf(Host& host, cudaStream_t engine_stream = {})
        : StreamCommunicatorOf{host, engine_stream, host.rank()} {}
    /// On a device that need not have the number of the rank.
    StreamCommunicatorOf(Host& host, cudaStream_t engine_stream, int device)
        : ranks_{host.split(0, host.rank())}, index_{device}, stream_{make_stream(device)},
          device_{device, stream_.get(), engine_stream} {}
    ~StreamCommunicatorOf() { (void)cudaStreamSynchronize(stream_.get()); }
    StreamCommunicatorOf(StreamCommunicatorOf const&) = delete;
    StreamCommunicatorOf& operator=(StreamCommunicatorOf const&) = delete;

    class StreamWork {
    public:
        void wait() {
            (void)cudaEventSynchronize(event_.get());
            if (*error_) {
                std::rethrow_exception(*error_);
            }
        }
        [[nodiscard]] bool test() {
            bool const is_done = cudaEventQuery(event_.get()) == cudaSuccess;
            (void)cudaGetLastError(); // not ready is no error
            return is_done;
        }

    private:
        friend StreamCommunicatorOf;
        std::shared_ptr<CUevent_st> event_;
        std::shared_ptr<std::exception_ptr> error_ = std::make_shared<std::exception_ptr>();
    };

    [[nodiscard]] int rank() const { return ranks_.rank(); }
    [[nodiscard]] int size() const { return ranks_.size(); }
    StreamWork all_reduce(joinable::Buffer buffer, joinable::ReduceOp op) {
        return start(buffer, [this, buffer, op] { ranks_.all_reduce(buffer, op).wait(); });
    }
    StreamWork broadcast(joinable::Buffer buffer, int root) {
        return start(buffer, [this, buffer, root] { ranks_.broadcast(buffer, root).wait(); });
    }
    void barrier() {
        StreamWork work = start({}, [this] { ranks_.barrier(); });
        work.wait();
    }
    void abort(joinable::AbortReason const& reason) { ranks_.abort(reason); }
    [[nodiscard]] bool is_aborted() const { return ranks_.is_aborted(); }
    [[nodiscard]] auto abort_reason() const { return ranks_.abort_reason(); }
    [[nodiscard]] joinable::CudaDevice& device_memory() noexcept { return device_; }

protected:
    template <class Collective>
    StreamWork start(joinable::Buffer buffer, Collective collective) {
        if (buffer.count != 0 && !fake_cuda::is_device_memory(buffer.data, buffer.bytes())) {
            throw std::invalid_argument{"a collective over memory that is no device's"};
        }
        StreamWork work;
        fake_cuda::enqueue(index_, stream_.get(), [collective, error = work.error_] {
            try {
                collective();
            } catch (...) {
                *error = std::current_exception();
            }
        });
        int before = 0;
        (void)cudaGetDevice(&before);
        (void)cudaSetDevice(index_);
        cudaEvent_t event = nullptr;
        (void)cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
        work.event_ = {event, [](cudaEvent_t e) { (void)cudaEventDestroy(e); }};
        (void)cudaEventRecord(event, stream_.get());
        (void)cudaSetDevice(before);
        return work;
    }

    decltype(std::declval<Host&>().split(0, 0)) ranks_; ///< the stream's

private:
    static std::shared_ptr<CUstream_st> make_stream(int device) {
        int before = 0;
        (void)cudaGetDevice(&before);
        (void)cudaSetDevice(device);
        cudaStream_t stream = nullptr;
        (void)cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
        (void)cudaSetDevice(before);
        return {stream, [](cudaStream_t s) { (void)cudaStreamDestroy(s); }};
    }

    int index_;
    std::shared_ptr<CUstream_st> stream_;
    joinable::CudaDevice device_;
};

/// One that scales what it sums, as NCCL's pre-multiplied sum.
template <class Host>
class ScalingStreamCommunicatorOf : public StreamCommunicatorOf<Host> {
public:
    using StreamCommunicatorOf<Host>::all_reduce;
    using StreamCommunicatorOf<Host>::StreamCommunicatorOf;

    auto all_reduce(joinable::Buffer buffer, joinable::ReduceOp op, double factor) {
        return this->start(buffer, [this, buffer, op, factor] {
            joinable::AnyView const view{buffer.data, buffer.dtype, {buffer.count}, {1}};
            joinable::scale_copy(view, factor, view);
            this->ranks_.all_reduce(buffer, op).wait();
        });
    }
};

/// Over threads.
using StreamCommunicator = StreamCommunicatorOf<joinable::ThreadCommunicator>;
using ScalingStreamCommunicator = ScalingStreamCommunicatorOf<joinable::ThreadCommunicator>;

/// Whether a copy of a launch writes what another one reads or writes: the threads of a GPU go in no
/// order.
inline bool depend_on_each_other(std::vector<joinable::detail::CudaCopy> const& copies) {
    struct Range {
        std::uintptr_t first, last;
        [[nodiscard]] bool meets(Range const& other) const {
            return first < other.last && other.first < last;
        }
    };
    auto const range_of = [](joinable::detail::CudaCopy const& copy, void const* data, auto step) {
        auto const first = reinterpret_cast<std::uintptr_t>(data);
        if (data == nullptr || copy.count == 0) {
            return Range{0, 0};
        }
        std::size_t last = 1;
        for (std::size_t l = 0; l < copy.levels; ++l) {
            last += (copy.level[l].extent - 1) * copy.level[l].*step;
        }
        return Range{first, first + last * joinable::size_of(copy.dtype)};
    };
    using Level = joinable::detail::CudaCopy::Level;
    for (joinable::detail::CudaCopy const& copy : copies) {
        Range const target = range_of(copy, copy.to, &Level::to);
        for (joinable::detail::CudaCopy const& other : copies) {
            if (&other != &copy && (target.meets(range_of(other, other.to, &Level::to)) ||
                                    target.meets(range_of(other, other.from, &Level::from)))) {
                return true;
            }
        }
    }
    return false;
}

/// Whether updates of a launch have elements in common, or elements that are not the device's.
inline bool are_wrong(std::vector<joinable::detail::DeviceUpdate> const& updates) {
    auto const is_there = [](void const* data, std::size_t bytes) {
        return data == nullptr || fake_cuda::is_device_memory(data, bytes);
    };
    for (joinable::detail::DeviceUpdate const& update : updates) {
        auto const* const first = static_cast<std::byte const*>(update.values);
        std::size_t const bytes = update.count * joinable::size_of(update.dtype);
        if (update.count == 0) {
            continue;
        }
        if (!is_there(first, bytes) || !is_there(update.gradients, bytes) ||
            !is_there(update.masters, update.count * sizeof(float)) || !is_there(update.state, 1)) {
            return true;
        }
        for (joinable::detail::DeviceUpdate const& other : updates) {
            auto const* const second = static_cast<std::byte const*>(other.values);
            if (&other != &update && other.count != 0 && second >= first &&
                second < first + bytes) {
                return true;
            }
        }
    }
    return false;
}

/// Kernels of the fake: what a launch is to do, by the host's loops. Counts launches.
inline std::atomic<int> kernel_launches{0};
inline std::atomic<int> update_launches{0};

inline cudaError_t
host_copies(joinable::detail::CudaCopy const* copies, std::size_t count, cudaStream_t stream) {
    ++kernel_launches;
    if (depend_on_each_other({copies, copies + count})) {
        return cudaErrorIllegalState;
    }
    fake_cuda::enqueue(stream, [list = std::vector(copies, copies + count)] {
        for (joinable::detail::CudaCopy const& copy : list) {
            joinable::Shape extents;
            joinable::Shape from;
            joinable::Shape to;
            for (std::size_t l = copy.levels; l-- > 0;) {
                extents.push_back(copy.level[l].extent);
                from.push_back(copy.level[l].from);
                to.push_back(copy.level[l].to);
            }
            joinable::AnyView const target{copy.to, copy.dtype, extents, to};
            double const factor = copy.factor_at == nullptr ? copy.factor : *copy.factor_at;
            if (copy.from == nullptr || (copy.factor_at != nullptr && factor == 0.0)) {
                joinable::fill_zero(target);
            } else {
                joinable::scale_copy(
                    {const_cast<void*>(copy.from), copy.dtype, extents, from}, factor, target
                );
            }
        }
    });
    return cudaSuccess;
}
inline cudaError_t host_updates(
    joinable::detail::DeviceRule const& rule,
    joinable::detail::DeviceUpdate const* updates,
    std::size_t count,
    cudaStream_t stream
) {
    ++update_launches;
    std::vector<joinable::detail::DeviceUpdate> const list{updates, updates + count};
    if (are_wrong(list)) {
        return cudaErrorIllegalState;
    }
    auto const* const first = static_cast<std::byte const*>(rule.settings);
    fake_cuda::enqueue(
        stream,
        [list, on_host = rule.on_host, settings = std::vector(first, first + rule.bytes)] {
            for (joinable::detail::DeviceUpdate const& update : list) {
                on_host(settings.data(), update);
            }
        }
    );
    return cudaSuccess;
}
/// Whether sums of a launch go to one number, or are of elements that are not the device's.
inline bool are_wrong(std::vector<joinable::detail::CudaSquares> const& sums) {
    std::set<double const*> numbers;
    for (joinable::detail::CudaSquares const& one : sums) {
        std::size_t const last = one.count == 0 ? 0 : one.order.place_of(one.count - 1);
        std::size_t const runs = joinable::detail::square_blocks(one.count);
        if (one.count != 0 &&
            (!fake_cuda::is_device_memory(one.from, (last + 1) * joinable::size_of(one.dtype)) ||
             !fake_cuda::is_device_memory(one.partials, runs * sizeof(double)))) {
            return true;
        }
        if (!fake_cuda::is_device_memory(one.sum, sizeof(double)) ||
            !numbers.insert(one.sum).second) {
            return true;
        }
    }
    return false;
}
inline cudaError_t
host_squares(joinable::detail::CudaSquares const* sums, std::size_t count, cudaStream_t stream) {
    std::vector<joinable::detail::CudaSquares> const list{sums, sums + count};
    if (are_wrong(list)) {
        return cudaErrorIllegalState;
    }
    fake_cuda::enqueue(stream, [list] {
        for (joinable::detail::CudaSquares const& one : list) {
            joinable::Shape extents;
            joinable::Shape steps;
            for (std::uint32_t l = one.order.levels; l-- > 0;) {
                extents.push_back(one.order.level[l].extent);
                steps.push_back(one.order.level[l].step);
            }
            for (std::size_t run = 0; run < joinable::detail::square_blocks(one.count); ++run) {
                one.partials[run] = 0; // kernels write there
            }
            *one.sum += joinable::detail::sum_of_squares(
                {const_cast<void*>(one.from), one.dtype, extents, steps}
            );
        }
    });
    return cudaSuccess;
}
/// What a step of a reduction reads and writes, in bytes. A step that may read or write nothing counts, too.
struct StepMemory {
    struct Range {
        void const* data;
        std::size_t bytes;

        [[nodiscard]] bool meets(Range const& other) const {
            auto const* const first = static_cast<std::byte const*>(data);
            auto const* const second = static_cast<std::byte const*>(other.data);
            return first < second + other.bytes && second < first + bytes;
        }
    };

    explicit StepMemory(joinable::detail::DeviceStep const& step) {
        using joinable::detail::StepKind;
        std::size_t const number = joinable::detail::number_size(step.dtype);
        auto const [rows, columns, rank] = step.size;
        std::size_t elements = rows * columns;
        std::size_t target = step.count * joinable::size_of(step.dtype);
        switch (step.kind) {
        case StepKind::cast:
        case StepKind::add:
        case StepKind::fill_random: elements = step.count; break;
        case StepKind::note_not_finite:
            elements = step.count;
            target = sizeof(double);
            break;
        case StepKind::keep_rows:
        case StepKind::orthogonalize:
            elements = rank * columns;
            target = elements * number;
            break;
        case StepKind::multiply_right: target = rank * rows * number; break;
        case StepKind::multiply_left:
            target = rank * columns * number;
            ranges.push_back({step.room, joinable::detail::numbers_of_chunks(step.size) * number});
            break;
        case StepKind::multiply:
        case StepKind::subtract: break;
        }
        ranges.insert(ranges.begin(), {step.to, target});
        bool const has_elements = step.kind == StepKind::cast || step.kind == StepKind::add ||
                                  step.kind == StepKind::note_not_finite;
        read(step.from, elements * (has_elements ? joinable::size_of(step.from_dtype) : number));
        read(step.left, (step.kind == StepKind::add ? step.count : rank * rows) * number);
        read(step.right, rank * columns * number);
        read(step.only_if, sizeof(double));
    }
    /// Whether a step of the same launch is wrong beside this one: threads of a GPU go in no order.
    [[nodiscard]] bool depends_on(StepMemory const& other) const {
        return std::any_of(ranges.begin(), ranges.end(), [&](Range const& mine) {
            return mine.meets(other.ranges.front());
        });
    }

    std::vector<Range> ranges; ///< the first one is written

private:
    void read(void const* data, std::size_t bytes) {
        if (data != nullptr) {
            ranges.push_back({data, bytes});
        }
    }
};
inline std::atomic<int> step_launches{0};

/// Whether steps use memory that is not the device's, or two of a kind depend on each other.
inline bool are_wrong(std::vector<joinable::detail::DeviceStep> const& steps) {
    for (joinable::detail::DeviceStep const& step : steps) {
        StepMemory const mine{step};
        for (StepMemory::Range const& range : mine.ranges) {
            if (!fake_cuda::is_device_memory(range.data, range.bytes)) {
                return true;
            }
        }
        for (joinable::detail::DeviceStep const& other : steps) {
            if (&other != &step && other.kind == step.kind && mine.depends_on(StepMemory{other})) {
                return true;
            }
        }
    }
    return false;
}
inline cudaError_t
host_steps(joinable::detail::DeviceStep const* steps, std::size_t count, cudaStream_t stream) {
    ++step_launches;
    std::vector<joinable::detail::DeviceStep> const list{steps, steps + count};
    if (are_wrong(list)) {
        return cudaErrorIllegalState;
    }
    fake_cuda::enqueue(stream, [list] {
        for (std::uint8_t kind = 0; kind < joinable::detail::step_kinds; ++kind) {
            for (joinable::detail::DeviceStep step : list) {
                std::vector<double> row(step.size.columns);
                step.room = row.data(); // as the host needs it
                if (step.kind == static_cast<joinable::detail::StepKind>(kind)) {
                    joinable::detail::compute_on_host(step);
                }
            }
        }
    });
    return cudaSuccess;
}
inline joinable::CudaKernels host_kernels() {
    return {
        .run = &host_copies,
        .has_rule = [](joinable::detail::DeviceRule const&) { return true; },
        .update = &host_updates,
        .sum_squares = &host_squares,
        .compute = &host_steps
    };
}

} // namespace joinable_tests
