// SPDX-License-Identifier: BSL-1.0
// An iteration of a perceptron over two ranks, one core each: alone, averaged by DistributedDataParallel (gradients on the
// heap, in the buckets, in an arena), alone with one flat all-reduce of as many gradients after it, and that all-reduce alone. mlp.sh runs this beside PyTorch; each line of the output is
// "<name> <model> <what> <microseconds>", the median on rank 0 of one block of iterations.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <cblas.h>
#include <pthread.h>
#include <sched.h>

#include <joinable/join.hpp>

#if defined(MLP_WITH_GLOO) // mlp.sh finds out what there is
#include <sys/wait.h>
#include <unistd.h>

#include <joinable/gloo.hpp>
#endif
#if defined(MLP_WITH_MPI)
#include <joinable/mpi.hpp>
#endif

#include "weights.hpp"

namespace {

constexpr std::size_t batch = 32;
constexpr std::size_t classes = 10;

using joinable_benchmarks::Weights;

/// Normally distributed around 0.
void draw(std::vector<float>& numbers, float scale, std::mt19937& random) {
    std::normal_distribution<float> normal;
    std::generate(numbers.begin(), numbers.end(), [&] { return scale * normal(random); });
}

/// Linear layers with rectified ones between, and the cross entropy of a softmax over the last.
class Perceptron {
public:
    explicit Perceptron(std::vector<std::size_t> widths) : widths_{std::move(widths)} {
        std::mt19937 random{1};
        for (std::size_t layer = 0; layer + 1 < widths_.size(); ++layer) {
            auto const in = widths_[layer];
            auto const out = widths_[layer + 1];
            Weights& weights = parameters_.emplace_back(in * out);
            draw(weights.value, 1.0F / std::sqrt(static_cast<float>(in)), random);
            parameters_.emplace_back(out, 0.0F);
        }
        for (std::size_t const width : widths_) {
            activations_.emplace_back(batch * width);
            deltas_.emplace_back(batch * width);
        }
        draw(activations_[0], 1.0F, random);
    }

    [[nodiscard]] std::vector<Weights>& parameters() { return parameters_; }
    [[nodiscard]] std::size_t numel() const {
        std::size_t numel = 0;
        for (Weights const& weights : parameters_) {
            numel += weights.value.size();
        }
        return numel;
    }

    /// Moves the gradients to this memory, one after another.
    void put_gradients(std::byte* memory) {
        auto* place = reinterpret_cast<float*>(memory);
        for (Weights& weights : parameters_) {
            std::span<float> const gradient{place, weights.value.size()};
            weights.grad = joinable::AnyView{gradient};
            place += gradient.size();
        }
    }

    void forward() {
        for (std::size_t layer = 0; layer + 1 < widths_.size(); ++layer) {
            auto const in = widths_[layer];
            auto const out = widths_[layer + 1];
            std::vector<float> const& bias = parameters_[2 * layer + 1].value;
            float* const y = activations_[layer + 1].data();
            for (std::size_t row = 0; row < batch; ++row) {
                std::copy(bias.begin(), bias.end(), y + row * out);
            }
            float const* const w = parameters_[2 * layer].value.data();
            multiply(
                CblasNoTrans,
                CblasTrans,
                batch,
                out,
                in,
                activations_[layer].data(),
                in,
                w,
                in,
                1,
                y,
                out
            );
            if (layer + 2 < widths_.size()) {
                for (float& number : activations_[layer + 1]) {
                    number = (std::max)(number, 0.0F);
                }
            }
        }
    }

