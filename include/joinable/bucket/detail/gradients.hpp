// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <joinable/bucket/bucket.hpp>
#include <joinable/bucket/memory.hpp>
#include <joinable/bucket/options.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// When gradients move into buckets: when these are made, or by take_gradients(), when all ranks have made theirs.
enum class TakeGradients : bool { now, later };

/// The gradients of a model and their places in buckets: packs, delivers, moves. Knows nothing of
/// communicators and iterations; all members are local. Gradients of a device stay in their memory
/// from pack() until device().submit().
class Gradients {
public:
    /// Buckets are in `memory`, as all gradients have to be.
    /// @throws ContractViolation  see Reducer's constructor. Nothing was changed.
    Gradients(
        ParameterList parameters,
        BucketOptions const& options,
        int rank,
        BufferMemory const& memory = {},
        TakeGradients take_them = TakeGradients::now
    )
        : parameters_{std::move(parameters)}, memory_{memory}, rank_{rank},
          are_views_{options.gradient_as_bucket_view},
          only_existing_{options.find_unused || options.static_graph},
          joined_{options.joined_gradients}, limits_{bucket_limits(options)},
          trained_{expected_ready_order(parameters_)},
          layout_{parameters_, trained_, rebuilds(options) ? one_bucket() : limits_, memory},
          backup_{
              needs_backup() ? BucketLayout{parameters_, trained_, one_bucket(), memory}
                             : BucketLayout{}
          },
          places_(parameters_.size()), backup_places_(parameters_.size()),
          is_average_(parameters_.size()), is_of_others_(parameters_.size()) {
        find_places(places_, layout_);
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

    Gradients(Gradients const&) = delete; // places refer to the layout
    Gradients& operator=(Gradients const&) = delete;

    /// Moves gradients into the buckets, where they are to be views. Where parameters may go unused, one
    /// without a gradient stays so until it gets one.
    void take() {
        if (are_views_) {
            move_into_buckets(only_existing_);
        }
    }

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] ParameterList const& parameters() const noexcept { return parameters_; }
    /// The parameters that are trained, in the order in which buckets were cut.
    [[nodiscard]] std::vector<std::size_t> const& trained() const noexcept { return trained_; }
    [[nodiscard]] bool is_trained(std::size_t i) const noexcept {
        return places_[i].view != nullptr;
    }
    [[nodiscard]] std::vector<Bucket> const& buckets() const noexcept { return layout_.buckets(); }
    /// See BucketLayout::for_each_arena.
    template <class F>
    void for_each_arena(F const& f) const {
        layout_.for_each_arena(f);
    }
    [[nodiscard]] std::size_t bucket_of(std::size_t i) const noexcept { return places_[i].bucket; }

    /// Puts gradient `i`, times `factor`, into its bucket, in one pass; zeros where there is none,
    /// or the factor is 0: a mean over no samples is not a number. Done when device().submit() says so.
    void pack(std::size_t i, double factor) const {
        AnyView const gradient = parameters_[i].grad();
        if (gradient) {
            require_fit(i, gradient);
        }
        if (!gradient || factor == 0.0) {
            zero(i);
        } else {
            device().scale_copy(gradient, factor, *places_[i].view);
        }
    }
    void zero(std::size_t i) const { device().fill_zero(*places_[i].view); }

    [[nodiscard]] Device& device() const noexcept { return memory_.device(); }

    /// A guard begins: none of its averages is in a gradient.
    void begin_guard() noexcept {
        std::fill(is_average_.begin(), is_average_.end(), false);
        std::fill(is_of_others_.begin(), is_of_others_.end(), false);
    }
    /// An iteration begins, of a rank that has joined, or of one that has not.
    void begin(bool has_joined) {
        has_joined_ = has_joined;
        if (!leaves_untouched()) {
            return;
        }
        for (std::size_t const i : trained_) {
            if (is_resident(i)) {
                device().copy(*places_[i].view, *backup_places_[i].view);
            }
        }
        device().submit(); // before zeros take their place
    }
    /// All averages of the iteration are delivered. `is_used(i)`: some rank uses the parameter.
    template <class F>
    void complete(F const& is_used) const {
        for (std::size_t const i : trained_) {
            if (leaves_untouched() && is_resident(i)) {
                device().copy(*backup_places_[i].view, *places_[i].view);
            } else if (has_joined_ && is_average_[i] && !is_used(i)) {
                zero_where_others_are(i);
            }
        }
    }
    /// The guard has ended. Done when device().finish() says so.
    void end_guard() const {
        for (std::size_t i = 0; i < is_of_others_.size(); ++i) {
            if (is_of_others_[i]) {
                zero_where_others_are(i);
            }
        }
    }

