// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <string_view>

#include <joinable/bucket/bucket_reduction.hpp>
#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/pieces.hpp>
#include <joinable/communicator/scaled_sums.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace joinable { inline namespace v0 {

/// Sums each bucket over all ranks, in place: every rank gets every average.
struct AllReduce {
    static constexpr std::string_view name = "AllReduce";
    static constexpr bool delivers = true;

    /// If the sum scales, gradients that live in their buckets are not touched before it.
    template <Communicator Comm>
    [[nodiscard]] static bool scales(Comm& comm) noexcept {
        return ScalesSums<Comm> && !detail::scales_before_sum(comm);
    }
    template <Communicator Comm>
    [[nodiscard]] static work_of<Comm>
    start(Comm& comm, BucketRun const& run, [[maybe_unused]] double factor, bool /*contributes*/) {
        if constexpr (detail::has_sum_of_pieces<Comm>) {
            if (run.pieces.number != 0) {
                return comm.sum_pieces(run.pieces, factor);
            }
        }
        if constexpr (ScalesSums<Comm>) {
            if (scales(comm)) { // also without a contribution: all ranks run the same collective
                return comm.all_reduce(run.buffer, ReduceOp::sum, factor);
            }
        }
        return comm.all_reduce(run.buffer, ReduceOp::sum);
    }
    template <Communicator Comm>
    static void finish(Comm&, BucketRun const&) noexcept {}
};

}} // namespace joinable::v0
