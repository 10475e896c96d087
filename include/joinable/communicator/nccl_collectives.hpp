// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/checks.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/nccl_api.hpp>
#include <joinable/communicator/detail/nccl_check.hpp>
#include <joinable/communicator/detail/nccl_control.hpp>
#include <joinable/communicator/detail/nccl_rank.hpp>
#include <joinable/communicator/detail/nccl_scaled_sum.hpp>
#include <joinable/communicator/nccl_group.hpp>
#include <joinable/communicator/nccl_options.hpp>
#include <joinable/communicator/nccl_work.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/device/cuda_device.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable::inline v0 {

namespace detail {
class NcclGraph;
} // namespace detail

/// The members that NcclCommunicator and NcclCommunicatorRef have in common.
///
/// Collectives run on the communicator's stream, each behind what was on the caller's stream when it
/// was called; NcclWork::wait() orders the caller's stream behind it. The host is blocked by barrier(),
/// synchronize(), split(), the constructors, `check`, and while NCCL launches what came before. Each
/// of these waits ends with the deadline, with an error that NCCL reports, or with an abort of any rank,
/// which the control communicator carries. Nothing looks while nobody waits: so wait for streams by
/// synchronize(), not by cudaStreamSynchronize, which waits for ranks that never come.
///
/// All members that take buffers throw ContractViolation before any data moves when counts or dtypes
/// do not fit, a root is no rank, memory is missing, overlaps, is the host's or another device's, or
/// the operation is one that NCCL does not have: bit_and, bit_or. How sums are ordered is NCCL's.
class NcclCollectives {
public:
    using device_type = CudaDevice;

    NcclCollectives(NcclCollectives const&) = delete;
    NcclCollectives& operator=(NcclCollectives const&) = delete;

    [[nodiscard]] int rank() const noexcept { return rank_.rank(); }
    [[nodiscard]] int size() const noexcept { return rank_.size(); }
    [[nodiscard]] int device() const noexcept { return rank_.device(); }
    /// Null once the communicator is spent, unless it revokes.
    [[nodiscard]] ncclComm_t native_handle() const noexcept { return rank_.handle(); }
    /// That of the collectives.
    [[nodiscard]] cudaStream_t stream() const noexcept { return rank_.stream(); }

    /// Local. From now on data is made and used on `caller`. Returns the stream on which it was.
    cudaStream_t set_stream(cudaStream_t caller) noexcept { return rank_.set_caller(caller); }
    /// What works in the memory of the device, on the caller's stream: for buckets. Without kernels
    /// (CudaDevice::use_kernels) gradients are scaled by NCCL, on their way.
    [[nodiscard]] CudaDevice& device_memory() {
        if (!device_memory_) {
            device_memory_.emplace(rank_.device(), rank_.caller(), rank_.caller());
        }
        device_memory_->set_streams(rank_.caller(), rank_.caller());
        return *device_memory_;
    }

    /// In place.
    NcclWork all_reduce(Buffer buffer, ReduceOp op) {
        check(buffer, op);
        ncclRedOp_t const how = detail::nccl_op(op);
        return post(
            {detail::Collective::all_reduce, buffer.dtype, op, 0, buffer.count},
            [&](ncclComm_t comm, cudaStream_t stream) {
                return ncclAllReduce(
                    buffer.data, buffer.data, buffer.count, type(buffer), how, comm, stream
                );
            }
        );
    }

    /// The sum of `factor` times the buffer, of a floating-point dtype, in place. Each rank has a factor
    /// of its own, which is rounded to the dtype. On all ranks or none.
    NcclWork all_reduce(Buffer buffer, ReduceOp op, double factor) {
        check(buffer, op);
        if (op != ReduceOp::sum || !is_floating_point(buffer.dtype)) {
            throw ContractViolation{detail::concat(
                "an all-reduce with a factor is a sum of floating-point numbers, but was given ",
                name_of(op),
                " of ",
                name_of(buffer.dtype),
                "; leave the factor out, or convert the buffer"
            )};
        }
        return post(
            {detail::Collective::scaled_all_reduce, buffer.dtype, op, 0, buffer.count},
            [&](ncclComm_t comm, cudaStream_t stream) {
                detail::NcclScaledSum const sum{comm, buffer.dtype, factor};
                return sum.result() != ncclSuccess ? sum.result()
                                                   : ncclAllReduce(
                                                         buffer.data,
                                                         buffer.data,
                                                         buffer.count,
                                                         type(buffer),
                                                         sum.op(),
                                                         comm,
                                                         stream
                                                     );
            }
        );
    }

