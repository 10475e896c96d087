// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/config.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/detail/handle_list.hpp>

namespace joinable { inline namespace v0 {

/// A type-erased handle to one tensor of an engine. Unlike a view, it follows the tensor when the
/// engine gives it other memory. Cheap to copy. It does not own the tensor unless it was made from
/// an owning pointer or a view type.
class AnyTensor {
public:
    /// A handle to the tensor `object`. `owner` keeps it alive, if needed.
    template <class T>
        requires WritableTensor<T&>
    explicit AnyTensor(T& object, std::shared_ptr<void> owner = {})
        : object_{const_cast<std::remove_const_t<T>*>(std::addressof(object))},
          view_{[](void* tensor) { return detail::view_of(*static_cast<T*>(tensor)); }},
          owner_{std::move(owner)} {
        static_assert(models_tensor<std::remove_const_t<T>>());
    }

    /// The tensor as it is now; empty for a null pointer.
    [[nodiscard]] AnyView view() const { return view_ != nullptr ? view_(object_) : AnyView{}; }

    template <class T>
    static constexpr bool takes = WritableTensor<T&>;
    /// A const object that can be written is a view, or a handle to shared storage.
    template <class T>
    static constexpr bool shares_storage = WritableTensor<T const&>;
    /// The list reports a null pointer when it is used, because its user can then tell the other
    /// ranks.
    static AnyTensor of_null(std::size_t) { return {}; }

private:
    AnyTensor() = default;

    void* object_ = nullptr;
    AnyView (*view_)(void*) = nullptr;
    std::shared_ptr<void> owner_;
};

/// Tensors of any types. An index is a position in the list.
class TensorList : public detail::HandleList<AnyTensor> {};

namespace detail {

/// Tensors that may move to other memory, but keep their dtypes, extents and devices. A plan of
/// them is made once and asks each time for their addresses.
class FixedTensors {
public:
    /// Local. Errors call each tensor `what`.
    /// @throws ContractViolation  a tensor is missing, has no memory (a null pointer), is not on `device`, or one of them,
    ///                            its elements share memory, so that ranks that receive it could not write it, or it is
    ///                            complex and has `max_tensor_rank` dimensions, so that no device copies it.
    FixedTensors(TensorList tensors, std::string_view what, DeviceId device = {});

    /// Views of the tensors at their current addresses. Local; valid until the next call; does not
    /// allocate.
    /// @throws ContractViolation  the extents, dtype or device of a tensor have changed, it has no memory, or
    ///                            its elements share memory.
    std::vector<AnyView> const& views();

    [[nodiscard]] TensorList const& tensors() const noexcept { return tensors_; }
    /// Appends the tensors of another object. Local.
    void append(FixedTensors const& more);

private:
    [[noreturn]] void refuse(std::size_t i, std::string const& why) const;
    void require_writable(std::size_t i, AnyView const& view) const;

    TensorList tensors_;
    std::string_view what_;
    std::vector<AnyView> views_;
};

} // namespace detail

/// The buffers of a model: state that training changes, but not by gradients (running means).
class BufferList : public TensorList {
public:
    explicit BufferList(TensorList list) : TensorList{std::move(list)} {}
};

namespace detail {

template <class Range>
concept holds_bools =
    has_packed_bools<Range> || requires { requires has_packed_bools<item_of<Range>>; };

template <class... Ranges>
TensorList tensor_list(Ranges&&... ranges) {
    static_assert(
        !(holds_bools<Ranges> || ...),
        "buffers: std::vector<bool> has no contiguous elements; use std::vector<unsigned char>, or an array of bool"
    );
    static_assert(
        (has_items_for<Ranges, AnyTensor> && ...),
        "buffers: each argument must be a tensor that can be written, or a range of such or of pointers "
        "to such: not const, and with a specialisation of joinable::tensor_traits"
    );
    TensorList list;
    (append(list, std::forward<Ranges>(ranges)), ...);
    return list;
}

} // namespace detail

/// Joins tensors, and ranges of tensors, of different types into one list, in order. The list keeps
/// the addresses of named tensors, so it follows a tensor that moves to other memory. It keeps
/// copies of pointers. A temporary must be a view, or a range of pointers or views; these are
/// copied. Local.
template <class... Ranges>
[[nodiscard]] BufferList buffers(Ranges&&... ranges) {
    return BufferList{detail::tensor_list(std::forward<Ranges>(ranges)...)};
}

}} // namespace joinable::v0

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/tensor/impl/tensor_list.ipp>
#endif
