// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/tensor/tensor_list.hpp>

#include <joinable/tensor/overlap.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION
FixedTensors::FixedTensors(TensorList tensors, std::string_view what, DeviceId device)
    : tensors_{std::move(tensors)}, what_{what} {
    for (AnyTensor const& tensor : tensors_) {
        AnyView const view = tensor.view();
        bool const is_there = is_among(view.device(), device);
        if (!view || !is_there || !detail::has_memory(view)) {
            refuse(
                views_.size(),
                !view       ? " is missing; give a pointer that is not null"
                : !is_there ? " is not on " + detail::to_text(device) + "; give a copy that is"
                            : " has elements at a null pointer; give it memory"
            );
        }
        require_writable(views_.size(), view);
        views_.push_back(view);
    }
}

JOINABLE_DEFINITION void FixedTensors::require_writable(std::size_t i, AnyView const& view) const {
    if (is_overlapping(view.extents(), view.strides())) {
        refuse(i, text_of_overlap(view, "written; give a contiguous copy"));
    }
    static_cast<void>(as_reals(view)); // which is how it is copied
}

JOINABLE_DEFINITION std::vector<AnyView> const& FixedTensors::views() {
    for (std::size_t i = 0; i < views_.size(); ++i) {
        AnyView const now = tensors_[i].view();
        if (!detail::is_like(now, views_[i]) || !detail::has_memory(now)) {
            refuse(
                i,
                " was " + detail::to_text(views_[i]) + ", but now is " + detail::to_text(now) +
                    (detail::has_memory(now) ? "" : " at a null pointer") +
                    "; it may move, but neither grow nor change"
            );
        }
        if (now.strides() != views_[i].strides()) {
            require_writable(i, now);
        }
        views_[i] = now;
    }
    return views_;
}

JOINABLE_DEFINITION void FixedTensors::append(FixedTensors const& more) {
    detail::append(tensors_, more.tensors_);
    views_.insert(views_.end(), more.views_.begin(), more.views_.end());
}

JOINABLE_DEFINITION void FixedTensors::refuse(std::size_t i, std::string const& why) const {
    throw ContractViolation{detail::concat(what_, " ", i, why)};
}

}}} // namespace joinable::v0::detail
