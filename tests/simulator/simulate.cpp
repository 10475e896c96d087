// SPDX-License-Identifier: BSL-1.0
// Prints what all-reduce algorithms take over many ranks on a virtual clock, what the roll call of a guard adds to
// each round, and what a round of sharded training takes and sends.
//
//   simulate [--alpha SECONDS] [--bandwidth BYTES_PER_SECOND] [--combine SECONDS_PER_BYTE] [--most MESSAGES]
//
// --most leaves out what would send more messages than that, 60e6 at first, which has sharded training on 4096
// ranks. A ring of n ranks sends 2 n^2: with 250e6 there is one of 10^4.
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include <simulator/sharded.hpp>
#include <simulator/table.hpp>

namespace {

using namespace joinable_tests;

std::string shape_of(joinable::AllReducePlan const& plan) {
    std::string text{name_of(plan.algorithm)};
    for (std::size_t i = 0; i < plan.extents.size(); ++i) {
        text += i == 0 ? " " : "x";
        text += std::to_string(plan.extents[i]);
    }
    return text;
}

void print(Table const& table) {
    std::printf(
        "%-22s %8s %10s %12s %12s %9s\n",
        "algorithm",
        "ranks",
        "bytes",
        "seconds",
        "formula",
        "messages"
    );
    for (Table::Row const& row : table.rows) {
        std::printf(
            "%-22s %8d %10zu %12.6g %12.6g %9zu\n",
            shape_of(row.plan).c_str(),
            row.ranks,
            row.bytes,
            row.seconds,
            row.formula,
            row.messages
        );
    }
}

void print_roll_calls(std::vector<int> const& all_ranks, joinable::MessageCosts const& costs) {
    std::size_t const gradients = 100'000'000;
    std::printf(
        "\na roll call of %zu bytes adds, where nothing hides it:\n%8s %12s %12s %12s %12s %12s\n",
        roll_call_bytes,
        "ranks",
        "seconds",
        "by a star",
        "with arrival",
        "gradients",
        "share"
    );
    for (int const ranks : all_ranks) {
        double const seconds = roll_call_seconds(ranks, costs);
        double const of_gradients = joinable::all_reduce_seconds(
            joinable::choose_algorithm(gradients, ranks, costs), gradients, ranks, costs
        );
        std::printf(
            "%8d %12.6g %12.6g %12.6g %12.6g %11.3f%%\n",
            ranks,
            seconds,
            joinable::all_reduce_seconds(
                {joinable::AllReduceAlgorithm::star, 0, {}}, roll_call_bytes, ranks, costs
            ),
            arrival_seconds(ranks, costs),
            of_gradients,
            100 * seconds / of_gradients
        );
    }
    std::printf("gradients: the formula of the cheapest all-reduce of %zu bytes\n", gradients);
}

/// Rounds of a model of 1 GiB whose forward pass takes a unit 40 ms.
void print_sharded(
    std::vector<int> const& all_ranks, joinable::MessageCosts const& costs, double most
) {
    constexpr std::size_t unit_bytes = std::size_t{1} << 25U;
    constexpr UnitModel model{32, 0.04, 0.08};
    constexpr double parameters = static_cast<double>(unit_bytes) * model.units;
    struct Case {
        char const* name;
        Sharding sharding;
        bool prefetch;
    };
    constexpr Case cases[] = {
        {"nothing", Sharding::none, false},
        {"optimizer", Sharding::optimizer, false},
        {"gradients", Sharding::gradients, false},
        {"parameters", Sharding::parameters, false},
        {"parameters, prefetched", Sharding::parameters, true},
    };
    std::printf(
        "\na round of 1 GiB in %zu units, of which the passes are %.2f s; a rank sends so many times the parameters:\n"
        "%-24s %8s %12s %12s %8s\n",
        model.units,
        static_cast<double>(model.units) * (model.forward_seconds + model.backward_seconds),
        "divided",
        "ranks",
        "seconds",
        "exposed",
        "bytes"
    );
    for (int const ranks : all_ranks) {
        bool const is_simulated = 3.0 * ranks * ranks <= most;
        RingCosts const ring = is_simulated ? simulate_ring(ranks, unit_bytes, costs)
                                            : ring_formulas(ranks, unit_bytes, costs);
        for (Case const& one : cases) {
            ShardedRound const round = sharded_round(one.sharding, model, ring, one.prefetch);
            std::printf(
                "%-24s %8d %12.6g %12.6g %8.4f%s\n",
                one.name,
                ranks,
                round.seconds,
                round.exposed,
                round.bytes / parameters,
                is_simulated ? "" : "  by the formulas"
            );
        }
    }
}

} // namespace

int main(int count, char** arguments) {
    joinable::MessageCosts costs;
    double most = 60e6;
    for (int i = 1; i < count; i += 2) {
        std::string_view const name = arguments[i];
        double* const option = name == "--alpha"       ? &costs.message_seconds
                               : name == "--bandwidth" ? &costs.bytes_per_second
                               : name == "--combine"   ? &costs.combine_seconds
                               : name == "--most"      ? &most
                                                       : nullptr;
        char* end = nullptr;
        double const value = i + 1 < count ? std::strtod(arguments[i + 1], &end) : -1;
        if (option == nullptr || end == arguments[i + 1] || value < 0) {
            std::fprintf(
                stderr,
                "usage: simulate [--alpha SECONDS] [--bandwidth BYTES_PER_SECOND] [--combine "
                "SECONDS_PER_BYTE] [--most MESSAGES]\n"
            );
            return 2;
        }
        *option = value;
    }
    std::vector<int> const all_ranks{16, 100, 1000, 10'000, 100'000};
    print(make_table(all_ranks, {roll_call_bytes, 1U << 20U, 100'000'000}, costs, most));
    print_roll_calls(all_ranks, costs);
    print_sharded({16, 256, 4096, 65'536}, costs, most);
}