    /// In place at the root; the other buffers keep what they have.
    NcclWork reduce(Buffer buffer, ReduceOp op, int root) {
        check(buffer, op);
        detail::check_root(root, size());
        ncclRedOp_t const how = detail::nccl_op(op);
        return post(
            {detail::Collective::reduce, buffer.dtype, op, root, buffer.count},
            [&](ncclComm_t comm, cudaStream_t stream) {
                return ncclReduce(
                    buffer.data, buffer.data, buffer.count, type(buffer), how, root, comm, stream
                );
            }
        );
    }

    NcclWork broadcast(Buffer buffer, int root) {
        check(buffer);
        detail::check_root(root, size());
        return post(
            {detail::Collective::broadcast, buffer.dtype, ReduceOp::sum, root, buffer.count},
            [&](ncclComm_t comm, cudaStream_t stream) {
                return ncclBroadcast(
                    buffer.data, buffer.data, buffer.count, type(buffer), root, comm, stream
                );
            }
        );
    }

    /// Of the hosts: streams go on.
    void barrier() {
        rank_.over_control([](detail::NcclControl& control) { control.barrier(); });
    }

    /// `out` is `size()` times `in`; `in` may be this rank's part of `out`.
    NcclWork all_gather(ConstBuffer in, Buffer out) {
        detail::check_share(in, out, size());
        detail::check_place(in, out, in.count * index());
        check(in);
        check(out);
        return post(
            {detail::Collective::all_gather, in.dtype, ReduceOp::sum, 0, in.count},
            [&](ncclComm_t comm, cudaStream_t stream) {
                return ncclAllGather(in.data, out.data, in.count, type(in), comm, stream);
            }
        );
    }
    /// Rank r contributes counts[r] elements; the same counts on every rank.
    NcclWork all_gather(ConstBuffer in, Buffer out, detail::Counts counts) {
        detail::check_counts(counts, in, out, rank(), size());
        detail::check_place(in, out, detail::offset_of(counts, index()));
        std::vector<std::size_t> const sends(ranks(), in.count);
        return exchange(
            by_counts({detail::Collective::all_gather, in.dtype}),
            in,
            sends,
            Parts::same,
            out,
            counts
        );
    }

