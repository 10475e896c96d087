// SPDX-License-Identifier: BSL-1.0
#include <joinable/communicator/substitute.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <support/ranks.hpp>

namespace {

using namespace joinable_tests;
using joinable::AnyWork;
using joinable::Buffer;
using joinable::DType;
using joinable::ReduceOp;
using joinable::ThreadCommunicator;
namespace detail = joinable::detail;

/// Has sums, with and without a factor, and broadcasts, and counts what is asked of it.
class FewCollectives {
public:
    /// Counts the calls of wait() and test().
    struct Waited {
        void wait() { ++*asked, work.wait(); }
        bool test() { return ++*asked, work.test(); }
        AnyWork work;
        int* asked;
    };

    explicit FewCollectives(ThreadCommunicator& comm) : comm_{&comm} {}
    [[nodiscard]] int rank() const { return comm_->rank(); }
    [[nodiscard]] int size() const { return comm_->size(); }
    void barrier() { comm_->barrier(); }
    auto all_reduce(Buffer buffer, ReduceOp op) {
        ++sums;
        return Waited{AnyWork{comm_->all_reduce(buffer, op)}, &asked};
    }
    auto all_reduce(Buffer buffer, ReduceOp op, double factor) {
        ++scaled_sums;
        return Waited{AnyWork{comm_->all_reduce(buffer, op, factor)}, &asked};
    }
    auto broadcast(Buffer buffer, int root) {
        ++broadcasts;
        return Waited{AnyWork{comm_->broadcast(buffer, root)}, &asked};
    }

    int sums = 0;
    int scaled_sums = 0;
    int broadcasts = 0;
    int asked = 0;

private:
    ThreadCommunicator* comm_;
};
static_assert(joinable::ScalesSums<FewCollectives> && !joinable::AllGathers<FewCollectives>);

std::size_t at(int rank) {
    return static_cast<std::size_t>(rank);
}
/// Rank r's part has so many elements: none for some.
std::vector<std::size_t> uneven(int world) {
    std::vector<std::size_t> counts;
    for (int rank = 0; rank < world; ++rank) {
        counts.push_back(at(rank * 2 % 3));
    }
    return counts;
}
Buffer to_buffer(std::vector<float>& elements) {
    return {elements.data(), elements.size(), DType::f32};
}
/// The parts of all ranks: rank r's elements are r + 1.
std::vector<float> parts_of(std::vector<std::size_t> const& counts) {
    std::vector<float> all;
    for (std::size_t rank = 0; rank < counts.size(); ++rank) {
        all.insert(all.end(), counts[rank], static_cast<float>(rank + 1));
    }
    return all;
}

/// Runs `body(comm)` over a communicator that has the collectives of parts, and over one that has not.
template <class Body>
void over_both(Body const& body) {
    run_ranks({1, 2, 3, 4, 8}, [&](ThreadCommunicator& comm) {
        body(comm);
        FewCollectives few{comm};
        body(few);
    });
}

TEST_CASE("parts go to all ranks, to a root and from a root over any communicator") {
    over_both([](auto& comm) {
        auto const counts = uneven(comm.size());
        std::vector<float> const all = parts_of(counts);
        std::vector<float> part(counts[at(comm.rank())], static_cast<float>(comm.rank() + 1));
        int const root = comm.size() - 1;

        std::vector<float> whole(all.size(), -1.0F);
        detail::any_all_gather(comm, to_buffer(part), to_buffer(whole), counts).wait();
        CHECK(whole == all);
        whole.assign(all.size(), -1.0F);
        detail::any_gather(comm, to_buffer(part), to_buffer(whole), root, counts).wait();
        CHECK((comm.rank() != root || whole == all));
        whole = comm.rank() == root ? all : std::vector<float>(all.size(), -1.0F);
        std::vector<float> taken(part.size(), -1.0F);
        detail::any_scatter(comm, to_buffer(whole), to_buffer(taken), root, counts).wait();
        CHECK(taken == part);
    });
}

TEST_CASE("each rank gets its part of a sum over any communicator, scaled by the sum where it can"
) {
    over_both([](auto& comm) {
        auto const counts = uneven(comm.size());
        for (auto const factor : {std::optional<double>{}, std::optional{0.5}}) {
            std::vector<float> whole = parts_of(counts);
            std::vector<float> part(counts[at(comm.rank())]);
            detail::any_reduce_scatter(comm, to_buffer(whole), to_buffer(part), factor, counts)
                .wait();
            auto const sum =
                static_cast<float>(factor.value_or(1.0) * (comm.rank() + 1) * comm.size());
            CHECK(part == std::vector<float>(part.size(), sum));
        }
    });
}

TEST_CASE("a substitute sums in the memory that it is given, and waits for nothing when it starts"
) {
    run_ranks({1, 2, 4}, [](ThreadCommunicator& inner) {
        FewCollectives comm{inner};
        std::vector<std::size_t> const counts(at(comm.size()), 2);
        std::vector<float> whole = parts_of(counts);
        std::vector<float> sum = whole;
        for (float& element : sum) {
            element *= static_cast<float>(0.25 * comm.size());
        }
        std::vector<float> part(2);
        std::vector<float> gathered(whole.size());
        {
            auto reduced =
                detail::any_reduce_scatter(comm, to_buffer(whole), to_buffer(part), 0.25, counts);
            auto arriving = detail::any_all_gather(
                comm, {part.data(), 2, DType::f32}, to_buffer(gathered), counts
            );
            CHECK(comm.asked == 0);
            reduced.wait();
            while (!arriving.test()) {
            }
        }
        CHECK(whole == sum);
        CHECK(part[1] == sum[2 * at(comm.rank())]);
        CHECK(comm.scaled_sums == 1);
        CHECK(comm.sums == 0);
        CHECK(comm.broadcasts == comm.size());
    });
}

} // namespace
