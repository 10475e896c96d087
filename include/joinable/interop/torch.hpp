// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Event.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/optim/lbfgs.h>

#include <joinable/bucket/all_reduce.hpp>
#include <joinable/bucket/bucket.hpp>
#include <joinable/bucket/timeline.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/interop/detail/names.hpp>
#include <joinable/interop/torch_tensor.hpp>
#include <joinable/join/joinable.hpp>
#include <joinable/join/result.hpp>
#include <joinable/join/round.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/options.hpp>
#include <joinable/participant/refresh.hpp>
#include <joinable/participant/step.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/parameters.hpp>
#include <joinable/tensor/sparse_rows.hpp>
#include <joinable/tensor/tensor_list.hpp>
#include <joinable/tensor/traits.hpp>

/// @file
/// Data-parallel training for libtorch's C++. Opt-in; needs libtorch 1.13 or later. Include
/// <torch/torch.h> as well:
/// ```cpp
/// joinable::torch::DistributedDataParallel ddp{comm, model};
/// joinable::torch::Step step{comm, optimizer};
/// joinable::Join join{joinable::participants(ddp, step)};
/// for (auto const& batch : batches) {                        // another number of them on each rank
///     optimizer.zero_grad();
///     auto loss = loss_of(ddp.forward(batch.data), batch.target);
///     loss.backward();                                       // averages as gradients become ready
///     step.step();
/// }
/// join.finish();
/// ```
/// In a program that uses the namespace joinable, write names of libtorch with two leading colons.

namespace joinable { inline namespace v0 { namespace detail {

/// The storages of gradients that lie in buckets. Others may keep handles or views of them.
class TorchViews {
public:
    void add(at::Tensor const& gradient) {
        if (storages_.size() == storages_.capacity()) {
            std::erase_if(storages_, [](Weak const& one) { return one.expired(); });
        }
        storages_.push_back(gradient.storage().getWeakStorageImpl());
    }

    /// The buckets end. Gradients that still exist get memory of their own, or none if there is none left.
    void leave() noexcept {
        for (Weak const& one : storages_) {
            if (auto const storage = one.lock()) {
                auto const bytes = static_cast<std::int64_t>(storage->nbytes());
                at::DataPtr own{nullptr, storage->device()};
                try {
                    at::Tensor copy = at::for_blob(storage->data_ptr().get(), {bytes})
                                          .options(at::TensorOptions{at::kByte})
                                          .target_device(storage->device())
                                          .make_tensor()
                                          .clone();
                    own = copy.storage().unsafeGetStorageImpl()->set_data_ptr(
                        at::DataPtr{nullptr, storage->device()}
                    );
                } catch (...) { // NOLINT(bugprone-empty-catch): nobody may read what ends
                }
                storage->set_data_ptr_noswap(std::move(own));
            }
        }
        storages_.clear();
    }

private:
    using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
    std::vector<Weak> storages_;
};

/// Tells a tensor of a module from others.
using TorchIdentity = std::pair<void const*, std::size_t>;

/// A tensor of a module by its name, for error texts.
struct NamedTorchTensor {
    std::string name;
    at::Tensor tensor;                      ///< shares the module's memory
    std::shared_ptr<TorchViews> views = {}; ///< where its gradient is noted, if it is
    bool is_sparse = false;                 ///< its gradient is rows
    at::Tensor indices = {}, values = {};   ///< of the rows that were read last

    [[nodiscard]] TorchIdentity identity() const { return {tensor.unsafeGetTensorImpl(), 0}; }
};

/// A buffer of a module. It is only copied.
struct TorchBuffer {
    std::string name;
    at::Tensor tensor; ///< shares the module's memory
    /// Of TorchScript: where the buffer is, because a pass may put another tensor there, or None.
    c10::intrusive_ptr<c10::ivalue::Object> object = {};
    std::size_t slot = 0;
    using Storage = c10::weak_intrusive_ptr<c10::StorageImpl>;
    mutable std::optional<Storage> storage = {}; ///< which nobody but the module reads
    struct Version {
        Storage storage;
        std::int64_t changes;
    };
    std::optional<Version> before_pass = {}; ///< if ranks send it after the pass

    /// Undefined if there is None.
    [[nodiscard]] at::Tensor now() const {
        if (!object) {
            return tensor;
        }
        c10::IValue const value = object->getSlot(slot);
        return value.isTensor() ? value.toTensor() : at::Tensor{};
    }
    /// To be written. What a pass has put there may be its input, or what autograd still reads, so
    /// the module gets a copy.
    [[nodiscard]] at::Tensor own() const {
        at::Tensor value = now();
        if (object && !value.defined()) {
            throw ContractViolation{concat(
                "buffer ",
                name,
                " is None, but was a tensor when the module was listed; let each pass leave a "
                "tensor there, or name it in DataParallelOptions::ignore"
            )};
        }
        if (object && value.has_storage() && !(storage == value.storage().getWeakStorageImpl())) {
            value = value.detach().clone();
            storage = value.storage().getWeakStorageImpl();
            object->setSlot(slot, value);
        }
        return value;
    }
    [[nodiscard]] TorchIdentity identity() const {
        return object ? TorchIdentity{object.get(), slot}
                      : TorchIdentity{tensor.unsafeGetTensorImpl(), 0};
    }

    void begin_pass() { before_pass = version(); }
    /// Called before ranks take another rank's value, which libtorch does not see. A buffer that the pass has changed
    /// in place counts as changed once more: autograd then refuses to read what it saved of it.
    void expect_write() const {
        std::optional<Version> const last = version();
        if (before_pass && last && before_pass->storage == last->storage &&
            before_pass->changes != last->changes) {
            now().unsafeGetTensorImpl()->bump_version();
        }
    }
    /// None for what libtorch does not count the changes of.
    [[nodiscard]] std::optional<Version> version() const {
        at::Tensor const value = now();
        return value.defined() && value.has_storage() && !value.is_inference()
                   ? std::optional{Version{value.storage().getWeakStorageImpl(), value._version()}}
                   : std::nullopt;
    }
};

}}} // namespace joinable::v0::detail

namespace joinable { inline namespace v0 {

template <>
struct tensor_traits<detail::TorchBuffer> {
    using Tensor = tensor_traits<at::Tensor>;

    /// Elements that have no DType, such as floats of 8 bits, travel as integers of their size.
    static DType dtype(detail::TorchBuffer const& buffer) {
        c10::ScalarType const type = detail::strided(buffer.own()).scalar_type();
        if (!detail::find_dtype_of_torch(type) && !c10::isQIntType(type)) {
            switch (buffer.own().element_size()) {
            case 1: return DType::u8;
            case 2: return DType::u16;
            case 4: return DType::u32;
            default: break;
            }
        }
        return detail::dtype_of_torch(type);
    }
    static void* data(detail::TorchBuffer const& buffer) { return Tensor::data(buffer.own()); }
    static auto extents(detail::TorchBuffer const& buffer) { return Tensor::extents(buffer.own()); }
    static auto strides(detail::TorchBuffer const& buffer) { return Tensor::strides(buffer.own()); }
    static DeviceId device(detail::TorchBuffer const& buffer) {
        return Tensor::device(buffer.own());
    }
};

template <>
struct parameter_traits<detail::NamedTorchTensor> {
    using Tensor = parameter_traits<at::Tensor>;
    static constexpr bool is_handle = true;

