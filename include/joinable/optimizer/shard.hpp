// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/config.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/copy_run.hpp>
#include <joinable/device/device.hpp>
#include <joinable/device/host.hpp>
#include <joinable/device/scratch.hpp>
#include <joinable/device/update.hpp>
#include <joinable/optimizer/before_step.hpp>
#include <joinable/optimizer/local_optimizer.hpp>
#include <joinable/optimizer/partition.hpp>
#include <joinable/optimizer/state_arrays.hpp>
#include <joinable/optimizer/stepped_gradients.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/overlap.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// One rank's view of a bucket: its pieces, their state, and the copies between parameters,
/// gradients and the bucket. In the bucket a parameter lies whole and dense, in the order of its
/// value if that is dense. All members are local. `parameters` is the list that the bucket was cut
/// from. Parameters, state and buckets are in the memory of one device, and members that read or
/// write them there leave requests that its submit() starts.
class OptimizerShard {
public:
    /// `names` is the number of state arrays. With `has_masters`, values of 16 bits are stepped as
    /// copies of 32 bits. The device must outlive the shard.
    OptimizerShard(
        ShardBucket bucket,
        int rank,
        std::size_t names,
        bool has_masters,
        Sharding sharding,
        Device& device = detail::the_host()
    );

    /// The same shard with zeroed state, for a rule with another number of state arrays.
    [[nodiscard]] OptimizerShard with_state(std::size_t names) const {
        return {bucket_, rank_, names, has_masters_, sharding_, *device_};
    }

    [[nodiscard]] Device& device() const noexcept { return *device_; }
    [[nodiscard]] ShardBucket const& bucket() const noexcept { return bucket_; }
    [[nodiscard]] StateArrays const& state() const noexcept { return state_; }
    [[nodiscard]] std::span<ShardPiece const> own() const noexcept {
        return std::span{bucket_.pieces}.subspan(first_, own_);
    }
    /// The pieces that this rank steps: its own, or all with Sharding::none.
    [[nodiscard]] std::span<ShardPiece const> kept() const noexcept {
        return keeps_all() ? std::span{bucket_.pieces} : own();
    }
    [[nodiscard]] bool keeps_all() const noexcept { return sharding_ == Sharding::none; }
    /// The element of the arrays at which the state of a kept piece begins.
    [[nodiscard]] std::size_t place_of_state(ShardPiece const& piece) const noexcept {
        return piece.offset - (keeps_all() ? 0 : part_offset());
    }
    /// The number of elements whose state rank `rank` keeps.
    [[nodiscard]] std::size_t kept_count(std::size_t rank) const noexcept {
        return keeps_all() ? bucket_.count() : bucket_.counts[rank];
    }
    /// The size of one element of values and gradients, in bytes.
    [[nodiscard]] std::size_t element() const noexcept { return size_of(bucket_.dtype); }
    [[nodiscard]] std::size_t bucket_bytes() const noexcept { return bucket_.count() * element(); }
    /// The number of elements in this rank's part.
    [[nodiscard]] std::size_t part() const noexcept {
        return bucket_.counts[static_cast<std::size_t>(rank_)];
    }
    /// The element at which this rank's part begins.
    [[nodiscard]] std::size_t part_offset() const noexcept { return bucket_.offset_of(rank_); }
    /// The reduced gradients of this rank's part.
    [[nodiscard]] std::byte* gradients() const noexcept { return gradients_.data(); }
    [[nodiscard]] bool reduces() const noexcept { return gradients_.bytes() != 0; }

    /// A dense view of a parameter's elements, which begin at `data` in a bucket or in scratch
    /// memory.
    [[nodiscard]] static AnyView place_of(AnyView const& value, std::byte* data);

    /// Writes all gradients into a bucket, each element times `factor`. Writes zeros if the factor
    /// is 0 or there is no gradient.
    void pack_gradients(ParameterList const& parameters, double factor, std::byte* bucket) const;
    /// Writes the gradient of the parameter that begins with piece `k`.
    void pack_gradient(
        ParameterList const& parameters, std::size_t k, double factor, std::byte* bucket
    ) const;

    /// Appends the existing gradients of the pieces that this rank steps. `shift` is added to
    /// indices.
    void append_gradients(
        ParameterList const& parameters,
        detail::SteppedGradients& gradients,
        std::size_t shift,
        std::vector<ShardGradient>& list
    ) const;

