// SPDX-License-Identifier: BSL-1.0
// Trainings drawn from seeds: whatever the model, the shards, the options and the failures, each
// rank's gradients are those of a serial training, bit for bit, after every round, shadowed ones
// too; and all ranks issue the same collectives. JOINABLE_TEST_SEEDS="first count" runs others.
// A table has every pair of a training's choices; for its product of 4 million rows see
// support/rows.hpp: where 1000 programs share it, one takes a minute.
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/draw.hpp>
#include <support/drawn/rank.hpp>
#include <support/rows.hpp>
#include <support/volume.hpp>

namespace {

using namespace joinable_tests;

using namespace joinable_tests::drawn;

enum class Dies { nobody, one };

/// Calls run(training, serial) for a training of this seed that the library accepts. Returns what
/// went wrong.
template <class Run>
std::string
with_training(std::uint64_t seed, Dies dies, Run const& run, Choices const* row = nullptr) {
    for (std::uint64_t attempt = 0; attempt < 20; ++attempt) {
        bool const is_tame = attempt > (row == nullptr ? 0 : 15);
        DrawTraining draw{seed + (attempt << 32U), is_tame, row};
        Training training = draw();
        if (dies == Dies::one) {
            training.death = draw.draw_death();
            for (std::size_t e = training.death->epoch; e < training.epochs.size(); ++e) {
                training.epochs[e].leave.reset(); // or the rank may not live to die
            }
        }
        try {
            SerialTraining const serial{training, joinable::ScalesScatteredSums<RankCommunicator>};
            if (!serial.is_refused()) {
                run(training, serial);
                return {};
            }
        } catch (std::exception const& error) {
            return error.what();
        }
    }
    return "refused";
}

/// Calls check(seed) for 300 seeds, 40 under a sanitizer, or those of the environment.
template <class Check>
void for_seeds(Check const& check) {
    std::uint64_t first = 0;
    std::uint64_t count = under_sanitizer ? 40 : 300;
    if (char const* const seeds = std::getenv("JOINABLE_TEST_SEEDS")) {
        std::istringstream{seeds} >> first >> count;
    }
    for (std::uint64_t seed = first; seed < first + count; ++seed) {
        std::string const text = check(seed);
        CHECK_MESSAGE(text.empty(), "seed ", seed, ": ", text);
    }
}

TEST_CASE(
    "any training equals the serial one, bit for bit, on all ranks and after every round" *
    doctest::test_suite("[long]") * doctest::skip(!sums_in_rank_order)
) {
    for_seeds([](std::uint64_t seed) {
        return with_training(seed, Dies::nobody, [](Training const& training, auto const& serial) {
            over_ranks({training.world}, [&](auto& comm) {
                DrawnRank{comm, training, serial}.run();
            });
        });
    });
}

TEST_CASE(
    "every pair of a training's choices equals the serial one, bit for bit" *
    doctest::test_suite("[long]") * doctest::skip(!sums_in_rank_order)
) {
    Draw draw{1};
    for_rows(choices, draw, is_distinct, [&](Choices const& row) {
        std::uint64_t const seed = draw.below(1U << 30U);
        std::string const text = with_training(
            seed,
            Dies::nobody,
            [](Training const& training, SerialTraining const& serial) {
                over_ranks({training.world}, [&](auto& comm) {
                    DrawnRank{comm, training, serial}.run();
                });
            },
            &row
        );
        CHECK_MESSAGE(text.empty(), "seed ", seed, ": ", text);
    });
}

TEST_CASE(
    "wherever a rank dies in a training, all others hear of it, and of nothing else" *
    doctest::skip(!ranks_share_memory || !sums_in_rank_order)
) {
    for_seeds([](std::uint64_t seed) {
        return with_training(seed, Dies::one, [](Training const& training, auto const& serial) {
            std::vector<std::string> others(static_cast<std::size_t>(training.world));
            auto const train = [&](auto& comm) {
                try {
                    DrawnRank{comm, training, serial}.run();
                } catch (RankDied const&) {
                    throw;
                } catch (joinable::PeerFailed const& error) {
                    if (error.rank() != training.death->rank || error.rank() == comm.rank()) {
                        others[static_cast<std::size_t>(comm.rank())] = error.what();
                    }
                    throw;
                } catch (std::exception const& error) {
                    others[static_cast<std::size_t>(comm.rank())] = error.what();
                    throw;
                }
            };
            CHECK_THROWS_AS(over_ranks({training.world}, train), RankDied);
            for (std::string const& text : others) {
                if (!text.empty()) {
                    throw std::runtime_error{text};
                }
            }
        });
    });
}

} // namespace
