// SPDX-License-Identifier: BSL-1.0
#pragma once

// What ranks on GPUs have to get right: results that a formula gives, and failures that all ranks hear of.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <gpu/common.hpp>

#include <joinable/zero.hpp>

namespace joinable_gpu {

/// Small integers: all dtypes hold them, and their sums, exactly.
[[nodiscard]] inline float number_of(std::size_t element) {
    return static_cast<float>(element % 5 + 1);
}

/// Sums of rank r's numbers times r + 1.
template <class T, class Hosts>
void check_all_reduce(Rank<Hosts>& rank, std::size_t large) {
    int const n = rank.hosts.size();
    for (std::size_t const count : {std::size_t{1}, std::size_t{1000}, large}) {
        std::vector<T> values;
        for (std::size_t e = 0; e < count; ++e) {
            values.push_back(T{static_cast<float>(rank.hosts.rank() + 1) * number_of(e)});
        }
        DeviceArray<T> const array{std::move(values), rank.stream};
        rank.comm.all_reduce(array.buffer(), joinable::ReduceOp::sum).wait();
        std::vector<T> const sums = array.read(rank.comm, rank.stream);
        for (std::size_t e = 0; e < count; ++e) {
            auto const sum = static_cast<float>(sums[e]);
            if (sum != static_cast<float>(n * (n + 1) / 2) * number_of(e)) {
                expect(
                    false,
                    "all_reduce: element " + std::to_string(e) + " of " + std::to_string(count) +
                        " is " + std::to_string(sum)
                );
            }
        }
    }
}

/// Puts `factor` times the numbers into a gradient. `values` is read in the order of the stream.
template <class T>
void write_gradient(Param& param, float factor, std::vector<T>& values, cudaStream_t stream) {
    values.clear();
    for (std::size_t e = 0; e < param.grad.numel(); ++e) {
        values.push_back(T{factor * number_of(e)});
    }
    cuda(cudaMemcpyAsync(
        param.grad.data(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice, stream
    ));
}
template <class T, class Hosts>
void expect_gradient(Rank<Hosts>& rank, Param const& param, float factor, int round) {
    std::vector<T> values(param.grad.numel());
    std::size_t const bytes = values.size() * sizeof(T);
    cuda(cudaMemcpyAsync(
        values.data(), param.grad.data(), bytes, cudaMemcpyDeviceToHost, rank.stream
    ));
    rank.comm.synchronize();
    for (std::size_t e = 0; e < values.size(); ++e) {
        auto const value = static_cast<float>(values[e]);
        if (value != factor * number_of(e)) {
            expect(
                false,
                "guard: after round " + std::to_string(round) + " element " + std::to_string(e) +
                    " of a gradient is " + std::to_string(value) + ", not " +
                    std::to_string(factor * number_of(e))
            );
        }
    }
}

/// Rank r has r + 1 inputs; in round k its gradient is the numbers times (r + 1)(k + 1).
template <class T, class Hosts>
void check_uneven_inputs(Rank<Hosts>& rank, std::size_t large, bool views) {
    int const n = rank.hosts.size();
    auto const average = [n](int round) {
        float sum = 0;
        for (int active = round; active < n; ++active) {
            sum += static_cast<float>((active + 1) * (round + 1));
        }
        return sum / static_cast<float>(n);
    };
    std::vector<Param> params;
    for (std::size_t const count : {std::size_t{3000}, std::size_t{1}, large}) {
        params.emplace_back(joinable::dtype_of<T>, count, rank.device);
    }
    std::vector<std::vector<T>> values(params.size());
    joinable::DistributedDataParallel ddp{
        rank.comm,
        params,
        {.bucket_cap_bytes = 8192,
         .first_bucket_bytes = 1024,
         .gradient_as_bucket_view = views,
         .joined_gradients = joinable::JoinedGradients::kept}
    };
    joinable::Join guard{joinable::participants(ddp), joinable::control(rank.hosts)};
    for (int round = 0; round <= rank.hosts.rank(); ++round) {
        ddp.forward([] {});
        ddp.backward([&](auto ready) {
            auto const factor = static_cast<float>((rank.hosts.rank() + 1) * (round + 1));
            for (std::size_t p = params.size(); p-- > 0;) {
                write_gradient(params[p], factor, values[p], rank.stream);
                ready(p);
            }
        });
        for (Param const& param : params) {
            expect_gradient<T>(rank, param, average(round), round);
        }
    }
    expect(guard.finish().rounds == static_cast<std::size_t>(n), "guard: a number of rounds");
    for (Param const& param : params) { // joined ranks have what the last one has
        expect_gradient<T>(rank, param, average(n - 1), n - 1);
    }
}

/// A parameter in host memory.
template <class T>
struct HostParam {
    std::vector<T> value;
    std::vector<T> grad;
};

/// Trains `params` with gradients that `backward(round, ready)` makes; rank r has r + 1 inputs.
template <class Comm, class Hosts, class Params, class Backward>
void train_sharded(
    Comm& comm,
    Hosts& hosts,
    Params& params,
    joinable::ShardedOptions const& options,
    Backward const& backward
) {
    joinable::AdamW const rule{.learning_rate = 0.02, .weight_decay = 0.1, .amsgrad = true};
    joinable::ShardedDataParallel sharded{comm, params, rule, options};
    joinable::Join guard{joinable::participants(sharded), joinable::control(hosts)};
    for (int round = 0; round <= hosts.rank(); ++round) {
        sharded.forward([] {});
        sharded.backward([&](auto ready) { backward(round, ready); });
        sharded.step();
    }
    (void)guard.finish();
}

/// The values of a sharded training on GPUs whose gradients are clipped are those of one on the host,
/// bit for bit: averages and sums of squares are exact, and rules compute the same on both.
template <class T, class Hosts>
void check_sharded(Rank<Hosts>& rank, std::size_t large) {
    auto const factor = [&](int round) {
        return static_cast<float>((rank.hosts.rank() + 1) * (round + 1));
    };
    std::vector<std::size_t> const counts{3000, 1, large, 129};
    for (joinable::Sharding const sharding :
         {joinable::Sharding::optimizer, joinable::Sharding::gradients}) {
        for (auto const partition :
             {joinable::Partition::by_parameters, joinable::Partition::flat}) {
            joinable::ShardedOptions options{
                .sharding = sharding, .partition = partition, .bucket_cap_bytes = 8192
            };
            joinable::ClipNorm clip{1.0};
            options.before_step = std::ref(clip);
            std::vector<HostParam<T>> on_host;
            std::vector<Param> params;
            for (std::size_t const count : counts) {
                on_host.push_back({std::vector<T>(count), std::vector<T>(count)});
                params.emplace_back(joinable::dtype_of<T>, count, rank.device);
            }
            train_sharded(rank.hosts, rank.hosts, on_host, options, [&](int round, auto ready) {
                for (std::size_t p = on_host.size(); p-- > 0;) {
                    for (std::size_t e = 0; e < counts[p]; ++e) {
                        on_host[p].grad[e] = T{factor(round) * number_of(e)};
                    }
                    ready(p);
                }
            });
            double const norm = clip.norm();
            std::vector<std::vector<T>> values(params.size());
            train_sharded(rank.comm, rank.hosts, params, options, [&](int round, auto ready) {
                for (std::size_t p = params.size(); p-- > 0;) {
                    rank.comm.synchronize(); // `values` were read
                    write_gradient(params[p], factor(round), values[p], rank.stream);
                    ready(p);
                }
            });
            expect(
                norm > 1.0 && clip.norm() == norm, "the GPU clips by another norm than the host"
            );
            for (std::size_t p = 0; p < params.size(); ++p) {
                std::vector<T> there(counts[p]);
                std::size_t const bytes = counts[p] * sizeof(T);
                cuda(cudaMemcpyAsync(
                    there.data(), params[p].value.data(), bytes, cudaMemcpyDeviceToHost, rank.stream
                ));
                rank.comm.synchronize();
                expect(
                    std::memcmp(there.data(), on_host[p].value.data(), bytes) == 0,
                    "a sharded training on the GPU has other values in parameter " +
                        std::to_string(p)
                );
            }
        }
    }
}

/// All that has a formula, with `kernels` and without any, up to `large` elements.
template <class Hosts>
void check_results(Hosts& hosts, joinable::CudaKernels const& kernels, std::size_t large) {
    for (joinable::CudaKernels const& with : {joinable::CudaKernels{}, kernels}) {
        Rank<Hosts> rank{hosts, with};
        auto const check = [&]<class T>(T) {
            check_all_reduce<T>(rank, large);
            check_uneven_inputs<T>(rank, large, false);
            check_uneven_inputs<T>(rank, large, true);
            if (with.sum_squares != nullptr) {
                check_sharded<T>(rank, (std::min)(large, std::size_t{100'000}));
            }
        };
        check(joinable::Half{});
        check(joinable::BFloat16{});
        check(float{});
    }
}

/// Where the last rank fails.
enum class Where { before_a_sum, in_a_backward_pass };

/// The last rank throws while the others wait for it on their GPUs: they throw PeerFailed, in time.
template <class Hosts>
void check_failure(Hosts& hosts, Where where) {
    int const culprit = hosts.size() - 1;
    auto begun = std::chrono::steady_clock::now();
    try {
        Rank<Hosts> rank{hosts};
        std::vector<Param> params;
        params.emplace_back(joinable::DType::f32, 1000, rank.device);
        joinable::DistributedDataParallel ddp{rank.comm, params};
        rank.comm.synchronize();
        rank.comm.barrier();
        begun = std::chrono::steady_clock::now();
        auto const fail = [&] { expect(hosts.rank() != culprit, "overflow"); };
        if (where == Where::before_a_sum) {
            fail();
            rank.comm
                .all_reduce(
                    {params[0].grad.data(), 1000, joinable::DType::f32}, joinable::ReduceOp::sum
                )
                .wait();
        } else {
            joinable::Join guard{joinable::participants(ddp), joinable::control(hosts)};
            ddp.forward([] {});
            ddp.backward([&](auto ready) {
                fail();
                ready(0);
            });
            (void)guard.finish();
        }
        rank.comm.synchronize();
    } catch (joinable::PeerFailed const& failure) {
        auto const took = std::chrono::steady_clock::now() - begun;
        expect(
            hosts.rank() != culprit && failure.rank() == culprit,
            "the failure of rank " + std::to_string(culprit) + " is told as: " + failure.what()
        );
        expect(took < std::chrono::seconds{20}, "a rank was told of a failure too late");
        return;
    } catch (std::runtime_error const& error) {
        expect(hosts.rank() == culprit && error.what() == std::string{"overflow"}, error.what());
        return;
    }
    expect(false, "a rank failed, and rank " + std::to_string(hosts.rank()) + " was not told");
}

} // namespace joinable_gpu
