// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/participant/detail/model_checks.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <joinable/agreement/agree.hpp>
#include <joinable/agreement/agreement_list.hpp>
#include <joinable/detail/requested_checks.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/overlap.hpp>
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
    list.add("report_every", options.report_every);
    list.add("model_name", options.model_name);
    list.add("ignore", options.ignore);
    list.add("sparse", options.sparse);
    list.add("sparse_as_dense", options.sparse_as_dense);
}

JOINABLE_DEFINITION void add_requested_checks(
    AgreementList& list, DataParallelOptions& options, bool has_replicas, Device const& device
) {
    RequestedChecks const requested = RequestedChecks::read();
    list.add("JOINABLE_CHECK", requested.text);
    options.verify_ready = options.verify_ready || (requested.ready && is_on_host(device));
    if (requested.replicas && has_replicas && options.verify_replicas == 0) {
        options.verify_replicas = 1;
    }
}

/// Empty for the first device: there may be no other one.
inline std::string text_of_place(Device const& device, AnyView const& tensor) {
    std::size_t const position = device.position(tensor.device());
    return position == 0 ? std::string{} : concat(", by communicator ", position);
}

JOINABLE_DEFINITION std::string
agree_on(AgreementList& list, ParameterList const& parameters, Device const& device) {
    list.add("number of parameters", parameters.size());
    std::size_t elements = 0;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        AnyView const value = parameters[i].value();
        elements += value.numel();
        std::string text = to_text(value) + text_of_place(device, value);
        if (!value.is_contiguous()) {
            Shape strides = value.strides();
            for (std::size_t d = 0; d < strides.size(); ++d) {
                strides[d] = value.extents()[d] == 1 ? 1 : strides[d]; // which moves no element
            }
            text += ", strides " + to_text(strides);
        }
        text += parameters[i].requires_grad() ? "" : ", no requires_grad";
        if (value && grad_dtype(parameters, i) != value.dtype()) {
            text += concat(", gradients ", name_of(grad_dtype(parameters, i)));
        }
        text += parameters[i].is_complex() ? ", complex" : "";
        text += parameters[i].is_sparse() ? ", sparse gradients" : "";
        list.add(describe_parameter(parameters, i), text);
    }
    return concat(parameters.size(), " parameters of ", elements, " elements");
}

JOINABLE_DEFINITION void agree_on(
    AgreementList& list, TensorList const& tensors, std::string_view kind, Device const& device
) {
    list.add(concat("number of ", kind, "s"), tensors.size());
    std::size_t i = 0;
    for (AnyTensor const& tensor : tensors) {
        AnyView const view = tensor.view();
        list.add(concat(kind, " ", i++), to_text(view) + text_of_place(device, view));
    }
}

JOINABLE_DEFINITION void check_distinct(
    ParameterList const& list, char const* what, AnyView (*view_of)(AnyParameter const&)
) {
    auto const shared = find_shared(list.size(), [&](std::size_t i) { return view_of(list[i]); });
    if (shared) {
        throw ContractViolation{
            to_text(what) + to_text(describe_parameter(list, shared->first)) + " and " +
            to_text(describe_parameter(list, shared->second)) +
            " share memory; list a shared parameter once, and give views of one storage as one parameter"
        };
    }
}

JOINABLE_DEFINITION std::string agree_on_model(
    AgreementList& list, ParameterList const& model, Device const& device, TensorList const& buffers
) {
    list.begin_section("models differ: ");
    std::size_t const first = list.items().size();
    std::string const counts = agree_on(list, model, device);
    agree_on(list, buffers, "buffer", device);
    return concat(counts, ", hash ", list.hash_from(first));
}

JOINABLE_DEFINITION TensorList values_of(ParameterList const& parameters) {
    std::vector<AnyView> views;
    for (AnyParameter const& parameter : parameters) {
        views.push_back(parameter.value());
    }
    return tensor_list(std::move(views));
}

JOINABLE_DEFINITION void check_gradients_apart(ParameterList const& list) {
    std::size_t const size = list.size();
    auto const view_of = [&](std::size_t i) {
        return i < size                         ? list[i].value()
               : list[i - size].requires_grad() ? list[i - size].grad()
                                                : AnyView{};
    };
    if (auto const shared = find_shared(2 * size, view_of, [size](std::size_t i, std::size_t k) {
            return i < size && k >= size;
        })) {
        throw ContractViolation{
            "the gradient of " + describe_parameter(list, shared->second - size) +
            " shares memory with the value of " + describe_parameter(list, shared->first) +
            ", which its average would overwrite; give gradients memory of their own"
        };
    }
}

