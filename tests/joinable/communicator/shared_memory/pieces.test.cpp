// SPDX-License-Identifier: BSL-1.0
// Sums of what lies in several places, against closed forms.
#include <joinable/communicator/pieces.hpp>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <support/process_ranks.hpp>
#include <support/ranks.hpp>
#include <support/shared.hpp>
#include <support/volume.hpp>

#include <joinable/communicator/any/communicator.hpp>
#include <joinable/communicator/make_arena.hpp>
#include <joinable/communicator/progress_thread.hpp>
#include <joinable/communicator/shared_memory/process.hpp>
#include <joinable/device/arena.hpp>

namespace {

using namespace joinable_tests;
using joinable::AnyCommunicator;
using joinable::Buffer;
using joinable::ProcessCommunicator;
using joinable::ReduceOp;
using joinable::ThreadCommunicator;
using joinable::detail::BufferPiece;
using joinable::detail::BufferPieces;

static_assert(joinable::detail::has_sum_of_pieces<ThreadCommunicator>);
static_assert(joinable::detail::has_sum_of_pieces<ProcessCommunicator>);
static_assert(joinable::detail::has_sum_of_pieces<AnyCommunicator>);

/// Exact in every dtype of floating point, also times a factor and summed over eight ranks.
float number(int rank, std::size_t i) {
    return static_cast<float>(static_cast<int>(i % 7) - 3 + rank);
}
double factor_of(int rank) {
    return rank % 2 == 0 ? 0.5 : 2.0;
}
float sum_of(int ranks, std::size_t i) {
    float sum = 0.0F;
    for (int rank = 0; rank < ranks; ++rank) {
        sum += static_cast<float>(factor_of(rank)) * number(rank, i);
    }
    return sum;
}

/// `count` elements, of which the `i`-th is f(i): a number that comes again after seven others, as those above do. Memory
/// is copied and compared, because each element of some millions would take its time in a test without optimizations.
template <class T, class F>
std::unique_ptr<T[]> repeated(std::size_t count, F const& f) {
    auto all = std::make_unique_for_overwrite<T[]>(count);
    std::size_t done = 0;
    for (; done < count && done < 7; ++done) {
        all[done] = T{f(done)};
    }
    for (; done < count; done += (std::min)(done, count - done)) {
        std::memcpy(all.get() + done, all.get(), (std::min)(done, count - done) * sizeof(T));
    }
    return all;
}
template <class T>
std::unique_ptr<T[]> numbers_of(int rank, std::size_t count) {
    return repeated<T>(count, [&](std::size_t i) { return number(rank, i); });
}
template <class T>
std::unique_ptr<T[]> sums_of(int ranks, std::size_t count) {
    return repeated<T>(count, [&](std::size_t i) { return sum_of(ranks, i); });
}
template <class T>
bool is_same(T const* elements, T const* expected, std::size_t count) {
    return std::memcmp(elements, expected, count * sizeof(T)) == 0;
}

/// `count` elements of a rank in an arena, or on its heap, in pieces of 1, 2, 3, ... times `step` elements with gaps
/// between them.
template <class T>
class Pieces {
public:
    template <class Comm>
    Pieces(Comm& comm, std::size_t count, std::size_t step, bool is_on_heap = false)
        : rank_{comm.rank()} {
        std::size_t size = 0;
        for (std::size_t at = 0, length = step; at < count; at += length, length += step) {
            size += gap + length;
        }
        std::size_t const bytes = size * sizeof(T);
        arena_ = is_on_heap ? joinable::Arena{bytes} : joinable::make_arena(comm, bytes);
        auto* place = reinterpret_cast<T*>(arena_.data());
        auto const numbers = numbers_of<T>(rank_, count);
        for (std::size_t at = 0, length = step; at < count; length += step) {
            std::span<T> const piece{place + gap, (std::min)(length, count - at)};
            std::memcpy(piece.data(), numbers.get() + at, piece.size_bytes());
            at += piece.size();
            places_.push_back(piece);
            place += gap + length;
        }
        list_.reserve(places_.size());
    }
    /// A new list of them. The result goes to `out`, if given.
    [[nodiscard]] BufferPieces buffer(T* out = nullptr) {
        list_.clear();
        std::size_t end = 0;
        for (std::span<T> const place : places_) {
            end += place.size_bytes();
            list_.push_back(BufferPiece::of(place.data(), end));
        }
        return {list_.data(), list_.size(), joinable::dtype_of<T>, out};
    }
    [[nodiscard]] Buffer first() const {
        return {places_[0].data(), places_[0].size(), joinable::dtype_of<T>};
    }
    void check_sums(int ranks) const { check(sums_of<T>(ranks, count()).get()); }
    void check_unchanged() const { check(numbers_of<T>(rank_, count()).get()); }

private:
    static constexpr std::size_t gap = 3;