    static at::Tensor* value(detail::NamedTorchTensor& p) noexcept { return &p.tensor; }
    static at::Tensor* grad(detail::NamedTorchTensor& p) {
        at::Tensor* const gradient = Tensor::grad(p.tensor);
        return gradient != nullptr && gradient->layout() == c10::kSparse ? nullptr : gradient;
    }
    static bool requires_grad(detail::NamedTorchTensor const& p) {
        return p.tensor.requires_grad();
    }
    static std::string_view name(detail::NamedTorchTensor const& p) noexcept { return p.name; }
    static void set_grad(detail::NamedTorchTensor& p, AnyView const& view) {
        Tensor::set_grad(p.tensor, view);
        if (p.views) {
            p.views->add(p.tensor.grad());
        }
    }
    static void release_grad(detail::NamedTorchTensor& p) { Tensor::release_grad(p.tensor); }

    static bool is_sparse(detail::NamedTorchTensor const& p) noexcept { return p.is_sparse; }
    static SparseRows sparse_grad(detail::NamedTorchTensor& p) {
        at::Tensor const* const gradient = Tensor::grad(p.tensor);
        if (gradient == nullptr || gradient->layout() != c10::kSparse) {
            return {};
        }
        if (gradient->_nnz() == 0) { // libtorch 1.13's zero_() leaves one with other dimensions
            auto extents = p.tensor.sizes().vec();
            extents[0] = 0;
            p.indices = gradient->_indices().new_empty({0});
            p.values = gradient->_values().new_empty(extents);
            return {AnyView{p.indices}, AnyView{p.values}};
        }
        if (gradient->sparse_dim() != 1) {
            throw ContractViolation{detail::concat(
                "the sparse gradient of ",
                p.name,
                " has ",
                gradient->sparse_dim(),
                " sparse dimensions; give it rows, which have one"
            )};
        }
        p.indices = gradient->_indices().select(0, 0).contiguous();
        p.values = gradient->_values();
        return {AnyView{p.indices}, AnyView{p.values}};
    }
    /// The gradient has memory of its own, which optimizers may write, and is coalesced.
    static void set_sparse_grad(detail::NamedTorchTensor& p, SparseRows const& rows) {
        p.indices.reset();
        p.values.reset();
        at::TensorOptions const options = p.tensor.options().requires_grad(false);
        p.tensor.mutable_grad() =
            at::_sparse_coo_tensor_unsafe(
                detail::tensor_over(rows.indices, options.dtype(at::kLong)).clone().unsqueeze(0),
                detail::tensor_over(rows.values, options).clone(),
                p.tensor.sizes(),
                options.layout(c10::kSparse)
            )
                ._coalesced_(true);
    }
};

}} // namespace joinable::v0

namespace joinable { inline namespace v0 { namespace torch {

/// The parameters of a module, a holder or a pointer to one, with their names. A parameter that is
/// registered twice (tied weights) is listed once. Local.
template <class Module>
[[nodiscard]] ParameterList parameters(Module&& module);
/// The buffers of a module, such as running means. Local.
template <class Module>
[[nodiscard]] BufferList buffers(Module&& module);

}}} // namespace joinable::v0::torch

namespace joinable { inline namespace v0 { namespace detail {

/// The module itself, or the module that a holder or a pointer refers to. Throws ContractViolation if it refers to none.
template <class Module>
auto& torch_module_of(Module& module) {
    constexpr bool is_module = requires { module.named_parameters(); };
    constexpr bool refers_to_one = requires { module->named_parameters(); };
    static_assert(
        is_module || refers_to_one,
        "joinable::torch: expected a module of libtorch, a holder such as torch::nn::Sequential, or a pointer to a module"
    );
    if constexpr (!is_module && refers_to_one) {
        bool is_empty = false;
        if constexpr (requires { module.is_empty(); }) {
            is_empty = module.is_empty();
        } else if constexpr (requires { module == nullptr; }) {
            is_empty = module == nullptr;
        }
        if (is_empty) {
            throw ContractViolation{
                "joinable::torch: a holder or a pointer was given that refers to no module; make the module first"
            };
        }
        return *module;
    } else {
        return module;
    }
}
template <class Holder>
using TorchModule = std::remove_reference_t<decltype(torch_module_of(std::declval<Holder&>()))>;

/// The shared pointer type that this libtorch uses.
using TorchNode =
    decltype(::torch::autograd::impl::grad_accumulator(std::declval<at::Tensor const&>()));

/// Runs after autograd has written a gradient, with the one that autograd gave to it.
class TorchHook final : public ::torch::autograd::FunctionPostHook {
public:
    explicit TorchHook(std::function<void(at::Tensor const&)> body) : body_{std::move(body)} {}
    ::torch::autograd::variable_list operator()(
        ::torch::autograd::variable_list const& outputs,
        ::torch::autograd::variable_list const& inputs
    ) override {
        body_(inputs.empty() ? at::Tensor{} : inputs.front());
        return outputs;
    }

private:
    std::function<void(at::Tensor const&)> body_;
};

/// Gives a gradient memory of its own if autograd or the user may still read what it has. Autograd takes over what it
/// computed, `made`, without a copy if no other tensor is the same, but nodes that have yet to run may hold views of it.
inline void take_apart(at::Tensor& gradient, at::Tensor const& made) {
    if (gradient.is_conj() || gradient.is_neg()) { // numbers that are computed when they are read
        gradient = gradient.clone();
        return;
    }
    if (!gradient.has_storage() || !made.has_storage() || !gradient.is_alias_of(made)) {
        return;
    }
    // A view keeps the tensor that it is of. Those of a Linear's gradients, for example, nobody else has.
    bool const is_view = made.is_view();
    bool const is_held = is_view && made._base().use_count() > 1;
    if (is_held || gradient.storage().use_count() > (is_view ? 3U : 2U)) {
        gradient = gradient.clone();
    }
}

/// Calls `visit` with the nodes of the graph of these tensors. It goes on behind those for which `visit` returns true.
template <class F>
void for_each_node(std::vector<at::Tensor> const& outputs, F const& visit) {
    std::vector<::torch::autograd::Node*> open;
    auto const reach = [&](auto const& node) {
        if (node && visit(*node)) {
            open.push_back(&*node);
        }
    };
    for (at::Tensor const& output : outputs) {
        reach(::torch::autograd::impl::gradient_edge(output).function);
    }
    while (!open.empty()) {
        auto const* const node = open.back();
        open.pop_back();
        for (auto const& edge : node->next_edges()) {
            reach(edge.function);
        }
    }
}

/// Notifies when the gradients of parameters are final, through the nodes that accumulate them.
class TorchGradients {
public:
    TorchGradients() = default;
    TorchGradients(TorchGradients const&) = delete;
    TorchGradients& operator=(TorchGradients const&) = delete;
    ~TorchGradients() { forget(); }

    /// Calls `ready(i)` within the backward passes of all graphs, during the lifetime of this
    /// object or until the next call.
    void watch(
        std::vector<NamedTorchTensor> const& parameters,
        std::function<void(std::size_t)> const& ready
    ) {
        forget();
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            if (at::Tensor const& tensor = parameters[i].tensor; tensor.requires_grad()) {
                // Held, or each graph would make a new node without the hook.
                TorchNode node = ::torch::autograd::impl::grad_accumulator(tensor);
                auto const hook = node->add_post_hook(
                    std::make_unique<TorchHook>([this, ready, i, tensor](at::Tensor const& made) {
                        take_apart(tensor.mutable_grad(), made);
                        order_caller(tensor.device());
                        ready(i);
                    })
                );
                watched_.push_back({tensor, std::move(node), hook, i});
            }
        }
    }

