// SPDX-License-Identifier: BSL-1.0
// A tensor class of an imaginary engine takes part without being touched: by nine lines of traits.
#include <joinable/join.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <utility>
#include <vector>

// ---- the engine, as it was before it heard of joinable ------------------------------------------

namespace house {

enum class Kind { single_precision, double_precision };

/// Copies share their storage; a transposed tensor is a view of the same numbers.
class Tensor {
public:
    Tensor(std::vector<std::int64_t> shape, Kind kind)
        : shape_{std::move(shape)}, steps_(shape_.size()), kind_{kind} {
        std::int64_t step = 1;
        for (std::size_t d = shape_.size(); d-- > 0; step *= shape_[d]) {
            steps_[d] = step;
        }
        std::size_t const number = kind == Kind::single_precision ? sizeof(float) : sizeof(double);
        bytes_.reset(new std::byte[static_cast<std::size_t>(step) * number]{});
    }

    [[nodiscard]] Tensor transposed() const {
        Tensor other = *this;
        std::swap(other.shape_.front(), other.shape_.back());
        std::swap(other.steps_.front(), other.steps_.back());
        return other;
    }

    template <class T>
    [[nodiscard]] T& at(std::int64_t i, std::int64_t j) const {
        return static_cast<T*>(raw())[i * steps_[0] + j * steps_[1]];
    }

    [[nodiscard]] void* raw() const { return bytes_.get(); }
    [[nodiscard]] Kind kind() const { return kind_; }
    [[nodiscard]] std::vector<std::int64_t> const& shape() const { return shape_; }
    [[nodiscard]] std::vector<std::int64_t> const& steps() const { return steps_; }

private:
    std::vector<std::int64_t> shape_;
    std::vector<std::int64_t> steps_;
    std::shared_ptr<std::byte[]> bytes_;
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

static_assert(joinable::models_tensor<house::Tensor>());

// ---- what it can do now -------------------------------------------------------------------------

/// The sum over all ranks of a tensor of single precision.
float sum_over_ranks(joinable::ThreadCommunicator& comm) {
    house::Tensor const tensor{{2, 2}, house::Kind::single_precision};
    tensor.at<float>(1, 1) = 0.5F + static_cast<float>(comm.rank());
    comm.all_reduce(joinable::to_buffer(tensor), joinable::ReduceOp::sum).wait();
    return tensor.at<float>(1, 1);
}

/// Trains a weight on uneven data: rank r has r + 1 batches. Returns what it became.
double train(joinable::ThreadCommunicator& comm) {
    house::Tensor const value{{2, 3}, house::Kind::double_precision};
    house::Tensor const grad{{3, 2}, house::Kind::double_precision};
    std::vector<house::Weight> weights{{value, grad.transposed()}}; // strides differ: no matter
    auto const descend = [&] {
        for (int i = 0; i < 2; ++i) {
            for (int j = 0; j < 3; ++j) {
                weights[0].value.at<double>(i, j) -= weights[0].grad.at<double>(i, j);
            }
        }
    };
    joinable::DistributedDataParallel ddp{comm, weights};
    joinable::Step step{comm, descend};
    joinable::Join guard{joinable::participants(ddp, step)};
    for (int batch = 0; batch <= comm.rank(); ++batch) {
        ddp.forward([] {});
        ddp.backward([&](auto ready) {
            weights[0].grad.at<double>(1, 2) = -3.0; // the average over 3 ranks: -1 for each batch
            ready(0);
        });
        step.step();
    }
    guard.finish();
    return value.at<double>(1, 2);
}

int main() {
    constexpr std::size_t ranks = 3;
    std::vector<float> sums(ranks);
    std::vector<double> trained(ranks);
    joinable::run_threads(ranks, [&](joinable::ThreadCommunicator& comm) {
        auto const rank = static_cast<std::size_t>(comm.rank());
        sums[rank] = sum_over_ranks(comm);
        trained[rank] = train(comm);
    });
    for (std::size_t rank = 0; rank < ranks; ++rank) {
        std::printf(
            "rank %zu: sum %g, and %g after all 6 batches\n", rank, sums[rank], trained[rank]
        );
    }
}

// Output:
// rank 0: sum 4.5, and 6 after all 6 batches
// rank 1: sum 4.5, and 6 after all 6 batches
// rank 2: sum 4.5, and 6 after all 6 batches
