// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstring>
#include <utility>

#include <joinable/communicator/arena.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/host_collectives.hpp>
#include <joinable/device/device.hpp>
#include <joinable/tensor/buffer.hpp>

namespace joinable::inline v0::detail {

/// Of a communicator that moves memory of a device. Nothing else may be in flight on it, or wait()
/// waits for that, too.
template <class Comm>
    requires(!reduces_host_memory<Comm> && gives_device<Comm>)
class HostCollectives<Comm> {
public:
    /// wait() copies the result back. The host's buffer and what made it stay where they are.
    class Work {
    public:
        Work(work_of<Comm> inner, HostCollectives& owner, Buffer host)
            : inner_{std::move(inner)}, owner_{owner}, host_{host} {}

        void wait() {
            if constexpr (requires { inner_.synchronize(); }) {
                inner_.synchronize(
                ); // with a deadline: wait() orders streams, and the host goes on
            }
            inner_.wait();
            if (!std::exchange(is_copied_, true)) {
                owner_.comm_.device_memory().download(
                    owner_.staging_.data(), host_.data, host_.bytes()
                );
            }
        }
        [[nodiscard]] bool test() { return inner_.test(); }

    private:
        work_of<Comm> inner_;
        HostCollectives& owner_;
        Buffer host_;
        bool is_copied_ = false;
    };

    explicit HostCollectives(Comm& comm) noexcept : comm_{comm} {}

    [[nodiscard]] Work all_reduce(Buffer buffer, ReduceOp op) {
        return {comm_.all_reduce(staged(buffer), op), *this, buffer};
    }
    [[nodiscard]] Work broadcast(Buffer buffer, int root) {
        return {comm_.broadcast(staged(buffer), root), *this, buffer};
    }

private:
    Buffer staged(Buffer host) {
        Device& memory = comm_.device_memory();
        if (staging_.bytes() < host.bytes()) {
            // A few bytes, which nobody registers: not an arena of the communicator.
            staging_ = memory.allocate(host.bytes(), Arena::default_alignment);
            copy_ = memory.allocate_staging(host.bytes());
        }
        if (host.count != 0) {
            std::memcpy(copy_.data(), host.data, host.bytes());
        }
        memory.upload(copy_.data(), staging_.data(), host.bytes());
        return {staging_.data(), host.count, host.dtype};
    }

    Comm& comm_;
    Arena staging_;
    Arena copy_; ///< on the host
};

} // namespace joinable::inline v0::detail
