// SPDX-License-Identifier: BSL-1.0
// A throw, or death, at each collective of a guard with a PeriodicAverage: all other ranks throw PeerFailed, which names
// the rank and its text.
#include <joinable/participant/periodic_average.hpp>

#include <array>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include <doctest/doctest.h>
#include <support/linear_model.hpp>
#include <support/process_ranks.hpp>
#include <support/ranks.hpp>
#include <support/recording_communicator.hpp>
#include <support/shared.hpp>
#include <support/volume.hpp>

#include <joinable/join/guard.hpp>

namespace {

using namespace joinable_tests;

struct Injected : std::domain_error {
    using std::domain_error::domain_error;
};

/// What happens to the culprit at one of its collectives, and whether that has begun.
struct Fault {
    bool kills;
    bool is_begun;
    int culprit;
    std::size_t collective;
};
enum class End { finished, failed, was_told };
struct Seen {
    std::array<End, 8> ends{};
    std::size_t collectives = 0; ///< of rank 0, in a guard that nothing ends early
};

/// Trains a rank, and tells `seen`, which process ranks share, how that ended. Ranks run out one after another, so they
/// also fail while they shadow. With 3 buckets, an average every second round, and one at the end.
template <class Comm>
void train(Comm& inner, Fault const& fault, Seen& seen) {
    RecordingCommunicator comm{inner};
    auto params = make_params<float>({3, 400, 5}, 1.0F);
    joinable::PeriodicAverage average{comm, params, {.period = 2, .bucket_bytes = 12}};
    std::size_t begun = 0;
    std::size_t posted = 0;
    auto const fail_at = [&](std::size_t& count, bool is_begun) {
        if (comm.rank() == fault.culprit && is_begun == fault.is_begun &&
            count == fault.collective) {
            if (fault.kills) {
                std::raise(SIGKILL);
            }
            throw Injected{"the engine is out of memory"};
        }
        ++count;
    };
    comm.before = [&](joinable::Buffer) { fail_at(begun, false); };
    comm.posted = [&] { fail_at(posted, true); };
    End& end = seen.ends[static_cast<std::size_t>(comm.rank())];
    try {
        joinable::Join guard{joinable::participants(average)};
        for (int i = 0; i <= comm.rank() + 1; ++i) {
            params[1].value[399] += 1.0F;
            average.step();
        }
        guard.finish();
        end = End::finished;
        if (comm.rank() == 0) {
            seen.collectives = begun;
        }
    } catch (Injected const&) {
        end = End::failed;
    } catch (joinable::PeerFailed const& error) {
        CHECK(error.rank() == fault.culprit);
        std::string const text = error.what();
        CAPTURE(text);
        CHECK((!fault.kills || text.find("its process was killed by signal 9") != std::string::npos)
        );
        end = End::was_told;
    }
}

/// One collective in `stride` fails, on each rank. `run(body)` runs body(comm) on the ranks.
template <class Run>
void check_each_fault(bool kills, int world, std::size_t stride, Run const& run) {
    Shared<Seen> const whole;
    run([&](auto& comm) { train(comm, {kills, false, -1, 0}, *whole); });
    std::size_t const collectives = whole->collectives;
    REQUIRE(collectives > 4 * static_cast<std::size_t>(world));
    std::size_t turn = 0;
    for (int culprit = 0; culprit < world; ++culprit) {
        for (bool const is_begun : {false, true}) {
            ++turn;
            // The others do not need a rank any more that has begun the last one.
            for (std::size_t k = turn % stride; k + (is_begun ? 1 : 0) < collectives; k += stride) {
                CAPTURE(world);
                CAPTURE(culprit);
                CAPTURE(is_begun);
                CAPTURE(k);
                Shared<Seen> const seen;
                seen->ends.fill(End::failed); // as of a rank that is killed
                run([&](auto& comm) { train(comm, {kills, is_begun, culprit, k}, *seen); });
                for (int rank = 0; rank < world; ++rank) {
                    End const expected = rank == culprit ? End::failed : End::was_told;
                    CHECK(seen->ends[static_cast<std::size_t>(rank)] == expected);
                }
            }
        }
    }
}

TEST_CASE("an exception at each collective of a periodic average is PeerFailed on all other ranks"
) {
    for (int const world : groups_of_participants({1, 2, 3, 4, 8})) {
        std::size_t const stride = world < 4 && !under_sanitizer ? 1 : 5;
        check_each_fault(false, world, stride, [&](auto const& body) { run_ranks({world}, body); });
    }
}

TEST_CASE(
    "a throw, or death, at a collective of a periodic average is PeerFailed on other process ranks"
) {
    for (int const world : groups_of_participants({2, 3, 4, 8})) {
        std::size_t const stride =
            world == 2 && !under_sanitizer ? 1 : 3 + 2 * static_cast<std::size_t>(world);
        for (bool const kills : {false, true}) {
            check_each_fault(kills, world, stride, [&](auto const& body) {
                try {
                    run_process_ranks({world}, body);
                } catch (joinable::PeerFailed const&) { // the others have said whom it names
                }
            });
        }
    }
}

} // namespace
