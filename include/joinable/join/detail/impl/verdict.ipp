// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/join/detail/verdict.hpp>

#include <joinable/detail/text.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION RollCallLanes::Words RollCallLanes::encode() const noexcept {
    std::uint64_t const ranks = packed(active, arrived, failed);
    std::uint64_t const say = packed(stop, weighted, contributors);
    std::uint64_t const coded = code.sum | std::uint64_t{silent} << count_at;
    return {{ranks, say, weight, coded, code.squares, digest.sum, digest.squares}};
}

JOINABLE_DEFINITION RollCallLanes RollCallLanes::decode(Words const& words) noexcept {
    auto const [active, arrived, failed] = unpacked(words[0]);
    auto const [stop, weighted, contributors] = unpacked(words[1]);
    std::uint64_t const code = words[3] << (64 - count_at) >> (64 - count_at);
    auto const silent = static_cast<std::uint32_t>(words[3] >> count_at);
    return {
        active,
        arrived,
        failed,
        stop,
        weighted,
        contributors,
        words[2],
        {code, words[4]},
        {words[5], words[6]},
        silent
    };
}

JOINABLE_DEFINITION RollCallLanes::Fields RollCallLanes::unpacked(std::uint64_t word) noexcept {
    auto const from = [&](unsigned bit) {
        return static_cast<std::uint32_t>(word >> bit) << 12 >> 12;
    };
    return {{from(0), from(20), from(40)}};
}

JOINABLE_DEFINITION std::uint32_t RoundCode::encode() const noexcept {
    return static_cast<std::uint32_t>(phase) | (syncs ? 2U : 0U) |
           static_cast<std::uint32_t>(opening) << 2 | opener << 4;
}

JOINABLE_DEFINITION RoundCode RoundCode::decode(std::uint32_t code) noexcept {
    return {
        static_cast<Phase>(code & 1U),
        (code & 2U) != 0,
        static_cast<Opening>((code >> 2) & 3U),
        code >> 4
    };
}

JOINABLE_DEFINITION void
RoundCode::agree_on(AgreementList& list, std::optional<bool> is_weighted) const {
    list.add("phase", phase == Phase::train ? "train" : "evaluate");
    list.add("will_sync", syncs);
    if (is_weighted) {
        list.add("has a weight", *is_weighted);
    }
    list.add(
        "opened by",
        opening == Opening::notification ? concat("participant ", opener)
        : opening == Opening::next       ? "next()"
                                         : "look-ahead"
    );
}

JOINABLE_DEFINITION Verdict judge(RollCallLanes const& totals, EndPolicy policy) noexcept {
    if (totals.failed > 0) {
        return Verdict::failed;
    }
    if (!totals.have_one_code() ||
        (totals.weighted != 0 && totals.weighted + totals.silent != totals.active)) {
        return Verdict::mismatch;
    }
    if (totals.stop > 0) {
        return totals.active > 0 ? Verdict::stop : Verdict::end;
    }
    if (totals.active == 0) {
        return Verdict::end;
    }
    if (totals.arrived > 0 && policy == EndPolicy::stop_at_first) {
        return Verdict::stop;
    }
    if (totals.arrived > 0 && policy == EndPolicy::throw_early) {
        return Verdict::early_end;
    }
    return Verdict::go_on;
}

}}} // namespace joinable::v0::detail
