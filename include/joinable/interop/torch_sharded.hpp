// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/record_function.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/library.h>

#include <joinable/bucket/timeline.hpp>
#include <joinable/detail/scope.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/interop/torch.hpp>
#include <joinable/interop/torch_optimizer.hpp>
#include <joinable/join/round.hpp>
#include <joinable/optimizer/before_step.hpp>
#include <joinable/optimizer/partition.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/sharded/data_parallel.hpp>
#include <joinable/participant/sharded/options.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/parameter.hpp>
#include <joinable/tensor/parameters.hpp>

/// @file
/// Sharded training for libtorch's C++: state, gradients and values. Opt-in; needs libtorch 1.13 or later. Include
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
/// With Sharding::parameters the forward pass says which values it uses:
/// ```cpp
/// auto outputs = sharded.forward([&] {
///     torch::Tensor x = batch.data;
///     for (auto& layer : *model) {                           // of a torch::nn::Sequential, in its order
///         auto const held = sharded.use(layer.ptr());        // its values are there while held lives
///         x = layer.forward(x);
///     }
///     return x;
/// });
/// loss_of(outputs, batch.target).backward();                 // gathers them again
/// ```

namespace joinable { inline namespace v0 { namespace detail {

/// Refuses to read tensors whose values are released: their key comes before all others in libtorch's dispatcher.
class TorchReleased {
public:
    /// Once in a process, before any tensor is marked.
    static void install() {
        static ::torch::Library const refusal = [] {
            ::torch::Library library{::torch::Library::IMPL, "_", key, __FILE__, __LINE__};
            library.fallback(::torch::CppFunction::makeFromBoxedFunction<&refuse>());
            return library;
        }();
    }
    /// A tensor without memory is refused. The storage stays that of handles, views and graphs.
    static void set(at::Tensor const& tensor, void* memory, std::size_t bytes) noexcept {
        bool const is_there = bytes != 0 || tensor.numel() == 0;
        c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
        // torch::save() asks no dispatcher. It throws where a storage is on another device than its tensor.
        c10::Device const device = is_there ? tensor.device() : c10::Device{c10::kMeta};
        storage.set_data_ptr_noswap({memory, device});
        storage.set_nbytes(bytes);
        c10::DispatchKeySet& keys = keys_of(tensor);
        keys = is_there ? keys.remove(key) : keys.add(key);
    }
    [[nodiscard]] static bool has(at::Tensor const& tensor) noexcept {
        return keys_of(tensor).has(key);
    }

private:
    static constexpr auto key =
        c10::DispatchKey::TESTING_ONLY_GenericWrapper; // no kernel of libtorch uses it

    /// Gives access to a protected member.
    struct Keys : c10::TensorImpl {
        static c10::DispatchKeySet c10::TensorImpl::* member() noexcept { return &Keys::key_set_; }
    };
    static c10::DispatchKeySet& keys_of(at::Tensor const& tensor) noexcept {
        return tensor.unsafeGetTensorImpl()->*Keys::member();
    }

    static void refuse(c10::OperatorHandle const& op, ::torch::jit::Stack* stack) {
        std::string extents;
        auto const look = [&](at::Tensor const& tensor) {
            if (tensor.defined() && has(tensor) && extents.empty()) {
                extents = concat("[", c10::Join(", ", tensor.sizes()), "]");
            }
        };
        for (c10::IValue const& value :
             ::torch::jit::last(*stack, op.schema().arguments().size())) {
            if (value.isTensor()) {
                look(value.toTensor());
            } else if (value.isTensorList()) {
                for (at::Tensor const& tensor : value.toTensorVector()) {
                    look(tensor);
                }
            }
        }
        throw ContractViolation{concat(
            op.schema().name(),
            "() reads a parameter of extents ",
            extents,
            ", of which this rank keeps only a part; in the forward pass keep what sharded.use(module) returns while it "
            "is read, and elsewhere what sharded.use_all() returns"
        )};
    }
};

/// A parameter whose value ranks keep in parts.
struct PartedTorchTensor : NamedTorchTensor {};

/// Calls `before(node's number)` before autograd runs a node.
class TorchNodeHook final : public ::torch::autograd::FunctionPreHook {
public:
    using Before = std::shared_ptr<std::function<void(std::uint64_t)> const>;

