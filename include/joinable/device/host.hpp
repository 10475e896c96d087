// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include <joinable/device/copy.hpp>
#include <joinable/device/detail/permute_sections.hpp>
#include <joinable/device/device.hpp>
#include <joinable/device/update.hpp>
#include <joinable/tensor/any_view.hpp>

namespace joinable { inline namespace v0 {

/// The host's memory. Every operation is complete when its call returns.
class HostDevice final : public Device {
public:
    [[nodiscard]] DeviceId id() const noexcept override { return {}; }
    [[nodiscard]] Arena allocate(std::size_t bytes, std::size_t alignment) override {
        return Arena{bytes, alignment};
    }
    void copy(AnyView const& from, AnyView const& to) override { joinable::copy(from, to); }
    void scale_copy(AnyView const& from, double factor, AnyView const& to) override {
        joinable::scale_copy(from, factor, to);
    }
    void fill_zero(AnyView const& to) override { joinable::fill_zero(to); }
    [[nodiscard]] bool can_scale() const noexcept override { return true; }
    void submit() override {}
    void finish() override {}
    [[nodiscard]] bool can_update(detail::DeviceRule const&) const noexcept override {
        return true;
    }
    void
    update(detail::DeviceRule const& rule, std::span<detail::DeviceUpdate const> updates) override {
        for (detail::DeviceUpdate const& update : updates) {
            rule.on_host(rule.settings, update);
        }
    }
    [[nodiscard]] bool can_sum_squares() const noexcept override { return true; }
    void sum_squares(std::span<detail::SquareSum const> sums) override {
        for (detail::SquareSum const& one : sums) {
            *one.sum += one.on_host(one.tensor);
        }
    }
    void permute(Arena const& arena, std::vector<detail::Section>& sections) override {
        detail::permute_sections(arena.data(), sections);
    }
    [[nodiscard]] Arena allocate_staging(std::size_t bytes) override { return Arena{bytes}; }
    void upload(void const* from, void* to, std::size_t bytes) override {
        std::memcpy(to, from, bytes);
    }
    void download(void const* from, void* to, std::size_t bytes) override {
        std::memcpy(to, from, bytes);
    }
};

namespace detail {

/// The one host device; it has no state. It is local to a function: a file that includes this
/// header without using a device then contains neither the object nor the kernels that its table
/// names.
[[nodiscard]] inline HostDevice& the_host() noexcept {
    static HostDevice host;
    return host;
}

} // namespace detail

}} // namespace joinable::v0
