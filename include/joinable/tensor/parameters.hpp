// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <iterator>
#include <memory>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/parameter.hpp>

namespace joinable::inline v0 {

/// A handle on one parameter of an engine whose type was forgotten. Cheap to copy; does not own
/// the parameter unless it was made from an owning pointer or a handle type.
class AnyParameter {
public:
    /// The parameter that `object` is; `owner` keeps it alive where that is needed.
    template <Parameter P>
    explicit AnyParameter(P& object, std::shared_ptr<void> owner = {})
        : object_{const_cast<std::remove_const_t<P>*>(&object)}, functions_{&table<P>},
          owner_{std::move(owner)} {
        static_assert(
            !std::is_const_v<P> || detail::is_handle_parameter<P>,
            "parameters: const parameters cannot be trained, since values and gradients are "
            "written; give a range or pointers that are not const"
        );
    }

    [[nodiscard]] AnyView value() const { return functions_->value(object_); }
    /// Empty where the parameter has no gradient now.
    [[nodiscard]] AnyView grad() const { return functions_->grad(object_); }
    [[nodiscard]] bool can_set_grad() const noexcept { return functions_->set_grad != nullptr; }
    /// Makes `view` the gradient.
    /// @throws ContractViolation  the parameter's traits cannot: `can_set_grad()` is false.
    void set_grad(AnyView const& view) const {
        if (!can_set_grad()) {
            throw ContractViolation{"a gradient cannot be set: parameter_traits of this type needs "
                                    "'static void set_grad(P&, AnyView)'"};
        }
        functions_->set_grad(object_, view);
    }
    [[nodiscard]] bool requires_grad() const { return functions_->requires_grad(object_); }
    /// Empty where the parameter has no name.
    [[nodiscard]] std::string_view name() const { return functions_->name(object_); }

private:
    struct Functions {
        AnyView (*value)(void*);
        AnyView (*grad)(void*);
        void (*set_grad)(void*, AnyView const&); ///< null: there is none
        bool (*requires_grad)(void*);
        std::string_view (*name)(void*);
    };

    template <class Pointer>
    static AnyView view_of(Pointer&& pointer) {
        return pointer ? view_of_tensor(*pointer) : AnyView{};
    }
    template <class T>
    static AnyView view_of_tensor(T&& tensor) {
        if constexpr (std::same_as<std::remove_cvref_t<T>, AnyView>) {
            return tensor;
        } else {
            return AnyView{tensor};
        }
    }

    template <class P>
    static consteval Functions make_table() {
        using Traits = detail::parameter_traits_of<P>;
        using Object = std::remove_const_t<P>;
        Functions functions{};
        functions.value = [](void* p) { return view_of(Traits::value(*static_cast<Object*>(p))); };
        functions.grad = [](void* p) { return view_of(Traits::grad(*static_cast<Object*>(p))); };
        if constexpr (detail::has_set_grad<P>) {
            functions.set_grad = [](void* p, AnyView const& view) {
                Traits::set_grad(*static_cast<Object*>(p), view);
            };
        }
        functions.requires_grad = [](void* p) -> bool {
            if constexpr (detail::has_requires_grad<P>) {
                return Traits::requires_grad(*static_cast<Object*>(p));
            } else {
                return p != nullptr;
            }
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

/// The parameters of a model, of whatever types. An index is a position in the list.
class ParameterList {
public:
    [[nodiscard]] std::size_t size() const noexcept { return items_.size(); }
    [[nodiscard]] AnyParameter const& operator[](std::size_t i) const { return items_[i]; }
    [[nodiscard]] auto begin() const noexcept { return items_.begin(); }
    [[nodiscard]] auto end() const noexcept { return items_.end(); }
    void push_back(AnyParameter parameter) { items_.push_back(std::move(parameter)); }

private:
    std::vector<AnyParameter> items_;
};

namespace detail {

template <class T>
concept pointer_to_parameter = requires(T& pointer) {
    static_cast<bool>(pointer);
    requires Parameter<std::remove_reference_t<decltype(*pointer)>>;
};

template <class Range>
void append_parameters(ParameterList& list, Range&& range) {
    if constexpr (std::same_as<std::remove_cvref_t<Range>, ParameterList>) {
        for (AnyParameter const& parameter : range) {
            list.push_back(parameter);
        }
    } else {
        using Item = std::remove_reference_t<decltype(*std::begin(range))>;
        static_assert(
            Parameter<Item> || pointer_to_parameter<Item>,
            "parameters: the elements of the range must model Parameter, or be pointers to such; "
            "give them members 'value' and 'grad', or specialise joinable::parameter_traits"
        );
        if constexpr (Parameter<Item>) {
            constexpr bool items_stay = std::is_lvalue_reference_v<Range> &&
                                        std::is_lvalue_reference_v<decltype(*std::begin(range))>;
            static_assert(
                items_stay || is_handle_parameter<Item>,
                "parameters: a temporary range of parameters would be gone before it is used; give "
                "the range a name, or set parameter_traits::is_handle if copies share storage"
            );
            for (auto&& item : range) {
                if constexpr (items_stay) {
                    list.push_back(AnyParameter{item});
                } else if constexpr (is_handle_parameter<Item>) {
                    // Copied, not moved: a temporary view may show handles that somebody owns.
                    auto owned = std::make_shared<std::remove_const_t<Item>>(item);
                    list.push_back(AnyParameter{*owned, owned});
                }
            }
        } else if constexpr (pointer_to_parameter<Item>) {
            using Pointer = std::remove_const_t<Item>;
            constexpr bool is_owning_copy =
                std::copy_constructible<Pointer> && !std::is_pointer_v<Pointer>;
            static_assert(
                std::copy_constructible<Pointer> || std::is_lvalue_reference_v<Range> ||
                    std::ranges::enable_borrowed_range<std::remove_cv_t<Range>>,
                "parameters: a temporary range of unique pointers would take its parameters with "
                "it; give the range a name, or use shared pointers"
            );
            for (auto&& pointer : range) {
                if (!pointer) {
                    throw ContractViolation{concat("parameters: pointer ", list.size(), " is null")
                    };
                }
                if constexpr (is_owning_copy) {
                    list.push_back(AnyParameter{*pointer, std::make_shared<Pointer>(pointer)});
                } else {
                    list.push_back(AnyParameter{*pointer});
                }
            }
        }
    }
}

} // namespace detail

/// Joins ranges of parameters of different types into one list, in order. Of a named range of
/// objects the addresses are kept; of pointers and smart pointers the pointer (shared ones share
/// ownership); a temporary range must hold pointers or handles (parameter_traits::is_handle), which
/// are copied. Const parameters and temporary ranges of unique pointers are compile errors. A
/// ParameterList is spliced in. Local.
/// @throws ContractViolation  a pointer is null.
template <class... Ranges>
[[nodiscard]] ParameterList parameters(Ranges&&... ranges) {
    ParameterList list;
    (detail::append_parameters(list, std::forward<Ranges>(ranges)), ...);
    return list;
}

} // namespace joinable::inline v0
