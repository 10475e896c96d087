// SPDX-License-Identifier: BSL-1.0
// Files that PyTorch reads and writes, by the names of a libtorch module.
#include <joinable/checkpoint.hpp>
#include <joinable/interop/torch.hpp>

#include <torch/torch.h> // before doctest: both have a macro CHECK

#include <cstdio>
#include <cstdlib>
#include <string>

#include <doctest/doctest.h>

#include <support/folder.hpp>
#include <support/ranks.hpp>

namespace {

using joinable::ThreadCommunicator;
using joinable_tests::contents_of;
using joinable_tests::Folder;
using joinable_tests::run_ranks;
using joinable_tests::write_contents;
using torch::Tensor;

struct ReaderImpl : torch::nn::Module {
    ReaderImpl()
        : embedding{register_module("embedding", torch::nn::Embedding{4, 3})},
          body{register_module(
              "body", torch::nn::Sequential{torch::nn::Linear{3, 2}, torch::nn::BatchNorm1d{2}}
          )} {
        head = register_parameter("head", torch::arange(6, torch::kDouble).reshape({2, 3}).div(7));
        seen = register_buffer("seen", torch::tensor({1, 2}, torch::kShort));
    }

    torch::nn::Embedding embedding;
    torch::nn::Sequential body;
    Tensor head, seen;
};
TORCH_MODULE(Reader);

/// A line as the script below prints it.
std::string line_of(std::string const& name, Tensor const& tensor) {
    std::string const dtype = tensor.scalar_type() == torch::kFloat    ? "float32"
                              : tensor.scalar_type() == torch::kDouble ? "float64"
                              : tensor.scalar_type() == torch::kLong   ? "int64"
                                                                       : "int16";
    std::string line = name + " torch." + dtype + " [";
    for (std::int64_t d = 0; d < tensor.dim(); ++d) {
        line += (d == 0 ? "" : ", ") + std::to_string(tensor.size(d));
    }
    line += "]";
    Tensor const numbers = tensor.detach().to(torch::kDouble).flatten();
    for (std::int64_t i = 0; i < numbers.numel(); ++i) {
        char digits[32];
        std::snprintf(digits, sizeof digits, " %.17g", numbers[i].item<double>());
        line += digits;
    }
    return line + "\n";
}

TEST_CASE(
    "PyTorch reads what torch::save and Checkpoint write of a module, and Checkpoint what it writes"
) {
    if (std::system("python3 -c 'import torch, safetensors.torch' 2>/dev/null"
        ) != // NOLINT(concurrency-mt-unsafe)
        0) {
        std::puts("skipped: python3 has no torch and safetensors");
        return;
    }
    Folder const folder;
    std::string const saved = folder.file("saved.pt");
    std::string const ours = folder.file("ours.safetensors");
    std::string const theirs = folder.file("theirs.safetensors");
    std::string const text = folder.file("text");
    Reader model;
    torch::save(model, saved);
    auto const copy_to = [&](Reader const& other) {
        torch::NoGradGuard const no_graph;
        auto const parameters = model->parameters();
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            other->parameters()[i].copy_(parameters[i]);
        }
    };
    run_ranks({2}, [&](ThreadCommunicator& comm) {
        Reader mine;
        copy_to(mine);
        joinable::ZeroRedundancyOptimizer zero{
            comm, joinable::torch::parameters(mine), joinable::Adam{}
        };
        joinable::Checkpoint save{zero, ours};
        for (auto& buffer : mine->named_buffers()) {
            save.attach(buffer.key(), Tensor{buffer.value()});
        }
        save.write();
    });
    write_contents(folder.file("turn.py"), R"(import sys
import torch
from safetensors.torch import load_file, save_file
saved, ours, theirs, text = sys.argv[1:]
state = torch.jit.load(saved).state_dict()
with open(text, "w") as out:
    for prefix, tensors in ("saved ", state), ("ours ", load_file(ours)):
        for name, tensor in tensors.items():
            numbers = "".join(" %.17g" % float(x) for x in tensor.flatten())
            out.write(f"{prefix}{name} {tensor.dtype} {list(tensor.shape)}{numbers}\n")
save_file({name: tensor + 1 for name, tensor in state.items()}, theirs, {"format": "pt"})
)");
    std::string const command =
        "python3 " + folder.file("turn.py") + " " + saved + " " + ours + " " + theirs + " " + text;
    REQUIRE(std::system(command.c_str()) == 0); // NOLINT(concurrency-mt-unsafe)
    std::string const lines = "\n" + contents_of(text);
    auto const has = [&](std::string const& prefix, auto const& items) {
        for (auto const& item : items) {
            std::string const line = line_of(item.key(), item.value());
            CHECK_MESSAGE(
                lines.find("\n" + prefix + line) != std::string::npos,
                prefix,
                line,
                "is not in ",
                lines
            );
        }
    };
    has("saved ", model->named_parameters());
    has("saved ", model->named_buffers());
    has("ours ", model->named_parameters());
    has("ours ", model->named_buffers());
    run_ranks({1, 2, 3}, [&](ThreadCommunicator& comm) {
        Reader mine;
        joinable::ZeroRedundancyOptimizer zero{
            comm, joinable::torch::parameters(mine), joinable::Adam{}
        };
        joinable::Checkpoint save{zero, folder.file("none")};
        auto const parameters = model->named_parameters();
        save.read_values(theirs, parameters.keys()); // it has buffers, too
        for (auto const& item : mine->named_parameters()) {
            CHECK(torch::equal(item.value(), parameters[item.key()] + 1));
        }
        auto const buffers = model->named_buffers();
        for (auto& buffer : mine->named_buffers()) {
            save.attach(buffer.key(), Tensor{buffer.value()});
        }
        save.read_values(theirs, buffers.keys());
        for (auto const& item : mine->named_buffers()) {
            CHECK(torch::equal(item.value(), buffers[item.key()] + 1));
        }
    });
}

} // namespace
