// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include <joinable/communicator/control.hpp>
#include <joinable/communicator/device_of.hpp>
#include <joinable/communicator/host_collectives.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/device.hpp>
#include <joinable/device/scratch.hpp>
#include <joinable/device/squares.hpp>
#include <joinable/error.hpp>
#include <joinable/optimizer/before_step.hpp>
#include <joinable/optimizer/partition.hpp>
#include <joinable/optimizer/shard.hpp>
#include <joinable/optimizer/state_arrays.hpp>
#include <joinable/participant/sharded/detail/group.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/reduce_op.hpp>
#include <joinable/tensor/shape.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Calls ZeroOptions::before_step on all ranks, and sums for it.
template <class Comm>
class ShardedBeforeStep final : ShardSums {
public:
    /// Refers to both, which connect the ranks that share the state.
    ShardedBeforeStep(Comm& comm, HostCollectives<Comm>& host, Sharding sharding)
        : comm_{comm}, host_{host}, sharding_{sharding}, sums_{device_of(comm)},
          packed_{device_of(comm)} {}

    /// Whether the ranks step; they compare it by `words`. Collective.
    /// @throws ContractViolation  they do not return the same.
    bool operator()(
        std::function<bool(ShardGradients const&)> const& before_step,
        std::span<ShardGroup> groups,
        ControlCommunicator& words
    ) {
        pieces_.clear();
        std::size_t parameters = 0;
        bool has_f16 = false;
        for (ShardGroup& group : groups) {
            for (OptimizerShard const& shard : group.shards) {
                shard.append_gradients(group.parameters, group.gradients, group.first, pieces_);
                has_f16 = has_f16 || shard.bucket().dtype == DType::f16;
            }
            parameters += group.parameters.size();
        }
        Device& device = device_of(comm_);
        device.finish(); // the engine's stream sees the gradients
        words_ = &words;
        bool const steps = before_step(ShardGradients{pieces_, parameters, device, *this, has_f16});
        std::uint64_t steppers = steps ? 1 : 0;
        words.sum({&steppers, 1});
        auto const ranks = static_cast<std::uint64_t>(words.size());
        if (steppers != 0 && steppers != ranks) {
            throw ContractViolation{concat(
                "before_step skips the step on ",
                ranks - steppers,
                " of ",
                ranks,
                " ranks",
                steps ? ", but not on this one" : ", on this one, too",
                "; return the same on all, by what ShardGradients::sum() gives"
            )};
        }
        return steps;
    }

private:
    /// Where groups share the state all ranks take the numbers of the first one: others may add up in another order.
    void take_first(std::span<double> numbers) {
        if (words_->size() != comm_.size()) {
            std::vector<std::uint64_t> bits;
            for (double const number : numbers) {
                bits.push_back(std::bit_cast<std::uint64_t>(number));
            }
            words_->broadcast(bits, 0);
            std::transform(bits.begin(), bits.end(), numbers.begin(), [](std::uint64_t number) {
                return std::bit_cast<double>(number);
            });
        }
    }
    void sum(std::span<double> numbers) override {
        if (sharding_ != Sharding::none) { // else each rank has all gradients
            host_.all_reduce({numbers.data(), numbers.size(), DType::f64}, ReduceOp::sum).wait();
        }
        take_first(numbers);
    }
    /// As integers in the order of the numbers: some transports ignore a NaN among floating-point numbers.
    void max(std::span<double> numbers) override {
        std::vector<std::int64_t> keys;
        for (double const number : numbers) {
            keys.push_back(key_of(std::bit_cast<std::int64_t>(
                std::isnan(number) ? std::numeric_limits<double>::quiet_NaN() : number
            )));
        }
        host_.all_reduce({keys.data(), keys.size(), DType::i64}, ReduceOp::max).wait();
        std::transform(keys.begin(), keys.end(), numbers.begin(), [](std::int64_t key) {
            return std::bit_cast<double>(key_of(key));
        });
        take_first(numbers);
    }
    /// Turns the bits of a number into such an integer, and back: those of negative ones fall as the number
    /// grows.
    static std::int64_t key_of(std::int64_t bits) noexcept {
        return bits < 0 ? bits ^ std::numeric_limits<std::int64_t>::max() : bits;
    }
    /// The numbers travel where the gradients are.
    void sum_powers(double power, std::span<ShardGradient const> pieces, std::span<double> sums)
        override {
        Device& device = device_of(comm_);
        std::size_t const count = sums.size();
        Buffer const all{sums_.data(count * sizeof(double)), count, DType::f64};
        auto* const first = static_cast<double*>(all.data);
        if (staged_.bytes() < all.bytes()) {
            staged_ = device.allocate_staging(all.bytes());
        }
        if (power == 2) {
            device.fill_zero({first, DType::f64, {count}, {1}, device.id()});
            own_.clear();
            for (ShardGradient const& piece : pieces) {
                own_.push_back({piece.view, first + piece.parameter, &sum_of_squares});
            }
            device.sum_squares(own_);
        } else { // on the host, because a device's pow() has other bits
            auto* const numbers = reinterpret_cast<double*>(staged_.data());
            std::fill_n(numbers, count, 0.0);
            for (ShardGradient const& piece : pieces) {
                numbers[piece.parameter] = sum_of_powers(on_host(piece.view), power);
            }
            device.upload(numbers, first, all.bytes());
            device.submit(); // before it is sent
        }
        if (sharding_ == Sharding::none) { // the same sums on each rank
            complete(comm_.broadcast(all, 0));
        } else if (std::isinf(power)) { // bits of magnitudes have their order, see max()
            complete(comm_.all_reduce({first, count, DType::i64}, ReduceOp::max));
        } else {
            complete(comm_.all_reduce(all, ReduceOp::sum));
        }
        host_.download(first, staged_.data(), all.bytes());
        copy_bytes(reinterpret_cast<std::byte*>(sums.data()), staged_.data(), all.bytes());
        take_first(sums);
    }

    /// The tensor, or a copy in host memory that the next one replaces. Blocks, up to the deadline.
    [[nodiscard]] AnyView on_host(AnyView const& tensor) {
        Device& device = device_of(comm_);
        if (detail::is_on_host(device) || tensor.numel() == 0) {
            return tensor;
        }
        Shape const& extents = tensor.extents();
        Shape const strides = row_major_strides(extents);
        std::size_t const bytes = tensor.numel() * size_of(tensor.dtype());
        std::byte* const packed = packed_.data(bytes);
        device.copy(tensor, {packed, tensor.dtype(), extents, strides, device.id()});
        device.submit();
        if (copy_.bytes() < bytes) {
            copy_ = device.allocate_staging(bytes);
        }
        host_.download(packed, copy_.data(), bytes);
        return {copy_.data(), tensor.dtype(), extents, strides};
    }

    Comm& comm_;
    HostCollectives<Comm>& host_;
    ControlCommunicator* words_ = nullptr; ///< of all ranks, during a call
    Sharding sharding_;
    std::vector<ShardGradient> pieces_;
    std::vector<SquareSum> own_;
    Arena staged_; ///< of the sums, on the host
    Arena copy_;   ///< of a gradient, on the host
    Scratch sums_;
    Scratch packed_;
};

}}} // namespace joinable::v0::detail
