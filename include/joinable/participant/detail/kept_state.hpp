// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include <joinable/bucket/bucket_reduction.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/copy.hpp>
#include <joinable/device/device.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/shape.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// A copy of what a reduction keeps of each parameter, made before it is prepared for other ones. Local.
template <class Reduction>
class KeptState {
public:
    KeptState(Reduction& reduction, Device& device) : device_{&device} {
        if constexpr (saves_state<Reduction>) {
            ReductionState state;
            reduction.save(state);
            for (ReductionTensor const& tensor : state.tensors) {
                Arena elements = device.allocate_staging(bytes_of(tensor));
                if (elements.bytes() != 0) {
                    device.download(tensor.data, elements.data(), bytes_of(tensor));
                }
                tensors_.push_back({tensor, std::move(elements)});
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
                Arena const whole = device_->allocate_staging(bytes_of(tensor)); // zeros
                for (Kept& kept : tensors_) {
                    if (former == kept.tensor.parameter && tensor.name == kept.tensor.name &&
                        tensor.dtype == kept.tensor.dtype &&
                        tensor.extents == kept.tensor.extents) {
                        copy(
                            view_of(kept.tensor, kept.elements.data()),
                            view_of(tensor, whole.data())
                        );
                    }
                }
                device_->upload(whole.data(), tensor.data, bytes_of(tensor));
                device_->download(tensor.data, whole.data(), bytes_of(tensor)); // it ends here
            }
            reduction.load(state);
        }
    }

private:
    struct Kept {
        ReductionTensor tensor; ///< its address is that of before
        Arena elements;         ///< on the host
    };

    static std::size_t bytes_of(ReductionTensor const& tensor) noexcept {
        return numel(tensor.extents) * size_of(tensor.dtype);
    }
    static AnyView view_of(ReductionTensor const& tensor, std::byte* elements) {
        return {elements, tensor.dtype, tensor.extents, tensor.strides};
    }

    Device* device_;
    std::vector<Kept> tensors_;
};

}}} // namespace joinable::v0::detail
