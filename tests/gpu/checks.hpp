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

/// Writes numbers times `factor` to a device, in the order of the stream.
template <class T>
[[nodiscard]] DeviceArray<T>
numbers_on_device(std::size_t count, float factor, cudaStream_t stream) {
    std::vector<T> values;
    for (std::size_t e = 0; e < count; ++e) {
        values.push_back(T{factor * number_of(e)});
    }
    return DeviceArray<T>{std::move(values), stream};
}
/// That an array has the numbers from `first` on times `factor`.
template <class T, class Hosts>
void expect_numbers(
    Rank<Hosts>& rank,
    DeviceArray<T> const& array,
    std::size_t first,
    float factor,
    std::string const& what
) {
    std::vector<T> const values = array.read(rank.comm, rank.stream);
    for (std::size_t e = 0; e < values.size(); ++e) {
        auto const value = static_cast<double>(static_cast<float>(values[e]));
        double const expected = factor * number_of(first + e);
        if (value != expected) {
            expect(
                false,
                what + " of " + std::to_string(values.size()) + " " +
                    std::string{name_of(joinable::dtype_of<T>)} + ": element " + std::to_string(e) +
                    " is " + exactly(value) + ", not " + exactly(expected)
            );
        }
    }
}

/// Sums of rank r's numbers times r + 1.
template <class T, class Hosts>
void check_all_reduce(Rank<Hosts>& rank, std::size_t large) {
    int const n = rank.hosts.size();
    for (std::size_t const count : {std::size_t{1}, std::size_t{1000}, large}) {
        auto const array =
            numbers_on_device<T>(count, static_cast<float>(rank.hosts.rank() + 1), rank.stream);
        rank.comm.all_reduce(array.buffer(), joinable::ReduceOp::sum).wait();
        expect_numbers(rank, array, 0, static_cast<float>(n * (n + 1) / 2), "all_reduce");
    }
}