    TorchNodeHook(Before before, std::uint64_t number) noexcept
        : before_{std::move(before)}, number_{number} {}
    ::torch::autograd::variable_list operator()(::torch::autograd::variable_list const& gradients
    ) override {
        (*before_)(number_);
        return gradients;
    }

private:
    Before before_;
    std::uint64_t number_;
};

/// The rule of a model: a factory of libtorch's optimizers becomes one.
template <class R>
struct TorchRuleOf : std::type_identity<R> {};
template <std::invocable<std::vector<at::Tensor>> Factory>
struct TorchRuleOf<Factory>
    : std::type_identity<TorchLocalOptimizer<typename TorchMadeBy<Factory>::type>> {
    static_assert(models_torch_optimizer<typename TorchMadeBy<Factory>::type>());
};

/// A norm to which the next step clips.
struct TorchClip {
    double max_norm = 0;
    double norm_type = 2;
    bool is_due = false;

    /// Refuses arguments that differ: each owner would clip by another factor. Collective.
    void require_same(ShardGradients const& gradients) const {
        std::array const mine{max_norm, -max_norm, norm_type, -norm_type};
        std::array largest = mine;
        gradients.max(largest);
        if (largest != mine) {
            throw Mismatch{
                {},
                concat(
                    "clip_grad_norm_(): ranks clip one step by different arguments: max_norm from ",
                    -largest[1],
                    " to ",
                    largest[0],
                    ", norm_type from ",
                    -largest[3],
                    " to ",
                    largest[2],
                    ", here ",
                    max_norm,
                    " and ",
                    norm_type,
                    "; give the same on every rank"
                )
            };
        }
    }
};
struct TorchClips {
    TorchClip own;   ///< asked for on this rank
    TorchClip all;   ///< the same, or that of the lowest active rank once a rank has joined
    double norm = 0; ///< before the last step that clipped
};

}}} // namespace joinable::v0::detail

template <>
struct joinable::parameter_traits<joinable::detail::PartedTorchTensor>
    : parameter_traits<joinable::detail::NamedTorchTensor> {
    using Parted = joinable::detail::PartedTorchTensor;
    static at::Tensor* value(Parted& p) noexcept {
        return joinable::detail::TorchReleased::has(p.tensor) ? nullptr : &p.tensor;
    }
    static void set_value(Parted& p, AnyView const& view) {
        AnyView const now{p.tensor};
        if (p.tensor.storage_offset() != 0 || !joinable::detail::is_like(now, view) ||
            !joinable::detail::has_same_steps(now, view)) {
            throw ContractViolation{joinable::detail::concat(
                "parameter ",
                p.name,
                " has another type, layout or storage than when the ShardedDataParallel was made; copy values into the "
                "parameter, or make the ShardedDataParallel after to()"
            )};
        }
        joinable::detail::TorchReleased::set(p.tensor, view.data(), p.tensor.nbytes());
    }
    static void release_value(Parted& p) noexcept {
        joinable::detail::TorchReleased::set(p.tensor, nullptr, 0);
    }
};

namespace joinable { inline namespace v0 { namespace detail {

/// Tells sharded values when libtorch uses them. libtorch numbers the nodes of a graph in the order in which a thread
/// makes them, and runs them in the reverse order. So a node needs the values that were held where it was made, and once
/// a node runs, no gradient comes from nodes with higher numbers.
template <class Comm, class Rule, Timeline Times>
class TorchValues : public joinable::ShardedDataParallel<Comm, Rule, Times> {
    using Base = joinable::ShardedDataParallel<Comm, Rule, Times>;
    using Values = std::vector<typename Base::HeldValues>;
    static constexpr std::uint64_t none = (std::numeric_limits<std::uint64_t>::max)();

