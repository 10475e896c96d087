// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <joinable/bucket/bucket.hpp>
#include <joinable/bucket/memory.hpp>
#include <joinable/bucket/options.hpp>
#include <joinable/bucket/without_pass.hpp>
#include <joinable/config.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/device.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// When gradients move into buckets: in the constructor, or in take_gradients() after all ranks
/// have constructed theirs.
enum class TakeGradients : bool { now, later };

/// The gradients of a model and their places in buckets: packs, delivers and moves them.
/// Independent of communicators and iterations; all members are local. Gradients on a device must
/// keep their memory from pack() until submit().
class Gradients {
public:
    Gradients(Gradients const&) = delete;
    Gradients& operator=(Gradients const&) = delete;
    virtual ~Gradients() = default;

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] ParameterList const& parameters() const noexcept { return parameters_; }
    /// The trained parameters, in the order in which buckets were cut.
    [[nodiscard]] std::vector<std::size_t> const& trained() const noexcept { return trained_; }
    [[nodiscard]] bool is_trained(std::size_t i) const noexcept { return bucket_of_[i] != nowhere; }
    [[nodiscard]] std::size_t bucket_of(std::size_t i) const noexcept { return bucket_of_[i]; }
    /// In launch order. A bucket without memory gets it with its first gradient.
    [[nodiscard]] virtual std::vector<Bucket> const& buckets() const noexcept = 0;
    [[nodiscard]] bool has(std::size_t i) const { return bool{parameters_[i].grad()}; }
    [[nodiscard]] Device& device() const noexcept { return *device_; }
    /// The name of this rank's parameter `i` in error texts.
    [[nodiscard]] std::string describe(std::size_t i) const;

    /// Whether averages come back into the gradients. Else they go to owners, and a parameter that a pass does
    /// not use counts as zeros.
    [[nodiscard]] virtual bool receive_averages() const noexcept { return true; }

    // -- an iteration ------------------------------------------------------------------------------

    /// Begins an iteration of a rank that has joined or has not.
    virtual void begin(bool has_joined) = 0;
    /// @throws ContractViolation  gradient `i`, which a pass has marked, is missing and cannot be received.
    virtual void require_marked(std::size_t /*i*/) const {}
    /// Copies gradient `i`, times `factor`, into its bucket in one pass. Writes zeros if there is
    /// no gradient or the factor is 0, because a mean over no samples is NaN. Complete after
    /// submit().
    virtual void pack(std::size_t i, double factor) = 0;
    virtual void zero(std::size_t i) = 0;
    /// Starts to copy what was packed of these parameters.
    virtual void submit(std::vector<std::size_t> const& /*parameters*/) { device().submit(); }
    /// Makes the average in the bucket gradient `i`: copies it or sets a view. Complete after
    /// device().finish().
    virtual void deliver(std::size_t /*i*/) {}
    /// Ends an iteration after all averages are delivered.
    virtual void complete() = 0;
    /// Ends the guard, in any way.
    virtual void end_guard() = 0;

    // -- memory of buckets -------------------------------------------------------------------------

    /// Whether a bucket has no memory and gets it best from a bucket that gives it back.
    [[nodiscard]] virtual bool waits_for_memory(std::size_t /*bucket*/) const { return false; }
    /// The sum of a bucket was taken; its memory is left as it is until another bucket gets it.
    virtual void give_back(std::size_t /*bucket*/) {}

    // -- if averages are received ------------------------------------------------------------------

    /// Moves gradients into the buckets, if they are to be views.
    virtual void take() {}
    [[nodiscard]] virtual JoinedGradients joined_gradients() const noexcept {
        return JoinedGradients::zeroed_at_end;
    }
    /// On a rank that ran no pass: makes gradient `i`, which no rank used, what it is on ranks with
    /// a pass. See follow_other().
    virtual void follow_others(std::size_t /*i*/, OtherGradient /*other*/) {}
    /// Cuts the buckets again, by `order`. Gradients that live in them move along.
    virtual void rebuild(std::vector<std::size_t> /*order*/) {}
    /// Calls f(arena) for each arena that lives as long as the buckets.
    virtual void for_each_arena(std::function<void(Arena const&)> const& /*f*/) const {}

