// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/bucket/gradients.hpp>

#include <algorithm>
#include <functional>
#include <utility>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/overlap.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION std::string Gradients::describe(std::size_t i) const {
    return concat(describe_parameter(parameters_, i), " on rank ", rank());
}

/// See gradients_in_buckets(). All members are defined within: else each file that includes this would have its table of
/// virtual functions.
class BucketGradients final : public Gradients {
public:
    BucketGradients(
        ParameterList parameters,
        BucketOptions const& options,
        int rank,
        int size,
        BufferMemory const& memory,
        bool sends
    )
        : Gradients{parameters, expected_ready_order(parameters), rank, memory.device()},
          sends_{sends}, are_views_{options.gradient_as_bucket_view},
          only_existing_{options.find_unused || options.static_graph},
          joined_{options.joined_gradients}, limits_{bucket_limits(options)},
          is_sparse_dense_{options.sparse_as_dense},
          sparse_{parameters_, rank, size, is_sparse_dense_}, dense_{in_buckets(trained_)},
          layout_{layout_of(rebuilds(options) && sends ? one_bucket() : limits_, memory)},
          backup_{needs_backup() ? layout_of(one_bucket(), memory) : BucketLayout{}},
          places_(parameters_.size()), backup_places_(parameters_.size()),
          in_place_(parameters_.size()), packed_(parameters_.size()),
          is_packed_(parameters_.size()), is_of_others_(parameters_.size()) {
        find_places();
        find_places(backup_places_, backup_);
        for (std::size_t const i : trained_) {
            if (places_[i] == nullptr) {
                check_value(parameters_, i, memory.id());
            }
            if (DType const dtype = parameters_[i].value().dtype(); !is_floating_point(dtype)) {
                throw ContractViolation{concat(
                    describe(i),
                    " is of ",
                    name_of(dtype),
                    ": gradients are averaged, which needs floating point; set its requires_grad to "
                    "false, or make it a buffer"
                )};
            }
            if (travels_as_rows(i)) {
                sparse_.require_no_dense(i);
            } else if (AnyView const gradient = parameters_[i].grad()) {
                require_fit(i, gradient);
            }
            if (are_views_ && !sparse_.has(i) && !parameters_[i].can_set_grad()) {
                throw ContractViolation{concat(
                    "gradients as bucket views need parameter_traits::set_grad, which ",
                    describe(i),
                    " has not; specialise it, or turn gradient_as_bucket_view off"
                )};
            }
        }
    }
    ~BucketGradients() override {
        for (std::size_t const i : trained_) {
            try {
                if (parameters_[i].can_release_grad() && holds(i)) {
                    parameters_[i].release_grad();
                }
            } catch (...) { // NOLINT(bugprone-empty-catch): nobody may read what ends
            }
        }
    }

    [[nodiscard]] std::vector<Bucket> const& buckets() const noexcept override {
        return layout_.buckets();
    }
    [[nodiscard]] SparseGradients* sparse() noexcept override {
        return sparse_.empty() || is_sparse_dense_ ? nullptr : &sparse_;
    }
    [[nodiscard]] std::size_t without_bucket() const noexcept override {
        return trained_.size() - dense_.size();
    }
    [[nodiscard]] bool receive_averages() const noexcept override { return sends_; }
    /// If parameters may be unused, one without a gradient stays without until it gets one.
    void take() override {
        if (!are_views_) {
            return;
        }
        for (std::size_t const i : dense_) {
            AnyView const gradient = parameters_[i].grad();
            bool const is_there = has(i);
            if (gradient) {
                device().copy(gradient, *places_[i]);
            } else if (is_there) {
                sparse_.scatter(i, *places_[i]);
            }
            if (is_there || !only_existing_) {
                hand_back(i);
            }
        }
        device().finish();
    }
    [[nodiscard]] bool hold_any() override {
        std::erase_if(trained_, [&](std::size_t i) { return !holds(i); });
        return !trained_.empty();
    }
    void for_each_arena(std::function<void(Arena const&)> const& f) const override {
        layout_.for_each_arena(f);
    }

