// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <vector>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/bucket/bucket_reduction.hpp>
#include <joinable/checkpoint/detail/safetensors.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The settings of a rule as texts, by the labels of its agree_on().
using RuleSettings = std::map<std::string, std::string>;

template <class Rule>
concept names_settings = requires(Rule const& rule, AgreementList& list) { rule.agree_on(list); };

template <class Rule>
[[nodiscard]] AgreementList listed_settings(Rule const& rule) {
    AgreementList list;
    if constexpr (names_settings<Rule>) {
        rule.agree_on(list);
    }
    return list;
}

/// @throws ContractViolation  two settings have one label.
template <class Rule>
[[nodiscard]] RuleSettings stored_settings(Rule const& rule) {
    RuleSettings settings;
    AgreementList const list = listed_settings(rule);
    for (AgreementList::Item const& item : list.items()) {
        if (!settings.emplace(item.label, item.value).second) {
            throw ContractViolation{concat(
                "the rule's agree_on() adds two settings named ",
                item.label,
                ", but a checkpoint has one of each name"
            )};
        }
    }
    return settings;
}

static_assert(sizeof(bool) == 1);

/// Writes the number that `text` stands for. Returns false if it stands for none of this type.
template <class T>
[[nodiscard]] bool write_number(std::string_view text, std::byte* at) {
    T number{};
    auto const [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc{} || rest != text.data() + text.size()) {
        return false;
    }
    std::memcpy(at, &number, sizeof number);
    return true;
}
[[nodiscard]] inline bool write_setting(AgreedType type, std::string_view text, std::byte* at) {
    switch (type) {
    case AgreedType::boolean:
        if (text != "true" && text != "false") {
            return false;
        }
        at[0] = std::byte{text == "true"};
        return true;
    case AgreedType::i8: return write_number<std::int8_t>(text, at);
    case AgreedType::i16: return write_number<std::int16_t>(text, at);
    case AgreedType::i32: return write_number<std::int32_t>(text, at);
    case AgreedType::i64: return write_number<std::int64_t>(text, at);
    case AgreedType::u8: return write_number<std::uint8_t>(text, at);
    case AgreedType::u16: return write_number<std::uint16_t>(text, at);
    case AgreedType::u32: return write_number<std::uint32_t>(text, at);
    case AgreedType::u64: return write_number<std::uint64_t>(text, at);
    case AgreedType::f32: return write_number<float>(text, at);
    case AgreedType::f64: return write_number<double>(text, at);
    case AgreedType::other: break;
    }
    return false;
}

/// Gives the members of `rule` that its agree_on() adds the values that a file has for them. What
/// it adds besides, such as a computed text, must then be what the file says.
/// @throws ContractViolation  they differ in a label, or a value is none of the member's type; the
///         text names the setting.
template <class Rule>
void set_settings(
    std::string_view file, std::size_t group, RuleSettings const& stored, Rule& rule
) {
    static_assert(std::is_trivially_copyable_v<Rule>);
    auto* const begin = reinterpret_cast<std::byte*>(&rule);
    // Members may be added only where others have some value, so once more after those are set.
    bool is_changed = true;
    for (int pass = 0; is_changed && pass < 3; ++pass) {
        is_changed = false;
        AgreementList const list = listed_settings(rule);
        for (std::size_t i = 0; i < list.items().size(); ++i) {
            auto const& [label, value] = list.items()[i];
            auto const& [address, type] = list.places()[i];
            auto const found = stored.find(label);
            if (found == stored.end() || found->second == value) {
                continue;
            }
            auto const* const at = static_cast<std::byte const*>(address);
            bool const is_member = type != AgreedType::other && !std::less<>{}(at, begin) &&
                                   std::less<>{}(at, begin + sizeof(Rule));
            if (is_member && write_setting(type, found->second, begin + (at - begin))) {
                is_changed = true;
            }
        }
    }
    RuleSettings const own = stored_settings(rule);
    auto const refuse = [&](std::string const& label) {
        auto const text = [&](RuleSettings const& settings) {
            auto const found = settings.find(label);
            return found == settings.end() ? std::string{"missing"} : in_quotes(found->second);
        };
        refuse_file(
            file,
            "its setting ",
            label,
            " of group ",
            group,
            " is ",
            text(stored),
            ", but here it is ",
            text(own),
            ", and cannot be set to that"
        );
    };
    for (auto const& [label, value] : own) {
        auto const found = stored.find(label);
        if (found == stored.end() || found->second != value) {
            refuse(label);
        }
    }
    for (auto const& [label, value] : stored) {
        if (!own.contains(label)) {
            refuse(label);
        }
    }
}

/// The settings of a reduction as texts. One within another one has its name behind the other one's.
[[nodiscard]] inline RuleSettings settings_of_reduction(AgreementList const& list) {
    RuleSettings settings;
    for (AgreementList::Item const& item : list.items()) {
        auto const [place, is_new] = settings.emplace(item.label, item.value);
        if (!is_new) {
            place->second += concat(" of ", item.value);
        }
    }
    return settings;
}

/// Returns the counts that a file has for a reduction.
/// @throws ContractViolation  the file is of another reduction, or of other settings: the text names the first one.
[[nodiscard]] inline std::vector<std::uint64_t> counts_of_reduction(
    std::string_view file,
    RuleSettings const& stored,
    RuleSettings const& own,
    std::vector<ReductionCount> const& counted
) {
    constexpr std::string_view none = "none";
    auto const text = [&](RuleSettings const& settings, std::string const& label) {
        auto const found = settings.find(label);
        return found == settings.end() ? none : std::string_view{found->second};
    };
    std::string const name = "reduction";
    if (text(stored, name) != text(own, name)) {
        refuse_file(
            file,
            "its reduction is ",
            text(stored, name),
            ", but expected is ",
            text(own, name),
            "; only one that is as when the file was written has a use for what it left out"
        );
    }
    std::vector<std::uint64_t> counts(counted.size());
    RuleSettings all = stored;
    all.insert(own.begin(), own.end());
    for (auto const& setting : all) {
        std::string const& label = setting.first;
        auto const count =
            std::find_if(counted.begin(), counted.end(), [&](ReductionCount const& c) {
                return c.label == label;
            });
        bool const is_count = count != counted.end();
        auto* const to =
            reinterpret_cast<std::byte*>(counts.data() + (is_count ? count - counted.begin() : 0));
        bool const fits = is_count ? write_number<std::uint64_t>(text(stored, label), to)
                                   : text(stored, label) == text(own, label);
        if (!fits) {
            refuse_file(
                file,
                "the setting ",
                label,
                " of its reduction is ",
                text(stored, label),
                ", but expected is ",
                is_count ? std::string_view{"a number"} : text(own, label)
            );
        }
    }
    return counts;
}

}}} // namespace joinable::v0::detail
