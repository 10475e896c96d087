// SPDX-License-Identifier: BSL-1.0
// EXPECT: Joinable: ranks cannot compare the values of a keyword in join_keywords; give the
// EXPECT: keyword 'static void agree_on(AgreementList&, V const&)', or 'static constexpr bool
// EXPECT: per_rank = true' where ranks may differ
#include <joinable/join.hpp>

#include <support/misuse.hpp>

struct Settings {};
inline constexpr struct settings_t : joinable::keyword<settings_t, Settings> {
    using keyword::operator=;
} settings{};
struct Configured : Good {
    using join_keywords = joinable::keywords<settings_t>;
    Hook join_hook(joinable::arguments<join_keywords> const&) { return {}; }
};
int main() {
    Configured good;
    joinable::Join guard{joinable::participants(good), settings = Settings{}};
}
