// SPDX-License-Identifier: BSL-1.0
// Adapts a tensor class of an imaginary engine by two specialisations, without changes to the
// engine.
#include <joinable/join.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

// ---- the engine, unchanged -----------------------------------------------------------------------

namespace house {

enum class Kind { half, single, real, integer }; // half: 16 bits, real: 64
enum class Place { cpu, gpu };

constexpr std::size_t bytes_of(Kind kind) {
    return kind == Kind::half ? 2 : kind == Kind::single ? 4 : 8;
}

/// Copies share their storage; a transposed tensor is a view of the same numbers.
class Tensor {
public:
    Tensor(std::vector<std::int64_t> shape, Kind kind) : Tensor{nullptr, std::move(shape), kind} {
        std::size_t bytes = bytes_of(kind_);
        for (std::int64_t const extent : shape_) {
            bytes *= static_cast<std::size_t>(extent);
        }
        std::shared_ptr<std::byte[]> const owned{new std::byte[bytes]{}};
        storage_ = {owned, owned.get()};
    }

    /// A tensor over memory of another owner.
    static Tensor over(
        void* memory,
        std::vector<std::int64_t> shape,
        std::vector<std::int64_t> steps,
        Kind kind,
        Place place
    ) {
        Tensor tensor{{std::shared_ptr<void>{}, memory}, std::move(shape), kind};
        tensor.steps_ = std::move(steps);
        tensor.place_ = place;
        return tensor;
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

    [[nodiscard]] void* raw() const { return storage_.get(); }
    [[nodiscard]] Kind kind() const { return kind_; }
    [[nodiscard]] Place place() const { return place_; }
    [[nodiscard]] std::vector<std::int64_t> const& shape() const { return shape_; }
    [[nodiscard]] std::vector<std::int64_t> const& steps() const { return steps_; } // in elements

private:
    Tensor(std::shared_ptr<void> storage, std::vector<std::int64_t> shape, Kind kind)
        : shape_{std::move(shape)}, steps_(shape_.size()), storage_{std::move(storage)},
          kind_{kind} {
        std::int64_t step = 1;
        for (std::size_t d = shape_.size(); d-- > 0; step *= shape_[d]) {
            steps_[d] = step;
        }
    }

    std::vector<std::int64_t> shape_;
    std::vector<std::int64_t> steps_;
    std::shared_ptr<void> storage_;
    Kind kind_;
    Place place_ = Place::cpu;
};

struct Weight {
    std::string label;
    Tensor numbers;
    std::optional<Tensor> slope; // none until a backward pass makes it
    bool is_frozen = false;
};

} // namespace house

// ---- the adapter --------------------------------------------------------------------------------

template <>
struct joinable::tensor_traits<house::Tensor> {
    static DType dtype(house::Tensor const& t) {
        constexpr DType of_kind[] = {DType::f16, DType::f32, DType::f64, DType::i64};
        return of_kind[static_cast<int>(t.kind())]; // in the order of Kind
    }
    static void* data(house::Tensor const& t) { return t.raw(); }
    static auto const& extents(house::Tensor const& t) { return t.shape(); }
    static auto const& strides(house::Tensor const& t) { return t.steps(); }
    static DeviceId device(house::Tensor const& t) {
        return {t.place() == house::Place::gpu ? DeviceKind::cuda : DeviceKind::host, 0};
    }
};
static_assert(joinable::models_tensor<house::Tensor>());

template <>
struct joinable::parameter_traits<house::Weight> {
    static auto* value(house::Weight& w) { return &w.numbers; }
    static auto& grad(house::Weight& w) { return w.slope; } // an empty optional: no gradient
    static bool requires_grad(house::Weight const& w) { return !w.is_frozen; }
    static std::string_view name(house::Weight const& w) { return w.label; }
    static void set_grad(house::Weight& w, AnyView const& view) { // like the value, in other memory
        house::Tensor const& v = w.numbers;
        Shape const& s = view.strides();
        w.slope =
            house::Tensor::over(view.data(), v.shape(), {s.begin(), s.end()}, v.kind(), v.place());
    }
};
static_assert(joinable::models_parameter<house::Weight>());

// ---- what it can do now -------------------------------------------------------------------------

/// The sum of a single-precision tensor over all ranks.
float sum_over_ranks(joinable::ThreadCommunicator& comm) {
    house::Tensor const tensor{{2, 2}, house::Kind::single};
    tensor.at<float>(1, 1) = 0.5F + static_cast<float>(comm.rank());
    comm.all_reduce(joinable::to_buffer(tensor), joinable::ReduceOp::sum).wait();
    return tensor.at<float>(1, 1);
}

/// Trains a transposed weight on uneven data: rank r has r + 1 batches. Its gradient lies in a
/// bucket through set_grad. Returns the trained value.
double train(joinable::ThreadCommunicator& comm) {
    house::Tensor const value{{3, 2}, house::Kind::real};
    std::vector<house::Weight> weights{{"layer", value.transposed(), {}, false}};
    auto const descend = [&] {
        for (int i = 0; i < 2; ++i) {
            for (int j = 0; j < 3; ++j) {
                weights[0].numbers.at<double>(i, j) -= weights[0].slope->at<double>(i, j);
            }
        }
    };
    joinable::DistributedDataParallel ddp{comm, weights, {.gradient_as_bucket_view = true}};
    joinable::Step step{comm, descend};
    joinable::Join guard{joinable::participants(ddp, step)};
    for (int batch = 0; batch <= comm.rank(); ++batch) {
        ddp.forward([] {});
        ddp.backward([&](auto ready) {
            weights[0].slope->at<double>(1, 2) =
                -3.0; // the average over 3 ranks: -1 for each batch
            ready(0);
        });
        step.step();
    }
    guard.finish();
    return value.at<double>(2, 1);
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