    [[nodiscard]] std::size_t count() const {
        std::size_t sum = 0;
        for (std::span<T> const place : places_) {
            sum += place.size();
        }
        return sum;
    }
    void check(T const* expected) const {
        std::size_t wrong = 0;
        for (std::span<T> const place : places_) {
            wrong += is_same(place.data(), expected, place.size()) ? 0U : 1U;
            expected += place.size();
        }
        auto const* const all = reinterpret_cast<T const*>(arena_.data());
        for (std::size_t k = 0; k < gap; ++k) {
            wrong += static_cast<float>(all[k]) == 0.0F ? 0U : 1U;
        }
        CHECK(wrong == 0);
    }

    int rank_;
    joinable::Arena arena_;
    std::vector<std::span<T>> places_;
    std::vector<BufferPiece> list_;
};

/// The sum of `mine` into memory in one place.
template <class T, class Comm>
void check_sum_elsewhere(Comm& comm, Pieces<T>& mine, std::size_t count, bool is_on_heap = false) {
    std::size_t const bytes = count * sizeof(T);
    joinable::Arena const arena =
        is_on_heap ? joinable::Arena{bytes} : joinable::make_arena(comm, bytes);
    auto* const out = reinterpret_cast<T*>(arena.data());
    comm.sum_pieces(mine.buffer(out), factor_of(comm.rank())).wait();
    CHECK(is_same(out, sums_of<T>(comm.size(), count).get(), count));
    mine.check_unchanged();
}

/// Every third rank has one buffer, and the others cut theirs differently. Of these every `elsewhere`-th one has its
/// result in one place.
template <class T, class Comm>
void check_rank(Comm& comm, int elsewhere) {
    int const rank = comm.rank();
    for (std::size_t const count : {1U, 500U, 100'000U}) {
        for (std::size_t const step : {1U, 1000U}) {
            bool const is_whole = rank % 3 == 2;
            Pieces<T> mine{comm, count, is_whole ? count : step + static_cast<std::size_t>(rank)};
            if (!is_whole && elsewhere != 0 && rank % elsewhere == 0) {
                check_sum_elsewhere(comm, mine, count);
                continue;
            }
            if (is_whole) {
                comm.all_reduce(mine.first(), ReduceOp::sum, factor_of(rank)).wait();
            } else {
                comm.sum_pieces(mine.buffer(), factor_of(rank)).wait();
            }
            mine.check_sums(comm.size());
        }
    }
}

TEST_CASE_TEMPLATE(
    "a sum in pieces is right however each rank's are cut, and beside ranks with one buffer",
    T,
    float,
    double,
    joinable::Half
) {
    for (int const elsewhere : {0, 1, 2}) {
        run_all_ranks({1, 2, 3, 4, 8}, [&](auto& comm) { check_rank<T>(comm, elsewhere); });
    }
}

TEST_CASE("pieces in arenas are summed with a rank whose buffer lies on its heap, slice by slice") {
    run_process_ranks({2, 3, 4, 8}, [](ProcessCommunicator& comm) {
        constexpr std::size_t count = 1'000'000;
        if (comm.rank() == 1) {
            auto const heap = numbers_of<float>(1, count);
            CHECK_FALSE(comm.is_in_reach(Buffer{heap.get(), count}));
            comm.all_reduce({heap.get(), count}, ReduceOp::sum, factor_of(1)).wait();
            CHECK(is_same(heap.get(), sums_of<float>(comm.size(), count).get(), count));
        } else {
            Pieces<float> mine{comm, count, 100 + static_cast<std::size_t>(comm.rank())};
            CHECK(comm.is_in_reach(mine.first()));
            comm.sum_pieces(mine.buffer(), factor_of(comm.rank())).wait();
            mine.check_sums(comm.size());
        }
    });
}

/// Pieces on the heap or not, whose sum goes back to them, or to an arena, or to the heap. Other ranks do otherwise.
template <class T, class Comm>
void check_unreached(Comm& comm, std::size_t count, int way) {
    Pieces<T> mine{comm, count, 100 + static_cast<std::size_t>(comm.rank()), way % 2 == 0};
    if (way / 2 == 0) {
        comm.sum_pieces(mine.buffer(), factor_of(comm.rank())).wait();
        mine.check_sums(comm.size());
    } else {
        check_sum_elsewhere(comm, mine, count, way / 2 == 1);
    }
}

TEST_CASE_TEMPLATE(
    "pieces that other processes do not reach are summed at once and slice by slice, wherever the sum goes",
    T,
    float,
    double,
    joinable::Half
) {
    std::size_t k = 0;
    for (std::size_t const count : {std::size_t{1}, std::size_t{5000}, 3'000'000 / sizeof(T)}) {
        for (int const first : {0, 1, 2, 3, 4, 5}) {
            for (bool const are_alike : {false, true}) {
                in_turn({1, 2, 3, 4, 8}, k++, [&](int ranks) {
                    run_process_ranks({ranks}, [&](ProcessCommunicator& comm) {
                        check_unreached<T>(
                            comm, count, (first + (are_alike ? 0 : comm.rank())) % 6
                        );
                    });
                });
            }
        }
    }
}

TEST_CASE("when a rank is killed in a sum of pieces on the heaps of ranks, all others name it") {
    for (int const size : groups_of_processes({2, 3, 4, 8})) {
        Shared<std::atomic<int>> named;
        auto const body = [&](ProcessCommunicator& comm) {
            constexpr std::size_t count = 1'000'000;
            Pieces<float> mine{comm, count, 1000, true};
            auto work = comm.sum_pieces(mine.buffer(), 1.0);
            comm.barrier(); // all have arrived
            if (comm.rank() == 1) {
                std::raise(SIGKILL);
            }
            try {
                work.wait();
            } catch (joinable::PeerFailed const& error) {
                *named += error.ranks() == std::vector{1} ? 1 : 0;
            }
        };
        CHECK_THROWS_AS(run_process_ranks({size}, body), joinable::PeerFailed);
        CHECK(*named == size - 1);
    }
}

template <class Comm>
void check_many(Comm& comm) {
    joinable::ProgressThread const helper{comm};
    std::vector<Pieces<float>> mine;
    for (std::size_t k = 1; k <= 20; ++k) {
        mine.emplace_back(comm, 1000 * k, 10 + k + static_cast<std::size_t>(comm.rank()));
    }
    std::vector<decltype(comm.sum_pieces(mine[0].buffer(), 1.0))> works;
    for (Pieces<float>& one : mine) {
        works.push_back(comm.sum_pieces(one.buffer(), factor_of(comm.rank())));
    }
    for (std::size_t k = works.size(); k-- > 0;) {
        works[k].wait();
        mine[k].check_sums(comm.size());
    }
}

TEST_CASE("many sums in pieces are in flight, a thread computes for a rank, and any order is right"
) {
    run_all_ranks({1, 2, 3, 4, 8}, [](auto& comm) { check_many(comm); });
}

TEST_CASE("a communicator of any transport sums pieces if the transport does") {
    run_ranks({1, 2, 3}, [](ThreadCommunicator& comm) {
        AnyCommunicator any{comm};
        check_rank<float>(any, 2);
        CHECK(any.is_in_reach(Buffer{}));
        CHECK(any.sums_pieces());
    });
    joinable::SelfCommunicator self;
    CHECK_FALSE(AnyCommunicator{self}.is_in_reach(Buffer{}));
    CHECK_FALSE(AnyCommunicator{self}.sums_pieces());
}

TEST_CASE("ranks that sum different amounts in pieces all throw Mismatch, and no data moves") {
    auto const check = [](auto& comm) {
        Pieces<float> mine{comm, comm.rank() == 1 ? 1001U : 1000U, 10};
        CHECK_THROWS_AS(comm.sum_pieces(mine.buffer(), 1.0).wait(), joinable::Mismatch);
        mine.check_unchanged();
    };
    run_ranks({2, 3, 4, 8}, [&](ThreadCommunicator& comm) { check(comm); });
    run_process_ranks({2, 3, 4, 8}, [&](ProcessCommunicator& comm) { check(comm); });
}

TEST_CASE("a rank that is killed before or in a sum of pieces is named by all others") {
    for (bool const arrives : {false, true}) {
        for (int const size : groups_of_processes({2, 3, 4, 8})) {
            Shared<std::atomic<int>> named;
            auto const body = [&](ProcessCommunicator& comm) {
                Pieces<float> mine{comm, 300'000, 1000};
                if (comm.rank() == 1) {
                    std::optional<joinable::ProcessWork> work;
                    if (arrives) {
                        work.emplace(comm.sum_pieces(mine.buffer(), 1.0));
                    }
                    std::raise(SIGKILL);
                }
                try { // others do the work of a rank that has arrived
                    comm.sum_pieces(mine.buffer(), 1.0).wait();
                    comm.barrier();
                } catch (joinable::PeerFailed const& error) {
                    *named += error.ranks() == std::vector{1} ? 1 : 0;
                }
            };
            CHECK_THROWS_AS(run_process_ranks({size}, body), joinable::PeerFailed);
            CHECK(*named == size - 1);
        }
    }
}

} // namespace
