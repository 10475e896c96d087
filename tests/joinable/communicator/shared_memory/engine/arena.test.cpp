// SPDX-License-Identifier: BSL-1.0
// Memory from which ranks read and write each other's buffers where they are.
#include <joinable/device/arena.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <support/process_ranks.hpp>
#include <support/repeating.hpp>
#include <support/segment_ranks.hpp>
#include <support/shared.hpp>
#include <support/volume.hpp>

#include <joinable/communicator/make_arena.hpp>
#include <joinable/communicator/pieces.hpp>
#include <joinable/communicator/self.hpp>
#include <joinable/communicator/shared_memory/board/board.hpp>
#include <joinable/communicator/shared_memory/engine/lent_memory.hpp>
#include <joinable/communicator/shared_memory/run_threads.hpp>

namespace {

using namespace joinable_tests;
using joinable::Arena;
using joinable::Buffer;
using joinable::ConstBuffer;
using joinable::ContractViolation;
using joinable::DType;
using joinable::ProcessCommunicator;
using joinable::ReduceOp;
using joinable::detail::Board;
using joinable::detail::BufferPiece;
using joinable::detail::BufferPieces;
using joinable::detail::StagedMemory;

static_assert(joinable::AllocatesArena<ProcessCommunicator>);
static_assert(!joinable::AllocatesArena<joinable::ThreadCommunicator>); // the heap is shared
static_assert(!joinable::AllocatesArena<joinable::SelfCommunicator>);

bool is_zero(Arena const& arena) {
    return std::all_of(arena.data(), arena.data() + arena.bytes(), [](std::byte byte) {
        return byte == std::byte{};
    });
}
bool is_aligned(Arena const& arena, std::size_t alignment) {
    return reinterpret_cast<std::uintptr_t>(arena.data()) % alignment == 0;
}

TEST_CASE("an arena from the heap is zeroed and aligned") {
    for (std::size_t const alignment : {1U, 64U, 4096U, 1U << 21U}) {
        Arena const arena{1000, alignment};
        CHECK(arena.bytes() == 1000);
        CHECK(is_aligned(arena, alignment));
        CHECK(is_zero(arena));
    }
    CHECK(is_aligned(Arena{1}, 64));
    CHECK(Arena{0}.data() == nullptr);
    CHECK_THROWS_WITH_AS(
        (Arena{8, 24}),
        "memory is aligned to a power of two in bytes, but was asked for 24",
        ContractViolation
    );
    CHECK_THROWS_AS((Arena{8, 0}), ContractViolation);
    CHECK_THROWS_AS(Arena{static_cast<std::size_t>(-1)}, std::bad_alloc);
}

TEST_CASE("arenas of ranks begin as far apart in a page as their number allows, but where another "
          "alignment is asked for") {
    auto const begin_in_page = [](Arena const& arena) {
        return static_cast<std::size_t>(reinterpret_cast<std::uintptr_t>(arena.data()) % 4096);
    };
    for (int const size : {1, 2, 3, 4, 8, 63, 64, 65, 256}) {
        CAPTURE(size);
        std::set<std::size_t> begins;
        for (int rank = 0; rank < size; ++rank) {
            std::size_t const offset = joinable::detail::page_offset_of(rank, size);
            CHECK(offset < 4096);
            CHECK(offset % Arena::default_alignment == 0);
            begins.insert(offset);
            Arena const arena{100, Arena::default_alignment, offset};
            CHECK(begin_in_page(arena) == offset);
            CHECK(is_zero(arena));
        }
        REQUIRE(begins.size() == static_cast<std::size_t>(std::min(size, 64)));
        std::size_t closest = 4096 - *begins.rbegin(); // to the next page's first
        for (auto begin = std::next(begins.begin()); begin != begins.end(); ++begin) {
            closest = std::min(closest, *begin - *std::prev(begin));
        }
        CHECK(closest == 64 * std::max(64 / size, 1));
    }
    for (int const size : {1, 2, 3, 4, 8}) {
        std::array<std::size_t, 8> of_threads{};
        joinable::run_threads(size, [&](joinable::ThreadCommunicator& comm) {
            of_threads.at(static_cast<std::size_t>(comm.rank())) =
                begin_in_page(joinable::make_arena(comm, 100));
        });
        Shared<std::array<std::size_t, 8>> of_processes;
        run_process_ranks({size}, [&](ProcessCommunicator& comm) {
            of_processes->at(static_cast<std::size_t>(comm.rank())) =
                begin_in_page(joinable::make_arena(comm, 100));
            CHECK(is_aligned(joinable::make_arena(comm, 100, 4096), 4096));
        });
        for (int rank = 0; rank < size; ++rank) {
            auto const place = static_cast<std::size_t>(rank);
            std::size_t const apart = 64 * (64U / static_cast<std::size_t>(size));
            CHECK(of_threads.at(place) == place * apart);
            CHECK((of_processes->at(place) - of_processes->at(0)) % 4096 == place * apart);
        }
    }
}

TEST_CASE("an arena is released once, by its last owner") {
    int releases = 0;
    std::array<std::byte, 8> memory{};
    auto const release = [](void* context, std::byte*, std::size_t bytes) noexcept {
        *static_cast<int*>(context) += static_cast<int>(bytes);
    };
    {
        Arena a{memory.data(), 8, release, &releases};
        Arena b{std::move(a)};
        CHECK(a.data() == nullptr); // NOLINT(bugprone-use-after-move): that is the question
        Arena c{16};
        c = std::move(b);
        CHECK(c.data() == memory.data());
        CHECK(releases == 0);
        c = Arena{};
        CHECK(releases == 8);
    }
    CHECK(releases == 8);
}

// ---- where arenas lie ---------------------------------------------------------------------------

/// 1 MiB of shared memory, as one rank has it.
struct RankMemory {
    static constexpr std::size_t bytes = std::size_t{1} << 20U;
    Arena arena{bytes};
    StagedMemory memory{{arena.data(), bytes}};

