// SPDX-License-Identifier: BSL-1.0
#include "../../examples/train_text/model.hpp"

#include "../../examples/train_text/host_ranks.hpp"
#include "../../examples/train_text/plan.hpp"
#include "../../examples/train_text/train.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <support/folder.hpp>
#include <support/volume.hpp>

namespace {

using train_text::Model;
using train_text::Parameter;

constexpr auto not_ready = [](std::size_t) {};

/// The first positions have less text before them than the model reads, and bytes repeat, so that a
/// row of the embedding gets its gradient from several places.
std::vector<std::uint8_t> const text{3, 200, 3, 3, 17, 200, 9, 9, 3, 17, 0, 255, 17, 3};
std::vector<std::size_t> const positions{0, 2, 5, 7, 11, 13};

/// The loss per change of one number, from the definition: by moving it a little to either side. The
/// loss is in bits and gradients are in nats.
double difference_quotient(Model& model, float& number) {
    float const before = number;
    float const higher = before + 0.01F;
    float const lower = before - 0.01F;
    number = higher;
    model.forward(text, positions);
    double const above = model.loss();
    number = lower;
    model.forward(text, positions);
    double const below = model.loss();
    number = before;
    return std::log(2.0) * (above - below) / (static_cast<double>(higher) - lower);
}

/// How far gradients are from difference quotients, as a part of their length, over the `count`
/// numbers of a parameter whose gradients are greatest and as many that chance picks.
double relative_error(Model& model, std::size_t p, std::size_t count) {
    model.forward(text, positions);
    model.backward(not_ready);
    std::vector<float> const gradient = model.parameters()[p].grad.numbers;
    std::vector<std::size_t> chosen(gradient.size());
    for (std::size_t i = 0; i < chosen.size(); ++i) {
        chosen[i] = i;
    }
    std::shuffle(chosen.begin(), chosen.end(), std::mt19937{1});
    if (chosen.size() > 2 * count) {
        auto const end = [&](std::size_t n) {
            return chosen.begin() + static_cast<std::ptrdiff_t>(n);
        };
        std::partial_sort(
            end(count),
            end(2 * count),
            chosen.end(),
            [&](std::size_t a, std::size_t b) {
                return std::abs(gradient[a]) > std::abs(gradient[b]);
            }
        );
        chosen.resize(2 * count);
    }
    double off = 0;
    double length = 0;
    for (std::size_t const i : chosen) {
        double const quotient = difference_quotient(model, model.parameters()[p].value.numbers[i]);
        off += (quotient - gradient[i]) * (quotient - gradient[i]);
        length += quotient * quotient;
    }
    return std::sqrt(off / length);
}

} // namespace

TEST_CASE("the gradients of the language model are the limits of difference quotients") {
    for (std::uint64_t const seed : {1U, 2U, 3U}) {
        Model model{seed};
        for (std::size_t p = 0; p < model.parameters().size(); ++p) {
            CAPTURE(seed);
            CAPTURE(model.parameters()[p].name);
            CHECK(relative_error(model, p, 100) < 1e-3);
        }
    }
}

TEST_CASE("each gradient is final when it is said to be, and each is said once") {
    Model model{1};
    model.forward(text, positions);
    std::vector<std::vector<float>> when_ready(model.parameters().size());
    std::vector<int> times(model.parameters().size());
    model.backward([&](std::size_t i) {
        when_ready[i] = model.parameters()[i].grad.numbers;
        ++times[i];
    });
    for (std::size_t i = 0; i < when_ready.size(); ++i) {
        CHECK(times[i] == 1);
        CHECK(when_ready[i] == model.parameters()[i].grad.numbers);
    }
}

namespace {

/// Texts that run out one after another.
std::vector<train_text::Text> uneven_texts(int ranks) {
    train_text::Text long_text;
    for (int i = 0; i < 1000; ++i) {
        long_text.push_back(static_cast<std::uint8_t>((i * i / 7) % 97 + i % 5));
    }
    std::vector<train_text::Text> texts;
    for (int rank = 0; rank < ranks; ++rank) {
        texts.emplace_back(long_text.begin() + 10 * rank, long_text.end() - 100 * rank);
    }
    return texts;
}

} // namespace

