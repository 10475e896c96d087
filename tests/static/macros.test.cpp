// SPDX-License-Identifier: BSL-1.0
// Headers of systems define short names as macros. The library compiles after them all the same; the
// standard's headers would not, so those that the library includes come first.
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <compare>
#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

// clang-format off
// <windows.h>
#define min(a, b) (((a) < (b)) ? (a) : (b))
#define max(a, b) (((a) > (b)) ? (a) : (b))
#define small char
#define near
#define far
#define interface struct
#define IN
#define OUT
#define OPTIONAL
#define ERROR 0
#define TRUE 1
#define FALSE 0
#define VOID void
#define CONST const
// <complex.h>, <sys/sysmacros.h>, <termios.h>
#define I _Complex_I
#define major(device) ((device) >> 8)
#define minor(device) ((device) & 255)
#define B0 0
// AssertMacros.h of macOS
#define check(assertion) not_an_assertion of_this_library
#define verify(assertion) not_an_assertion of_this_library
#define require(assertion, label) not_an_assertion of_this_library
// <X11/X.h>
#define None 0L
#define Bool int
#define Status int
#define Success 0
#define Always 2
// Qt
#define slots
#define signals public
#define emit
#define foreach for
// Arduino.h
#define F(text) (text)
#define PI 3.14159
#define HIGH 1
#define LOW 0
#define INPUT 0
#define OUTPUT 1
#define abs(x) ((x) > 0 ? (x) : -(x))
#define constrain(x, low, high) ((x) < (low) ? (low) : ((x) > (high) ? (high) : (x)))
#define sq(x) ((x) * (x))
#define bit(b) (1UL << (b))
// clang-format on

#include <joinable/join.hpp>

namespace {

using joinable::ReduceOp;
using joinable::ThreadCommunicator;

TEST_CASE("macros of other headers do not change what templates of the library mean") {
    joinable::run_threads(2, [](ThreadCommunicator& comm) {
        std::vector<double> const inputs(comm.rank() == 0 ? 1U : 3U, 1.0);
        struct {
            std::vector<float> value{1.0F};
            std::vector<float> grad{0.0F};
        } model;
        std::array models{&model};
        joinable::DistributedDataParallel ddp{comm, models};
        joinable::Step step{comm, [&] { model.value[0] += model.grad[0]; }};
        joinable::Join guard{joinable::participants(ddp, step)};
        for (double const input : inputs) {
            ddp.forward([] {});
            ddp.backward([&](auto ready) {
                model.grad[0] = static_cast<float>(input);
                ready(0);
            });
            step.step();
        }
        CHECK(guard.finish().rounds == 3);
        CHECK(model.value[0] == 1.0F + 1.0F + 0.5F + 0.5F); // divided by the initial world
        std::array values{comm.rank()};
        joinable::all_reduce(comm, values, ReduceOp::max).wait();
        CHECK(values[0] == 1);
    });
}

} // namespace
