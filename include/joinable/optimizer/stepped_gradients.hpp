// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include <joinable/device/arena.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/overlap.hpp>
#include <joinable/tensor/parameters.hpp>
#include <joinable/tensor/shape.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The gradients by which a rank steps the parameters of a group. An active rank steps the
/// parameters of which it has a gradient. A joined rank has run no pass, so what it has tells
/// nothing: it steps the parameters that active ranks step. If it has no gradient of one of these,
/// no rank used the parameter, and zeros are its gradient. Local.
class SteppedGradients {
public:
    /// Makes room for what is said of `parameters` parameters. Without it, own gradients count.
    void reserve(std::size_t parameters) { has_gradient_.resize(parameters); }
    /// Whether the rank that called list() has a gradient, for each parameter. The buffer of a
    /// message to joined ranks.
    [[nodiscard]] std::span<std::uint8_t> listed() noexcept { return has_gradient_; }
    /// Lists this rank's gradients.
    void list(ParameterList const& parameters) {
        for (std::size_t i = 0; i < has_gradient_.size(); ++i) {
            has_gradient_[i] = parameters[i].grad() ? 1 : 0;
        }
    }

    /// Before a step, on every rank.
    void begin_step(bool has_joined) noexcept {
        follows_ = has_joined && !has_gradient_.empty();
        for (auto& [i, arena] : zeros_) {
            std::fill_n(arena.data(), arena.bytes(), std::byte{}); // a step may have written there
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

private:
    [[nodiscard]] AnyView zeros(AnyView const& value, std::size_t i) {
        auto at = zeros_.find(i);
        if (at == zeros_.end()) {
            at = zeros_.emplace(i, Arena{value.numel() * size_of(value.dtype())}).first;
        }
        Shape const& extents = value.extents();
        Shape const strides = dense_strides(extents, value.strides());
        return {at->second.data(), value.dtype(), extents, strides};
    }

    std::vector<std::uint8_t> has_gradient_;
    bool follows_ = false;
    std::map<std::size_t, Arena> zeros_; ///< kept, so that later rounds allocate nothing
};

}}} // namespace joinable::v0::detail
