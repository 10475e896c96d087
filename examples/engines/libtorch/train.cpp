// SPDX-License-Identifier: BSL-1.0
// Trains a residual network on images of digits, or a transformer on sentences, over ranks whose
// shards differ in length, and for comparison one network alone on the batches of each round. Both
// end with the same values, up to rounding. compare.py trains the same by PyTorch.
#include <joinable/interop/torch.hpp>
#include <joinable/join.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <torch/torch.h>

namespace {

struct Options {
    int ranks = 4;
    int epochs = 5;
    double momentum = 0.9;
    bool is_unweighted = false;
    std::string network = "residual";
    std::string dtype = "f64";
    std::string folder;
    std::string save;
};

constexpr std::int64_t batch_size = 20;
constexpr double learning_rate = 0.05;

struct Batch {
    torch::Tensor inputs, labels;

    [[nodiscard]] std::int64_t size() const { return inputs.size(0); }
    [[nodiscard]] Batch part(std::int64_t begin, std::int64_t count) const {
        return {inputs.narrow(0, begin, count), labels.narrow(0, begin, count)};
    }
};

/// Records of this many bytes, which data.py has made.
torch::Tensor read_records(std::filesystem::path const& file, std::int64_t bytes) {
    if (!std::filesystem::exists(file)) {
        throw std::runtime_error{
            file.string() + " is missing; python3 data.py FOLDER makes it there"
        };
    }
    auto const size = static_cast<std::int64_t>(std::filesystem::file_size(file));
    return torch::from_file(file.string(), false, size, torch::kByte).view({-1, bytes});
}
/// Images and their digits.
Batch read_digits(std::string const& folder) {
    constexpr std::int64_t side = 12; // pixels
    auto const records = read_records(folder + "/digits.bin", 1 + side * side);
    auto const images = records.narrow(1, 1, side * side).to(torch::get_default_dtype());
    return {
        (images / 255).view({-1, 1, side, side}), records.select(1, 0).to(torch::kLong).contiguous()
    };
}
/// Lines of text, and the letter that follows each letter.
Batch read_text(std::string const& folder) {
    auto const lines = read_records(folder + "/text.txt", 34).to(torch::kLong);
    return {lines.narrow(1, 0, 32).contiguous(), lines.narrow(1, 1, 32).contiguous()};
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

struct Network : torch::nn::Module {
    virtual torch::Tensor forward(torch::Tensor const& inputs) = 0;
};

/// A convolution and a BatchNorm by the statistics of the batch that it is given, also in evaluations.
torch::nn::Sequential
convolution(std::int64_t from, std::int64_t to, std::int64_t width, std::int64_t stride) {
    return torch::nn::Sequential{
        torch::nn::Conv2d{
            torch::nn::Conv2dOptions{from, to, width}.stride(stride).padding(width / 2).bias(false)
        },
        torch::nn::BatchNorm2d{torch::nn::BatchNorm2dOptions{to}.track_running_stats(false)}
    };
}

struct Residual : Network {
    torch::Tensor forward(torch::Tensor const& images) override {
        auto x = torch::relu(stem->forward(images));
        x = torch::relu(x + second->forward(torch::relu(first->forward(x))));
        x = torch::relu(shortcut->forward(x) + fourth->forward(torch::relu(third->forward(x))));
        return head(x.mean({2, 3}));
    }

    torch::nn::Sequential stem = register_module("stem", convolution(1, 8, 3, 1));
    torch::nn::Sequential first = register_module("first", convolution(8, 8, 3, 1));
    torch::nn::Sequential second = register_module("second", convolution(8, 8, 3, 1));
    torch::nn::Sequential third = register_module("third", convolution(8, 16, 3, 2));
    torch::nn::Sequential fourth = register_module("fourth", convolution(16, 16, 3, 1));
    torch::nn::Sequential shortcut = register_module("shortcut", convolution(8, 16, 1, 2));
    torch::nn::Linear head = register_module("head", torch::nn::Linear{16, 10});
};

constexpr std::int64_t features = 32;
constexpr std::int64_t heads = 4;

/// Attention to this letter and those before, then a perceptron.
struct BlockImpl : torch::nn::Module {
    torch::Tensor forward(torch::Tensor x) {
        auto const length = x.size(1);
        auto const parts = attention(norm(x))
                               .view({x.size(0), length, 3 * heads, features / heads})
                               .transpose(1, 2)
                               .chunk(3, 1);
        auto const later = torch::ones({length, length}, torch::kBool).triu(1);
        auto const scores = torch::matmul(parts[0], parts[1].transpose(2, 3)) /
                            std::sqrt(static_cast<double>(features / heads));
        auto const mixed =
            torch::matmul(torch::softmax(scores.masked_fill(later, -1e9), -1), parts[2]);
        x = x + mix(mixed.transpose(1, 2).reshape(x.sizes()));
        return x + narrow(torch::relu(widen(second_norm(x))));
    }

    torch::nn::LayerNorm norm =
        register_module("norm", torch::nn::LayerNorm{torch::nn::LayerNormOptions{{features}}});
    torch::nn::Linear attention =
        register_module("attention", torch::nn::Linear{features, 3 * features});
    torch::nn::Linear mix = register_module("mix", torch::nn::Linear{features, features});
    torch::nn::LayerNorm second_norm = register_module(
        "second_norm", torch::nn::LayerNorm{torch::nn::LayerNormOptions{{features}}}
    );
    torch::nn::Linear widen = register_module("widen", torch::nn::Linear{features, 4 * features});
    torch::nn::Linear narrow = register_module("narrow", torch::nn::Linear{4 * features, features});
};
TORCH_MODULE(Block);

struct Transformer : Network {
    torch::Tensor forward(torch::Tensor const& letters) override {
        auto const places = torch::arange(letters.size(1), torch::kLong);
        return head(second(first(letter(letters) + place(places))));
    }

    torch::nn::Embedding letter =
        register_module("letter", torch::nn::Embedding{128, features}); // of ASCII
    torch::nn::Embedding place = register_module("place", torch::nn::Embedding{32, features});
    Block first = register_module("first", Block{});
    Block second = register_module("second", Block{});
    torch::nn::Linear head = register_module("head", torch::nn::Linear{features, 128});
};

std::shared_ptr<Network> make_network(Options const& options) {
    if (options.network == "residual") {
        return std::make_shared<Residual>();
    }
    return std::make_shared<Transformer>();
}

torch::Tensor loss_of(torch::Tensor const& scores, Batch const& batch) {
    return torch::nn::functional::cross_entropy(scores.flatten(0, -2), batch.labels.flatten());
}
double loss_on(Network& network, Batch const& data) {
    torch::NoGradGuard const no_graph;
    return loss_of(network.forward(data.inputs), data).item<double>();
}
/// The share of labels that the network finds, in percent.
double accuracy_on(Network& network, Batch const& data) {
    torch::NoGradGuard const no_graph;
    auto const found = network.forward(data.inputs).argmax(-1).eq(data.labels);
    return 100 * found.to(torch::kDouble).mean().item<double>();
}

torch::optim::SGDOptions settings(Options const& options) {
    return torch::optim::SGDOptions{learning_rate}.momentum(options.momentum);
}

struct Trained {
    std::vector<double> steps;    ///< the loss of each batch of this rank, before its step
    std::vector<double> held_out; ///< after each epoch
    double seconds = 0;           ///< of training
};

/// The work of a rank. `ddp`, `step` and `join` are what distributed training adds.
template <class Comm>
Trained train_together(
    Comm& comm,
    std::vector<Batch> const& shard,
    Batch const& test,
    Options const& options,
    std::shared_ptr<Network> const& network
) {
    torch::optim::SGD optimizer{network->parameters(), settings(options)};
    joinable::torch::DistributedDataParallel ddp{comm, network}; // all get rank 0's values
    joinable::torch::Step step{comm, optimizer};
    Trained trained;
    for (int epoch = 0; epoch < options.epochs; ++epoch) {
        auto const begin = std::chrono::steady_clock::now();
        joinable::Join join{joinable::participants(ddp, step)};
        for (Batch const& batch : shard) {
            optimizer.zero_grad();
            auto const scores = options.is_unweighted // divides by the number of ranks, as PyTorch
                                    ? ddp.forward(batch.inputs)
                                    : ddp.forward({.weight = batch.size()}, batch.inputs);
            auto const loss = loss_of(scores, batch);
            loss.backward();
            step.step();
            trained.steps.push_back(loss.template item<double>());
        }
        join.finish(); // shadows until the last rank has run out
        std::chrono::duration<double> const taken = std::chrono::steady_clock::now() - begin;
        trained.seconds += taken.count();
        trained.held_out.push_back(loss_on(*network, test));
        if (comm.rank() == 0) {
            std::printf("epoch %d: held-out loss %.5f\n", epoch + 1, trained.held_out.back());
            std::fflush(stdout);
        }
    }
    return trained;
}

/// Trains a network on the batches of a round, one after the other, and then steps.
std::vector<double> train_alone(
    std::vector<std::vector<Batch>> const& shards,
    Batch const& test,
    Options const& options,
    Network& network
) {
    torch::optim::SGD optimizer{network.parameters(), settings(options)};
    std::vector<double> losses;
    for (int epoch = 0; epoch < options.epochs; ++epoch) {
        for (std::size_t round = 0; round < shards.back().size(); ++round) {
            double samples = 0;
            for (std::vector<Batch> const& shard : shards) {
                samples += round < shard.size() ? static_cast<double>(shard[round].size()) : 0;
            }
            optimizer.zero_grad();
            for (std::vector<Batch> const& shard : shards) {
                if (round < shard.size()) {
                    Batch const& batch = shard[round];
                    double const share = options.is_unweighted
                                             ? 1. / options.ranks
                                             : static_cast<double>(batch.size()) / samples;
                    (loss_of(network.forward(batch.inputs), batch) * share).backward();
                }
            }
            optimizer.step();
        }
        losses.push_back(loss_on(network, test));
    }
    return losses;
}

using Tensors = c10::Dict<std::string, torch::Tensor>;

/// What compare.py needs to train the same, beside the data.
Tensors inputs_of(Options const& options, Network const& network) {
    Tensors tensors;
    tensors.insert("epochs", torch::tensor(options.epochs));
    tensors.insert("learning_rate", torch::tensor(learning_rate, torch::kDouble));
    tensors.insert("momentum", torch::tensor(options.momentum, torch::kDouble));
    tensors.insert("batch_size", torch::tensor(batch_size));
    for (auto const& parameter : network.named_parameters()) {
        tensors.insert("value." + parameter.key(), parameter.value().detach().clone());
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
    for (std::size_t i = 0; i < one.parameters().size(); ++i) {
        auto const difference = one.parameters()[i].detach() - other.parameters()[i].detach();
        distance = std::max(distance, difference.abs().max().item<double>());
    }
    return distance;
}

} // namespace

int main(int argc, char** argv) {
    Options options;
    CLI::App app{"Trains a network of libtorch over thread ranks with uneven shards, and alone."};
    app.add_option("folder", options.folder, "Of the data, which data.py makes.")
        ->required()
        ->option_text("FOLDER");
    app.add_option(
           "--network",
           options.network,
           "residual (images of digits) or transformer (text). Default: residual."
    )
        ->check(CLI::IsMember({"residual", "transformer"}))
        ->option_text("NAME");
    app.add_option("--dtype", options.dtype, "Of values: f32 or f64. Default: f64.")
        ->check(CLI::IsMember({"f32", "f64"}))
        ->option_text("TYPE");
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
        bool const is_f64 = options.dtype == "f64"; // where differences of rounding stay small
        torch::manual_seed(1);
        torch::set_default_dtype(
            torch::scalarTypeToTypeMeta(is_f64 ? torch::kDouble : torch::kFloat)
        );
        torch::set_num_threads(1); // the ranks are the threads
        Batch const all =
            options.network == "residual" ? read_digits(options.folder) : read_text(options.folder);
        std::int64_t const held_out = all.size() / 5;
        Batch const test = all.part(all.size() - held_out, held_out);
        auto const shards = deal(all.part(0, all.size() - held_out), options.ranks);
        std::vector<std::shared_ptr<Network>> networks;
        std::vector<Trained> trained(shards.size());
        for (std::size_t rank = 0; rank < shards.size(); ++rank) {
            std::printf("rank %zu has %zu batches\n", rank, shards[rank].size());
            networks.push_back(make_network(options));
        }
        std::printf("held out: %lld samples\n", static_cast<long long>(held_out));
        auto const single = make_network(options);
        {
            torch::NoGradGuard const no_graph;
            for (std::size_t i = 0; i < single->parameters().size(); ++i) {
                single->parameters()[i].copy_(networks[0]->parameters()[i]);
            }
        }
        Tensors saved = inputs_of(options, *single);
        joinable::run_threads(options.ranks, [&](joinable::ThreadCommunicator& comm) {
            auto const rank = static_cast<std::size_t>(comm.rank());
            trained[rank] = train_together(comm, shards[rank], test, options, networks[rank]);
        });
        if (!options.save.empty()) {
            for (std::size_t rank = 0; rank < shards.size(); ++rank) {
                saved.insert(
                    "steps." + std::to_string(rank),
                    torch::tensor(trained[rank].steps, torch::kDouble)
                );
            }
            saved.insert("held_out", torch::tensor(trained[0].held_out, torch::kDouble));
            saved.insert("seconds", torch::tensor(trained[0].seconds, torch::kDouble));
            save(options.save, saved);
        }
        std::vector<double> const alone = train_alone(shards, test, options, *single);
        std::vector<double> const& together = trained[0].held_out;
        std::printf("epoch  loss of %2d ranks  loss alone\n", options.ranks);
        for (std::size_t epoch = 0; epoch < alone.size(); ++epoch) {
            std::printf("%5zu %17.5f %11.5f\n", epoch + 1, together[epoch], alone[epoch]);
        }
        double greatest = 0;
        for (std::shared_ptr<Network> const& network : networks) {
            greatest = std::max(greatest, distance(*network, *single));
        }
        std::printf(
            "found: %.1f %% by the network of %d ranks, %.1f %% by the one alone\n"
            "values of any rank differ from those alone by at most %.0e\n",
            accuracy_on(*networks[0], test),
            options.ranks,
            accuracy_on(*single, test),
            greatest
        );
        bool const is_close = std::abs(together.back() - alone.back()) < 0.01 * alone.back();
        return is_close && (greatest < 1e-6 || !is_f64) ? 0 : 1;
    } catch (std::exception const& error) {
        std::fprintf(stderr, "train_libtorch: %s\n", error.what());
        return 1;
    }
}
