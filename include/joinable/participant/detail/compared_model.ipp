// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/participant/detail/compared_model.hpp>

#include <cstddef>

#include <joinable/detail/text.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/shape.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void agree_on(AgreementList& list, DataParallelOptions const& options) {
    list.add("bucket_cap_bytes", options.bucket_cap_bytes);
    list.add("first_bucket_bytes", options.first_bucket_bytes);
    list.add("gradient_as_bucket_view", options.gradient_as_bucket_view);
    list.add("find_unused", options.find_unused);
    list.add("static_graph", options.static_graph);
    list.add("broadcast_buffers", options.broadcast_buffers);
    list.add("gradient_kind", options.gradient_kind == GradientKind::mean ? "mean" : "sum");
    list.add("bucket_caps_bytes", options.bucket_caps_bytes);
    list.add("rebuild_buckets", options.rebuild_buckets);
    bool const is_before = options.buffer_sync == BufferSync::before_forward;
    list.add("buffer_sync", is_before ? "before_forward" : "after_forward");
    list.add("sync_at_start", options.sync_at_start);
    list.add("sync_at_end", options.sync_at_end);
    constexpr std::string_view joined[] = {"zeroed_at_end", "kept", "untouched"};
    list.add("joined_gradients", joined[static_cast<std::size_t>(options.joined_gradients)]);
    bool const is_zero = options.unused_gradients == UnusedGradients::zero;
    list.add("unused_gradients", is_zero ? "zero" : "held");
    list.add("verify_ready", options.verify_ready);
    list.add("shares_values", options.shares_values);
    list.add("verify_replicas", options.verify_replicas);
}

JOINABLE_DEFINITION std::string agree_on(AgreementList& list, ParameterList const& parameters) {
    list.add("number of parameters", parameters.size());
    std::size_t elements = 0;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        AnyView const value = parameters[i].value();
        elements += value.numel();
        std::string text = to_text(value);
        if (value.strides() != row_major_strides(value.extents())) {
            text += ", strides " + to_text(value.strides());
        }
        text += parameters[i].requires_grad() ? "" : ", no requires_grad";
        list.add(describe_parameter(parameters, i), text);
    }
    return concat(parameters.size(), " parameters of ", elements, " elements");
}

JOINABLE_DEFINITION void
agree_on(AgreementList& list, TensorList const& tensors, std::string_view kind) {
    list.add(concat("number of ", kind, "s"), tensors.size());
    std::size_t i = 0;
    for (AnyTensor const& tensor : tensors) {
        list.add(concat(kind, " ", i++), to_text(tensor.view()));
    }
}

}}} // namespace joinable::v0::detail
