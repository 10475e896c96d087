// SPDX-License-Identifier: BSL-1.0
#pragma once

// The update rule chosen at program start, wrapped in one type for joinable.

#include <joinable/zero.hpp>

#include <cstdint>
#include <span>
#include <string_view>
#include <variant>

namespace train_text {

/// A joinable::UpdateRule.
class ChosenRule {
public:
    using Choice = std::variant<joinable::Sgd, joinable::Adam, joinable::AdamW>;

    explicit ChosenRule(Choice const& choice) : choice_{choice} {}

    void set_rate(double rate) {
        std::visit([&](auto& rule) { rule.learning_rate = rate; }, choice_);
    }
    [[nodiscard]] std::span<std::string_view const> state_names() const {
        return std::visit([](auto const& rule) { return rule.state_names(); }, choice_);
    }
    template <class T>
    void update(joinable::UpdateRange<T> const& range) const {
        std::visit([&](auto const& rule) { rule.update(range); }, choice_);
    }
    /// For the memory of a device.
    template <class T, class F>
    decltype(auto) visit_update(std::uint64_t step, F const& f) const {
        return std::visit(
            [&](auto const& rule) -> decltype(auto) {
                return rule.template visit_update<T>(step, f);
            },
            choice_
        );
    }

    /// For ranks to compare, and for checkpoints.
    void agree_on(joinable::AgreementList& list) const {
        list.add("rule", choice_.index());
        std::visit([&](auto const& rule) { rule.agree_on(list); }, choice_);
    }

private:
    Choice choice_;
};

} // namespace train_text
