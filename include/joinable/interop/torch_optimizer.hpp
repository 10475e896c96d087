// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/detail/type_name.hpp>
#include <joinable/error.hpp>
#include <joinable/interop/torch_tensor.hpp>
#include <joinable/join/round.hpp>
#include <joinable/optimizer/local_optimizer.hpp>
#include <joinable/participant/needs_header.hpp>
#include <joinable/participant/sharded/zero_options.hpp>
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/dtype.hpp>

/// @file
/// The optimizers of libtorch, with the state dealt out to ranks. Opt-in; needs libtorch 1.13 or later. Include
/// <torch/torch.h> as well:
/// ```cpp
/// joinable::torch::DistributedDataParallel ddp{comm, model};
/// joinable::torch::Optimizer optimizer{comm, model->parameters(), [](std::vector<torch::Tensor> mine) {
///     return torch::optim::Adam{std::move(mine), torch::optim::AdamOptions{1e-3}};
/// }};
/// torch::optim::StepLR schedule{optimizer.local(), 30, 0.1}; // on each rank; stepped after each guard
/// joinable::Join join{joinable::participants(ddp, optimizer)};
/// ```

namespace joinable { inline namespace v0 {
namespace torch {

/// The numbers in the options of an optimizer of libtorch, and the tensors in its state of a parameter, for
/// joinable::torch::Optimizer. SGD, Adam, AdamW, RMSprop and Adagrad have them here; for another optimizer derive this
/// struct from the traits of its base class, or specialise it with static members, where `numbers` are the present
/// settings as a `std::span<double const>`:
///
/// | member                            | meaning                                                                  |
/// |-----------------------------------|--------------------------------------------------------------------------|
/// | Options, State                    | the types of its options and of its state of a parameter                 |
/// | settings                          | names in a constexpr `std::array<std::string_view, N>`                   |
/// | for_each_setting(options, f)      | calls f with a reference to each setting, in the order of `settings`     |
/// | state_names(numbers)              | the names of the tensors that State has with these settings, in a        |
/// |                                   | `std::span<std::string_view const>` of memory that stays                 |
/// | for_each_state(state, numbers, f) | calls f with a reference to each of these tensors, in the order of names |
/// | counts_steps                      | a constexpr bool: whether State has step(), which counts them            |
/// | first_state(parameter, numbers)   | optional: the `std::unique_ptr<State>` before the first step, if the     |
/// |                                   | optimizer does not make it in that step                                  |
template <class O>
struct optimizer_traits;

} // namespace torch

namespace detail {

/// The state of a parameter that an optimizer has: so many of the tensors in its table.
struct TorchStates {
    std::size_t first;
    std::size_t count;
};

/// The members of optimizer_traits, from tables in `Self`: `settings` and `states` are names, settings_of(options) and
/// states_of(state) tie what they name, and used_states(numbers) says which states there are with these settings.
template <class Self, class OptionsOf, class StateOf>
struct TorchTable {
    using Options = OptionsOf;
    using State = StateOf;
    static constexpr bool counts_steps = true; ///< whether State has step()
    /// Calls `f` with each setting, in the order of their names.
    template <class F>
    static void for_each_setting(Options& o, F const& f) {
        std::apply([&](auto&... each) { (f(each), ...); }, Self::settings_of(o));
    }
    /// The names of the state with these settings, which are numbers in the order of their names.
    static std::span<std::string_view const> state_names(std::span<double const> s) {
        TorchStates const used = Self::used_states(s);
        return std::span{Self::states}.subspan(used.first, used.count);
    }
    /// Calls `f` with the tensors of these names.
    template <class F>
    static void for_each_state(State& state, std::span<double const> s, F const& f) {
        TorchStates const used = Self::used_states(s);
        std::size_t k = 0;
        auto const visit = [&](at::Tensor& tensor) {
            if (std::size_t const i = k++; i >= used.first && i < used.first + used.count) {
                f(tensor);
            }
        };
        std::apply([&](auto&... each) { (visit(each), ...); }, Self::states_of(state));
    }
};

template <class Self, class OptionsOf, class StateOf>
struct TorchAdamTable : TorchTable<Self, OptionsOf, StateOf> {
    static constexpr std::array<std::string_view, 6> settings{
        "lr", "beta1", "beta2", "eps", "weight_decay", "amsgrad"
    };
    static constexpr std::array<std::string_view, 3> states{
        "exp_avg", "exp_avg_sq", "max_exp_avg_sq"
    };
    static auto settings_of(OptionsOf& o) {
        auto& [beta1, beta2] = o.betas();
        return std::tie(o.lr(), beta1, beta2, o.eps(), o.weight_decay(), o.amsgrad());
    }
    static auto states_of(StateOf& state) {
        return std::tie(state.exp_avg(), state.exp_avg_sq(), state.max_exp_avg_sq());
    }
    static TorchStates used_states(std::span<double const> s) { return {0, s[5] != 0 ? 3U : 2U}; }
};

} // namespace detail

namespace torch {

template <>
struct optimizer_traits<::torch::optim::SGD> : detail::TorchTable<
                                                   optimizer_traits<::torch::optim::SGD>,
                                                   ::torch::optim::SGDOptions,
                                                   ::torch::optim::SGDParamState> {
    static constexpr bool counts_steps = false;
    static constexpr std::array<std::string_view, 5> settings{
        "lr", "momentum", "dampening", "weight_decay", "nesterov"
    };
    static constexpr std::array<std::string_view, 1> states{"momentum_buffer"};
    static auto settings_of(Options& o) {
        return std::tie(o.lr(), o.momentum(), o.dampening(), o.weight_decay(), o.nesterov());
    }
    static auto states_of(State& state) { return std::tie(state.momentum_buffer()); }
    static detail::TorchStates used_states(std::span<double const> s) {
        return {0, s[1] != 0 ? 1U : 0U};
    }
};

template <>
struct optimizer_traits<::torch::optim::Adam> : detail::TorchAdamTable<
                                                    optimizer_traits<::torch::optim::Adam>,
                                                    ::torch::optim::AdamOptions,
                                                    ::torch::optim::AdamParamState> {};
template <>
struct optimizer_traits<::torch::optim::AdamW> : detail::TorchAdamTable<
                                                     optimizer_traits<::torch::optim::AdamW>,
                                                     ::torch::optim::AdamWOptions,
                                                     ::torch::optim::AdamWParamState> {};

template <>
struct optimizer_traits<::torch::optim::RMSprop> : detail::TorchTable<
                                                       optimizer_traits<::torch::optim::RMSprop>,
                                                       ::torch::optim::RMSpropOptions,
                                                       ::torch::optim::RMSpropParamState> {
    static constexpr std::array<std::string_view, 6> settings{
        "lr", "alpha", "eps", "weight_decay", "momentum", "centered"
    };
    static constexpr std::array<std::string_view, 3> states{
        "grad_avg", "square_avg", "momentum_buffer"
    };
    static auto settings_of(Options& o) {
        return std::tie(o.lr(), o.alpha(), o.eps(), o.weight_decay(), o.momentum(), o.centered());
    }
    static auto states_of(State& state) {
        return std::tie(state.grad_avg(), state.square_avg(), state.momentum_buffer());
    }
    static detail::TorchStates used_states(std::span<double const> s) {
        std::size_t const first = s[5] != 0 ? 0 : 1;
        return {first, 2 - first + (s[4] != 0 ? 1 : 0)};
    }
};

template <>
struct optimizer_traits<::torch::optim::Adagrad> : detail::TorchTable<
                                                       optimizer_traits<::torch::optim::Adagrad>,
                                                       ::torch::optim::AdagradOptions,
                                                       ::torch::optim::AdagradParamState> {
    static constexpr std::array<std::string_view, 5> settings{
        "lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"
    };
    static constexpr std::array<std::string_view, 1> states{"sum"};
    static auto settings_of(Options& o) {
        return std::tie(
            o.lr(), o.lr_decay(), o.weight_decay(), o.initial_accumulator_value(), o.eps()
        );
    }
    static auto states_of(State& state) { return std::tie(state.sum()); }
    static detail::TorchStates used_states(std::span<double const>) { return {0, 1}; }
    /// The state of a parameter before its first step, if the optimizer does not make it in the step. Optional.
    static std::unique_ptr<State>
    first_state(at::Tensor const& parameter, std::span<double const> s) {
        auto state = std::make_unique<State>();
        state->sum(at::full_like(parameter, s[3]));
        return state;
    }
};

} // namespace torch

namespace detail {

template <class O>
concept has_torch_optimizer_traits = requires { sizeof(torch::optimizer_traits<O>); };

template <class O>
consteval bool models_torch_optimizer() {
    static_assert(
        !std::is_same_v<O, ::torch::optim::LBFGS>,
        "torch::Optimizer: LBFGS finds one direction for all parameters from all gradients, so no rank can step a part "
        "of them; give a factory of SGD, Adam, AdamW, RMSprop or Adagrad"
    );
    static_assert(
        std::is_same_v<O, ::torch::optim::LBFGS> ||
            (std::derived_from<O, ::torch::optim::Optimizer> && has_torch_optimizer_traits<O>),
        "torch::Optimizer: after the parameters comes a factory, which takes a std::vector<torch::Tensor> and returns an "
        "SGD, Adam, AdamW, RMSprop or Adagrad of libtorch, or another optimizer with joinable::torch::optimizer_traits"
    );
    return has_torch_optimizer_traits<O>;
}

/// The result of a factory. An argument in its place that is none stays, to be explained.
template <class Factory>
struct TorchMadeBy : std::type_identity<Factory> {};
template <std::invocable<std::vector<at::Tensor>> Factory>
struct TorchMadeBy<Factory> : std::invoke_result<Factory, std::vector<at::Tensor>> {};

/// The numbers in the options of a group of parameters, as they travel.
template <class O>
struct TorchSettings {
    using Traits = torch::optimizer_traits<O>;