    [[nodiscard]] bool copies_without_need() const override {
        return !are_views_ && std::any_of(dense_.begin(), dense_.end(), [&](std::size_t i) {
            return in_place_[i] == nullptr && (!stays_in_place_ || is_packed_[i]) &&
                   parameters_[i].can_set_grad() && has(i) && !is_rows(i) && !is_resident(i);
        });
    }
    void leave_in_place() override {
        stays_in_place_ = true;
        pieces_.resize(trained_.size());
    }
    [[nodiscard]] BufferPieces
    pieces_of(std::size_t bucket, std::size_t first, std::size_t last) override {
        auto const& [buffer, parameters, views] = buckets()[bucket];
        bool is_any_in_place = false;
        for (std::size_t k = first; k < last; ++k) {
            is_any_in_place = is_any_in_place || in_place_[parameters[k]] != nullptr;
        }
        if (has_moved_) { // one that is copied may lie in the memory of an earlier bucket's
            require_apart();
        }
        if (!is_any_in_place) {
            return {};
        }
        // Each bucket has as many as it has parameters, and each run of it those of its own.
        BufferPiece* const begin = pieces_.data() + first_piece_[bucket] + first;
        BufferPiece* end = begin;
        std::size_t bytes = 0;
        for (std::size_t k = first; k < last; ++k) {
            if (views[k].numel() != 0) {
                bytes += views[k].numel() * size_of(buffer.dtype);
                void const* const gradient = in_place_[parameters[k]];
                *end = BufferPiece::of(gradient != nullptr ? gradient : views[k].data(), bytes);
                ++end;
            }
        }
        void* const out = are_views_ ? views[first].data() : nullptr;
        return {begin, static_cast<std::size_t>(end - begin), buffer.dtype, out};
    }

    void pack(std::size_t i, double factor) override {
        if (travels_as_rows(i) && sends_) {
            factor == 0.0 ? sparse_.zero(i) : sparse_.pack(i);
            return;
        }
        AnyView const gradient = parameters_[i].grad();
        if (gradient) {
            require_fit(i, gradient);
            if (sparse_.has(i) && parameters_[i].sparse_grad().values.numel() != 0) {
                throw ContractViolation{concat(
                    describe(i),
                    " has a dense gradient and a sparse one; let set_grad drop the rows, and "
                    "a pass add to what is there"
                )};
            }
        } else if (!sparse_.has(i) && parameters_[i].sparse_grad().values.numel() != 0) {
            throw ContractViolation{concat(
                describe(i),
                " has a sparse gradient, but its gradients were dense when the model was made; let is_sparse "
                "return true (a module: name it in DataParallelOptions::sparse), or give it a dense one"
            )};
        }
        if (!sends_) {
            return;
        }
        if (factor == 0.0 || (!gradient && !sparse_.has(i))) {
            zero(i);
            return;
        }
        if (!gradient) {
            in_place_[i] = nullptr;
            sparse_.scatter(i, *places_[i]);
            device().scale_copy(*places_[i], factor, *places_[i]);
            return;
        }
        bool const stays = is_in_place(gradient, factor, *places_[i]);
        // Averages of views overwrite no gradient, so there only those that stay have to be apart.
        if (are_views_ ? stays : stays_in_place_) {
            has_moved_ = has_moved_ || packed_[i] != gradient.data();
            packed_[i] = gradient.data();
            is_packed_[i] = true;
        }
        in_place_[i] = stays ? gradient.data() : nullptr;
        if (!stays) {
            device().scale_copy(gradient, factor, *places_[i]);
        }
    }
    void zero(std::size_t i) override {
        if (travels_as_rows(i)) {
            sparse_.zero(i);
            return;
        }
        in_place_[i] = nullptr;
        is_packed_[i] = false;
        device().fill_zero(*places_[i]);
    }

