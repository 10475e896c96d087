// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/device_of.hpp>
#include <joinable/communicator/host_collectives.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/device.hpp>
#include <joinable/tensor/buffer.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The collectives of a communicator that moves device memory and carries no words itself. wait() also
/// waits for everything else in flight on the communicator.
template <class Comm>
    requires(!reduces_host_memory<Comm> && gives_device<Comm> && !gives_host_words<Comm>)
class HostCollectives<Comm> {
public:
    /// wait() copies the result back. The host's buffer and the HostCollectives must stay where
    /// they are.
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
            if (!is_copied_ && host_.count != 0) {
                owner_.comm_.device_memory().download(
                    owner_.stagings_.back().device.data(), host_.data, host_.bytes()
                );
            }
            is_copied_ = true;
        }
        [[nodiscard]] bool test() { return inner_.test(); }
        [[nodiscard]] bool progress() { return make_progress(inner_); }

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

    void download(void const* from, void* to, std::size_t bytes) {
        comm_.device_memory().download(from, to, bytes);
    }

private:
    /// A few bytes that need no registration, so no arenas of the communicator. The device memory
    /// is freed first, which waits for all work of the device: a rank that fails may have a copy in
    /// flight.
    struct Staging {
        Arena host;
        Arena device;
    };

    Buffer staged(Buffer host) {
        constexpr std::size_t least = 1024;
        Device& memory = comm_.device_memory();
        std::size_t const given = stagings_.empty() ? 0 : stagings_.back().host.bytes();
        if (given < (std::max)(host.bytes(), least)) {
            std::size_t const bytes = (std::max)({host.bytes(), least, 2 * given});
            Arena copy = memory.allocate_staging(bytes);
            stagings_.push_back({std::move(copy), memory.allocate(bytes, Arena::default_alignment)}
            );
        }
        Staging const& staging = stagings_.back();
        if (host.count != 0) {
            std::memcpy(staging.host.data(), host.data, host.bytes());
            memory.upload(staging.host.data(), staging.device.data(), host.bytes());
        }
        return {staging.device.data(), host.count, host.dtype};
    }

    Comm& comm_;
    std::vector<Staging> stagings_; ///< the last one is in use; none is freed before the end
};

}}} // namespace joinable::v0::detail
