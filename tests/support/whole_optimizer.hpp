// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <support/numbers.hpp>
#include <support/strided_param.hpp>

#include <joinable/optimizer/update_rule.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable_tests {

/// An optimizer as each rank has it where nothing is sharded: state for every parameter, and masters of
/// 32 bits for values of 16. It reads and writes tensors by offsets, one number at a time.
template <class Rule>
class WholeOptimizer {
public:
    WholeOptimizer(std::vector<StridedParam>& params, Rule const& settings)
        : rule{settings}, params_{params} {
        for (StridedParam const& param : params) {
            joinable::AnyView const value = param.value.view();
            state_.push_back({Numbers{}, std::vector<Numbers>(rule.state_names().size()), 0});
            if (is_half_precision(value.dtype())) {
                state_.back().masters = read(value);
            }
            for (Numbers& array : state_.back().arrays) {
                array.resize(value.numel());
            }
        }
    }

    void step() {
        for (std::size_t i = 0; i < params_.size(); ++i) {
            if (!params_[i].grad || !params_[i].requires_grad) {
                continue;
            }
            if (params_[i].value.view().dtype() == joinable::DType::f64) {
                step_as<double>(i);
            } else {
                step_as<float>(i);
            }
        }
    }

    Rule rule;

private:
    struct State {
        Numbers masters; ///< none: the values themselves
        std::vector<Numbers> arrays;
        std::uint64_t steps;
    };

    template <class T>
    void step_as(std::size_t i) {
        State& state = state_[i];
        joinable::AnyView const value = params_[i].value.view();
        Numbers const before = state.masters.empty() ? read(value) : state.masters;
        Numbers const by = read(params_[i].grad);
        std::vector<T> values(before.begin(), before.end());
        std::vector<T> gradients(by.begin(), by.end());
        std::vector<std::vector<T>> arrays;
        std::vector<T*> pointers;
        for (Numbers const& array : state.arrays) {
            arrays.emplace_back(array.begin(), array.end());
        }
        for (std::vector<T>& array : arrays) {
            pointers.push_back(array.data());
        }
        rule.update(joinable::UpdateRange<T>{
            values.size(), values.data(), gradients.data(), pointers, ++state.steps
        });
        Numbers const after(values.begin(), values.end());
        write(value, after);
        if (!state.masters.empty()) {
            state.masters = after;
        }
        for (std::size_t k = 0; k < arrays.size(); ++k) {
            state.arrays[k].assign(arrays[k].begin(), arrays[k].end());
        }
    }

    std::vector<StridedParam>& params_;
    std::vector<State> state_;
};

/// Clips the gradients by the norm of all of them, as ClipNorm does. Returns the factor. The squares of a parameter
/// are added up before those of the others.
inline double clip_whole(std::vector<StridedParam> const& params, double most) {
    double square = 0;
    for (StridedParam const& param : params) {
        double own = 0;
        for (double const number : read(param.grad)) {
            own += number * number;
        }
        square += own;
    }
    double const factor = most / (std::sqrt(square) + 1e-6);
    for (StridedParam const& param : params) {
        Numbers numbers = read(param.grad);
        for (double& number : numbers) {
            number = static_cast<float>(number) * static_cast<float>(factor);
        }
        write(param.grad, numbers);
    }
    return factor;
}

} // namespace joinable_tests
