// SPDX-License-Identifier: BSL-1.0
// Messages and groups in memory that each rank sees at another address, and what happens when there
// is not enough of it.
#include <joinable/communicator/shared_memory/group/group.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <support/seen_twice.hpp>

#include <joinable/communicator/shared_memory/board/group_memory.hpp>
#include <joinable/communicator/shared_memory/group/group_rank.hpp>
#include <joinable/communicator/shared_memory/group/group_storage.hpp>

namespace {

using joinable::Buffer;
using joinable::DType;
using namespace joinable::detail;

/// Two ranks, each with another view of the memory.
class TwoRanks {
public:
    explicit TwoRanks(std::size_t room_bytes)
        : group_bytes_{in_cache_lines(Group::bytes_for(2))}, room_bytes_{room_bytes},
          memory_{group_bytes_ + 2 * room_bytes} {
        Group::create(all_numbers(2), {base(0), group_bytes_});
    }
    [[nodiscard]] Group group(int rank) const {
        return Group{*reinterpret_cast<Board*>(base(rank))};
    }
    [[nodiscard]] std::shared_ptr<GroupStorage<Room>> storage(int rank) const {
        std::byte* const room =
            base(rank) + group_bytes_ + static_cast<std::size_t>(rank) * room_bytes_;
        return std::make_shared<GroupStorage<Room>>(std::span{room, room_bytes_});
    }

private:
    [[nodiscard]] std::byte* base(int rank) const {
        return static_cast<std::byte*>(memory_.addresses[static_cast<std::size_t>(rank)]);
    }

