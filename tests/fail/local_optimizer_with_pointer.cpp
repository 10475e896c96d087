// SPDX-License-Identifier: BSL-1.0
// EXPECT: LocalOptimizer: settings() has a pointer or a reference, but settings travel from rank to rank, where an address leads nowhere; keep numbers in it
#include <joinable/zero.hpp>

struct Lamb {
    struct Settings {
        double learning_rate;
        float* trust;
    };
    Settings own{};
    void step(joinable::WholeParameter const&) {}
    Settings& settings() { return own; }
};

static_assert(joinable::models_local_optimizer<Lamb>());

int main() {}
