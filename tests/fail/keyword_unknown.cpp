// SPDX-License-Identifier: BSL-1.0
// EXPECT: no participant of this Join accepts the keyword (see check_keyword<...>); correct its
// EXPECT: name or add it to a participant's join_keywords
#include <joinable/join.hpp>

#include <support/misuse.hpp>

inline constexpr struct sync_max_cont_t : joinable::keyword<sync_max_cont_t, bool> {
    using keyword::operator=;
} sync_max_cont{};
int main() {
    Good good;
    joinable::Join guard{joinable::participants(good), sync_max_cont = true};
}