protected:
    static constexpr std::size_t nowhere = static_cast<std::size_t>(-1);

    Gradients(ParameterList parameters, std::vector<std::size_t> trained, int rank, Device& device)
        : parameters_{std::move(parameters)}, trained_{std::move(trained)},
          bucket_of_(parameters_.size(), nowhere), rank_{rank}, device_{&device} {}

    ParameterList parameters_;
    std::vector<std::size_t> trained_;
    std::vector<std::size_t> bucket_of_; ///< per parameter; nowhere if it is not trained

private:
    int rank_;
    Device* device_;
};

/// Gradients in buckets with memory of their own, or copied there, where they receive averages.
class BucketGradients final : public Gradients {
public:
    /// Buckets are in `memory`; all gradients must be on the same device.
    /// @throws ContractViolation  see Reducer's constructor. Nothing was changed.
    BucketGradients(
        ParameterList parameters,
        BucketOptions const& options,
        int rank,
        BufferMemory const& memory = {},
        TakeGradients take_them = TakeGradients::now
    );
    /// Releases gradients that lie in the buckets, where the parameter's traits can.
    ~BucketGradients() override { end(); }
    void end() noexcept;

    [[nodiscard]] std::vector<Bucket> const& buckets() const noexcept override {
        return layout_.buckets();
    }
    /// If parameters may be unused, one without a gradient stays without until it gets one.
    void take() override {
        if (are_views_) {
            move_into_buckets(only_existing_);
        }
    }
    void for_each_arena(std::function<void(Arena const&)> const& f) const override {
        layout_.for_each_arena(f);
    }

    void pack(std::size_t i, double factor) override { pack_now(i, factor); }
    void pack_now(std::size_t i, double factor);
    void zero(std::size_t i) override { device().fill_zero(*places_[i]); }

    void begin(bool has_joined) override { begin_now(has_joined); }
    void begin_now(bool has_joined);
    [[nodiscard]] JoinedGradients joined_gradients() const noexcept override { return joined_; }
    void follow_others(std::size_t i, OtherGradient other) override { follow_others_now(i, other); }
    void follow_others_now(std::size_t i, OtherGradient other);
    void complete() override { complete_now(); }
    void complete_now();
    /// Zeroes the averages that this rank got after it had joined, unless they are kept. Enqueues.
    void end_guard() override { end_guard_now(); }
    void end_guard_now();

    void deliver(std::size_t i) override { deliver_now(i); }
    void deliver_now(std::size_t i);
    void rebuild(std::vector<std::size_t> order) override { rebuild_now(std::move(order)); }
    void rebuild_now(std::vector<std::size_t> order);

private:
    static std::vector<std::size_t> one_bucket() { return {static_cast<std::size_t>(-1)}; }

    [[nodiscard]] bool needs_backup() const;

    static void find_places(std::vector<AnyView const*>& places, BucketLayout const& layout);
    void find_places();

    [[nodiscard]] bool leaves_untouched() const noexcept {
        return WithoutPass{.has_joined = has_joined_, .joined = joined_}.is_untouched();
    }
    /// Whether the gradient lives in its bucket.
    [[nodiscard]] bool is_resident(std::size_t i) const;

    void move_into_buckets(bool existing_only);

    void require_fit(std::size_t i, AnyView const& gradient) const;

    bool are_views_;
    bool only_existing_;
    JoinedGradients joined_;
    bool has_joined_ = false; ///< in this iteration
    std::vector<std::size_t> limits_;
    BucketLayout layout_;
    /// Holds gradients that live in buckets while the buckets carry the averages of others. All
    /// ranks reduce in the same buckets, because communicators have registered them.
    BucketLayout backup_;
    std::vector<AnyView const*> places_;        ///< per parameter; null: it is not trained
    std::vector<AnyView const*> backup_places_; ///< per parameter
    std::vector<bool> is_of_others_; ///< per parameter: written last after this rank joined
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/bucket/gradients.ipp>
#endif