    [[nodiscard]] std::size_t place_of(Arena const& other) const {
        return static_cast<std::size_t>(other.data() - arena.data());
    }
    [[nodiscard]] bool is_shared(Arena const& other) const { return place_of(other) < bytes; }
};

TEST_CASE("arenas lie apart in the upper half, and what is freed is used again, zeroed") {
    RankMemory rank;
    std::size_t const half = RankMemory::bytes / 2;
    std::vector<Arena> arenas;
    for (std::size_t const bytes : {100U, 1U, 4000U, 64U}) {
        arenas.push_back(rank.memory.allocate(bytes, 64));
        std::memset(arenas.back().data(), 0xff, bytes);
    }
    std::array<std::size_t, 4> const places{half, half + 128, half + 192, half + 4224};
    for (std::size_t i = 0; i < 4; ++i) {
        CHECK(rank.place_of(arenas[i]) == places[i]);
    }
    arenas[1] = Arena{};
    arenas[2] = Arena{}; // one gap of both, from 128 on
    Arena const again = rank.memory.allocate(4090, 64);
    CHECK(rank.place_of(again) == places[1]);
    CHECK(is_zero(again));
    CHECK(rank.place_of(rank.memory.allocate(1, 1)) == half + 100); // what alignment had left
    CHECK(is_aligned(rank.memory.allocate(64, 4096), 4096));
    CHECK(rank.memory.allocate(0, 64).data() == nullptr);
    CHECK_THROWS_AS((void)rank.memory.allocate(8, 3), ContractViolation);
}

TEST_CASE("an arena for which there is no room is from the heap") {
    RankMemory rank;
    Arena const all = rank.memory.allocate(RankMemory::bytes / 2, 64);
    CHECK(rank.is_shared(all));
    Arena const more = rank.memory.allocate(64, 64);
    CHECK(!rank.is_shared(more));
    CHECK(is_zero(more));

    RankMemory busy; // a copy in flight reaches into the upper half
    std::vector<std::byte> large(RankMemory::bytes);
    Buffer const buffer{large.data(), large.size(), DType::u8};
    CHECK(busy.memory.lend(0, buffer, buffer));
    CHECK(!busy.is_shared(busy.memory.allocate(64, 64)));
    busy.memory.give_back(0);
    CHECK(busy.is_shared(busy.memory.allocate(64, 64)));
    CHECK_THROWS_AS((void)busy.memory.lend(1, buffer, buffer), ContractViolation); // half is left
}

TEST_CASE("an arena may outlive what it came from") {
    Arena const memory{4096};
    std::optional<StagedMemory> staged{std::span{memory.data(), 4096}};
    Arena first = staged->allocate(100, 64);
    Arena const second = staged->allocate(100, 64);
    staged.reset();
    std::memset(second.data(), 1, 100);
    first = Arena{};
    std::memset(second.data(), 2, 100);
}

TEST_CASE("what lies in an arena is lent as it is, anything else as a copy") {
    RankMemory rank;
    Arena const arena = rank.memory.allocate(256, 64);
    auto* const inside = reinterpret_cast<float*>(arena.data());
    std::vector<float> own(64, 1.0F);
    std::byte const* const copies = rank.arena.data();
    Buffer const in_arena{inside, 32, DType::f32};
    Buffer const also_in_arena{inside + 32, 32, DType::f32};
    Buffer const outside{own.data(), 32, DType::f32};
    auto const lent = [&](ConstBuffer in, Buffer out) {
        CHECK(rank.memory.lend(3, in, out));
        return rank.memory.lent(3, in, out);
    };

    auto at = lent(in_arena, in_arena);
    CHECK(at.in == inside);
    CHECK(at.out == inside);
    rank.memory.give_back(3);
    at = lent(in_arena, also_in_arena);
    CHECK(at.in == inside);
    CHECK(at.out == inside + 32);
    rank.memory.give_back(3);
    CHECK(*copies == std::byte{}); // nothing was ever copied

    at = lent(outside, in_arena);
    CHECK(at.in == copies);
    CHECK(at.out == inside);
    CHECK(std::memcmp(copies, own.data(), 128) == 0);
    rank.memory.give_back(3);

    at = lent(in_arena, outside);
    CHECK(at.in == inside);
    CHECK(at.out == copies);
    float const two = 2.0F;
    std::memcpy(at.out, &two, sizeof(two));
    rank.memory.give_back(3);
    CHECK(own.front() == two);

    // Partly in the memory of arenas: the last byte but one of it, and one behind.
    Arena const rest = rank.memory.allocate(RankMemory::bytes / 2 - 256, 64);
    CHECK(rank.is_shared(rest));
    CHECK(lent(ConstBuffer{rest.data() + rest.bytes() - 2, 2, DType::u8}, {}).in != copies);
    rank.memory.give_back(3);
    Arena const no_arena{64};
    std::vector<std::byte> straddling(3, std::byte{7});
    StagedMemory other{{rank.arena.data(), RankMemory::bytes - 64}};
    Arena const its = other.allocate(64, 64);
    std::byte* const end = rank.arena.data() + RankMemory::bytes - 64;
    std::memcpy(end - 2, straddling.data(), 3);
    ConstBuffer const partly{end - 2, 3, DType::u8};
    CHECK(other.lend(0, partly, {}));
    CHECK(other.lent(0, partly, {}).in == copies);
    CHECK(std::memcmp(copies, straddling.data(), 3) == 0);
}

TEST_CASE(
    "arenas in which pieces lie are never given out again where a rank may still write to them"
) {
    RankMemory rank;
    Arena const board_memory{Board::bytes_for(1)};
    Board& board = Board::create(1, {board_memory.data(), board_memory.bytes()});
    std::array<Arena, 3> arenas; // of which pieces lie in the last two
    std::array<BufferPiece, 2> pieces;
    for (std::size_t k = 0; k < 3; ++k) {
        arenas[k] = rank.memory.allocate(4096, 64);
        if (k != 0) {
            pieces[k - 1] = BufferPiece::of(arenas[k].data() + 64, k * 64);
        }
    }
    BufferPieces const list{pieces.data(), 2, DType::f32};
    CHECK(rank.memory.lend_pieces(5, list));
    auto* const lent = static_cast<BufferPiece*>(rank.memory.lent(5, list).out);
    for (std::size_t k = 0; k < 2; ++k) { // as the endpoint does
        CHECK(lent[k].data() == pieces[k].data());
        lent[k].at = board.place_of(lent[k].data());
    }
    rank.memory.keep(5, board);
    rank.memory.give_back(5);
    std::size_t const first = rank.place_of(arenas[0]);
    arenas = {};
    Arena const again = rank.memory.allocate(4096, 64);
    Arena const behind = rank.memory.allocate(4096, 64);
    CHECK(rank.place_of(again) == first);
    CHECK(rank.place_of(behind) == first + std::size_t{3} * 4096);
}

// ---- collectives --------------------------------------------------------------------------------

enum class Place { own, arena };
struct Placement {
    Place in;
    Place out;
};
constexpr std::array<Placement, 4> placements{{
    {Place::own, Place::own},
    {Place::arena, Place::arena},
    {Place::own, Place::arena},
    {Place::arena, Place::own},
}};

/// Numbers of a rank: sums of them depend on their order.
template <class Comm>
Arena numbers(Comm& comm, Place place, std::size_t count) {
    std::size_t const bytes = count * sizeof(float);
    Arena arena = place == Place::arena ? joinable::make_arena(comm, bytes) : Arena{bytes};
    auto* const data = reinterpret_cast<float*>(arena.data());
    auto const values = repeating<float>(997, count, [&](std::size_t i) {
        auto const mixed = static_cast<std::uint32_t>(
            (i + 1) * 2654435761U * static_cast<std::size_t>(comm.rank() + 1)
        );
        return 1.0F + static_cast<float>(mixed % 1'000'003U) / 3.0F;
    });
    std::copy(values.begin(), values.end(), data);
    return arena;
}

/// What every collective leaves in its buffers on this rank, one after another.
template <class Comm>
std::vector<float> results_of_all(Comm& comm, std::size_t count, Placement place) {
    auto const world = static_cast<std::size_t>(comm.size());
    int const root = comm.size() - 1;
    std::vector<float> results;
    auto const run = [&](std::size_t in_count, std::size_t out_count, auto const& start) {
        Arena const in = numbers(comm, place.in, in_count);
        Arena const out = numbers(comm, place.out, out_count);
        start(
            ConstBuffer{in.data(), in_count, DType::f32}, Buffer{out.data(), out_count, DType::f32}
        )
            .wait();
        auto const* const values = reinterpret_cast<float const*>(out.data());
        results.insert(results.end(), values, values + out_count);
    };
    run(0, count, [&](auto, auto out) { return comm.all_reduce(out, ReduceOp::sum); });
    run(0, count, [&](auto, auto out) { return comm.reduce(out, ReduceOp::sum, root); });
    run(0, count, [&](auto, auto out) { return comm.broadcast(out, root); });
    run(count, count * world, [&](auto in, auto out) { return comm.all_gather(in, out); });
    run(count * world, count, [&](auto in, auto out) {
        return comm.reduce_scatter(in, out, ReduceOp::sum);
    });
    run(count, count * world, [&](auto in, auto out) { return comm.gather(in, out, root); });
    run(count * world, count, [&](auto in, auto out) { return comm.scatter(in, out, root); });
    run(count * world, count * world, [&](auto in, auto out) { return comm.all_to_all(in, out); });
    // The input is this rank's part of the output, then the output that of the input.
    run(0, count * world, [&](auto, auto out) {
        auto* const mine = static_cast<float*>(out.data) + static_cast<int>(count) * comm.rank();
        return comm.all_gather({mine, count, DType::f32}, out);
    });
    run(0, count * world, [&](auto, auto out) {
        auto* const mine = static_cast<float*>(out.data) + static_cast<int>(count) * comm.rank();
        return comm.reduce_scatter(out, {mine, count, DType::f32}, ReduceOp::sum);
    });
    return results;
}

TEST_CASE("collectives are the same bit for bit over threads and processes, in arenas and not") {
    for (std::size_t k = 0; std::size_t const count : {5U, 3000U, 70'001U}) {
        ++k;
        for (int const world : {1, 2, 3, 4, 8}) {
            if (joinable_tests::is_left_out(k, 3, world)) {
                continue;
            }
            std::vector<std::vector<float>> of_threads(static_cast<std::size_t>(world));
            run_ranks({world}, [&](joinable::ThreadCommunicator& comm) {
                of_threads[static_cast<std::size_t>(comm.rank())] =
                    results_of_all(comm, count, placements[0]);
            });
            run_process_ranks({world}, [&](ProcessCommunicator& comm) {
                for (Placement const place : placements) {
                    CHECK(
                        results_of_all(comm, count, place) ==
                        of_threads[static_cast<std::size_t>(comm.rank())]
                    );
                }
            });
        }
    }
}

TEST_CASE("a collective on arenas copies nothing, one on other memory does") {
    for (int const world : {1, 2, 3, 4, 8}) {
        for (Placement const place : placements) {
            SegmentRanks ranks{world};
            ranks.run([&](ProcessCommunicator& comm) { results_of_all(comm, 20'000, place); });
            bool const copies = place.in == Place::own || place.out == Place::own;
            for (int rank = 0; rank < world; ++rank) {
                CHECK((ranks.copied(rank) == 0) == !copies);
            }
        }
    }
}

TEST_CASE("threads with a communicator each make and destroy arenas in the memory that a rank has"
) {
    constexpr unsigned rounds = 3000;
    auto const use = [](ProcessCommunicator& comm, unsigned first_mark, std::atomic<int>& wrong) {
        std::array<Arena, 4> arenas;
        std::vector<double> own(3000, 1.0); // too large to go without a copy
        for (unsigned round = 0; round < rounds; ++round) {
            Arena& arena = arenas.at(round % arenas.size());
            std::byte const mark{static_cast<unsigned char>(first_mark + round % arenas.size())};
            bool const is_whole =
                std::all_of(arena.data(), arena.data() + arena.bytes(), [&](std::byte byte) {
                    return byte == mark;
                });
            arena = Arena{};
            arena = joinable::make_arena(comm, 64 + 40 * (round % 7));
            wrong += is_whole && is_zero(arena) ? 0 : 1;
            std::memset(arena.data(), static_cast<int>(mark), arena.bytes());
            if (round % 50 == 0) {
                comm.all_reduce({own.data(), own.size(), DType::f64}, ReduceOp::max).wait();
            }
        }
    };
    run_process_ranks({1, 2}, [&](ProcessCommunicator& comm) {
        ProcessCommunicator other = comm.split(0, comm.rank());
        std::atomic<int> wrong{0};
        {
            std::jthread const second{[&] { use(other, 101, wrong); }};
            use(comm, 1, wrong);
        }
        CHECK(wrong == 0);
    });
}

TEST_CASE("arenas of ranks that fail are no trouble to the others") {
    CHECK_THROWS_WITH_AS(
        run_process_ranks(
            {3},
            [](ProcessCommunicator& comm) {
                for (int round = 0;; ++round) {
                    Arena const arena = numbers(comm, Place::arena, 50'000);
                    if (round == 20 && comm.rank() == 1) {
                        throw ContractViolation{"enough"};
                    }
                    comm.all_reduce({arena.data(), 50'000, DType::f32}, ReduceOp::max).wait();
                }
            }
        ),
        "rank 1 failed: enough",
        joinable::PeerFailed
    );
}

} // namespace