    /// Makes what is in the bucket gradient `i`. Done when device().finish() says so.
    void deliver(std::size_t i) {
        if (leaves_untouched()) {
            return;
        }
        is_average_[i] = true;
        is_of_others_[i] = has_joined_;
        AnyParameter const& parameter = parameters_[i];
        AnyView const& view = *places_[i].view;
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

    /// Cuts the buckets anew, by `order`. Gradients that live in them move along.
    void rebuild(std::vector<std::size_t> order) {
        std::vector<std::size_t> residents;
        for (std::size_t const i : trained_) {
            if (is_resident(i)) {
                residents.push_back(i);
            }
        }
        trained_ = std::move(order);
        layout_.rebuild(parameters_, trained_, limits_);
        find_places(places_, layout_);
        for (std::size_t const i : residents) {
            parameters_[i].set_grad(*places_[i].view);
        }
    }

    /// How error texts call parameter `i` of this rank.
    [[nodiscard]] std::string describe(std::size_t i) const {
        return concat(describe_parameter(parameters_, i), " on rank ", rank_);
    }

private:
    struct Place {
        AnyView const* view = nullptr; ///< null: the parameter is not trained
        std::size_t bucket = 0;
    };

    static std::vector<std::size_t> one_bucket() { return {static_cast<std::size_t>(-1)}; }

    [[nodiscard]] bool needs_backup() const {
        return joined_ == JoinedGradients::untouched &&
               std::any_of(trained_.begin(), trained_.end(), [&](std::size_t i) {
                   return parameters_[i].can_set_grad();
               });
    }

    static void find_places(std::vector<Place>& places, BucketLayout const& layout) {
        for (std::size_t b = 0; b < layout.buckets().size(); ++b) {
            Bucket const& bucket = layout.buckets()[b];
            for (std::size_t k = 0; k < bucket.parameters.size(); ++k) {
                places[bucket.parameters[k]] = {&bucket.views[k], b};
            }
        }
    }

    [[nodiscard]] bool leaves_untouched() const noexcept {
        return has_joined_ && joined_ == JoinedGradients::untouched;
    }
    /// Whether the gradient lives in its bucket.
    [[nodiscard]] bool is_resident(std::size_t i) const {
        AnyView const gradient = parameters_[i].grad();
        return gradient && gradient.data() == places_[i].view->data();
    }
    void zero_where_others_are(std::size_t i) const {
        AnyView const gradient = parameters_[i].grad();
        if (gradient && joined_ == JoinedGradients::zeroed_at_end) {
            device().fill_zero(gradient);
        }
    }

    void move_into_buckets(bool existing_only) {
        for (std::size_t const i : trained_) {
            AnyView const& view = *places_[i].view;
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

    void require_fit(std::size_t i, AnyView const& gradient) const {
        check_gradient(parameters_, i, gradient);
        AnyView const& view = *places_[i].view;
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

    ParameterList parameters_;
    BufferMemory memory_;
    int rank_;
    bool are_views_;
    bool only_existing_;
    JoinedGradients joined_;
    bool has_joined_ = false; ///< in this iteration
    std::vector<std::size_t> limits_;
    std::vector<std::size_t> trained_;
    BucketLayout layout_;
    /// For gradients that live in buckets, while these carry the averages of others. The reductions of
    /// all ranks run in the same buckets, because communicators have registered them.
    BucketLayout backup_;
    std::vector<Place> places_;        ///< per parameter
    std::vector<Place> backup_places_; ///< per parameter
    std::vector<bool> is_average_;     ///< per parameter, whether this guard's reductions wrote it
    std::vector<bool> is_of_others_;   ///< the last one when this rank had joined
};

}}} // namespace joinable::v0::detail