    /// Steps those of the given pieces, which this rank keeps, that have gradients; with `is_packed` only those that do
    /// not travel alone. `steps` counts per parameter.
    template <class Rule>
    void step(
        std::span<ShardPiece const> pieces,
        bool is_packed,
        ParameterList const& parameters,
        detail::SteppedGradients& stepped,
        Rule const& rule,
        std::vector<std::uint64_t>& steps,
        detail::Scratch (&scratch)[2]
    ) const {
        DeviceRule const erased = detail::device_rule(rule);
        if (bucket_.is_rows) {
            step_rows(parameters, stepped, erased, steps, scratch[0]);
            return;
        }
        bool const is_host = detail::is_on_host(*device_);
        std::vector<DeviceUpdate> updates; // one launch on a device
        auto const run = [&] {
            if (!updates.empty()) {
                device_->update(erased, updates);
                updates.clear();
            }
        };
        for (ShardPiece const& piece : pieces) {
            if (is_packed && travels_alone(parameters, piece)) {
                continue;
            }
            AnyView const value = parameters[piece.parameter].value();
            std::byte const* gradients = reduces() ? gradient_at(piece) : nullptr;
            bool is_moved = !is_dense(value); // then scratch memory is used until it has run
            if (!reduces()) {
                AnyView const gradient = stepped.of(parameters, piece.parameter);
                if (!gradient) {
                    continue;
                }
                check_gradient_of(parameters, piece.parameter, value, gradient);
                is_moved = !is_laid_out_alike(value, gradient);
                gradients = elements_of(value, gradient, piece, scratch[0]);
            }
            std::byte* const values = elements_of(value, value, piece, scratch[1]);
            check_masters(parameters, piece, values);
            DeviceUpdate const update = state_.update(
                values, gradients, piece.size, place_of_state(piece), ++steps[piece.parameter]
            );
            if (is_host) {
                device_->update(erased, {&update, 1});
            } else {
                updates.push_back(update);
            }
            if (is_moved) {
                run();
            }
            if (!is_dense(value)) {
                device_->copy(place_of(value, values - piece.begin * element()), value);
                device_->submit();
            }
        }
        run();
    }

    /// Steps the parameters that this rank keeps and that have gradients by an engine's optimizer.
    /// `shift` is added to indices; `steps` counts per parameter. On a device it works in the order
    /// of the engine's stream.
    template <LocalOptimizer Optimizer>
    void step_whole(
        ParameterList const& parameters,
        detail::SteppedGradients& stepped,
        Optimizer& optimizer,
        std::vector<std::uint64_t>& steps,
        std::size_t shift
    ) const {
        device_->finish();
        for_each_whole(parameters, stepped, steps, shift, [&](WholeParameter const& parameter) {
            optimizer.step(parameter);
        });
    }
    /// Calls f(WholeParameter) for each that it steps, and counts the step.
    template <class F>
    void for_each_whole(
        ParameterList const& parameters,
        detail::SteppedGradients& stepped,
        std::vector<std::uint64_t>& steps,
        std::size_t shift,
        F const& f
    ) const {
        for (ShardPiece const& piece : kept()) {
            std::size_t const i = piece.parameter;
            AnyView const value = parameters[i].value();
            AnyView const gradient =
                reduces() ? place_of(value, gradient_at(piece)) : stepped.of(parameters, i);
            if (gradient) {
                check_gradient_of(parameters, i, value, gradient);
                WholeParameter whole{shift + i, value, gradient, ++steps[i], {}};
                for (std::size_t k = 0; k < state_.names(); ++k) {
                    std::byte* const array = state_.array(k, place_of_state(piece));
                    whole.state.push_back(place_of(value, array));
                }
                f(std::move(whole));
            }
        }
    }

    // If the gradients of the only parameter are rows. Its value is contiguous, in host memory.

    /// Lists the rows that this rank is about to step.
    /// @throws ContractViolation  they do not fit the parameter, do not ascend or are there twice. Nothing was changed.
    void list_rows(ParameterList const& parameters, SteppedGradients& stepped) const;
    /// Copies the listed rows out of the value if it `packs` them, or into it.
    void copy_rows(ParameterList const& parameters, SteppedRows& rows, bool packs) const;
    [[nodiscard]] std::size_t row_bytes(ParameterList const& parameters) const;

    // Values travel from where they lie, or packed: the pieces that do not travel alone, one after another.