    std::array<double, Traits::settings.size()> numbers;

    [[nodiscard]] std::span<std::string_view const> state_names() const {
        return Traits::state_names(numbers);
    }
    void agree_on(AgreementList& list) const {
        list.add("optimizer", class_name<O>()); // Adam and AdamW have the same settings and state
        for (std::size_t k = 0; k < numbers.size(); ++k) {
            list.add(Traits::settings[k], numbers[k]);
        }
    }
};

/// A LocalOptimizer that steps by an optimizer of libtorch, which a factory makes for what this rank owns. The
/// tensors of its state lie where the shards keep state, so that a Checkpoint has them.
template <class O>
class TorchLocalOptimizer {
    using Traits = torch::optimizer_traits<O>;
    using Settings = TorchSettings<O>;
    using State = typename Traits::State;

public:
    using Factory = std::function<O(std::vector<at::Tensor>)>;

    template <class Made>
    explicit TorchLocalOptimizer(Made factory) : factory_{std::move(factory)} {
        static_assert(
            std::is_same_v<typename TorchMadeBy<Made>::type, O>,
            "torch::Optimizer: this factory does not return the class of this Optimizer, and what another one adds, as its own "
            "step(), would be lost; make an Optimizer of that class"
        );
    }

    [[nodiscard]] O& optimizer() const noexcept { return *optimizer_; }

