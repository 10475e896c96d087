// SPDX-License-Identifier: BSL-1.0
// EXPECT: arguments::get: this keyword is not in the joinable's join_keywords; add it there
#include <joinable/join.hpp>

#include <support/misuse.hpp>

inline constexpr struct flag_t : joinable::keyword<flag_t, bool> {
    using keyword::operator=;
} flag{};
int main() {
    joinable::arguments<joinable::keywords<>> const args{};
    return args.get(flag, false) ? 1 : 0;
}