    /// Calls ready(i) as soon as gradient i is final.
    template <class Ready>
    void backward(Ready const& ready) {
        derive_loss();
        for (std::size_t layer = widths_.size() - 1; layer-- > 0;) {
            auto const in = widths_[layer];
            auto const out = widths_[layer + 1];
            float const* const delta = deltas_[layer + 1].data();
            float* const bias_grad = gradient(2 * layer + 1);
            std::fill_n(bias_grad, out, 0.0F);
            for (std::size_t row = 0; row < batch; ++row) {
                for (std::size_t i = 0; i < out; ++i) {
                    bias_grad[i] += delta[row * out + i];
                }
            }
            ready(2 * layer + 1);
            multiply(
                CblasTrans,
                CblasNoTrans,
                out,
                in,
                batch,
                delta,
                out,
                activations_[layer].data(),
                in,
                0,
                gradient(2 * layer),
                in
            );
            ready(2 * layer);
            if (layer != 0) {
                float* const before = deltas_[layer].data();
                float const* const w = parameters_[2 * layer].value.data();
                multiply(
                    CblasNoTrans, CblasNoTrans, batch, in, out, delta, out, w, in, 0, before, in
                );
                for (std::size_t i = 0; i < batch * in; ++i) {
                    before[i] = activations_[layer][i] > 0 ? before[i] : 0;
                }
            }
        }
    }

private:
    static void multiply(
        CBLAS_TRANSPOSE transpose_a,
        CBLAS_TRANSPOSE transpose_b,
        std::size_t m,
        std::size_t n,
        std::size_t k,
        float const* a,
        std::size_t row_a,
        float const* b,
        std::size_t row_b,
        float keep,
        float* c,
        std::size_t row_c
    ) {
        auto const number = [](std::size_t size) { return static_cast<blasint>(size); };
        cblas_sgemm(
            CblasRowMajor,
            transpose_a,
            transpose_b,
            number(m),
            number(n),
            number(k),
            1,
            a,
            number(row_a),
            b,
            number(row_b),
            keep,
            c,
            number(row_c)
        );
    }
    [[nodiscard]] float* gradient(std::size_t i) const {
        return parameters_[i].grad.as<float>().data();
    }
    void derive_loss() {
        for (std::size_t row = 0; row < batch; ++row) {
            float const* const scores = activations_.back().data() + row * classes;
            float* const delta = deltas_.back().data() + row * classes;
            float const most = *std::max_element(scores, scores + classes);
            float sum = 0;
            for (std::size_t i = 0; i < classes; ++i) {
                delta[i] = std::exp(scores[i] - most);
                sum += delta[i];
            }
            for (std::size_t i = 0; i < classes; ++i) {
                delta[i] = (delta[i] / sum - (i == row % classes ? 1.0F : 0.0F)) / batch;
            }
        }
    }

    std::vector<std::size_t> widths_;
    std::vector<Weights> parameters_;
    std::vector<std::vector<float>> activations_;
    std::vector<std::vector<float>> deltas_;
};

double median(std::vector<double> values) {
    auto const middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
}

struct Model {
    std::string_view name;
    std::vector<std::size_t> widths;
    int iterations; ///< of a block
};

/// This thread, and those that it starts from now on.
void pin(int rank) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(static_cast<unsigned>(rank) % std::thread::hardware_concurrency(), &cores);
    pthread_setaffinity_np(pthread_self(), sizeof(cores), &cores);
}

