// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
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
        BufferMemory const& memory = {}
    )
        : parameters_{std::move(parameters)}, memory_{memory}, rank_{rank},
          are_views_{options.gradient_as_bucket_view}, joined_{options.joined_gradients},
          limits_{bucket_limits(options)}, trained_{expected_ready_order(parameters_)},
          layout_{parameters_, trained_, rebuilds(options) ? one_bucket() : limits_, memory},
          writers_(parameters_.size()) {
        find_places();
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
        auto const can_live_here = [&](std::size_t i) { return parameters_[i].can_set_grad(); };
        backup_views_.resize(parameters_.size());
        if (joined_ == JoinedGradients::untouched &&
            std::any_of(trained_.begin(), trained_.end(), can_live_here)) {
            backup_ = BucketLayout{parameters_, trained_, one_bucket(), memory};
            for (Bucket const& bucket : backup_.buckets()) {
                for (std::size_t k = 0; k < bucket.parameters.size(); ++k) {
                    backup_views_[bucket.parameters[k]] = bucket.views[k];
                }
            }
        }
        if (are_views_) {
            // Where parameters may go unused, one without a gradient stays so until it gets one.
            move_into_buckets(options.find_unused || options.static_graph);
        }
    }

    Gradients(Gradients const&) = delete; // places refer to the layout
    Gradients& operator=(Gradients const&) = delete;

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

    /// A guard begins: no reduction of it has written a gradient.
    void begin_guard() noexcept { writers_.assign(writers_.size(), Writer::none); }
    /// An iteration begins, of a rank that has joined, or of one that has not.
    void begin(bool is_joined) {
        is_joined_ = is_joined;
        if (leaves_untouched()) {
            for_each_resident([&](std::size_t i, AnyView const& view) {
                device().copy(view, backup_views_[i]);
            });
            device().submit(); // before zeros take their place
        }
    }
    /// All averages of the iteration are delivered. `is_used(i)`: some rank uses the parameter.
    template <class F>
    void complete(F const& is_used) {
        if (leaves_untouched()) {
            for_each_resident([&](std::size_t i, AnyView const& view) {
                device().copy(backup_views_[i], view);
            });
            device().submit();
        } else if (is_joined_ && joined_ == JoinedGradients::zeroed_at_end) {
            zero_written([&](std::size_t i) { return !is_used(i) && writers_[i] != Writer::none; });
        }
    }
    /// The guard has ended. Done when device().finish() says so.
    void end_guard() const {
        if (joined_ == JoinedGradients::zeroed_at_end) {
            zero_written([&](std::size_t i) { return writers_[i] == Writer::joined; });
        }
    }

    /// Makes what is in the bucket gradient `i`. Done when device().finish() says so.
    void deliver(std::size_t i) {
        if (leaves_untouched()) {
            return;
        }
        writers_[i] = is_joined_ ? Writer::joined : Writer::active;
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
        for_each_resident([&](std::size_t i, AnyView const&) { residents.push_back(i); });
        trained_ = std::move(order);
        layout_.rebuild(parameters_, trained_, limits_);
        find_places();
        for (std::size_t const i : residents) {
            parameters_[i].set_grad(*places_[i].view);
        }
    }

    /// How error texts call parameter `i` of this rank.
    [[nodiscard]] std::string describe(std::size_t i) const {
        return concat(describe_parameter(parameters_, i), " on rank ", rank_);
    }

private:
    /// What wrote a gradient last, of the reductions of a guard: one in which this rank was active, or
    /// had joined.
    enum class Writer : std::uint8_t { none, active, joined };
    struct Place {
        AnyView const* view = nullptr; ///< null: the parameter is not trained
        std::size_t bucket = 0;
    };

    static std::vector<std::size_t> one_bucket() { return {static_cast<std::size_t>(-1)}; }

    void find_places() {
        places_.resize(parameters_.size());
        for (std::size_t b = 0; b < buckets().size(); ++b) {
            Bucket const& bucket = buckets()[b];
            for (std::size_t k = 0; k < bucket.parameters.size(); ++k) {
                places_[bucket.parameters[k]] = {&bucket.views[k], b};
            }
        }
    }

    [[nodiscard]] bool leaves_untouched() const noexcept {
        return is_joined_ && joined_ == JoinedGradients::untouched;
    }

    /// Calls f(i, place) for each gradient that lives in its bucket.
    template <class F>
    void for_each_resident(F const& f) const {
        for (std::size_t const i : trained_) {
            AnyView const gradient = parameters_[i].grad();
            if (gradient && gradient.data() == places_[i].view->data()) {
                f(i, *places_[i].view);
            }
        }
    }

    template <class F>
    void zero_written(F const& is_meant) const {
        for (std::size_t const i : trained_) {
            if (AnyView const gradient = parameters_[i].grad(); gradient && is_meant(i)) {
                device().fill_zero(gradient);
            }
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
            throw ContractViolation{concat(
                "the gradient of ",
                describe(i),
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

    ParameterList parameters_;
    BufferMemory memory_;
    int rank_;
    bool are_views_;
    JoinedGradients joined_;
    bool is_joined_ = false; ///< in this iteration
    std::vector<std::size_t> limits_;
    std::vector<std::size_t> trained_;
    BucketLayout layout_;
    std::vector<Place> places_;   ///< per parameter
    std::vector<Writer> writers_; ///< per parameter
    /// Memory for the gradients that live in buckets, while these carry the others'. The reductions of
    /// all ranks run in the same buckets, because communicators have registered them.
    BucketLayout backup_;
    std::vector<AnyView> backup_views_; ///< per parameter
};

}}} // namespace joinable::v0::detail
