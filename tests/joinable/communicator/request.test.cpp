// SPDX-License-Identifier: BSL-1.0
#include <joinable/communicator/detail/request.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <joinable/communicator/detail/collective_members.hpp>
#include <joinable/communicator/detail/comparison.hpp>
#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/error.hpp>

namespace {

using joinable::Buffer;
using joinable::ConstBuffer;
using joinable::DType;
using joinable::ReduceOp;
using joinable::detail::Collective;
using joinable::detail::Counts;
using joinable::detail::Descriptor;
using joinable::detail::PartSizes;
using joinable::detail::Request;
using joinable::detail::RequestsOf;

constexpr int ranks = 3;
using Sizes = std::array<std::size_t, ranks>;
constexpr Sizes none{};

Sizes sizes_of(PartSizes const& parts) {
    Sizes sizes{};
    parts.copy_to(std::span<std::size_t>{sizes});
    for (int rank = 0; rank < ranks; ++rank) {
        CHECK(parts[rank] == sizes[static_cast<std::size_t>(rank)]);
    }
    return sizes;
}

/// Memory for the largest buffers of these tests, and no part of one is a part of the other.
struct Buffers {
    std::array<std::int32_t, 12> input{};
    std::array<std::int32_t, 12> output{};

    [[nodiscard]] ConstBuffer in(std::size_t count) const {
        return {input.data(), count, DType::i32};
    }
    [[nodiscard]] Buffer out(std::size_t count) { return {output.data(), count, DType::i32}; }
};

bool is_empty(ConstBuffer buffer) {
    return buffer.data == nullptr && buffer.count == 0;
}

TEST_CASE("sizes of parts are a table, one for all ranks, or one for one rank") {
    Sizes const table{4, 0, 7};
    CHECK(sizes_of(PartSizes::of(table)) == table);
    CHECK(sizes_of(PartSizes::equal(5)) == Sizes{5, 5, 5});
    CHECK(sizes_of(PartSizes::only(1, 5)) == Sizes{0, 5, 0});
    CHECK(sizes_of({}) == none);
}

TEST_CASE("a request in place has one buffer, of which the root's is the only one that counts") {
    Buffers buffers;
    Buffer const buffer = buffers.out(5);
    for (int rank = 0; rank < ranks; ++rank) {
        RequestsOf const requests{rank, ranks};
        bool const is_root = rank == 1;
        Request const sum = requests.all_reduce(buffer, ReduceOp::max);
        CHECK(sum.signature == Descriptor{Collective::all_reduce, DType::i32, ReduceOp::max, 0, 5});
        CHECK(sum.in.data == buffer.data);
        CHECK(sum.out.data == buffer.data);
        Request const to_root = requests.reduce(buffer, ReduceOp::min, 1);
        CHECK(to_root.signature == Descriptor{Collective::reduce, DType::i32, ReduceOp::min, 1, 5});
        CHECK(to_root.in.data == buffer.data);
        CHECK(is_empty(to_root.out) == !is_root);
        Request const from_root = requests.broadcast(buffer, 1);
        CHECK(
            from_root.signature ==
            Descriptor{Collective::broadcast, DType::i32, ReduceOp::sum, 1, 5}
        );
        CHECK(is_empty(from_root.in) == !is_root);
        CHECK(from_root.out.data == buffer.data);
        CHECK(requests.barrier().signature == Descriptor{});
    }
}

TEST_CASE(
    "a count whose bytes no memory has is refused, also where a product would wrap to the right"
) {
    char memory = 0;
    for (auto const dtype : {DType::u8, DType::bf16, DType::i32, DType::f64}) {
        std::size_t const most = static_cast<std::size_t>(PTRDIFF_MAX) / joinable::size_of(dtype);
        RequestsOf const one{0, 1};
        CHECK_NOTHROW((void)one.all_reduce({&memory, most, dtype}, ReduceOp::max));
        for (std::size_t const count : {most + 1, ~std::size_t{0}}) {
            CHECK_THROWS_AS(
                (void)one.all_reduce({&memory, count, dtype}, ReduceOp::max),
                joinable::ContractViolation
            );
        }
    }
    std::size_t const half = std::size_t{1} << 63U; // twice that is 0
    RequestsOf const two{0, 2};
    CHECK_THROWS_AS(
        (void)two.all_gather({&memory, half, DType::u8}, {&memory, 0, DType::u8}),
        joinable::ContractViolation
    );
    std::size_t const quarter = std::size_t{1} << 62U; // four times that is 0
    RequestsOf const four{0, 4};
    CHECK_THROWS_AS(
        (void)four.all_gather({&memory, quarter, DType::u8}, {&memory, 0, DType::u8}),
        joinable::ContractViolation
    );
}

TEST_CASE("a request for a scaled sum carries this rank's factor, which is not compared") {
    std::array<double, 2> values{};
    Buffer const buffer{values.data(), 2, DType::f64};
    Request const half = RequestsOf{0, ranks}.all_reduce(buffer, ReduceOp::sum, 0.5);
    CHECK(half.signature.factor == 0.5);
    CHECK(half.signature == RequestsOf{1, ranks}.all_reduce(buffer, ReduceOp::sum, 2.0).signature);
    CHECK(!(half.signature == RequestsOf{0, ranks}.all_reduce(buffer, ReduceOp::sum).signature));
    std::array<double, 6> inputs{};
    Buffer const in{inputs.data(), 6, DType::f64};
    Request const part = RequestsOf{0, ranks}.reduce_scatter(in, buffer, ReduceOp::sum, 0.5);
    CHECK(part.signature.collective == Collective::scaled_reduce_scatter);
    CHECK(part.signature.factor == 0.5);
    CHECK(sizes_of(part.sends) == Sizes{2, 2, 2});
}

TEST_CASE("equal parts are told by one size, and unequal ones by the caller's table") {
    Buffers buffers;
    Sizes const counts{2, 0, 3};
    Sizes const others{1, 2, 3};
    for (int rank = 0; rank < ranks; ++rank) {
        RequestsOf const requests{rank, ranks};
        std::size_t const own = counts[static_cast<std::size_t>(rank)];
        Sizes const same{own, own, own};

        Request request = requests.all_gather(buffers.in(4), buffers.out(12));
        CHECK(
            request.signature == Descriptor{Collective::all_gather, DType::i32, ReduceOp::sum, 0, 4}
        );
        CHECK(sizes_of(request.sends) == Sizes{4, 4, 4});
        CHECK(sizes_of(request.expects) == Sizes{4, 4, 4});
        request = requests.all_gather(buffers.in(own), buffers.out(5), counts);
        CHECK(request.signature.has_counts);
        CHECK(request.signature.count == 0);
        CHECK(sizes_of(request.sends) == same);
        CHECK(sizes_of(request.expects) == counts);

        request = requests.reduce_scatter(buffers.in(12), buffers.out(4), ReduceOp::product);
        CHECK(
            request.signature ==
            Descriptor{Collective::reduce_scatter, DType::i32, ReduceOp::product, 0, 4}
        );
        request = requests.reduce_scatter(buffers.in(5), buffers.out(own), ReduceOp::sum, counts);
        CHECK(request.signature.has_counts);
        CHECK(sizes_of(request.sends) == counts);
        CHECK(sizes_of(request.expects) == same);

        request = requests.all_to_all(buffers.in(12), buffers.out(12));
        CHECK(
            request.signature == Descriptor{Collective::all_to_all, DType::i32, ReduceOp::sum, 0, 4}
        );
        CHECK(sizes_of(request.sends) == Sizes{4, 4, 4});
        request = requests.all_to_all(buffers.in(5), buffers.out(6), counts, others);
        CHECK(request.signature.has_counts);
        CHECK(sizes_of(request.sends) == counts);
        CHECK(sizes_of(request.expects) == others);
    }
}

TEST_CASE("only the root's whole buffer and only its table are looked at") {
    Buffers buffers;
    Sizes const counts{2, 0, 3};
    ConstBuffer const no_input{nullptr, 99, DType::f64};
    Buffer const no_output{nullptr, 99, DType::f64};
    for (int rank = 0; rank < ranks; ++rank) {
        RequestsOf const requests{rank, ranks};
        bool const is_root = rank == 2;
        std::size_t const own = counts[static_cast<std::size_t>(rank)];
        Counts const table = is_root ? Counts{counts} : Counts{};

        Request request = requests.gather(buffers.in(4), is_root ? buffers.out(12) : no_output, 2);
        CHECK(request.signature == Descriptor{Collective::gather, DType::i32, ReduceOp::sum, 2, 4});
        CHECK(is_empty(request.out) == !is_root);
        CHECK(sizes_of(request.sends) == Sizes{0, 0, 4});
        CHECK(sizes_of(request.expects) == (is_root ? Sizes{4, 4, 4} : none));
        request = requests.gather(buffers.in(own), is_root ? buffers.out(5) : no_output, 2, table);
        CHECK(request.signature.has_counts);
        CHECK(is_empty(request.out) == !is_root);
        CHECK(sizes_of(request.sends) == Sizes{0, 0, own});
        CHECK(sizes_of(request.expects) == (is_root ? counts : none));

        request = requests.scatter(is_root ? buffers.in(12) : no_input, buffers.out(4), 2);
        CHECK(
            request.signature == Descriptor{Collective::scatter, DType::i32, ReduceOp::sum, 2, 4}
        );
        CHECK(is_empty(request.in) == !is_root);
        CHECK(sizes_of(request.sends) == (is_root ? Sizes{4, 4, 4} : none));
        CHECK(sizes_of(request.expects) == Sizes{0, 0, 4});
        request = requests.scatter(is_root ? buffers.in(5) : no_input, buffers.out(own), 2, table);
        CHECK(request.signature.has_counts);
        CHECK(is_empty(request.in) == !is_root);
        CHECK(sizes_of(request.sends) == (is_root ? counts : none));
        CHECK(sizes_of(request.expects) == Sizes{0, 0, own});
    }
}

TEST_CASE("an empty table of counts is a table, and a wrong one") {
    Buffers buffers;
    CHECK_THROWS_WITH_AS(
        ((void)RequestsOf{0, 1}.all_gather(buffers.in(2), buffers.out(2), Counts{})),
        "a collective over 1 ranks needs 1 counts, but got 0",
        joinable::ContractViolation
    );
}

/// A transport of one rank, as another one is written: it keeps what it was asked for.
struct Posted {
    void wait() const {}
    [[nodiscard]] bool test() const { return true; }
};
class Recorder : public joinable::detail::Collectives<Recorder, Posted> {
public:
    [[nodiscard]] int rank() const { return 0; }
    [[nodiscard]] int size() const { return 1; }
    [[nodiscard]] std::vector<Collective> const& posted() const { return posted_; }

private:
    friend class joinable::detail::BasicCollectives<Recorder, Posted>;
    [[nodiscard]] Posted post(Request const& request) {
        posted_.push_back(request.signature.collective);
        return {};
    }