    /// A forward pass begins on the current stream of each device, on which gradients will be reduced.
    void begin_pass() {
        callers_.clear();
        for (Watched const& watched : watched_) {
            c10::Device const device = watched.tensor.device();
            if (!device.is_cpu() && caller_of(device) == callers_.end()) {
                callers_.push_back(current_stream(device));
            }
        }
    }

    /// The first parameter whose gradients no hook notices any more: libtorch gives a tensor that is
    /// converted another node, and none back when it is converted back.
    [[nodiscard]] std::optional<std::size_t> unwatched() const {
        for (Watched const& watched : watched_) {
            if (::torch::autograd::impl::try_get_grad_accumulator(watched.tensor) != watched.node) {
                return watched.parameter;
            }
        }
        return std::nullopt;
    }
    /// Whether a backward pass reaches the node of this tensor, so that needs no other notice.
    [[nodiscard]] bool watches(at::Tensor const& tensor) const {
        return std::any_of(watched_.begin(), watched_.end(), [&](Watched const& watched) {
            return watched.tensor.unsafeGetTensorImpl() == tensor.unsafeGetTensorImpl();
        });
    }
    /// Whether the backward pass that runs in this thread adds to gradients of parameters. One for
    /// torch::autograd::grad(), as for a gradient penalty, returns what it computes instead.
    [[nodiscard]] bool are_accumulated() const {
        auto const* const nodes = ::torch::autograd::get_current_graph_task_exec_info();
        return nodes == nullptr || nodes->empty() ||
               std::any_of(watched_.begin(), watched_.end(), [&](Watched const& watched) {
                   auto const found = nodes->find(&*watched.node);
                   return found != nodes->end() && found->second.needed_;
               });
    }

    /// The parameters that the graph of these tensors does not reach.
    [[nodiscard]] std::vector<std::size_t> unused_in(std::vector<at::Tensor> const& outputs) const {
        std::unordered_set<::torch::autograd::Node const*> seen;
        for_each_node(outputs, [&](::torch::autograd::Node const& node) {
            return seen.insert(&node).second;
        });
        std::vector<std::size_t> unused;
        for (Watched const& watched : watched_) {
            if (!seen.contains(&*watched.node)) {
                unused.push_back(watched.parameter);
            }
        }
        return unused;
    }

private:
    struct Watched {
        at::Tensor tensor;
        TorchNode node; ///< accumulates its gradient
        std::uintptr_t hook;
        std::size_t parameter;
    };

    void forget() {
        for (Watched const& watched : watched_) {
            static_cast<void>(watched.node->del_post_hook(watched.hook));
        }
        watched_.clear();
    }

    static c10::Stream current_stream(c10::Device device) {
        return c10::impl::VirtualGuardImpl{device.type()}.getStream(device);
    }

    [[nodiscard]] std::vector<c10::Stream>::const_iterator caller_of(c10::Device device) const {
        return std::find_if(callers_.begin(), callers_.end(), [&](c10::Stream const& caller) {
            return caller.device() == device;
        });
    }

    /// Autograd adds to a gradient on the stream on which watch() was called, and makes the caller's
    /// stream wait for that only when the whole backward pass has run.
    void order_caller(c10::Device device) const {
        auto const caller = caller_of(device);
        if (caller == callers_.end()) {
            return;
        }
        c10::Stream const writer = current_stream(device);
        if (writer != *caller) {
            c10::Event written{writer.device_type()};
            written.record(writer);
            caller->wait(written);
        }
    }

    std::vector<Watched> watched_;
    std::vector<c10::Stream> callers_; ///< of each device but the host
};

/// Hooks on the outputs of a pass. Those of most end with the graph. A leaf, such as an input that
/// the pass returns, lives on: it has one hook, however many passes return it.
class TorchOutputs {
public:
    using Hook = std::function<void(at::Tensor const&)>;

