// SPDX-License-Identifier: BSL-1.0
// A tensor class of an imaginary engine takes part without being touched: fifteen lines of traits.
#include <joinable/join.hpp>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <vector>

// ---- the engine, as it was before it heard of joinable ------------------------------------------

namespace house {

enum class Kind { single_precision, double_precision };

/// Copies share their storage; a transposed tensor is a view of the same numbers.
class Tensor {
public:
    Tensor(std::vector<std::int64_t> shape, Kind kind)
        : shape_{std::move(shape)}, kind_{kind} {
        std::int64_t stride = 1;
        steps_.resize(shape_.size());
        for (std::size_t d = shape_.size(); d-- > 0; stride *= shape_[d]) {
            steps_[d] = stride;
        }
        storage_ = std::make_shared<std::vector<double>>(static_cast<std::size_t>(stride));
    }
    [[nodiscard]] Tensor transposed() const {
        Tensor other = *this;
        std::swap(other.shape_[0], other.shape_[1]);
        std::swap(other.steps_[0], other.steps_[1]);
        return other;
    }
    [[nodiscard]] void* raw() const { return storage_->data(); }
    [[nodiscard]] Kind kind() const { return kind_; }
    [[nodiscard]] std::vector<std::int64_t> const& shape() const { return shape_; }
    [[nodiscard]] std::vector<std::int64_t> const& steps() const { return steps_; }
    [[nodiscard]] double& at(std::int64_t i, std::int64_t j) const {
        return (*storage_)[static_cast<std::size_t>(i * steps_[0] + j * steps_[1])];
    }

private:
    std::vector<std::int64_t> shape_;
    std::vector<std::int64_t> steps_;
    std::shared_ptr<std::vector<double>> storage_;
    Kind kind_;
};

struct Weight {
    Tensor value;
    Tensor grad;
};

} // namespace house

// ---- the adapter --------------------------------------------------------------------------------

template <>
struct joinable::tensor_traits<house::Tensor> {
    static DType dtype(house::Tensor const& t) {
        return t.kind() == house::Kind::single_precision ? DType::f32 : DType::f64;
    }
    static void* data(house::Tensor const& t) { return t.raw(); }
    static auto const& extents(house::Tensor const& t) { return t.shape(); }
    static auto const& strides(house::Tensor const& t) { return t.steps(); }
};

// ---- uneven data --------------------------------------------------------------------------------

int main() {
    constexpr int ranks = 3;
    std::vector<double> corners(ranks);
    std::vector<std::size_t> own_rounds(ranks);
    joinable::run_threads(ranks, [&](joinable::ThreadCommunicator& comm) {
        house::Tensor const value{{2, 3}, house::Kind::double_precision};
        house::Tensor const grad{{3, 2}, house::Kind::double_precision};
        std::vector<house::Weight> weights{{value, grad.transposed()}}; // strides differ: no matter

        joinable::DistributedDataParallel ddp{comm, weights};
        joinable::Step step{comm, [&] {
                                for (int i = 0; i < 2; ++i) {
                                    for (int j = 0; j < 3; ++j) {
                                        weights[0].value.at(i, j) -= weights[0].grad.at(i, j);
                                    }
                                }
                            }};
        joinable::Join guard{joinable::participants(ddp, step)};
        for (int batch = 0; batch <= comm.rank(); ++batch) { // rank r has r + 1 batches
            ddp.forward([] {});
            ddp.backward([&](auto ready) {
                weights[0].grad.at(1, 2) = -3.0; // a third of it for each rank that has a batch
                ready(0);
            });
            step.step();
        }
        auto const result = guard.finish();
        corners[static_cast<std::size_t>(comm.rank())] = weights[0].value.at(1, 2);
        own_rounds[static_cast<std::size_t>(comm.rank())] = result.own_rounds;
    });
    for (std::size_t rank = 0; rank < ranks; ++rank) {
        std::printf("rank %zu: %zu batches, weight %g\n", rank, own_rounds[rank], corners[rank]);
    }
}

// Output:
// rank 0: 1 batches, weight 6
// rank 1: 2 batches, weight 6
// rank 2: 3 batches, weight 6
