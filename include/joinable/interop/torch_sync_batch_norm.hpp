// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <joinable/communicator/collectives.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/interop/torch_tensor.hpp>
#include <joinable/participant/shadowed.hpp>

/// @file
/// Batch normalisation over the samples of all ranks, for libtorch's C++. Opt-in, of libtorch 1.13 or later:
/// ```cpp
/// auto in_model = joinable::shadowed(comm);
/// torch::nn::Sequential model{
///     torch::nn::Conv2d{torch::nn::Conv2dOptions{3, 16, 3}},
///     joinable::torch::SyncBatchNorm{in_model, torch::nn::BatchNormOptions{16}},
///     torch::nn::ReLU{}};
/// joinable::torch::DistributedDataParallel ddp{comm, model};
/// ddp.attach_collectives(in_model);                              // ranks that have joined follow
/// ```

namespace joinable { inline namespace v0 { namespace detail {

/// Sums a contiguous tensor over all ranks, in place. Graphs of autograd own it, too.
struct TorchSum final : ::torch::CustomClassHolder {
    explicit TorchSum(std::function<void(at::Tensor const&)> sum) : run{std::move(sum)} {}
    std::function<void(at::Tensor const&)> run;
};
using TorchSumPointer = c10::intrusive_ptr<TorchSum>;

/// The normalisation without weight and bias. Means and variances are computed in double precision; the rest
/// in the precision of the input, or in single precision if the input has 16 bits.
struct TorchBatchNorm : ::torch::autograd::Function<TorchBatchNorm> {
    using Tensor = at::Tensor;
    using Context = ::torch::autograd::AutogradContext;

    struct Statistics {
        Tensor mean, variance, count; ///< in double precision
    };

    /// All dimensions but that of channels.
    static std::vector<std::int64_t> dimensions(Tensor const& input) {
        std::vector<std::int64_t> dimensions{0};
        for (std::int64_t d = 2; d < input.dim(); ++d) {
            dimensions.push_back(d);
        }
        return dimensions;
    }
    static c10::ScalarType precision(Tensor const& input) {
        bool const is_half =
            input.scalar_type() == c10::kHalf || input.scalar_type() == c10::kBFloat16;
        return is_half ? c10::kFloat : input.scalar_type();
    }
    /// One number of each channel, to be combined with the input.
    static Tensor by_channel(Tensor const& numbers, Tensor const& input) {
        std::vector<std::int64_t> extents(static_cast<std::size_t>(input.dim()), 1);
        extents[1] = input.size(1);
        return numbers.to(precision(input)).view(extents);
    }
    static Tensor centered(Tensor const& input, Tensor const& mean) {
        return input.to(precision(input)) - by_channel(mean, input);
    }

    static Tensor forward(
        Context* context,
        Tensor const& input,
        double eps,
        TorchSumPointer const& sum,
        Statistics* statistics
    ) {
        auto const over = dimensions(input);
        std::int64_t const channels = input.size(1);
        Tensor const sums = at::zeros({1 + channels}, input.options().dtype(c10::kDouble));
        sums[0] = static_cast<double>(channels == 0 ? 0 : input.numel() / channels);
        sums.narrow(0, 1, channels).copy_(input.sum(over, false, c10::kDouble));
        sum->run(sums);
        Tensor const count = sums[0];
        if (count.item<double>() <= 1) { // the same on all ranks
            throw ContractViolation{
                "SyncBatchNorm needs more than one value of each channel over all ranks in a training pass"
            };
        }
        Tensor const mean = sums.narrow(0, 1, channels) / count;
        Tensor const deviations = centered(input, mean);
        Tensor const squares = deviations.pow(2).sum(over, false, c10::kDouble);
        sum->run(squares);
        *statistics = {mean, squares / count, count};
        Tensor const scale = (statistics->variance + eps).rsqrt();
        context->save_for_backward({input, mean, scale, count});
        context->saved_data["sum"] = c10::IValue::make_capsule(sum);
        return deviations * by_channel(scale, input);
    }

    static ::torch::autograd::variable_list
    backward(Context* context, ::torch::autograd::variable_list const& gradients) {
        if (at::GradMode::is_enabled()) {
            throw ContractViolation{
                "SyncBatchNorm has no second derivatives; leave out create_graph"
            };
        }
        auto const saved = context->get_saved_variables();
        Tensor const &input = saved[0], &mean = saved[1], &scale = saved[2], &count = saved[3];
        auto const over = dimensions(input);
        std::int64_t const channels = input.size(1);
        Tensor const& gradient = gradients[0];
        Tensor const deviations = centered(input, mean);
        Tensor const sums = at::cat(
            {gradient.sum(over, false, c10::kDouble),
             (gradient * deviations).sum(over, false, c10::kDouble)}
        );
        auto const sum = context->saved_data["sum"].toCapsule();
        static_cast<TorchSum const&>(*sum).run(sums);
        sums.div_(count);
        Tensor const slope = scale.square() * sums.narrow(0, channels, channels);
        Tensor const rest = gradient - by_channel(sums.narrow(0, 0, channels), input) -
                            deviations * by_channel(slope, input);
        return {
            (rest * by_channel(scale, input)).to(input.scalar_type()), Tensor{}, Tensor{}, Tensor{}
        };
    }
};

}}} // namespace joinable::v0::detail

