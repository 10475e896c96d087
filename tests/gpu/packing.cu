// SPDX-License-Identifier: BSL-1.0
// What CudaDevice with kernels takes to pack tensors and to unpack them, beside one cudaMemcpyAsync of
// as many bytes: nvcc -std=c++20 -O2 -arch=native -Iinclude tests/gpu/packing.cu -o packing && ./packing
//
// Each time is that of the GPU alone: a kernel holds the stream until the host has launched everything.
// What the host takes is printed beside it. Ends with 1 if a result is wrong, with 3 if CUDA fails. An
// aim that is missed is only printed.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <joinable/cuda.hpp>
#include <joinable/cuda_kernels.hpp>

namespace {

using joinable::AnyView;
using joinable::DType;

constexpr std::size_t total_bytes = std::size_t{1} << 30U;
constexpr std::size_t gap_bytes =
    256; ///< between tensors: each begins where cudaMalloc's memory does
constexpr unsigned char gap = 0xff;
constexpr unsigned int blocks = 2048;
constexpr unsigned int threads = 256;

void cuda(cudaError_t error, char const* call) {
    if (error != cudaSuccess) {
        std::printf("%s failed: %s\n", call, cudaGetErrorString(error));
        std::exit(3);
    }
}
#define CUDA(call) cuda(call, #call)

/// Random numbers, none of them 0. Half of a number is exact.
template <class T>
__host__ __device__ T number_at(std::size_t place) {
    auto const bits = static_cast<std::uint32_t>((place + 1) * 0x9e3779b97f4a7c15U >> 32U);
    float const number = static_cast<float>(bits % 100 + 1) * (bits >> 31U != 0 ? -0.75F : 0.75F);
    if constexpr (std::is_same_v<T, float>) {
        return number;
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        return __float2bfloat16_rn(number);
    } else {
        return static_cast<T>(bits % 255 + 1);
    }
}
template <class T>
__host__ __device__ T half_of(T number) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        return __float2bfloat16_rn(0.5F * __bfloat162float(number));
    } else if constexpr (std::is_same_v<T, float>) {
        return 0.5F * number;
    } else {
        return number; // integers are only copied
    }
}

/// Where tensors of `count` elements lie.
struct Places {
    std::byte* data;
    std::size_t first; ///< bytes before the first tensor
    std::size_t step;  ///< bytes from one tensor to the next
    std::size_t count;

    template <class T>
    [[nodiscard]] __host__ __device__ T* at(std::size_t element) const {
        return reinterpret_cast<T*>(data + first + element / count * step) + element % count;
    }
};
template <class F>
__device__ void for_each(std::size_t count, F const& f) {
    for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
         i += std::size_t{gridDim.x} * blockDim.x) {
        f(i);
    }
}
template <class T>
__global__ void write_numbers(Places places, std::size_t count) {
    for_each(count, [&](std::size_t i) { *places.at<T>(i) = number_at<T>(i); });
}
template <class T>
__global__ void count_wrong(Places places, std::size_t count, unsigned long long* wrong) {
    for_each(count, [&](std::size_t i) {
        T const number = *places.at<T>(i);
        if (!(number == half_of(number_at<T>(i)))) {
            atomicAdd(wrong, 1ULL);
        }
    });
}
__global__ void
count_in_gaps(Places places, std::size_t tensors, std::size_t bytes, unsigned long long* wrong) {
    for_each(tensors * (places.step - bytes), [&](std::size_t i) {
        std::size_t const width = places.step - bytes;
        std::size_t const at = i % width < places.first ? i % width : bytes + i % width;
        if (places.data[i / width * places.step + at] != std::byte{gap}) {
            atomicAdd(wrong, 1ULL);
        }
    });
}
/// Waits until the host opens the gate, about 50 ms at most.
__global__ void wait_for_gate(int const volatile* is_open) {
    for (int i = 0; i < 50'000 && *is_open == 0; ++i) {
        __nanosleep(1000);
    }
}

struct Times {
    double gpu;  ///< microseconds between two events
    double host; ///< microseconds until the host could go on
};
double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}
template <class Call>
double host_time(Call const& call) {
    auto const begun = std::chrono::steady_clock::now();
    call();
    std::chrono::duration<double, std::micro> const time = std::chrono::steady_clock::now() - begun;
    return time.count();
}

