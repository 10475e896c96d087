// SPDX-License-Identifier: BSL-1.0
// EXPECT: the keyword is given twice (see check_keyword<...>); give it once
#include <joinable/join.hpp>

#include <support/misuse.hpp>

inline constexpr struct flag_t : joinable::keyword<flag_t, bool> {
    using keyword::operator=;
} flag{};
struct Flagged : Good {
    using join_keywords = joinable::keywords<flag_t>;
    Hook join_hook(joinable::arguments<join_keywords> const&) { return {}; }
};
int main() {
    Flagged good;
    joinable::Join guard{joinable::participants(good), flag = true, flag = false};
}
