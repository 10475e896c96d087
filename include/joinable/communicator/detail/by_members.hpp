// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/pieces.hpp>
#include <joinable/communicator/work.hpp>
#include <joinable/tensor/buffer.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Starts a request by the members of any communicator, and returns run(its work). If the communicator lacks the
/// collective, returns lacks(its name) instead.
template <Communicator Comm, class Run, class Lacks>
[[nodiscard]] auto
by_members(Comm& comm, Request const& request, Run const& run, Lacks const& lacks) {
    Descriptor const& signature = request.signature;
    ConstBuffer const in = request.in;
    Buffer const out = request.out;
    // Where a collective has one buffer, a rank that only sends reads it.
    Buffer const in_place =
        out.data == nullptr ? Buffer{const_cast<void*>(in.data), in.count, signature.dtype} : out;
    auto const by_parts = [&](PartSizes const& parts, auto const& post) {
        return signature.has_counts ? run(post(parts.table(comm.size()))) : run(post());
    };
    switch (signature.collective) {
    case Collective::barrier: comm.barrier(); return run(CompletedWork{});
    case Collective::broadcast: return run(comm.broadcast(in_place, signature.root));
    case Collective::all_reduce: return run(comm.all_reduce(in_place, signature.op));
    case Collective::scaled_all_reduce:
        if constexpr (has_sum_of_pieces<Comm>) {
            if (request.pieces.number != 0) {
                return run(comm.sum_pieces(request.pieces, signature.factor));
            }
        }
        if constexpr (has_scaled_all_reduce<Comm>) {
            return run(comm.all_reduce(in_place, signature.op, signature.factor));
        }
        break;
    case Collective::reduce:
        if constexpr (has_reduce<Comm>) {
            return run(comm.reduce(in_place, signature.op, signature.root));
        }
        break;
    case Collective::all_gather:
        if constexpr (has_all_gather<Comm>) {
            return by_parts(request.expects, [&](auto... counts) {
                return comm.all_gather(in, out, counts...);
            });
        }
        break;
    case Collective::reduce_scatter:
        if constexpr (has_reduce_scatter<Comm>) {
            return by_parts(request.sends, [&](auto... counts) {
                return comm.reduce_scatter(in, out, signature.op, counts...);
            });
        }
        break;
    case Collective::scaled_reduce_scatter:
        if constexpr (has_scaled_reduce_scatter<Comm>) {
            return by_parts(request.sends, [&](auto... counts) {
                return comm.reduce_scatter(in, out, signature.op, signature.factor, counts...);
            });
        }
        break;
    case Collective::gather:
        if constexpr (has_gather<Comm>) {
            return by_parts(request.expects, [&](auto... counts) {
                return comm.gather(in, out, signature.root, counts...);
            });
        }
        break;
    case Collective::scatter:
        if constexpr (has_scatter<Comm>) {
            return by_parts(request.sends, [&](auto... counts) {
                return comm.scatter(in, out, signature.root, counts...);
            });
        }
        break;
    case Collective::all_to_all:
        if constexpr (has_all_to_all<Comm>) {
            int const size = comm.size();
            return signature.has_counts
                       ? run(comm.all_to_all(
                             in, out, request.sends.table(size), request.expects.table(size)
                         ))
                       : run(comm.all_to_all(in, out));
        }
        break;
    }
    return lacks(signature.collective);
}

}}} // namespace joinable::v0::detail
