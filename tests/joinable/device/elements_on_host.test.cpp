// SPDX-License-Identifier: BSL-1.0
#include <joinable/device/elements_on_host.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <doctest/doctest.h>
#include <support/layouts.hpp>

#include <joinable/device/host.hpp>

namespace {

using joinable::AnyView;
using joinable::DType;
using joinable::HostDevice;

TEST_CASE("the host reads elements in row-major order, without a copy where they lie so") {
    HostDevice device;
    joinable::detail::ElementsOnHost elements{device};
    for (auto const& layout : joinable_tests::layouts()) {
        std::vector<std::int32_t> memory(400);
        for (std::size_t i = 0; i < memory.size(); ++i) {
            memory[i] = static_cast<std::int32_t>(i);
        }
        for (auto const& strides : {layout.from, layout.to}) {
            AnyView const tensor{memory.data(), DType::i32, layout.extents, strides};
            if (joinable::detail::checked_reach(layout.extents, strides, 4) > memory.size()) {
                continue;
            }
            auto const bytes = elements.read(tensor);
            REQUIRE(bytes.size() == 4 * tensor.numel());
            joinable::Shape const dense = joinable::row_major_strides(layout.extents);
            std::vector<std::int32_t> read(tensor.numel());
            if (!bytes.empty()) {
                std::memcpy(read.data(), bytes.data(), bytes.size());
            }
            std::size_t differ = 0;
            for (std::size_t i = 0; i < read.size(); ++i) {
                std::size_t place = 0;
                std::size_t rest = i;
                for (std::size_t d = 0; d < layout.extents.size(); ++d) {
                    place += rest / dense[d] * strides[d];
                    rest %= dense[d];
                }
                differ += read[i] != static_cast<std::int32_t>(place) ? 1U : 0U;
            }
            CHECK(differ == 0);
            if (tensor.is_contiguous() && !read.empty()) {
                CHECK(static_cast<void const*>(bytes.data()) == memory.data());
            }
        }
    }
}

} // namespace