    /// Nodes made while values were held.
    struct Scope {
        std::uint64_t begin;
        std::uint64_t end = none;
        std::vector<std::size_t> units = {}; ///< ascending
        Values values = {};                  ///< kept for the backward pass, or gathered by it
    };
    /// The scopes of a forward pass, in the order in which they began.
    struct Scopes {
        std::uint64_t pass = 0;
        bool is_forward = false;
        std::vector<Scope> list = {};
    };

public:
    static constexpr bool follows_nodes = true;

    /// The result of use(): values exist during its lifetime, or until its release(). Move-only.
    class [[nodiscard("the object that use() returns keeps the values")]] HeldValues {
    public:
        HeldValues() = default;
        HeldValues(HeldValues&&) noexcept = default;
        HeldValues& operator=(HeldValues&& other) noexcept {
            HeldValues taken{std::move(other)};
            release();
            scopes_ = std::move(taken.scopes_);
            pass_ = taken.pass_;
            scope_ = taken.scope_;
            values_ = std::move(taken.values_);
            return *this;
        }
        ~HeldValues() { release(); }

        /// Stops keeping the values.
        void release() noexcept {
            auto const scopes = std::exchange(scopes_, nullptr);
            if (scopes && scopes->pass == pass_ && scopes->is_forward) {
                Scope& scope = scopes->list[scope_];
                scope.end = at::sequence_number::peek();
                // A backward pass could not gather them: a node that needs these alone would pass by later units first.
                auto const is_over_later = [&](Scope const& other) {
                    return !other.units.empty() && other.units.back() > scope.units.front() &&
                           other.begin < scope.end;
                };
                if (!scope.units.empty() &&
                    std::any_of(scopes->list.begin(), scopes->list.end(), is_over_later)) {
                    scope.values = std::move(values_);
                }
            }
            values_.clear();
        }

    private:
        friend TorchValues;
        std::shared_ptr<Scopes> scopes_; ///< null in a backward pass
        std::uint64_t pass_ = 0;
        std::size_t scope_ = 0;
        Values values_;
    };

    using Base::skip;
    /// See joinable::GradientParticipant::skip().
    void skip(RoundNotice notice = {}) {
        forget_scopes();
        Base::skip(notice);
    }
    /// See joinable::ShardedDataParallel::use_all().
    [[nodiscard]] Values use_all() {
        auto held = Base::use_all(); // refused in a pass, whose scopes stay
        forget_scopes();
        return held;
    }

