// SPDX-License-Identifier: BSL-1.0
// Trains a convolutional network of libtorch on images of digits, over ranks whose shards differ in
// length, and for comparison one network alone on the union of their batches. Both end with the
// same values, up to rounding.
#include <joinable/interop/torch.hpp>
#include <joinable/join.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <torch/torch.h>

namespace {

struct Options {
    int ranks = 4;
    int epochs = 5;
    double momentum = 0.9;
    bool is_unweighted = false;
    std::string save;
};

constexpr std::int64_t samples = 4000;
constexpr std::int64_t held_out = 1000;
constexpr std::int64_t batch_size = 20;
constexpr std::int64_t side = 12; // pixels

struct Batch {
    torch::Tensor images, digits;

    [[nodiscard]] std::int64_t size() const { return images.size(0); }
    [[nodiscard]] Batch part(std::int64_t begin, std::int64_t count) const {
        return {images.narrow(0, begin, count), digits.narrow(0, begin, count)};
    }
};

/// Digits of a seven-segment display, shifted and with noise.
Batch make_digits(std::int64_t count) {
    // Bits: top, middle, bottom, then left and right of the upper half, of the lower half.
    constexpr std::array<unsigned, 10> shown{
        0x7d, 0x50, 0x37, 0x57, 0x5a, 0x4f, 0x6f, 0x51, 0x7f, 0x5f
    };
    Batch const batch{
        0.5 * torch::randn({count, 1, side, side}), torch::randint(10, {count}, torch::kLong)
    };
    torch::Tensor const shifts = torch::randint(4, {count, 2}, torch::kLong);
    for (std::int64_t i = 0; i < count; ++i) {
        unsigned const bits = shown[static_cast<std::size_t>(batch.digits[i].item<std::int64_t>())];
        std::int64_t const y = shifts[i][0].item<std::int64_t>();
        std::int64_t const x = shifts[i][1].item<std::int64_t>();
        for (unsigned segment = 0; segment < 7; ++segment) {
            if ((bits >> segment & 1U) == 0) {
                continue;
            }
            torch::Tensor image = batch.images[i][0];
            if (segment < 3) {
                image.narrow(0, y + 4 * segment, 1).narrow(1, x, 5).add_(1);
            } else {
                bool const is_right = segment == 4 || segment == 6;
                image.narrow(0, y + (segment > 4 ? 4 : 0), 5)
                    .narrow(1, x + (is_right ? 4 : 0), 1)
                    .add_(1);
            }
        }
    }
    return batch;
}

/// Rank r gets r + 1 shares of the samples, in batches; the last batch may be short.
std::vector<std::vector<Batch>> deal(Batch const& data, int ranks) {
    std::vector<std::vector<Batch>> shards(static_cast<std::size_t>(ranks));
    std::int64_t const shares = ranks * (ranks + 1) / 2;
    std::int64_t begin = 0;
    for (int rank = 0; rank < ranks; ++rank) {
        std::int64_t const end = data.size() * (rank + 1) * (rank + 2) / 2 / shares;
        for (; begin < end; begin += batch_size) {
            shards[static_cast<std::size_t>(rank)].push_back(
                data.part(begin, std::min(batch_size, end - begin))
            );
        }
        begin = end;
    }
    return shards;
}

struct NetworkImpl : torch::nn::Module {
    torch::Tensor forward(torch::Tensor const& images) {
        return linear(torch::max_pool2d(torch::relu(convolution(images)), 2).flatten(1));
    }

