// SPDX-License-Identifier: BSL-1.0
#include <joinable/device/detail/permute_sections.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <vector>

#include <doctest/doctest.h>
#include <rapidcheck.h>

namespace {

using joinable::detail::permute_sections;
using joinable::detail::rotate_bytes;
using joinable::detail::Section;

TEST_CASE("neighbours of any lengths change places, as std::rotate does it") {
    for (std::size_t const left : {0U, 1U, 2U, 63U, 5000U, 9999U}) {
        for (std::size_t const right : {0U, 1U, 3U, 64U, 4096U, 12345U}) {
            std::vector<std::byte> bytes(left + right);
            for (std::size_t i = 0; i < bytes.size(); ++i) {
                bytes[i] = static_cast<std::byte>(i * 31 % 251);
            }
            auto expected = bytes;
            std::rotate(
                expected.begin(),
                expected.begin() + static_cast<std::ptrdiff_t>(left),
                expected.end()
            );
            rotate_bytes(bytes.data(), left, right);
            CHECK(bytes == expected);
        }
    }
}

/// Places for sections of these lengths in this order, with random gaps. Returns the end.
std::size_t
place(std::vector<Section>& sections, std::vector<std::size_t> const& order, bool is_target) {
    std::size_t offset = 0;
    for (std::size_t position = 0; position < order.size(); ++position) {
        std::size_t const i = order[position];
        offset += *rc::gen::weightedOneOf<std::size_t>(
            {{3, rc::gen::just(std::size_t{0})}, {1, rc::gen::inRange<std::size_t>(0, 64)}}
        );
        (is_target ? sections[i].to : sections[i].from) = offset;
        sections[i].position = position; // of the target, which is placed last
        offset += sections[i].bytes;
    }
    return offset;
}

std::vector<std::size_t> random_order(std::size_t count) {
    std::vector<std::size_t> order(count);
    std::iota(order.begin(), order.end(), std::size_t{0});
    for (std::size_t i = count; i > 1; --i) {
        std::swap(order[i - 1], order[*rc::gen::inRange<std::size_t>(0, i)]);
    }
    return order;
}

TEST_CASE("sections of any sizes reach their new places with their contents") {
    CHECK(rc::check([] {
        std::size_t const count = *rc::gen::inRange<std::size_t>(0, 40);
        std::vector<Section> sections(count);
        for (Section& section : sections) {
            section.bytes = *rc::gen::inRange<std::size_t>(1, 300);
        }
        // Sections are compact on one side, or have gaps that the other side may use differently.
        std::size_t const end_from = place(sections, random_order(count), false);
        std::size_t const end_to = place(sections, random_order(count), true);
        std::vector<std::byte> memory((std::max)({end_from, end_to, std::size_t{1}}));
        std::vector<std::vector<std::byte>> contents(count);
        for (std::size_t i = 0; i < count; ++i) {
            contents[i].resize(sections[i].bytes);
            for (std::size_t k = 0; k < contents[i].size(); ++k) {
                contents[i][k] = static_cast<std::byte>((i * 97 + k * 13) % 256);
            }
            std::memcpy(memory.data() + sections[i].from, contents[i].data(), sections[i].bytes);
        }
        auto const expected = sections;
        std::sort(sections.begin(), sections.end(), [](Section const& a, Section const& b) {
            return a.from < b.from;
        });
        permute_sections(memory.data(), sections);
        for (std::size_t i = 0; i < count; ++i) {
            RC_ASSERT(
                std::memcmp(
                    memory.data() + expected[i].to, contents[i].data(), contents[i].size()
                ) == 0
            );
        }
    }));
}

} // namespace
