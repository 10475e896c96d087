// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 {

/// @file
/// The marks of a rank's backward pass. Local.

namespace detail {

/// Calls f(i) for each parameter that a backward pass leaves out. `unused` is a range of indices,
/// or a predicate over the indices in `trained`.
template <class Unused, class F>
void for_each_unused(Unused const& unused, std::vector<std::size_t> const& trained, F const& f) {
    if constexpr (std::is_invocable_r_v<bool, Unused const&, std::size_t>) {
        for (std::size_t const i : trained) {
            if (unused(i)) {
                f(i);
            }
        }
    } else {
        for (auto const i : unused) {
            f(static_cast<std::size_t>(i));
        }
    }
}

/// The argument `ready` of a backward pass, which marks a gradient.
template <class F>
class Ready {
public:
    explicit Ready(F mark) : mark_{std::move(mark)} {}

    void operator()(std::size_t i) const { mark_(i); }
    /// Explains an argument that is no index.
    template <class Other>
        requires(!std::convertible_to<Other, std::size_t>)
    void operator()(Other const&) const {
        static_assert(
            std::convertible_to<Other, std::size_t>,
            "ready: it takes the index of a parameter in the list that was given, as in ready(0)"
        );
    }

private:
    F mark_;
};

inline void require_in_range(std::size_t index, std::size_t count, int rank) {
    if (index >= count) {
        auto const i = static_cast<std::ptrdiff_t>(index); // such as -1
        throw ContractViolation{concat(
            "parameter ", i, " is out of range on rank ", rank, ": there are ", count, " parameters"
        )};
    }
}

[[noreturn]] inline void refuse_late_skip(int rank) {
    throw ContractViolation{concat(
        "a batch cannot be skipped on rank ",
        rank,
        " any more: its first bucket is on its way to the others; let the exception leave the guard"
    )};
}

/// The gradients that hold something of rounds that were not reduced.
class AccumulatedMarks {
public:
    void resize(std::size_t parameters) { marks_.resize(parameters, false); }
    void mark(std::size_t i, AnyParameter const& parameter) {
        marks_[i] = true;
        has_elements_ = has_elements_ || parameter.value().numel() != 0;
    }
    [[nodiscard]] bool operator[](std::size_t i) const { return marks_[i]; }
    /// Whether any of them has elements.
    [[nodiscard]] bool has_elements() const noexcept { return has_elements_; }
    void clear() noexcept {
        marks_.assign(marks_.size(), false);
        has_elements_ = false;
    }

private:
    std::vector<bool> marks_;
    bool has_elements_ = false;
};

/// @throws ContractViolation  a collective could not start: a bucket would be delivered that nothing
///         has reduced. Or an average was lost, because writing it into gradients failed.
inline void require_nothing_lost(bool has_failed_start, bool has_lost_average) {
    if (has_lost_average) {
        throw ContractViolation{
            "the averages of a bucket could not be written into all of its gradients, so this iteration cannot be "
            "finished; let the exception leave the guard"
        };
    }
    if (has_failed_start) {
        throw ContractViolation{
            "the reduction of a bucket could not start, so this iteration cannot be finished; call skip(), or "
            "let the exception leave the guard"
        };
    }
}

/// Why a parameter cannot be marked that was not trained when the model was made.
[[nodiscard]] inline std::string_view why_not_trained(AnyParameter const& parameter) {
    return parameter.requires_grad()
               ? " was marked and requires a gradient now, but did not when the model was made; make the model "
                 "anew after unfreezing parameters"
               : " was marked, but does not require a gradient";
}

/// `text`, followed by the parameters that this rank did not mark (those with is_missing(i)), if
/// any, and by the first of them that was frozen after the model was made.
template <class F>
[[nodiscard]] std::string concat_missing(
    std::string_view text, ParameterList const& parameters, int rank, F const& is_missing
) {
    constexpr std::size_t most = 16; // for readers; the rest is counted
    std::size_t missing = 0;
    std::string names;
    std::string frozen;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        if (!is_missing(i)) {
            continue;
        }
        if (missing++ < most) {
            names += (missing == 1 ? "" : ", ") + describe_parameter(parameters, i);
        }
        if (frozen.empty() && !parameters[i].requires_grad()) {
            frozen = concat(
                "; ",
                describe_parameter(parameters, i),
                " requires no gradient any more, but did when the model was made: make the model anew after "
                "freezing parameters"
            );
        }
    }
    if (missing > most) {
        names += concat(" and ", missing - most, " more");
    }
    return missing == 0 ? std::string{text}
                        : concat(text, " (rank ", rank, " did not mark ", names, ")", frozen);
}

} // namespace detail

}} // namespace joinable::v0