    /// The pieces that travel alone while their value is dense, those of the ranks in turn.
    [[nodiscard]] std::span<ShardPiece const> lone() const noexcept { return lone_; }
    /// The run of memory from which a piece travels, if it does so alone; else an empty view.
    [[nodiscard]] AnyView lone_run(ParameterList const& parameters, ShardPiece const& piece) const;
    [[nodiscard]] bool
    travels_alone(ParameterList const& parameters, ShardPiece const& piece) const {
        return !lone_.empty() && lone_run(parameters, piece);
    }
    /// Sets the number of packed elements of each rank. Returns their sum.
    std::size_t
    count_packed(ParameterList const& parameters, std::vector<std::size_t>& counts) const;
    /// Copies the values of this rank that are packed.
    void
    pack_own(ParameterList const& parameters, std::byte* packed, detail::Scratch& scratch) const;
    /// Copies all values that other ranks own from where all are packed.
    void unpack_others(ParameterList const& parameters, std::byte const* packed) const;
    /// Copies all values of this rank to its part of a bucket.
    void take_own(ParameterList const& parameters, std::byte* part, detail::Scratch& scratch) const;

    /// Copies elements of arrays of the state.
    void copy_array(std::byte const* from, std::byte* to, std::size_t count) const {
        detail::copy_run(*device_, from, to, count, state_.computed_in());
    }

    /// Copies values of 16 bits into their masters, of parameters for which `loads(i)`.
    void load_masters(
        ParameterList const& parameters,
        detail::Scratch& scratch,
        std::function<bool(std::size_t)> const& loads = {}
    ) const;

private:
    [[nodiscard]] static bool is_dense(AnyView const& value) {
        return is_non_overlapping_and_dense(value.extents(), value.strides());
    }
    [[nodiscard]] static bool is_laid_out_alike(AnyView const& value, AnyView const& other) {
        return is_dense(value) && has_same_steps(value, other);
    }
    [[nodiscard]] static bool is_whole(ShardPiece const& piece, AnyView const& value) {
        return piece.size == value.numel();
    }
    /// Whether a piece travels alone while its value is dense.
    [[nodiscard]] bool is_lone(ShardPiece const& piece) const noexcept {
        bool const is_all = bucket_.pieces.size() == 1 && piece.size == bucket_.count();
        return piece.size != 0 && (is_all || piece.size * element() >= bucket_.alone);
    }
    /// Copies values of this rank to `place`.
    void pack_piece(
        AnyView const& value, ShardPiece const& piece, std::byte* place, detail::Scratch& scratch
    ) const;
    [[nodiscard]] AnyView run(std::byte* data, ShardPiece const& piece) const {
        return {data, bucket_.dtype, Shape{piece.size}, Shape{1}, device_->id()};
    }
    [[nodiscard]] std::byte* begin_of(AnyView const& tensor, ShardPiece const& piece) const {
        return static_cast<std::byte*>(tensor.data()) + piece.begin * element();
    }
    [[nodiscard]] std::byte* gradient_at(ShardPiece const& piece) const {
        return gradients_.data() + (piece.offset - part_offset()) * element();
    }
    [[nodiscard]] float* masters_of(ShardPiece const& piece) const {
        return reinterpret_cast<float*>(state_.array(state_.names(), place_of_state(piece)));
    }

    /// The elements of a piece in bucket order: in place if possible, otherwise copied to
    /// `scratch`, for what is submitted before the next such copy.
    [[nodiscard]] std::byte* elements_of(
        AnyView const& value,
        AnyView const& tensor,
        ShardPiece const& piece,
        detail::Scratch& scratch
    ) const;

    static void check_gradient_of(
        ParameterList const& parameters,
        std::size_t i,
        AnyView const& value,
        AnyView const& gradient
    );

    template <class F>
    void visit_sixteen_bits(F const& f) const {
        if (bucket_.dtype == DType::f16) {
            f(std::type_identity<Half>{});
        } else {
            f(std::type_identity<BFloat16>{});
        }
    }

    void step_rows(
        ParameterList const& parameters,
        SteppedGradients& stepped,
        DeviceRule const& rule,
        std::vector<std::uint64_t>& steps,
        Scratch& scratch
    ) const;

    /// Compares the first value of a piece with its master. On a device it checks nothing: the host
    /// would have to wait.
    void check_masters(
        ParameterList const& parameters, ShardPiece const& piece, std::byte const* values
    ) const;

    ShardBucket bucket_;
    int rank_;
    bool has_masters_; ///< of values of 16 bits
    Sharding sharding_;
    Device* device_;
    std::size_t first_ = 0; ///< index of this rank's first piece
    std::size_t own_ = 0;
    StateArrays state_;
    Arena gradients_;
    std::vector<ShardPiece> lone_;
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/optimizer/impl/shard.ipp>
#endif