    /// For TorchParticipant: `before(pass, node)` is called before the backward pass runs a node of this forward pass.
    template <class F>
    void follow_nodes(std::vector<at::Tensor> const& outputs, F const& before) {
        std::uint64_t begin = none;
        std::uint64_t end = 0;
        for (Scope const& scope : scopes_->list) {
            begin = (std::min)(begin, scope.begin);
            end = (std::max)(end, scope.end);
        }
        auto const hook = std::make_shared<std::function<void(std::uint64_t)> const>(
            [before, pass = scopes_->pass](std::uint64_t node) { before(pass, node); }
        );
        std::unordered_set<void const*> seen;
        for_each_node(outputs, [&](::torch::autograd::Node& node) {
            std::uint64_t const number = node.sequence_nr(); // none: it adds to a gradient
            if (number != none && node.thread_id() != at::RecordFunction::currentThreadId()) {
                throw ContractViolation{concat(
                    "the graph of what forward() returns has a node of another thread (",
                    node.name(),
                    "), and libtorch numbers those of each thread by themselves, so nothing tells which values it needs; "
                    "run the layers in the thread that calls forward(), and detach() inputs of others"
                )};
            }
            bool const is_new = number >= begin && number != none && seen.insert(&node).second;
            if (is_new && number < end) {
                node.add_pre_hook(std::make_unique<TorchNodeHook>(hook, number));
            }
            return is_new; // behind others lie those that were made before
        });
    }
    /// Gathers what the node needs, and calls `mark(i)` for parameters that get no gradient any more.
    template <class F>
    void before_node(std::uint64_t pass, std::uint64_t node, F const& mark) {
        if (pass != scopes_->pass) {
            throw ContractViolation{
                "a backward pass reaches layers of an earlier forward pass, whose values are not gathered again; detach() "
                "what one pass gives to the next"
            };
        }
        if (node >= settled_) {
            return;
        }
        std::vector<Scope>& list = scopes_->list;
        for (Scope& scope : list) {
            if (scope.begin > node) {
                scope.values.clear();
            }
        }
        while (passed_ > 0 && first_uses_[passed_ - 1] > node) {
            --passed_;
            std::for_each(parameters_of_[passed_].begin(), parameters_of_[passed_].end(), mark);
        }
        settled_ = 0;
        for (std::size_t k = list.size(); k-- > 0;) {
            Scope& scope = list[k];
            if (scope.begin > node) {
                continue;
            }
            settled_ = (std::max)(settled_, scope.end <= node ? scope.end : scope.begin);
            if (scope.end > node && scope.values.empty()) {
                for (std::size_t u = scope.units.size(); u-- > 0;) {
                    scope.values.push_back(hold(scope.units[u]));
                }
            }
        }
    }

protected:
    template <class... Args>
    explicit TorchValues(Args&&... base) : Base{std::forward<Args>(base)...} {
        if (auto const* const units = this->hooks().units()) {
            for (std::size_t i = 0; i < this->reducer_->parameters().size(); ++i) {
                if (units->has(i)) {
                    std::size_t const unit = units->unit_of(i);
                    parameters_of_.resize((std::max)(parameters_of_.size(), unit + 1));
                    parameters_of_[unit].push_back(i);
                }
            }
        }
        forget_scopes();
    }
    ~TorchValues() { forget_scopes(); }

    template <class F>
    decltype(auto) forward(F&& pass, RoundNotice const& notice = {}) {
        forget_scopes();
        ScopedFlag const is_forward{scopes_->is_forward, true};
        return Base::forward(
            [&](auto const&) -> decltype(auto) {
                // No backward pass gathers the values of an evaluation.
                bool const has_graph =
                    !this->hooks().gathers_values() || this->stage_ != Base::Stage::idle;
                at::AutoGradMode const mode{has_graph && at::GradMode::is_enabled()};
                return std::forward<F>(pass)();
            },
            notice
        );
    }
    void finalize_backward() {
        forget_scopes();
        Base::finalize_backward();
    }

    [[nodiscard]] HeldValues hold_units_of(std::vector<std::size_t> const& parameters) {
        HeldValues held;
        auto const* const units = this->hooks().units();
        if (units == nullptr) {
            return held;
        }
        std::vector<std::size_t> of_parts;
        for (std::size_t const i : parameters) {
            if (units->has(i)) {
                of_parts.push_back(units->unit_of(i));
            }
        }
        std::sort(of_parts.begin(), of_parts.end());
        of_parts.erase(std::unique(of_parts.begin(), of_parts.end()), of_parts.end());
        if (scopes_->is_forward && !at::GradMode::is_enabled() &&
            this->stage_ != Base::Stage::idle) {
            throw ContractViolation{
                "use() was called while gradients are off (in a checkpointed block, or under a NoGradGuard) in a pass that "
                "trains, so a backward pass would not gather these values; call use() around that block"
            };
        }
        std::uint64_t const begin = at::sequence_number::peek();
        for (std::size_t const unit : of_parts) {
            held.values_.push_back(hold(unit));
        }
        if (scopes_->is_forward && at::GradMode::is_enabled()) {
            for (std::size_t const unit : of_parts) {
                first_uses_[unit] = (std::min)(first_uses_[unit], begin);
            }
            held.scopes_ = scopes_;
            held.pass_ = scopes_->pass;
            held.scope_ = scopes_->list.size();
            scopes_->list.push_back({begin, none, std::move(of_parts)});
        }
        return held;
    }

private:
    [[nodiscard]] typename Base::HeldValues hold(std::size_t unit) {
        return typename Base::template Use<>{*this}(parameters_of_[unit].front());
    }
    void forget_scopes() {
        ++scopes_->pass;
        scopes_->list.clear();
        first_uses_.assign(parameters_of_.size(), none);
        passed_ = parameters_of_.size();
        settled_ = none;
    }