    torch::nn::Conv2d convolution = register_module("convolution", torch::nn::Conv2d{1, 8, 3});
    torch::nn::Linear linear = register_module("linear", torch::nn::Linear{8 * 5 * 5, 10});
};
TORCH_MODULE(Network);

torch::Tensor loss_of(torch::Tensor const& scores, Batch const& batch) {
    return torch::nn::functional::cross_entropy(scores, batch.digits);
}
double loss_on(Network& network, Batch const& data) {
    torch::NoGradGuard const no_graph;
    return loss_of(network(data.images), data).item<double>();
}
/// The share of digits that the network reads right, in percent.
double accuracy_on(Network& network, Batch const& data) {
    torch::NoGradGuard const no_graph;
    return 100 *
           network(data.images).argmax(1).eq(data.digits).to(torch::kDouble).mean().item<double>();
}

torch::optim::SGDOptions settings(Options const& options) {
    return torch::optim::SGDOptions{0.02}.momentum(options.momentum);
}

/// The work of a rank. `ddp`, `step` and `join` are what distributed training adds.
template <class Comm>
std::vector<double> train_together(
    Comm& comm,
    std::vector<Batch> const& shard,
    Batch const& test,
    Options const& options,
    Network& network
) {
    torch::optim::SGD optimizer{network->parameters(), settings(options)};
    joinable::torch::DistributedDataParallel ddp{comm, network}; // all get rank 0's values
    joinable::torch::Step step{comm, optimizer};
    std::vector<double> losses;
    for (int epoch = 0; epoch < options.epochs; ++epoch) {
        joinable::Join join{joinable::participants(ddp, step)};
        for (Batch const& batch : shard) {
            optimizer.zero_grad();
            auto const scores = options.is_unweighted // else a short batch counts for less
                                    ? ddp.forward(batch.images)
                                    : ddp.forward({.weight = batch.size()}, batch.images);
            loss_of(scores, batch).backward();
            step.step();
        }
        join.finish(); // shadows until the last rank has run out
        losses.push_back(loss_on(network, test));
    }
    return losses;
}

/// Trains a network on all batches of a round at once.
std::vector<double> train_alone(
    std::vector<std::vector<Batch>> const& shards,
    Batch const& test,
    Options const& options,
    Network& network
) {
    torch::optim::SGD optimizer{network->parameters(), settings(options)};
    std::vector<double> losses;
    for (int epoch = 0; epoch < options.epochs; ++epoch) {
        for (std::size_t round = 0; round < shards.back().size(); ++round) {
            std::vector<torch::Tensor> images;
            std::vector<torch::Tensor> digits;
            for (std::vector<Batch> const& shard : shards) {
                if (round < shard.size()) {
                    images.push_back(shard[round].images);
                    digits.push_back(shard[round].digits);
                }
            }
            Batch const all{torch::cat(images), torch::cat(digits)};
            optimizer.zero_grad();
            loss_of(network(all.images), all).backward();
            optimizer.step();
        }
        losses.push_back(loss_on(network, test));
    }
    return losses;
}

using Tensors = c10::Dict<std::string, torch::Tensor>;

/// What compare.py needs to train the same network on the same batches.
Tensors inputs_of(
    Options const& options,
    std::vector<std::vector<Batch>> const& shards,
    Batch const& test,
    Network const& network
) {
    Tensors tensors;
    tensors.insert("epochs", torch::tensor(options.epochs));
    tensors.insert("momentum", torch::tensor(options.momentum));
    tensors.insert("test.images", test.images);
    tensors.insert("test.digits", test.digits);
    for (auto const& parameter : network->named_parameters()) {
        tensors.insert("value." + parameter.key(), parameter.value().detach().clone());
    }
    for (std::size_t rank = 0; rank < shards.size(); ++rank) {
        for (std::size_t i = 0; i < shards[rank].size(); ++i) {
            std::string const name = std::to_string(rank) + "." + std::to_string(i);
            tensors.insert("images." + name, shards[rank][i].images.clone());
            tensors.insert("digits." + name, shards[rank][i].digits.clone());
        }
    }
    return tensors;
}
void save(std::string const& path, Tensors const& tensors) {
    std::vector<char> const bytes = torch::pickle_save(tensors);
    std::ofstream file{path, std::ios::binary};
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    if (!file.flush()) {
        throw std::runtime_error{path + ": cannot be written"};
    }
}

double distance(Network const& one, Network const& other) {
    double distance = 0;
    for (std::size_t i = 0; i < one->parameters().size(); ++i) {
        auto const difference = one->parameters()[i].detach() - other->parameters()[i].detach();
        distance = std::max(distance, difference.abs().max().item<double>());
    }
    return distance;
}

} // namespace

int main(int argc, char** argv) {
    Options options;
    CLI::App app{"Trains a network of libtorch over thread ranks with uneven shards, and alone."};
    app.add_option("--ranks", options.ranks, "How many ranks, 1 to 64. Default: 4.")
        ->check(CLI::Range(1, 64))
        ->option_text("N");
    app.add_option("--epochs", options.epochs, "Passes over the samples. Default: 5.")
        ->check(CLI::Range(1, 1000))
        ->option_text("N");
    app.add_option("--momentum", options.momentum, "Momentum of the optimizer. Default: 0.9.")
        ->check(CLI::Range(0.0, 1.0))
        ->option_text("N");
    app.add_flag(
        "--unweighted",
        options.is_unweighted,
        "A short batch counts as much as others, as in PyTorch."
    );
    app.add_option(
           "--save", options.save, "Write what compare.py needs to this file. Default: none."
    )
        ->option_text("FILE");
    CLI11_PARSE(app, argc, argv);
    try {
        torch::manual_seed(1);
        torch::set_default_dtype(caffe2::TypeMeta::Make<double>()
        );                         // small differences grow in training
        torch::set_num_threads(1); // the ranks are the threads
        Batch const data = make_digits(samples);
        Batch const test = make_digits(held_out);
        auto const shards = deal(data, options.ranks);
        std::vector<Network> networks;
        std::vector<std::vector<double>> losses(shards.size());
        for (std::size_t rank = 0; rank < shards.size(); ++rank) {
            std::printf("rank %zu has %zu batches\n", rank, shards[rank].size());
            networks.emplace_back();
        }
        Network single;
        {
            torch::NoGradGuard const no_graph;
            for (std::size_t i = 0; i < single->parameters().size(); ++i) {
                single->parameters()[i].copy_(networks[0]->parameters()[i]);
            }
        }
        Tensors saved = inputs_of(options, shards, test, single);
        joinable::run_threads(options.ranks, [&](joinable::ThreadCommunicator& comm) {
            auto const rank = static_cast<std::size_t>(comm.rank());
            losses[rank] = train_together(comm, shards[rank], test, options, networks[rank]);
        });
        std::vector<double> const alone = train_alone(shards, test, options, single);
        if (!options.save.empty()) {
            saved.insert("losses", torch::tensor(losses[0]));
            save(options.save, saved);
        }
        std::printf("held out: %lld images\n", static_cast<long long>(held_out));
        std::printf("epoch  loss of %2d ranks  loss alone\n", options.ranks);
        for (std::size_t epoch = 0; epoch < alone.size(); ++epoch) {
            std::printf("%5zu %17.5f %11.5f\n", epoch + 1, losses[0][epoch], alone[epoch]);
        }
        double greatest = 0;
        for (Network const& network : networks) {
            greatest = std::max(greatest, distance(network, single));
        }
        std::printf(
            "read right: %.1f %% by the network of %d ranks, %.1f %% by the one alone\n"
            "values of any rank differ from those alone by at most %.0e\n",
            accuracy_on(networks[0], test),
            options.ranks,
            accuracy_on(single, test),
            greatest
        );
        return options.is_unweighted || greatest < 1e-6 ? 0 : 1;
    } catch (std::exception const& error) {
        std::fprintf(stderr, "train_libtorch: %s\n", error.what());
        return 1;
    }
}