    void take(std::span<WholeParameter const> own) {
        std::vector<at::Tensor> tensors;
        for (WholeParameter const& one : own) {
            own_.push_back({one.index, over(one.value)});
            tensors.push_back(own_.back().value);
        }
        optimizer_.reset(new O(factory_(tensors))); // may be what cannot be moved
        auto const& groups = optimizer_->param_groups();
        std::vector<at::Tensor> members;
        for (auto const& group : groups) {
            members.insert(members.end(), group.params().begin(), group.params().end());
        }
        auto const stepped =
            std::count_if(tensors.begin(), tensors.end(), [&](at::Tensor const& tensor) {
                return std::any_of(members.begin(), members.end(), [&](at::Tensor const& one) {
                    return one.is_same(tensor);
                });
            });
        if (groups.size() != 1 || members.size() != own.size() ||
            static_cast<std::size_t>(stepped) != own.size()) {
            throw ContractViolation{concat(
                "torch::Optimizer: the factory was given ",
                own.size(),
                " tensors and made an optimizer of ",
                members.size(),
                " in ",
                groups.size(),
                " groups, with ",
                stepped,
                " of those given; give that of all of them in one group, and call add_parameter_group() for further ones"
            )};
        }
        factory_ = nullptr;
        read_settings();
    }
    void check() const {
        if (optimizer_->param_groups().size() != 1) {
            throw ContractViolation{
                "torch::Optimizer: the local optimizer of a rank has got another group of parameters, which other "
                "ranks would not know of; call add_parameter_group() of torch::Optimizer on all ranks"
            };
        }
    }

    [[nodiscard]] Settings& settings() {
        read_settings();
        return settings_;
    }
    void apply_settings() {
        std::size_t k = 0;
        Traits::for_each_setting(options(), [&]<class T>(T& setting) {
            setting = static_cast<T>(settings_.numbers[k++]);
        });
    }
    [[nodiscard]] std::span<std::string_view const> state_names() const {
        return optimizer_ ? now().state_names() : std::span<std::string_view const>{};
    }
    void agree_on(AgreementList& list) const {
        if (optimizer_) {
            now().agree_on(list);
        }
    }

