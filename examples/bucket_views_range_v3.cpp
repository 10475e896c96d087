// SPDX-License-Identifier: BSL-1.0
// Prints how the gradients of a model are cut into buckets, as a table made by range-v3 pipelines.
// Then prints how many buckets other caps would give, without allocating memory for them, and which
// inputs each rank gets and which ranks are active in each round.
#include <joinable/interop/range_v3.hpp>
#include <joinable/join.hpp>

#include <cstddef>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <range/v3/numeric/accumulate.hpp>
#include <range/v3/range/conversion.hpp>
#include <range/v3/range/primitives.hpp>
#include <range/v3/view/filter.hpp>
#include <range/v3/view/iota.hpp>
#include <range/v3/view/join.hpp>
#include <range/v3/view/reverse.hpp>
#include <range/v3/view/transform.hpp>
#include <range/v3/view/zip_with.hpp>

namespace rv = ranges::views;

template <class T>
struct Weight {
    std::string name;
    std::vector<T> value;
    std::vector<T> grad;

    Weight(std::string called, std::size_t elements)
        : name{std::move(called)}, value(elements), grad(elements) {}
};

/// A block of a transformer: matrices of 16-bit numbers, normalisation scales of 32-bit numbers.
struct Block {
    std::vector<Weight<joinable::BFloat16>> matrices;
    std::vector<Weight<float>> scales;

    Block(std::string const& name, std::size_t width) {
        for (char const* part : {".attention", ".up", ".down"}) {
            matrices.emplace_back(name + part, 4 * width * width);
        }
        scales.emplace_back(name + ".norm", width);
    }
};

/// A row of the table.
struct Row {
    std::size_t bucket;
    std::string_view dtype;
    std::size_t elements;
    std::size_t bytes;
    std::size_t padding; ///< bytes before the next bucket can start
    std::string parameters;
};

int main() {
    constexpr std::size_t width = 60;
    std::vector<Weight<joinable::BFloat16>> ends{{"embedding", 256 * width}, {"head", 256 * width}};
    Block first{"0", width};
    Block second{"1", width};
    joinable::ParameterList const parameters = joinable::parameters(
        std::vector{&ends[0]},
        first.matrices,
        first.scales,
        second.matrices,
        second.scales,
        std::vector{&ends[1]}
    );
    auto const name_of = [&](std::size_t parameter) {
        return std::string{parameters[parameter].name()};
    };

    constexpr std::size_t kib = 1024;
    joinable::BucketLayout const layout = joinable::make_bucket_layout(
        parameters, {.bucket_cap_bytes = 64 * kib, .first_bucket_bytes = 16 * kib}
    );
    auto const row_of = [&](std::size_t number, joinable::Bucket const& bucket) {
        constexpr std::size_t line = joinable::bucket_alignment;
        std::size_t const bytes = bucket.buffer.bytes();
        return Row{
            .bucket = number,
            .dtype = joinable::name_of(bucket.buffer.dtype),
            .elements = bucket.buffer.count,
            .bytes = bytes,
            .padding = (line - bytes % line) % line,
            .parameters = bucket.parameters | rv::transform(name_of) | rv::join(' ') |
                          ranges::to<std::string>
        };
    };
    auto const rows =
        rv::zip_with(row_of, rv::iota(std::size_t{0}), layout.buckets()) | ranges::to<std::vector>;
    std::printf("bucket  dtype  elements   bytes  padding  parameters\n");
    for (Row const& row : rows) {
        std::printf(
            "%6zu  %5s  %8zu  %6zu  %7zu  %s\n",
            row.bucket,
            row.dtype.data(),
            row.elements,
            row.bytes,
            row.padding,
            row.parameters.c_str()
        );
    }
    std::printf(
        "together         %6zu  %7zu  in %zu bytes of memory\n\n",
        ranges::accumulate(rows | rv::transform(&Row::bytes), std::size_t{0}),
        ranges::accumulate(rows | rv::transform(&Row::padding), std::size_t{0}),
        layout.bytes()
    );

    auto const is_inside = [](joinable::BucketSlot const& slot) { return slot.offset != 0; };
    for (auto const& slot : joinable::views::bucket_slots(layout) | rv::filter(is_inside)) {
        std::printf(
            "%s begins at element %zu of bucket %zu\n",
            name_of(slot.parameter).c_str(),
            slot.offset,
            slot.bucket
        );
    }

    std::printf("\n");
    for (std::size_t const cap : {16 * kib, 64 * kib, 256 * kib}) {
        auto const buckets = parameters | rv::reverse | joinable::views::bucketed({cap});
        std::printf("%3zu KiB per bucket: %zd buckets\n", cap / kib, ranges::distance(buckets));
    }

    std::printf("\n");
    std::string const inputs = "abcdefg";
    constexpr int world = 3;
    std::vector<std::size_t> lengths;
    for (int const rank : rv::iota(0, world)) {
        auto const block = inputs | joinable::views::contiguous_shard(rank, world);
        auto const dealt = inputs | joinable::views::strided_shard(rank, world);
        lengths.push_back(static_cast<std::size_t>(ranges::distance(block)));
        std::printf(
            "rank %d has %s in blocks, and %s one by one\n",
            rank,
            (block | ranges::to<std::string>).c_str(),
            (dealt | ranges::to<std::string>).c_str()
        );
    }
    std::printf("ranks in each round:");
    for (auto&& active : joinable::views::rounds(lengths)) {
        std::printf(" %zd", ranges::distance(active));
    }
    auto last = joinable::views::active_ranks(lengths, 2);
    std::printf("; rank %d is the last\n", *last.begin());
}

// Output:
// bucket  dtype  elements   bytes  padding  parameters
//      0   bf16     15360   30720        0  head
//      1   bf16     43200   86400        0  1.down 1.up 1.attention
//      2   bf16     43200   86400        0  0.down 0.up 0.attention
//      3   bf16     15360   30720        0  embedding
//      4    f32       120     480       32  1.norm 0.norm
// together         234720       32  in 235360 bytes of memory
//
// 1.up begins at element 14400 of bucket 1
// 1.attention begins at element 28800 of bucket 1
// 0.up begins at element 14400 of bucket 2
// 0.attention begins at element 28800 of bucket 2
// 0.norm begins at element 60 of bucket 4
//
//  16 KiB per bucket: 9 buckets
//  64 KiB per bucket: 4 buckets
// 256 KiB per bucket: 2 buckets
//
// rank 0 has abc in blocks, and adg one by one
// rank 1 has de in blocks, and be one by one
// rank 2 has fg in blocks, and cf one by one
// ranks in each round: 3 3 1; rank 0 is the last
