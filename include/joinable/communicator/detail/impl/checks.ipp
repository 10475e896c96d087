// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/detail/checks.hpp>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void check_reduction(ConstBuffer buffer, ReduceOp op) {
    if (is_reducible(buffer.dtype, op)) {
        return;
    }
    std::string const given =
        concat(", but was given ", name_of(op), " of ", name_of(buffer.dtype));
    switch (row_of(buffer.dtype).kind) {
    case NumberKind::integer:
        throw ContractViolation{concat(
            "a reduction is of integers of 8, 32 or 64 bits", given, "; convert the elements to i32"
        )};
    case NumberKind::boolean:
        throw ContractViolation{concat(
            "a reduction of booleans is min, max, bit_and or bit_or",
            given,
            "; convert the elements to i32 to count them"
        )};
    case NumberKind::complex:
        throw ContractViolation{concat(
            "a reduction of complex numbers is a sum or a product",
            given,
            "; reduce their magnitudes instead"
        )};
    default:
        throw ContractViolation{concat(
            "a reduction with ",
            name_of(op),
            " needs integers, but the elements are ",
            name_of(buffer.dtype)
        )};
    }
}

JOINABLE_DEFINITION void check_scaled(ConstBuffer buffer, ReduceOp op) {
    if (op != ReduceOp::sum || !is_scalable(buffer.dtype)) {
        throw ContractViolation{concat(
            "a reduction with a factor is a sum of floating-point or complex numbers, but was given ",
            name_of(op),
            " of ",
            name_of(buffer.dtype),
            "; leave the factor out, or convert the buffer"
        )};
    }
}

JOINABLE_DEFINITION void check_memory(ConstBuffer buffer) {
    if (buffer.data == nullptr && buffer.count != 0) {
        throw ContractViolation{
            concat("a collective was given a null pointer for ", buffer.count, " elements")
        };
    }
    if (buffer.count > static_cast<std::size_t>(PTRDIFF_MAX) / size_of(buffer.dtype)) {
        throw ContractViolation{concat(
            "a collective was given ",
            buffer.count,
            " elements of ",
            name_of(buffer.dtype),
            ", more than any memory has: did a size below 0 wrap around?"
        )};
    }
}

JOINABLE_DEFINITION void check_rank(std::string_view what, int rank, int size) {
    if (rank < 0 || rank >= size) {
        throw ContractViolation{
            concat(what, " ", rank, " is no rank of a communicator of ", size, " ranks")
        };
    }
}

JOINABLE_DEFINITION void check_color(int color) {
    if (color < 0) {
        throw ContractViolation{concat("split needs a color of at least 0, but was given ", color)};
    }
}

JOINABLE_DEFINITION void check_same_dtype(ConstBuffer a, ConstBuffer b) {
    if (a.dtype != b.dtype) {
        throw ContractViolation{concat(
            "a collective needs two buffers of one dtype, but got ",
            name_of(a.dtype),
            " and ",
            name_of(b.dtype)
        )};
    }
}

JOINABLE_DEFINITION void
check_count(std::string_view what, std::size_t expected, std::size_t given) {
    if (expected != given) {
        throw ContractViolation{
            concat(what, " of a collective must have ", expected, " elements here, but has ", given)
        };
    }
}

JOINABLE_DEFINITION bool overlap(ConstBuffer a, ConstBuffer b) noexcept {
    std::less<> const before; // defined for pointers into different objects, too
    auto const* const first = static_cast<std::byte const*>(a.data);
    auto const* const second = static_cast<std::byte const*>(b.data);
    return a.count != 0 && b.count != 0 && before(first, second + b.bytes()) &&
           before(second, first + a.bytes());
}

JOINABLE_DEFINITION void check_place(ConstBuffer part, ConstBuffer whole, std::size_t own) {
    if (overlap(part, whole) &&
        static_cast<std::byte const*>(part.data) !=
            static_cast<std::byte const*>(whole.data) + own * size_of(whole.dtype)) {
        throw ContractViolation{
            "the input and the output of a collective overlap: they must lie apart, or the smaller "
            "one must be this rank's part of the other"
        };
    }
}

JOINABLE_DEFINITION void check_parts(ConstBuffer in, ConstBuffer out, int size) {
    check_memory(in);
    check_memory(out);
    if (in.dtype != out.dtype || in.count != out.count ||
        in.count % static_cast<std::size_t>(size) != 0) {
        throw ContractViolation{concat(
            "an all_to_all over ",
            size,
            " ranks without counts needs two buffers of one dtype and count, a multiple of ",
            size,
            ", but got ",
            in.count,
            " of ",
            name_of(in.dtype),
            " and ",
            out.count,
            " of ",
            name_of(out.dtype)
        )};
    }
}

JOINABLE_DEFINITION void check_apart(ConstBuffer in, ConstBuffer out) {
    if (overlap(in, out)) {
        throw ContractViolation{"the input and the output of an all_to_all must not overlap"};
    }
}

JOINABLE_DEFINITION void check_share(ConstBuffer part, ConstBuffer whole, int size) {
    check_memory(part);
    check_memory(whole);
    auto const ranks = static_cast<std::size_t>(size); // a product could overflow
    if (part.dtype != whole.dtype || whole.count % ranks != 0 ||
        whole.count / ranks != part.count) {
        throw ContractViolation{concat(
            "a collective over ",
            size,
            " ranks needs one buffer of ",
            size,
            " times the elements of the other and the same dtype, but got ",
            part.count,
            " of ",
            name_of(part.dtype),
            " and ",
            whole.count,
            " of ",
            name_of(whole.dtype)
        )};
    }
}

JOINABLE_DEFINITION void check_counts(Counts counts, ConstBuffer whole, int size) {
    check_memory(whole);
    if (counts.size() != static_cast<std::size_t>(size)) {
        throw ContractViolation{concat(
            "a collective over ", size, " ranks needs ", size, " counts, but got ", counts.size()
        )};
    }
    std::size_t left = whole.count; // a sum could overflow
    for (std::size_t const count : counts) {
        if (count > left) {
            left = whole.count + 1;
            break;
        }
        left -= count;
    }
    if (left != 0) {
        throw ContractViolation{concat(
            "the counts of a collective must add up to the ",
            whole.count,
            " elements of the buffer that they divide, but they add up to ",
            left > whole.count ? "more" : "less"
        )};
    }
}

JOINABLE_DEFINITION void
check_counts(Counts counts, ConstBuffer part, ConstBuffer whole, int rank, int size) {
    check_memory(part);
    check_same_dtype(part, whole);
    check_counts(counts, whole, size);
    check_count("this rank's own part", counts[static_cast<std::size_t>(rank)], part.count);
}

JOINABLE_DEFINITION void
check_same_size(std::span<std::uint64_t const> sizes, bool is_renumbered, std::string_view doing) {
    std::vector<int> ranks;
    std::string text =
        concat("ranks ", doing, " of different sizes: rank 0 of ", sizes[0], " bytes");
    for (std::size_t rank = 1; rank < sizes.size(); ++rank) {
        if (sizes[rank] != sizes[0]) {
            ranks.push_back(static_cast<int>(rank));
            text += concat(", rank ", rank, " of ", sizes[rank]);
        }
    }
    if (!ranks.empty()) {
        text += "; give the same count of the same elements on every rank";
        throw Mismatch{ranks, text, is_renumbered};
    }
}

}}} // namespace joinable::v0::detail
