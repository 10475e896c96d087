// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 {

/// Elements of one parameter that an update rule steps. The arrays do not overlap.
template <std::floating_point T>
struct UpdateRange {
    std::size_t size; ///< elements of each array
    T* values;
    T const* gradients;
    std::span<T* const>
        state; ///< one array for each of the rule's state_names(), zeros before the first step
    std::uint64_t step; ///< of this parameter, counted from 1
};

namespace detail {

/// Stands for any member of an aggregate.
struct AnyMember {
    template <class T>
    operator T() const noexcept;
};
/// Stands for a member that is a pointer.
struct PointerMember {
    template <class T>
    operator T*() const noexcept;
};
/// Converts to nothing. A class that can be made from it accepts more than pointers, so it is no
/// pointer.
struct NoMember {};
template <std::size_t>
using AnyMemberAt = AnyMember;

template <class T, std::size_t... Before>
consteval bool is_pointer_after(std::index_sequence<Before...>) {
    return requires { T{AnyMemberAt<Before>{}..., PointerMember{}}; } &&
           !requires { T{AnyMemberAt<Before>{}..., NoMember{}}; };
}
template <class T, std::size_t... Counts>
consteval bool has_pointer_after_any(std::index_sequence<Counts...>) {
    return (is_pointer_after<T>(std::make_index_sequence<Counts>{}) || ...);
}

/// Whether T is a pointer, has a reference (then nothing can be assigned to it), or is an aggregate
/// with a pointer among its first 16 members. A compiler cannot see a pointer in other classes or in
/// members of members.
template <class T>
consteval bool has_address() {
    if constexpr (!std::is_copy_assignable_v<T>) {
        return true;
    } else if constexpr (std::is_aggregate_v<T> && std::is_trivially_copyable_v<T>) {
        return has_pointer_after_any<T>(std::make_index_sequence<16>{});
    } else {
        return std::is_pointer_v<T>;
    }
}

template <class R>
concept has_state_names = requires(R const& rule) {
    { rule.state_names() } -> std::convertible_to<std::span<std::string_view const>>;
};
/// A span of an array that is returned by value would outlive the array.
template <class Names>
concept outlives_the_call = std::is_lvalue_reference_v<Names> ||
                            std::ranges::enable_borrowed_range<std::remove_cvref_t<Names>>;
template <class R>
concept has_lasting_state_names =
    requires(R const& rule) { requires outlives_the_call<decltype(rule.state_names())>; };
template <class R>
concept has_update =
    requires(R const& rule, UpdateRange<float> const& floats, UpdateRange<double> const& doubles) {
        rule.update(floats);
        rule.update(doubles);
    };

/// Stands for the function that a rule gives its update to.
struct AnyUpdateTaker {
    template <class Update>
    void operator()(Update const&) const noexcept {}
};
template <class R>
concept has_visit_update = requires(R const& rule, AnyUpdateTaker const& f) {
    rule.template visit_update<float>(std::uint64_t{1}, f);
    rule.template visit_update<double>(std::uint64_t{1}, f);
};

inline constexpr std::size_t most_state_arrays = 8;

/// Whether a rule with these settings may step only the rows that have a gradient.
template <class R>
[[nodiscard]] bool leaves_other_rows(R const& rule) {
    if constexpr (requires { requires R::steps_rows; }) {
        double value = 1;
        double const gradient = 0;
        if (rule.state_names().empty()) {
            rule.update(UpdateRange<double>{1, &value, &gradient, {}, 1});
            return value == 1;
        }
    }
    return false;
}

/// @throws ContractViolation
template <class R>
void check_rule(R const& rule) {
    if constexpr (has_state_names<R>) {
        if (std::size_t const names = rule.state_names().size(); names > most_state_arrays) {
            throw ContractViolation{concat(
                "a rule keeps at most ",
                most_state_arrays,
                " numbers for each element, but its state_names() are ",
                names,
                "; keep fewer, or step by a LocalOptimizer, which keeps its state itself"
            )};
        }
    }
    if constexpr (requires { rule.check(); }) {
        rule.check();
    }
}

} // namespace detail

/// The settings of an optimizer, and how it steps an element. The new value of an element depends
/// only on that element, so any rank may step any range. All members are local.
///
/// `rule` is a const lvalue of `R`.
/// | expression             | result                             | meaning                                  |
/// |------------------------|------------------------------------|------------------------------------------|
/// | `rule.state_names()`   | std::span<std::string_view const>  | names of the numbers that it keeps for   |
/// |                        |                                    | each element, at most 8; as many at every|
/// |                        |                                    | step; not of an array returned by value  |
/// | `rule.update(range)`   |                                    | steps an UpdateRange of float or double  |
/// | `rule.check()`         |                                    | optional; throws ContractViolation if    |
/// |                        |                                    | the settings are invalid                 |
/// | `rule.agree_on(list)`  |                                    | optional; adds its settings, as members, |
/// |                        |                                    | to an AgreementList: ranks compare them, |
/// |                        |                                    | and a Checkpoint stores and sets them    |
/// | `R::steps_rows`        | static constexpr bool              | optional; true: where state_names() is   |
/// |                        |                                    | empty and the settings leave an element  |
/// |                        |                                    | whose gradient is 0 as it is, only rows  |
/// |                        |                                    | with gradients are stepped               |
///
/// To step in the memory of a device, R has one more member, `template <class T, class F>
/// decltype(auto) visit_update(std::uint64_t step, F const& f) const`, for T float and double. It
/// returns `f(update)`, where `update` does to one element what update(range) does at that step:
/// `update(T& value, T& gradient, T* state)`, a `__host__ __device__` const member, may also change
/// the gradient. It is trivially copyable and has a static constexpr `state_count`, the number of
/// state_names(). One source file that nvcc compiles names the rule: `cuda_kernels<R>()`.
///
/// R is trivially copyable and can be assigned, because settings are sent to other ranks as bytes.
/// No member is a pointer or a reference, because addresses are not valid on another rank; pointers
/// are found among the first 16 members of an aggregate.
/// Not checkable, but required: no pointer within a member, no std::span, no std::string_view.
template <class R>
concept UpdateRule =
    std::is_trivially_copyable_v<R> && detail::has_state_names<R> &&
    detail::has_lasting_state_names<R> && detail::has_update<R> && !detail::has_address<R>();

/// Says in one sentence why a class is not an UpdateRule.
template <class R>
consteval bool models_update_rule() {
    static_assert(
        std::is_trivially_copyable_v<R>,
        "UpdateRule: the settings have to be trivially copyable, because they travel from rank to rank; "
        "keep numbers in it, and no vectors or pointers"
    );
    static_assert(
        detail::has_state_names<R>,
        "UpdateRule: expected a const member 'std::span<std::string_view const> state_names()'; a rule "
        "without state returns {}"
    );
    static_assert(
        !detail::has_state_names<R> || detail::has_lasting_state_names<R>,
        "UpdateRule: state_names() returns an array by value, which dies before its span is read; return a "
        "span of a static array, or a reference to it"
    );
    static_assert(
        !detail::has_address<R>(),
        "UpdateRule: a member is a pointer, a reference or const, but settings travel from rank to rank, "
        "where an address leads nowhere; keep numbers in it"
    );
    static_assert(
        detail::has_update<R>,
        "UpdateRule: expected a const member 'template <class T> void update(joinable::UpdateRange<T> "
        "const& range)' for float and double"
    );
    return UpdateRule<R>;
}

}} // namespace joinable::v0
