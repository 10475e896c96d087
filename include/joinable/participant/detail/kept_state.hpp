// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstring>
#include <optional>
#include <string_view>
#include <vector>

#include <joinable/bucket/bucket_reduction.hpp>
#include <joinable/device/copy.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/shape.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// A copy of what a reduction keeps of each parameter, made before it is prepared for other ones. Local.
template <class Reduction>
class KeptState {
public:
    explicit KeptState(Reduction& reduction) {
        if constexpr (saves_state<Reduction>) {
            ReductionState state;
            reduction.save(state);
            for (ReductionTensor const& tensor : state.tensors) {
                std::byte const* const begin = tensor.data;
                tensors_.push_back({tensor, {begin, begin + bytes_of(tensor)}});
            }
        }
    }

    /// Once it is prepared for other parameters: parameter `i` takes what was kept of parameter `was(i)`, an index or
    /// an optional one, if dtype and extents are the same, and otherwise begins from zeros.
    template <class F>
    void write(Reduction& reduction, F const& was) {
        if constexpr (saves_state<Reduction>) {
            ReductionState state;
            reduction.save(state);
            for (ReductionTensor const& tensor : state.tensors) {
                std::optional<std::size_t> const former = was(tensor.parameter);
                if (bytes_of(tensor) == 0) {
                    continue;
                }
                std::memset(tensor.data, 0, bytes_of(tensor));
                for (Kept& kept : tensors_) {
                    if (former == kept.tensor.parameter && tensor.name == kept.tensor.name &&
                        tensor.dtype == kept.tensor.dtype &&
                        tensor.extents == kept.tensor.extents) {
                        kept.tensor.data = kept.elements.data();
                        copy(view_of(kept.tensor), view_of(tensor));
                    }
                }
            }
            reduction.load(state);
        }
    }

private:
    struct Kept {
        ReductionTensor tensor; ///< its address is that of before
        std::vector<std::byte> elements;
    };

    static std::size_t bytes_of(ReductionTensor const& tensor) noexcept {
        return numel(tensor.extents) * size_of(tensor.dtype);
    }
    static AnyView view_of(ReductionTensor const& tensor) {
        return {tensor.data, tensor.dtype, tensor.extents, tensor.strides};
    }

    std::vector<Kept> tensors_;
};

}}} // namespace joinable::v0::detail
