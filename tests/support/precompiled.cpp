// SPDX-License-Identifier: BSL-1.0
// What compiles precompiled.hpp for all tests.
