// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <doctest/doctest.h>

#include <joinable/config.hpp>

#if defined(__x86_64__)
// What __builtin_cpu_supports reads, of GCC's library and of clang's.
extern "C" struct {
    unsigned int vendor, type, subtype, features;
} __cpu_model; // NOLINT(bugprone-reserved-identifier)
#endif

namespace joinable_tests {

/// While it lives, loops of this process are those of an instruction set, or of this processor's if it has less. For
/// processes of one thread.
class OnlyInstructionSet {
public:
    using Set = joinable::detail::InstructionSet;

    explicit OnlyInstructionSet(Set set) {
        [[maybe_unused]] Set const most = joinable::detail::instruction_set();
#if defined(__x86_64__)
        features_ = __cpu_model.features;
        constexpr unsigned int avx2 = 1U << 10U;
        constexpr unsigned int avx512 =
            1U << 15U | 1U << 20U | 1U << 21U | 1U << 22U; // f, vl, bw, dq
        if (set != Set::avx512) {
            __cpu_model.features &= ~avx512;
        }
        if (set == Set::baseline) {
            __cpu_model.features &= ~avx2;
        }
        CHECK(joinable::detail::instruction_set() == (set < most ? set : most));
#endif
    }
    OnlyInstructionSet(OnlyInstructionSet const&) = delete;
    OnlyInstructionSet& operator=(OnlyInstructionSet const&) = delete;
    ~OnlyInstructionSet() {
#if defined(__x86_64__)
        __cpu_model.features = features_;
#endif
    }

private:
    [[maybe_unused]] unsigned int features_ = 0;
};

} // namespace joinable_tests