    void step(std::span<WholeParameter const> parameters) {
        read_settings();
        at::NoGradGuard const no_graph;
        auto own = own_.begin();
        for (WholeParameter const& parameter : parameters) { // a part of own_, in the same order
            for (; own->index != parameter.index; ++own) {
                own->value.mutable_grad().reset();
            }
            if (own->value.data_ptr() != parameter.value.data()) {
                own->value.set_data(over(parameter.value));
            }
            own->value.mutable_grad() = over(parameter.gradient);
            restore(own->value, parameter);
            ++own;
        }
        for (; own != own_.end(); ++own) {
            own->value.mutable_grad().reset();
        }
        optimizer_->step();
        own = own_.begin();
        for (WholeParameter const& parameter : parameters) {
            for (; own->index != parameter.index; ++own) {
            }
            keep(own->value, parameter);
            own->value.mutable_grad().reset(); // its memory ends elsewhere
        }
    }

private:
    using Keys = typename std::remove_cvref_t<decltype(std::declval<O&>().state())>::key_type;
    struct Own {
        std::size_t index;
        at::Tensor value; ///< shares the parameter's memory
    };

    static at::Tensor over(AnyView const& view) {
        c10::ScalarType type = c10::ScalarType::Float;
        switch (view.dtype()) {
        case DType::f32: break;
        case DType::f64: type = c10::ScalarType::Double; break;
        case DType::f16: type = c10::ScalarType::Half; break;
        case DType::bf16: type = c10::ScalarType::BFloat16; break;
        default:
            throw ContractViolation{concat(
                "torch::Optimizer: a parameter is of ",
                name_of(view.dtype()),
                ", which libtorch's optimizers do not step"
            )};
        }
        bool const is_on_host = view.device().kind == DeviceKind::host;
        c10::Device const device =
            is_on_host
                ? c10::Device{c10::kCPU}
                : c10::Device{c10::kCUDA, static_cast<c10::DeviceIndex>(view.device().index)};
        return tensor_over(view, at::TensorOptions{type}.device(device));
    }
    static Keys key_of(at::Tensor const& tensor) {
        if constexpr (std::is_same_v<Keys, std::string>) { // before libtorch 2.2
            std::ostringstream text;
            text << tensor.unsafeGetTensorImpl();
            return text.str();
        } else {
            return tensor.unsafeGetTensorImpl();
        }
    }

    [[nodiscard]] typename Traits::Options& options() const {
        return static_cast<typename Traits::Options&>(optimizer_->param_groups()[0].options());
    }
    [[nodiscard]] Settings now() const {
        Settings settings{};
        std::size_t k = 0;
        Traits::for_each_setting(options(), [&](auto const& setting) {
            settings.numbers[k++] = static_cast<double>(setting);
        });
        return settings;
    }
    void read_settings() { settings_ = now(); }

    /// Gives libtorch the state of a parameter as the arrays have it, which a file may have filled.
    void restore(at::Tensor const& value, WholeParameter const& parameter) {
        auto& states = optimizer_->state();
        if (parameter.step == 1) {
            if constexpr (requires { Traits::first_state(value, settings_.numbers); }) {
                states[key_of(value)] = Traits::first_state(value, settings_.numbers);
            } else {
                states.erase(key_of(value)); // the step makes it
            }
            return;
        }
        auto& state = states[key_of(value)];
        if (!state) {
            state = std::make_unique<State>();
        }
        place(static_cast<State&>(*state), parameter);
        if constexpr (Traits::counts_steps) {
            static_cast<State&>(*state).step(static_cast<std::int64_t>(parameter.step) - 1);
        }
    }
    /// After a step.
    void keep(at::Tensor const& value, WholeParameter const& parameter) {
        auto const found = optimizer_->state().find(key_of(value));
        if (found != optimizer_->state().end()) {
            auto& state = static_cast<State&>(*found->second);
            std::size_t k = 0;
            Traits::for_each_state(state, settings_.numbers, [&](at::Tensor& tensor) {
                AnyView const& array = parameter.state[k++];
                if (tensor.defined() && tensor.data_ptr() != array.data()) {
                    over(array).copy_(tensor);
                }
            });
            place(state, parameter);
        }
    }
    void place(State& state, WholeParameter const& parameter) {
        std::size_t k = 0;
        Traits::for_each_state(state, settings_.numbers, [&](at::Tensor& tensor) {
            AnyView const& array = parameter.state[k++];
            if (!tensor.defined() || tensor.data_ptr() != array.data()) {
                tensor = over(array);
            }
        });
    }