    void begin(bool has_joined) override {
        has_joined_ = has_joined;
        for (std::size_t const i : trained_) {
            in_place_[i] = nullptr;
            is_packed_[i] = false;
        }
        if (!leaves_untouched() || !sends_) {
            return;
        }
        for (std::size_t const i : dense_) {
            if (is_resident(i)) {
                device().copy(*places_[i], *backup_places_[i]);
            }
        }
        device().submit(); // before zeros replace them
    }
    [[nodiscard]] JoinedGradients joined_gradients() const noexcept override { return joined_; }
    void follow_others(std::size_t i, OtherGradient other) override {
        is_of_others_[i] = has_joined_;
        if (is_rows(i)) {
            bool const is_there = has(i);
            if (is_there && other == OtherGradient::none && parameters_[i].can_release_grad()) {
                parameters_[i].release_grad();
            } else if (is_there || other == OtherGradient::zeros) {
                clear_rows(i);
            }
            return;
        }
        follow_other(parameters_[i], other, device(), [&] {
            zero(i);
            return *places_[i];
        });
    }
    void complete() override {
        for (std::size_t k = 0; leaves_untouched() && sends_ && k < dense_.size(); ++k) {
            if (std::size_t const i = dense_[k]; is_resident(i)) {
                device().copy(*backup_places_[i], *places_[i]);
            }
        }
    }
    /// Zeroes the averages that this rank got after it had joined, unless they are kept. Enqueues.
    void end_guard() override {
        for (std::size_t i = 0; i < is_of_others_.size(); ++i) {
            if (is_of_others_[i] && joined_ == JoinedGradients::zeroed_at_end) {
                if (!is_rows(i)) {
                    clear_gradient(parameters_[i], device());
                } else if (has(i)) {
                    clear_rows(i);
                }
            }
            is_of_others_[i] = false;
        }
        device().finish();
    }

    void deliver(std::size_t i) override {
        if (leaves_untouched()) {
            return;
        }
        is_of_others_[i] = has_joined_;
        if (travels_as_rows(i)) {
            sparse_.deliver(i);
            return;
        }
        AnyParameter const& parameter = parameters_[i];
        AnyView const& view = *places_[i];
        AnyView const gradient = parameter.grad();
        if (in_place_[i] != nullptr && (!gradient || gradient.data() != in_place_[i])) {
            throw ContractViolation{concat(
                "the gradient of ",
                describe(i),
                " has other memory than when it was ready, but it is averaged where it lies; keep its memory until the "
                "backward pass of the reducer has ended"
            )};
        }
        if (gradient) {
            require_fit(i, gradient);
            if ((in_place_[i] != nullptr && !are_views_) || gradient.data() == view.data()) {
                return;
            }
        }
        if (gradient && !are_views_) {
            device().copy(view, gradient);
        } else if (parameter.can_set_grad() || sparse_.has(i)) {
            hand_back(i);
        } else {
            throw ContractViolation{concat(
                describe(i),
                " has no gradient to receive the average in; give it a zero gradient before the "
                "first iteration, or specialise parameter_traits::set_grad"
            )};
        }
    }
    void rebuild(std::vector<std::size_t> order) override {
        std::vector<std::size_t> residents;
        for (std::size_t const i : dense_) {
            if (is_resident(i)) {
                residents.push_back(i);
            }
        }
        trained_ = std::move(order);
        dense_ = in_buckets(trained_);
        if (!dense_.empty()) {
            layout_.rebuild(parameters_, dense_, limits_);
        }
        find_places();
        for (std::size_t const i : residents) {
            hand_back(i);
        }
    }

private:
    [[nodiscard]] std::vector<std::size_t> in_buckets(std::vector<std::size_t> list) const {
        std::erase_if(list, [&](std::size_t i) {
            return travels_as_rows(i) || (!sends_ && !are_views_);
        });
        return list;
    }
    [[nodiscard]] BucketLayout
    layout_of(std::vector<std::size_t> const& limits, BufferMemory const& memory) const {
        return dense_.empty() && !trained_.empty()
                   ? BucketLayout{}
                   : BucketLayout{parameters_, dense_, limits, memory};
    }

