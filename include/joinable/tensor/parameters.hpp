// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/detail/handle_list.hpp>
#include <joinable/tensor/parameter.hpp>
#include <joinable/tensor/sparse_rows.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

/// A parameter as it was at some time.
struct ParameterState {
    Shape extents; ///< of its value, like the next two
    DeviceId device;
    DType dtype;
    bool has_value;
    bool requires_grad;
    bool is_complex = false; ///< `extents` and `dtype` are of its pairs of reals
};

} // namespace detail

/// A type-erased handle to one parameter of an engine. Cheap to copy. It does not own the parameter
/// unless it was made from an owning pointer or a handle type.
class AnyParameter {
public:
    /// A handle to the parameter `object`. `owner` keeps it alive, if needed.
    template <Parameter P>
    explicit AnyParameter(P& object, std::shared_ptr<void> owner = {})
        : object_{const_cast<std::remove_const_t<P>*>(std::addressof(object))},
          functions_{&table<P>}, owner_{std::move(owner)} {
        static_assert(models_parameter<std::remove_const_t<P>>());
        static_assert(
            !std::is_const_v<P> || detail::is_handle_parameter<P>,
            "parameters: const parameters cannot be trained, since values and gradients are "
            "written; give a range or pointers that are not const"
        );
    }

    /// Complex values and gradients are pairs of reals here, in a last dimension of extent 2.
    [[nodiscard]] AnyView value() const { return functions_->value(object_); }
    /// Empty if the parameter has no gradient now.
    [[nodiscard]] AnyView grad() const { return functions_->grad(object_); }
    /// Whether the value is complex. False if there is none now.
    [[nodiscard]] bool is_complex() const { return functions_->is_complex(object_); }
    /// The gradient's dtype, if the traits say it.
    [[nodiscard]] std::optional<DType> declared_grad_dtype() const {
        return functions_->grad_dtype != nullptr ? functions_->grad_dtype(object_)
                                                 : std::optional<DType>{};
    }
    [[nodiscard]] bool can_set_grad() const noexcept { return functions_->set_grad != nullptr; }
    /// Makes `view` the gradient. It is as grad() would be; the traits get it as they give it.
    /// @throws ContractViolation  the parameter's traits cannot: `can_set_grad()` is false.
    void set_grad(AnyView const& view) const {
        if (!can_set_grad()) {
            throw ContractViolation{"a gradient cannot be set: parameter_traits of this type needs "
                                    "'static void set_grad(P&, AnyView)'"};
        }
        set(functions_->set_grad, view);
    }
    [[nodiscard]] bool can_release_grad() const noexcept {
        return functions_->release_grad != nullptr;
    }
    /// Frees the gradient, if the parameter's traits can.
    void release_grad() const {
        if (functions_->release_grad != nullptr) {
            functions_->release_grad(object_);
        }
    }
    /// Whether the gradient is rows. grad() is empty then, and set_sparse_grad() can be called.
    [[nodiscard]] bool is_sparse() const {
        return functions_->is_sparse != nullptr && functions_->is_sparse(object_);
    }
    /// Empty if the parameter has no rows now, or its type cannot have any.
    [[nodiscard]] SparseRows sparse_grad() const {
        return functions_->sparse_grad != nullptr ? functions_->sparse_grad(object_) : SparseRows{};
    }
    void set_sparse_grad(SparseRows rows) const {
        if (is_complex()) {
            rows.values = detail::as_complex(rows.values);
        }
        functions_->set_sparse_grad(object_, rows);
    }
    [[nodiscard]] bool can_set_value() const noexcept { return functions_->set_value != nullptr; }
    /// Makes `view` the value; release_value() frees or forgets it. Both need can_set_value().
    void set_value(AnyView const& view) const { set(functions_->set_value, view); }
    void release_value() const { functions_->release_value(object_); }
    [[nodiscard]] bool requires_grad() const { return functions_->requires_grad(object_); }
    /// Whether the parameter is what it was: it requires a gradient as before, and its value has the
    /// same extents, dtype and device, unless it has none or had none. Cheaper than value().
    [[nodiscard]] bool is_as(detail::ParameterState const& before) const {
        return before.is_complex ? functions_->is_as(object_, complex_form_of(before))
                                 : functions_->is_as(object_, before);
    }
    /// The object and its type, whether or not it has a value now. Each list has its own copies of a
    /// handle type.
    [[nodiscard]] std::pair<std::uintptr_t, std::uintptr_t> identity() const noexcept {
        return {
            reinterpret_cast<std::uintptr_t>(object_), reinterpret_cast<std::uintptr_t>(functions_)
        };
    }
    /// Empty if the parameter has no name.
    [[nodiscard]] std::string_view name() const { return functions_->name(object_); }

