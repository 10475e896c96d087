// SPDX-License-Identifier: BSL-1.0
// EXPECT: AgreementList: expected a number, an enumerator, a string, or a range or an optional of
// EXPECT: these
#include <joinable/join.hpp>

struct Settings {};
int main() {
    joinable::AgreementList list;
    list.add("settings", Settings{});
}
