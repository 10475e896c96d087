// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <joinable/bucket/bucket.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/detail/text.hpp>

namespace joinable::inline v0 {

/// Averages gradients over ranks, bucket by bucket, while the backward pass still runs. Stands
/// alone: an engine without a guard drives it by its verbs.
///
/// One iteration: prepare_for_backward(factor); mark_ready(i) for every trainable parameter, in any
/// order; finalize_backward(). A rank without gradients runs contribute_zeros() instead. Buckets
/// are launched in index order, never in ready order, so every rank issues the same collectives
/// whatever order its gradients become ready in. Nothing is allocated after construction.
template <Communicator Comm>
class Reducer {
public:
    /// Local. `comm` must outlive the reducer; so must what the parameters refer to.
    /// @throws ContractViolation  no parameter requires a gradient; a gradient does not fit its
    ///         value; gradients as bucket views without set_grad. Nothing was changed.
    Reducer(Comm& comm, ParameterList parameters, DataParallelOptions const& options = {})
        : comm_{comm}, parameters_{std::move(parameters)},
          layout_{make_bucket_layout(parameters_, options)}, places_(parameters_.size()),
          pending_(layout_.buckets.size()), works_(layout_.buckets.size()) {
        for (std::size_t b = 0; b < layout_.buckets.size(); ++b) {
            Bucket const& bucket = layout_.buckets[b];
            for (std::size_t k = 0; k < bucket.parameters.size(); ++k) {
                std::size_t const i = bucket.parameters[k];
                places_[i] = {&bucket.views[k], b, false};
                if (AnyView const gradient = parameters_[i].grad()) {
                    check_gradient(i, gradient);
                }
            }
        }
        if (options.gradient_as_bucket_view) {
            move_gradients_into_buckets();
        }
    }

    Reducer(Reducer const&) = delete;
    Reducer& operator=(Reducer const&) = delete;

    [[nodiscard]] ParameterList const& parameters() const noexcept { return parameters_; }
    [[nodiscard]] std::vector<Bucket> const& buckets() const noexcept { return layout_.buckets; }

    /// Local. Starts an iteration in which this rank's gradients are multiplied by `factor` as they
    /// are packed: the divisor of the average, with this rank's weight in it. With factor 0 it
    /// contributes zeros, whatever its gradients hold: a mean over no samples is not a number.
    /// @throws ContractViolation  the previous iteration was not finalized.
    void prepare_for_backward(double factor) {
        if (iteration_) {
            throw ContractViolation{concat_missing(
                "the previous iteration was not finalized; call finalize_backward() first"
            )};
        }
        iteration_ = Iteration{factor, 0};
        for (std::size_t b = 0; b < pending_.size(); ++b) {
            pending_[b] = layout_.buckets[b].parameters.size();
        }
        for (Place& place : places_) {
            place.is_ready = false;
        }
    }

    /// The gradient of parameter `i` is final: packs it, and launches every bucket that is full and
    /// whose predecessors are launched. A parameter without gradient contributes zeros.
    /// Collective in effect; does not block.
    /// @throws ContractViolation  no iteration is prepared, `i` is out of range or needs no
    ///         gradient, was marked before, or its gradient does not fit its value. The iteration
    ///         is lost.
    void mark_ready(std::size_t i) {
        check_index(i);
        Place& place = places_[i];
        place.is_ready = true;
        AnyView const gradient = parameters_[i].grad();
        if (gradient) {
            check_gradient(i, gradient);
        }
        if (!gradient || iteration_->factor == 0.0) {
            fill_zero(*place.view);
        } else {
            scale_copy(gradient, iteration_->factor, *place.view);
        }
        --pending_[place.bucket];
        advance();
    }

    /// Waits for all buckets and writes the averages into the gradients; a parameter without
    /// gradient gets a view of its bucket where set_grad allows it. Collective.
    /// @throws ContractViolation  parameters were not marked (the text lists them), or one has no
    ///         place for its average; what the communicator throws.
    void finalize_backward() {
        if (!iteration_) {
            throw ContractViolation{
                "finalize_backward() without prepare_for_backward(): no iteration is open"
            };
        }
        if (iteration_->next_bucket != layout_.buckets.size()) {
            throw ContractViolation{concat_missing(
                "not all gradients became ready; mark every trainable parameter in each iteration"
            )};
        }
        for (std::size_t b = 0; b < works_.size(); ++b) {
            works_[b]->wait();
            works_[b].reset();
            deliver(layout_.buckets[b]);
        }
        iteration_.reset();
    }

    /// The whole iteration of a rank that has no gradients: the same collectives with zeros, and
    /// the averages written into its gradients. Collective. Throws what finalize_backward() throws.
    void contribute_zeros() {
        prepare_for_backward(0.0);
        for (std::size_t b = 0; b < layout_.buckets.size(); ++b) {
            Buffer const& buffer = layout_.buckets[b].buffer;
            if (buffer.count != 0) {
                std::memset(buffer.data, 0, buffer.bytes());
            }
            pending_[b] = 0;
        }
        advance();
        finalize_backward();
    }

private:
    struct Place {
        AnyView const* view = nullptr; ///< null: the parameter is not trained
        std::size_t bucket = 0;
        bool is_ready = false;
    };
    struct Iteration {
        double factor;
        std::size_t next_bucket;
    };