    static std::vector<std::size_t> one_bucket() { return {static_cast<std::size_t>(-1)}; }

    [[nodiscard]] bool needs_backup() const {
        return joined_ == JoinedGradients::untouched && sends_ &&
               std::any_of(dense_.begin(), dense_.end(), [&](std::size_t i) {
                   return parameters_[i].can_set_grad() || sparse_.has(i);
               });
    }

    static void find_places(std::vector<AnyView const*>& places, BucketLayout const& layout) {
        for (Bucket const& bucket : layout.buckets()) {
            for (std::size_t k = 0; k < bucket.parameters.size(); ++k) {
                places[bucket.parameters[k]] = &bucket.views[k];
            }
        }
    }
    void find_places() {
        find_places(places_, layout_);
        for (std::size_t b = 0; b < buckets().size(); ++b) {
            for (std::size_t const i : buckets()[b].parameters) {
                bucket_of_[i] = b;
            }
        }
        for (std::size_t const i : trained_) {
            if (places_[i] == nullptr) {
                bucket_of_[i] = buckets().size();
            }
        }
        first_piece_.resize(buckets().size());
        for (std::size_t b = 0, first = 0; b < buckets().size(); ++b) {
            first_piece_[b] = first;
            first += buckets()[b].parameters.size();
        }
    }

    /// Whether the sum can read a gradient where it is: it is laid out as in the bucket, and not yet to be multiplied.
    [[nodiscard]] bool
    is_in_place(AnyView const& gradient, double factor, AnyView const& place) const noexcept {
        return stays_in_place_ && factor == 1.0 && !leaves_untouched() &&
               gradient.strides() == place.strides() && gradient.numel() != 0 &&
               !is_in_buckets(gradient);
    }
    /// Whether a gradient lies in a bucket: at its place, or at that of another one, where the sum may write first.
    [[nodiscard]] bool is_in_buckets(AnyView const& gradient) const noexcept {
        AddressRange const range = AddressRange::of(gradient);
        bool is_there = false;
        layout_.for_each_arena([&](Arena const& arena) {
            is_there = is_there || range.meets({arena.data(), arena.data() + arena.bytes()});
        });
        return is_there;
    }
    /// A gradient that is summed in place is apart from all others. Called before a bucket leaves, if some have other
    /// memory than in the iteration before. @throws ContractViolation  two of this iteration share memory.
    void require_apart() {
        auto const shared = find_shared(trained_.size(), [&](std::size_t k) {
            return is_packed_[trained_[k]] ? parameters_[trained_[k]].grad() : AnyView{};
        });
        if (shared) {
            throw ContractViolation{concat(
                "the gradients of ",
                describe(trained_[shared->first]),
                " and ",
                describe(trained_[shared->second]),
                " share memory, but each is averaged where it lies; give each one its own"
            )};
        }
        // The others' memory may have gone to one of these, so they are compared when they come again.
        for (std::size_t const i : trained_) {
            packed_[i] = is_packed_[i] ? packed_[i] : nullptr;
        }
        has_moved_ = false;
    }