    /// `in` is `size()` times `out`; `out` may be this rank's part of `in`.
    NcclWork reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op) {
        detail::check_share(out, in, size());
        detail::check_place(out, in, out.count * index());
        check(in, op);
        check(out);
        ncclRedOp_t const how = detail::nccl_op(op);
        return post(
            {detail::Collective::reduce_scatter, in.dtype, op, 0, out.count},
            [&](ncclComm_t comm, cudaStream_t stream) {
                return ncclReduceScatter(in.data, out.data, out.count, type(in), how, comm, stream);
            }
        );
    }
    /// Rank r receives counts[r] elements; the same counts on every rank.
    NcclWork reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op, detail::Counts counts) {
        detail::check_counts(counts, out, in, rank(), size());
        detail::check_place(out, in, detail::offset_of(counts, index()));
        check(in, op);
        check(out);
        ncclRedOp_t const how = detail::nccl_op(op);
        std::vector<std::size_t> const expects(ranks(), out.count);
        return post(
            by_counts({detail::Collective::reduce_scatter, in.dtype, op}),
            [&](ncclComm_t comm, cudaStream_t stream) { // a reduction to each rank, as one
                return grouped([&](auto const& note) {
                    auto const* part = static_cast<std::byte const*>(in.data);
                    for (std::size_t root = 0; root < counts.size(); ++root) {
                        if (counts[root] != 0) {
                            note(ncclReduce(
                                part,
                                out.data,
                                counts[root],
                                type(in),
                                how,
                                static_cast<int>(root),
                                comm,
                                stream
                            ));
                        }
                        part += counts[root] * size_of(in.dtype);
                    }
                });
            },
            counts,
            expects
        );
    }

    /// At the root `out` is `size()` times `in`, and `in` may be its part; elsewhere `out` is not
    /// looked at.
    NcclWork gather(ConstBuffer in, Buffer out, int root) {
        detail::check_memory(in);
        detail::check_root(root, size());
        if (rank() == root) {
            detail::check_share(in, out, size());
            detail::check_place(in, out, in.count * index());
        }
        std::vector<std::size_t> const counts(rank() == root ? ranks() : 0, in.count);
        return gather_parts(in, out, root, counts, false);
    }
    /// Rank r contributes counts[r] elements; only the root's counts are looked at.
    NcclWork gather(ConstBuffer in, Buffer out, int root, detail::Counts counts) {
        detail::check_memory(in);
        detail::check_root(root, size());
        if (rank() == root) {
            detail::check_counts(counts, in, out, rank(), size());
            detail::check_place(in, out, detail::offset_of(counts, index()));
        }
        return gather_parts(in, out, root, counts, true);
    }

    /// At the root `in` is `size()` times `out`, and `out` may be its part; elsewhere `in` is not
    /// looked at.
    NcclWork scatter(ConstBuffer in, Buffer out, int root) {
        detail::check_memory(out);
        detail::check_root(root, size());
        if (rank() == root) {
            detail::check_share(out, in, size());
            detail::check_place(out, in, out.count * index());
        }
        std::vector<std::size_t> const counts(rank() == root ? ranks() : 0, out.count);
        return scatter_parts(in, out, root, counts, false);
    }
    /// Rank r receives counts[r] elements; only the root's counts are looked at.
    NcclWork scatter(ConstBuffer in, Buffer out, int root, detail::Counts counts) {
        detail::check_memory(out);
        detail::check_root(root, size());
        if (rank() == root) {
            detail::check_counts(counts, out, in, rank(), size());
            detail::check_place(out, in, detail::offset_of(counts, index()));
        }
        return scatter_parts(in, out, root, counts, true);
    }

    /// Part r of `in` goes to rank r, where it is the part of this rank in `out`. Both have the same
    /// count, a multiple of `size()`; they do not overlap.
    NcclWork all_to_all(ConstBuffer in, Buffer out) {
        detail::check_parts(in, out, size());
        detail::check_apart(in, out);
        std::vector<std::size_t> const counts(ranks(), in.count / ranks());
        return exchange(
            {detail::Collective::all_to_all, in.dtype, ReduceOp::sum, 0, in.count / ranks()},
            in,
            counts,
            Parts::own,
            out,
            counts
        );
    }
    /// counts_in[r] elements go to rank r, counts_out[r] come from it.
    NcclWork
    all_to_all(ConstBuffer in, Buffer out, detail::Counts counts_in, detail::Counts counts_out) {
        detail::check_same_dtype(in, out);
        detail::check_counts(counts_in, in, size());
        detail::check_counts(counts_out, out, size());
        detail::check_apart(in, out);
        return exchange(
            by_counts({detail::Collective::all_to_all, in.dtype}),
            in,
            counts_in,
            Parts::own,
            out,
            counts_out
        );
    }

    /// Not collective, and not compared by `check`. NCCL has no tags: between two ranks, messages meet
    /// in the order of the calls, whatever their tags, and two ranks that send to each other do it in
    /// a group().
    NcclWork send(ConstBuffer buffer, int to, [[maybe_unused]] int tag = 0) {
        check(buffer);
        detail::check_rank("destination", to, size());
        return message([&](ncclComm_t comm, cudaStream_t stream) {
            return ncclSend(buffer.data, buffer.count, type(buffer), to, comm, stream);
        });
    }
    /// The other side of send(): the same count and dtype, which NCCL does not compare.
    NcclWork receive(Buffer buffer, int from, [[maybe_unused]] int tag = 0) {
        check(buffer);
        detail::check_rank("source", from, size());
        return message([&](ncclComm_t comm, cudaStream_t stream) {
            return ncclRecv(buffer.data, buffer.count, type(buffer), from, comm, stream);
        });
    }

    /// What follows is launched as one when the token goes. The same collectives on every rank.
    [[nodiscard]] NcclGroup group() { return NcclGroup{rank_}; }

    /// Makes the host wait until everything that was posted has run, and what is on the caller's
    /// stream, up to the deadline.
    /// @throws TimedOut, PeerFailed, ...  after which the streams are not stuck any more.
    void synchronize() { rank_.synchronize(); }

    /// Local. Ends what is under way, here and by the control communicator on all ranks; the first
    /// reason wins. NCCL's handle is freed, unless it is revoked: an engine whose handle it is must not
    /// destroy it.
    void abort(AbortReason const& reason) { rank_.abort(reason); }
    [[nodiscard]] bool is_spent() const { return rank_.is_spent(); }

    /// Local; for waits that start later. Returns the deadline that was in force.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return rank_.set_deadline(deadline);
    }
    /// Local. Who has not posted this rank's oldest unfinished collective; none, where the control
    /// communicator does not model SharesMemory.
    [[nodiscard]] std::vector<int> missing() const { return rank_.missing(); }

protected:
    NcclCollectives(std::unique_ptr<detail::NcclControl> control, NcclOptions const& options)
        : rank_{std::move(control), options}, checks_{options.check} {}
    ~NcclCollectives() = default;

    [[nodiscard]] bool is_unwinding() const noexcept {
        return std::uncaught_exceptions() > exceptions_;
    }

    detail::NcclRank rank_;
    std::optional<CudaDevice> device_memory_;
    bool checks_;