TEST_CASE("process ranks train to the same bits as thread ranks, with the same rounds") {
    using namespace train_text;
    for (int const ranks : joinable_tests::groups_of_participants({1, 2, 3, 4, 8})) {
        Options options;
        options.ranks = ranks;
        options.epochs = 1;
        std::vector<Text> const texts = uneven_texts(ranks);
        std::vector<Findings> const of_threads = train_ranks(options, texts, text);
        options.communicator = Kind::process;
        std::vector<Findings> const of_processes = train_ranks(options, texts, text);
        CHECK(of_threads[0].bits_after != of_threads[0].bits_before);
        CHECK(of_processes[0].bits_before == of_threads[0].bits_before);
        CHECK(of_processes[0].bits_after == of_threads[0].bits_after);
        for (std::size_t rank = 0; rank < texts.size(); ++rank) {
            Findings const& a = of_threads[rank];
            Findings const& b = of_processes[rank];
            CHECK(b.digest == a.digest);
            CHECK(b.digest == of_threads[0].digest);
            CHECK(b.rounds == 16); // rank 0's 1000 bytes, 64 in a batch
            CHECK(b.own_rounds == (texts[rank].size() + 63) / 64);
            CHECK(b.own_rounds + b.shadow_rounds == b.rounds);
            CHECK(a.shadow_rounds == b.shadow_rounds);
        }
    }
}

TEST_CASE("a training that is drawn and traced has the same bits, and files with all its rounds") {
    using namespace train_text;
    joinable_tests::Folder const folder;
    for (int const ranks : joinable_tests::groups_of_participants({1, 2, 3, 4, 8})) {
        Options options;
        options.ranks = ranks;
        options.epochs = 1;
        options.communicator = ranks == 3 ? Kind::process : Kind::thread;
        std::vector<Text> const texts = uneven_texts(ranks);
        std::uint64_t const digest = train_ranks(options, texts, text)[0].digest;
        options.picture = folder.file("run.svg");
        options.trace = folder.file("run.json");
        std::vector<Findings> const findings = train_ranks(options, texts, text);
        CHECK(findings[0].digest == digest);
        std::string const picture = joinable_tests::contents_of(options.picture);
        std::string const title = std::to_string(ranks) + (ranks == 1 ? " rank, " : " ranks, ");
        CHECK(picture.find("<title>" + title + "16 rounds in ") != std::string::npos);
        std::string const trace = joinable_tests::contents_of(options.trace);
        auto const count = [&](std::string const& part) {
            std::size_t found = 0;
            for (std::size_t at = 0; (at = trace.find(part, at)) != std::string::npos; ++at) {
                ++found;
            }
            return found;
        };
        std::size_t own = 0;
        for (Findings const& found : findings) {
            own += found.own_rounds;
        }
        CHECK(count("\"name\":\"round\"") == own);
        CHECK(count("\"name\":\"forward\"") == own);
        CHECK(count("\"name\":\"shadow round\"") == 16 * findings.size() - own);
        CHECK(count("\"dropped_events\":0") == 1);
    }
}

TEST_CASE(
    "a sharded optimizer trains to the bits of the whole one, each rank with its part of the state"
) {
    using namespace train_text;
    for (int const ranks : joinable_tests::groups_of_participants({1, 2, 3, 4, 8})) {
        std::vector<Text> const texts = uneven_texts(ranks);
        for (train_text::Rule const rule :
             {train_text::Rule::sgd, train_text::Rule::adam, train_text::Rule::adamw}) {
            if (joinable_tests::is_left_out(static_cast<std::size_t>(rule), 3, ranks)) {
                continue;
            }
            Options options;
            options.ranks = ranks;
            options.epochs =
                2; // ranks that joined in the first one have the rate of all others in the second
            options.rule = rule;
            std::vector<Findings> const whole = train_ranks(options, texts, text);
            options.communicator = rule == train_text::Rule::adam ? Kind::process : Kind::thread;
            for (Sharding const sharding :
                 {Sharding::optimizer, Sharding::gradients, Sharding::parameters}) {
                options.sharding = sharding;
                std::vector<Findings> const sharded = train_ranks(options, texts, text);
                std::size_t bytes = 0;
                std::size_t value_bytes = 0;
                for (std::size_t rank = 0; rank < texts.size(); ++rank) {
                    CHECK(sharded[rank].digest == whole[0].digest);
                    CHECK(whole[rank].state_digest == whole[0].state_digest);
                    bytes += sharded[rank].state_bytes;
                    value_bytes += sharded[rank].value_bytes;
                }
                CHECK(bytes == whole[0].state_bytes);
                std::size_t const copies = sharding == Sharding::parameters ? 1 : texts.size();
                CHECK(value_bytes == copies * whole[0].value_bytes);
                CHECK(sharded[0].bits_after < sharded[0].bits_before);
            }
        }
    }
}

