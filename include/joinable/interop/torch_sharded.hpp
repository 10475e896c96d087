// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <joinable/bucket/timeline.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/interop/torch.hpp>
#include <joinable/interop/torch_optimizer.hpp>
#include <joinable/optimizer/before_step.hpp>
#include <joinable/optimizer/partition.hpp>
#include <joinable/participant/sharded/data_parallel.hpp>
#include <joinable/participant/sharded/options.hpp>
#include <joinable/tensor/parameters.hpp>

/// @file
/// Sharded training for libtorch's C++: state and gradients. Opt-in; needs libtorch 1.13 or later. Include
/// <torch/torch.h> as well:
/// ```cpp
/// joinable::torch::ShardedDataParallel sharded{
///     comm, model, joinable::AdamW{.learning_rate = 1e-3}, {.sharding = joinable::Sharding::gradients}};
/// joinable::Join join{joinable::participants(sharded)};
/// for (auto const& batch : batches) {                        // another number of them on each rank
///     model->zero_grad();
///     auto loss = loss_of(sharded.forward(batch.data), batch.target);
///     loss.backward();                                       // each gradient travels to its owner
///     sharded.clip_grad_norm_(1);
///     sharded.step();
/// }
/// join.finish();
/// ```

namespace joinable { inline namespace v0 { namespace detail {

/// The rule of a model: a factory of libtorch's optimizers becomes one.
template <class R>
struct TorchRuleOf : std::type_identity<R> {};
template <std::invocable<std::vector<at::Tensor>> Factory>
struct TorchRuleOf<Factory>
    : std::type_identity<TorchLocalOptimizer<typename TorchMadeBy<Factory>::type>> {};

/// A norm to which the next step clips. Joined ranks take that of the lowest active rank.
struct TorchClip {
    double max_norm = 0;
    double norm_type = 2;
    double norm = 0; ///< before the last step that clipped
    bool is_due = false;
};

}}} // namespace joinable::v0::detail