    void follow(std::vector<at::Tensor> const& outputs, Hook const& hook) {
        std::vector<Leaf> leaves;
        for (at::Tensor const& output : outputs) {
            Weak const weak{output.getIntrusivePtr()};
            auto const is_same = [&](Leaf const& leaf) { return leaf.tensor == weak; };
            if (std::any_of(leaves.begin(), leaves.end(), is_same)) {
                continue;
            }
            auto const known = std::find_if(leaves_.begin(), leaves_.end(), is_same);
            if (known != leaves_.end()) {
                leaves.push_back(std::move(*known));
                leaves_.erase(known);
            } else if (unsigned const number = output.register_hook(hook); output.is_leaf()) {
                leaves.push_back({weak, number});
            }
        }
        for (Leaf const& leaf : std::exchange(leaves_, std::move(leaves))) {
            if (auto tensor = leaf.tensor.lock()) {
                at::Tensor{std::move(tensor)}.remove_hook(leaf.hook);
            }
        }
    }

private:
    using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
    struct Leaf {
        Weak tensor; ///< does not keep its memory
        unsigned hook;
    };
    std::vector<Leaf> leaves_; ///< of the last pass
};

template <class...>
inline constexpr bool is_torch_pass = false;
template <class First, class... Rest>
inline constexpr bool is_torch_pass<First, Rest...> =
    std::invocable<First&> || std::same_as<std::remove_cvref_t<First>, RoundNotice>;

template <class T>
concept torch_range = requires(T const& range) {
    std::begin(range);
    std::end(range);
};
template <class T>
concept torch_tuple = requires { std::tuple_size<T>::value; };
template <class T>
concept torch_optional = requires(T const& value) {
    value.has_value();
    *value;
};

/// Whether a result of this type can have a tensor that is found.
template <class T>
consteval bool may_have_tensors() {
    if constexpr (std::same_as<T, at::Tensor> || std::same_as<T, c10::IValue>) {
        return true;
    } else if constexpr (torch_optional<T>) {
        return may_have_tensors<std::remove_cvref_t<decltype(*std::declval<T const&>())>>();
    } else if constexpr (torch_range<T>) {
        return may_have_tensors<
            std::remove_cvref_t<decltype(*std::begin(std::declval<T const&>()))>>();
    } else if constexpr (torch_tuple<T>) {
        return []<std::size_t... I>(std::index_sequence<I...>) {
            return (may_have_tensors<std::remove_cvref_t<std::tuple_element_t<I, T>>>() || ...);
        }(std::make_index_sequence<std::tuple_size_v<T>>{});
    } else {
        return false;
    }
}
/// Appends the tensors that need gradients. Returns false if it cannot look into the result of a
/// pass.
template <class T>
bool append_outputs(T const& value, std::vector<at::Tensor>& outputs) {
    if constexpr (std::same_as<T, at::Tensor>) {
        if (value.defined() && value.requires_grad()) {
            outputs.push_back(value);
        }
        return true;
    } else if constexpr (std::same_as<T, c10::IValue>) { // of TorchScript
        if (value.isTensor()) {
            return append_outputs(value.toTensor(), outputs);
        }
        if (value.isTuple()) {
            return append_outputs(value.toTupleRef().elements().vec(), outputs);
        }
        if (value.isList()) {
            return append_outputs(value.toListRef(), outputs);
        }
        bool all = !value.isObject();
        if (value.isGenericDict()) {
            for (auto const& item : value.toGenericDict()) {
                all = append_outputs(item.value(), outputs) && all;
            }
        }
        return all;
    } else if constexpr (torch_optional<T>) {
        return !value.has_value() || append_outputs(*value, outputs);
    } else if constexpr (torch_range<T>) {
        bool all = true;
        for (auto const& item : value) {
            all = append_outputs(item, outputs) && all;
        }
        return all;
    } else if constexpr (torch_tuple<T>) {
        return std::apply(
            [&](auto const&... items) {
                bool all = true;
                ((all = append_outputs(items, outputs) && all), ...);
                return all;
            },
            value
        );
    } else {
        return std::is_arithmetic_v<T>;
    }
}

/// The name and the tensor of an item that a module lists. Those of a TorchScript module have data members.
template <class Item>
std::string const& torch_name_of(Item const& item) {
    if constexpr (requires { item.key(); }) {
        return item.key();
    } else {
        return item.name;
    }
}
template <class Item>
at::Tensor const& torch_tensor_of(Item const& item) {
    if constexpr (requires { item.key(); }) {
        return item.value();
    } else {
        return item.value;
    }
}

/// The tensors of a module by name, each once, without those that `ignore` names.
template <class Items>
std::vector<NamedTorchTensor> distinct_tensors(
    Items const& items,
    std::vector<std::string> const& ignore = {},
    std::shared_ptr<TorchViews> const& views = {}
) {
    std::vector<NamedTorchTensor> tensors;
    std::unordered_set<void const*> seen;
    for (auto const& item : items) {
        at::Tensor const& tensor = torch_tensor_of(item);
        if (tensor.defined() && !is_named(torch_name_of(item), ignore) &&
            seen.insert(tensor.unsafeGetTensorImpl()).second) {
            tensors.push_back({torch_name_of(item), tensor, views});
        }
    }
    return tensors;
}

/// The weights of Embedding and EmbeddingBag whose gradients are rows.
class TorchSparseWeights {
public:
    template <class Module>
    TorchSparseWeights(Module& module, std::vector<std::string> const& names) {
        if constexpr (std::derived_from<Module, ::torch::nn::Module>) {
            look_at(module);
            for (auto const& part : module.modules(false)) {
                look_at(*part);
            }
        }
        for (auto const& item : module.named_parameters()) {
            if (is_named(torch_name_of(item), names)) {
                weights_.insert(torch_tensor_of(item).unsafeGetTensorImpl());
            }
        }
    }
    /// Notes which of these tensors have such gradients. Throws ContractViolation if one has no gradient to be added to.
    std::vector<NamedTorchTensor> mark(std::vector<NamedTorchTensor> tensors) const {
        for (NamedTorchTensor& one : tensors) {
            if (!one.tensor.is_leaf()) {
                throw ContractViolation{concat(
                    "parameter ",
                    one.name,
                    " is computed from other tensors, so a backward pass adds no gradient to it; register the tensors that "
                    "it is computed from, or what detach() and requires_grad_() make of it"
                )};
            }
            one.is_sparse = weights_.contains(one.tensor.unsafeGetTensorImpl());
        }
        return tensors;
    }

private:
    void look_at(::torch::nn::Module const& module) {
        look_at_one<::torch::nn::EmbeddingImpl>(module);
        look_at_one<::torch::nn::EmbeddingBagImpl>(module);
    }
    template <class Embedding>
    void look_at_one(::torch::nn::Module const& module) {
        auto const* const embedding = dynamic_cast<Embedding const*>(&module);
        if (embedding != nullptr && embedding->options.sparse()) {
            weights_.insert(embedding->weight.unsafeGetTensorImpl());
        }
    }

    std::unordered_set<void const*> weights_;
};

/// Throws ContractViolation if one of `patterns` is the name of no tensor.
inline void require_found(
    std::string_view option,
    std::vector<std::string> const& patterns,
    std::vector<std::string> const& names,
    std::string_view kind
) {
    for (std::string const& pattern : patterns) {
        bool const is_found = std::any_of(names.begin(), names.end(), [&](std::string const& name) {
            return is_named(name, std::string_view{pattern});
        });
        if (!is_found) {
            std::string const near = near_names(pattern, names);
            throw ContractViolation{concat(
                "DataParallelOptions::",
                option,
                " has \"",
                pattern,
                "\", which is the name of no ",
                kind,
                " of the module",
                near.empty() ? ", which has none" : "; near names are " + near
            )};
        }
    }
}
template <class Items>
void append_names(Items const& items, std::vector<std::string>& names) {
    for (auto const& item : items) {
        names.push_back(torch_name_of(item));
    }
}
/// Throws ContractViolation if a tensor has a name that is ignored and another one that is not.
template <class Items>
void require_no_half_ignored(Items const& items, std::vector<std::string> const& ignore) {
    std::unordered_map<void const*, std::string> names;
    for (auto const& item : items) {
        if (!torch_tensor_of(item).defined()) {
            continue;
        }
        auto const [first, is_new] =
            names.try_emplace(torch_tensor_of(item).unsafeGetTensorImpl(), torch_name_of(item));
        bool const is_ignored = is_named(torch_name_of(item), ignore);
        if (!is_new && is_ignored != is_named(first->second, ignore)) {
            throw ContractViolation{concat(
                "DataParallelOptions::ignore names \"",
                is_ignored ? torch_name_of(item) : first->second,
                "\", but not \"",
                is_ignored ? first->second : torch_name_of(item),
                "\", which is the same tensor; name both, or neither"
            )};
        }
    }
}
/// Calls `visit` with each buffer of a module. TorchScript lists only those that cannot be None, unlike those of BatchNorm.
template <class Module, class F>
void for_each_buffer(Module& module, F const& visit) {
    if constexpr (requires { module._ivalue(); }) {
        for (auto const& part : module.named_modules()) {
            auto const object = part.value._ivalue();
            auto const type = object->type();
            for (std::size_t slot = 0; slot < type->numAttributes(); ++slot) {
                if (type->is_buffer(slot)) {
                    std::string const& name = type->getAttributeName(slot);
                    visit(TorchBuffer{
                        part.name.empty() ? name : concat(part.name, ".", name), {}, object, slot
                    });
                }
            }
        }
    } else {
        for (auto const& item : module.named_buffers()) {
            visit(TorchBuffer{item.key(), item.value()});
        }
    }
}
/// Throws ContractViolation if the names in `options` do not fit the module.
template <class Module>
void check_names(Module& module, DataParallelOptions const& options) {
    auto const parameters = module.named_parameters();
    struct Named {
        std::string name;
        at::Tensor value;
    };
    std::vector<Named> buffers;
    for_each_buffer(module, [&](TorchBuffer const& one) {
        buffers.push_back({one.name, one.now()});
    });
    std::vector<std::string> names;
    append_names(parameters, names);
    require_found("sparse", options.sparse, names, "parameter");
    append_names(buffers, names);
    require_found("ignore", options.ignore, names, "parameter or buffer");
    require_no_half_ignored(parameters, options.ignore);
    require_no_half_ignored(buffers, options.ignore);
}

/// The buffers of a module, each once, without those that `ignore` names. Those of TorchScript may
/// be None.
template <class Module>
std::vector<TorchBuffer>
distinct_buffers(Module& module, std::vector<std::string> const& ignore = {}) {
    std::vector<TorchBuffer> buffers;
    std::set<TorchIdentity> seen;
    for_each_buffer(module, [&](TorchBuffer&& one) {
        if ((one.object || one.tensor.defined()) && !is_named(one.name, ignore) &&
            seen.insert(one.identity()).second) {
            if (at::Tensor const value = one.now(); value.has_storage()) {
                one.storage = value.storage().getWeakStorageImpl();
            }
            buffers.push_back(std::move(one));
        }
    });
    return buffers;
}
/// Those of them that are sent: what is None may get any extents.
inline BufferList sent_buffers(std::vector<TorchBuffer> buffers) {
    std::erase_if(buffers, [](TorchBuffer const& one) { return !one.now().defined(); });
    return joinable::buffers(std::move(buffers));
}
template <class Module>
BufferList buffers_of(Module& module, std::vector<std::string> const& ignore = {}) {
    return sent_buffers(distinct_buffers(module, ignore));
}

/// The same for a constructor, whose other ranks learn of what it throws, as for a holder without a module.
template <class Comm, class Holder>
BufferList
announced_buffers_of(Comm& comm, Holder& module, std::vector<std::string> const& ignore = {}) {
    return abort_if_throws(comm, [&] { return buffers_of(torch_module_of(module), ignore); });
}

/// When buffers are sent, if they are.
template <class Options>
std::optional<BufferSync> buffer_sync_of(Options const& options) {
    return options.broadcast_buffers ? std::optional{options.buffer_sync} : std::nullopt;
}

/// The passes of a torch::nn::Module. `Base` is joinable::DistributedDataParallel or joinable::ShardedDataParallel: autograd
/// calls its verbs.
template <class Base, class Module>
class TorchParticipant : public Base {
public:
    /// Gradients stay, in their own memory, as do handles and views of them that others keep.
    ~TorchParticipant() {
        {
            std::lock_guard const lock{in_use_}; // until a thread of autograd has left its hook
            life_->state = has_forward_pass() ? Life::State::ended_in_a_round : Life::State::ended;
        }
        followed_.follow({}, {});
        views_->leave();
    }