    /// The script of an iteration, for ranks with and without gradients: buckets in index order,
    /// each as soon as it is full.
    void advance() {
        std::size_t& next = iteration_->next_bucket;
        while (next < layout_.buckets.size() && pending_[next] == 0) {
            static_cast<void>( // nvcc 13 warns of a dropped reference to a work, too
                works_[next].emplace(comm_.all_reduce(layout_.buckets[next].buffer, ReduceOp::sum))
            );
            ++next;
        }
    }

    void deliver(Bucket const& bucket) {
        for (std::size_t k = 0; k < bucket.parameters.size(); ++k) {
            AnyParameter const& parameter = parameters_[bucket.parameters[k]];
            if (AnyView const gradient = parameter.grad()) {
                check_gradient(bucket.parameters[k], gradient);
                if (gradient.data() != bucket.views[k].data()) {
                    copy(bucket.views[k], gradient);
                }
            } else if (parameter.can_set_grad()) {
                parameter.set_grad(bucket.views[k]);
            } else {
                throw ContractViolation{detail::concat(
                    describe(bucket.parameters[k]),
                    " has no gradient to receive the average in; give it a zero gradient before "
                    "the first iteration, or specialise parameter_traits::set_grad"
                )};
            }
        }
    }

    void move_gradients_into_buckets() {
        for (std::size_t i = 0; i < parameters_.size(); ++i) {
            if (places_[i].view != nullptr && !parameters_[i].can_set_grad()) {
                throw ContractViolation{detail::concat(
                    "gradients as bucket views need parameter_traits::set_grad, which ",
                    describe(i),
                    " has not; specialise it, or turn gradient_as_bucket_view off"
                )};
            }
        }
        for (std::size_t i = 0; i < parameters_.size(); ++i) {
            if (AnyView const* const view = places_[i].view; view != nullptr) {
                if (AnyView const gradient = parameters_[i].grad()) {
                    copy(gradient, *view);
                }
                parameters_[i].set_grad(*view);
            }
        }
    }

    [[nodiscard]] std::string describe(std::size_t i) const {
        return detail::describe_parameter(parameters_, i);
    }

    void check_index(std::size_t i) const {
        if (i >= parameters_.size()) {
            throw ContractViolation{detail::concat(
                "parameter ",
                i,
                " is out of range on rank ",
                static_cast<int>(comm_.rank()),
                ": there are ",
                parameters_.size(),
                " parameters"
            )};
        }
        std::string_view const wrong =
            !iteration_                  ? "was marked ready outside an iteration; call "
                                           "prepare_for_backward() first"
            : places_[i].view == nullptr ? "was marked ready, but does not require a gradient"
            : places_[i].is_ready        ? "was marked ready twice in an iteration; mark a shared "
                                           "parameter once, when its last use is done"
                                         : "";
        if (!wrong.empty()) {
            throw ContractViolation{
                detail::concat(describe(i), " on rank ", static_cast<int>(comm_.rank()), " ", wrong)
            };
        }
    }

    void check_gradient(std::size_t i, AnyView const& gradient) const {
        AnyView const& view = *places_[i].view;
        if (gradient.dtype() != view.dtype() || gradient.extents() != view.extents() ||
            gradient.device() != view.device()) {
            throw ContractViolation{detail::concat(
                "the gradient of ",
                describe(i),
                " on rank ",
                static_cast<int>(comm_.rank()),
                " is ",
                name_of(gradient.dtype()),
                " with ",
                gradient.numel(),
                " elements, but its value is ",
                name_of(view.dtype()),
                " with ",
                view.numel(),
                "; both need the same dtype, extents and device"
            )};
        }
    }

    [[nodiscard]] std::string concat_missing(std::string_view text) const {
        std::vector<std::size_t> missing;
        for (std::size_t i = 0; i < places_.size(); ++i) {
            if (places_[i].view != nullptr && !places_[i].is_ready) {
                missing.push_back(i);
            }
        }
        return missing.empty() ? std::string{text}
                               : detail::concat(
                                     text,
                                     " (rank ",
                                     static_cast<int>(comm_.rank()),
                                     " did not mark ",
                                     missing.size() == 1 ? "parameter " : "parameters ",
                                     missing,
                                     ")"
                                 );
    }

    Comm& comm_;
    ParameterList parameters_;
    BucketLayout layout_;
    std::vector<Place> places_;        ///< per parameter
    std::vector<std::size_t> pending_; ///< per bucket: gradients that are not ready
    std::optional<Iteration> iteration_;
    std::vector<std::optional<work_of<Comm>>> works_; ///< destroyed before the memory they use
};

} // namespace joinable::inline v0
