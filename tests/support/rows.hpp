// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <support/draw.hpp>
#include <support/volume.hpp>

/// @file
/// Tables of choices: each row has one of `choices[factor]` choices of every factor. A test runs rows in which all pairs
/// of choices meet. JOINABLE_TEST_PRODUCT="k n" runs every choice with every other one in their place, where n programs
/// share the rows and this is the kth, from 0.

namespace joinable_tests {

template <std::size_t N>
using Row = std::array<std::size_t, N>;

template <std::size_t N>
[[nodiscard]] std::string text_of(Row<N> const& row) {
    std::string text;
    for (std::size_t const choice : row) {
        text += std::to_string(choice) + " ";
    }
    return text;
}

/// Rows in which every choice of a factor meets every choice of every other one: of some that are drawn, always the
/// one with the most pairs that no row has yet. Rows for which `is_distinct` is false are left out; a pair that only
/// such rows have is left out, too.
template <std::size_t N, class IsDistinct>
std::vector<Row<N>>
rows_with_all_pairs(Row<N> const& choices, Draw& draw, IsDistinct const& is_distinct) {
    std::set<std::array<std::size_t, 4>> missing; // a factor and its choice, another one and its
    for (std::size_t a = 0; a < N; ++a) {
        for (std::size_t b = a + 1; b < N; ++b) {
            for (std::size_t pair = 0; pair < choices[a] * choices[b]; ++pair) {
                missing.insert({a, pair % choices[a], b, pair / choices[a]});
            }
        }
    }
    std::vector<Row<N>> rows;
    while (!missing.empty()) {
        auto const is_met = [](Row<N> const& row, auto const& pair) {
            return row[pair[0]] == pair[1] && row[pair[2]] == pair[3];
        };
        Row<N> best{};
        std::ptrdiff_t most = 0;
        auto const wanted = *missing.begin();
        int found = 0;
        for (int candidate = 0; candidate < 5000 && found < 50; ++candidate) {
            Row<N> row{};
            for (std::size_t k = 0; k < N; ++k) {
                row[k] = draw.below(choices[k]);
            }
            row[wanted[0]] = wanted[1];
            row[wanted[2]] = wanted[3];
            if (!is_distinct(row)) {
                continue;
            }
            ++found;
            std::ptrdiff_t const met =
                std::count_if(missing.begin(), missing.end(), [&](auto const& pair) {
                    return is_met(row, pair);
                });
            if (met > most) {
                best = row;
                most = met;
            }
        }
        if (found == 0) {
            missing.erase(wanted);
            continue;
        }
        rows.push_back(best);
        std::erase_if(missing, [&](auto const& pair) { return is_met(best, pair); });
    }
    return rows;
}

/// Calls check(row) for rows with all pairs, a third of them under a sanitizer, or for those of the environment.
/// `draw` draws the rows. Returns how many the whole table has.
template <std::size_t N, class IsDistinct, class Check>
std::size_t
for_rows(Row<N> const& choices, Draw& draw, IsDistinct const& is_distinct, Check const& check) {
    auto const run = [&](Row<N> const& row) {
        CAPTURE(text_of(row));
        check(row);
    };
    if (char const* const product = std::getenv("JOINABLE_TEST_PRODUCT")) {
        std::size_t first = 0;
        std::size_t every = 1;
        std::istringstream{product} >> first >> every;
        std::uint64_t turn = 0;
        Row<N> row{};
        for (std::size_t factor = 0; factor < N;) {
            // Mixed, so that each program has all choices of the first factors.
            if (is_distinct(row) && (turn++ * 0x9e3779b97f4a7c15U >> 32U) % every == first) {
                run(row);
            }
            for (factor = 0; factor < N && ++row[factor] == choices[factor]; ++factor) {
                row[factor] = 0;
            }
        }
        return turn;
    }
    std::vector<Row<N>> const rows = rows_with_all_pairs(choices, draw, is_distinct);
    for (std::size_t k = 0; k < rows.size(); ++k) {
        if (!is_left_out(k, 3, 0)) {
            run(rows[k]);
        }
    }
    return rows.size();
}

} // namespace joinable_tests
