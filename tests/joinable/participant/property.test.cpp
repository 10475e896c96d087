// SPDX-License-Identifier: BSL-1.0
// Trainings drawn from seeds: whatever the model, the shards, the options and the failures, each
// rank's gradients are those of a serial training, bit for bit, after every round, shadowed ones
// too; and all ranks issue the same collectives. JOINABLE_TEST_SEEDS="first count" runs others.
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <sstream>
#include <string>

#include <doctest/doctest.h>
#include <support/drawn/rank.hpp>
#include <support/ranks.hpp>

namespace {

using namespace joinable_tests;

std::string run_seed(std::uint64_t seed) {
    using namespace drawn;
    try {
        Training training = DrawTraining{seed, false}();
        auto serial = std::make_unique<SerialTraining>(training);
        if (serial->is_refused()) {
            training = DrawTraining{seed, true}();
            serial = std::make_unique<SerialTraining>(training);
        }
        if (serial->is_refused()) {
            return "refused";
        }
        run_ranks({training.world}, [&](joinable::ThreadCommunicator& comm) {
            DrawnRank rank{comm, training, *serial};
            rank.run();
        });
    } catch (std::exception const& error) {
        return error.what();
    }
    return {};
}

TEST_CASE("any training equals the serial one, bit for bit, on all ranks and after every round") {
    std::uint64_t first = 0;
    std::uint64_t count = 100;
    if (char const* const seeds = std::getenv("JOINABLE_TEST_SEEDS")) {
        std::istringstream{seeds} >> first >> count;
    }
    for (std::uint64_t seed = first; seed < first + count; ++seed) {
        std::string const text = run_seed(seed);
        CHECK_MESSAGE(text.empty(), "seed ", seed, ": ", text);
    }
}

} // namespace
