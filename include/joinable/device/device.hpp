// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <joinable/device/arena.hpp>
#include <joinable/device/update.hpp>
#include <joinable/fwd.hpp>
#include <joinable/tensor/traits.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

struct DeviceStep;

/// A range of bytes and its new position.
struct Section {
    std::size_t from;
    std::size_t to;
    std::size_t bytes;
    std::size_t position; ///< how many sections come before it
};

} // namespace detail

/// A kind of memory and the operations on it. Buckets use the device of the gradients. Operations
/// run in the order of submissions, possibly asynchronously. Operations of one submission are
/// independent: none reads or writes memory that another one writes. One thread at a time may use
/// an object.
class Device {
public:
    Device() = default;
    Device(Device const&) = delete;
    Device& operator=(Device const&) = delete;
    virtual ~Device() = default;

    /// The device whose memory this is, or the devices.
    [[nodiscard]] virtual DeviceId id() const noexcept = 0;
    /// If this stands for several devices (SeveralDevices): how many of them come before this one, else 0.
    [[nodiscard]] virtual std::size_t position(DeviceId /*id*/) const noexcept { return 0; }
    /// The device whose memory this is, if this stands for several.
    [[nodiscard]] virtual DeviceId id_of(void const* /*memory*/) const { return id(); }
    /// The device at a position.
    [[nodiscard]] virtual Device& at(std::size_t /*position*/) noexcept { return *this; }
    /// Zeroed memory; may outlive the device. `alignment` is a power of two.
    [[nodiscard]] virtual Arena allocate(std::size_t bytes, std::size_t alignment) = 0;

    // Operations like the functions of the same names in device/copy.hpp. They may be deferred
    // until submit(), so views must stay valid until then.
    virtual void copy(AnyView const& from, AnyView const& to) = 0;
    virtual void scale_copy(AnyView const& from, double factor, AnyView const& to) = 0;
    virtual void fill_zero(AnyView const& to) = 0;
    /// Whether scale_copy() takes other factors than 1.
    [[nodiscard]] virtual bool can_scale() const noexcept = 0;

    /// Starts the operations requested so far, after all that the engine has requested of this
    /// memory.
    virtual void submit() = 0;
    /// Submits. Later requests of the engine run after these operations.
    virtual void finish() = 0;

    /// Whether update() can step by this rule.
    [[nodiscard]] virtual bool can_update(detail::DeviceRule const& rule) const noexcept = 0;
    /// Submits, then steps elements by a rule. `rule` and `updates` may change when this returns.
    virtual void
    update(detail::DeviceRule const& rule, std::span<detail::DeviceUpdate const> updates) = 0;

    /// Whether sum_squares() works.
    [[nodiscard]] virtual bool can_sum_squares() const noexcept = 0;
    /// Submits, then adds the squares of each tensor's elements to a number, in double, in the order
    /// of device/combined_terms.hpp: all devices compute the same bits. No two numbers are the same one.
    /// `sums` may change when this returns.
    virtual void sum_squares(std::span<detail::SquareSum const> sums) = 0;

    /// Whether compute() works, which not every device need do.
    [[nodiscard]] virtual bool can_compute() const noexcept { return false; }
    /// Submits, then runs steps in the order of their kinds. Those of one kind are independent. `steps` may change when this
    /// returns.
    virtual void compute(detail::DeviceStep const* /*steps*/, std::size_t /*count*/) {}

    /// Submits, then moves sections within an arena: see detail::permute_sections.
    virtual void permute(Arena const& arena, std::vector<detail::Section>& sections) = 0;
    /// Zeroed host memory from which upload() need not wait. It may outlive the device.
    [[nodiscard]] virtual Arena allocate_staging(std::size_t bytes) = 0;
    /// Copies from the host, in the order of submissions. `from` must stay valid until a later
    /// download() has returned.
    virtual void upload(void const* from, void* to, std::size_t bytes) = 0;
    /// Copies to the host, in the order of submissions; blocks until it is done, or throws at a deadline of the device.
    virtual void download(void const* from, void* to, std::size_t bytes) = 0;
};

namespace detail {

[[nodiscard]] inline bool is_on_host(Device const& device) noexcept {
    return device.id() == DeviceId{};
}

} // namespace detail

}} // namespace joinable::v0