namespace joinable { inline namespace v0 { namespace torch {

/// joinable::ShardedDataParallel of a torch::nn::Module. Autograd tells it when a gradient is final, so a backward pass
/// needs only `loss.backward()`. The documentation of the base class applies here, and the table of
/// joinable::torch::DistributedDataParallel, with these differences:
///
/// | torch                                   | here                                                                |
/// |-----------------------------------------|---------------------------------------------------------------------|
/// | an optimizer                            | a rule of joinable, or a factory as for joinable::torch::Optimizer   |
/// | p.grad() after the backward pass        | with Sharding::gradients undefined, because its owner has the average |
/// | parameters that a pass does not use     | count as zeros, and are stepped                                     |
/// | clip_grad_norm_(parameters, norm)       | clip_grad_norm_(norm): the step clips                               |
/// | sparse gradients                        | refused                                                             |
/// | Sharding::parameters                    | refused: modules of C++ call nothing before they read a value       |
template <class Comm, class Module, class Rule, Timeline Times = NoTimeline>
class ShardedDataParallel
    : public detail::TorchParticipant<joinable::ShardedDataParallel<Comm, Rule, Times>, Module> {
    using Base = joinable::ShardedDataParallel<Comm, Rule, Times>;
    using Participant = detail::TorchParticipant<Base, Module>;

public:
    /// Collective. `module` is a module, a holder (`torch::nn::Sequential`) or a shared pointer. A module itself must
    /// outlive this object. Parameters and buffers take rank 0's values. `rule` is an UpdateRule, a LocalOptimizer, or a
    /// factory that makes libtorch's optimizer of the parameters that it is given, those that this rank owns.
    /// @throws what joinable::ShardedDataParallel throws, and what the factory throws; ContractViolation also with
    ///         Sharding::parameters, and for sparse gradients.
    template <class Holder, class R>
    ShardedDataParallel(Comm& comm, Holder& module, R rule, ShardedOptions const& options = {})
        : ShardedDataParallel{
              comm,
              module,
              Rule(std::move(rule)),
              options,
              std::make_shared<detail::TorchViews>(),
              std::make_shared<detail::TorchClip>()
          } {}

    /// Clips the averaged gradients of the next step so that their norm over all parameters and ranks is at most
    /// `max_norm`, after ShardedOptions::before_step. Call it between the backward pass and the step, equally on all ranks
    /// that have not joined, also before the step of a batch that was skipped; joined ranks clip as well. Local: the sums run within the step. See ClipNorm.
    /// @throws ContractViolation  with step_in_backward, where parameters are stepped before all gradients are there.
    void clip_grad_norm_(double max_norm, double norm_type = 2) {
        if (!clip_) {
            throw ContractViolation{
                "clip_grad_norm_() needs all gradients before the first parameter is stepped, but step_in_backward steps "
                "as they arrive; leave that option out"
            };
        }
        static_cast<void>(ClipNorm{max_norm, {.norm_type = norm_type}}); // refuses what no norm is
        clip_->max_norm = max_norm;
        clip_->norm_type = norm_type;
        clip_->is_due = true;
    }
    /// The norm of the gradients of the last step that was clipped, before it was; 0 if there was none. Local.
    [[nodiscard]] double grad_norm() const noexcept { return clip_ ? clip_->norm : 0; }

    /// The optimizer of libtorch that a factory has made. See joinable::torch::Optimizer::local(). Local.
    [[nodiscard]] auto& local()
        requires requires(Rule& rule) { rule.optimizer(); }
    {
        return this->rule().optimizer();
    }

private:
    using Base::add_parameter_group; // its parameters would have no hooks
    using Base::refresh;             // the same
    using Base::use_all;

    template <class Holder>
    ShardedDataParallel(
        Comm& comm,
        Holder& module,
        Rule rule,
        ShardedOptions options,
        std::shared_ptr<detail::TorchViews> views,
        std::shared_ptr<detail::TorchClip> clip
    )
        : Participant{
              module,
              {.views = views, .steps_unused = true},
              comm,
              [&module, views, sharding = options.sharding] {
                  if (sharding == Sharding::parameters) {
                      throw ContractViolation{
                          "torch::ShardedDataParallel takes no Sharding::parameters, because modules of libtorch "
                          "call nothing before they read a value; use Sharding::gradients"
                      };
                  }
                  Module& named = detail::torch_module_of(module);
                  auto tensors = detail::TorchSparseWeights{named, {}}.mark(
                      detail::distinct_tensors(named.named_parameters(), {}, views)
                  );
                  for (detail::NamedTorchTensor const& one : tensors) {
                      if (one.is_sparse && one.tensor.requires_grad()) {
                          throw ContractViolation{detail::concat(
                              "parameter ",
                              one.name,
                              " has sparse gradients, which torch::ShardedDataParallel does not step; give the layer "
                              "sparse(false)"
                          )};
                      }
                  }
                  return joinable::parameters(std::move(tensors));
              },
              detail::buffers_of(detail::torch_module_of(module)),
              std::move(rule),
              with_clip(options, clip)
          },
          clip_{options.step_in_backward ? nullptr : std::move(clip)} {}

    static ShardedOptions
    with_clip(ShardedOptions options, std::shared_ptr<detail::TorchClip> const& clip) {
        if (!options.step_in_backward) {
            options.shared.emplace_back(*clip);
            options.before_step =
                [clip, first = std::move(options.before_step)](ShardGradients const& gradients) {
                    bool const is_due = std::exchange(clip->is_due, false);
                    if (first && !first(gradients)) {
                        return false;
                    }
                    if (is_due) {
                        ClipNorm norm{clip->max_norm, {.norm_type = clip->norm_type}};
                        norm(gradients);
                        clip->norm = norm.norm();
                    }
                    return true;
                };
        }
        return options;
    }

    std::shared_ptr<detail::TorchClip> clip_; ///< null: steps in the backward pass
};

template <class Comm, class Holder, class R>
ShardedDataParallel(
    Comm&, Holder&, R, ShardedOptions = {}
) -> ShardedDataParallel<Comm, detail::TorchModule<Holder>, typename detail::TorchRuleOf<R>::type>;

}}} // namespace joinable::v0::torch