JOINABLE_DEFINITION void check_parameters(ParameterList const& list, DeviceId device) {
    for (std::size_t i = 0; i < list.size(); ++i) {
        check_value(list, i, device);
        if (list[i].requires_grad()) {
            if (AnyView const value = list[i].value();
                is_overlapping(value.extents(), value.strides())) {
                throw ContractViolation{
                    describe_parameter(list, i) +
                    text_of_overlap(value, "trained; give it a contiguous copy")
                };
            }
            check_gradient(list, i, list[i].grad());
        }
    }
    check_distinct(list, "", [](AnyParameter const& parameter) { return parameter.value(); });
    check_distinct(list, "the gradients of ", [](AnyParameter const& parameter) {
        return parameter.grad();
    });
    check_gradients_apart(list);
}

JOINABLE_DEFINITION ListedModel::ListedModel(ParameterList parameters, bool holds_values)
    : parameters_{std::move(parameters)} {
    listed_.reserve(parameters_.size());
    for (AnyParameter const& parameter : parameters_) {
        AnyView const value = parameter.value();
        listed_.push_back(
            {value.extents(),
             value.device(),
             value.dtype(),
             holds_values && static_cast<bool>(value),
             parameter.requires_grad(),
             parameter.is_complex()}
        );
        identities_.push_back({std::string{parameter.name()}, value.data()});
    }
}

JOINABLE_DEFINITION void
ListedModel::require_same(std::size_t i, std::string_view participant, bool has_refresh) const {
    ParameterState const& listed = listed_[i];
    std::string const what = describe_parameter(parameters_, i);
    std::string const made{participant};
    char const* const or_refresh = detail::or_refresh(has_refresh);
    if (!listed.requires_grad && parameters_[i].requires_grad()) {
        throw ContractViolation{
            what + " requires a gradient now, but did not when the " + made +
            " was made, so it would not be averaged; make the " + made + " after unfreezing" +
            or_refresh
        };
    }
    AnyView const value = parameters_[i].value();
    if (!listed.has_value || !value) {
        return; // it may be frozen now: then it has no gradient, which the backward pass notices
    }
    bool const is_moved = value.device() != listed.device;
    if (!is_moved && value.dtype() == listed.dtype && value.extents() == listed.extents) {
        return;
    }
    auto const text = [&](DType dtype, Shape const& extents, DeviceId device) {
        return concat(name_of(dtype), " ", to_text(extents)) +
               (is_moved ? " on " + to_text(device) : std::string{});
    };
    throw ContractViolation{
        what + " is " + text(value.dtype(), value.extents(), value.device()) + " now, but was " +
        text(listed.dtype, listed.extents, listed.device) + " when the " + made +
        " was made; make the " + made +
        (value.extents() == listed.extents ? " after to()" : " after resizing") + or_refresh
    };
}

JOINABLE_DEFINITION void ReplicaCheck::compare(ControlCommunicator& control, Ranks const& ranks) {
    AgreementList values;
    values.begin_section("replicas differ: ");
    for (std::size_t i = 0; ranks.has_say && i < parameters_.size(); ++i) {
        AnyParameter const& parameter = parameters_[i];
        AnyView const value = parameter.requires_grad() ? parameter.value() : AnyView{};
        std::string text = "no trained value";
        if (value && has_memory(value)) {
            text = concat("values of hash ", elements_.hash(value));
        }
        values.add(describe_parameter(parameters_, i), text);
    }
    std::array<std::uint64_t, HashAgreement::words> words{};
    if (ranks.has_say) {
        HashAgreement::write(words.data(), values.hash_from(0));
    }
    control.sum(words);
    auto const count = static_cast<std::uint64_t>(ranks.count);
    if (HashAgreement::is_common(words.data(), count)) {
        return;
    }
    DifferenceReport report{control, ranks.lowest, count, ranks.has_say};
    AbortReason reason = report.difference(values);
    reason.message +=
        "; start all ranks from the same values (sync_at_start, attach_state()), and change values and gradients in the body of a Step, which joined ranks run, too";
    throw_failure(reason);
}

}}} // namespace joinable::v0::detail
