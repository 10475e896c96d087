// SPDX-License-Identifier: BSL-1.0
// What ranks compare of a model, when it is made and when a guard is entered.
#include <joinable/participant/data_parallel.hpp>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <over_ranks.hpp>
#include <support/linear_model.hpp>
#include <support/process_ranks.hpp>

#include <joinable/join/guard.hpp>

namespace {

using joinable::AnyView;
using joinable::buffers;
using joinable::DataParallelOptions;
using joinable::DistributedDataParallel;
using joinable::Join;
using joinable::participants;
using joinable_tests::make_params;
using joinable_tests::over_ranks;
using joinable_tests::Param;
using joinable_tests::RankCommunicator;

template <class Body>
std::string mismatch_of(Body const& body, std::vector<int> const& ranks = {1}) {
    try {
        body();
    } catch (joinable::Mismatch const& error) {
        CHECK(error.ranks() == ranks);
        return error.what();
    }
    return {};
}

TEST_CASE("each option of a model that differs is named with both values") {
    using joinable::BufferSync;
    using joinable::GradientKind;
    struct Row {
        std::function<void(DataParallelOptions&)> change;
        std::string text;
    };
    using Options = DataParallelOptions;
    Row const rows[] = {
        {[](Options& o) { o.bucket_cap_bytes = 100; },
         "bucket_cap_bytes: rank 0 has 26214400, rank 1 has 100"},
        {[](Options& o) { o.first_bucket_bytes = 100; },
         "first_bucket_bytes: rank 0 has 1048576, rank 1 has 100"},
        {[](Options& o) { o.gradient_as_bucket_view = true; },
         "gradient_as_bucket_view: rank 0 has false, rank 1 has true"},
        {[](Options& o) { o.find_unused = true; }, "find_unused: rank 0 has false, rank 1 has true"
        },
        {[](Options& o) { o.static_graph = true; },
         "static_graph: rank 0 has false, rank 1 has true"},
        {[](Options& o) { o.broadcast_buffers = false; },
         "broadcast_buffers: rank 0 has true, rank 1 has false"},
        {[](Options& o) { o.gradient_kind = GradientKind::sum; },
         "gradient_kind: rank 0 has mean, rank 1 has sum"},
        {[](Options& o) { o.bucket_caps_bytes = {100, 200}; },
         "bucket_caps_bytes: rank 0 has [], rank 1 has [100, 200]"},
        {[](Options& o) { o.rebuild_buckets = false; },
         "rebuild_buckets: rank 0 has true, rank 1 has false"},
        {[](Options& o) { o.buffer_sync = BufferSync::before_forward; },
         "buffer_sync: rank 0 has after_forward, rank 1 has before_forward"},
        {[](Options& o) { o.sync_at_start = false; },
         "sync_at_start: rank 0 has true, rank 1 has false"},
        {[](Options& o) { o.sync_at_end = false; }, "sync_at_end: rank 0 has true, rank 1 has false"
        },
        {[](Options& o) { o.joined_gradients = joinable::JoinedGradients::kept; },
         "joined_gradients: rank 0 has zeroed_at_end, rank 1 has kept"},
        {[](Options& o) { o.unused_gradients = joinable::UnusedGradients::held; },
         "unused_gradients: rank 0 has zero, rank 1 has held"},
        {[](Options& o) { o.verify_ready = true; },
         "verify_ready: rank 0 has false, rank 1 has true"},
        {[](Options& o) { o.shares_values = true; },
         "shares_values: rank 0 has false, rank 1 has true"},
        {[](Options& o) { o.verify_replicas = 2; }, "verify_replicas: rank 0 has 0, rank 1 has 2"},
        {[](Options& o) { o.report_every = 5; }, "report_every: rank 0 has 0, rank 1 has 5"},
        {[](Options& o) { o.model_name = "gpt"; }, "model_name: rank 0 has , rank 1 has gpt"},
        {[](Options& o) { o.sparse_as_dense = true; },
         "sparse_as_dense: rank 0 has false, rank 1 has true"},
    };
    for (Row const& row : rows) {
        over_ranks({2, 3, 4, 8}, [&](RankCommunicator& comm) {
            auto params = make_params<double>({1});
            Options options;
            if (comm.rank() == 1) {
                row.change(options);
            }
            CHECK(mismatch_of([&] {
                      DistributedDataParallel ddp{comm, params, options};
                  }) == "options differ: " + row.text);
            DistributedDataParallel ddp{comm, params}; // the communicator stays usable
        });
    }
}

TEST_CASE("names of tensors are refused where a list says what is averaged, and others learn of it"
) {
    over_ranks({1, 2, 3}, [](RankCommunicator& comm) {
        auto params = make_params<double>({1});
        DataParallelOptions options;
        if (comm.rank() == 0) {
            (comm.size() == 3 ? options.sparse : options.ignore) = {"head.*"};
        }
        try {
            DistributedDataParallel ddp{comm, params, options};
            FAIL("nothing was thrown");
        } catch (joinable::PeerFailed const& error) {
            CHECK(comm.rank() != 0);
            CHECK(std::string{error.what()}.find("name tensors of a module") != std::string::npos);
        } catch (joinable::ContractViolation const& error) {
            CHECK(comm.rank() == 0);
            CHECK(std::string{error.what()}.find("is_sparse tell which") != std::string::npos);
        }
        DistributedDataParallel ddp{comm, params}; // the communicator stays usable
    });
}

struct Strided {
    AnyView value;
    AnyView grad;
    bool requires_grad = true;
};

template <class Comm>
void check_models(Comm& comm) {
    bool const is_odd = comm.rank() == 1;
    std::vector<double> memory(12);
    std::vector<float> floats(12);
    auto const view = [&](auto& storage, std::initializer_list<std::size_t> extents, auto strides) {
        return AnyView{joinable::as_strided(storage, extents, strides)};
    };
    using Strides = std::initializer_list<std::size_t>;
    AnyView const usual = view(memory, {2, 3}, Strides{3, 1});
    auto const differs = [&](AnyView const& odd) {
        std::vector<Strided> model{{is_odd ? odd : usual, {}}};
        return mismatch_of([&] { DistributedDataParallel ddp{comm, model}; });
    };
    std::string const start = "models differ: parameter 0: rank 0 has f64 (2, 3), rank 1 has ";
    CHECK(differs(view(memory, {2, 4}, Strides{4, 1})) == start + "f64 (2, 4)");
    CHECK(differs(view(memory, {6}, Strides{1})) == start + "f64 (6)");
    CHECK(differs(view(floats, {2, 3}, Strides{3, 1})) == start + "f32 (2, 3)");
    CHECK(differs(view(memory, {2, 3}, Strides{1, 2})) == start + "f64 (2, 3), strides (1, 2)");
    CHECK(differs(usual).empty());

    auto const differ = [&](Strides one, Strides other) {
        std::vector<Strided> model{{view(memory, {2, 1, 3}, is_odd ? other : one), {}}};
        return mismatch_of([&] { DistributedDataParallel ddp{comm, model}; });
    };
    CHECK(differ({3, 3, 1}, {3, 1, 1}).empty()); // the stride of one element moves none
    CHECK(differ({1, 7, 2}, {1, 1, 2}).empty());
    CHECK(!differ({1, 7, 2}, {3, 7, 1}).empty());
}

TEST_CASE("each property of a parameter that differs is named with both values") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) { check_models(comm); });
    joinable_tests::run_process_ranks({2, 3}, [](auto& comm) { check_models(comm); });
}

