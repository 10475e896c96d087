// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include <joinable/device/arena.hpp>
#include <joinable/device/device.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/overlap.hpp>
#include <joinable/tensor/parameters.hpp>
#include <joinable/tensor/shape.hpp>
#include <joinable/tensor/sparse_rows.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The rows of a parameter that are stepped. Memory grows to the most rows so far.
struct SteppedRows {
    std::vector<std::int64_t> indices;
    std::vector<std::byte> values; ///< row by row, for those that travel
};

/// The gradients by which a rank steps the parameters of a group. An active rank steps the
/// parameters of which it has a gradient. A joined rank's own gradients say nothing, because
/// it ran no pass: it steps the parameters that active ranks step. If it has no gradient of one of these,
/// no rank used the parameter, and zeros are its gradient. Local.
class SteppedGradients {
public:
    /// Makes room for the lists of other ranks, of `parameters` parameters. Without it, own gradients count.
    void reserve(std::size_t parameters) { has_gradient_.resize(parameters); }
    /// Whether the rank that called list() has a gradient, for each parameter. The buffer of a
    /// message to joined ranks.
    [[nodiscard]] std::span<std::uint8_t> listed() noexcept { return has_gradient_; }
    /// Lists this rank's gradients.
    void list(ParameterList const& parameters) {
        for (std::size_t i = 0; i < has_gradient_.size(); ++i) {
            has_gradient_[i] = elements_of_gradient(parameters[i]) ? 1 : 0;
        }
    }

    /// Before a step, on every rank. The device has the parameters and must outlive the step.
    void begin_step(bool has_joined, Device& device) {
        follows_ = has_joined && !has_gradient_.empty();
        device_ = &device;
        for (auto const& [i, zeros] : zeros_) {
            device.fill_zero(zeros.view); // a step may have written there
        }
        if (!zeros_.empty()) {
            device.submit(); // before they are read
        }
    }
    /// The gradient by which parameter `i` is stepped. Empty: it is not stepped.
    [[nodiscard]] AnyView of(ParameterList const& parameters, std::size_t i) {
        AnyView const own = parameters[i].grad();
        if (!follows_) {
            return own;
        }
        return has_gradient_[i] == 0 ? AnyView{} : own ? own : zeros(parameters[i].value(), i);
    }

    /// The same for a parameter whose gradients are rows.
    [[nodiscard]] SparseRows sparse_of(ParameterList const& parameters, std::size_t i) const {
        return follows_ && has_gradient_[i] == 0 ? SparseRows{} : parameters[i].sparse_grad();
    }
    /// The rows of parameter `i` that this step steps.
    [[nodiscard]] SteppedRows& rows(std::size_t i) { return rows_[i]; }

private:
    [[nodiscard]] AnyView zeros(AnyView const& value, std::size_t i) {
        auto at = zeros_.find(i);
        if (at == zeros_.end()) {
            Shape const& extents = value.extents();
            std::size_t const bytes = value.numel() * size_of(value.dtype());
            Arena memory = device_->allocate(bytes, Arena::default_alignment);
            Shape const strides = dense_strides(extents, value.strides());
            AnyView const view{memory.data(), value.dtype(), extents, strides, value.device()};
            at = zeros_.emplace(i, Zeros{std::move(memory), view}).first;
        }
        return at->second.view;
    }

    struct Zeros {
        Arena memory;
        AnyView view;
    };

    std::vector<std::uint8_t> has_gradient_;
    bool follows_ = false;
    Device* device_ = nullptr;
    std::map<std::size_t, Zeros> zeros_;      ///< kept, so that later rounds allocate nothing
    std::map<std::size_t, SteppedRows> rows_; ///< kept, too
};

}}} // namespace joinable::v0::detail