    /// Announces a round and runs the module's forward(inputs...), which overlaps with the roll
    /// call. Collective over the active ranks. If it throws, continue with skip().
    template <class... Inputs>
        requires(!is_torch_pass<Inputs...>)
    decltype(auto) forward(Inputs&&... inputs) {
        return forward(RoundNotice{}, std::forward<Inputs>(inputs)...);
    }
    /// The same with a notice: `ddp.forward({.weight = n}, inputs...)`.
    template <class... Inputs>
    decltype(auto) forward(RoundNotice const& notice, Inputs&&... inputs) {
        constexpr bool takes_inputs =
            requires(Module& module) { module.forward(std::forward<Inputs>(inputs)...); };
        static_assert(
            takes_inputs,
            "forward: the module's forward() does not take these inputs; a lambda can call what else the module "
            "has, as in ddp.forward([&] { return module->encode(batch); })"
        );
        if constexpr (takes_inputs) {
            return forward(
                [&] { return module_.forward(std::forward<Inputs>(inputs)...); }, notice
            );
        }
    }
    /// Runs `pass` as the forward pass and returns its result.
    template <std::invocable Pass>
    auto forward(Pass&& pass, RoundNotice notice = {}) -> std::invoke_result_t<Pass> {
        gradients_.begin_pass();
        is_reducing_ = expects_end_ = has_begun_ = false; // of a pass that failed before
        unused_.clear();
        if (!at::GradMode::is_enabled()) {
            notice.phase = Phase::evaluate;
        }
        if (this->trains(notice)) {
            require_watched();
            if (buffer_sync_ == BufferSync::after_forward) {
                for (TorchBuffer& one : buffers_) {
                    one.begin_pass();
                }
            }
        }
        if constexpr (std::is_void_v<std::invoke_result_t<Pass>>) {
            Base::forward(std::forward<Pass>(pass), notice);
            follow_outputs(0);
        } else {
            decltype(auto) outputs = Base::forward(std::forward<Pass>(pass), notice);
            follow_outputs(outputs);
            return outputs;
        }
    }

    /// Calls `loss.backward(gradient)`. The other ranks learn of its exceptions. After one from work on the host,
    /// autograd's threads of devices may not have ended theirs: keep the model until they are idle.
    void backward(at::Tensor const& loss, at::Tensor const& gradient = {}) {
        std::exception_ptr const error = exception_of([&] { loss.backward(gradient); });
        if (error) {
            std::lock_guard const lock{in_use_}; // a thread of a device may still be in a hook
            this->guarded([&] { std::rethrow_exception(error); });
        }
    }

    /// @throws ContractViolation  also if the module has got a parameter or a buffer since it was wrapped.
    void check_guard(GuardView const& guard) const {
        Base::check_guard(guard);
        auto const require_listed = [&](char const* kind, auto const& listed, auto const& now) {
            std::set<TorchIdentity> known;
            for (auto const& one : listed) {
                known.insert(one.identity());
            }
            for (auto const& one : now) {
                if (!known.contains(one.identity())) {
                    throw ContractViolation{concat(
                        kind,
                        " ",
                        one.name,
                        " came into the module after the ",
                        this->join_name(),
                        " was made, so it would be neither averaged nor sent; make the ",
                        this->join_name(),
                        " after the module has all its layers",
                        or_refresh(this->has_refresh())
                    )};
                }
            }
        };
        require_listed(
            "parameter", parameters_, distinct_tensors(module_.named_parameters(), ignore_)
        );
        if (buffer_sync_) {
            require_listed("buffer", buffers_, distinct_buffers(module_, ignore_));
        }
    }

protected:
    struct Passes {
        std::shared_ptr<TorchViews> views = {}; ///< of gradients of the listed parameters
        std::vector<std::string> ignore = {};   ///< names of parameters
        bool finds_unused = false;              ///< reads the graph of what passes return
        bool steps_unused = false; ///< all gradients count, those of unused parameters as zeros
        std::optional<BufferSync> buffer_sync = {}; ///< if buffers are sent
    };
    /// `base` are the arguments of the base class.
    template <class Holder, class... Args>
    TorchParticipant(Holder& module, Passes passes, Args&&... base)
        : Base{std::forward<Args>(base)...}, module_{torch_module_of(module)},
          ignore_{std::move(passes.ignore)},
          parameters_{distinct_tensors(module_.named_parameters(), ignore_)},
          buffers_{distinct_buffers(module_, ignore_)}, views_{std::move(passes.views)},
          finds_unused_{passes.finds_unused}, steps_unused_{passes.steps_unused},
          buffer_sync_{passes.buffer_sync} {
        if constexpr (requires { std::shared_ptr<void>{module.ptr()}; }) {
            keep_ = module.ptr();
        } else if constexpr (std::convertible_to<Holder, std::shared_ptr<void>>) {
            keep_ = module;
        }
        watch();
    }