    template <class P>
    static constexpr bool takes = Parameter<P>;
    template <class P>
    static constexpr bool shares_storage = detail::is_handle_parameter<P>;
    [[noreturn]] static AnyParameter of_null(std::size_t position) {
        throw ContractViolation{detail::concat("parameters: pointer ", position, " is null")};
    }

private:
    /// Gives the traits a view as theirs are.
    void set(void (*function)(void*, AnyView const&), AnyView const& view) const {
        if (is_complex()) {
            function(object_, detail::as_complex(view));
        } else {
            function(object_, view);
        }
    }
    /// The same with the extents that the traits tell.
    [[nodiscard]] static detail::ParameterState complex_form_of(detail::ParameterState before) {
        before.extents = detail::without_last(before.extents);
        before.dtype = detail::complex_of(before.dtype);
        return before;
    }

    struct Functions {
        AnyView (*value)(void*);
        bool (*is_complex)(void*);
        AnyView (*grad)(void*);
        std::optional<DType> (*grad_dtype)(void*); ///< null: not supported
        void (*set_grad)(void*, AnyView const&);   ///< null: not supported
        void (*release_grad)(void*);               ///< null: not supported
        void (*set_value)(void*, AnyView const&);  ///< null, like the next one: not supported
        void (*release_value)(void*);
        bool (*is_sparse)(void*); ///< null, like the next two: not supported
        SparseRows (*sparse_grad)(void*);
        void (*set_sparse_grad)(void*, SparseRows const&);
        bool (*requires_grad)(void*);
        bool (*is_as)(void*, detail::ParameterState const&);
        std::string_view (*name)(void*);
    };

    template <class Pointer>
    static AnyView view_of(Pointer&& pointer) {
        if (pointer && detail::is_complex(joinable::dtype(*pointer))) {
            return detail::as_reals(detail::view_of(*pointer));
        }
        return pointer ? detail::view_of(*pointer) : AnyView{};
    }

    template <class P>
    static bool requires_grad_of(void* p) {
        if constexpr (detail::has_requires_grad<P>) {
            using Object = std::remove_const_t<P>;
            return detail::parameter_traits_of<P>::requires_grad(*static_cast<Object*>(p));
        } else {
            return p != nullptr;
        }
    }

    template <class P>
    static consteval Functions make_table() {
        using Traits = detail::parameter_traits_of<P>;
        using Object = std::remove_const_t<P>;
        Functions functions{};
        functions.value = [](void* p) { return view_of(Traits::value(*static_cast<Object*>(p))); };
        functions.is_complex = [](void* p) -> bool {
            auto&& value = Traits::value(*static_cast<Object*>(p));
            return value && detail::is_complex(joinable::dtype(*value));
        };
        functions.grad = [](void* p) { return view_of(Traits::grad(*static_cast<Object*>(p))); };
        if constexpr (detail::has_grad_dtype<P>) {
            functions.grad_dtype = [](void* p) -> std::optional<DType> {
                return detail::real_of(Traits::grad_dtype(*static_cast<Object*>(p)));
            };
        }
        if constexpr (detail::has_set_grad<P>) {
            functions.set_grad = [](void* p, AnyView const& view) {
                Traits::set_grad(*static_cast<Object*>(p), view);
            };
        }
        if constexpr (detail::has_release_grad<P>) {
            functions.release_grad = [](void* p) {
                Traits::release_grad(*static_cast<Object*>(p));
            };
        }
        if constexpr (detail::has_set_value<P>) {
            functions.set_value = [](void* p, AnyView const& view) {
                Traits::set_value(*static_cast<Object*>(p), view);
            };
            functions.release_value = [](void* p) {
                Traits::release_value(*static_cast<Object*>(p));
            };
        }
        if constexpr (detail::has_sparse_grad<P>) {
            functions.is_sparse = [](void* p) -> bool {
                return Traits::is_sparse(*static_cast<Object*>(p));
            };
            functions.sparse_grad = [](void* p) {
                SparseRows rows = Traits::sparse_grad(*static_cast<Object*>(p));
                rows.values = detail::as_reals(rows.values);
                return rows;
            };
            functions.set_sparse_grad = [](void* p, SparseRows const& rows) {
                Traits::set_sparse_grad(*static_cast<Object*>(p), rows);
            };
        }
        functions.requires_grad = requires_grad_of<P>;
        functions.is_as = [](void* p, detail::ParameterState const& before) -> bool {
            if (requires_grad_of<P>(p) != before.requires_grad) {
                return false;
            }
            auto&& value = Traits::value(*static_cast<Object*>(p));
            return !value || !before.has_value ||
                   detail::is_like(*value, before.dtype, before.extents, before.device);
        };
        functions.name = [](void* p) -> std::string_view {
            if constexpr (detail::has_name<P>) {
                return Traits::name(*static_cast<Object*>(p));
            } else {
                (void)p;
                return {};
            }
        };
        return functions;
    }