    Factory factory_;
    std::vector<Own> own_;
    std::unique_ptr<O> optimizer_;
    Settings settings_{};
};

} // namespace detail

namespace torch {

/// joinable::ZeroRedundancyOptimizer with an optimizer of libtorch: each rank keeps the state of the parameters that it
/// owns, steps these, and sends them to the others. The documentation of the base class applies here, too. List it in a
/// guard in place of a Step.
///
/// | libtorch                                | here                                                                |
/// |-----------------------------------------|---------------------------------------------------------------------|
/// | SGD, Adam, AdamW, RMSprop, Adagrad      | made by the factory on each rank, for what that owns; LBFGS is       |
/// |                                         | refused, because it steps all parameters by one direction            |
/// | options of a group, LRScheduler         | those of local(), set equally on all ranks; if ranks have joined,    |
/// |                                         | all take those of the lowest active rank with each step. Step a     |
/// |                                         | scheduler for each batch in ZeroOptions::before_step, which joined  |
/// |                                         | ranks run; one for each epoch after the guard                       |
/// | several groups of parameters            | add_parameter_group() for each further one                          |
/// | zero_grad()                             | that of the module                                                  |
/// | a parameter without a gradient          | is not stepped                                                      |
/// | save(), load()                          | joinable::Checkpoint, which has the state by libtorch's names, such  |
/// |                                         | as exp_avg, and may be read by another number of ranks              |
/// | values of 16 bits                       | stepped as libtorch does, without masters                           |
template <class Comm, class O>
class Optimizer : public ZeroRedundancyOptimizer<Comm, detail::TorchLocalOptimizer<O>> {
    using Rule = detail::TorchLocalOptimizer<O>;
    using Base = ZeroRedundancyOptimizer<Comm, Rule>;

public:
    /// Collective. `parameters` is a vector of tensors or another range that joinable::parameters() takes, such as
    /// joinable::torch::parameters(model), whose names errors and checkpoints then have. `factory` is called once, with
    /// tensors that share the memory of the values that this rank owns, perhaps none, and returns the optimizer for them.
    /// @throws what ZeroRedundancyOptimizer throws, and what the factory throws; the others then throw PeerFailed.
    template <class Parameters, class Factory>
    Optimizer(Comm& comm, Parameters&& parameters, Factory factory, ZeroOptions options = {})
        : Base{
              comm,
              std::forward<Parameters>(parameters),
              Rule{std::move(factory)},
              std::move(options)
          } {}

    /// Adds parameters that have options of their own. Collective, outside a guard. See
    /// ZeroRedundancyOptimizer::add_parameter_group().
    template <class Parameters, class Factory>
    void add_parameter_group(
        Parameters&& parameters, Factory factory, std::vector<int> const& owners = {}
    ) {
        Base::add_parameter_group(
            std::forward<Parameters>(parameters), Rule{std::move(factory)}, owners
        );
    }

    /// The optimizer of this rank for a group: for its options, equally on all ranks, and for a scheduler, one on each
    /// rank. It steps and has state only for what this rank owns, so do not step it. Lives as long as this object. Local.
    [[nodiscard]] O& local(std::size_t group = 0) { return this->rule(group).optimizer(); }

    void step(RoundNotice const& notice = {}) { Base::step(notice); }
    /// Runs `closure`, which clears gradients and computes them, then steps. Returns what it returns, such as the loss.
    /// Collective; on a joined rank only the step runs.
    template <std::invocable Closure>
    auto step(Closure&& closure, RoundNotice const& notice = {}) {
        auto const with_graph = [&] {
            at::AutoGradMode const mode{true};
            return std::forward<Closure>(closure)();
        };
        return Base::step(with_graph, notice);
    }
};

template <class Comm, class Parameters, class Factory>
Optimizer(Comm&, Parameters&&, Factory, ZeroOptions = {}) -> Optimizer<
    std::conditional_t<
        detail::has_torch_optimizer_traits<typename detail::TorchMadeBy<Factory>::type>,
        Comm,
        detail::NoCommunicator>,
    typename detail::TorchMadeBy<Factory>::type>;

/// The class for an optimizer that cannot be dealt out. It holds only the explanation.
template <class O>
class Optimizer<detail::NoCommunicator, O> {
    static_assert(detail::models_torch_optimizer<O>());

public:
    explicit Optimizer(...);
};

} // namespace torch
}} // namespace joinable::v0