private:
    friend class detail::NcclGraph;

    enum class Parts : bool {
        own,
        same
    }; ///< what a rank sends: other elements to each, or the same

    int exceptions_ = std::uncaught_exceptions();

    [[nodiscard]] std::size_t ranks() const noexcept { return static_cast<std::size_t>(size()); }
    [[nodiscard]] std::size_t index() const noexcept { return static_cast<std::size_t>(rank()); }
    [[nodiscard]] static ncclDataType_t type(ConstBuffer buffer) noexcept {
        return detail::nccl_type(buffer.dtype);
    }
    [[nodiscard]] static detail::Descriptor by_counts(detail::Descriptor said) noexcept {
        said.has_counts = true;
        return said;
    }

    void check(ConstBuffer buffer) {
        detail::check_memory(buffer);
        rank_.check_memory(buffer);
    }
    void check(ConstBuffer buffer, ReduceOp op) {
        check(buffer);
        detail::check_reduction(buffer, op);
    }

    /// Runs `calls(note)`, in which note() takes the results of NCCL, as one.
    template <class Calls>
    [[nodiscard]] static ncclResult_t grouped(Calls const& calls) {
        ncclResult_t worst = ncclGroupStart();
        auto const note = [&](ncclResult_t result) {
            if (detail::is_error(result) && !detail::is_error(worst)) {
                worst = result;
            }
        };
        calls(note);
        note(ncclGroupEnd());
        return worst;
    }

    template <class Call>
    NcclWork post(
        detail::Descriptor const& said,
        Call const& call,
        detail::Counts sends = {},
        detail::Counts expects = {}
    ) {
        if (checks_) {
            detail::agree_on_collective(rank_, said, sends, expects);
        }
        return launch(1, name_of(said.collective), call);
    }
    template <class Call>
    NcclWork message(Call const& call) {
        return launch(0, "a message", call);
    }
    template <class Call>
    NcclWork launch(std::uint64_t collectives, std::string_view what, Call const& call) {
        detail::NcclLaunch& launched = rank_.post(collectives, [&] {
            rank_.check(call(rank_.handle(), rank_.stream()), what);
        });
        return {rank_, launched};
    }

    /// sends[r] elements of `in` to each rank r, expects[r] from it: messages, as one.
    NcclWork exchange(
        detail::Descriptor const& said,
        ConstBuffer in,
        detail::Counts sends,
        Parts parts,
        Buffer out,
        detail::Counts expects
    ) {
        check(in);
        check(out);
        auto const call = [&](ncclComm_t comm, cudaStream_t stream) {
            return grouped([&](auto const& note) {
                auto const* from = static_cast<std::byte const*>(in.data);
                auto* to = static_cast<std::byte*>(out.data);
                for (std::size_t peer = 0; peer < ranks(); ++peer) {
                    auto const number = static_cast<int>(peer);
                    if (sends[peer] != 0) {
                        note(ncclSend(from, sends[peer], type(in), number, comm, stream));
                    }
                    if (expects[peer] != 0) {
                        note(ncclRecv(to, expects[peer], type(out), number, comm, stream));
                    }
                    from += parts == Parts::own ? sends[peer] * size_of(in.dtype) : 0;
                    to += expects[peer] * size_of(out.dtype);
                }
            });
        };
        return post(said, call, sends, expects);
    }
    /// `counts` are the root's.
    NcclWork
    gather_parts(ConstBuffer in, Buffer out, int root, detail::Counts counts, bool has_counts) {
        std::vector<std::size_t> sends(ranks());
        std::vector<std::size_t> expects(ranks());
        sends[static_cast<std::size_t>(root)] = in.count;
        if (rank() == root) {
            std::copy(counts.begin(), counts.end(), expects.begin());
        } else {
            out = {};
        }
        detail::Descriptor said{
            detail::Collective::gather, in.dtype, ReduceOp::sum, root, in.count
        };
        said.has_counts = has_counts;
        out.dtype = in.dtype;
        return exchange(said, in, sends, Parts::same, out, expects);
    }
    NcclWork
    scatter_parts(ConstBuffer in, Buffer out, int root, detail::Counts counts, bool has_counts) {
        std::vector<std::size_t> sends(ranks());
        std::vector<std::size_t> expects(ranks());
        expects[static_cast<std::size_t>(root)] = out.count;
        if (rank() == root) {
            std::copy(counts.begin(), counts.end(), sends.begin());
        } else {
            in = {};
        }
        detail::Descriptor said{
            detail::Collective::scatter, out.dtype, ReduceOp::sum, root, out.count
        };
        said.has_counts = has_counts;
        in.dtype = out.dtype;
        return exchange(said, in, sends, Parts::own, out, expects);
    }
};

} // namespace joinable::inline v0