    std::size_t group_bytes_;
    std::size_t room_bytes_;
    joinable_tests::SeenTwice memory_;
};

/// Every message in both directions: each rank sends first in turn, some twice in flight.
void exchange(GroupRank<Room>& rank) {
    int const peer = 1 - rank.rank();
    for (std::size_t round = 0; round < 200; ++round) {
        std::size_t const n = round % 10 == 0 ? 20'000 : round % 7;
        std::vector<std::int32_t> out(n, rank.rank());
        std::vector<std::int32_t> in(n, -1);
        Buffer const to{out.data(), n, DType::i32};
        Buffer const from{in.data(), n, DType::i32};
        bool const sends_first = (round % 2 == 0) == (rank.rank() == 0);
        Message first = rank.post_message(sends_first, peer, 3, sends_first ? to : from);
        Message second = rank.post_message(!sends_first, peer, 3, sends_first ? from : to);
        for (Message* const message : {&second, &first}) {
            rank.finish(*message);
        }
        CHECK(in == std::vector<std::int32_t>(n, peer));
    }
}

TEST_CASE("ranks that see the memory at different addresses exchange messages and make groups") {
    TwoRanks const ranks{std::size_t{1} << 20U};
    std::atomic<std::uint64_t> place{0};
    auto const run = [&](int number) {
        GroupRank<Room> rank{ranks.group(number), number, ranks.storage(number)};
        exchange(rank);
        if (number == 1) { // the first one of the group to be made
            place = rank.make_group({1, 0});
        }
        while (place == 0) {
            std::this_thread::yield();
        }
        GroupRank<Room> other{rank.group().group_at(place), 1 - number, rank.storage()};
        CHECK(other.group().number_of(0) == 1);
        exchange(other);
        if (number == 0) {
            rank.abort({joinable::FailureKind::peer_failed, {0}, "rank 0 gives up"});
        }
        std::int32_t value = 0;
        Message never = other.post_message(false, number, 0, {&value, 1, DType::i32});
        CHECK_THROWS_WITH_AS(other.finish(never), "rank 0 gives up", joinable::PeerFailed);
    };
    {
        std::jthread const second{run, 1};
        run(0);
    }
}

TEST_CASE("what finds no memory says so, and the next one that fits is made") {
    TwoRanks const ranks{10'000};
    GroupRank<Room> rank{ranks.group(0), 0, ranks.storage(0)};
    std::vector<std::uint8_t> bytes(9000);
    auto const send = [&](std::size_t n) {
        return rank.post_message(true, 1, 5, {bytes.data(), n, DType::u8});
    };
    Message large = send(9000);
    CHECK_THROWS_WITH_AS(
        (void)send(2000),
        "a send of 2000 u8 with tag 5 finds no place in the memory that a rank shares: wait for "
        "what is under way, or cut it into smaller ones",
        joinable::ContractViolation
    );
    CHECK(send(10).pending != nullptr);
    CHECK(rank.make_group({0, 1}) == 0);
    // The same for a collective that fits, but not now: there is none to be waited for.
    auto const reduce = [&](std::size_t n) {
        Buffer const buffer{bytes.data(), n, DType::u8};
        return rank.post(
            {{Collective::all_reduce, DType::u8, joinable::ReduceOp::sum, 0, n}, buffer, buffer}
        );
    };
    CHECK_THROWS_AS(reduce(9000), joinable::ContractViolation);

    GroupRank<Room> other{ranks.group(1), 1, ranks.storage(1)};
    Message const received = other.post_message(false, 0, 5, {bytes.data(), 9000, DType::u8});
    CHECK(received.pending == nullptr);
    rank.finish(large);
    CHECK(reduce(9000) == 0);
}

TEST_CASE("a group that the heap has no place for is no memory, of which all members hear") {
    TwoRanks const ranks{std::size_t{1} << 20U};
    auto const heap_is_full = [](std::byte const*, std::size_t) { throw std::bad_alloc{}; };
    std::vector<std::byte> room(std::size_t{1} << 20U);
    auto const storage = std::make_shared<GroupStorage<Room>>(std::span{room}, heap_is_full);
    GroupRank<Room> rank{ranks.group(0), 0, storage};
    CHECK(rank.make_group({0, 1}) == 0);
}

TEST_CASE("a room never gives what it has given, and has all of it again in the end") {
    std::vector<std::byte> memory(1 << 16);
    Room room{memory};
    std::vector<std::span<std::byte>> taken;
    std::uint64_t state = 1;
    auto const draw = [&](std::uint64_t limit) {
        state = state * 6364136223846793005U + 1442695040888963407U;
        return static_cast<std::size_t>((state >> 33U) % limit);
    };
    int refused = 0;
    for (int step = 0; step < 20'000; ++step) {
        if (draw(5) < 3 || taken.empty()) {
            std::size_t const n = draw(step % 3 == 0 ? 8000 : 200) + 1;
            std::byte* const got = room.allocate(n);
            refused += got == nullptr ? 1 : 0;
            if (got != nullptr) {
                for (std::size_t i = 0; i < n; ++i) { // zero is free
                    REQUIRE(got[i] == std::byte{0});
                    got[i] = std::byte{1};
                }
                taken.emplace_back(got, n);
            }
        } else {
            std::swap(taken[draw(taken.size())], taken.back());
            for (std::byte& byte : taken.back()) {
                byte = std::byte{0};
            }
            room.free(taken.back().data(), taken.back().size());
            taken.pop_back();
        }
    }
    CHECK(refused > 100);
    for (auto const part : taken) {
        room.free(part.data(), part.size());
    }
    CHECK(room.allocate(memory.size() + 1) == nullptr);
    CHECK(room.allocate(memory.size()) == memory.data());
}

TEST_CASE("a group of many ranks reserves what all use, not what grows with the square of them") {
    for (int const size : {1, 2, 3, 8, 64, 256}) {
        std::size_t const bytes = in_cache_lines(Group::bytes_for(size));
        joinable_tests::SeenTwice const memory{bytes};
        std::span const room{static_cast<std::byte*>(memory.addresses[0]), bytes};
        std::size_t reserved = 0;
        auto const reserve = [&](std::byte const*, std::size_t part) { reserved += part; };
        GroupStorage<Room> storage{room, reserve};
        REQUIRE(storage.make(all_numbers(size), 0));
        CAPTURE(size);
        CHECK(reserved > static_cast<std::size_t>(size) * 8'000); // arrival lines
        CHECK(reserved < 40'000 + static_cast<std::size_t>(size) * 14'000);
    }
}

TEST_CASE(
    "a room reserves all that it gives once, and again what zeroing gave back to the system, but "
    "of a group's memory the parts in use"
) {
    std::vector<std::byte> memory(1 << 18);
    std::vector<bool> is_reserved(memory.size());
    auto const reserve = [&](std::byte const* data, std::size_t bytes) {
        REQUIRE(bytes != 0);
        REQUIRE(data >= memory.data());
        auto const begin = static_cast<std::size_t>(data - memory.data());
        REQUIRE(begin + bytes <= memory.size());
        auto const first = is_reserved.begin() + static_cast<std::ptrdiff_t>(begin);
        auto const end = first + static_cast<std::ptrdiff_t>(bytes);
        REQUIRE(std::find(first, end, true) == end);
        std::fill(first, end, true);
    };
    auto const clear = [&](std::byte* data, std::size_t bytes) { // whole pages as MADV_REMOVE does
        std::fill_n(data, bytes, std::byte{0});
        constexpr std::size_t page = 4096;
        std::size_t const before = (page - reinterpret_cast<std::uintptr_t>(data) % page) % page;
        if (before < bytes) {
            auto const first = is_reserved.begin() + (data - memory.data());
            auto const begin = static_cast<std::ptrdiff_t>(before);
            auto const inner = static_cast<std::ptrdiff_t>((bytes - before) / page * page);
            std::fill(first + begin, first + begin + inner, false);
        }
    };
    Room room{memory, reserve, clear};
    auto const all_reserved = [&](std::byte const* data, BlockPart part) {
        auto const begin = static_cast<std::size_t>(data - memory.data()) + part.offset;
        auto const first = is_reserved.begin() + static_cast<std::ptrdiff_t>(begin);
        auto const end = first + static_cast<std::ptrdiff_t>(part.bytes);
        return std::find(first, end, false) == end;
    };
    std::vector<std::span<std::byte>> taken;
    std::uint64_t state = 1;
    auto const draw = [&](std::uint64_t limit) {
        state = state * 6364136223846793005U + 1442695040888963407U;
        return static_cast<std::size_t>((state >> 33U) % limit);
    };
    int groups = 0;
    int groups_with_gaps = 0;
    for (int step = 0; step < 3'000; ++step) {
        std::size_t const n = draw(30'000) + 1;
        BlockPart const all{0, n};
        if (draw(3) == 0) { // a group: its head, a part in the middle, and zeros at its end
            std::array const used{BlockPart{0, n / 8}, BlockPart{n / 2, n / 16}};
            BlockPart const zeros{n - n / 4, n / 4};
            std::byte* const got = room.allocate(n, used, zeros);
            if (got != nullptr) {
                CHECK((all_reserved(got, used[0]) && all_reserved(got, used[1])));
                CHECK(std::all_of(got + zeros.offset, got + n, [](std::byte byte) {
                    return byte == std::byte{0};
                }));
                ++groups;
                groups_with_gaps += all_reserved(got, all) ? 0 : 1;
                taken.emplace_back(got, n);
            }
        } else if (std::byte* const got = room.allocate(n); got != nullptr) {
            CHECK(all_reserved(got, all));
            std::fill_n(got, n, std::byte{1});
            taken.emplace_back(got, n);
        }
        while (taken.size() > 8 || (!taken.empty() && draw(3) == 0)) {
            std::swap(taken[draw(taken.size())], taken.back());
            room.free(taken.back().data(), taken.back().size());
            taken.pop_back();
        }
    }
    CHECK(groups > 300);
    CHECK(groups_with_gaps > 3);
}

} // namespace
