// SPDX-License-Identifier: BSL-1.0
// What an Action's function returns.
#include <joinable/participant/action.hpp>

#include <memory>
#include <type_traits>

#include <doctest/doctest.h>

#include <joinable/communicator/self.hpp>

namespace {

using joinable::Action;

TEST_CASE("an action returns what its function returns, also what can only be moved") {
    joinable::SelfCommunicator comm;
    Action moved{comm, [] { return std::make_unique<int>(3); }, [] {}};
    CHECK(*moved() == 3);
    int number = 4;
    Action referred{comm, [&]() -> int& { return number; }, [] {}};
    static_assert(std::is_same_v<decltype(referred()), int&>);
    CHECK(&referred() == &number);
    Action passed{
        comm,
        [](std::unique_ptr<int>&& given) -> std::unique_ptr<int>&& {
            return static_cast<std::unique_ptr<int>&&>(given);
        },
        [] {}
    };
    CHECK(*std::unique_ptr<int>{passed(std::make_unique<int>(5))} == 5);
    Action nothing{comm, [] {}, [] {}};
    static_assert(std::is_void_v<decltype(nothing())>);
    nothing();
}

} // namespace