TEST_CASE("parameters that differ in requires_grad, in number or in name are refused") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        bool const is_odd = comm.rank() == 1;
        auto params = make_params<float>({4, 4});
        auto const make = [&] {
            return mismatch_of([&] { DistributedDataParallel ddp{comm, params}; });
        };
        params[1].requires_grad = !is_odd;
        CHECK(
            make() ==
            "models differ: parameter 1: rank 0 has f32 (4), rank 1 has f32 (4), no requires_grad"
        );
        params[1].requires_grad = true;
        params[0].name = is_odd ? "bias" : "weight"; // the same shape in another order
        CHECK(
            make() ==
            "models differ: parameter 0 (weight): rank 0 has f32 (4), rank 1 has parameter "
            "0 (bias): f32 (4)"
        );
        params[0].name = "weight";
        CHECK(make().empty());
        if (is_odd) {
            params.emplace_back(3);
        }
        CHECK(make() == "models differ: number of parameters: rank 0 has 2, rank 1 has 3");
    });
}

TEST_CASE("a parameter far behind in a model is named, and all ranks where it differs") {
    over_ranks({3, 4}, [](RankCommunicator& comm) {
        std::vector<std::size_t> sizes(300, 2);
        sizes[250] = comm.rank() == 0 ? 2 : 3;
        auto params = make_params<float>(sizes);
        std::string const start =
            "models differ: parameter 250: rank 0 has f32 (2), rank 1 has f32 (3)";
        std::vector<int> others{1, 2};
        if (comm.size() == 4) {
            others.push_back(3);
        }
        CHECK(
            mismatch_of([&] { DistributedDataParallel ddp{comm, params}; }, others) ==
            start + (comm.size() == 3 ? "; ranks 1 and 2 differ from rank 0"
                                      : "; ranks 1, 2 and 3 differ from rank 0")
        );
    });
}

