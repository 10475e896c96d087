// SPDX-License-Identifier: BSL-1.0
// An iteration of a perceptron by cuBLAS, which ddp_torch.py measures with PyTorch: see ../gpu.sh.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <cublas_v2.h>
#include <gpu/iteration.hpp>

namespace {

using namespace joinable_gpu;
using Hosts = joinable::ProcessCommunicator;

constexpr std::size_t layers = 8;
constexpr std::size_t width = 1768;

void blas(cublasStatus_t status) {
    expect(
        status == CUBLAS_STATUS_SUCCESS, std::string{"cuBLAS: "} + cublasGetStatusString(status)
    );
}

/// What PyTorch's nn.Linear without a bias computes, layer after layer, and the gradients of the sum of its outputs.
/// Matrices are rows of outputs, as PyTorch keeps them; cuBLAS sees their transposes. Elements are T, sums are f32.
template <class T>
class Perceptron {
public:
    static constexpr joinable::DType dtype = joinable::dtype_of<T>;

    /// `batch` is a multiple of 32.
    Perceptron(cudaStream_t stream, std::size_t batch)
        : stream_{stream}, batch_{batch}, ones_{std::vector<T>(batch * width, T{1.0F}), stream},
          inputs_(batch * width), matrix_(width * width) {
        blas(cublasCreate(&blas_));
        blas(cublasSetStream(blas_, stream));
        for (std::size_t i = 0; i < inputs_.size(); ++i) {
            inputs_[i] = T{integer_of(i / width, i % width)};
        }
        outputs_.emplace_back(inputs_, stream);
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

    /// Before initialize(). Each layer hands its input i on as output i + 1: so element (o, i) of the gradient of
    /// layer l is the sum of the inputs i - l, whatever o.
    template <class Hosts>
    void check(Rank<Hosts>& rank) {
        for (std::size_t i = 0; i < width; ++i) {
            matrix_[(i + 1) % width * width + i] = T{1.0F};
        }
        std::vector<Param> params;
        for (std::size_t layer = 0; layer < layers; ++layer) {
            params.emplace_back(dtype, matrix_.size(), rank.device);
        }
        upload(params);
        forward(params);
        backward(params, [](std::size_t) {});
        std::vector<float> sums(width);
        for (std::size_t row = 0; row < batch_; ++row) {
            for (std::size_t column = 0; column < width; ++column) {
                sums[column] += integer_of(row, column);
            }
        }
        std::vector<T> gradient(matrix_.size());
        for (std::size_t layer = 0; layer < layers; ++layer) {
            cuda(cudaMemcpyAsync(
                gradient.data(),
                params[layer].grad.data(),
                gradient.size() * sizeof(T),
                cudaMemcpyDeviceToHost,
                stream_
            ));
            rank.comm.synchronize();
            for (std::size_t e = 0; e < gradient.size(); ++e) {
                if (static_cast<float>(gradient[e]) != sums[(e % width + width - layer) % width]) {
                    expect(
                        false,
                        "element " + std::to_string(e) + " of the gradient of layer " +
                            std::to_string(layer) + " is wrong"
                    );
                }
            }
        }
    }

    /// Inputs and values as training has them: zeros and integers take less power.
    void initialize(std::vector<Param> const& params) {
        std::minstd_rand generator;
        std::uniform_real_distribution<float> uniform{-1, 1};
        for (T& element : matrix_) {
            element = T{uniform(generator) / std::sqrt(static_cast<float>(width))};
        }
        upload(params);
        for (T& input : inputs_) {
            input = T{uniform(generator)};
        }
        cuda(cudaMemcpyAsync(
            outputs_[0].buffer().data,
            inputs_.data(),
            inputs_.size() * sizeof(T),
            cudaMemcpyHostToDevice,
            stream_
        ));
    }

    void forward(std::vector<Param> const& params) {
        for (std::size_t layer = 0; layer < layers; ++layer) {
            multiply(
                {CUBLAS_OP_T, CUBLAS_OP_N, side, rows(), side},
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
                {CUBLAS_OP_N, CUBLAS_OP_T, side, side, rows()},
                outputs_[layer].buffer().data,
                error,
                params[layer].grad.data()
            );
            ready(layer);
            if (layer > 0) { // nobody asks for the gradient of the inputs
                void* const next = errors_[layer % 2].buffer().data;
                multiply(
                    {CUBLAS_OP_N, CUBLAS_OP_N, side, rows(), side},
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
    [[nodiscard]] int rows() const { return static_cast<int>(batch_); }

    /// An integer of 32 rows, and 0 in the others: sums are below 256, so they are exact in 16 bits, too.
    [[nodiscard]] float integer_of(std::size_t row, std::size_t column) const {
        std::size_t const every = batch_ / 32;
        return row % every == 0 ? static_cast<float>((row / every + 3 * column) % 7) : 0.0F;
    }

    /// `matrix_` into all parameters.
    void upload(std::vector<Param> const& params) {
        for (Param const& param : params) {
            std::size_t const bytes = matrix_.size() * sizeof(T);
            cuda(cudaMemcpyAsync(
                param.value.data(), matrix_.data(), bytes, cudaMemcpyHostToDevice, stream_
            ));
        }
    }

    struct Product {
        cublasOperation_t left, right;
        int rows, columns, inner;
    };

    void multiply(Product const& product, void const* left, void const* right, void* result) {
        constexpr cudaDataType_t type = sizeof(T) == 4 ? CUDA_R_32F : CUDA_R_16BF;
        float const one = 1;
        float const zero = 0;
        blas(cublasGemmEx(
            blas_,
            product.left,
            product.right,
            product.rows,
            product.columns,
            product.inner,
            &one,
            left,
            type,
            side,
            right,
            type,
            side,
            &zero,
            result,
            type,
            side,
            CUBLAS_COMPUTE_32F,
            CUBLAS_GEMM_DEFAULT
        ));
    }

    cudaStream_t stream_;
    std::size_t batch_;
    cublasHandle_t blas_ = nullptr;
    DeviceArray<T> ones_;
    std::vector<T> inputs_; ///< read in the order of the stream, like matrix_
    std::vector<T> matrix_;
    std::vector<DeviceArray<T>> outputs_; ///< of all layers; the first are the inputs
    std::vector<DeviceArray<T>> errors_;
};

template <class T>
void measure(Rank<Hosts>& rank, std::size_t batch, std::FILE* file) {
    Perceptron<T> perceptron{rank.stream, batch};
    perceptron.check(rank);
    std::string const name =
        std::string{joinable::name_of(joinable::dtype_of<T>)} + ' ' + std::to_string(batch);
    if (rank.hosts.rank() == 0) {
        std::printf("%s: all gradients are exact\n", name.c_str());
    }
    auto const iterations = measure_iteration(rank, perceptron, layers, width, 11);
    if (rank.hosts.rank() == 0) {
        write(file, name + " joinable", iterations);
    }
}

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
            std::unique_ptr<std::FILE, int (*)(std::FILE*)> file{nullptr, std::fclose};
            if (hosts.rank() == 0) {
                file.reset(std::fopen(argv[2], "w"));
                expect(file != nullptr, std::string{"cannot write "} + argv[2]);
            }
            Rank<Hosts> rank{hosts, kernels()};
            for (std::size_t const batch : {std::size_t{32}, std::size_t{4096}}) {
                measure<float>(rank, batch, file.get());
                measure<joinable::BFloat16>(rank, batch, file.get());
            }
        });
        return 0;
    } catch (std::exception const& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
