// SPDX-License-Identifier: BSL-1.0
// An iteration of a perceptron by cuBLAS, which ddp_torch.py measures with PyTorch: see ../gpu.sh.

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <string>
#include <utility>

#include <cublas_v2.h>
#include <gpu/measurements.hpp>

namespace {

using namespace joinable_gpu;
using Hosts = joinable::ProcessCommunicator;

constexpr std::size_t layers = 8;
constexpr std::size_t width = 1768;
constexpr int batch = 32;

void blas(cublasStatus_t status) {
    expect(
        status == CUBLAS_STATUS_SUCCESS, std::string{"cuBLAS: "} + cublasGetStatusString(status)
    );
}

/// What PyTorch's nn.Linear without a bias computes, layer after layer, and the gradients of the sum of its outputs.
/// Matrices are rows of outputs, as PyTorch keeps them; cuBLAS sees their transposes.
class Perceptron {
public:
    explicit Perceptron(cudaStream_t stream)
        : ones_{std::vector<float>(batch * width, 1.0F), stream} {
        blas(cublasCreate(&blas_));
        blas(cublasSetStream(blas_, stream));
        std::vector<float> inputs(batch * width);
        for (std::size_t i = 0; i < inputs.size(); ++i) {
            inputs[i] = input_of(i / width, i % width);
        }
        outputs_.emplace_back(std::move(inputs), stream);
        for (std::size_t layer = 0; layer < layers; ++layer) {
            outputs_.emplace_back(batch * width);
        }
        for (std::size_t i = 0; i < 2; ++i) {
            errors_.emplace_back(batch * width);
        }
    }
    Perceptron(Perceptron const&) = delete;
    Perceptron& operator=(Perceptron const&) = delete;
    ~Perceptron() { cublasDestroy(blas_); }

    /// Each layer hands its input i on as output i + 1: so element (o, i) of the gradient of layer l is the sum of
    /// the inputs i - l, whatever o.
    template <class Hosts>
    void check(Rank<Hosts>& rank) {
        std::vector<float> next(width * width);
        for (std::size_t i = 0; i < width; ++i) {
            next[(i + 1) % width * width + i] = 1;
        }
        std::vector<Param> params;
        for (std::size_t layer = 0; layer < layers; ++layer) {
            auto& param = params.emplace_back(joinable::DType::f32, next.size(), rank.device);
            std::size_t const bytes = next.size() * sizeof(float);
            cuda(cudaMemcpyAsync(
                param.value.data(), next.data(), bytes, cudaMemcpyHostToDevice, rank.stream
            ));
        }
        forward(params);
        backward(params, [](std::size_t) {});
        for (std::size_t layer = 0; layer < layers; ++layer) {
            std::size_t const bytes = next.size() * sizeof(float);
            cuda(cudaMemcpyAsync(
                next.data(), params[layer].grad.data(), bytes, cudaMemcpyDeviceToHost, rank.stream
            ));
            rank.comm.synchronize();
            for (std::size_t e = 0; e < next.size(); ++e) {
                float sum = 0;
                for (std::size_t b = 0; b < batch; ++b) {
                    sum += input_of(b, (e % width + width - layer) % width);
                }
                expect(
                    next[e] == sum,
                    "element " + std::to_string(e) + " of the gradient of layer " +
                        std::to_string(layer) + " is wrong"
                );
            }
        }
    }

    void forward(std::vector<Param> const& params) {
        for (std::size_t layer = 0; layer < layers; ++layer) {
            multiply(
                {CUBLAS_OP_T, CUBLAS_OP_N, side, batch, side},
                params[layer].value.data(),
                outputs_[layer].buffer().data,
                outputs_[layer + 1].buffer().data
            );
        }
    }
    template <class Ready>
    void backward(std::vector<Param> const& params, Ready const& ready) {
        void* error = ones_.buffer().data;
        for (std::size_t layer = layers; layer-- > 0;) {
            multiply(
                {CUBLAS_OP_N, CUBLAS_OP_T, side, side, batch},
                outputs_[layer].buffer().data,
                error,
                params[layer].grad.data()
            );
            ready(layer);
            if (layer > 0) { // nobody asks for the gradient of the inputs
                void* const next = errors_[layer % 2].buffer().data;
                multiply(
                    {CUBLAS_OP_N, CUBLAS_OP_N, side, batch, side},
                    params[layer].value.data(),
                    error,
                    next
                );
                error = next;
            }
        }
    }

private:
    static constexpr int side = static_cast<int>(width);

    /// A small integer, so that sums are exact.
    static float input_of(std::size_t row, std::size_t column) {
        return static_cast<float>((row + 3 * column) % 7);
    }
    struct Product {
        cublasOperation_t left, right;
        int rows, columns, inner;
    };

    void multiply(Product const& product, void const* left, void const* right, void* result) {
        float const one = 1;
        float const zero = 0;
        blas(cublasSgemm(
            blas_,
            product.left,
            product.right,
            product.rows,
            product.columns,
            product.inner,
            &one,
            static_cast<float const*>(left),
            side,
            static_cast<float const*>(right),
            side,
            &zero,
            static_cast<float*>(result),
            side
        ));
    }

    cublasHandle_t blas_ = nullptr;
    DeviceArray<float> ones_;
    std::vector<DeviceArray<float>> outputs_; ///< of all layers; the first are the inputs
    std::vector<DeviceArray<float>> errors_;
};

} // namespace

int main(int argc, char** argv) {
    int const ranks = argc == 3 ? std::atoi(argv[1]) : 0;
    if (ranks < 1) {
        std::fprintf(stderr, "usage: %s <ranks> <file for ddp_torch.py>\n", argv[0]);
        return 2;
    }
    try {
        joinable::run_processes(ranks, [&](Hosts& hosts) {
            hosts.set_deadline(std::chrono::seconds{60});
            Rank<Hosts> rank{hosts, kernels()};
            Perceptron perceptron{rank.stream};
            perceptron.check(rank);
            Exposed const exposed = measure_iteration(rank, perceptron, layers, width, 11);
            if (hosts.rank() == 0) {
                std::ofstream file{argv[2]};
                file << exposed.copies << ' ' << exposed.views << ' ' << exposed.passes << '\n';
                expect(static_cast<bool>(file), std::string{"cannot write "} + argv[2]);
            }
        });
        return 0;
    } catch (std::exception const& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
