// SPDX-License-Identifier: BSL-1.0
// Update rules. The oracles are numbers that PyTorch's optimizers gave (record_pytorch.py), also for
// places in a range and for instruction sets: a rule that PyTorch lacks needs an oracle of its own.
#include <joinable/optimizer/rules.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

#include "recorded_by_pytorch.hpp"
#include <doctest/doctest.h>

#include <joinable/error.hpp>
#include <joinable/optimizer/update_rule.hpp>

namespace {

using namespace joinable_tests;
using joinable::Adam;
using joinable::AdamW;
using joinable::Sgd;
using joinable::UpdateRange;
using joinable::detail::InstructionSet;

static_assert(joinable::models_update_rule<Sgd>());
static_assert(joinable::models_update_rule<Adam>());
static_assert(joinable::models_update_rule<AdamW>());

/// A rule whose names are of type Names.
template <class Names>
struct NamedBy {
    Names state_names() const;
    template <class T>
    void update(UpdateRange<T> const& range) const;
};

double value_of(std::size_t i) {
    return (static_cast<double>(i % 7) - 3.0) / 4.0;
}
double gradient_of(std::size_t i, int step) {
    return (static_cast<double>((5 * i + 3 * static_cast<std::size_t>(step)) % 11) - 5.0) / 8.0;
}

/// A parameter with what a rule keeps of it.
template <class T>
struct Trained {
    std::vector<T> values;
    std::vector<T> gradients;
    std::vector<std::vector<T>> state;
    std::uint64_t step = 0;

