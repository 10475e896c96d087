// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>

#include <sys/mman.h>
#include <unistd.h>

#include <doctest/doctest.h>

namespace joinable_tests {

/// One piece of memory, seen at two addresses.
class SeenTwice {
public:
    explicit SeenTwice(std::size_t bytes)
        : bytes_{bytes}, file_{memfd_create("joinable_test", MFD_CLOEXEC)} {
        REQUIRE(ftruncate(file_, static_cast<off_t>(bytes)) == 0);
        for (void*& address : addresses) {
            address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
            REQUIRE(address != MAP_FAILED);
        }
    }
    ~SeenTwice() {
        for (void* const address : addresses) {
            munmap(address, bytes_);
        }
        close(file_);
    }
    SeenTwice(SeenTwice const&) = delete;
    SeenTwice& operator=(SeenTwice const&) = delete;

    std::array<void*, 2> addresses{};

private:
    std::size_t bytes_;
    int file_;
};

} // namespace joinable_tests