    /// Whether the value of a parameter was set anew since it was listed. Its storage tells, which is told from others
    /// as long as it is noted here; an address may be that of the next value, too.
    [[nodiscard]] bool has_new_value(std::size_t i) const {
        return !(storages_[i] == parameters_[i].tensor.storage().getWeakStorageImpl());
    }
    /// Others keep what lies in the buckets of before, in memory of its own.
    void use_views(std::shared_ptr<TorchViews> views) {
        std::exchange(views_, std::move(views))->leave();
    }
    /// The buffers for refresh(). What a pass has put in their places since they were listed is not
    /// to be written.
    [[nodiscard]] BufferList relisted_buffers() const {
        std::vector<TorchBuffer> buffers = distinct_buffers(module_, ignore_);
        for (TorchBuffer& one : buffers) {
            for (TorchBuffer const& former : buffers_) {
                if (one.identity() == former.identity()) {
                    one.storage = former.storage;
                }
            }
        }
        return sent_buffers(std::move(buffers));
    }
    /// Follows the gradients of parameters that are listed in place of those of before.
    void follow(std::vector<NamedTorchTensor> parameters) {
        parameters_ = std::move(parameters);
        buffers_ = distinct_buffers(module_, ignore_);
        followed_.follow({}, {});
        unused_.clear();
        watch();
    }

    Module& module_;
    std::vector<std::string> ignore_;

private:
    // The base's verbs, which take a pass that calls ready(i). Here autograd calls it.
    using Base::finalize_backward;
    using Base::mark_ready;
    using Base::prepare_for_backward;
    using Base::prepare_for_forward;
    using Stage = typename Base::Stage;

    void require_watched() {
        this->guarded([&] {
            this->told_to_others([&] {
                if (auto const i = gradients_.unwatched()) {
                    this->require_same_model(
                    ); // it says what a parameter is that was not converted back
                    throw ContractViolation{concat(
                        "parameter ",
                        parameters_[*i].name,
                        " was set anew, by to() and back or by torch::load(), after the ",
                        this->join_name(),
                        " was made, so its gradient would not be averaged; make the ",
                        this->join_name(),
                        " after that",
                        or_refresh(this->has_refresh())
                    )};
                }
            });
        });
    }

    /// After all ranks have accepted the module.
    void watch() {
        abort_if_throws(this->join_communicator(), [&] {
            gradients_.watch(parameters_, [this](std::size_t i) { on_gradient(i); });
            storages_.clear();
            for (NamedTorchTensor const& parameter : parameters_) {
                storages_.push_back(parameter.tensor.storage().getWeakStorageImpl());
            }
        });
    }
    void on_gradient(std::size_t i) {
        std::lock_guard const lock{in_use_};
        require_no_graph(i);
        begin_reduction();
        require_reached(i);
        is_ready_[i] = true;
        Base::mark_ready(i);
    }
    /// With find_unused the base was told what the graph of the outputs does not reach.
    void require_reached(std::size_t i) {
        // unused_ is in the order of the list. A round that does not sync asks nobody what is unused.
        if (this->stage_ == Stage::backward &&
            std::binary_search(unused_.begin(), unused_.end(), i)) {
            this->guarded([&] {
                throw ContractViolation{
                    "parameter " + parameters_[i].name +
                    " got a gradient, but the graph of what forward() returned does not reach it, so find_unused took "
                    "it for unused; return all that the loss uses or, for layers that run again in the backward pass, "
                    "turn static_graph on in place of find_unused"
                };
            });
        }
    }

    /// Such a gradient would be averaged, but not its graph.
    void require_no_graph(std::size_t i) {
        if (at::Tensor const& gradient = parameters_[i].tensor.grad();
            gradient.defined() && gradient.requires_grad()) {
            this->guarded([&] {
                throw ContractViolation{
                    "the gradient of parameter " + parameters_[i].name +
                    " has a graph of its own (create_graph), which would not be averaged; call backward() "
                    "without create_graph, and take gradients for a penalty by torch::autograd::grad()"
                };
            });
        }
    }

    /// The state of this object for hooks on outputs, which outlive it.
    struct Life {
        enum class State : char { lasts, ended, ended_in_a_round };

        std::string name;
        State state = State::lasts;

        /// Called by these hooks before they use the object.
        void require() const {
            auto const* const nodes = ::torch::autograd::get_current_graph_task_exec_info();
            bool const accumulates = nodes == nullptr || nodes->empty();
            if (state == State::ended_in_a_round && accumulates) {
                throw ContractViolation{concat(
                    "the ",
                    name,
                    " was destroyed between forward() and its backward pass, so gradients would not be averaged; "
                    "keep it until the backward pass has run"
                )};
            }
        }
    };

    /// Begins the reduction with the first gradient of a backward pass.
    void begin_reduction() {
        if (is_reducing_) {
            return;
        }
        this->guarded([&] {
            if (!has_forward_pass()) {
                throw ContractViolation{concat(
                    "gradients became ready, but no forward() of the ",
                    this->join_name(),
                    " came before, or its backward pass has been; call ddp.forward(inputs) in place of the "
                    "module's, once before each backward pass, and add losses that share a forward pass"
                )};
            }
        });
        if (std::exchange(has_begun_, true)) { // and failed, while this thread of autograd waited
            throw ContractViolation{
                "the reduction of this backward pass could not begin, as its first error says"
            };
        }
        if (this->stage_ == Stage::forward) { // ranks will send them
            for (TorchBuffer const& one : buffers_) {
                one.expect_write();
            }
        }
        Base::prepare_for_backward(unused_);
        is_reducing_ = true;
        is_ready_.assign(parameters_.size(), false);
        if (!expects_end_) { // it did not come through what forward() returned
            expect_end();
        }
    }
    [[nodiscard]] bool has_forward_pass() const noexcept {
        return this->stage_ == Stage::forward || this->stage_ == Stage::unsynced;
    }

    /// The reduction ends with the backward pass that runs now. A pass within it, as activation
    /// checkpointing runs, has an end of its own.
    void expect_end() {
        expects_end_ = true;
        ::torch::autograd::Engine::get_default_engine().queue_callback([this] {
            std::lock_guard const lock{in_use_}; // the pass around this one may go on
            expects_end_ = false;
            if (std::exchange(is_reducing_, false)) {
                mark_unused();
                Base::finalize_backward();
            }
        });
    }

    /// A parameter that is always stepped sends zeros, or what it holds of earlier passes, if this pass did not use it.
    void mark_unused() {
        for (std::size_t i = 0; steps_unused_ && i < parameters_.size(); ++i) {
            mark_if_unused(i);
        }
    }

    /// A backward pass tells where it reaches what forward() returned.
    template <class Outputs>
    void follow_outputs(Outputs const& outputs) {
        if (!has_forward_pass()) {
            return;
        }
        this->guarded([&] {
            std::vector<at::Tensor> tensors;
            bool const has_all = append_outputs(outputs, tensors);
            bool const gathers = this->hooks().gathers_values();
            if ((finds_unused_ || gathers) && !(has_all && may_have_tensors<Outputs>())) {
                throw ContractViolation{concat(
                    gathers ? "Sharding::parameters" : "find_unused",
                    " reads the graph of what forward() returns; return tensors, or optionals, tuples or ranges of "
                    "them"
                )};
            }
            if (finds_unused_) {
                unused_ = gradients_.unused_in(tensors);
            }
            if constexpr (requires { Base::follows_nodes; }) {
                if (gathers) {
                    Base::follow_nodes(
                        tensors,
                        [this, life = life_](std::uint64_t pass, std::uint64_t node) {
                            reach_node(*life, pass, node);
                        }
                    );
                }
            }
            std::erase_if(tensors, [&](at::Tensor const& tensor) {
                return gradients_.watches(tensor); // a hook on a parameter would stay there
            });
            followed_.follow(tensors, [this, life = life_](at::Tensor const&) {
                life->require();
                if (life->state == Life::State::lasts && gradients_.are_accumulated()) {
                    std::lock_guard const lock{in_use_};
                    expect_end();
                    if (finds_unused_ || steps_unused_) { // the graph may reach no parameter
                        begin_reduction();
                    }
                }
            });
        });
    }

