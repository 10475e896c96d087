// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <exception>
#include <span>
#include <utility>
#include <vector>

#include <joinable/detail/failure.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/device.hpp>
#include <joinable/device/update.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/any_view.hpp>

namespace joinable { inline namespace v0 {

/// CUDA devices of one rank, each of which operates on its own memory: see PerDevice. An operation on tensors runs on
/// the device of the tensor that it writes, one on bytes on the device whose memory they are. It runs no update
/// rules, sums of squares and steps of reductions.
class SeveralDevices final : public Device {
public:
    /// Refers to the devices, in the same order on all ranks.
    /// @throws ContractViolation  there is none, one is given twice, or one is not a CUDA device of an index below 31.
    explicit SeveralDevices(std::vector<Device*> devices) : devices_{std::move(devices)} {
        id_.kind = DeviceKind::several;
        for (Device* const device : devices_) {
            DeviceId const one = device->id();
            bool const is_usable = one.kind == DeviceKind::cuda && one.index >= 0 && one.index < 31;
            if (!is_usable || detail::is_among(one, id_)) {
                throw ContractViolation{detail::concat(
                    is_usable ? "PerDevice: two communicators are of "
                              : "PerDevice: a communicator is of ",
                    detail::to_text(one),
                    is_usable ? "; give one for each device"
                              : ", but it takes those of CUDA devices 0 to 30"
                )};
            }
            id_.index |= 1 << one.index;
        }
        if (devices_.empty()) {
            throw ContractViolation{"PerDevice: there is no communicator; give one for each device"
            };
        }
    }

    [[nodiscard]] DeviceId id() const noexcept override { return id_; }
    /// The first one, if it is none of these.
    [[nodiscard]] Device& of(DeviceId id) noexcept { return *devices_[position(id)]; }
    [[nodiscard]] std::size_t position(DeviceId id) const noexcept override {
        auto const found = std::find_if(devices_.begin(), devices_.end(), [&](Device* device) {
            return device->id() == id;
        });
        return found == devices_.end() ? 0 : static_cast<std::size_t>(found - devices_.begin());
    }
    [[nodiscard]] Device& at(std::size_t position) noexcept override { return *devices_[position]; }
    [[nodiscard]] DeviceId id_of(void const* memory) const override {
        return devices_.front()->id_of(memory);
    }

    /// Memory of the first device.
    [[nodiscard]] Arena allocate(std::size_t bytes, std::size_t alignment) override {
        return devices_.front()->allocate(bytes, alignment);
    }
    void copy(AnyView const& from, AnyView const& to) override { of(to.device()).copy(from, to); }
    void scale_copy(AnyView const& from, double factor, AnyView const& to) override {
        of(to.device()).scale_copy(from, factor, to);
    }
    void fill_zero(AnyView const& to) override { of(to.device()).fill_zero(to); }
    [[nodiscard]] bool can_scale() const noexcept override {
        return std::all_of(devices_.begin(), devices_.end(), [](Device const* device) {
            return device->can_scale();
        });
    }
    /// If a device throws, the others submit nevertheless: no request stays for a later submission, when its memory may
    /// have ended. What the first one threw is thrown at the end.
    void submit() override {
        on_each([](Device& device) { device.submit(); });
    }
    /// If a device throws: as submit().
    void finish() override {
        on_each([](Device& device) { device.finish(); });
    }
    [[nodiscard]] bool can_update(detail::DeviceRule const&) const noexcept override {
        return false;
    }
    void update(detail::DeviceRule const&, std::span<detail::DeviceUpdate const>) override {
        refuse("update");
    }
    [[nodiscard]] bool can_sum_squares() const noexcept override { return false; }
    void sum_squares(std::span<detail::SquareSum const>) override { refuse("sum_squares"); }
    void compute(detail::DeviceStep const*, std::size_t) override { refuse("compute"); }
    void permute(Arena const& arena, std::vector<detail::Section>& sections) override {
        of(arena.data()).permute(arena, sections);
    }
    [[nodiscard]] Arena allocate_staging(std::size_t bytes) override {
        return devices_.front()->allocate_staging(bytes);
    }
    void upload(void const* from, void* to, std::size_t bytes) override {
        of(to).upload(from, to, bytes);
    }
    void download(void const* from, void* to, std::size_t bytes) override {
        of(from).download(from, to, bytes);
    }

private:
    template <class F>
    void on_each(F const& f) {
        std::exception_ptr first;
        for (Device* const device : devices_) {
            std::exception_ptr const error = detail::exception_of([&] { f(*device); });
            if (!first) {
                first = error;
            }
        }
        if (first) {
            std::rethrow_exception(first);
        }
    }
    [[nodiscard]] Device& of(void const* memory) {
        return memory == nullptr ? *devices_.front() : of(id_of(memory));
    }
    [[noreturn]] static void refuse(char const* what) {
        throw ContractViolation{detail::concat(
            what, " on several devices: each of them has its own kernels; ask one of them, by at()"
        )};
    }

    std::vector<Device*> devices_;
    DeviceId id_;
};

}} // namespace joinable::v0