/// Sums in which rank r's numbers are halved r % 3 + 1 times, to all ranks and in parts. NCCL's blocks do not share
/// all of these counts evenly.
template <class T, class Hosts>
void check_scaled(Rank<Hosts>& rank, std::size_t large) {
    int const halved = 2 << rank.hosts.rank() % 3;
    auto const n = static_cast<std::size_t>(rank.hosts.size());
    auto const me = static_cast<std::size_t>(rank.hosts.rank());
    for (std::size_t const count : {std::size_t{1}, std::size_t{2049}, std::size_t{4097}, large}) {
        auto const own = [&](std::size_t elements) {
            return numbers_on_device<T>(elements, static_cast<float>(halved), rank.stream);
        };
        auto const all = own(count);
        rank.comm.all_reduce(all.buffer(), joinable::ReduceOp::sum, 1.0 / halved).wait();
        expect_numbers(rank, all, 0, static_cast<float>(n), "a scaled all_reduce");
        auto const parts = own(n * count);
        DeviceArray<T> const part{count};
        rank.comm
            .reduce_scatter(parts.buffer(), part.buffer(), joinable::ReduceOp::sum, 1.0 / halved)
            .wait();
        expect_numbers(rank, part, me * count, static_cast<float>(n), "a scaled reduce_scatter");
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

/// Rank r has r + 1 inputs. Averages are what the active ranks' factors say: of a mean over all ranks, which
/// gradients make up for, or of a sum over weights that sum to 8.
template <class T, class Hosts>
void check_uneven_inputs(
    Rank<Hosts>& rank, std::size_t large, bool views, joinable::GradientKind kind
) {
    int const n = rank.hosts.size();
    int const me = rank.hosts.rank();
    bool const is_weighted = kind == joinable::GradientKind::sum;
    auto const average = [n](int round) {
        float sum = 0;
        for (int active = round; active < n; ++active) {
            sum += factor_of(active, round);
        }
        return sum;
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
         .gradient_kind = kind,
         .joined_gradients = joinable::JoinedGradients::kept}
    };
    joinable::Join guard{joinable::participants(ddp), joinable::control(rank.hosts)};
    for (int round = 0; round <= me; ++round) {
        joinable::RoundNotice notice;
        if (is_weighted) { // the last rank is active in each round
            notice.weight = me + 1 == n ? static_cast<std::uint64_t>(8 - (n - 1 - round)) : 1;
        }
        ddp.forward([] {}, notice);
        ddp.backward([&](auto ready) {
            auto const times = static_cast<float>(is_weighted ? 8 : n);
            for (std::size_t p = params.size(); p-- > 0;) {
                write_gradient(params[p], times * factor_of(me, round), values[p], rank.stream);
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

/// A sharded training on GPUs whose gradients are clipped has the norm and the values of one on the host, bit for
/// bit: averages and sums of squares are exact, and rules compute the same on both.
template <class T, class Hosts>
void check_sharded(
    Rank<Hosts>& rank,
    std::size_t large,
    joinable::Sharding sharding,
    joinable::Partition partition,
    Differences& differences
) {
    std::vector<std::size_t> const counts{3000, 1, large, 129};
    auto const factor = [&](int round) {
        return static_cast<float>(rank.hosts.size()) * factor_of(rank.hosts.rank(), round);
    };
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
    std::string const which =
        std::string{name_of(joinable::dtype_of<T>)} + ", sharded " +
        (sharding == joinable::Sharding::optimizer ? "optimizer" : "gradients") + ", " +
        (partition == joinable::Partition::flat ? "flat" : "by parameters");
    if (!(norm > 1.0 && clip.norm() == norm)) {
        differences.add(
            rank.hosts.rank(),
            which + ": the norm is " + exactly(clip.norm()) + ", on the host " + exactly(norm)
        );
    } else if (rank.hosts.rank() == 0) {
        std::printf("%d ranks: %s: norm %.17g\n", rank.hosts.size(), which.c_str(), norm);
    }
    for (std::size_t p = 0; p < params.size(); ++p) {
        std::vector<T> there(counts[p]);
        std::size_t const bytes = counts[p] * sizeof(T);
        cuda(cudaMemcpyAsync(
            there.data(), params[p].value.data(), bytes, cudaMemcpyDeviceToHost, rank.stream
        ));
        rank.comm.synchronize();
        for (std::size_t e = 0; e < counts[p]; ++e) {
            if (std::memcmp(&there[e], &on_host[p].value[e], sizeof(T)) != 0) {
                differences.add(
                    rank.hosts.rank(),
                    which + ": element " + std::to_string(e) + " of parameter " +
                        std::to_string(p) + " is " +
                        exactly(static_cast<double>(static_cast<float>(there[e]))) +
                        ", on the host " +
                        exactly(static_cast<double>(static_cast<float>(on_host[p].value[e])))
                );
                break;
            }
        }
    }
}

/// All that has a formula, with `kernels` and without any, up to `large` elements.
template <class Hosts>
void check_results(Hosts& hosts, joinable::CudaKernels const& kernels, std::size_t large) {
    Differences differences;
    for (joinable::CudaKernels const& with : {joinable::CudaKernels{}, kernels}) {
        Rank<Hosts> rank{hosts, with};
        auto const check = [&]<class T>(T) {
            check_all_reduce<T>(rank, large);
            check_scaled<T>(rank, large);
            for (bool const views : {false, true}) {
                check_uneven_inputs<T>(rank, large, views, joinable::GradientKind::mean);
                check_uneven_inputs<T>(rank, large, views, joinable::GradientKind::sum);
            }
            if (with.sum_squares == nullptr) {
                return;
            }
            for (auto const sharding :
                 {joinable::Sharding::optimizer, joinable::Sharding::gradients}) {
                for (auto const partition :
                     {joinable::Partition::by_parameters, joinable::Partition::flat}) {
                    check_sharded<T>(
                        rank,
                        (std::min)(large, std::size_t{100'000}),
                        sharding,
                        partition,
                        differences
                    );
                }
            }
        };
        check(joinable::Half{});
        check(joinable::BFloat16{});
        check(float{});
    }
    differences.expect_none();
}

/// Where the last rank fails.
enum class Where { before_a_sum, in_a_backward_pass, while_others_wait_in_a_kernel };

/// The last rank fails by `die()` while the others wait for it on their GPUs: they throw PeerFailed, in time.
/// Returns how long that took them, in seconds.
template <class Hosts, class Die>
double check_failure(Hosts& hosts, Where where, Die const& die) {
    using Clock = std::chrono::steady_clock;
    int const culprit = hosts.size() - 1;
    auto const fail = [&] {
        if (hosts.rank() == culprit) {
            die();
        }
    };
    auto begun = Clock::now();
    try {
        Rank<Hosts> rank{hosts};
        std::vector<Param> params;
        params.emplace_back(joinable::DType::f32, 1000, rank.device);
        joinable::Buffer const gradient{params[0].grad.data(), 1000, joinable::DType::f32};
        auto const sum = [&] { return rank.comm.all_reduce(gradient, joinable::ReduceOp::sum); };
        joinable::DistributedDataParallel ddp{rank.comm, params};
        sum().wait(); // NCCL connects the ranks
        rank.comm.synchronize();
        hosts.barrier();
        begun = Clock::now();
        if (where == Where::before_a_sum) {
            fail();
            sum().wait();
        } else if (where == Where::in_a_backward_pass) {
            joinable::Join guard{joinable::participants(ddp), joinable::control(hosts)};
            ddp.forward([] {});
            ddp.backward([&](auto ready) {
                fail();
                ready(0);
            });
            (void)guard.finish();
        } else if (hosts.rank() == culprit) {
            hosts.barrier();
            fail();
        } else {
            auto work = sum();
            work.wait(); // until it is on the stream
            expect(!work.test(), "a sum that one rank never joins is over");
            hosts.barrier();
            rank.comm.synchronize();
        }
        rank.comm.synchronize();
    } catch (joinable::PeerFailed const& failure) {
        std::chrono::duration<double> const took = Clock::now() - begun;
        expect(
            hosts.rank() != culprit && failure.rank() == culprit,
            "the failure of rank " + std::to_string(culprit) + " is told as: " + failure.what()
        );
        expect(
            took < longest_wait, "it took " + exactly(took.count()) + " s to be told of a failure"
        );
        return took.count();
    } catch (std::runtime_error const& error) {
        expect(hosts.rank() == culprit && error.what() == std::string{"overflow"}, error.what());
        return 0;
    }
    expect(false, "a rank failed, and rank " + std::to_string(hosts.rank()) + " was not told");
    return 0;
}
/// The same with an exception.
template <class Hosts>
double check_failure(Hosts& hosts, Where where) {
    return check_failure(hosts, where, [] { expect(false, "overflow"); });
}

} // namespace joinable_gpu
