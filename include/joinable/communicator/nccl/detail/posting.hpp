// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/checks.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/nccl/detail/api.hpp>
#include <joinable/communicator/nccl/detail/check.hpp>
#include <joinable/communicator/nccl/detail/control.hpp>
#include <joinable/communicator/nccl/detail/rank.hpp>
#include <joinable/communicator/nccl/options.hpp>
#include <joinable/communicator/nccl/work.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable::inline v0::detail {

/// How a collective or a message becomes calls of NCCL: its buffers are looked at, ranks compare what
/// they say where that is asked for, and what is handed over becomes a work.
class NcclPosting {
public:
    NcclPosting(NcclPosting const&) = delete;
    NcclPosting& operator=(NcclPosting const&) = delete;

    [[nodiscard]] int rank() const noexcept { return rank_.rank(); }
    [[nodiscard]] int size() const noexcept { return rank_.size(); }

protected:
    NcclPosting(std::unique_ptr<NcclControl> control, NcclOptions const& options)
        : rank_{std::move(control), options}, checks_{options.check} {}
    ~NcclPosting() = default;

    [[nodiscard]] std::size_t ranks() const noexcept { return static_cast<std::size_t>(size()); }
    [[nodiscard]] std::size_t index() const noexcept { return static_cast<std::size_t>(rank()); }
    [[nodiscard]] static ncclDataType_t type(ConstBuffer buffer) noexcept {
        return nccl_type(buffer.dtype);
    }
    [[nodiscard]] static Descriptor by_counts(Descriptor said) noexcept {
        said.has_counts = true;
        return said;
    }

    void check(ConstBuffer buffer) {
        check_memory(buffer);
        rank_.check_memory(buffer);
    }
    void check(ConstBuffer buffer, ReduceOp op) {
        check(buffer);
        check_reduction(buffer, op);
    }

    /// Runs `calls(note)`, in which note() takes the results of NCCL, as one.
    template <class Calls>
    [[nodiscard]] static ncclResult_t grouped(Calls const& calls) {
        ncclResult_t worst = ncclGroupStart();
        auto const note = [&](ncclResult_t result) {
            if (is_error(result) && !is_error(worst)) {
                worst = result;
            }
        };
        calls(note);
        note(ncclGroupEnd());
        return worst;
    }

    template <class Call>
    NcclWork
    post(Descriptor const& said, Call const& call, Counts sends = {}, Counts expects = {}) {
        if (checks_) {
            agree_on_collective(rank_, said, sends, expects);
        }
        return launch(1, name_of(said.collective), call);
    }
    template <class Call>
    NcclWork message(Call const& call) {
        return launch(0, "a message", call);
    }
    template <class Call>
    NcclWork launch(std::uint64_t collectives, std::string_view what, Call const& call) {
        NcclLaunch& launched = rank_.post(collectives, [&] {
            rank_.check(call(rank_.handle(), rank_.stream()), what);
        });
        return {rank_, launched};
    }

    NcclRank rank_;
    bool checks_;
};

} // namespace joinable::inline v0::detail
