// SPDX-License-Identifier: BSL-1.0
// A module over two devices of each rank: a DistributedDataParallel for each device, in one guard.
#include <doctest/doctest.h>

#include <cstddef>
#include <string>
#include <vector>

#include <support/fake_cuda/device_model.hpp>
#include <support/fake_cuda/device_tensor.hpp>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/fake_cuda/stream_communicator.hpp>
#include <support/numbers.hpp>
#include <support/ranks.hpp>

#include <joinable/cuda.hpp>
#include <joinable/join.hpp>

namespace {

using joinable::ContractViolation;
using joinable::DistributedDataParallel;
using joinable::DType;
using joinable::ThreadCommunicator;
using namespace joinable_tests;

/// The lower layers of a rank are on its even device, the upper ones on the odd one.
struct TwoDevices {
    explicit TwoDevices(ThreadCommunicator& host, DType dtype = DType::f32)
        : lower{host.rank(), dtype, 2 * host.rank()},
          upper{host.rank(), dtype, 2 * host.rank() + 1},
          of_lower{host, lower.stream(), 2 * host.rank()},
          of_upper{host, upper.stream(), 2 * host.rank() + 1} {}

    DeviceModel lower;
    DeviceModel upper;
    ScalingStreamCommunicator of_lower;
    ScalingStreamCommunicator of_upper;
};

template <class Body>
void over_two_devices(std::initializer_list<int> sizes, Body const& body) {
    run_participants(sizes, body);
    check_nothing_is_left();
}

TEST_CASE("a module over two devices is averaged on each by a model of its own, as on one device") {
    for (DType const dtype : {DType::f16, DType::bf16, DType::f32, DType::f64}) {
        for (bool const views : {false, true}) {
            over_two_devices({1, 2, 3, 4}, [&](ThreadCommunicator& host) {
                TwoDevices module{host, dtype};
                DistributedDataParallel lower{
                    module.of_lower, module.lower.params, small_buckets(views)
                };
                DistributedDataParallel upper{
                    module.of_upper, module.upper.params, small_buckets(views)
                };
                joinable::Join guard{joinable::participants(lower, upper), joinable::control(host)};
                for (int batch = 0; batch <= host.rank();
                     ++batch) {           // ranks have other numbers of inputs
                    lower.forward([] {}); // the pass of the whole module
                    lower.backward([&](auto ready) {
                        module.upper.backward(batch, [](std::size_t) {
                        }); // its gradients come first
                        module.lower.backward(batch, ready);
                    });
                    upper.forward([] {});
                    upper.backward([&](auto ready) {
                        for (std::size_t i = module.upper.params.size(); i-- > 0;) {
                            ready(i);
                        }
                    });
                    // The oracle is the average that a model on one device has, of this formula.
                    auto const active = all_ranks(batch, host.size());
                    auto const expected = module.lower.averages(batch, active, host.size());
                    CHECK(module.lower.gradients() == expected);
                    CHECK(module.upper.gradients() == expected);
                }
                CHECK(guard.finish().rounds == static_cast<std::size_t>(host.size()));
                for (auto const* model : {&lower, &upper}) {
                    int const device = 2 * host.rank() + (model == &upper ? 1 : 0);
                    for (joinable::Bucket const& bucket : model->buckets()) {
                        cudaPointerAttributes found{};
                        CHECK(cudaPointerGetAttributes(&found, bucket.buffer.data) == cudaSuccess);
                        CHECK(found.device == device);
                    }
                }
            });
        }
    }
}

TEST_CASE(
    "parameters of two devices in one model are refused by name, and so is a gradient elsewhere"
) {
    over_two_devices({1, 2, 3}, [](ThreadCommunicator& host) {
        TwoDevices module{host};
        auto const refused = [](auto const& call) {
            try {
                call();
            } catch (std::exception const& error) {
                return std::string{error.what()};
            }
            return std::string{"nothing"};
        };
        std::string const text = refused([&] {
            DistributedDataParallel both{
                module.of_lower, joinable::parameters(module.lower.params, module.upper.params)
            };
        });
        CAPTURE(text); // that of this rank, or of a peer
        CHECK(
            text.find("parameter 4 is on CUDA device ") != std::string::npos
        ); // the first upper one
        CHECK(text.ends_with("; give a communicator of its device, or PerDevice those of all"));
        module.lower.params[1].grad = module.upper.params[1].own.view();
        std::string const elsewhere = refused([&] {
            DistributedDataParallel ddp{module.of_lower, module.lower.params};
            ddp.forward([] {});
            ddp.backward([&](auto ready) { module.lower.backward(0, ready); });
        });
        CAPTURE(elsewhere);
        CHECK(elsewhere.find("the gradient of parameter 1 on rank ") != std::string::npos);
        CHECK(elsewhere.find("but its value is f32 (5) on CUDA device ") != std::string::npos);
        CHECK(elsewhere.ends_with("; both need the same dtype, extents and device"));
    });
}

} // namespace