class Stream {
public:
    Stream() {
        CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
        CUDA(cudaEventCreate(&start_));
        CUDA(cudaEventCreate(&stop_));
        CUDA(cudaMallocHost(&gate_, sizeof(int)));
    }
    operator cudaStream_t() const { return stream_; }

    /// `call()` leaves work on the stream, which begins when it has returned.
    template <class Call>
    Times time(Call const& call) {
        *static_cast<int volatile*>(gate_) = 0;
        wait_for_gate<<<1, 1, 0, stream_>>>(gate_);
        CUDA(cudaEventRecord(start_, stream_));
        double const host = host_time(call);
        CUDA(cudaEventRecord(stop_, stream_));
        *static_cast<int volatile*>(gate_) = 1;
        CUDA(cudaStreamSynchronize(stream_));
        float milliseconds = 0;
        CUDA(cudaEventElapsedTime(&milliseconds, start_, stop_));
        return {1e3 * static_cast<double>(milliseconds), host};
    }

private:
    cudaStream_t stream_ = nullptr;
    cudaEvent_t start_ = nullptr;
    cudaEvent_t stop_ = nullptr;
    int* gate_ = nullptr;
};

struct Memory {
    std::byte* source;
    std::byte* target;
    unsigned long long* wrong;
};

/// Microseconds of a launch that copies 16 bytes, with an argument for `Room` copies.
template <std::size_t Room>
void measure_launch(Stream& stream, Memory const& memory) {
    namespace detail = joinable::detail;
    constexpr int launches = 20;
    detail::ContiguousBatch<Room> batch;
    AnyView const to{memory.target, DType::u8, {16}, {1}};
    auto const copy = detail::cuda_copy(memory.source, {1}, 1.0, to);
    (void)detail::fill_batch(batch, &copy, 1, detail::TakeContiguous{});
    std::vector<double> gpu;
    std::vector<double> host;
    for (int round = -1; round < 11; ++round) {
        Times const times = stream.time([&] {
            for (int i = 0; i < launches; ++i) {
                CUDA(detail::launch_batch(&detail::run_copies<Room>, batch, 1, stream));
            }
        });
        if (round >= 0) { // the first one warms up
            gpu.push_back(times.gpu / launches);
            host.push_back(times.host / launches);
        }
    }
    std::printf(
        "a launch with %zu bytes of arguments, of %zu copies at most: GPU %.1f us, host %.1f us\n",
        sizeof(batch),
        Room,
        median(gpu),
        median(host)
    );
}

