// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <joinable/bucket/bucket.hpp>
#include <joinable/bucket/memory.hpp>
#include <joinable/bucket/options.hpp>
#include <joinable/bucket/without_pass.hpp>
#include <joinable/config.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// When gradients move into buckets: in the constructor, or in take_gradients() after all ranks
/// have constructed theirs.
enum class TakeGradients : bool { now, later };

/// The gradients of a model and their places in buckets: packs, delivers and moves them.
/// Independent of communicators and iterations; all members are local. Gradients on a device must
/// keep their memory from pack() until device().submit().
class Gradients {
public:
    /// Buckets are in `memory`; all gradients must be on the same device.
    /// @throws ContractViolation  see Reducer's constructor. Nothing was changed.
    Gradients(
        ParameterList parameters,
        BucketOptions const& options,
        int rank,
        BufferMemory const& memory = {},
        TakeGradients take_them = TakeGradients::now
    );

    Gradients(Gradients const&) = delete; // places refer to the layout
    Gradients& operator=(Gradients const&) = delete;
    /// Releases gradients that lie in the buckets, where the parameter's traits can.
    ~Gradients();

    /// Moves gradients into the buckets, if they are to be views. If parameters may be unused, one
    /// without a gradient stays without until it gets one.
    void take() {
        if (are_views_) {
            move_into_buckets(only_existing_);
        }
    }

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] ParameterList const& parameters() const noexcept { return parameters_; }
    /// The trained parameters, in the order in which buckets were cut.
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

    /// Copies gradient `i`, times `factor`, into its bucket in one pass. Writes zeros if there is
    /// no gradient or the factor is 0, because a mean over no samples is NaN. Complete after
    /// device().submit().
    void pack(std::size_t i, double factor) const;
    void zero(std::size_t i) const { device().fill_zero(*places_[i].view); }
    [[nodiscard]] bool has(std::size_t i) const { return bool{parameters_[i].grad()}; }

    [[nodiscard]] Device& device() const noexcept { return memory_.device(); }

    /// Begins an iteration of a rank that has joined or has not.
    void begin(bool has_joined);
    [[nodiscard]] JoinedGradients joined_gradients() const noexcept { return joined_; }
    /// On a rank that ran no pass: makes gradient `i`, which no rank used, what it is on ranks with
    /// a pass. See follow_other().
    void follow_others(std::size_t i, OtherGradient other);
    /// Ends an iteration after all averages are delivered.
    void complete() const;
    /// Ends the guard, in any way: zeroes the averages that this rank got after it had joined, unless they
    /// are kept. Enqueues.
    void end_guard();

    /// Makes the average in the bucket gradient `i`: copies it or sets a view. Complete after
    /// device().finish().
    void deliver(std::size_t i);

    /// Cuts the buckets again, by `order`. Gradients that live in them move along.
    void rebuild(std::vector<std::size_t> order);

    /// The name of this rank's parameter `i` in error texts.
    [[nodiscard]] std::string describe(std::size_t i) const;

private:
    struct Place {
        AnyView const* view = nullptr; ///< null: the parameter is not trained
        std::size_t bucket = 0;
    };

    static std::vector<std::size_t> one_bucket() { return {static_cast<std::size_t>(-1)}; }

    [[nodiscard]] bool needs_backup() const;

    static void find_places(std::vector<Place>& places, BucketLayout const& layout);

    [[nodiscard]] bool leaves_untouched() const noexcept {
        return WithoutPass{.has_joined = has_joined_, .joined = joined_}.is_untouched();
    }
    /// Whether the gradient lives in its bucket.
    [[nodiscard]] bool is_resident(std::size_t i) const;

    void move_into_buckets(bool existing_only);

    void require_fit(std::size_t i, AnyView const& gradient) const;

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
    /// Holds gradients that live in buckets while the buckets carry the averages of others. All
    /// ranks reduce in the same buckets, because communicators have registered them.
    BucketLayout backup_;
    std::vector<Place> places_;        ///< per parameter
    std::vector<Place> backup_places_; ///< per parameter
    std::vector<bool> is_of_others_;   ///< per parameter: written last after this rank joined
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/bucket/detail/gradients.ipp>
#endif
