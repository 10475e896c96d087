// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/control.hpp>
#include <joinable/communicator/detail/can_split.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The host communicator of an NCCL communicator, with the same ranks. They use it to meet, to
/// learn of aborts, and to compare their calls.
class NcclControl : public ControlCommunicator {
public:
    /// Memory that all ranks share; empty if that is not supported, or they are on several machines.
    [[nodiscard]] virtual Arena share(std::size_t bytes) = 0;
    [[nodiscard]] virtual bool can_split() const = 0;
    /// Null if that is not supported.
    [[nodiscard]] virtual std::unique_ptr<NcclControl> split(int color, int key) = 0;

    void barrier() {
        std::array<std::uint64_t, 1> word{};
        sum(word);
    }
};

/// `Held` is a communicator, or a reference to one.
template <class Held>
class NcclControlOver final : public ControlOver<Held, NcclControl> {
    using Comm = std::remove_reference_t<Held>;

public:
    using ControlOver<Held, NcclControl>::ControlOver;

    [[nodiscard]] Arena share(std::size_t bytes) override {
        if constexpr (SharesMemory<Comm>) {
            auto& comm = this->communicator();
            try {
                return comm.share(bytes);
            } catch (ContractViolation const&) { // on all ranks: they are on several machines
                if (comm.is_aborted()) {
                    throw;
                }
            }
        }
        return {};
    }
    [[nodiscard]] bool can_split() const override {
        return detail::can_split(this->communicator());
    }
    [[nodiscard]] std::unique_ptr<NcclControl> split(int color, int key) override {
        if constexpr (Splits<Comm>) {
            auto const make = [&] { return this->communicator().split(color, key); };
            return std::make_unique<NcclControlOver<decltype(make())>>(make);
        } else {
            return nullptr;
        }
    }
};

/// The control of NCCL ranks from the communicator, or from a function that makes it. Explains in one
/// sentence why a communicator cannot be one.
template <class Held, class From>
[[nodiscard]] std::unique_ptr<NcclControl> nccl_control(From& from) {
    using Comm = std::remove_reference_t<Held>;
    static_assert(
        Aborts<Comm>,
        "NcclCommunicator: the control communicator needs members 'abort(AbortReason)' and 'bool "
        "is_aborted()', by which ranks learn that one of them failed; use one that models Aborts"
    );
    static_assert(
        reduces_host_memory<Comm>,
        "NcclCommunicator: the control communicator has to move memory of the host; use a "
        "ProcessCommunicator on one machine, a TcpCommunicator on several"
    );
    return std::make_unique<NcclControlOver<Held>>(from);
}

}}} // namespace joinable::v0::detail