/// Packs and unpacks tensors of one size. Returns whether all numbers are right.
template <class T>
bool measure(
    Stream& stream, Memory const& memory, DType dtype, std::size_t bytes, bool is_off_by_one
) {
    std::size_t const tensors = total_bytes / bytes;
    std::size_t const per_tensor = bytes / sizeof(T);
    std::size_t const count = tensors * per_tensor;
    double const factor = joinable::is_floating_point(dtype) ? 0.5 : 1.0;
    Places const outside{
        memory.source, is_off_by_one ? sizeof(T) : 0, bytes + gap_bytes, per_tensor
    };
    Places const inside{memory.target, 0, bytes, per_tensor};
    auto const views = [&](Places const& places) {
        std::vector<AnyView> list;
        for (std::size_t i = 0; i < tensors; ++i) {
            list.emplace_back(
                places.at<T>(i * per_tensor),
                dtype,
                joinable::Shape{per_tensor},
                joinable::Shape{1},
                joinable::DeviceId{joinable::DeviceKind::cuda, 0}
            );
        }
        return list;
    };
    auto const sources = views(outside);
    auto const targets = views(inside);
    joinable::CudaDevice device{0, stream, stream};
    device.use_kernels(joinable::cuda_kernels());
    double queueing = 0; // of the host, in the last move
    auto const move =
        [&](std::vector<AnyView> const& from, double by, std::vector<AnyView> const& to) {
            queueing = host_time([&] {
                for (std::size_t i = 0; i < tensors; ++i) {
                    device.scale_copy(from[i], by, to[i]);
                }
            });
            return stream.time([&] { device.submit(); });
        };

    CUDA(cudaMemsetAsync(memory.wrong, 0, sizeof(*memory.wrong), stream));
    CUDA(cudaMemsetAsync(memory.target, gap, total_bytes, stream));
    write_numbers<T><<<blocks, threads, 0, stream>>>(outside, count);
    (void)move(sources, factor, targets);
    count_wrong<T><<<blocks, threads, 0, stream>>>(inside, count, memory.wrong);
    CUDA(cudaMemsetAsync(memory.source, gap, tensors * outside.step, stream));
    (void)move(targets, 1.0, sources);
    count_wrong<T><<<blocks, threads, 0, stream>>>(outside, count, memory.wrong);
    count_in_gaps<<<blocks, threads, 0, stream>>>(outside, tensors, bytes, memory.wrong);
    unsigned long long wrong = 0;
    CUDA(cudaMemcpyAsync(&wrong, memory.wrong, sizeof(wrong), cudaMemcpyDeviceToHost, stream));
    CUDA(cudaStreamSynchronize(stream));

    bool const is_tiny = bytes < 65'536; // its host times are long, and it has no aim
    std::vector<double> copied;
    std::vector<double> packed;
    std::vector<double> unpacked;
    std::vector<double> host;
    for (int round = 0; round < (is_tiny ? 3 : 11); ++round) {
        double const copy =
            stream
                .time([&] {
                    CUDA(cudaMemcpyAsync(
                        memory.target, memory.source, total_bytes, cudaMemcpyDeviceToDevice, stream
                    ));
                })
                .gpu;
        Times const pack = move(sources, factor, targets);
        host.push_back((queueing + pack.host) / static_cast<double>(tensors));
        copied.push_back(copy);
        packed.push_back(copy / pack.gpu);
        unpacked.push_back(copy / move(targets, 1.0, sources).gpu);
    }
    double const aim = is_tiny ? 0 : is_off_by_one ? 0.5 : bytes < (1U << 20U) ? 0.75 : 0.9;
    double const least = std::min(median(packed), median(unpacked));
    std::printf(
        "%-4s %8zu B %-10s %8.1f us %6.0f GB/s %7.2f %9.2f %7.0f ns  ",
        std::string{joinable::name_of(dtype)}.c_str(),
        bytes,
        is_off_by_one ? "off by one" : "aligned",
        median(copied),
        2e-3 * static_cast<double>(total_bytes) / median(copied),
        median(packed),
        median(unpacked),
        1e3 * median(host)
    );
    if (aim > 0) {
        std::printf("%.2f %s", aim, least >= aim ? "met" : "missed");
    }
    std::printf("%s\n", wrong == 0 ? "" : "  WRONG NUMBERS");
    return wrong == 0;
}

} // namespace

int main() {
    CUDA(cudaSetDevice(0));
    Stream stream;
    Memory memory{};
    CUDA(cudaMalloc(&memory.source, total_bytes + total_bytes / 4096 * gap_bytes));
    CUDA(cudaMalloc(&memory.target, total_bytes));
    CUDA(cudaMalloc(&memory.wrong, sizeof(*memory.wrong)));
    CUDA(joinable::cuda_kernels().load());
    measure_launch<joinable::detail::few_copies>(stream, memory);
    measure_launch<joinable::detail::many_copies>(stream, memory);
    std::printf(
        "1 GiB of tensors scaled by 0.5 into one place, and back: medians of 11 rounds, the GPU's time alone\n"
        "%-4s %10s %-10s %11s %11s %7s %9s %10s  aim\n",
        "",
        "tensor",
        "outside",
        "one copy",
        "",
        "packed",
        "unpacked",
        "host each"
    );
    bool is_right = true;
    for (std::size_t const bytes :
         {std::size_t{4096}, std::size_t{65'536}, std::size_t{4} << 20U}) {
        for (bool const is_off_by_one : {false, true}) {
            is_right &= measure<float>(stream, memory, DType::f32, bytes, is_off_by_one);
            is_right &= measure<__nv_bfloat16>(stream, memory, DType::bf16, bytes, is_off_by_one);
            is_right &= measure<std::uint8_t>(stream, memory, DType::u8, bytes, is_off_by_one);
        }
    }
    std::puts(is_right ? "all numbers are right" : "FAIL: numbers are wrong");
    return is_right ? 0 : 1;
}
