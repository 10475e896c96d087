// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

namespace joinable_tests {

/// Draws from a seed, the same on every machine: what the standard's distributions do not promise.
class Draw {
public:
    explicit Draw(std::uint64_t seed) : engine_{seed} {}

    /// In [0, bound).
    std::size_t below(std::size_t bound) { return static_cast<std::size_t>(engine_() % bound); }
    /// In [first, last].
    std::size_t between(std::size_t first, std::size_t last) {
        return first + below(last - first + 1);
    }
    bool one_in(std::size_t n) { return below(n) == 0; }
    template <class T>
    T one_of(std::initializer_list<T> values) {
        return values.begin()[below(values.size())];
    }
    /// The items in any order.
    template <class T>
    std::vector<T> shuffled(std::vector<T> items) {
        for (std::size_t i = items.size(); i > 1; --i) {
            std::swap(items[i - 1], items[below(i)]);
        }
        return items;
    }

private:
    std::mt19937_64 engine_;
};

} // namespace joinable_tests
