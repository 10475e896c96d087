// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/buffer.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The host communicator beside an NCCL communicator, of the same ranks: by it they meet, hear that
/// one of them aborts, and compare what they do.
class NcclControl {
public:
    NcclControl() = default;
    NcclControl(NcclControl const&) = delete;
    NcclControl& operator=(NcclControl const&) = delete;
    virtual ~NcclControl() = default;

    [[nodiscard]] virtual int rank() const = 0;
    [[nodiscard]] virtual int size() const = 0;

    virtual void sum(std::span<std::uint64_t> words) = 0;
    virtual void broadcast(std::span<std::uint8_t> bytes, int root) = 0;
    virtual void barrier() = 0;

    virtual void abort(AbortReason const& reason) = 0;
    [[nodiscard]] virtual bool is_aborted() const = 0;
    /// The deadline that was in force, none where it has none.
    virtual std::optional<std::chrono::nanoseconds> set_deadline(std::chrono::nanoseconds deadline
    ) = 0;
    /// False where it cannot renew deadlines.
    virtual bool keep_alive() = 0;

    /// Memory that all ranks have, none where they cannot.
    [[nodiscard]] virtual Arena share(std::size_t bytes) = 0;
    [[nodiscard]] virtual bool can_split() const noexcept = 0;
    /// Null where it cannot.
    [[nodiscard]] virtual std::unique_ptr<NcclControl> split(int color, int key) = 0;
};

/// `Held` is a communicator, or a reference to one.
template <class Held>
class NcclControlOver final : public NcclControl {
    using Comm = std::remove_reference_t<Held>;

public:
    /// `make()` returns what is held, which need not be movable.
    template <class Make>
    explicit NcclControlOver(Make const& make) : comm_(make()) {}

    [[nodiscard]] int rank() const override { return comm_.rank(); }
    [[nodiscard]] int size() const override { return comm_.size(); }

    void sum(std::span<std::uint64_t> words) override {
        comm_.all_reduce(Buffer{words.data(), words.size(), DType::u64}, ReduceOp::sum).wait();
    }
    void broadcast(std::span<std::uint8_t> bytes, int root) override {
        comm_.broadcast(Buffer{bytes.data(), bytes.size(), DType::u8}, root).wait();
    }
    void barrier() override { comm_.barrier(); }

    void abort(AbortReason const& reason) override { comm_.abort(reason); }
    [[nodiscard]] bool is_aborted() const override { return comm_.is_aborted(); }
    std::optional<std::chrono::nanoseconds> set_deadline(std::chrono::nanoseconds deadline
    ) override {
        if constexpr (HasDeadline<Comm>) {
            return comm_.set_deadline(deadline);
        } else {
            return {};
        }
    }
    bool keep_alive() override {
        if constexpr (RenewsDeadline<Comm>) {
            comm_.keep_alive();
        }
        return RenewsDeadline<Comm>;
    }

    [[nodiscard]] Arena share(std::size_t bytes) override {
        if constexpr (SharesMemory<Comm>) {
            return comm_.share(bytes);
        } else {
            return {};
        }
    }
    [[nodiscard]] bool can_split() const noexcept override { return Splits<Comm>; }
    [[nodiscard]] std::unique_ptr<NcclControl> split(int color, int key) override {
        if constexpr (Splits<Comm>) {
            return std::make_unique<NcclControlOver<decltype(comm_.split(color, key))>>([&] {
                return comm_.split(color, key);
            });
        } else {
            return nullptr;
        }
    }

private:
    Held comm_;
};

/// Says in one sentence what a communicator lacks to be the control of NCCL ranks.
template <class Comm>
consteval bool models_nccl_control() {
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
    return Aborts<Comm>;
}

}}} // namespace joinable::v0::detail