    /// Autograd is about to run a node that may read values, which ranks have in parts.
    void reach_node(Life const& life, std::uint64_t pass, std::uint64_t node) {
        life.require();
        if (life.state != Life::State::lasts) {
            throw ContractViolation{concat(
                "the ",
                life.name,
                " was destroyed before this backward pass, which needs its values; keep it until then"
            )};
        }
        std::lock_guard const lock{in_use_};
        if (!is_reducing_) {
            this->guarded([&] {
                if (!gradients_.are_accumulated()) {
                    throw ContractViolation{
                        "with Sharding::parameters values are gathered for one backward pass, which adds to gradients; "
                        "torch::autograd::grad() of outputs needs Sharding::gradients"
                    };
                }
            });
        }
        begin_reduction();
        this->guarded([&] {
            Base::before_node(pass, node, [this](std::size_t i) { mark_if_unused(i); });
        });
    }
    /// The same for a parameter that this pass does not use, if the average counts it.
    void mark_if_unused(std::size_t i) {
        if (this->stage_ == Stage::backward && parameters_[i].tensor.requires_grad() &&
            !is_ready_[i]) {
            is_ready_[i] = true;
            Base::mark_ready(i);
        }
    }

    std::vector<NamedTorchTensor> parameters_;
    std::vector<TorchBuffer> buffers_;
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages_; ///< of the parameters
    std::shared_ptr<void> keep_;
    TorchGradients gradients_;
    std::shared_ptr<TorchViews> views_;
    bool finds_unused_; ///< in each pass; a static graph finds them in its first round
    bool steps_unused_;
    std::optional<BufferSync> buffer_sync_;
    /// Held by all that autograd calls, which has a thread for each CUDA device.
    std::recursive_mutex in_use_;
    bool is_reducing_ = false; ///< in a backward pass
    bool has_begun_ = false;   ///< since the last forward pass, even if that failed
    bool expects_end_ = false;
    std::vector<bool> is_ready_; ///< of each parameter, in this backward pass
    std::vector<std::size_t> unused_;
    TorchOutputs followed_;
    std::shared_ptr<Life> life_ = std::make_shared<Life>(Life{std::string{this->join_name()}});
};

template <class Optimizer>
struct StepOptimizer {
    static constexpr bool is_of_one_direction = std::derived_from<Optimizer, ::torch::optim::LBFGS>;
    static_assert(
        !is_of_one_direction,
        "Step: LBFGS runs its closure as often as its own rank's losses ask for, so ranks would run different numbers of "
        "rounds; take SGD, Adam, AdamW, RMSprop or Adagrad"
    );
    static_assert(
        is_of_one_direction || requires(Optimizer& optimizer) { optimizer.step(); },
        "Step: after the communicator comes an optimizer of libtorch, as in Step step{comm, optimizer}"
    );
    Optimizer* optimizer;
    void operator()() const { optimizer->step(); }
};

}}} // namespace joinable::v0::detail

