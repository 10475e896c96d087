// SPDX-License-Identifier: BSL-1.0
// What other ranks do between two looks of a rank that waits.
#include <joinable/communicator/shared_memory/engine/endpoint.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#include <unistd.h>

#include <doctest/doctest.h>
#include <support/before_each_look.hpp>
#include <support/board_group.hpp>
#include <support/seen_twice.hpp>

#include <joinable/communicator/shared_memory/board/board.hpp>
#include <joinable/communicator/shared_memory/board/tuning.hpp>

namespace {

using joinable::Buffer;
using joinable::DType;
using joinable::ReduceOp;
using joinable::detail::Board;
using joinable::detail::Collective;
using joinable_tests::BoardGroup;
using Rank = joinable::detail::Endpoint<BoardGroup>;

std::uint64_t post_sum(Rank& rank, std::int64_t* values, std::size_t count) {
    Buffer const buffer{values, count, DType::i64};
    return rank.post({{Collective::all_reduce, DType::i64, ReduceOp::sum, 0, count}, buffer, buffer}
    );
}

TEST_CASE(
    "a rank that completes a sum as the last one comes returns, though others then reuse its lines"
) {
    if (sysconf(_SC_PAGESIZE) > 4096) {
        std::puts("skipped: the lines of both ranks lie on one page");
        return;
    }
    constexpr std::size_t count = joinable::detail::tuning::slot_bytes / sizeof(std::int64_t) + 1;
    std::size_t const bytes = Board::bytes_for(3);
    int reused = 0;
    for (int comes_at = 1; comes_at <= 20; ++comes_at) {
        CAPTURE(comes_at);
        joinable_tests::SeenTwice const memory{bytes + 3 * count * sizeof(std::int64_t)};
        auto* const others = static_cast<std::byte*>(memory.addresses[0]);
        auto* const own = static_cast<std::byte*>(memory.addresses[1]);
        auto const values_of = [&](std::byte* at, std::size_t rank) {
            auto* const values = reinterpret_cast<std::int64_t*>(at + bytes) + rank * count;
            for (std::size_t i = 0; i < count; ++i) {
                values[i] = static_cast<std::int64_t>((rank + 1) * (i + 1));
            }
            return values;
        };
        Board& board = Board::create(3, {others, bytes});
        Rank first{BoardGroup{board}, 0};
        Rank waiting{BoardGroup{Board::at_address(own)}, 1};
        Rank last{BoardGroup{board}, 2};
        std::int64_t* const sums = values_of(own, 1);
        waiting.set_deadline(std::chrono::seconds{2}); // a rank that is right does not get there
        std::uint64_t const sum = post_sum(waiting, sums, count);
        REQUIRE(post_sum(first, values_of(others, 0), count) == sum);

        int looks = 0;
        std::vector<std::int64_t> ahead(2 * Board::max_in_flight);
        auto const others_go_on = [&] {
            if (++looks == comes_at) {
                static_cast<void>(post_sum(last, values_of(others, 2), count));
            }
            if (board.retired(1) == sum + 1 && board.retired(2) != sum + 1) {
                ++reused;
                for (Rank* const rank : {&first, &last}) {
                    rank->finish(sum);
                }
                for (std::uint64_t k = 0; k < Board::max_in_flight; ++k) {
                    static_cast<void>(post_sum(first, &ahead[k], 1));
                    static_cast<void>(post_sum(last, &ahead[Board::max_in_flight + k], 1));
                }
            }
        };
        {
            joinable_tests::BeforeEachLook const turns{
                &Board::at_address(own).line(0, sum),
                &Board::at_address(own).line(2, sum),
                others_go_on
            };
            waiting.finish(sum);
        }
        CHECK(waiting.is_done(sum));
        REQUIRE(!board.is_aborted());
        for (std::size_t i = 0; i < count; ++i) {
            REQUIRE(sums[i] == static_cast<std::int64_t>(6 * (i + 1)));
        }
    }
    CHECK(reused > 0);
}

} // namespace
