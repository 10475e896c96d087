// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <iterator>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace joinable { inline namespace v0 { namespace detail {

/// A list of type-erased handles. An index is a position in the list.
///
/// `Handle` has these members:
/// - `Handle::takes<T>`: whether it can be made from a `T&` and perhaps an owner.
/// - `Handle::shares_storage<T>`: whether a copy of a `T` is as good as the object itself.
/// - `Handle::of_null(i)`: the handle for a null pointer at position `i`, unless it throws.
template <class Handle>
class HandleList {
public:
    [[nodiscard]] std::size_t size() const noexcept { return items_.size(); }
    [[nodiscard]] Handle const& operator[](std::size_t i) const { return items_[i]; }
    [[nodiscard]] auto begin() const noexcept { return items_.begin(); }
    [[nodiscard]] auto end() const noexcept { return items_.end(); }
    void push_back(Handle handle) { items_.push_back(std::move(handle)); }

private:
    std::vector<Handle> items_;
};

template <class Range>
using item_of = std::remove_reference_t<decltype(*std::begin(std::declval<Range&>()))>;

template <class T, class Handle>
concept pointer_to_taken = requires(T& pointer) {
    static_cast<bool>(pointer);
    requires Handle::template takes<std::remove_reference_t<decltype(*pointer)>>;
};

/// One that holds the object itself, as std::optional does: the object ends with it.
template <class T>
concept holds_object = std::is_rvalue_reference_v<decltype(*std::declval<T>())>;

template <class Range, class Handle>
concept list_of = std::derived_from<std::remove_cvref_t<Range>, HandleList<Handle>>;

template <class Range, class Handle>
concept range_of_taken =
    Handle::template takes<item_of<Range>> || pointer_to_taken<item_of<Range>, Handle>;

/// Whether `append` can make handles for the items of the range, or for a single object in place of
/// a range.
template <class Range, class Handle>
concept has_items_for = list_of<Range, Handle> || range_of_taken<Range, Handle> ||
                        Handle::template takes<std::remove_reference_t<Range>>;

/// Whether the objects in a range outlive the call that it is given to. `IsShared`: copies are as good.
template <class Range, bool IsShared>
inline constexpr bool items_stay =
    std::is_lvalue_reference_v<decltype(*std::begin(std::declval<Range&>()))> &&
    (std::is_lvalue_reference_v<Range> ||
     (std::ranges::enable_borrowed_range<std::remove_cv_t<Range>> && !IsShared));

/// Appends a handle to `object`, or to a copy of it if the object is temporary.
template <bool Stays, class Handle, class T>
void append_object(HandleList<Handle>& list, T& object) {
    constexpr bool is_shared = Handle::template shares_storage<T>;
    static_assert(
        Stays || is_shared,
        "parameters, buffers: a temporary object, or a temporary range of objects, would be destroyed before it is "
        "used; give it a name, or set parameter_traits::is_handle if copies share storage"
    );
    if constexpr (Stays) {
        list.push_back(Handle{object});
    } else if constexpr (is_shared) {
        // Copied, not moved: a temporary view may refer to handles that another object owns.
        auto owned = std::make_shared<std::remove_const_t<T>>(object);
        list.push_back(Handle{*owned, owned});
    }
}

/// Appends handles to the objects in a range. For a named range, or a temporary view such as a span,
/// it keeps the addresses of objects and copies of pointers and smart pointers. It copies the handles
/// in a temporary range. The items
/// of a list are appended one by one. A single object counts as a range of one.
template <class Handle, class Range>
void append(HandleList<Handle>& list, Range&& range) {
    if constexpr (list_of<Range, Handle>) {
        for (Handle const& handle : range) {
            list.push_back(handle);
        }
    } else if constexpr (!range_of_taken<Range, Handle>) {
        append_object<std::is_lvalue_reference_v<Range>>(list, range);
    } else if constexpr (Handle::template takes<item_of<Range>>) {
        constexpr bool is_shared = Handle::template shares_storage<item_of<Range>>;
        for (auto&& item : range) {
            append_object<items_stay<Range, is_shared>>(list, item);
        }
    } else if constexpr (holds_object<item_of<Range>>) {
        using Object = std::remove_reference_t<decltype(*std::declval<item_of<Range>&>())>;
        constexpr bool is_shared = Handle::template shares_storage<Object>;
        for (auto&& holder : range) {
            if (holder) {
                append_object<items_stay<Range, is_shared>>(list, *holder);
            } else {
                list.push_back(Handle::of_null(list.size()));
            }
        }
    } else {
        using Pointer = std::remove_const_t<item_of<Range>>;
        constexpr bool is_owning_copy =
            std::copy_constructible<Pointer> && !std::is_pointer_v<Pointer>;
        static_assert(
            std::copy_constructible<Pointer> || std::is_lvalue_reference_v<Range> ||
                std::ranges::enable_borrowed_range<std::remove_cv_t<Range>>,
            "parameters, buffers: a temporary range of unique pointers would take its objects with "
            "it; give the range a name, or use shared pointers"
        );
        for (auto&& pointer : range) {
            if (!pointer) {
                list.push_back(Handle::of_null(list.size()));
            } else if constexpr (is_owning_copy) {
                list.push_back(Handle{*pointer, std::make_shared<Pointer>(pointer)});
            } else {
                list.push_back(Handle{*pointer});
            }
        }
    }
}

}}} // namespace joinable::v0::detail