template <class Comm>
void measure_rank(Comm& comm, std::string_view name, int blocks) {
    pin(comm.rank());
    Model const models[] = {
        {"small", {256, 256, 256, classes}, 300}, {"large", {1024, 2048, 2048, classes}, 20}
    };
    for (Model const& model : models) {
        Perceptron alone{model.widths};
        Perceptron averaged{model.widths};
        Perceptron viewed{model.widths};
        Perceptron shared{model.widths};
        joinable::Arena const gradients = joinable::make_arena(comm, alone.numel() * sizeof(float));
        shared.put_gradients(gradients.data());
        joinable::DistributedDataParallel ddp{comm, averaged.parameters()};
        joinable::DistributedDataParallel ddp_view{
            comm, viewed.parameters(), {.gradient_as_bucket_view = true}
        };
        joinable::DistributedDataParallel ddp_arena{comm, shared.parameters()};
        joinable::Arena const arena = joinable::make_arena(comm, alone.numel() * sizeof(float));
        joinable::Buffer const flat{arena.data(), alone.numel(), joinable::DType::f32};
        auto const iterate = [](Perceptron& perceptron, auto& replica) {
            replica.forward([&] { perceptron.forward(); });
            replica.backward([&](auto ready) { perceptron.backward(ready); });
        };
        auto const run = [&](std::string_view what) {
            if (what == "local" || what == "local_then_sum") {
                alone.forward();
                alone.backward([](std::size_t) {});
                if (what ==
                    "local") { // until both ranks are through: what is more is communication
                    comm.barrier();
                } else { // with the caches as a pass leaves them
                    comm.all_reduce(flat, joinable::ReduceOp::sum).wait();
                }
            } else if (what == "ddp") {
                iterate(averaged, ddp);
            } else if (what == "ddp_view") {
                iterate(viewed, ddp_view);
            } else if (what == "ddp_arena") {
                iterate(shared, ddp_arena);
            } else {
                comm.all_reduce(flat, joinable::ReduceOp::sum).wait();
            }
        };
        std::vector<std::string_view> order{
            "local", "ddp", "ddp_view", "ddp_arena", "local_then_sum", "all_reduce"
        };
        for (int block = -1; block < blocks; ++block) { // the first one warms up
            for (std::string_view const what : order) {
                std::vector<double> times;
                for (int i = 0; i < (block < 0 ? 5 : model.iterations); ++i) {
                    auto const start = std::chrono::steady_clock::now();
                    run(what);
                    std::chrono::duration<double, std::micro> const time =
                        std::chrono::steady_clock::now() - start;
                    times.push_back(time.count());
                }
                if (comm.rank() == 0 && block >= 0) {
                    std::printf(
                        "%s %s %s %.2f\n",
                        name.data(),
                        model.name.data(),
                        what.data(),
                        median(times)
                    );
                    std::fflush(stdout);
                }
            }
            std::rotate(order.begin(), order.begin() + 1, order.end());
        }
    }
}

#if defined(MLP_WITH_GLOO)
void measure_gloo_rank(
    int rank, std::string const& address, std::string const& folder, int blocks
) {
    pin(rank); // as are the threads that the communicator starts
    joinable::GlooCommunicator comm{
        {.rank = rank, .size = 2, .store = joinable::GlooFile{folder + "/ranks"}, .address = address
        }
    };
    measure_rank(comm, "gloo", blocks);
}
#endif

} // namespace

int main(int count, char** arguments) {
    std::string_view const name = count >= 3 ? arguments[1] : "";
    if (name == "threads") {
        joinable::run_threads(2, [&](auto& comm) {
            measure_rank(comm, name, std::atoi(arguments[2]));
        });
    } else if (name == "processes") {
        joinable::run_processes(2, [&](auto& comm) {
            measure_rank(comm, name, std::atoi(arguments[2]));
        });
#if defined(MLP_WITH_GLOO)
    } else if (name == "gloo" &&
               count == 6) { // the rank of a machine, its address, a folder of both
        measure_gloo_rank(
            std::atoi(arguments[3]), arguments[4], arguments[5], std::atoi(arguments[2])
        );
    } else if (name == "gloo") {
        char folder[] = "/tmp/joinable_mlp.XXXXXX";
        if (mkdtemp(folder) == nullptr) {
            std::perror(folder);
            return 1;
        }
        pid_t const other = fork();
        measure_gloo_rank(other == 0 ? 1 : 0, "127.0.0.1", folder, std::atoi(arguments[2]));
        if (other != 0) {
            waitpid(other, nullptr, 0);
            rmdir(folder);
        }
#endif
#if defined(MLP_WITH_MPI)
    } else if (name == "mpi") { // mpirun -n 2
        MPI_Init(&count, &arguments);
        {
            joinable::MpiCommunicator comm{MPI_COMM_WORLD};
            measure_rank(comm, name, std::atoi(arguments[2]));
        }
        MPI_Finalize();
#endif
    } else {
        std::fputs("expected threads, processes, gloo or mpi, and a number of blocks\n", stderr);
        return 1;
    }
}
