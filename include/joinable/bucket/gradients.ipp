// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/bucket/gradients.hpp>

#include <algorithm>
#include <utility>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION BucketGradients::BucketGradients(
    ParameterList parameters,
    BucketOptions const& options,
    int rank,
    BufferMemory const& memory,
    TakeGradients take_them
)
    : Gradients{parameters, expected_ready_order(parameters), rank, memory.device()},
      are_views_{options.gradient_as_bucket_view},
      only_existing_{options.find_unused || options.static_graph},
      joined_{options.joined_gradients}, limits_{bucket_limits(options)},
      layout_{parameters_, trained_, rebuilds(options) ? one_bucket() : limits_, memory},
      backup_{
          needs_backup() ? BucketLayout{parameters_, trained_, one_bucket(), memory}
                         : BucketLayout{}
      },
      places_(parameters_.size()), backup_places_(parameters_.size()),
      is_of_others_(parameters_.size()) {
    find_places();
    find_places(backup_places_, backup_);
    for (std::size_t const i : trained_) {
        if (DType const dtype = parameters_[i].value().dtype(); !is_floating_point(dtype)) {
            throw ContractViolation{concat(
                describe(i),
                " is of ",
                name_of(dtype),
                ": gradients are averaged, which needs floating point; set its requires_grad "
                "to "
                "false, or make it a buffer"
            )};
        }
        if (AnyView const gradient = parameters_[i].grad()) {
            require_fit(i, gradient);
        }
        if (are_views_ && !parameters_[i].can_set_grad()) {
            throw ContractViolation{concat(
                "gradients as bucket views need parameter_traits::set_grad, which ",
                describe(i),
                " has not; specialise it, or turn gradient_as_bucket_view off"
            )};
        }
    }
    if (take_them == TakeGradients::now) {
        take();
    }
}

JOINABLE_DEFINITION void BucketGradients::end() noexcept {
    for (std::size_t const i : trained_) {
        try {
            if (parameters_[i].can_release_grad() && is_resident(i)) {
                parameters_[i].release_grad();
            }
        } catch (...) { // NOLINT(bugprone-empty-catch): nobody may read what ends
        }
    }
}

JOINABLE_DEFINITION void BucketGradients::pack_now(std::size_t i, double factor) {
    AnyView const gradient = parameters_[i].grad();
    if (gradient) {
        require_fit(i, gradient);
    }
    if (!gradient || factor == 0.0) {
        zero(i);
    } else {
        device().scale_copy(gradient, factor, *places_[i]);
    }
}

JOINABLE_DEFINITION void BucketGradients::begin_now(bool has_joined) {
    has_joined_ = has_joined;
    if (!leaves_untouched()) {
        return;
    }
    for (std::size_t const i : trained_) {
        if (is_resident(i)) {
            device().copy(*places_[i], *backup_places_[i]);
        }
    }
    device().submit(); // before zeros replace them
}

JOINABLE_DEFINITION void BucketGradients::follow_others_now(std::size_t i, OtherGradient other) {
    is_of_others_[i] = has_joined_;
    follow_other(parameters_[i], other, device(), [&] {
        zero(i);
        return *places_[i];
    });
}

JOINABLE_DEFINITION void BucketGradients::complete_now() {
    for (std::size_t k = 0; leaves_untouched() && k < trained_.size(); ++k) {
        if (std::size_t const i = trained_[k]; is_resident(i)) {
            device().copy(*backup_places_[i], *places_[i]);
        }
    }
}

JOINABLE_DEFINITION void BucketGradients::end_guard_now() {
    for (std::size_t i = 0; i < is_of_others_.size(); ++i) {
        if (is_of_others_[i] && joined_ == JoinedGradients::zeroed_at_end) {
            clear_gradient(parameters_[i], device());
        }
        is_of_others_[i] = false;
    }
    device().finish();
}

JOINABLE_DEFINITION void BucketGradients::deliver_now(std::size_t i) {
    if (leaves_untouched()) {
        return;
    }
    is_of_others_[i] = has_joined_;
    AnyParameter const& parameter = parameters_[i];
    AnyView const& view = *places_[i];
    AnyView const gradient = parameter.grad();
    if (gradient) {
        require_fit(i, gradient);
        if (gradient.data() == view.data()) {
            return;
        }
    }
    if (gradient && !are_views_) {
        device().copy(view, gradient);
    } else if (parameter.can_set_grad()) {
        parameter.set_grad(view);
    } else {
        throw ContractViolation{concat(
            describe(i),
            " has no gradient to receive the average in; give it a zero gradient before the "
            "first iteration, or specialise parameter_traits::set_grad"
        )};
    }
}

JOINABLE_DEFINITION void BucketGradients::rebuild_now(std::vector<std::size_t> order) {
    std::vector<std::size_t> residents;
    for (std::size_t const i : trained_) {
        if (is_resident(i)) {
            residents.push_back(i);
        }
    }
    trained_ = std::move(order);
    layout_.rebuild(parameters_, trained_, limits_);
    find_places();
    for (std::size_t const i : residents) {
        parameters_[i].set_grad(*places_[i]);
    }
}

JOINABLE_DEFINITION std::string Gradients::describe(std::size_t i) const {
    return concat(describe_parameter(parameters_, i), " on rank ", rank());
}

JOINABLE_DEFINITION bool BucketGradients::needs_backup() const {
    return joined_ == JoinedGradients::untouched &&
           std::any_of(trained_.begin(), trained_.end(), [&](std::size_t i) {
               return parameters_[i].can_set_grad();
           });
}

JOINABLE_DEFINITION void
BucketGradients::find_places(std::vector<AnyView const*>& places, BucketLayout const& layout) {
    for (Bucket const& bucket : layout.buckets()) {
        for (std::size_t k = 0; k < bucket.parameters.size(); ++k) {
            places[bucket.parameters[k]] = &bucket.views[k];
        }
    }
}

JOINABLE_DEFINITION void BucketGradients::find_places() {
    find_places(places_, layout_);
    for (std::size_t b = 0; b < buckets().size(); ++b) {
        for (std::size_t const i : buckets()[b].parameters) {
            bucket_of_[i] = b;
        }
    }
}

JOINABLE_DEFINITION bool BucketGradients::is_resident(std::size_t i) const {
    AnyView const gradient = parameters_[i].grad();
    return gradient && gradient.data() == places_[i]->data();
}

JOINABLE_DEFINITION void BucketGradients::move_into_buckets(bool existing_only) {
    for (std::size_t const i : trained_) {
        AnyView const& view = *places_[i];
        AnyView const gradient = parameters_[i].grad();
        if (gradient) {
            device().copy(gradient, view);
        }
        if (gradient || !existing_only) {
            parameters_[i].set_grad(view);
        }
    }
    device().finish();
}

JOINABLE_DEFINITION void
BucketGradients::require_fit(std::size_t i, AnyView const& gradient) const {
    check_gradient(parameters_, i, gradient);
    AnyView const& view = *places_[i];
    if (gradient.dtype() != view.dtype() || gradient.extents() != view.extents() ||
        gradient.device() != view.device()) {
        bool const are_together = gradient.device() == view.device();
        auto const text = [&](AnyView const& tensor) {
            return to_text(tensor) + (are_together ? "" : " on " + to_text(tensor.device()));
        };
        throw ContractViolation{concat(
            "the gradient of ",
            describe(i),
            " is ",
            text(gradient),
            ", but its value is ",
            text(view),
            "; both need the same dtype, extents and device"
        )};
    }
}

}}} // namespace joinable::v0::detail
