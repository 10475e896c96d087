// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/detail/reasons.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION std::size_t
pack(AbortReason const& reason, std::span<std::byte> into) noexcept {
    auto const bits = into.subspan(bytes_before_ranks, max_ranks / 8);
    std::uint16_t mask = 0;
    for (int const rank : reason.ranks) {
        if (rank >= 0 && rank < max_ranks) {
            auto const at = static_cast<std::size_t>(rank);
            for (; mask <= at / 8; ++mask) {
                bits[mask] = std::byte{0};
            }
            bits[at / 8] |= std::byte{1} << at % 8;
        }
    }
    auto const origin = static_cast<std::int32_t>((std::max)(reason.origin, -1));
    into[0] = static_cast<std::byte>(reason.kind);
    into[1] = static_cast<std::byte>(reason.has_left ? 1 : 0);
    std::memcpy(&into[2], &mask, sizeof mask);
    std::memcpy(&into[4], &origin, sizeof origin);
    auto const room = into.subspan(bytes_before_ranks + mask);
    std::size_t const most = (std::min)(room.size(), most_reason_text);
    std::string const& text = reason.message;
    bool const is_cut = text.size() > most;
    std::size_t const kept = is_cut ? length_before_cut(text, most) : text.size();
    std::memcpy(room.data(), text.data(), kept);
    std::memcpy(room.data() + kept, cut_mark.data(), is_cut ? cut_mark.size() : 0);
    return bytes_before_ranks + mask + kept + (is_cut ? cut_mark.size() : 0);
}

JOINABLE_DEFINITION std::vector<std::byte> packed(AbortReason const& reason, std::size_t most) {
    std::vector<std::byte> bytes(most);
    bytes.resize(pack(reason, bytes));
    return bytes;
}

JOINABLE_DEFINITION std::optional<AbortReason> unpacked_reason(std::span<std::byte const> bytes) {
    if (bytes.size() < bytes_before_ranks) {
        return std::nullopt;
    }
    AbortReason reason{static_cast<FailureKind>(bytes[0]), {}, {}, -1, bytes[1] == std::byte{1}};
    std::uint16_t mask = 0;
    std::int32_t origin = -1;
    std::memcpy(&mask, &bytes[2], sizeof mask);
    std::memcpy(&origin, &bytes[4], sizeof origin);
    if (reason.kind > FailureKind::contract || bytes[1] > std::byte{1} || origin < -1 ||
        mask > max_ranks / 8 || bytes.size() < bytes_before_ranks + mask) {
        return std::nullopt;
    }
    reason.origin = origin;
    bytes = bytes.subspan(bytes_before_ranks);
    for (std::size_t rank = 0; rank < 8 * std::size_t{mask}; ++rank) {
        if ((bytes[rank / 8] >> rank % 8 & std::byte{1}) != std::byte{0}) {
            reason.ranks.push_back(static_cast<int>(rank));
        }
    }
    bytes = bytes.subspan(mask);
    reason.message.assign(reinterpret_cast<char const*>(bytes.data()), bytes.size());
    return reason;
}

}}} // namespace joinable::v0::detail