    std::shared_ptr<Scopes> scopes_ = std::make_shared<Scopes>();
    std::vector<std::vector<std::size_t>> parameters_of_; ///< each unit
    std::vector<std::uint64_t> first_uses_;               ///< of each unit: the next node's number
    std::size_t passed_ = 0;       ///< units from here on get no gradients any more
    std::uint64_t settled_ = none; ///< nodes from here on have what they need
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
/// | forward hooks of FSDP                   | use(module) in the forward pass; the backward pass gathers by itself |
/// | several backward passes, create_graph,  | refused with Sharding::parameters                                   |
/// | autograd::grad() of what forward() gave |                                                                     |
template <class Comm, class Module, class Rule, Timeline Times = NoTimeline>
class ShardedDataParallel
    : public detail::TorchParticipant<detail::TorchValues<Comm, Rule, Times>, Module> {
    using Base = detail::TorchValues<Comm, Rule, Times>;
    using Participant = detail::TorchParticipant<Base, Module>;

public:
    /// Collective. `module` is a module, a holder (`torch::nn::Sequential`) or a shared pointer, or but for
    /// Sharding::parameters a torch::jit::Module. A module itself must outlive this object. Parameters and buffers take
    /// rank 0's values. `optimizer` is an UpdateRule, a LocalOptimizer, or a factory that makes one of libtorch of the
    /// parameters that it is given, those that this rank owns.
    /// @throws what joinable::ShardedDataParallel throws, and what the factory throws; ContractViolation also for sparse
    ///         gradients, and with Sharding::parameters if a trained parameter shares its storage with another tensor or
    ///         fills only a part of it.
    template <class Holder, class R>
    ShardedDataParallel(Comm& comm, Holder& module, R optimizer, ShardedOptions const& options = {})
        : ShardedDataParallel{
              comm,
              module,
              Rule(std::move(optimizer)),
              options,
              std::make_shared<detail::TorchViews>(),
              std::make_shared<detail::TorchClips>()
          } {}

    /// Clips the averaged gradients of the next step so that their norm over all parameters and ranks is at most
    /// `max_norm`, after ShardedOptions::before_step. Call it between the backward pass and the step, equally on all ranks
    /// that have not joined, also before the step of a batch that was skipped: the step begins with a sum over all ranks,
    /// and no message tells a rank of it. With `ShardedOptions::before_step = ClipNorm{1}` each step clips, without calls.
    /// Joined ranks clip as well. Local: the step sums, and compares these arguments, of which it throws Mismatch on all
    /// ranks if they differ, before it changes a gradient or value. See ClipNorm.
    /// @throws ContractViolation  with step_in_backward, where parameters are stepped before all gradients are there;
    ///         the norm's type is not above 0, or `max_norm` is NaN.
    void clip_grad_norm_(double max_norm, double norm_type = 2) {
        if (!clip_) {
            throw ContractViolation{
                "clip_grad_norm_() needs all gradients before the first parameter is stepped, but step_in_backward steps "
                "as they arrive; leave that option out"
            };
        }
        static_cast<void>(ClipNorm{max_norm, {.norm_type = norm_type}}); // refuses what no norm is
        if (std::isnan(max_norm)) {
            throw ContractViolation{"clip_grad_norm_(): max_norm is not a number"};
        }
        clip_->own = clip_->all = {max_norm, norm_type, true};
    }
    /// The norm of the gradients of the last step that clip_grad_norm_() clipped, before it was; 0 if there was none. A
    /// ClipNorm in `before_step` has its own. Local.
    [[nodiscard]] double grad_norm() const noexcept { return clip_ ? clip_->norm : 0; }

    /// The optimizer of libtorch that a factory has made. See joinable::torch::Optimizer::local(). Local.
    [[nodiscard]] auto& local()
        requires requires(Rule& one) { one.optimizer(); }
    {
        return this->rule().optimizer();
    }

    /// The result of use().
    using HeldValues = typename Base::HeldValues;

    /// Waits for the values of a module, a holder or a pointer to one, with all that it contains, or of one parameter, and
    /// keeps them while the returned object lives. For forward(pass), with Sharding::parameters; with another sharding it
    /// does nothing. The backward pass gathers the values that its nodes were made with, and needs no call. Local, but the
    /// gathers that it waits for are collective: in the order of the units, which is that of registration.
    ///
    /// libtorch tells neither that a layer begins nor that a value was read for the last time, so the pass has to.
    ///
    /// A unit is gathered once in a pass: hold values that are used again, such as tied weights. Values that are held while a
    /// later unit is used stay for the backward pass, too. Around a checkpointed block hold its values outside of
    /// the checkpoint. Nodes made under the object must be reached from what the pass returns, and layers run in the thread
    /// that calls forward().
    /// @throws ContractViolation  outside a pass, out of order, or the module is not a part of this one.
    template <class Part>
    [[nodiscard]] HeldValues use(Part const& part) {
        return this->guarded([&] {
            std::vector<std::size_t> indices;
            if constexpr (std::same_as<Part, at::Tensor>) {
                list_parts(part, "the tensor", indices);
            } else {
                for (auto const& item : detail::torch_module_of(part).named_parameters()) {
                    if (at::Tensor const& tensor = detail::torch_tensor_of(item);
                        tensor.defined()) {
                        list_parts(tensor, detail::torch_name_of(item), indices);
                    }
                }
            }
            return this->hold_units_of(indices);
        });
    }

private:
    using Base::add_parameter_group; // its parameters would have no hooks
    using Base::refresh;             // the same

    template <class Holder>
    ShardedDataParallel(
        Comm& comm,
        Holder& module,
        Rule optimizer,
        ShardedOptions options,
        std::shared_ptr<detail::TorchViews> views,
        std::shared_ptr<detail::TorchClips> clip
    )
        : Participant{
              module,
              {.views = views,
               .steps_unused = true,
               .buffer_sync = detail::buffer_sync_of(options)},
              comm,
              [&module, views, sharding = options.sharding] {
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
                  if (sharding == Sharding::parameters) {
                      return parted(named, std::move(tensors));
                  }
                  return joinable::parameters(std::move(tensors));
              },
              detail::announced_buffers_of(comm, module),
              std::move(optimizer),
              with_clip(options, clip)
          },
          clip_{options.step_in_backward ? nullptr : std::move(clip)} {
        this->hide_refresh();
        std::size_t i = 0;
        for (detail::NamedTorchTensor const& one :
             detail::distinct_tensors(this->module_.named_parameters())) {
            indices_.emplace(one.tensor.unsafeGetTensorImpl(), i++);
        }
    }

    /// Parameters whose storages end while ranks keep parts of them.
    static ParameterList parted(Module& module, std::vector<detail::NamedTorchTensor> tensors) {
        if constexpr (requires { module._ivalue(); }) {
            throw ContractViolation{
                "Sharding::parameters takes a torch::nn::Module, whose layers a pass uses one by one; train a TorchScript "
                "module with Sharding::gradients"
            };
        }
        detail::TorchReleased::install();
        std::unordered_map<void const*, std::string> freed; // storages of trained values
        auto const find = [&](detail::NamedTorchTensor const& one) {
            void const* const storage = one.tensor.storage().unsafeGetStorageImpl();
            if (auto const known = freed.find(storage); known != freed.end()) {
                throw ContractViolation{detail::concat(
                    one.name,
                    " shares the memory of ",
                    known->second,
                    ", which Sharding::parameters frees between its uses; give it memory of its own, as clone() does, "
                    "or register the same tensor twice"
                )};
            }
            return storage;
        };
        for (detail::NamedTorchTensor const& one : tensors) {
            if (one.tensor.requires_grad()) {
                freed.emplace(find(one), one.name);
            }
        }
        for (detail::NamedTorchTensor const& one : tensors) {
            if (!one.tensor.requires_grad()) {
                find(one);
            }
        }
        auto const buffers = detail::distinct_tensors(module.named_buffers());
        std::for_each(buffers.begin(), buffers.end(), find);
        std::vector<detail::PartedTorchTensor> all;
        for (detail::NamedTorchTensor& one : tensors) {
            at::Tensor const& tensor = one.tensor;
            if (tensor.requires_grad() &&
                !(tensor.storage_offset() == 0 && tensor.is_non_overlapping_and_dense() &&
                  tensor.storage().nbytes() == tensor.nbytes())) {
                throw ContractViolation{detail::concat(
                    "parameter ",
                    one.name,
                    " is a part of a larger tensor, whose memory Sharding::parameters would free; give it memory of its "
                    "own, as clone() does"
                )};
            }
            all.push_back({std::move(one)});
        }
        return joinable::parameters(std::move(all));
    }
    void
    list_parts(at::Tensor const& tensor, std::string const& name, std::vector<std::size_t>& list) {
        auto const found = indices_.find(tensor.unsafeGetTensorImpl());
        if (found == indices_.end()) {
            throw ContractViolation{detail::concat(
                "use(): ", name, " is no parameter of the module of this ShardedDataParallel"
            )};
        }
        list.push_back(found->second);
    }

    static ShardedOptions
    with_clip(ShardedOptions options, std::shared_ptr<detail::TorchClips> const& clip) {
        if (!options.step_in_backward) {
            options.shared.emplace_back(clip->all);
            options.before_step = [clip, first = std::move(options.before_step)](
                                      ShardGradients const& gradients
                                  ) {
                bool const is_due = std::exchange(clip->all.is_due, false);
                detail::TorchClip const own = std::exchange(clip->own, {});
                if (own.is_due && !is_due) {
                    throw Mismatch{
                        {},
                        "clip_grad_norm_() was called before this step here, but not on the lowest rank that has "
                        "not joined; call it on all ranks that have not"
                    };
                }
                if (is_due) {
                    (own.is_due ? own : clip->all).require_same(gradients);
                }
                if (first && !first(gradients)) {
                    return false;
                }
                if (is_due) {
                    ClipNorm norm{clip->all.max_norm, {.norm_type = clip->all.norm_type}};
                    norm(gradients);
                    clip->norm = norm.norm();
                }
                return true;
            };
        }
        return options;
    }

    std::shared_ptr<detail::TorchClips> clip_;             ///< null: steps in the backward pass
    std::unordered_map<void const*, std::size_t> indices_; ///< of parameters
};

template <class Comm, class Holder, class R>
ShardedDataParallel(
    Comm&, Holder&, R, ShardedOptions = {}
) -> ShardedDataParallel<Comm, detail::TorchModule<Holder>, typename detail::TorchRuleOf<R>::type>;

/// The class for arguments that fit no constructor. It holds only the explanation.
template <class Options>
class ShardedDataParallel<detail::NoCommunicator, detail::NoCommunicator, Options> {
    static_assert(
        !std::is_same_v<Options, ShardedOptions>,
        "torch::ShardedDataParallel: expected a communicator, a variable that is a module, a holder or a pointer, not a "
        "temporary such as std::make_shared<Net>(), the optimizer as in Adam{...} or a factory, then options in braces "
        "with the names and the order of ShardedOptions; write ShardedOptions{...} to be told which name is wrong"
    );

public:
    template <class... Arguments>
    explicit ShardedDataParallel(Arguments&&...);
    explicit ShardedDataParallel(...);
};
/// `...` takes temporaries, missing arguments, too many, or braces with a wrong name.
ShardedDataParallel(detail::AnyArgument, ...)
    -> ShardedDataParallel<detail::NoCommunicator, detail::NoCommunicator, ShardedOptions>;

}}} // namespace joinable::v0::torch