TEST_CASE("ranks have together what was planned for each before, and the planned values") {
    using namespace train_text;
    constexpr std::size_t elements = 256 * 8 + 48 * 32 + 32 + 32 * 256 + 256;
    for (int const ranks : joinable_tests::groups_of_participants({1, 2, 3, 4, 8})) {
        std::vector<Text> const texts = uneven_texts(ranks);
        for (Sharding const sharding :
             {Sharding::none, Sharding::optimizer, Sharding::gradients, Sharding::parameters}) {
            Options options;
            options.ranks = ranks;
            options.epochs = 1;
            options.sharding = sharding;
            options.rule = ranks % 2 == 0 ? train_text::Rule::sgd : train_text::Rule::adam;
            options.momentum = sharding == Sharding::none ? 0.0F : 0.9F;
            std::size_t const states = options.rule == train_text::Rule::sgd ? 4 : 8;
            auto const count = static_cast<std::size_t>(ranks);
            std::size_t const part = (elements + count - 1) / count;
            joinable::ZeroMemory const plan = planned(options, sharding);
            CHECK(plan.state == states * (sharding == Sharding::none ? elements : part));
            CHECK(plan.values == 4 * (sharding == Sharding::parameters ? part : elements));
            std::size_t state = 0;
            std::size_t values = 0;
            for (Findings const& found : train_ranks(options, texts, text)) {
                state += found.state_bytes;
                values += found.value_bytes;
            }
            CHECK(plan.state * count >= state);
            CHECK(plan.state * count < state + states * count); // rounded up
            CHECK(plan.values * count >= values);
            CHECK(plan.values * count < values + 4 * count);
        }
    }
}

TEST_CASE(
    "a training that goes on from a checkpoint is the one that never stopped, and any number of ranks goes on"
) {
    using namespace train_text;
    if (!can_save) {
        std::puts("skipped: nlohmann_json is not found");
        return;
    }
    joinable_tests::Folder const folder;
    for (int const ranks : joinable_tests::groups_of_participants({1, 2, 3, 4, 8})) {
        std::vector<Text> const texts = uneven_texts(ranks);
        Options options;
        options.ranks = ranks;
        options.epochs = 2; // of 16 rounds
        options.rule = train_text::Rule::adam;
        Sharding const shardings[] = {
            Sharding::optimizer, Sharding::gradients, Sharding::parameters
        };
        options.sharding = shardings[ranks % 3];
        options.communicator = ranks == 3 ? Kind::process : Kind::thread;
        std::vector<Findings> const whole = train_ranks(options, texts, text);
        options.save = {folder.file("model"), 27, ""}; // once, when some ranks have run out
        CHECK(train_ranks(options, texts, text)[0].digest == whole[0].digest);
        options.save = {"", 1, folder.file("model")};
        options.sharding = shardings[(ranks + 1) % 3];
        std::vector<Findings> const resumed = train_ranks(options, texts, text);
        CHECK(resumed[0].rounds == 5);
        CHECK(resumed[0].bits_before != whole[0].bits_before);
        for (Findings const& of_rank : resumed) {
            CHECK(of_rank.digest == whole[0].digest);
        }
        options.ranks = ranks % 4 + 1;
        std::vector<Findings> const others =
            train_ranks(options, uneven_texts(options.ranks), text);
        CHECK(others[0].rounds == 5);
        CHECK(others[0].bits_before == resumed[0].bits_before);
        for (Findings const& of_rank : others) {
            CHECK(of_rank.digest == others[0].digest);
        }
        CHECK(folder.names() == std::vector<std::string>{"model"});
    }
}
