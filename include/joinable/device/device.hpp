// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <vector>

#include <joinable/device/arena.hpp>
#include <joinable/fwd.hpp>
#include <joinable/tensor/traits.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

/// A range of bytes, and where it is to be.
struct Section {
    std::size_t from;
    std::size_t to;
    std::size_t bytes;
    std::size_t position; ///< how many sections are to be before it
};

} // namespace detail

/// Memory of one kind, and who touches it: what keeps buckets where gradients are. Operations run in
/// the order of submissions, beside the host if they like. Those of one submission do not depend on
/// each other: none reads or writes what another one writes. One thread at a time per object.
class Device {
public:
    Device() = default;
    Device(Device const&) = delete;
    Device& operator=(Device const&) = delete;
    virtual ~Device() = default;

    /// Which memory.
    [[nodiscard]] virtual DeviceId id() const noexcept = 0;
    /// Zeroed; may outlive the device. `alignment` is a power of two.
    [[nodiscard]] virtual Arena allocate(std::size_t bytes, std::size_t alignment) = 0;

    // Operations, as the functions of the same names in device/copy.hpp. They may be put off until
    // submit(): views stay valid until then.
    virtual void copy(AnyView const& from, AnyView const& to) = 0;
    virtual void scale_copy(AnyView const& from, double factor, AnyView const& to) = 0;
    virtual void fill_zero(AnyView const& to) = 0;
    /// Whether scale_copy() takes other factors than 1.
    [[nodiscard]] virtual bool can_scale() const noexcept = 0;

    /// What was asked for runs after all that the engine has asked of this memory so far.
    virtual void submit() = 0;
    /// Submits; what the engine asks for from now on runs after it.
    virtual void finish() = 0;

    /// Submits, then moves sections inside an arena: see detail::permute_sections.
    virtual void permute(Arena const& arena, std::vector<detail::Section>& sections) = 0;
    /// Zeroed memory of the host from which upload() waits for nothing. It may outlive the device.
    [[nodiscard]] virtual Arena allocate_staging(std::size_t bytes) = 0;
    /// From the host, in the order of submissions. `from` stays until a later download() returned.
    virtual void upload(void const* from, void* to, std::size_t bytes) = 0;
    /// To the host, in the order of submissions; blocks until it is done.
    virtual void download(void const* from, void* to, std::size_t bytes) = 0;
};

}} // namespace joinable::v0
