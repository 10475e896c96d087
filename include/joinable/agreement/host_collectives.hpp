// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/device_of.hpp>
#include <joinable/tensor/buffer.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Collectives over a few words on the host, over any communicator. If it moves device memory, they
/// go through memory of its device: see agreement/staged_collectives.hpp, which every device
/// includes. One at a time.
template <class Comm>
class HostCollectives {
    static_assert(
        reduces_host_memory<Comm> || !gives_device<Comm>,
        "words of the host go through a communicator of device memory: include "
        "<joinable/agreement/staged_collectives.hpp>"
    );

public:
    using Work = work_of<Comm>;

    explicit HostCollectives(Comm& comm) noexcept : comm_{comm} {}

    [[nodiscard]] Work all_reduce(Buffer buffer, ReduceOp op) {
        return comm_.all_reduce(buffer, op);
    }
    [[nodiscard]] auto broadcast(Buffer buffer, int root) { return comm_.broadcast(buffer, root); }

private:
    Comm& comm_;
};

}}} // namespace joinable::v0::detail