    std::vector<Collective> posted_;
};
/// And one that has no more than it needs.
class LeastRecorder : public joinable::detail::BasicCollectives<LeastRecorder, Posted> {
public:
    [[nodiscard]] int rank() const { return 0; }
    [[nodiscard]] int size() const { return 1; }
    [[nodiscard]] Posted post(Request const&) { return {}; }
};

static_assert(joinable::models_communicator<Recorder>());
static_assert(joinable::ScalesSums<Recorder> && joinable::ScalesScatteredSums<Recorder>);
static_assert(joinable::Reduces<Recorder>);
static_assert(joinable::AllGathers<Recorder>);
static_assert(joinable::ReduceScatters<Recorder>);
static_assert(joinable::Gathers<Recorder>);
static_assert(joinable::Scatters<Recorder>);
static_assert(joinable::AllToAlls<Recorder>);
static_assert(joinable::models_communicator<LeastRecorder>());
static_assert(!joinable::ScalesSums<LeastRecorder>);
static_assert(!joinable::Reduces<LeastRecorder>);
static_assert(!joinable::AllGathers<LeastRecorder>);
static_assert(!joinable::ReduceScatters<LeastRecorder>);
static_assert(!joinable::Gathers<LeastRecorder>);
static_assert(!joinable::Scatters<LeastRecorder>);
static_assert(!joinable::AllToAlls<LeastRecorder>);

TEST_CASE("a transport with one post() has all collectives, each with and without counts") {
    Recorder comm;
    std::array<float, 2> in{};
    std::array<float, 2> out{};
    ConstBuffer const input{in.data(), 2, DType::f32};
    Buffer const output{out.data(), 2, DType::f32};
    std::vector<std::size_t> const counts{2};
    (void)comm.all_reduce(output, ReduceOp::sum);
    (void)comm.all_reduce(output, ReduceOp::sum, 0.5);
    (void)comm.reduce(output, ReduceOp::sum, 0);
    (void)comm.broadcast(output, 0);
    comm.barrier();
    (void)comm.all_gather(input, output);
    (void)comm.all_gather(input, output, counts);
    (void)comm.reduce_scatter(input, output, ReduceOp::sum);
    (void)comm.reduce_scatter(input, output, ReduceOp::sum, counts);
    (void)comm.reduce_scatter(input, output, ReduceOp::sum, 0.5);
    (void)comm.reduce_scatter(input, output, ReduceOp::sum, 0.5, counts);
    (void)comm.gather(input, output, 0);
    (void)comm.gather(input, output, 0, counts);
    (void)comm.scatter(input, output, 0);
    (void)comm.scatter(input, output, 0, counts);
    (void)comm.all_to_all(input, output);
    (void)comm.all_to_all(input, output, counts, counts);
    CHECK_THROWS_AS((void)comm.broadcast(output, 1), joinable::ContractViolation);
    CHECK(
        comm.posted() ==
        std::vector{
            Collective::all_reduce,
            Collective::scaled_all_reduce,
            Collective::reduce,
            Collective::broadcast,
            Collective::barrier,
            Collective::all_gather,
            Collective::all_gather,
            Collective::reduce_scatter,
            Collective::reduce_scatter,
            Collective::scaled_reduce_scatter,
            Collective::scaled_reduce_scatter,
            Collective::gather,
            Collective::gather,
            Collective::scatter,
            Collective::scatter,
            Collective::all_to_all,
            Collective::all_to_all,
        }
    );
}

TEST_CASE("a difference of counts is blamed on both ranks in ascending order, or on one alone") {
    Descriptor const signature{Collective::all_to_all, DType::f32, ReduceOp::sum, 0, 0, true};
    auto const expected = [](int, int) { return 1; };
    auto const blamed = [&](int culprit, int other) {
        auto const sent = [=](int from, int to) { return from == culprit && to == other ? 2 : 1; };
        auto const reason =
            joinable::detail::find_difference_of_counts(ranks, signature, sent, expected);
        REQUIRE(reason);
        return reason->ranks;
    };
    CHECK(blamed(0, 2) == std::vector{0, 2});
    CHECK(blamed(2, 0) == std::vector{0, 2});
    CHECK(blamed(1, 1) == std::vector{1});
    CHECK(!joinable::detail::find_difference_of_counts(ranks, signature, expected, expected));
}

TEST_CASE("a descriptor is read from its word as it was written, with any root") {
    for (std::size_t dtype = 0; dtype < joinable::dtype_count; ++dtype) {
        for (int const root : {0, 1, joinable::detail::max_ranks - 1, 1'000'000}) {
            for (bool const has_counts : {false, true}) {
                Descriptor const signature{
                    Collective::scaled_all_reduce,
                    static_cast<DType>(dtype),
                    ReduceOp::bit_or,
                    root,
                    7,
                    has_counts
                };
                Descriptor const read = Descriptor::of_word(signature.word(), 7, has_counts);
                CHECK(read == signature);
                CHECK(read.count == 7);
                Descriptor const shared = Descriptor::of_words(signature.words());
                CHECK(shared == signature);
                CHECK(shared.count == 7);
                CHECK(shared.root == root);
            }
        }
    }
    Descriptor const widest{
        Collective::scaled_reduce_scatter,
        DType::u64,
        ReduceOp::bit_or,
        joinable::detail::max_ranks - 1
    };
    CHECK(widest.word() < std::uint64_t{1} << 24U);
}

TEST_CASE("ranks compare signatures of any count, with and without tables, and a split") {
    using joinable::detail::difference_of_signatures;
    std::vector<Descriptor> const all{
        {Collective::all_gather, DType::f32, ReduceOp::sum, 0, 7},
        {Collective::all_gather, DType::f32, ReduceOp::sum, 0, 0, true},
        {Collective::all_gather, DType::f32, ReduceOp::sum, 0, 7 + (std::size_t{1} << 62U)},
        {joinable::detail::split_collective},
    };
    auto const words_of = [](std::vector<Descriptor> const& signatures, std::size_t width) {
        std::vector<std::uint64_t> words;
        for (Descriptor const& signature : signatures) {
            words.insert(words.end(), {signature.words()[0], signature.words()[1]});
            words.resize(words.size() + width - 2, words.size()); // others follow
        }
        return words;
    };
    for (std::size_t const width : {std::size_t{2}, std::size_t{3}}) {
        for (Descriptor const& first : all) {
            CHECK_FALSE(difference_of_signatures(3, words_of({first, first, first}, width)));
            for (Descriptor const& other : all) {
                auto const reason =
                    difference_of_signatures(3, words_of({first, first, other}, width));
                REQUIRE(reason.has_value() == !(first == other));
                if (reason) {
                    CHECK(reason->ranks == std::vector{2});
                    CHECK(
                        reason->message == "ranks run different collectives: rank 0 " +
                                               first.text() + ", rank 2 " + other.text()
                    );
                }
            }
        }
    }
    CHECK(all.back().text() == "split");
}

/// The words that ranks compare, summed as they would be, and each rank's comparison with the sums.
void sum_words(std::vector<joinable::detail::Comparison>& comparisons) {
    std::vector<std::uint64_t> sums(comparisons.front().words().size());
    for (auto& one : comparisons) {
        auto const words = one.words();
        REQUIRE(words.size() == sums.size());
        std::transform(words.begin(), words.end(), sums.begin(), sums.begin(), std::plus<>{});
    }
    for (auto& one : comparisons) {
        std::copy(sums.begin(), sums.end(), one.words().begin());
    }
}

TEST_CASE("ranks compare tables of counts, which a collective keeps") {
    using Table = std::vector<std::size_t>;
    std::array<Table, 2> sent{Table{1, 2}, Table{3, 4}};
    std::array<Table, 2> expected{Table{1, 3}, Table{2, 4}};
    std::vector<joinable::detail::Comparison> comparisons(2);
    auto const difference = [&] {
        Descriptor const signature{Collective::all_to_all, DType::f32, ReduceOp::sum, 0, 0, true};
        for (int rank = 0; rank < 2; ++rank) {
            comparisons[static_cast<std::size_t>(rank)].begin(signature, rank, 2);
        }
        sum_words(comparisons);
        CHECK_FALSE(comparisons[0].difference());
        for (std::size_t rank = 0; rank < 2; ++rank) {
            PartSizes sends = PartSizes::of(sent[rank]);
            PartSizes expects = PartSizes::of(expected[rank]);
            joinable::detail::KeptTables kept;
            kept.keep(sends, expects, 2);
            Table const given = sent[rank];
            sent[rank].assign(2, 9); // the caller's may change
            CHECK(comparisons[rank].go_on(sends, expects));
            sent[rank] = given;
        }
        sum_words(comparisons);
        CHECK_FALSE(comparisons[0].go_on({}, {})); // there is nothing after tables
        CHECK(comparisons[0].difference().has_value() == comparisons[1].difference().has_value());
        return comparisons[1].difference();
    };
    CHECK_FALSE(difference());
    expected[1][0] = 5;
    auto const reason = difference();
    REQUIRE(reason);
    CHECK(reason->ranks == std::vector{0, 1});
    CHECK(
        reason->message ==
        "counts differ in all_to_all by counts of f32: rank 0 has 2 elements for "
        "rank 1, which expects 5"
    );
}

TEST_CASE("ranks that compare one collective after another find the ranks of each difference") {
    Descriptor const barrier{};
    Descriptor const other{Collective::all_gather, DType::f32, ReduceOp::sum, 0, 7};
    std::vector<joinable::detail::Comparison> comparisons(3);
    for (std::size_t const culprit : {1U, 2U, 3U}) { // 3: none
        for (std::size_t rank = 0; rank < 3; ++rank) {
            comparisons[rank].begin(rank == culprit ? other : barrier, static_cast<int>(rank), 3);
            CHECK_FALSE(comparisons[rank].is_over());
        }
        sum_words(comparisons);
        for (auto& one : comparisons) {
            auto const reason = one.difference();
            REQUIRE(reason.has_value() == (culprit < 3));
            CHECK((!reason || reason->ranks == std::vector{static_cast<int>(culprit)}));
            CHECK_FALSE(one.go_on({}, {})); // it has no counts
            one.end();
            CHECK(one.is_over());
        }
    }
}

TEST_CASE("the counts of a scatter and of a gather are known to all ranks, by rank") {
    for (Collective const collective : {Collective::scatter, Collective::gather}) {
        Descriptor const signature{collective, DType::f32, ReduceOp::sum, 1, 0, true};
        std::vector<std::size_t> const table{5, 0, 7};
        std::vector<joinable::detail::Comparison> comparisons(3);
        for (std::size_t rank = 0; rank < 3; ++rank) {
            comparisons[rank].begin(signature, static_cast<int>(rank), 3);
            auto const all = rank == 1 ? PartSizes::of(table) : PartSizes{};
            auto const own = PartSizes::only(1, table[rank]);
            bool const is_scatter = collective == Collective::scatter;
            CHECK(comparisons[rank].go_on(is_scatter ? all : own, is_scatter ? own : all));
        }
        sum_words(comparisons);
        for (auto const& one : comparisons) {
            CHECK_FALSE(one.difference());
            CHECK(one.known() == table);
        }
    }
}

} // namespace
