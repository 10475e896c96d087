// SPDX-License-Identifier: BSL-1.0
#include <joinable/any_communicator.hpp>

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <support/device_archetype.hpp>
#include <support/house_communicator.hpp>
#include <support/linear_model.hpp>
#include <support/ranks.hpp>
#include <support/thrown_by.hpp>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/self.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/sharded/data_parallel.hpp>
#include <joinable/participant/step.hpp>

namespace {

using namespace joinable_tests;
using joinable::AbortReason;
using joinable::AnyCommunicator;
using joinable::AnyWork;
using joinable::Buffer;
using joinable::ContractViolation;
using joinable::DType;
using joinable::Half;
using joinable::Mismatch;
using joinable::ReduceOp;
using joinable::ThreadCommunicator;

static_assert(std::same_as<joinable::BasicAnyCommunicator<>, AnyCommunicator>);
static_assert(!joinable::AllGathers<HouseCommunicator> && !joinable::HasDeadline<HouseCommunicator>);
static_assert(joinable::ScalesScatteredSums<AnyCommunicator> && joinable::AllToAlls<AnyCommunicator>);
static_assert(joinable::SendsAndReceives<AnyCommunicator> && joinable::Splits<AnyCommunicator>);
static_assert(joinable::RenewsDeadline<AnyCommunicator> && joinable::TellsReason<AnyCommunicator>);

/// Runs `body(any)` over a transport that has all collectives, and over one that has two.
template <class Body>
void over_both(std::initializer_list<int> sizes, Body const& body) {
    run_ranks(sizes, [&](ThreadCommunicator& comm) {
        AnyCommunicator all{comm};
        body(all);
        HouseCommunicator house{comm};
        AnyCommunicator few{house};
        body(few);
    });
}

/// Rank r's part has so many elements: none for some.
std::vector<std::size_t> uneven(int world) {
    std::vector<std::size_t> counts;
    for (int rank = 0; rank < world; ++rank) {
        counts.push_back(static_cast<std::size_t>((rank * 2) % 3));
    }
    return counts;
}

/// The elements that `from` sends to `to`.
std::vector<std::int32_t> message(int from, int to, std::size_t count) {
    std::vector<std::int32_t> elements;
    for (std::size_t i = 0; i < count; ++i) {
        elements.push_back(100 * from + 10 * to + static_cast<std::int32_t>(i));
    }
    return elements;
}
void append(std::vector<std::int32_t>& all, std::vector<std::int32_t> const& part) {
    all.insert(all.end(), part.begin(), part.end());
}
Buffer to_buffer(std::vector<std::int32_t>& elements) {
    return {elements.data(), elements.size(), DType::i32};
}
std::size_t at(int rank) {
    return static_cast<std::size_t>(rank);
}

TEST_CASE("parts arrive where they belong, whatever collectives the transport has") {
    over_both({1, 2, 3, 4, 8}, [](AnyCommunicator& comm) {
        int const world = comm.size();
        int const own = comm.rank();
        for (bool const by_counts : {false, true}) {
            std::vector<std::size_t> const counts =
                by_counts ? uneven(world) : std::vector<std::size_t>(at(world), 3);
            std::vector<std::int32_t> all;
            for (int rank = 0; rank < world; ++rank) {
                append(all, message(rank, 0, counts[at(rank)]));
            }
            std::vector<std::int32_t> part = message(own, 0, counts[at(own)]);
            std::vector<std::int32_t> const expected_part = part;
            int const root = world - 1;

            std::vector<std::int32_t> gathered(all.size());
            by_counts ? comm.all_gather(to_buffer(part), to_buffer(gathered), counts).wait()
                      : comm.all_gather(to_buffer(part), to_buffer(gathered)).wait();
            CHECK(gathered == all);

            std::vector<std::int32_t> at_root(own == root ? all.size() : 0);
            auto const none = std::span<std::size_t const>{};
            auto const of_root = own == root ? std::span<std::size_t const>{counts} : none;
            by_counts ? comm.gather(to_buffer(part), to_buffer(at_root), root, of_root).wait()
                      : comm.gather(to_buffer(part), to_buffer(at_root), root).wait();
            CHECK(at_root == (own == root ? all : std::vector<std::int32_t>{}));

            part.assign(part.size(), -1);
            by_counts ? comm.scatter(to_buffer(at_root), to_buffer(part), root, of_root).wait()
                      : comm.scatter(to_buffer(at_root), to_buffer(part), root).wait();
            CHECK(part == expected_part);

            std::vector<std::int32_t> given = all; // rank 0's are the greatest
            for (std::int32_t& element : given) {
                element -= own;
            }
            std::vector<std::int32_t> const before = given;
            by_counts
                ? comm.reduce_scatter(to_buffer(given), to_buffer(part), ReduceOp::max, counts)
                      .wait()
                : comm.reduce_scatter(to_buffer(given), to_buffer(part), ReduceOp::max).wait();
            CHECK(part == expected_part);
            CHECK(given == before); // only read
        }
    });
}

TEST_CASE("each rank sends a part to each, of equal sizes or by counts") {
    over_both({1, 2, 3, 4, 8}, [](AnyCommunicator& comm) {
        for (bool const by_counts : {false, true}) {
            auto const count = [&](int from, int to) {
                return by_counts ? static_cast<std::size_t>((from + 2 * to) % 4) : 2;
            };
            std::vector<std::int32_t> in;
            std::vector<std::int32_t> expected;
            std::vector<std::size_t> sent;
            std::vector<std::size_t> received;
            for (int rank = 0; rank < comm.size(); ++rank) {
                sent.push_back(count(comm.rank(), rank));
                received.push_back(count(rank, comm.rank()));
                append(in, message(comm.rank(), rank, sent.back()));
                append(expected, message(rank, comm.rank(), received.back()));
            }
            std::vector<std::int32_t> out(expected.size(), -1);
            by_counts ? comm.all_to_all(to_buffer(in), to_buffer(out), sent, received).wait()
                      : comm.all_to_all(to_buffer(in), to_buffer(out)).wait();
            CHECK(out == expected);
        }
    });
}

TEST_CASE("sums are scaled by each rank's factor, and reduced to a root alone") {
    over_both({1, 2, 3, 4, 8}, [](AnyCommunicator& comm) {
        double const factor = 0.5 * comm.rank();
        double const sum = 0.25 * comm.size() * (comm.size() - 1);
        std::vector<float> floats{1, 2, 3};
        comm.all_reduce({floats.data(), 3, DType::f32}, ReduceOp::sum, factor).wait();
        CHECK(floats[2] == static_cast<float>(3 * sum));
        std::vector<Half> halves(2, Half{2.0F});
        comm.all_reduce({halves.data(), 2, DType::f16}, ReduceOp::sum, factor).wait();
        CHECK(static_cast<float>(halves[1]) == static_cast<float>(2 * sum));

        std::vector<double> whole(at(comm.size()), 4.0);
        double part = 0;
        comm.reduce_scatter(
                {whole.data(), whole.size(), DType::f64},
                {&part, 1, DType::f64},
                ReduceOp::sum,
                factor
        )
            .wait();
        CHECK(part == 4 * sum);
        CHECK(whole[0] == 4.0);

        int const root = comm.size() / 2;
        std::int32_t value = comm.rank();
        comm.reduce({&value, 1, DType::i32}, ReduceOp::max, root).wait();
        CHECK(value == (comm.rank() == root ? comm.size() - 1 : comm.rank()));
    });
}

TEST_CASE("collectives of all kinds may be under way together, and are tested in any order") {
    over_both({1, 2, 4}, [](AnyCommunicator& comm) {
        std::vector<std::int32_t> own = message(comm.rank(), 0, 2);
        std::vector<std::int32_t> all(2 * at(comm.size()));
        std::vector<std::int32_t> part(2);
        std::int32_t sum = 1;
        std::vector<AnyWork> works;
        works.push_back(comm.all_gather(to_buffer(own), to_buffer(all)));
        works.push_back(comm.all_reduce({&sum, 1, DType::i32}, ReduceOp::sum));
        std::vector<std::int32_t> ones(2 * at(comm.size()), 1);
        works.push_back(comm.reduce_scatter(to_buffer(ones), to_buffer(part), ReduceOp::sum));
        while (!works.back().test()) {
        }
        CHECK(part == std::vector<std::int32_t>(2, comm.size()));
        for (AnyWork& work : works) {
            work.wait();
            CHECK(work.test());
        }
        CHECK(sum == comm.size());
        CHECK(all[2 * at(comm.size()) - 1] == message(comm.size() - 1, 0, 2)[1]);
    });
}

TEST_CASE("tables of counts that differ are a mismatch on every rank") {
    over_both({2, 3, 4}, [](AnyCommunicator& comm) {
        if (comm.is_aborted()) {
            return; // by the other transport
        }
        std::vector<std::size_t> sent(at(comm.size()), 1);
        std::vector<std::size_t> received(at(comm.size()), 1);
        if (comm.rank() == 1) {
            received[0] = 2;
        }
        std::vector<std::int32_t> in(at(comm.size()));
        std::vector<std::int32_t> out(at(comm.size()) + (comm.rank() == 1 ? 1 : 0));
        auto const exchange = [&] {
            comm.all_to_all(to_buffer(in), to_buffer(out), sent, received).wait();
        };
        auto const error = thrown_by<Mismatch>(exchange);
        CHECK(error.ranks() == std::vector<int>{0, 1});
        CHECK(comm.is_aborted());
    });
    run_ranks({2, 3, 4}, [](ThreadCommunicator& inner) {
        HouseCommunicator house{inner};
        AnyCommunicator comm{house};
        std::vector<std::size_t> const counts(at(comm.size()), 2);
        std::vector<std::int32_t> all(2 * at(comm.size()));
        std::vector<std::int32_t> part(comm.rank() == 1 ? 1 : 2);
        auto const gather = [&] { comm.gather(to_buffer(part), to_buffer(all), 0, counts).wait(); };
        auto const error = thrown_by<Mismatch>(gather);
        CHECK(error.ranks() == std::vector<int>{0, 1});
        std::string const text = error.what();
        CHECK(text.find("rank 1 has 1 elements for rank 0, which expects 2") != std::string::npos);
        CHECK_THROWS_AS(comm.barrier(), Mismatch);
    });
}

TEST_CASE("what a transport lacks beside collectives is refused with its name") {
    run_ranks({1, 2}, [](ThreadCommunicator& inner) {
        HouseCommunicator house{inner};
        AnyCommunicator comm{house};
        CHECK(comm.transport() == "HouseCommunicator");
        if (comm.size() == 1) {
            CHECK(comm.split(0, 0).size() == 1);
        } else {
            auto const error = thrown_by<ContractViolation>([&] { (void)comm.split(0, 0); });
            CHECK(
                std::string{error.what()} ==
                "a HouseCommunicator has no split(); choose a transport that has it on all ranks"
            );
        }
        std::int32_t value = 0;
        Buffer const buffer{&value, 1, DType::i32};
        CHECK_THROWS_AS((void)comm.send(buffer, 0), ContractViolation);
        CHECK_THROWS_AS((void)comm.receive(buffer, 0), ContractViolation);
        CHECK_THROWS_AS(comm.set_deadline(std::chrono::seconds{1}), ContractViolation);
        CHECK(!comm.keep_alive()); // nobody's deadline is renewed
        CHECK(comm.can_split() == (comm.size() == 1));
        CHECK(comm.missing_ranks().empty());
        comm.barrier();
    });
}

/// One rank with memory of a device, without split().
class OneDevice : public DeviceRanks {
public:
    void abort(AbortReason const&) {}
    [[nodiscard]] bool is_aborted() const { return false; }
    [[nodiscard]] std::optional<AbortReason> abort_reason() const { return {}; }
};

TEST_CASE("a group of one rank that moves memory of a device is none of the host") {
    OneDevice device;
    joinable::BasicAnyCommunicator<joinable::Device> comm{device};
    CHECK_FALSE(comm.can_split());
    CHECK_THROWS_WITH_AS(
        (void)comm.split(0, 0),
        "a OneDevice has no split(); choose a transport that has it on all ranks",
        ContractViolation
    );
}

TEST_CASE("an aborted rank that is alone makes no group") {
    run_ranks({1}, [](ThreadCommunicator& inner) {
        HouseCommunicator house{inner};
        AnyCommunicator comm{house};
        comm.abort({joinable::FailureKind::mismatch, {0}, "enough"});
        CHECK_THROWS_WITH_AS((void)comm.split(0, 0), "enough", Mismatch);
    });
}

TEST_CASE("a guard says what the transport behind it lacks") {
    run_ranks({1, 2}, [](ThreadCommunicator& inner) {
        HouseCommunicator house{inner};
        AnyCommunicator comm{house};
        joinable::Step step{comm, [] {}};
        auto const enter = [&] {
            joinable::Join guard{
                joinable::participants(step), {.timeout = std::chrono::seconds{1}}
            };
        };
        CHECK_THROWS_WITH_AS(
            enter(),
            "JoinOptions::timeout needs communicators that have set_deadline()",
            ContractViolation
        );
        joinable::Join guard{joinable::participants(step)};
        CHECK_THROWS_WITH_AS(
            guard.keep_alive(),
            "Join::keep_alive() needs communicators that have it, and NCCL a control communicator "
            "that has it or shares memory",
            ContractViolation
        );
        guard.finish();
    });
}

TEST_CASE("it owns what a pointer gives it, and groups that it splits off") {
    run_ranks({1, 2, 4}, [](ThreadCommunicator& inner) {
        std::unique_ptr<ThreadCommunicator> group{
            new ThreadCommunicator(inner.split(0, -inner.rank()))
        };
        AnyCommunicator comm{std::move(group)};
        CHECK(comm.transport() == "threads");
        CHECK(comm.rank() == inner.size() - 1 - inner.rank());
        comm.set_deadline(std::chrono::seconds{60});
        comm.keep_alive();
        AnyCommunicator half = comm.split(comm.rank() % 2, 0);
        std::int32_t sum = 1;
        half.all_reduce({&sum, 1, DType::i32}, ReduceOp::sum).wait();
        CHECK(sum == (comm.size() + 1 - comm.rank() % 2) / 2);
        if (comm.size() > 1) {
            std::int32_t value = comm.rank();
            comm.rank() == 0   ? comm.receive({&value, 1, DType::i32}, 1, 7).wait()
            : comm.rank() == 1 ? comm.send({&value, 1, DType::i32}, 0, 7).wait()
                               : void();
            CHECK(value == (comm.rank() == 0 ? 1 : comm.rank()));
        }
    });
    joinable::SelfCommunicator self;
    AnyCommunicator comm{self};
    CHECK(comm.size() == 1);
}

TEST_CASE("a guard knows the communicator behind it, and gives both their deadlines back") {
    run_ranks({1, 2, 3}, [](ThreadCommunicator& comm) {
        AnyCommunicator any{comm};
        AnyCommunicator again{comm};
        joinable::Step of_any{any, [] {}};
        joinable::Step of_comm{comm, [] {}};
        joinable::Step of_again{again, [] {}};
        {
            joinable::Join guard{
                joinable::participants(of_any, of_comm, of_again),
                {.timeout = std::chrono::seconds{50}}
            };
            guard.finish();
        }
        CHECK(comm.set_deadline(std::chrono::seconds{60}) == std::chrono::seconds{60});
        joinable::Join guard{joinable::participants(of_any)};
        auto const enter = [&] { joinable::Join other{joinable::participants(of_comm)}; };
        CHECK_THROWS_AS(enter(), ContractViolation);
        guard.finish();
    });
    CHECK_THROWS_AS(
        AnyCommunicator{std::unique_ptr<joinable::SelfCommunicator>{}}, ContractViolation
    );
}

TEST_CASE("a work that is destroyed has delivered") {
    over_both({1, 2, 4}, [](AnyCommunicator& comm) {
        std::vector<std::int32_t> ones(at(comm.size()), 1);
        std::int32_t sum = 0;
        {
            [[maybe_unused]] AnyWork const work =
                comm.reduce_scatter(to_buffer(ones), {&sum, 1, DType::i32}, ReduceOp::sum);
        }
        CHECK(sum == comm.size());
    });
}

TEST_CASE("an abort reaches every rank through it") {
    over_both({2, 4}, [](AnyCommunicator& comm) {
        if (comm.rank() == 0) {
            CHECK(comm.is_aborted() == comm.abort_reason().has_value()); // the second one is
            comm.abort({joinable::FailureKind::peer_failed, {0}, "no data"});
        }
        auto const error = thrown_by<joinable::PeerFailed>([&] { comm.barrier(); });
        CHECK(error.ranks() == std::vector<int>{0});
        REQUIRE(comm.abort_reason());
        CHECK(comm.abort_reason()->message == "no data");
    });
}

TEST_CASE("sharded training over a transport with two collectives gives the closed form") {
    over_both({1, 2, 3, 4, 8}, [](AnyCommunicator& comm) {
        for (auto const sharding :
             {joinable::Sharding::optimizer, joinable::Sharding::gradients, joinable::Sharding::none
             }) {
            auto params = make_params<double>({3, 1, 5}, 1.0);
            joinable::ShardedDataParallel model{
                comm, params, joinable::Sgd{.learning_rate = 0.5}, {.sharding = sharding}
            };
            joinable::Join guard{joinable::participants(model)};
            for (int round = 0; round <= comm.rank(); ++round) { // uneven
                model.forward([] {});
                model.backward([&](auto ready) {
                    for (std::size_t p = 0; p < params.size(); ++p) {
                        for (std::size_t i = 0; i < params[p].value.size(); ++i) {
                            params[p].g(i) = comm.size();
                        }
                        ready(p);
                    }
                });
                model.step();
            }
            guard.finish();
            // Round k has size - k active ranks with gradients of size each, averaged over size.
            double expected = 1.0;
            for (int round = 0; round < comm.size(); ++round) {
                expected -= 0.5 * (comm.size() - round);
            }
            CHECK(params[0].value[2] == doctest::Approx(expected));
            CHECK(params[2].value[4] == doctest::Approx(expected));
        }
    });
}

} // namespace
