// SPDX-License-Identifier: BSL-1.0
// What PyTorch's tests of DistributedDataParallel and its Reducer expect, said of this library. Above
// each case the name of the test there (test_c10d_gloo.py, test_c10d_nccl.py, distributed_test.py).
#include <joinable/participant/data_parallel.hpp>

#include <cmath>
#include <cstddef>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/linear_model.hpp>
#include <support/strided_param.hpp>

#include <joinable/join/guard.hpp>

namespace {

using namespace joinable_tests;
using joinable::DataParallelOptions;
using joinable::DistributedDataParallel;
using joinable::DType;
using joinable::Join;
using joinable::participants;
using joinable::Shape;

constexpr std::size_t mebibyte = std::size_t{1} << 20U;

/// The shapes of upstream's ReducerModule: fc1 (10 x 2), fc2 (4 x 10), fc3 (4 x 4), no biases.
template <class T>
std::vector<Param<T>> reducer_module(std::size_t layers = 3) {
    std::vector<Param<T>> params;
    for (std::size_t const n : {20U, 40U, 16U}) {
        if (params.size() < layers) {
            params.emplace_back(n, T{1});
        }
    }
    return params;
}

/// Gradients of all parameters, the last one first: `number` in each.
template <class Ddp, class T>
void train(Ddp& ddp, std::vector<Param<T>>& params, double number) {
    ddp.forward([] {});
    ddp.backward([&](auto ready) {
        for (std::size_t p = params.size(); p-- > 0;) {
            add_gradient(params[p], number);
            ready(p);
        }
    });
}

// ReducerTest.test_single_dtype_single_bucket
template <class Comm>
void check_one_dtype(Comm& comm) {
    auto params = reducer_module<float>();
    DistributedDataParallel ddp{comm, params};
    CHECK(ddp.buckets().size() == 1);
}
TEST_CASE("parameters of one dtype are one bucket at first") {
    over_ranks({1, 2, 4}, [](auto& comm) { check_one_dtype(comm); });
}

// ReducerTest.test_multi_dtype_single_bucket, test_multi_dtype_multi_bucket,
// test_forward_backward (fc1 in double)
template <class Comm>
void check_mixed_dtypes(Comm& comm) {
    auto first = reducer_module<double>(1);
    auto others = reducer_module<float>(2);
    DistributedDataParallel ddp{comm, joinable::parameters(first, others)};
    CHECK(ddp.buckets().size() == 2);
    for (int i = 0; i < 3; ++i) {
        drop_gradients(first);
        drop_gradients(others);
        ddp.forward([] {});
        ddp.backward([&](auto ready) {
            add_gradient(others[1], comm.rank());
            ready(2);
            add_gradient(others[0], comm.rank() + 2);
            ready(1);
            add_gradient(first[0], comm.rank() + 4);
            ready(0);
        });
        double const mean = (comm.size() - 1) / 2.0;
        CHECK(first[0].g(19) == doctest::Approx(mean + 4));
        CHECK(others[0].g(19) == doctest::Approx(mean + 2));
        CHECK(others[1].g(39) == doctest::Approx(mean));
    }
}
TEST_CASE("a model of two dtypes has a bucket of each, and gradients that are means") {
    over_ranks({1, 2, 4}, [](auto& comm) { check_mixed_dtypes(comm); });
}

// ReducerTest.test_forward_backward_unused_parameters
template <class Comm>
void check_unused_layer(Comm& comm, bool views, bool is_static) {
    auto params = reducer_module<float>();
    drop_gradients(params);
    DistributedDataParallel ddp{
        comm,
        params,
        {.gradient_as_bucket_view = views, .find_unused = true, .static_graph = is_static}
    };
    std::vector<std::size_t> unused;
    if (!is_static) {
        unused = {2};
    }
    for (int i = 0; i < 3; ++i) {
        CHECK(!params[2].grad);
        ddp.forward([] {});
        ddp.backward(
            [&](auto ready) {
                for (std::size_t const p : {1U, 0U}) {
                    add_gradient(params[p], 1.0);
                    ready(p);
                }
            },
            unused
        );
        CHECK(!params[2].grad);
        CHECK(params[0].g(0) == doctest::Approx(i + 1.0));
    }
}
TEST_CASE("a layer that no rank uses has no gradient, neither before nor after backward") {
    for (bool const views : {false, true}) {
        for (bool const is_static : {false, true}) {
            over_ranks({1, 2, 3, 4, 8}, [&](auto& comm) {
                check_unused_layer(comm, views, is_static);
            });
        }
    }
}

/// Kingma and Ba, "Adam", algorithm 1. Parameters without a gradient are left alone.
struct Adam {
    struct State {
        std::vector<double> m, v;
        int steps = 0;
    };
    std::vector<State> states;

