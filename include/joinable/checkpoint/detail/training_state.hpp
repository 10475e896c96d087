// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/checkpoint/detail/safetensors.hpp>
#include <joinable/checkpoint/detail/settings.hpp>
#include <joinable/detail/hash.hpp>
#include <joinable/detail/text.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The contents of a checkpoint besides tensors.
struct TrainingState {
    std::uint64_t rounds = 0;
    std::uint64_t world_size = 0;                ///< ranks that wrote it
    std::string rule;                            ///< the name of the class
    std::vector<RuleSettings> rules;             ///< of the groups
    std::vector<std::uint64_t> group_sizes;      ///< parameters of each group
    std::vector<std::uint64_t> steps;            ///< of each parameter
    RuleSettings reduction;                      ///< its name and settings, if it has state
    std::vector<std::uint64_t> order;            ///< of the parameters in its buckets
    std::map<std::string, std::uint64_t> hashes; ///< of each tensor, by name
    std::vector<std::string> complex;            ///< names of tensors, to be written
};

inline constexpr std::uint64_t checkpoint_version = 2; ///< 1 had the settings as bytes

[[nodiscard]] inline std::string hex_of(std::string_view bytes) {
    constexpr std::string_view digits = "0123456789abcdef";
    std::string text;
    for (char const byte : bytes) {
        auto const number = static_cast<unsigned char>(byte);
        text += {digits[number >> 4U], digits[number & 0xfU]};
    }
    return text;
}
[[nodiscard]] inline std::string hex_of(std::uint64_t number) {
    std::string bytes;
    for (unsigned shift = 64; shift != 0; shift -= 8) {
        bytes += static_cast<char>((number >> (shift - 8)) & 0xffU);
    }
    return hex_of(bytes);
}

/// The numbers, separated by spaces.
[[nodiscard]] inline std::string listed(std::vector<std::uint64_t> const& numbers) {
    std::string text;
    for (std::uint64_t const number : numbers) {
        text += (text.empty() ? "" : " ") + std::to_string(number);
    }
    return text;
}

/// Before the label of a setting of group `k`.
[[nodiscard]] inline std::string prefix_of_rule(std::size_t k) {
    return concat("rule ", k, ": ");
}

/// Before the label of a setting of the reduction.
inline constexpr std::string_view prefix_of_reduction = "reduction: ";

/// A hash of all metadata except itself.
[[nodiscard]] inline std::string checksum_of(std::map<std::string, std::string> const& metadata) {
    Hash hash;
    for (auto const& [key, value] : metadata) {
        if (key != "checksum") {
            hash.add(key).add(key.size()).add(value).add(value.size());
        }
    }
    return hex_of(hash.value());
}

[[nodiscard]] inline std::map<std::string, std::string> metadata_of(TrainingState const& state) {
    std::map<std::string, std::string> metadata{
        {"format", std::string{checkpoint_format}},
        {"version", std::to_string(checkpoint_version)},
        {"rounds", std::to_string(state.rounds)},
        {"world size", std::to_string(state.world_size)},
        {"rule", state.rule},
        {"groups", listed(state.group_sizes)},
        {"steps", listed(state.steps)},
    };
    for (std::size_t k = 0; k < state.rules.size(); ++k) {
        for (auto const& [label, value] : state.rules[k]) {
            metadata.emplace(prefix_of_rule(k) + label, value);
        }
    }
    for (auto const& [label, value] : state.reduction) {
        metadata.emplace(concat(prefix_of_reduction, label), value);
    }
    if (!state.order.empty()) {
        metadata.emplace("order of buckets", listed(state.order));
    }
    for (auto const& [name, hash] : state.hashes) {
        metadata.emplace("hash of " + name, hex_of(hash));
    }
    for (std::string const& name : state.complex) {
        metadata.emplace(mark_of_complex(name), "real, imaginary");
    }
    metadata.emplace("checksum", checksum_of(metadata));
    return metadata;
}

/// Parses metadata. A value that does not fit is refused by its key.
class MetadataReader {
public:
    MetadataReader(std::string_view file, std::map<std::string, std::string> const& metadata)
        : file_{file}, metadata_{metadata} {}

