// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstring>
#include <type_traits>
#include <utility>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/device_of.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// A communicator of device memory that sums and broadcasts words of the host itself.
template <class C>
concept gives_host_words = requires(C& comm) { comm.host_words(); };

/// The object that moves the words.
template <class Comm>
[[nodiscard]] auto& carrier_of_words(Comm& comm) noexcept {
    if constexpr (!reduces_host_memory<Comm> && gives_host_words<Comm>) {
        return comm.host_words();
    } else {
        return comm;
    }
}

/// Collectives over a few words on the host, over any communicator. One that moves device memory
/// carries them itself, by host_words(), or they go through memory of its device: see
/// communicator/staged_collectives.hpp, which every device includes. Then one is under way at a time.
template <class Comm>
class HostCollectives {
    static_assert(
        reduces_host_memory<Comm> || gives_host_words<Comm> || !gives_device<Comm>,
        "words of the host go through a communicator of device memory: include "
        "<joinable/communicator/staged_collectives.hpp>"
    );

public:
    using Work = std::remove_cvref_t<
        decltype(carrier_of_words(std::declval<Comm&>()).all_reduce(Buffer{}, ReduceOp::sum))>;

    explicit HostCollectives(Comm& comm) noexcept : comm_{comm} {}

    [[nodiscard]] Work all_reduce(Buffer buffer, ReduceOp op) {
        return carrier_of_words(comm_).all_reduce(buffer, op);
    }
    [[nodiscard]] auto broadcast(Buffer buffer, int root) {
        return carrier_of_words(comm_).broadcast(buffer, root);
    }
    /// Copies to the host what is in memory of the device after the work that was submitted there.
    /// `to` is from Device::allocate_staging(). Blocks, up to the deadline.
    void download(void const* from, void* to, std::size_t bytes) {
        if constexpr (reduces_host_memory<Comm>) {
            std::memcpy(to, from, bytes);
        } else {
            carrier_of_words(comm_).download(from, to, bytes);
        }
    }

private:
    Comm& comm_;
};

}}} // namespace joinable::v0::detail
