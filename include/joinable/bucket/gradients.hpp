// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <joinable/bucket/bucket.hpp>
#include <joinable/bucket/detail/sparse_gradients.hpp>
#include <joinable/bucket/memory.hpp>
#include <joinable/bucket/options.hpp>
#include <joinable/bucket/without_pass.hpp>
#include <joinable/communicator/pieces.hpp>
#include <joinable/config.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/device.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 { namespace detail {

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
    /// Those that are rows. Null: there are none.
    [[nodiscard]] virtual SparseGradients* sparse() noexcept { return nullptr; }
    /// How many trained parameters lie in no bucket: bucket_of(i) is buckets().size().
    [[nodiscard]] virtual std::size_t without_bucket() const noexcept { return 0; }
    /// In launch order. A bucket without memory gets it with its first gradient.
    [[nodiscard]] virtual std::vector<Bucket> const& buckets() const noexcept = 0;
    [[nodiscard]] bool has(std::size_t i) const {
        return bool{elements_of_gradient(parameters_[i])};
    }
    [[nodiscard]] Device& device() const noexcept { return *device_; }
    /// The name of this rank's parameter `i` in error texts.
    [[nodiscard]] std::string describe(std::size_t i) const;

    /// Whether averages come back into the gradients. Else they go to owners, and a parameter that a pass does
    /// not use counts as zeros; or gradients stay where they are.
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
    /// After the last iteration: whether a gradient lives in them. Forgets parameters of which none does: they may end.
    [[nodiscard]] virtual bool hold_any() { return false; }
    /// Whether the last iteration copied gradients into buckets that could be views of them.
    [[nodiscard]] virtual bool copies_without_need() const { return false; }
    /// The sum reads gradients where they lie, and writes the averages there, or into the buckets of which gradients are
    /// to be views. pack() copies only zeros, and gradients of another layout, with a factor or in memory of the buckets.
    /// Before the first iteration.
    virtual void leave_in_place() {}
    /// Where the parameters [first, last) of a bucket lie, when all are packed, and where their averages go; empty: in the
    /// bucket. The list is kept until the next iteration.
    [[nodiscard]] virtual BufferPieces
    pieces_of(std::size_t /*bucket*/, std::size_t /*first*/, std::size_t /*last*/) {
        return {};
    }
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

/// Gradients in buckets with memory of their own, in `memory`, or copied there, where they receive averages. Each must be on
/// a device of `memory`. The result releases those that lie in the buckets, where the parameter's traits can.
/// Without `sends` they stay as they are, and only those that are to be views of buckets have memory here.
/// @throws ContractViolation  see Reducer's constructor. Nothing was changed.
[[nodiscard]] std::unique_ptr<Gradients> gradients_in_buckets(
    ParameterList parameters,
    BucketOptions const& options,
    int rank,
    int size,
    BufferMemory const& memory,
    bool sends = true
);

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/bucket/impl/gradients.ipp>
#endif
