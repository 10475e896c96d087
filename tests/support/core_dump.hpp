// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <string>
#include <utility>

namespace joinable_tests {

/// How many large mappings of this process are shared, and how many of them a core dump has.
struct SharedMappings {
    int all = 0;
    int dumped = 0;

    SharedMappings() {
        std::ifstream maps{"/proc/self/smaps"};
        std::uint64_t bytes = 0;
        for (std::string line; std::getline(maps, line);) {
            if (line.find(" rw-s ") != std::string::npos) {
                std::size_t end = 0;
                std::uint64_t const begin = std::stoull(line, &end, 16);
                bytes = std::stoull(line.substr(end + 1), nullptr, 16) - begin;
            } else if (line.starts_with("VmFlags:") && std::exchange(bytes, 0) >= 1U << 24U) {
                ++all;
                dumped += line.find(" dd") == std::string::npos ? 1 : 0;
            }
        }
    }
};

} // namespace joinable_tests