namespace joinable { inline namespace v0 { namespace torch {

/// The module of the holder SyncBatchNorm. Its tensors have the names and the meaning of those of
/// torch::nn::BatchNorm2d. A clone communicates over the same communicator.
class SyncBatchNormImpl : public ::torch::nn::Cloneable<SyncBatchNormImpl> {
public:
    /// Local. `comm` must outlive the module and all graphs through it. In a guard it is the result of
    /// shadowed().
    template <class Comm>
    SyncBatchNormImpl(Comm& comm, ::torch::nn::BatchNormOptions const& options)
        : options_{options},
          sum_{c10::make_intrusive<detail::TorchSum>([&comm](at::Tensor const& tensor) {
              joinable::all_reduce(comm, tensor).wait();
          })} {
        SyncBatchNormImpl::reset();
    }

    /// Makes parameters and buffers anew, with their first values; clone() calls it. Local.
    void reset() override {
        std::int64_t const channels = options_.num_features();
        if (options_.affine()) {
            weight = register_parameter("weight", at::ones({channels}));
            bias = register_parameter("bias", at::zeros({channels}));
        }
        if (options_.track_running_stats()) {
            running_mean = register_buffer("running_mean", at::zeros({channels}));
            running_var = register_buffer("running_var", at::ones({channels}));
            num_batches_tracked =
                register_buffer("num_batches_tracked", at::zeros({}, at::dtype(c10::kLong)));
        }
    }

    /// Normalises `input`, of extents N x channels x any others; N may be 0 on some ranks. In training mode the
    /// call is collective: it sums twice over all ranks, and the backward pass sums once if the input needs a
    /// gradient. In evaluation mode it is local. Weight and bias get this rank's own gradients.
    /// @throws ContractViolation  the input has other extents, or is on a device whose memory the communicator does
    ///         not move; or all ranks together have at most one value of each channel.
    /// @throws what the communicator throws.
    at::Tensor forward(at::Tensor const& input) {
        if (input.dim() < 2 || input.size(1) != options_.num_features()) {
            throw ContractViolation{detail::concat(
                "SyncBatchNorm of ",
                options_.num_features(),
                " channels needs an input whose second dimension is the channels"
            )};
        }
        if (!is_training()) {
            return at::batch_norm(
                input,
                weight,
                bias,
                running_mean,
                running_var,
                !running_mean.defined(),
                0.0,
                options_.eps(),
                false
            );
        }
        detail::TorchBatchNorm::Statistics statistics;
        at::Tensor result = detail::TorchBatchNorm::apply(input, options_.eps(), sum_, &statistics);
        if (weight.defined()) {
            result = result * detail::TorchBatchNorm::by_channel(weight, input) +
                     detail::TorchBatchNorm::by_channel(bias, input);
        }
        if (running_mean.defined()) {
            at::NoGradGuard const no_graph;
            num_batches_tracked.add_(1);
            double const share = options_.momentum() ? *options_.momentum()
                                                     : 1.0 / num_batches_tracked.item<double>();
            auto const& [mean, variance, count] = statistics;
            update(running_mean, mean, share);
            update(running_var, variance * (count / (count - 1)), share);
        }
        return result.to(input.scalar_type());
    }

    at::Tensor weight, bias;
    at::Tensor running_mean, running_var, num_batches_tracked;

private:
    static void update(at::Tensor& running, at::Tensor const& now, double share) {
        running.mul_(1 - share).add_(now.to(running.scalar_type()), share);
    }

    ::torch::nn::BatchNormOptions options_;
    detail::TorchSumPointer sum_;
};

/// torch::nn::BatchNorm1d, 2d and 3d with the means and variances of the samples of all ranks, like PyTorch's
/// SyncBatchNorm: `SyncBatchNorm norm{in_model, torch::nn::BatchNormOptions{channels}}`. Once ranks have joined,
/// the samples are those of the active ranks. The same on every rank.
///
/// Its backward pass sums gradients over ranks. If ranks have batches of different sizes, let each rank's loss
/// be the sum over its samples, set `.gradient_kind = GradientKind::sum` in DataParallelOptions, and give
/// notices with `.weight = samples`. With losses that are means, a sample of a small batch would count more than
/// a sample of a large one.
class SyncBatchNorm : public ::torch::nn::ModuleHolder<SyncBatchNormImpl> {
public:
    using ::torch::nn::ModuleHolder<SyncBatchNormImpl>::ModuleHolder;
};

}}} // namespace joinable::v0::torch
