// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/detail/request.hpp>

#include <joinable/communicator/detail/checks.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION Request RequestsOf::all_reduce(Buffer buffer, ReduceOp op) const {
    check_memory(buffer);
    check_reduction(buffer, op);
    return {{Collective::all_reduce, buffer.dtype, op, 0, buffer.count}, buffer, buffer};
}

JOINABLE_DEFINITION Request
RequestsOf::all_reduce(Buffer buffer, ReduceOp op, double factor) const {
    check_memory(buffer);
    check_scaled(buffer, op);
    return {
        {Collective::scaled_all_reduce, buffer.dtype, op, 0, buffer.count, false, factor},
        buffer,
        buffer
    };
}

JOINABLE_DEFINITION Request
RequestsOf::sum_pieces(BufferPieces const& buffer, double factor) const {
    void* const out = buffer.out != nullptr ? buffer.out : buffer.list[0].data();
    Buffer const whole{out, buffer.count(), buffer.dtype};
    Request request = all_reduce(whole, ReduceOp::sum, factor);
    request.pieces = buffer;
    return request;
}

JOINABLE_DEFINITION Request RequestsOf::reduce(Buffer buffer, ReduceOp op, int root) const {
    check_memory(buffer);
    check_reduction(buffer, op);
    check_root(root, size);
    return {
        {Collective::reduce, buffer.dtype, op, root, buffer.count},
        buffer,
        rank == root ? buffer : Buffer{}
    };
}

JOINABLE_DEFINITION Request RequestsOf::broadcast(Buffer buffer, int root) const {
    check_memory(buffer);
    check_root(root, size);
    return {
        {Collective::broadcast, buffer.dtype, ReduceOp::sum, root, buffer.count},
        rank == root ? ConstBuffer{buffer} : ConstBuffer{},
        buffer
    };
}

JOINABLE_DEFINITION Request
RequestsOf::all_gather(ConstBuffer in, Buffer out, Tables counts) const {
    PartSizes const parts = divide(in, out, counts);
    return {
        by_parts(Collective::all_gather, in, counts), in, out, PartSizes::equal(in.count), parts
    };
}

JOINABLE_DEFINITION Request
RequestsOf::reduce_scatter(ConstBuffer in, Buffer out, ReduceOp op, Tables counts) const {
    PartSizes const parts = divide(out, in, counts);
    check_reduction(in, op);
    return {
        by_parts(Collective::reduce_scatter, out, counts, 0, op),
        in,
        out,
        parts,
        PartSizes::equal(out.count)
    };
}

JOINABLE_DEFINITION Request RequestsOf::reduce_scatter(
    ConstBuffer in, Buffer out, ReduceOp op, double factor, Tables counts
) const {
    check_scaled(in, op);
    Request request = reduce_scatter(in, out, op, counts);
    request.signature.collective = Collective::scaled_reduce_scatter;
    request.signature.factor = factor;
    return request;
}

JOINABLE_DEFINITION Request
RequestsOf::gather(ConstBuffer in, Buffer out, int root, Tables counts) const {
    check_memory(in);
    check_root(root, size);
    bool const is_root = rank == root;
    return {
        by_parts(Collective::gather, in, counts, root),
        in,
        is_root ? out : Buffer{},
        PartSizes::only(root, in.count),
        is_root ? divide(in, out, counts) : PartSizes{}
    };
}

JOINABLE_DEFINITION Request
RequestsOf::scatter(ConstBuffer in, Buffer out, int root, Tables counts) const {
    check_memory(out);
    check_root(root, size);
    bool const is_root = rank == root;
    return {
        by_parts(Collective::scatter, out, counts, root),
        is_root ? in : ConstBuffer{},
        out,
        is_root ? divide(out, in, counts) : PartSizes{},
        PartSizes::only(root, out.count)
    };
}

JOINABLE_DEFINITION Request RequestsOf::all_to_all(ConstBuffer in, Buffer out) const {
    check_parts(in, out, size);
    check_apart(in, out);
    std::size_t const share = in.count / static_cast<std::size_t>(size);
    PartSizes const parts = PartSizes::equal(share);
    return {{Collective::all_to_all, in.dtype, ReduceOp::sum, 0, share}, in, out, parts, parts};
}

JOINABLE_DEFINITION Request
RequestsOf::all_to_all(ConstBuffer in, Buffer out, Counts counts_in, Counts counts_out) const {
    check_same_dtype(in, out);
    check_counts(counts_in, in, size);
    check_counts(counts_out, out, size);
    check_apart(in, out);
    return {
        by_parts(Collective::all_to_all, in, counts_in),
        in,
        out,
        PartSizes::of(counts_in),
        PartSizes::of(counts_out)
    };
}

JOINABLE_DEFINITION PartSizes
RequestsOf::divide(ConstBuffer part, ConstBuffer whole, Tables const& counts) const {
    auto const index = static_cast<std::size_t>(rank);
    if (counts) {
        check_counts(*counts, part, whole, rank, size);
        check_place(part, whole, offset_of(*counts, index));
        return PartSizes::of(*counts);
    }
    check_share(part, whole, size);
    check_place(part, whole, part.count * index);
    return PartSizes::equal(part.count);
}

}}} // namespace joinable::v0::detail