    template <class Rule>
    Trained(Rule const& rule, std::size_t count)
        : values(count), gradients(count), state(rule.state_names().size(), std::vector<T>(count)) {
        for (std::size_t i = 0; i < count; ++i) {
            values[i] = static_cast<T>(value_of(i));
        }
    }
    void next_gradients() {
        ++step;
        for (std::size_t i = 0; i < gradients.size(); ++i) {
            gradients[i] = static_cast<T>(gradient_of(i, static_cast<int>(step)));
        }
    }
    /// The elements [begin, end), as the owner of a shard steps them.
    template <class Rule>
    void update(Rule const& rule, std::size_t begin, std::size_t end) {
        std::vector<T*> arrays;
        for (std::vector<T>& array : state) {
            arrays.push_back(array.data() + begin);
        }
        rule.update(UpdateRange<T>{
            end - begin, values.data() + begin, gradients.data() + begin, arrays, step
        });
    }
};

template <class T, class Rule>
std::vector<double> train(Rule const& rule, std::size_t count, int steps) {
    Trained<T> trained{rule, count};
    for (int step = 0; step < steps; ++step) {
        trained.next_gradients();
        trained.update(rule, 0, count);
    }
    return {trained.values.begin(), trained.values.end()};
}

/// It takes whatever it is given, so it takes pointers, too.
struct Decimal {
    template <class T>
    Decimal(T const&) noexcept;
};
struct WithDecimal {
    double rate;
    Decimal decay;
};
struct WithPointer {
    double rate;
    double const* decay;
};
struct WithReference {
    double const& rate;
    bool maximize = false;
};

TEST_CASE("a rule with an address among its members, or with names that die, is no rule") {
    using joinable::detail::has_address;
    CHECK(!has_address<Sgd>());
    CHECK(!has_address<WithDecimal>());
    CHECK(has_address<WithPointer>());
    CHECK(has_address<WithReference>());
    CHECK(joinable::UpdateRule<NamedBy<std::span<std::string_view const>>>);
    CHECK(joinable::UpdateRule<NamedBy<std::array<std::string_view, 2> const&>>);
    CHECK(!joinable::UpdateRule<NamedBy<std::array<std::string_view, 2>>>); // dies too early
    CHECK(!joinable::UpdateRule<NamedBy<std::vector<std::string_view>>>);
}

TEST_CASE("rules step as PyTorch's optimizers do") {
    for (RecordedTraining const& recorded : recorded_by_pytorch) {
        std::visit(
            [&](auto const& rule) {
                rule.check();
                for (std::size_t k = 0; k < recorded_steps.size(); ++k) {
                    auto const& expected = recorded.values[k];
                    auto const doubles = train<double>(rule, expected.size(), recorded_steps[k]);
                    auto const floats = train<float>(rule, expected.size(), recorded_steps[k]);
                    for (std::size_t i = 0; i < expected.size(); ++i) {
                        CHECK(std::abs(doubles[i] - expected[i]) < 1e-13);
                        CHECK(std::abs(floats[i] - expected[i]) < 1e-6);
                    }
                }
            },
            recorded.rule
        );
    }
}

TEST_CASE_TEMPLATE(
    "an element becomes the same bits wherever it lies in a range", T, float, double
) {
    constexpr std::size_t count = 61;
    for (RecordedTraining const& recorded : recorded_by_pytorch) {
        std::visit(
            [&](auto const& rule) {
                Trained<T> whole{rule, count};
                Trained<T> cut{rule, count};
                for (int step = 0; step < 3; ++step) {
                    whole.next_gradients();
                    whole.update(rule, 0, count);
                    cut.next_gradients();
                    for (std::size_t begin = 0; begin < count;) {
                        std::size_t const end = (std::min)(count, begin + 1 + begin % 9);
                        cut.update(rule, begin, end);
                        begin = end;
                    }
                }
                CHECK(cut.values == whole.values);
                CHECK(cut.state == whole.state);
            },
            recorded.rule
        );
    }
}

TEST_CASE_TEMPLATE("every instruction set gives the same bits", T, float, double) {
    if (joinable::detail::instruction_set() == InstructionSet::baseline) {
        MESSAGE("skipped: this processor has only the instructions that every one has");
        return;
    }
    constexpr std::size_t count = 61;
    for (RecordedTraining const& recorded : recorded_by_pytorch) {
        std::visit(
            [&](auto const& rule) {
                Trained<T> baseline{rule, count};
                Trained<T> vectors{rule, count};
                for (auto* trained : {&baseline, &vectors}) {
                    auto const set =
                        trained == &baseline ? InstructionSet::baseline : InstructionSet::avx2;
                    for (int step = 0; step < 3; ++step) {
                        trained->next_gradients();
                        std::vector<T*> state;
                        for (auto& array : trained->state) {
                            state.push_back(array.data());
                        }
                        UpdateRange<T> const range{
                            count,
                            trained->values.data(),
                            trained->gradients.data(),
                            state,
                            trained->step
                        };
                        rule.template visit_update<T>(range.step, [&](auto const& update) {
                            joinable::detail::run_update(update, range, set);
                        });
                    }
                }
                CHECK(baseline.values == vectors.values);
                CHECK(baseline.state == vectors.state);
            },
            recorded.rule
        );
    }
}

TEST_CASE("a value that is not a number stays one, and leaves its neighbours alone") {
    for (bool const is_amsgrad : {false, true}) {
        AdamW const rule{.amsgrad = is_amsgrad};
        Trained<float> trained{rule, 20};
        trained.next_gradients();
        trained.gradients[3] = NAN;
        trained.update(rule, 0, 20);
        trained.next_gradients();
        trained.update(rule, 0, 20);
        for (std::size_t i = 0; i < 20; ++i) {
            CHECK(std::isnan(trained.values[i]) == (i == 3));
            CHECK(std::isnan(trained.state.back()[i]) == (i == 3));
        }
    }
}

template <class Rule>
std::string refusal(Rule const& rule) {
    try {
        rule.check();
    } catch (joinable::ContractViolation const& error) {
        return error.what();
    }
    return {};
}

TEST_CASE("settings that make no sense are refused by name") {
    CHECK(
        refusal(Adam{.learning_rate = -1.0}) ==
        "Adam::learning_rate is -1; give a finite number that is not negative"
    );
    CHECK(refusal(AdamW{.beta2 = 1.0}) == "AdamW::beta2 is 1; give a number from 0 to below 1");
    CHECK(refusal(Adam{.beta1 = -0.5}) == "Adam::beta1 is -0.5; give a number from 0 to below 1");
    CHECK(!refusal(Adam{.epsilon = NAN}).empty());
    CHECK(!refusal(AdamW{.weight_decay = -1.0}).empty());
    CHECK(!refusal(Sgd{.learning_rate = HUGE_VAL}).empty());
    CHECK(!refusal(Sgd{.momentum = -0.1}).empty());
    CHECK(!refusal(Sgd{.weight_decay = -0.1}).empty());
    CHECK(
        refusal(Sgd{.nesterov = true}) ==
        "Sgd::nesterov needs a momentum and no dampening, but momentum is 0 and dampening is 0"
    );
    CHECK(!refusal(Sgd{.momentum = 0.9, .dampening = 0.1, .nesterov = true}).empty());
    CHECK(refusal(Sgd{.momentum = 0.9, .dampening = 0.1}).empty());
    CHECK(refusal(Sgd{.momentum = 0.9, .dampening = -0.1}).empty());
    CHECK(
        refusal(Sgd{.momentum = 0.9, .dampening = NAN}) ==
        "Sgd::dampening is nan; give a finite number"
    );
    CHECK(!refusal(Sgd{.momentum = 0.9, .dampening = HUGE_VAL}).empty());
    CHECK(refusal(AdamW{}).empty());
}

} // namespace