    void step(std::vector<Param<double>>& params) {
        states.resize(params.size());
        for (std::size_t p = 0; p < params.size(); ++p) {
            if (!params[p].grad) {
                continue;
            }
            auto& [m, v, steps] = states[p];
            m.resize(params[p].value.size());
            v.resize(params[p].value.size());
            ++steps;
            for (std::size_t i = 0; i < m.size(); ++i) {
                double const g = params[p].g(i);
                m[i] = 0.9 * m[i] + 0.1 * g;
                v[i] = 0.999 * v[i] + 0.001 * g * g;
                double const m_hat = m[i] / (1 - std::pow(0.9, steps));
                double const v_hat = v[i] / (1 - std::pow(0.999, steps));
                params[p].value[i] -= 0.01 * m_hat / (std::sqrt(v_hat) + 1e-8);
            }
        }
    }
};

// ReducerTest.test_forward_backward_optimizer
template <class Comm>
void check_adam(Comm& comm, bool to_none) {
    auto params = reducer_module<double>();
    auto local = reducer_module<double>();
    drop_gradients(params);
    drop_gradients(local);
    Adam adam;
    Adam local_adam;
    DistributedDataParallel ddp{comm, params, {.find_unused = true}};
    auto const zero_grad = [&](std::vector<Param<double>>& model) {
        for (auto& param : model) {
            if (to_none) {
                param.grad = {};
            } else if (param.grad) {
                joinable::fill_zero(param.grad);
            }
        }
    };
    for (int i = 0; i < 3; ++i) {
        zero_grad(params);
        zero_grad(local);
        std::vector<std::size_t> unused;
        if (i == 0) {
            unused = {2};
        }
        ddp.forward([] {});
        ddp.backward(
            [&](auto ready) {
                for (std::size_t p = 3 - unused.size(); p-- > 0;) {
                    // A function of the value, so that an error in one step shows in the next.
                    add_gradient(params[p], params[p].value[0] + comm.rank());
                    ready(p);
                }
            },
            unused
        );
        for (std::size_t p = 3 - unused.size(); p-- > 0;) {
            add_gradient(local[p], local[p].value[0] + (comm.size() - 1) / 2.0);
        }
        CHECK(bool(params[2].grad) == (i > 0));
        adam.step(params);
        local_adam.step(local);
        for (std::size_t p = 0; p < 3; ++p) {
            CHECK(params[p].value[7] == doctest::Approx(local[p].value[7]).epsilon(1e-12));
        }
    }
    CHECK(adam.states[2].steps == 2);
}
TEST_CASE("a layer that is unused in the first of three steps of Adam starts with its second") {
    for (bool const to_none : {false, true}) {
        over_ranks({1, 2, 3, 4}, [&](auto& comm) { check_adam(comm, to_none); });
    }
}

// test_global_local_unused_params_grad, ..._with_grad_is_view, ..._with_static_graph;
// test_find_unused_parameters_when_unused_parameters_empty: `rank_0_uses_all`
template <class Comm>
void check_used_by_some(Comm& comm, DataParallelOptions const& options, bool rank_0_uses_all) {
    std::vector<Param<float>> tasks; // t0, t1 and one for nobody
    for (int i = 0; i < 3; ++i) {
        tasks.emplace_back(4);
    }
    drop_gradients(tasks);
    DistributedDataParallel ddp{comm, tasks, options};
    auto const uses = [&](std::size_t p) {
        return comm.rank() != 0 ? p == 1 : p == 0 || (rank_0_uses_all && p == 1);
    };
    for (int i = 0; i < 2; ++i) {
        ddp.forward([] {});
        auto const pass = [&](auto const& ready) {
            for (std::size_t p = 0; p < 3; ++p) {
                if (uses(p)) {
                    add_gradient(tasks[p], 1.0);
                    ready(p);
                }
            }
        };
        if (options.static_graph) {
            ddp.backward(pass);
        } else {
            ddp.backward(pass, [&](std::size_t p) { return !uses(p); });
        }
        CHECK(bool(tasks[0].grad));
        CHECK(bool(tasks[1].grad) == (comm.size() > 1 || rank_0_uses_all));
        CHECK(!tasks[2].grad);
        if (i == 0) {
            CHECK(tasks[0].g(3) == doctest::Approx(1.0 / comm.size()));
        }
    }
}
TEST_CASE("what some rank uses has a gradient on all ranks, what no rank uses has none") {
    for (DataParallelOptions const& options :
         {DataParallelOptions{.find_unused = true},
          DataParallelOptions{.gradient_as_bucket_view = true, .find_unused = true},
          DataParallelOptions{.static_graph = true},
          DataParallelOptions{.gradient_as_bucket_view = true, .static_graph = true}}) {
        for (bool const rank_0_uses_all : {false, true}) {
            over_ranks({1, 2, 3, 4, 8}, [&](auto& comm) {
                check_used_by_some(comm, options, rank_0_uses_all);
            });
        }
    }
}

// test_ignored_output, test_ignored_output_with_unused_parameters
template <class Comm>
void check_ignored_output(Comm& comm, bool finds_unused) {
    auto params = reducer_module<double>();
    DistributedDataParallel ddp{comm, params, {.find_unused = finds_unused}};
    for (int i = 0; i < 4; ++i) {
        ddp.forward([] {});
    }
    for (int i = 0; i < 4; ++i) {
        for (auto& param : params) {
            joinable::fill_zero(param.grad);
        }
        train(ddp, params, comm.rank() + i);
        CHECK(params[0].g(0) == doctest::Approx(i + (comm.size() - 1) / 2.0));
    }
}
TEST_CASE("outside a guard outputs may be ignored: forward passes without backward come to nothing"
) {
    for (bool const finds_unused : {false, true}) {
        over_ranks({1, 2, 4}, [&](auto& comm) { check_ignored_output(comm, finds_unused); });
    }
}

// test_ddp_weight_sharing: the parameter is used twice, with a gradient of rank + 1 by each use.
template <class Comm>
void check_weight_sharing(Comm& comm, bool to_none, bool views, bool is_static) {
    std::vector<Param<float>> params;
    params.emplace_back(8, 1.0F);
    DistributedDataParallel ddp{
        comm, params, {.gradient_as_bucket_view = views, .static_graph = is_static}
    };
    for (int i = 0; i < 3; ++i) {
        if (to_none) {
            drop_gradients(params);
        } else {
            joinable::fill_zero(params[0].grad);
        }
        ddp.forward([] {});
        ddp.backward([&](auto ready) {
            add_gradient(params[0], comm.rank() + 1);
            if (is_static) {
                ready(0); // each use says so
            }
            add_gradient(params[0], comm.rank() + 1);
            ready(0);
        });
        CHECK(params[0].g(7) == doctest::Approx(comm.size() + 1.0));
    }
}
TEST_CASE("a shared weight gets the gradients of all its uses, once") {
    for (bool const to_none : {false, true}) {
        for (bool const views : {false, true}) {
            for (bool const is_static : {false, true}) {
                over_ranks({1, 2, 3, 4}, [&](auto& comm) {
                    check_weight_sharing(comm, to_none, views, is_static);
                });
            }
        }
    }
}

// -- layouts -----------------------------------------------------------------------------------------

/// Strides of a convolution's weight (out, in, height, width) in memory order NCHW or NHWC.
Shape strides_of(Shape const& extents, bool channels_last) {
    std::size_t const in = extents[1];
    std::size_t const area = extents[2] * extents[3];
    return channels_last ? Shape{in * area, 1, extents[3] * in, in}
                         : Shape{in * area, area, extents[3], 1};
}

struct Layouts {
    char const* name;
    bool is_channels_last[4];
    DType dtypes[4];
};

double gradient_of(int rank, std::size_t layer, std::size_t i) {
    return 0.125 * rank + std::sin(static_cast<double>(layer + 3 * i));
}

// test_grad_layout_1devicemodule_1replicaperprocess (NCCL)
template <class Comm>
void check_layouts(Comm& comm, Layouts const& layouts, std::size_t cap, bool views) {
    Shape const extents[] = {{2, 3, 3, 2}, {4, 2, 1, 3}, {3, 4, 2, 2}, {2, 2, 2, 2}};
    std::vector<StridedParam> convolutions;
    for (std::size_t l = 0; l < 4; ++l) {
        Shape const strides = strides_of(extents[l], layouts.is_channels_last[l]);
        DType const dtype = layouts.dtypes[l];
        convolutions.push_back(
            StridedParam{{{dtype, extents[l], strides}, {dtype, extents[l], strides}, {}, true}}
        );
    }
    DistributedDataParallel ddp{
        comm, convolutions, {.bucket_cap_bytes = cap, .gradient_as_bucket_view = views}
    };
    for (int i = 0; i < 3; ++i) { // gradients are created, created anew after the rebuild, zeroed
        for (StridedParam& layer : convolutions) {
            if (i < 2) {
                layer.grad = {};
            } else {
                joinable::fill_zero(layer.grad);
            }
        }
        ddp.forward([] {});
        ddp.backward([&](auto ready) {
            for (std::size_t l = 4; l-- > 0;) {
                convolutions[l].need_grad();
                Numbers numbers(convolutions[l].grad.numel());
                for (std::size_t e = 0; e < numbers.size(); ++e) {
                    numbers[e] = gradient_of(comm.rank(), l, e);
                }
                write(convolutions[l].grad, numbers);
                ready(l);
            }
        });
        for (std::size_t l = 0; l < 4; ++l) {
            CHECK(convolutions[l].grad.strides() == convolutions[l].value.view().strides());
            double const tolerance = layouts.dtypes[l] == DType::f16 ? 1e-3 : 1e-5;
            Numbers const numbers = read(convolutions[l].grad);
            for (std::size_t e = 0; e < numbers.size(); ++e) {
                double const mean = gradient_of(0, l, e) + 0.125 * (comm.size() - 1) / 2.0;
                CHECK(std::abs(numbers[e] - mean) <= tolerance * (1 + std::abs(mean)));
            }
        }
    }
}
TEST_CASE("gradients keep the memory format of their parameters, and equal a local model's") {
    constexpr DType f32 = DType::f32;
    constexpr DType f16 = DType::f16;
    bool const formats[][4] = {
        {false, false, false, false}, {true, true, false, false}, {true, true, true, true}
    };
    DType const dtypes[][4] = {{f32, f32, f32, f32}, {f32, f32, f16, f16}, {f16, f16, f16, f16}};
    for (auto const& format : formats) {
        for (auto const& dtype : dtypes) {
            for (std::size_t const cap : {std::size_t{1}, 25 * mebibyte}) {
                for (bool const views : {false, true}) {
                    over_ranks({1, 2, 3, 4}, [&](auto& comm) {
                        Layouts layouts{};
                        for (std::size_t l = 0; l < 4; ++l) {
                            layouts.is_channels_last[l] = format[l];
                            layouts.dtypes[l] = dtype[l];
                        }
                        check_layouts(comm, layouts, cap, views);
                    });
                }
            }
        }
    }
}

// test_param_layout_mismatch_error (NCCL), where only the ranks that differ from rank 0 hear of it
TEST_CASE("a model in another memory format than rank 0's is refused, on all ranks") {
    over_ranks({2, 3, 4}, [](auto& comm) {
        Shape const extents{2, 3, 3, 2};
        Shape const strides = strides_of(extents, comm.rank() != 0);
        std::vector<StridedParam> model;
        model.push_back(
            StridedParam{{{DType::f32, extents, strides}, {DType::f32, extents, strides}, {}, true}}
        );
        std::string text;
        try {
            DistributedDataParallel ddp{comm, model};
        } catch (joinable::Mismatch const& error) {
            text = error.what();
        }
        CHECK(
            text.starts_with("models differ: parameter 0: rank 0 has f32 (2, 3, 3, 2), rank 1 has "
                             "f32 (2, 3, 3, 2), strides (18, 1, 6, 3)")
        );
    });
}

// -- passes ------------------------------------------------------------------------------------------

// test_no_grad
template <class Comm>
void check_no_grad(Comm& comm, bool guarded) {
    auto params = reducer_module<float>();
    drop_gradients(params);
    DistributedDataParallel ddp{comm, params};
    std::optional<Join<decltype(ddp)>> guard;
    if (guarded) {
        guard.emplace(participants(ddp));
    }
    for (int i = 0; i < 2 + (guarded ? comm.rank() : 0); ++i) {
        int const output = ddp.forward([&] { return 7; }, {.phase = joinable::Phase::evaluate});
        CHECK(output == 7);
    }
    if (guarded) {
        guard->finish();
    }
    for (auto const& param : params) {
        CHECK(!param.grad);
    }
    guard.reset();
    train(ddp, params, 2.0); // and training goes on
    CHECK(params[0].g(0) == doctest::Approx(2.0));
}
TEST_CASE("evaluation leaves no gradients, in a guard and without one") {
    for (bool const guarded : {false, true}) {
        over_ranks({1, 2, 4}, [&](auto& comm) { check_no_grad(comm, guarded); });
    }
}

// test_failure_recovery: a new group, and a new DDP on the same module
TEST_CASE(
    "after a failure the same model is trained on over a new communicator" *
    doctest::skip(!ranks_share_memory)
) {
    for (bool const views : {false, true}) {
        for (int const world : {2, 4}) {
            std::vector<std::vector<Param<float>>> models(static_cast<std::size_t>(world));
            DataParallelOptions const options{.gradient_as_bucket_view = views};
            auto const model_of = [&](RankCommunicator& comm) -> auto& {
                return models[static_cast<std::size_t>(comm.rank())];
            };
            CHECK_THROWS_AS(
                over_ranks(
                    {world},
                    [&](RankCommunicator& comm) {
                        auto& params = model_of(comm) = reducer_module<float>();
                        DistributedDataParallel ddp{comm, params, options};
                        Join guard{participants(ddp)};
                        train(ddp, params, 1.0);
                        ddp.forward([&] {
                            if (comm.rank() == 1) {
                                throw std::domain_error{"a node went away"};
                            }
                        });
                        ddp.backward([&](auto ready) {
                            for (std::size_t i = params.size(); i-- > 0;) {
                                ready(i);
                            }
                        });
                    }
                ),
                std::domain_error
            );
            over_ranks({world}, [&](RankCommunicator& comm) {
                auto& params = model_of(comm);
                drop_gradients(params); // they would dangle
                DistributedDataParallel ddp{comm, params, options};
                Join guard{participants(ddp)};
                for (int i = 0; i < 3; ++i) {
                    drop_gradients(params);
                    train(ddp, params, comm.rank() + 1);
                    CHECK(params[2].g(15) == doctest::Approx((comm.size() + 1) / 2.0));
                }
                guard.finish();
            });
        }
    }
}

// test_accumulate_gradients_no_sync, ..._module, ..._grad_is_view
template <class Comm>
void check_accumulation(Comm& comm, bool views) {
    std::vector<Param<double>> params;
    params.emplace_back(3);
    DistributedDataParallel ddp{comm, params, {.gradient_as_bucket_view = views}};
    double expected = 0; // on each rank, in an iteration that does not sync
    for (int i = 0; i < 4; ++i) {
        if (i % 2 == 0) {
            auto const quiet = ddp.no_sync();
            train(ddp, params, comm.rank() + i);
            expected += comm.rank() + i;
        } else {
            train(ddp, params, comm.rank() + i);
            double const mean_rank = (comm.size() - 1) / 2.0;
            expected += mean_rank - comm.rank() + mean_rank + i;
        }
        CHECK(params[0].g(2) == doctest::Approx(expected));
        double bounds[] = {params[0].g(2), -params[0].g(2)};
        comm.all_reduce({bounds, 2, DType::f64}, joinable::ReduceOp::max).wait();
        bool const are_equal = bounds[0] == -bounds[1];
        CHECK(are_equal == (i % 2 == 1 || comm.size() == 1));
    }
}
TEST_CASE("gradients of iterations under no_sync() differ between ranks, those of others do not") {
    for (bool const views : {false, true}) {
        over_ranks({1, 2, 3, 4}, [&](auto& comm) { check_accumulation(comm, views); });
    }
}

// The join tutorial: inputs 5 and 6 over two ranks, gradient 1 per input, gradients not zeroed; here
// every second round syncs. Rank 0 holds the gradient of its fifth input when it runs out.
template <class Comm>
double last_gradient(Comm& comm, bool carries, bool by_initial) {
    std::vector<Param<float>> params;
    params.emplace_back(1);
    DistributedDataParallel ddp{
        comm, params, {.joined_gradients = joinable::JoinedGradients::kept}
    };
    Join guard{
        participants(ddp),
        {.sync_every = 2, .carry_accumulated = carries},
        joinable::divide_by_initial_world_size = by_initial
    };
    for (int i = 0; i < 5 + comm.rank(); ++i) {
        train(ddp, params, 1.0);
    }
    guard.finish();
    return static_cast<double>(params[0].g(0));
}
TEST_CASE("the tutorial's numbers with accumulation: what rank 0 holds is carried over, or dropped"
) {
    // After round 3 both have 4; then rank 0 adds 1 and rank 1 adds 2.
    over_ranks({2}, [](auto& comm) {
        CHECK(last_gradient(comm, true, true) == 5.5);  // (5 + 6) / 2
        CHECK(last_gradient(comm, true, false) == 5.5); // rank 0 contributes: 2 ranks, too
        CHECK(last_gradient(comm, false, true) == 3.0); // 6 / 2, as PyTorch
        CHECK(last_gradient(comm, false, false) == 6.0);
    });
}

} // namespace