TEST_CASE("two models that ranks list in another order are told apart") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto small = make_params<double>({1});
        auto large = make_params<double>({2, 3});
        DistributedDataParallel a{comm, small};
        DistributedDataParallel b{comm, large};
        std::string const text = mismatch_of([&] {
            if (comm.rank() == 1) {
                Join guard{participants(b, a)};
            } else {
                Join guard{participants(a, b)};
            }
        });
        CHECK(text.starts_with("guards differ: participant 0 (DistributedDataParallel): model: "
                               "rank 0 has 1 parameters "
                               "of 1 elements, hash "));
        CHECK(text.find(", rank 1 has 2 parameters of 5 elements, hash ") != std::string::npos);
    });
}

TEST_CASE("two models of one shape are told apart by options, names, dtypes and requires_grad") {
    over_ranks({2, 3}, [](RankCommunicator& comm) {
        auto const enter = [&](auto& a, auto& b) {
            return mismatch_of([&] {
                if (comm.rank() == 1) {
                    Join guard{participants(b, a)};
                } else {
                    Join guard{participants(a, b)};
                }
            });
        };
        auto first = make_params<double>({2, 1});
        auto second = make_params<double>({2, 1});
        {
            DistributedDataParallel a{comm, first};
            DistributedDataParallel b{comm, second, {.bucket_cap_bytes = 100}};
            CHECK(
                enter(a, b) == "guards differ: participant 0 (DistributedDataParallel): "
                               "bucket_cap_bytes: rank 0 has 26214400, rank 1 has 100"
            );
        }
        auto const check_apart = [&](auto& other) {
            DistributedDataParallel a{comm, first};
            DistributedDataParallel b{comm, other};
            CHECK(enter(a, b).starts_with(
                "guards differ: participant 0 (DistributedDataParallel): model: rank 0 has 2 parameters"
            ));
        };
        second[0].name = "generator";
        check_apart(second);
        auto floats = make_params<float>({2, 1});
        check_apart(floats);
        auto frozen = make_params<double>({2, 1});
        frozen[1].requires_grad = false;
        check_apart(frozen);
        auto alike = make_params<double>({2, 1});
        DistributedDataParallel a{comm, first};
        DistributedDataParallel b{comm, alike};
        CHECK(enter(a, b).empty());
    });
}

TEST_CASE("a divisor that one rank asks for differently is named") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        auto params = make_params<double>({1});
        DistributedDataParallel ddp{comm, params};
        CHECK(
            mismatch_of([&] {
                if (comm.rank() == 1) {
                    Join guard{participants(ddp), joinable::divide_by_initial_world_size = false};
                } else {
                    Join guard{participants(ddp)};
                }
            }) == "guards differ: participant 0 (DistributedDataParallel): keyword "
                  "divide_by_initial_world_size: rank 0 has no value, rank 1 has false"
        );
    });
}

} // namespace
