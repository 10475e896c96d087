// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <queue>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/join/joinable.hpp>
#include <joinable/participant/detail/model_checks.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// A list of parameters in the place of one before: which is which. Local.
class Relisted {
public:
    Relisted() = default;
    /// A parameter is the first one of the same name that no other one is. Without a name it is the one whose value is
    /// at the same address, unless that one has other memory now. With `same_objects` the lists are the same. A
    /// value at the address of before is another one if `is_replaced(i)` says so of parameter `i` before.
    Relisted(
        ListedModel const& before,
        ParameterList const& now,
        bool same_objects,
        std::function<bool(std::size_t)> const& is_replaced = {}
    );

    [[nodiscard]] std::size_t size() const noexcept { return was_.size(); }
    /// The index of parameter `i` in the list before, if it is there.
    [[nodiscard]] std::optional<std::size_t> was(std::size_t i) const { return was_[i]; }
    /// Whether ranks have the same value of it, because it lies where they have trained it, or was sent and is frozen
    /// still. One of the same name that lies elsewhere may be another layer.
    [[nodiscard]] bool is_equal(std::size_t i) const { return is_equal_[i]; }

    /// Whether it was trained before, with the same dtype and extents: then state of it may be moved.
    [[nodiscard]] bool was_trained(std::size_t i) const { return was_trained_[i]; }

    /// Lists what each one was, because ranks do the same with it.
    void agree_on(AgreementList& list, ParameterList const& now) const;

private:
    std::vector<std::optional<std::size_t>> was_;
    std::vector<bool> is_equal_;
    std::vector<bool> was_trained_;
};

/// Gradients that were cleared hold nothing.
/// @throws ContractViolation  refresh() was called too early.
template <class F>
void require_no_window(WindowOf const& window, F const& are_cleared) {
    if (!window.window().is_empty() && !are_cleared()) {
        throw ContractViolation{
            "refresh() was called while gradients hold batches that no round has reduced; call it after a round that "
            "syncs, clear the gradients, or call discard_window() before"
        };
    }
}

inline Relisted::Relisted(
    ListedModel const& before,
    ParameterList const& now,
    bool same_objects,
    std::function<bool(std::size_t)> const& is_replaced
)
    : was_(now.size()), is_equal_(now.size()), was_trained_(now.size()) {
    std::map<std::string, std::queue<std::size_t>, std::less<>> by_name;
    std::unordered_map<void const*, std::size_t> by_value;
    auto const& identities = before.identities();
    // Memory that a value has left may be another one's.
    auto const is_at = [&](void const* address, std::size_t i) {
        return address == identities[i].value && before.parameters()[i].value().data() == address;
    };
    for (std::size_t i = 0; i < identities.size(); ++i) {
        if (auto const& [name, value] = identities[i]; !name.empty()) {
            by_name[name].push(i);
        } else if (value != nullptr && is_at(value, i)) {
            by_value.emplace(value, i);
        }
    }
    for (std::size_t i = 0; i < now.size(); ++i) {
        AnyView const value = now[i].value();
        if (same_objects) {
            was_[i] = i;
        } else if (std::string_view const name = now[i].name(); !name.empty()) {
            auto const found = by_name.find(name);
            if (found != by_name.end() && !found->second.empty()) {
                was_[i] = found->second.front();
                found->second.pop();
            }
        } else if (auto const found = by_value.find(value.data()); found != by_value.end()) {
            was_[i] = found->second;
        }
        if (was_[i]) {
            ParameterState const& listed = before.listed()[*was_[i]];
            bool const is_alike =
                listed.dtype == value.dtype() && listed.extents == value.extents();
            bool const is_there = same_objects || (is_at(value.data(), *was_[i]) &&
                                                   !(is_replaced && is_replaced(*was_[i])));
            was_trained_[i] = is_alike && listed.requires_grad;
            is_equal_[i] =
                is_alike && is_there && (listed.requires_grad || !now[i].requires_grad());
        }
    }
}

inline void Relisted::agree_on(AgreementList& list, ParameterList const& now) const {
    list.begin_section("what a model before had differs: ");
    for (std::size_t i = 0; i < now.size(); ++i) {
        list.add(
            describe_parameter(now, i),
            !was_[i] ? std::string{"new"}
                     : concat("parameter ", *was_[i], " before", is_equal_[i] ? "" : ", to be sent")
        );
    }
}

}}} // namespace joinable::v0::detail
