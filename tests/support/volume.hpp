// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <vector>

/// @file
/// How much a test repeats. A sanitizer makes some tests fifty times as slow, so there they repeat less: Release
/// runs the whole of it. What a test covers (operations, kinds of sizes, and but for the thread sanitizer dtypes) is the
/// same everywhere. With JOINABLE_TEST_WHOLE in the environment a sanitizer, too, leaves out no case and no group.

namespace joinable_tests {

enum class Sanitizer { none, address, thread };

#if defined(__SANITIZE_ADDRESS__) // as g++ says it
inline constexpr Sanitizer sanitizer = Sanitizer::address;
#elif defined(__SANITIZE_THREAD__)
inline constexpr Sanitizer sanitizer = Sanitizer::thread;
#elif !defined(__has_feature) // as clang says it
inline constexpr Sanitizer sanitizer = Sanitizer::none;
#elif __has_feature(address_sanitizer)
inline constexpr Sanitizer sanitizer = Sanitizer::address;
#elif __has_feature(thread_sanitizer)
inline constexpr Sanitizer sanitizer = Sanitizer::thread;
#else
inline constexpr Sanitizer sanitizer = Sanitizer::none;
#endif
inline constexpr bool under_sanitizer = sanitizer != Sanitizer::none;

/// Whether JOINABLE_TEST_WHOLE asks for all cases of tests that else run some of them.
[[nodiscard]] inline bool is_whole() {
    static bool const is_set = std::getenv("JOINABLE_TEST_WHOLE") != nullptr;
    return is_set;
}
/// Whether cases and groups are left out.
[[nodiscard]] inline bool is_reduced() {
    return under_sanitizer && !is_whole();
}

/// How often to repeat what Release repeats `whole` times: a tenth under a sanitizer, and at least once.
template <class Number>
[[nodiscard]] constexpr Number volume(Number whole) {
    return under_sanitizer ? (std::max)(Number{1}, static_cast<Number>(whole / 10)) : whole;
}

/// Whether the `k`-th of many cases is left out: under a sanitizer `turn` decides which of `n` neighbours runs.
/// With the number of ranks as the turn, groups of 1, 2 and 3 ranks together run all cases where n is 3.
[[nodiscard]] inline bool is_left_out(std::size_t k, std::size_t n, std::size_t turn) {
    return is_reduced() && k % n != turn % n;
}

/// The same for a group of `ranks`. One of 3 runs the cases of one of 2, too, where the address
/// sanitizer leaves that out.
[[nodiscard]] inline bool is_left_out(std::size_t k, std::size_t n, int ranks) {
    return is_left_out(k, n, static_cast<std::size_t>(ranks)) &&
           (sanitizer != Sanitizer::address || ranks != 3 || is_left_out(k, n, std::size_t{2}));
}

/// Which of these numbers of ranks the `k`-th of many cases runs with: all of them, and under a sanitizer one,
/// in turn. Calls run(size) for each.
template <class Run>
void in_turn(std::initializer_list<int> sizes, std::size_t k, Run const& run) {
    for (std::size_t i = 0; i < sizes.size(); ++i) {
        if (!is_left_out(i, sizes.size(), k)) {
            run(sizes.begin()[i]);
        }
    }
}

inline constexpr int any_size = (std::numeric_limits<int>::max)();

/// Of these sizes of groups those of at most `most` ranks, and always the first.
[[nodiscard]] inline std::vector<int> groups_up_to(int most, std::initializer_list<int> sizes) {
    std::vector<int> groups{sizes};
    std::erase_if(groups, [&](int size) { return size > most && size != *sizes.begin(); });
    return groups;
}

/// Which of these groups of processes run. The thread sanitizer sees one process at a time, so a pair is enough there.
[[nodiscard]] inline std::vector<int> groups_of_processes(std::initializer_list<int> sizes) {
    return groups_up_to(sanitizer == Sanitizer::thread ? 2 : any_size, sizes);
}

/// Which groups the suites of guards and participants run with; tests of communicators have all of theirs.
/// | sanitizer | of {1, 2, 3, 4, 8} | of {2, 4} | why                                                                |
/// |-----------|--------------------|-----------|--------------------------------------------------------------------|
/// | none      | all                | both      |                                                                    |
/// | address   | 1, 3               | 2         | what a rank does in others differs by numbers, not by code         |
/// | thread    | 2                  | 2         | the threads are the communicator's; a second rank makes them meet  |
[[nodiscard]] inline std::vector<int> groups_of_participants(std::initializer_list<int> sizes) {
    if (!is_reduced()) {
        return sizes;
    }
    if (sanitizer == Sanitizer::address) {
        std::vector<int> groups = groups_up_to(3, sizes);
        bool const has_three = std::find(groups.begin(), groups.end(), 3) != groups.end();
        std::erase_if(groups, [&](int size) { return size == 2 && has_three; });
        return groups;
    }
    return {sizes.size() > 1 && *sizes.begin() == 1 ? sizes.begin()[1] : *sizes.begin()};
}

/// The same for a number of ranks that is drawn.
[[nodiscard]] inline int group_of_participants(int drawn) {
    return is_reduced() ? (std::min)(drawn, sanitizer == Sanitizer::address ? 3 : 2) : drawn;
}

} // namespace joinable_tests
