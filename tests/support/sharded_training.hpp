// SPDX-License-Identifier: BSL-1.0
#pragma once

// A model whose gradients are made up, and its training by the whole optimizer on every rank: what sharded
// optimizers are compared with.

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include <doctest/doctest.h>

#include <support/numbers.hpp>
#include <support/strided_param.hpp>
#include <support/whole_optimizer.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/optimizer/partition.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/step.hpp>

namespace joinable_tests {

using joinable::Adam;
using joinable::AdamW;
using joinable::DistributedDataParallel;
using joinable::DType;
using joinable::Join;
using joinable::participants;
using joinable::Sgd;
using joinable::Shape;
using joinable::Step;

/// How many inputs a rank has.
using Inputs = std::function<int(int rank)>;
inline Inputs const inputs_of[] = {
    [](int) { return 4; },
    [](int rank) { return 1 + rank; },          // each runs out at another round
    [](int rank) { return rank == 0 ? 0 : 3; }, // rank 0 owns shards, and has no input
    [](int rank) { return rank % 2 == 0 ? 4 : 1; },
};

struct Model {
    DType dtype = DType::f32;
    bool has_strides = false; ///< values and gradients lie as they like
    bool is_large = false;    ///< it has a parameter that travels alone
    std::size_t frozen = 99;  ///< index of a parameter that needs no gradient
};

inline std::vector<StridedParam> make(Model const& model) {
    std::vector<StridedParam> params;
    std::size_t i = 0;
    std::size_t const last = model.is_large ? joinable::detail::lone_bytes / 4 : 40;
    for (Shape const& extents :
         {Shape{5}, Shape{8, 8}, Shape{1}, Shape{3, 11}, Shape{2, 2, 2}, Shape{0}, Shape{last}}) {
        Shape dense = row_major_strides(extents);
        Shape other = dense;
        if (model.has_strides && extents == Shape{8, 8}) {
            dense = Shape{1, 8};
        }
        if (model.has_strides && extents == Shape{3, 11}) {
            dense = Shape{13, 1}; // with gaps
            other = Shape{1, 3};
        }
        params.push_back({{{model.dtype, extents, dense}, {model.dtype, extents, other}, {}}});
        params.back().requires_grad = i != model.frozen;
        Numbers values;
        for (std::size_t k = 0; k < params.back().value.view().numel(); ++k) {
            values.push_back(static_cast<double>((i * 5 + k * 3) % 13) / 8.0 - 0.75);
        }
        write(params.back().value.view(), values);
        ++i;
    }
    return params;
}

inline double gradient_of(int rank, int round, std::size_t i, std::size_t k) {
    auto const r = static_cast<std::size_t>(rank);
    auto const t = static_cast<std::size_t>(round);
    return (static_cast<double>((r * 7 + t * 5 + i * 3 + k * 11) % 17) - 8.0) / 8.0;
}

/// The pass of an engine that zeroes gradients before it.
template <class Ready>
void backward(
    std::vector<StridedParam>& params, Model const& model, int rank, int round, Ready const& ready
) {
    for (std::size_t i = params.size(); i-- > 0;) {
        if (!params[i].requires_grad) {
            continue;
        }
        params[i].need_grad();
        Numbers numbers;
        for (std::size_t k = 0; k < params[i].grad.numel(); ++k) {
            numbers.push_back(gradient_of(rank, round, i, k));
        }
        write(params[i].grad, numbers);
        ready(i);
    }
    static_cast<void>(model);
}

/// Trains a model; `optimizer(params)` returns a participant with step(). `control`: further arguments of the guard.
template <class Comm, class MakeOptimizer, class... Control>
std::vector<Numbers> train(
    Comm& comm,
    Model const& model,
    Inputs const& inputs,
    MakeOptimizer const& make_optimizer,
    Control... control
) {
    std::vector<StridedParam> params = make(model);
    DistributedDataParallel ddp{comm, params};
    auto&& optimizer = make_optimizer(params);
    Join guard{participants(ddp, optimizer), control...};
    for (int round = 0; round < inputs(comm.rank()); ++round) {
        ddp.forward([] {});
        ddp.backward([&](auto ready) { backward(params, model, comm.rank(), round, ready); });
        optimizer.step();
    }
    guard.finish();
    return values_of(params);
}

template <class Comm, class Rule>
std::vector<Numbers>
train_whole(Comm& comm, Model const& model, Inputs const& inputs, Rule const& rule) {
    std::optional<WholeOptimizer<Rule>> whole;
    return train(comm, model, inputs, [&](auto& params) {
        whole.emplace(params, rule);
        return Step{comm, [&] { whole->step(); }};
    });
}
template <class F>
void for_each_rule(F const& f) {
    f(Sgd{.learning_rate = 0.1});
    f(Sgd{.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.1, .nesterov = true});
    f(Adam{.learning_rate = 0.02, .amsgrad = true});
    f(AdamW{.learning_rate = 0.02, .weight_decay = 0.1, .maximize = true});
}

} // namespace joinable_tests
