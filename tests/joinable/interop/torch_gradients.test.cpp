// SPDX-License-Identifier: BSL-1.0
// Gradients of a libtorch module in memory that autograd, or the user, still reads.
#include <joinable/interop/torch.hpp>

#include <torch/torch.h> // before doctest: both have a macro CHECK

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <support/meeting.hpp>
#include <support/process_ranks.hpp>
#include <support/ranks.hpp>
#include <support/shared.hpp>

#include <joinable/communicator/self.hpp>

namespace {

using joinable::DataParallelOptions;
using joinable_tests::Meeting;
using joinable_tests::run_process_ranks;
using joinable_tests::run_ranks;
using joinable_tests::Shared;
using torch::Tensor;

Tensor row(double value) {
    return torch::full({1, 2}, value, torch::kDouble);
}
/// Whether `tensor` has two elements, both `value`.
bool is_twice(Tensor const& tensor, double value) {
    return tensor.numel() == 2 && (tensor - value).abs().max().item<double>() < 1e-13 * value;
}
/// The mean of `of(rank)`.
double mean(int ranks, std::function<double(int)> const& of) {
    double sum = 0;
    for (int rank = 0; rank < ranks; ++rank) {
        sum += of(rank);
    }
    return sum / ranks;
}
double input_of(int rank) {
    return 1 + 2.0 * rank;
}
double cost_of(int rank) {
    return 1 + 4.0 * rank;
}

/// (w x + q x) + p, whose gradient with respect to p is that of the sum, from which those of w and q follow. Autograd
/// has that of p first.
struct ShiftImpl : torch::nn::Module {
    explicit ShiftImpl(std::function<void()> meet)
        : meet_{std::move(meet)}, w{register_parameter("w", row(1))},
          q{register_parameter("q", row(1))},
          p{register_parameter("p", torch::ones({2}, torch::kDouble))} {}

    Tensor forward(Tensor const& x) {
        Tensor const by_w = x * w; // the last to run backwards
        Tensor const by_q = x * q;
        Tensor const sum = by_w + by_q;
        if (by_w.requires_grad()) {
            by_q.register_hook([this](Tensor const&) { meet_(); }); // the bucket of p has left
            by_w.register_hook([this](Tensor const&) { meet_(); }); // and was summed with that of q
        }
        return sum + p.unsqueeze(0);
    }

private:
    std::function<void()> meet_;

public:
    Tensor w, q, p;
};
TORCH_MODULE(Shift);

template <class Comm>
void check_shift(Comm& comm, Meeting& meeting, DataParallelOptions const& options) {
    Shift model{[&] { meeting.meet(); }};
    joinable::torch::DistributedDataParallel ddp{comm, model, options};
    double const x = input_of(comm.rank());
    double const c = cost_of(comm.rank());
    double const product =
        mean(comm.size(), [](int rank) { return input_of(rank) * cost_of(rank); });
    std::vector<Tensor> kept; // by the user
    model->w.register_hook([&](Tensor const& made) { kept.push_back(made.detach()); });
    for (int round = 0; round < 3; ++round) {
        model->zero_grad(true);
        int const passes =
            round == 2 ? 2 : 1; // the last of them adds to the gradients of the first
        if (passes == 2) {
            auto const local = ddp.no_sync();
            (ddp.forward(row(x)) * row(c)).sum().backward();
        }
        (ddp.forward(row(x)) * row(c)).sum().backward();
        CHECK(is_twice(model->p.grad(), passes * mean(comm.size(), cost_of)));
        CHECK(is_twice(model->q.grad(), passes * product));
        CHECK(is_twice(model->w.grad(), passes * product));
        for (Tensor const& made : kept) {
            CHECK(is_twice(made, x * c));
        }
    }
}

TEST_CASE("a gradient that is a view is averaged apart from what autograd still reads") {
    for (bool const views : {false, true}) {
        for (bool const finds_unused : {false, true}) {
            CAPTURE(views);
            CAPTURE(finds_unused);
            DataParallelOptions const options{
                .bucket_cap_bytes = 4,
                .first_bucket_bytes = 4,
                .gradient_as_bucket_view = views,
                .find_unused = finds_unused,
                .rebuild_buckets = false
            };
            for (int const ranks : {1, 2, 3, 4, 8}) {
                Meeting meeting{ranks};
                run_ranks({ranks}, [&](joinable::ThreadCommunicator& comm) {
                    check_shift(comm, meeting, options);
                });
            }
            Shared<Meeting> const meeting{2};
            run_process_ranks(
                {2},
                [&](joinable::ProcessCommunicator& comm) { check_shift(comm, *meeting, options); },
                {.other_threads = true}
            );
        }
    }
}

/// a + b as rows, so that both gradients are views of one.
struct SumOfTwoImpl : torch::nn::Module {
    SumOfTwoImpl()
        : a{register_parameter("a", torch::ones({2}, torch::kDouble))},
          b{register_parameter("b", torch::ones({2}, torch::kDouble))} {}
    Tensor forward(Tensor const& x) { return (a.unsqueeze(0) + b.unsqueeze(0)) * x; }

    Tensor a, b;
};
TORCH_MODULE(SumOfTwo);

TEST_CASE("gradients of two parameters that are views of one are averaged, each once") {
    for (std::string const how : {"", "views", "in buckets of their own", "accumulated"}) {
        CAPTURE(how);
        run_ranks({1, 2, 3, 4, 8}, [&](joinable::ThreadCommunicator& comm) {
            SumOfTwo model;
            joinable::torch::DistributedDataParallel ddp{
                comm,
                model,
                {.bucket_cap_bytes = how == "in buckets of their own" ? 4U : 1U << 20U,
                 .gradient_as_bucket_view = how == "views"}
            };
            std::vector<Tensor> kept; // by the user
            model->b.register_hook([&](Tensor const& made) { kept.push_back(made); });
            for (int round = 0; round < 3; ++round) {
                model->zero_grad(true);
                double const x = input_of(comm.rank());
                double expected = mean(comm.size(), input_of);
                if (how == "accumulated") {
                    auto const local = ddp.no_sync();
                    (ddp.forward(row(x)) * row(1)).sum().backward();
                    expected *= 2;
                }
                (ddp.forward(row(x)) * row(1)).sum().backward();
                CHECK(is_twice(model->a.grad(), expected));
                CHECK(is_twice(model->b.grad(), expected));
                for (Tensor const& made : kept) {
                    CHECK(is_twice(made, x));
                }
            }
        });
    }
}

TEST_CASE("gradients that nobody else reads stay in the memory where autograd has made them") {
    torch::nn::Sequential model{
        torch::nn::Conv1d{torch::nn::Conv1dOptions{1, 1, 3}.padding(1)},
        torch::nn::LayerNorm{torch::nn::LayerNormOptions{{4}}},
        torch::nn::Linear{4, 3},
        torch::nn::Tanh{},
        torch::nn::Linear{3, 2}
    };
    auto const parameters = model->parameters();
    std::vector<void const*> made(parameters.size(), nullptr);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        parameters[i].register_hook([&made, i](Tensor const& gradient) {
            made[i] = gradient.data_ptr();
        });
    }
    joinable::SelfCommunicator comm;
    joinable::torch::DistributedDataParallel ddp{comm, model};
    for (std::int64_t const samples : {1, 2, 5}) {
        model->zero_grad(true);
        ddp.forward(torch::ones({samples, 1, 4})).pow(2).sum().backward();
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            CAPTURE(i);
            CHECK(parameters[i].grad().data_ptr() == made[i]);
        }
    }
}

} // namespace