    template <class P>
    static constexpr Functions table = make_table<P>();

    void* object_;
    Functions const* functions_;
    std::shared_ptr<void> owner_;
};

/// The parameters of a model, of any types. An index is a position in the list.
class ParameterList : public detail::HandleList<AnyParameter> {};

namespace detail {

/// Explains which items of a range parameters() refuses, and why.
template <class Range>
consteval bool says_what_parameters_lack() {
    if constexpr (has_items_for<Range, AnyParameter>) {
        return true;
    } else if constexpr (!requires { typename item_of<Range>; }) {
        return models_parameter<std::remove_cvref_t<Range>>();
    } else if constexpr (requires(item_of<Range>& pointer) { *pointer; }) {
        return models_parameter<std::remove_cvref_t<decltype(*std::declval<item_of<Range>&>())>>();
    } else {
        return models_parameter<std::remove_cvref_t<item_of<Range>>>();
    }
}

} // namespace detail

/// Joins ranges of parameters of different types into one list, in order. For a named range, the
/// list keeps the addresses of objects and copies of pointers and smart pointers (shared ones share
/// ownership). A temporary range must hold pointers or handles (parameter_traits::is_handle), which
/// are copied. Const parameters and temporary ranges of unique pointers are compile errors. The
/// items of a ParameterList are appended one by one. Local.
/// @throws ContractViolation  a pointer is null.
template <class... Ranges>
[[nodiscard]] ParameterList parameters(Ranges&&... ranges) {
    ParameterList list;
    if constexpr ((detail::says_what_parameters_lack<Ranges>() && ...)) {
        (detail::append(list, std::forward<Ranges>(ranges)), ...);
    }
    return list;
}

namespace detail {

/// The elements that a gradient holds: all of them, or those of its rows. Empty if there is none.
[[nodiscard]] inline AnyView elements_of_gradient(AnyParameter const& parameter) {
    AnyView const dense = parameter.grad();
    return dense || !parameter.is_sparse() ? dense : parameter.sparse_grad().values;
}

/// How error texts name a parameter of a list whose indices count from `first`.
inline std::string
describe_parameter(ParameterList const& parameters, std::size_t i, std::size_t first = 0) {
    auto const name = parameters[i].name();
    std::size_t const index = first + i;
    return name.empty() ? concat("parameter ", index)
                        : concat("parameter ", index, " (", name, ")");
}

/// Throws ContractViolation unless parameter `i` has a value on `device`, or one of them.
inline void check_value(ParameterList const& parameters, std::size_t i, DeviceId device) {
    AnyView const value = parameters[i].value();
    bool const is_there = is_among(value.device(), device);
    if (!value || !is_there || !has_memory(value)) {
        throw ContractViolation{
            describe_parameter(parameters, i) +
            (!value     ? " has no value"
             : is_there ? " has a value at a null pointer"
                        : " is on " + to_text(value.device()) +
                              ", but its communicator moves memory of " + to_text(device) +
                              "; give a communicator of its device, or PerDevice those of all")
        };
    }
}

/// The dtype of parameter `i`'s gradients, now and later: what its traits say; else f32 if the gradient
/// is so beside a value of 16 bits; else the value's. Throws ContractViolation where the traits say
/// another one than these.
inline DType grad_dtype(ParameterList const& parameters, std::size_t i) {
    DType const own = parameters[i].value().dtype();
    AnyView const gradient = parameters[i].grad();
    auto const fits = [&](DType dtype) {
        return dtype == own || (dtype == DType::f32 && is_half_precision(own));
    };
    if (std::optional<DType> const declared = parameters[i].declared_grad_dtype()) {
        if (!fits(*declared)) {
            throw ContractViolation{concat(
                "parameter_traits::grad_dtype of ",
                describe_parameter(parameters, i),
                " is ",
                name_of(*declared),
                ", but its value is ",
                name_of(own),
                "; return the same, or f32 beside f16 or bf16"
            )};
        }
        return *declared;
    }
    return gradient && fits(gradient.dtype()) ? gradient.dtype() : own;
}

/// How parameter `i`'s gradients are: its value, with their dtype.
inline AnyView like_gradient(ParameterList const& parameters, std::size_t i) {
    AnyView const value = parameters[i].value();
    DType const dtype = grad_dtype(parameters, i);
    return {value.data(), dtype, value.extents(), value.strides(), value.device()};
}

/// Throws ContractViolation where the gradient of parameter `i` has elements, but no memory.
inline void
check_gradient(ParameterList const& parameters, std::size_t i, AnyView const& gradient) {
    if (!has_memory(gradient)) {
        throw ContractViolation{
            describe_parameter(parameters, i) +
            " has a gradient at a null pointer; give it memory, or no gradient, where grad() is empty"
        };
    }
}

} // namespace detail

}} // namespace joinable::v0