    /// @throws ContractViolation  the text names the key, the expected and the actual value.
    [[nodiscard]] TrainingState state() const {
        require("format", std::string{checkpoint_format});
        if (std::uint64_t const version = number("version"); version != checkpoint_version) {
            refuse_file(
                file_,
                "its version is ",
                version,
                ", but expected is ",
                checkpoint_version,
                "; continue this training with the version of joinable that wrote the file"
            );
        }
        require("checksum", checksum_of(metadata_));
        TrainingState state;
        state.rounds = number("rounds");
        state.world_size = number("world size");
        state.rule = text("rule");
        state.group_sizes = numbers("groups");
        state.steps = numbers("steps");
        for (std::size_t k = 0; k < state.group_sizes.size(); ++k) {
            state.rules.push_back(settings(prefix_of_rule(k)));
        }
        state.reduction = settings(std::string{prefix_of_reduction});
        if (metadata_.contains("order of buckets")) {
            state.order = numbers("order of buckets");
        }
        constexpr std::string_view prefix = "hash of ";
        for (auto const& [key, value] : metadata_) {
            if (key.starts_with(prefix)) {
                std::uint64_t hash = 0;
                for (char const byte : bytes(key)) {
                    hash = hash << 8U | static_cast<unsigned char>(byte);
                }
                state.hashes.emplace(key.substr(prefix.size()), hash);
            }
        }
        return state;
    }

private:
    [[nodiscard]] std::string const& text(std::string const& key) const {
        auto const found = metadata_.find(key);
        if (found == metadata_.end()) {
            refuse_file(
                file_, "its __metadata__ has no ", key, "; expected is a file that Checkpoint wrote"
            );
        }
        return found->second;
    }
    void require(std::string const& key, std::string const& expected) const {
        if (text(key) != expected) {
            refuse_file(
                file_,
                "its ",
                key,
                " is ",
                in_quotes(text(key)),
                ", but expected is ",
                in_quotes(expected)
            );
        }
    }
    [[nodiscard]] std::vector<std::uint64_t> numbers(std::string const& key) const {
        std::string const& list = text(key);
        std::vector<std::uint64_t> found;
        char const* next = list.data();
        char const* const end = next + list.size();
        while (next != end) {
            std::uint64_t number = 0;
            auto const [rest, error] = std::from_chars(next, end, number);
            if (error != std::errc{} || (rest != end && (*rest != ' ' || rest + 1 == end))) {
                refuse_file(
                    file_, "its ", key, " is ", in_quotes(list), ", but expected are whole numbers"
                );
            }
            found.push_back(number);
            next = rest == end ? rest : rest + 1;
        }
        return found;
    }
    [[nodiscard]] std::uint64_t number(std::string const& key) const {
        auto const found = numbers(key);
        if (found.size() != 1) {
            refuse_file(
                file_, "its ", key, " is ", in_quotes(text(key)), ", but expected is a number"
            );
        }
        return found.front();
    }
    [[nodiscard]] RuleSettings settings(std::string const& prefix) const {
        RuleSettings found;
        for (auto next = metadata_.lower_bound(prefix);
             next != metadata_.end() && next->first.starts_with(prefix);
             ++next) {
            found.emplace(next->first.substr(prefix.size()), next->second);
        }
        return found;
    }
    [[nodiscard]] std::string bytes(std::string const& key) const {
        std::string const& hex = text(key);
        std::string found;
        for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
            unsigned byte = 0;
            auto const end = std::from_chars(&hex[i], &hex[i] + 2, byte, 16).ptr;
            found += end == &hex[i] + 2 ? std::string(1, static_cast<char>(byte)) : "";
        }
        if (2 * found.size() != hex.size()) {
            refuse_file(
                file_, "its ", key, " is ", in_quotes(hex), ", but expected are pairs of hex digits"
            );
        }
        return found;
    }

    std::string_view file_;
    std::map<std::string, std::string> const& metadata_;
};

}}} // namespace joinable::v0::detail
