// SPDX-License-Identifier: BSL-1.0
#pragma once

// What a training needs in memory, before it starts.

#include <joinable/zero.hpp>

#include <array>
#include <cstddef>
#include <cstdio>

#include "model.hpp"
#include "options.hpp"
#include "rule.hpp"
#include "train.hpp"

namespace train_text {

/// The bytes that a rank needs on the host, without activations.
inline joinable::ZeroMemory planned(Options const& options, Sharding sharding) {
    std::size_t elements = 0;
    Model model{options.seed};
    for (Parameter const& parameter : model.parameters()) {
        elements += parameter.value.numbers.size();
    }
    bool const is_engines = options.rule == Rule::sgd && sharding == Sharding::none;
    joinable::ZeroMemory memory = joinable::zero_memory(
        elements,
        joinable::DType::f32,
        sharding_of(sharding),
        options.ranks,
        true,
        false,
        // The engine's own optimizer has a velocity, also without momentum.
        is_engines ? ChosenRule{joinable::Sgd{.momentum = 1}} : rule_of(options),
        options.bucket_bytes
    );
    if (sharding == Sharding::gradients || sharding == Sharding::parameters) {
        memory.gradients += elements * sizeof(float); // the engine frees none of its own
    }
    return memory;
}

inline void print_plan(Options const& options) {
    struct Row {
        Sharding sharding;
        char const* name;
    };
    constexpr std::array<Row, 4> rows{
        {{Sharding::none, "none"},
         {Sharding::optimizer, "optimizer"},
         {Sharding::gradients, "gradients"},
         {Sharding::parameters, "parameters"}}
    };
    std::printf(
        "bytes that one of %d ranks needs, without activations\n\n"
        "--sharding      values   gradients       state     buckets       total\n",
        options.ranks
    );
    for (Row const& row : rows) {
        joinable::ZeroMemory const memory = planned(options, row.sharding);
        std::printf(
            "%-10s %11zu %11zu %11zu %11zu %11zu%s\n",
            row.name,
            memory.values,
            memory.gradients,
            memory.state,
            memory.buckets,
            memory.total(),
            row.sharding == options.sharding ? "  chosen" : ""
        );
    }
    std::printf(
        "\nParts are rounded up to an even share; whole parameters are dealt out, so ranks differ.\n"
    );
}

} // namespace train_text