namespace joinable { inline namespace v0 { namespace torch {

template <class Module>
ParameterList parameters(Module&& module) {
    auto& named = detail::torch_module_of(module);
    return joinable::parameters(detail::TorchSparseWeights{
        named, {}
    }.mark(detail::distinct_tensors(named.named_parameters())));
}

template <class Module>
BufferList buffers(Module&& module) {
    return detail::buffers_of(detail::torch_module_of(module));
}

/// joinable::DistributedDataParallel of a torch::nn::Module. Autograd tells it when a gradient is
/// final, so a backward pass needs only `loss.backward()`. The documentation of the base class
/// applies here, too. Over NCCL, the stream of NcclCollectives::set_stream() must be libtorch's
/// current one: set both, the latter by a c10::cuda::CUDAStreamGuard around the passes. Over a
/// PerDevice this holds for each device: c10::cuda::CUDAMultiStreamGuard sets the streams of all.
///
/// | torch                                  | here                                                             |
/// |----------------------------------------|------------------------------------------------------------------|
/// | undefined gradients, zero_grad()       | a parameter without a gradient sends zeros and receives the      |
/// |                                        | average                                                          |
/// | frozen and tied parameters             | left out; averaged once                                          |
/// | forward() in NoGradGuard               | an evaluation: nothing is averaged                               |
/// | parameters that the outputs do not use | with DataParallelOptions::find_unused, read off their graph      |
/// | gradient penalties, autograd::grad()   | nothing is averaged until a backward pass adds to gradients      |
/// | backward() with create_graph           | refused by name: an average has no graph                         |
/// | buffers, frozen parameters             | take rank 0's: buffers of any type but quantised ones, frozen    |
/// |                                        | parameters of those that torch_tensor.hpp lists                  |
/// | Embedding, EmbeddingBag, sparse(true)  | send the rows that they have; p.grad() is then the average of    |
/// |                                        | them, coalesced, in memory of its own; not on CUDA. Others whose |
/// |                                        | gradients are sparse are named in DataParallelOptions::sparse    |
/// | _set_params_and_buffers_to_ignore_for_ | DataParallelOptions::ignore: each rank keeps its own values and  |
/// | model(model, names)                    | gradients of these names                                         |
/// | torch::jit::Module (TorchScript)       | forward() takes and returns its IValues; find_unused looks into  |
/// |                                        | tensors, tuples, lists and dictionaries of them. A buffer that   |
/// |                                        | is None when the module is listed is not sent until refresh()    |
/// | a buffer that a pass changes in place  | needs BufferSync::before_forward, as in PyTorch, or a clone() to |
/// | and whose value its backward pass uses | calculate with; else libtorch says that "one of the variables    |
/// |                                        | [...] has been modified by an inplace operation"                 |
/// | activation checkpointing               | passes within the backward pass add to gradients; without        |
/// |                                        | find_unused, whose graph does not have what is computed again    |
/// |                                        | A last layer of that kind needs a forward() that returns the     |
/// |                                        | tensors by which the backward pass reaches it; else the pass     |
/// |                                        | within ends the reduction: "not all gradients became ready"      |
/// | two forward passes, one backward pass  | put both into one forward(pass). In a guard, with find_unused    |
/// |                                        | where they use different parameters, and with                    |
/// |                                        | Sharding::parameters refused; else outside of a guard both       |
/// |                                        | count as one pass, with the notice of the last                   |
/// | a backward pass without a forward() of | refused                                                          |
/// | this class before it                   |                                                                  |
template <class Comm, class Module, class Reduction = AllReduce, Timeline Times = NoTimeline>
class DistributedDataParallel
    : public detail::
          TorchParticipant<joinable::DistributedDataParallel<Comm, Reduction, Times>, Module> {
    using Base = joinable::DistributedDataParallel<Comm, Reduction, Times>;
    using Participant = detail::TorchParticipant<Base, Module>;

public:
    /// Collective. `module` is a torch::nn::Module, a holder (`torch::nn::Sequential`) or a shared pointer,
    /// or a torch::jit::Module. A module itself must outlive this object. Parameters and buffers take rank 0's values.
    /// @throws what joinable::DistributedDataParallel throws; ContractViolation also if a name in
    ///         DataParallelOptions::ignore or sparse is the name of nothing in the module, or one to
    ///         ignore is that of a tensor that has another name, which is not ignored.
    template <class Holder>
    DistributedDataParallel(
        Comm& comm,
        Holder& module,
        DataParallelOptions const& options = {},
        Reduction reduction = {}
    )
        : DistributedDataParallel{
              comm, module, options, std::move(reduction), std::make_shared<detail::TorchViews>()
          } {}

    /// Lists the module again, after to(), after requires_grad of parameters changed, or after it got or lost
    /// layers. Gradients are converted as their values are. Parameters that are new or newly trained, and all buffers, take rank 0's values. Handles of gradients
    /// in the buckets of before keep what they hold, in memory of their own. An optimizer of libtorch gets new
    /// parameters by its add_param_group(). Collective, outside a guard and a round. For more, and for what is thrown,
    /// see joinable::DistributedDataParallel::refresh().
    void refresh() {
        this->require_outside("refresh()");
        DataParallelOptions const options = this->options();
        std::shared_ptr<detail::TorchViews> views;
        std::vector<detail::NamedTorchTensor> parameters;
        auto const list = [&] {
            views = std::make_shared<detail::TorchViews>();
            parameters = detail::distinct_tensors(this->module_.named_parameters(), options.ignore);
            for (detail::NamedTorchTensor const& parameter : parameters) {
                convert_gradient(parameter.tensor);
            }
            return list_of(this->module_, options, views);
        };
        BufferList buffers = this->relisted_buffers();
        detail::Refresh<Base>::relist(
            *this,
            list,
            std::move(buffers),
            {.sends_buffers = true,
             .is_replaced = [&](std::size_t i) { return this->has_new_value(i); },
             .accept = [&] { this->use_views(views); }}
        );
        this->follow(std::move(parameters));
    }

    /// Runs on joined ranks. See joinable::DistributedDataParallel.
    class Hook : public Base::Hook {
    public:
        Hook(DistributedDataParallel& ddp, bool divides_by_initial_world_size)
            : Base::Hook{ddp, divides_by_initial_world_size}, ddp_{ddp} {}

        void main_hook(Round const& round) {
            shadowed_ += round.will_sync() && round.phase() == Phase::train ? 1U : 0U;
            if (round.will_sync() && !round.contributes() && !ddp_.leaves_joined_untouched()) {
                ddp_.drop_ignored_gradients();
            }
            Base::Hook::main_hook(round);
        }
        void post_hook(JoinResult const& result) {
            Base::Hook::post_hook(result);
            if (shadowed_ != 0 && !ddp_.leaves_gradients_local() && !ddp_.steps_joined_ranks() &&
                !std::exchange(ddp_.has_warned_, true)) {
                TORCH_WARN(
                    "joinable: rank ",
                    ddp_.join_communicator().rank(),
                    " had joined for ",
                    shadowed_,
                    " rounds in which its optimizer did not step, so what that keeps (momentum, "
                    "numbers of steps) is behind; list a joinable::torch::Step{comm, optimizer} in "
                    "the guard"
                );
            }
        }

    private:
        DistributedDataParallel& ddp_;
        std::size_t shadowed_ = 0; ///< rounds
    };

    using typename Base::join_keywords;
    [[nodiscard]] Hook join_hook(arguments<join_keywords> const& args) {
        return Hook{*this, Base::divides(args)};
    }

private:
    template <class Holder>
    DistributedDataParallel(
        Comm& comm,
        Holder& module,
        DataParallelOptions const& options,
        Reduction reduction,
        std::shared_ptr<detail::TorchViews> views
    )
        : Participant{
              module,
              {.views = views,
               .ignore = options.ignore,
               .finds_unused = options.find_unused && !options.static_graph,
               .buffer_sync = detail::buffer_sync_of(options)},
              std::function<ParameterList()>{[&module, &options, views] {
                  return list_of(detail::torch_module_of(module), options, views);
              }},
              comm,
              detail::announced_buffers_of(comm, module, options.ignore),
              options,
              std::move(reduction)
          } {}

    /// to() of a module leaves gradients as they were.
    static void convert_gradient(at::Tensor const& tensor) {
        at::Tensor& gradient = tensor.mutable_grad();
        if (gradient.defined() && (gradient.scalar_type() != tensor.scalar_type() ||
                                   gradient.device() != tensor.device())) {
            gradient = gradient.to(tensor.device(), tensor.scalar_type());
        }
    }

    static ParameterList list_of(
        Module& module,
        DataParallelOptions const& options,
        std::shared_ptr<detail::TorchViews> const& views
    ) {
        detail::check_names(module, options);
        return joinable::parameters(detail::TorchSparseWeights{module, options.sparse}.mark(
            detail::distinct_tensors(module.named_parameters(), options.ignore, views)
        ));
    }

    /// Optimizers of joined ranks pass over parameters without a gradient, and would step by an old one. What a rank
    /// accumulated before it joined is stepped with the round that takes it.
    void drop_ignored_gradients() {
        if (std::vector<std::string> const& ignore = this->ignore_; !ignore.empty()) {
            for (auto const& item : this->module_.named_parameters()) {
                if (detail::torch_tensor_of(item).requires_grad() &&
                    detail::is_named(detail::torch_name_of(item), ignore)) {
                    detail::torch_tensor_of(item).mutable_grad().reset();
                }
            }
        }
    }

    bool has_warned_ = false; ///< about an optimizer that is behind
};

template <class Comm, class Holder, class Reduction = AllReduce>
DistributedDataParallel(Comm&, Holder&, DataParallelOptions = {}, Reduction = {})
    -> DistributedDataParallel<Comm, detail::TorchModule<Holder>, Reduction>;

/// The class for arguments that fit no constructor. It holds only the explanation.
template <class Options>
class DistributedDataParallel<detail::NoCommunicator, Options> {
    static_assert(
        !std::is_same_v<Options, DataParallelOptions>,
        "torch::DistributedDataParallel: expected a communicator, a variable that is a module, a holder or a pointer, not a "
        "temporary such as std::make_shared<Net>(), then options in braces with the names and the order of "
        "DataParallelOptions; write DataParallelOptions{...} to be told which name is wrong"
    );

public:
    template <class... Arguments>
    explicit DistributedDataParallel(Arguments&&...);
    explicit DistributedDataParallel(...);
};
/// `...` takes temporaries, missing arguments, too many, or braces with a wrong name.
DistributedDataParallel(detail::AnyArgument, ...)
    -> DistributedDataParallel<detail::NoCommunicator, DataParallelOptions>;

/// Makes a libtorch optimizer a participant, so that it also steps on joined ranks. See joinable::Step.
///
/// Joined ranks run optimizer.step() alone. What else the loop does to gradients or rates for each batch, such as
/// torch::nn::utils::clip_grad_norm_() or a scheduler, they would miss, and values would differ between ranks: put all of it
/// into the body of a `joinable::Step step{comm, [&] { clip(); optimizer.step(); }};`.
template <class Comm, class Optimizer>
class Step : public joinable::Step<Comm, detail::StepOptimizer<Optimizer>> {
public:
    Step(Comm& comm, Optimizer& optimizer)
        : joinable::Step<Comm, detail::StepOptimizer<Optimizer>>{comm, {&optimizer}} {}
};

}}} // namespace joinable::v0::torch
