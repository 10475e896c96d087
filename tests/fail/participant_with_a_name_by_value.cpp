// SPDX-License-Identifier: BSL-1.0
// EXPECT: Joinable: join_name() must be 'std::string_view join_name() const', a view of a text that the class keeps
#include <joinable/join.hpp>

#include <support/misuse.hpp>

#include <string>

struct NamedByValue : Good {
    std::string join_name() const { return "a name that dies"; }
};
int main() {
    NamedByValue bad;
    joinable::Join guard{joinable::participants(bad)};
}