    [[nodiscard]] bool leaves_untouched() const noexcept {
        return WithoutPass{.has_joined = has_joined_, .joined = joined_}.is_untouched();
    }
    /// Whether the gradient lives here.
    [[nodiscard]] bool holds(std::size_t i) {
        return travels_as_rows(i) ? sparse_.is_resident(i) : is_resident(i);
    }
    /// Whether it lives in its bucket.
    [[nodiscard]] bool is_resident(std::size_t i) const {
        AnyView const gradient = parameters_[i].grad();
        return places_[i] != nullptr &&
               (gradient ? gradient.data() == places_[i]->data()
                         : sparse_.has(i) && sparse_.is_all_of(i, *places_[i]));
    }
    /// Whether gradient `i` is rows that travel as such.
    [[nodiscard]] bool travels_as_rows(std::size_t i) const noexcept {
        return sparse_.has(i) && !is_sparse_dense_;
    }
    /// Whether gradient `i` is rows now, or would be.
    [[nodiscard]] bool is_rows(std::size_t i) const {
        return travels_as_rows(i) || (sparse_.has(i) && !parameters_[i].grad());
    }
    /// Makes a gradient of rows zero.
    void clear_rows(std::size_t i) {
        if (travels_as_rows(i)) {
            sparse_.clear(i);
        } else {
            zero(i);
            hand_back(i);
        }
    }
    /// Makes the view in the bucket gradient `i`.
    void hand_back(std::size_t i) {
        if (parameters_[i].can_set_grad()) {
            parameters_[i].set_grad(*places_[i]);
        } else {
            sparse_.deliver_all(i, *places_[i]);
        }
    }

    void require_fit(std::size_t i, AnyView const& gradient) const {
        check_gradient(parameters_, i, gradient);
        bool const fits = places_[i] != nullptr ? is_like(gradient, *places_[i])
                                                : is_like(gradient, like_gradient(parameters_, i));
        if (!fits) {
            refuse(i, gradient);
        }
    }
    [[noreturn]] void refuse(std::size_t i, AnyView const& gradient) const {
        AnyView const value = parameters_[i].value();
        AnyView const view = places_[i] != nullptr ? *places_[i] : like_gradient(parameters_, i);
        bool const are_together = gradient.device() == view.device();
        bool const is_as_value = view.dtype() == value.dtype();
        bool const comes_late =
            is_as_value && is_half_precision(value.dtype()) && gradient.dtype() == DType::f32;
        auto const text = [&](AnyView const& tensor) {
            return to_text(tensor) + (are_together ? "" : " on " + to_text(tensor.device()));
        };
        throw ContractViolation{concat(
            "the gradient of ",
            describe(i),
            " is ",
            text(gradient),
            is_as_value ? ", but its value is " : ", but was to be ",
            text(view),
            "; both need the same dtype, extents and device",
            comes_late ? ", or let parameter_traits::grad_dtype say f32 before there is one" : ""
        )};
    }

    bool sends_;
    bool are_views_;
    bool only_existing_;
    JoinedGradients joined_;
    bool has_joined_ = false;     ///< in this iteration
    bool stays_in_place_ = false; ///< what the sum can read there
    std::vector<std::size_t> limits_;
    bool is_sparse_dense_; ///< gradients that are rows travel in buckets
    SparseGradients sparse_;
    std::vector<std::size_t> dense_; ///< the trained ones that travel in buckets, in the same order
    BucketLayout layout_;
    /// Holds gradients that live in buckets while the buckets carry the averages of others. All
    /// ranks reduce in the same buckets, because communicators have registered them.
    BucketLayout backup_;
    std::vector<AnyView const*> places_;        ///< per parameter; null: it lies in no bucket
    std::vector<AnyView const*> backup_places_; ///< per parameter
    std::vector<void const*> in_place_; ///< per parameter: its gradient; null: it is in the bucket
    std::vector<BufferPiece> pieces_;   ///< as many as trained parameters, in the order of buckets
    std::vector<std::size_t> first_piece_; ///< per bucket
    std::vector<void const*>
        packed_; ///< per parameter: where its gradient was, apart from the others here
    std::vector<bool> is_packed_;    ///< per parameter: in this iteration
    bool has_moved_ = false;         ///< since all were known to be apart
    std::vector<bool> is_of_others_; ///< per parameter: written last after this rank joined
};

JOINABLE_DEFINITION std::unique_ptr<Gradients> gradients_in_buckets(
    ParameterList parameters,
    BucketOptions const& options,
    int rank,
    int size,
    BufferMemory const& memory,
    bool sends
) {
    return std::make_unique<BucketGradients>(
        std::move(parameters), options, rank, size, memory, sends
    );
}

}}} // namespace joinable::v0::detail
