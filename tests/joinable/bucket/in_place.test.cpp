// SPDX-License-Identifier: BSL-1.0
// Gradients that are averaged where they lie, by ranks that reach each other's memory, or copy slices of it.
#include <joinable/bucket/reducer.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <support/linear_model.hpp>
#include <support/numbers.hpp>
#include <support/process_ranks.hpp>
#include <support/ranks.hpp>
#include <support/recording_communicator.hpp>
#include <support/shared.hpp>
#include <support/strided_param.hpp>
#include <support/volume.hpp>
#include <support/wait_until.hpp>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/make_arena.hpp>
#include <joinable/communicator/pieces.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/participant/data_parallel.hpp>

namespace {

using namespace joinable_tests;
using joinable::ProcessCommunicator;
using joinable::Reducer;
using joinable::ThreadCommunicator;

/// The mean over ranks 0, 1, ... of rank + 1.
float mean_of(int ranks) {
    return 0.5F * static_cast<float>(ranks + 1);
}

void fill(Param<float>& param, float number) {
    std::fill_n(param.grad.as<float>().data(), param.value.size(), number); // it lies without gaps
}
bool is_filled(joinable::AnyView const& view, float number) {
    if (view.is_contiguous()) {
        float const* const data = view.as<float>().data();
        return std::all_of(data, data + view.numel(), [&](float x) { return x == number; });
    }
    for (double const element : read(view)) {
        if (element != static_cast<double>(number)) {
            return false;
        }
    }
    return true;
}

/// An iteration in which every gradient of this rank has this number.
template <class SomeReducer>
void average(SomeReducer& reducer, std::vector<Param<float>>& params, double factor, float number) {
    reducer.prepare_for_backward(factor);
    for (std::size_t i = params.size(); i-- > 0;) {
        fill(params[i], number);
        reducer.mark_ready(i);
    }
    reducer.finalize_backward();
}

TEST_CASE("gradients of thread ranks are averaged where they lie, and never copied into the bucket"
) {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        auto params = make_params<float>({5, 3000, 1, 70'000});
        Reducer reducer{comm, joinable::parameters(params), {.bucket_cap_bytes = 100'000}};
        for (int round = 0; round < 3; ++round) {
            average(reducer, params, 1.0 / comm.size(), static_cast<float>(comm.rank() + 1));
            for (Param<float> const& param : params) {
                CHECK(param.grad.data() == param.storage.data());
                CHECK(doctest::Approx(param.g(0)) == mean_of(comm.size()));
                CHECK(is_filled(param.grad, param.g(0)));
            }
            for (joinable::Bucket const& bucket : reducer.buckets()) {
                for (joinable::AnyView const& view : bucket.views) {
                    CHECK(is_filled(view, 0.0F)); // as the arena was
                }
            }
        }
    });
}

TEST_CASE(
    "a gradient that is missing, or has gaps, goes through the bucket beside others that do not"
) {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        constexpr auto f32 = joinable::DType::f32;
        std::vector<StridedParam> params;
        std::vector<std::vector<float>> memory(4, std::vector<float>(2000, -1.0F));
        for (std::size_t i = 0; i < memory.size(); ++i) {
            bool const has_gaps = i == 1 && comm.rank() == 0; // after each row
            joinable::Shape const strides{has_gaps ? 40U : 20U, 1};
            StridedParam& param = params.emplace_back(StridedParam{
                {OwnedTensor{f32, {30, 20}, {20, 1}}, OwnedTensor{f32, {30, 20}, {20, 1}}, {}}
            });
            param.grad = joinable::AnyView{memory[i].data(), f32, {30, 20}, strides};
        }
        Reducer reducer{comm, joinable::parameters(params)};
        for (int round = 0; round < 2; ++round) {
            bool const lacks = comm.rank() == 1 && round == 0;
            if (lacks) {
                params[2].grad = {};
            }
            reducer.prepare_for_backward(1.0);
            for (std::size_t i = params.size(); i-- > 0;) {
                if (params[i].grad) {
                    write(params[i].grad, Numbers(600, comm.rank() + 1.0));
                }
                reducer.mark_ready(i);
            }
            reducer.finalize_backward();
            int const size = comm.size();
            float const sum = mean_of(size) * static_cast<float>(size);
            for (std::size_t i = 0; i < params.size(); ++i) {
                float const missing = i == 2 && round == 0 && size > 1 ? 2.0F : 0.0F;
                CHECK(is_filled(params[i].grad, sum - missing));
            }
            CHECK(memory[1][20] == (comm.rank() == 0 ? -1.0F : sum)); // the gap is left alone
        }
    });
}

/// A model whose gradients each pass makes anew, at other addresses, as after a zero_grad() that releases them.
struct FreshGradients {
    std::vector<Param<float>> params = make_params<float>({5, 3000, 1, 70'000});
    std::vector<std::vector<float>> own = std::vector<std::vector<float>>(params.size());

    void make(std::size_t i, float number) {
        std::vector<float> fresh(params[i].value.size(), number);
        own[i].swap(fresh
        ); // the one before is freed: address sanitizer would find a rank that uses it
        params[i].grad = joinable::AnyView{own[i]};
    }
};

/// The gradient of a rank in a round, for a parameter: exact, and so are sums of it times a power of two.
float fresh_number(int rank, int round, std::size_t i) {
    return static_cast<float>((rank + 1) * (round + 2)) + static_cast<float>(i);
}

TEST_CASE("gradients that each pass makes anew become views of buckets that hold the averages") {
    for (bool const find_unused : {false, true}) {
        run_all_ranks({1, 2, 3, 4, 8}, [&](auto& comm) {
            FreshGradients model;
            drop_gradients(model.params);
            Reducer reducer{
                comm,
                joinable::parameters(model.params),
                {.bucket_cap_bytes = 100'000,
                 .gradient_as_bucket_view = true,
                 .find_unused = find_unused}
            };
            constexpr double factor = 0.25;
            for (int round = 0; round < 4; ++round) {
                // Rank 1 has no gradient of parameter 2 in a round, and rank 0 keeps the view of parameter 1 in another.
                bool const lacks = comm.rank() == 1 && round == 2 && find_unused;
                bool const keeps = comm.rank() == 0 && round == 3;
                std::vector<std::size_t> const unused =
                    lacks ? std::vector<std::size_t>{2} : std::vector<std::size_t>{};
                reducer.prepare_for_backward(factor, unused);
                for (std::size_t i = model.params.size(); i-- > 0;) {
                    float const number = fresh_number(comm.rank(), round, i);
                    if (lacks && i == 2) {
                        model.params[i].grad = {};
                        continue;
                    }
                    if (keeps && i == 1) {
                        fill(model.params[i], number);
                    } else {
                        model.make(i, number);
                    }
                    reducer.mark_ready(i);
                }
                reducer.finalize_backward();
                for (std::size_t i = 0; i < model.params.size(); ++i) {
                    float sum = 0.0F;
                    for (int rank = 0; rank < comm.size(); ++rank) {
                        bool const is_lacking = find_unused && rank == 1 && round == 2 && i == 2;
                        sum += is_lacking ? 0.0F : fresh_number(rank, round, i);
                    }
                    CHECK(is_filled(model.params[i].grad, 0.25F * sum));
                }
                for (joinable::Bucket const& bucket : reducer.buckets()) {
                    for (std::size_t k = 0; k < bucket.parameters.size(); ++k) {
                        Param<float> const& param = model.params[bucket.parameters[k]];
                        CHECK(param.grad.data() == bucket.views[k].data());
                    }
                }
            }
        });
    }
}

TEST_CASE(
    "gradients that are to be views are not copied before the sum, which writes into the bucket"
) {
    auto params = make_params<float>({100, 100, 100});
    auto const gradients = joinable::detail::gradients_in_buckets(
        joinable::parameters(params),
        {.gradient_as_bucket_view = true},
        0,
        1,
        joinable::detail::BufferMemory{}
    );
    gradients->leave_in_place();
    gradients->begin(false);
    joinable::Bucket const& bucket = gradients->buckets()[0];
    for (std::size_t i : {2U, 1U, 0U}) {
        fill(params[i], 3.0F);
    }
    params[1].grad = bucket.views[2]; // where the sum may have written before it reads this
    fill(params[1], 5.0F);
    for (std::size_t i : {2U, 1U, 0U}) {
        gradients->pack(i, 1.0);
    }
    auto const pieces = gradients->pieces_of(0, 0, 3);
    CHECK(pieces.number == 3);
    CHECK(pieces.out == bucket.views[0].data());
    CHECK(pieces.list[0].data() == params[2].storage.data());
    CHECK(pieces.list[1].data() == bucket.views[1].data());
    CHECK(pieces.list[2].data() == params[0].storage.data());
    CHECK(is_filled(bucket.views[0], 0.0F)); // as the arena was
    CHECK(is_filled(bucket.views[1], 5.0F));
    gradients->deliver(0);
    CHECK(params[0].grad.data() == bucket.views[2].data());
    gradients->begin(false);
    CHECK(gradients->pieces_of(0, 0, 3).number == 0);
}

TEST_CASE(
    "a gradient that gets other memory while it is averaged in place is named, and nothing is lost silently"
) {
    for (bool const views : {false, true}) {
        run_ranks({1, 2, 3}, [&](ThreadCommunicator& comm) {
            auto params = make_params<float>({4, 4});
            Reducer reducer{comm, joinable::parameters(params), {.gradient_as_bucket_view = views}};
            std::vector<float> fresh(4);
            std::vector<float> other(4);
            reducer.prepare_for_backward(1.0);
            reducer.mark_ready(1);
            params[0].grad = joinable::AnyView{fresh};
            reducer.mark_ready(0);
            params[0].grad = joinable::AnyView{other};
            CHECK_THROWS_WITH_AS(
                reducer.finalize_backward(),
                doctest::Contains("parameter 0 on rank"),
                joinable::ContractViolation
            );
        });
    }
}

TEST_CASE("two gradients that share memory on a rank are an error on all, never a wrong average") {
    for (std::size_t const shift : {0U, 3U, 4U}) {
        run_ranks({1, 2, 3}, [&](ThreadCommunicator& comm) {
            constexpr auto f32 = joinable::DType::f32;
            std::vector<float> both(8);
            auto params = make_params<float>({4, 4, 4});
            joinable::DistributedDataParallel ddp{
                comm, joinable::parameters(params), {.bucket_cap_bytes = 4, .find_unused = true}
            };
            auto const average = [&](std::vector<std::size_t> const& unused = {}) {
                ddp.forward([] {});
                ddp.backward(
                    [&](auto const& ready) {
                        for (std::size_t i = params.size(); i-- > 0;) {
                            if (std::find(unused.begin(), unused.end(), i) == unused.end()) {
                                fill(params[i], 1.0F);
                                ready(i);
                            }
                        }
                    },
                    unused
                );
            };
            average(); // each has its own
            bool const is_sharing = comm.rank() == comm.size() - 1;
            if (is_sharing) { // one after another; each alone is right
                params[0].grad = joinable::AnyView{both.data(), f32, {4}, {1}};
                average({1});
                params[1].grad = joinable::AnyView{both.data() + shift, f32, {4}, {1}};
                average({0});
            } else {
                average();
                average();
            }
            if (shift == 4) { // apart
                average();
                CHECK(is_filled(params[0].grad, 1.0F));
                return;
            }
            std::string text;
            try {
                average();
            } catch (std::exception const& error) {
                text = error.what();
            }
            CAPTURE(text);
            // Outside a guard the others may hear of it when this rank leaves.
            bool const has_left = !is_sharing && text.find(" left") != std::string::npos;
            CHECK((has_left || text.find("share memory, but each is averaged") != std::string::npos)
            );
        });
    }
}

TEST_CASE(
    "a gradient that is copied may not share memory with one of an earlier bucket, either" *
    doctest::skip(joinable::detail::has_thread_sanitizer) // the mistake is a race
) {
    run_ranks({1, 2, 3}, [](ThreadCommunicator& comm) {
        constexpr auto f32 = joinable::DType::f32;
        std::vector<float> both(6);
        joinable::Shape const extents{2, 2};
        joinable::Shape const dense{2, 1};
        std::vector<StridedParam> params;
        for (int i = 0; i < 2; ++i) {
            StridedParam& param =
                params.emplace_back(StridedParam{{{f32, extents, dense}, {f32, extents, dense}, {}}}
                );
            param.need_grad();
        }
        Reducer reducer{
            comm, joinable::parameters(params), {.bucket_cap_bytes = 4, .find_unused = true}
        };
        REQUIRE(reducer.buckets().size() == 2);
        bool const is_sharing = comm.rank() == comm.size() - 1;
        if (is_sharing) {
            params[1].grad = joinable::AnyView{both.data(), f32, extents, dense};
            params[0].grad = joinable::AnyView{both.data(), f32, extents, {4, 1}};
        }
        std::string text;
        try {
            reducer.prepare_for_backward(1.0);
            reducer.mark_ready(1); // summed where it lies
            reducer.mark_ready(0);
            reducer.finalize_backward();
        } catch (std::exception const& error) {
            text = error.what();
        }
        CAPTURE(text);
        std::string const expected =
            is_sharing ? "share memory, but each is averaged where it lies" : " left";
        CHECK(text.find(expected) != std::string::npos);
    });
}

/// A reduction of a user, who knows of buckets only.
struct Halved : joinable::AllReduce {
    template <class Comm>
    [[nodiscard]] static bool scales(Comm&) noexcept {
        return true;
    }
    template <class Comm>
    [[nodiscard]] static joinable::work_of<Comm>
    start(Comm& comm, joinable::BucketRun const& run, double factor, bool) {
        auto* const numbers = static_cast<float*>(run.buffer.data);
        for (std::size_t i = 0; i < run.buffer.count; ++i) {
            numbers[i] *= static_cast<float>(factor / 2);
        }
        return comm.all_reduce(run.buffer, joinable::ReduceOp::sum);
    }
};

TEST_CASE("a reduction that is derived from AllReduce finds gradients in its buckets") {
    run_ranks({1, 2, 3}, [](ThreadCommunicator& comm) {
        auto params = make_params<float>({4, 4});
        Reducer<ThreadCommunicator, Halved> reducer{comm, joinable::parameters(params)};
        average(reducer, params, 1.0, 2.0F);
        CHECK(is_filled(params[0].grad, static_cast<float>(comm.size())));
    });
}

TEST_CASE(
    "gradients of process ranks are averaged where they lie, in an arena or on the heap, and never in buckets"
) {
    run_all_ranks({1, 2, 3, 4, 8}, [](auto& comm) {
        constexpr std::size_t numel = 200'000; // together more than slices of processes in flight
        joinable::Arena const arena = joinable::make_arena(comm, 2 * numel * sizeof(float));
        auto params = make_params<float>({numel, numel, numel});
        for (std::size_t i : {0U, 1U}) { // the third lies on the heap
            auto* const place = reinterpret_cast<float*>(arena.data()) + i * numel;
            params[i].grad = joinable::AnyView{place, joinable::DType::f32, {numel}, {1}};
        }
        Reducer reducer{
            comm,
            joinable::parameters(params),
            {.first_bucket_bytes = std::size_t{8} << 20U, .rebuild_buckets = false}
        };
        for (int round = 0; round < 3; ++round) {
            average(reducer, params, 1.0 / comm.size(), static_cast<float>(comm.rank() + 1));
            for (std::size_t i = 0; i < params.size(); ++i) {
                CHECK(doctest::Approx(params[i].g(0)) == mean_of(comm.size()));
                CHECK(is_filled(params[i].grad, params[i].g(0)));
                for (joinable::Bucket const& bucket : reducer.buckets()) {
                    for (std::size_t k = 0; k < bucket.parameters.size(); ++k) {
                        if (bucket.parameters[k] == i) {
                            CHECK(is_filled(bucket.views[k], 0.0F));
                        }
                    }
                }
            }
        }
    });
}

/// What ranks tell each other beside their communicator.
struct Signs {
    std::atomic<bool> has_thrown{false};
    std::atomic<int> launched{0}; ///< ranks whose first bucket has left in the second pass
    std::atomic<int> ended{0};    ///< ranks that have handled the exception
};
/// body(comm, signs) over threads, and over processes, also where a rank fails.
template <class Body>
void run_with_signs(std::initializer_list<int> sizes, Body const& body) {
    for (int const size : groups_of_participants(sizes)) {
        Shared<Signs> const of_threads;
        run_ranks({size}, [&](ThreadCommunicator& comm) { body(comm, *of_threads); });
        Shared<Signs> const of_processes;
        run_process_ranks({size}, [&](ProcessCommunicator& comm) { body(comm, *of_processes); });
    }
}

/// A model of three buckets, whose rank 1 throws in the second pass after some gradients. The gradients are freed when
/// the pass has thrown: address sanitizer would find a rank that still uses them. Processes sum the first in slices.
struct FailingTraining {
    int failing;   ///< this many gradients are not ready then
    bool are_late; ///< the others come to the second pass after that
    Signs& signs;
    bool views = false; ///< gradients are to be views of buckets
    bool lacks =
        false; ///< rank 1 has no gradient in the first bucket, and throws when all others have launched it
    std::vector<Param<float>> params = make_params<float>({1000, 200'000, 600'000});

    [[nodiscard]] joinable::DataParallelOptions options() const {
        return {.bucket_cap_bytes = 4, .gradient_as_bucket_view = views, .rebuild_buckets = false};
    }
    template <class Comm>
    void run(Comm& comm, joinable::DistributedDataParallel<Comm>& ddp) {
        for (int round = 0; round < 2; ++round) {
            bool const fails = round == 1 && comm.rank() == 1;
            std::vector<std::vector<float>> own(params.size());
            for (std::size_t i = 0; i < params.size(); ++i) {
                own[i].assign(params[i].value.size(), 1.0F);
                params[i].grad =
                    fails && lacks && i == 2 ? joinable::AnyView{} : joinable::AnyView{own[i]};
            }
            ddp.forward([] {});
            if (round == 1 && comm.rank() != 1 && are_late) {
                wait_until([&] { return signs.has_thrown.load(); });
            }
            ddp.backward([&](auto const& ready) {
                for (std::size_t i = params.size(); i-- > 0;) {
                    if (fails && static_cast<int>(i) == failing) {
                        if (lacks) {
                            wait_until(signs.launched, comm.size() - 1);
                        }
                        throw std::runtime_error{"the engine failed"};
                    }
                    ready(i);
                    signs.launched += round == 1 && !fails && i == 2 ? 1 : 0;
                }
            });
        }
    }
    /// Its exception is handled, or that of another rank.
    template <class Comm>
    [[nodiscard]] std::string text_of(Comm& comm, joinable::DistributedDataParallel<Comm>& ddp) {
        std::string text;
        try {
            run(comm, ddp);
        } catch (std::exception const& error) {
            text = error.what();
        }
        drop_gradients(params);
        signs.has_thrown = signs.has_thrown || comm.rank() == 1;
        return text;
    }
};

TEST_CASE("when a pass has thrown no rank uses the gradients of another one, and all know why") {
    for (int const way : {0, 1, 2, 3}) {
        bool const are_late = way % 2 != 0;
        bool const views = way / 2 != 0;
        for (int failing = 0; failing < 2; ++failing) { // a bucket has left
            run_with_signs({2, 3, 4, 8}, [&](auto& comm, Signs& signs) {
                if (views && !joinable::detail::reaches_all(comm)) {
                    return; // the others use buckets, not its gradients
                }
                FailingTraining training{failing, are_late, signs, views};
                joinable::DistributedDataParallel ddp{
                    comm, joinable::parameters(training.params), training.options()
                };
                std::string const text = training.text_of(comm, ddp);
                CAPTURE(text);
                // Where all ranks have come to what has left, it is right, and nobody need be told yet.
                bool const is_told = are_late || text.find("rank 1 left") == std::string::npos;
                CHECK(
                    text.find(is_told ? "the engine failed" : "rank 1 left") != std::string::npos
                );
                if (comm.rank() == 1 && are_late) {
                    CHECK_THROWS_WITH_AS(
                        ddp.mark_ready(0),
                        doctest::Contains("cannot be finished"),
                        joinable::ContractViolation
                    );
                }
            });
        }
    }
}

TEST_CASE("a guard that a pass has ended tells its program, which has handled the exception") {
    for (bool const goes_on : {false, true}) {
        run_with_signs({2, 3, 4, 8}, [&](auto& comm, Signs& signs) {
            FailingTraining training{0, true, signs};
            joinable::DistributedDataParallel ddp{
                comm, joinable::parameters(training.params), training.options()
            };
            std::string text;
            try {
                joinable::Join join{joinable::participants(ddp)};
                if (comm.rank() == 1) {
                    CHECK(training.text_of(comm, ddp) == "the engine failed");
                } else {
                    training.run(comm, ddp);
                }
                if (goes_on) {
                    join.finish();
                }
            } catch (joinable::PeerFailed const& error) {
                text = error.what();
                CHECK(error.rank() == 1);
            }
            CAPTURE(text);
            CHECK(text.find("the engine failed") != std::string::npos);
        });
    }
}

/// Without arenas, as where these have no room: buckets lie on the heap.
struct WithoutArenas : CoreOnly<joinable::ProcessCommunicator> {
    using CoreOnly::CoreOnly;
    void abort(joinable::AbortReason const& reason) { inner_.abort(reason); }
    [[nodiscard]] bool is_aborted() const { return inner_.is_aborted(); }
    [[nodiscard]] auto abort_reason() const { return inner_.abort_reason(); }
    [[nodiscard]] bool is_in_reach(joinable::ConstBuffer buffer) const {
        return inner_.is_in_reach(buffer);
    }
    [[nodiscard]] static bool sums_pieces() { return true; }
    auto sum_pieces(joinable::detail::BufferPieces const& pieces, double factor) {
        return inner_.sum_pieces(pieces, factor);
    }
};
static_assert(joinable::detail::has_sum_of_pieces<WithoutArenas>);
static_assert(!joinable::AllocatesArena<WithoutArenas>);

template <class Comm>
void check_that_nobody_waits(Comm& comm, Signs& signs, bool views) {
    FailingTraining training{1, false, signs, views, true};
    joinable::DistributedDataParallel ddp{
        comm, joinable::parameters(training.params), training.options()
    };
    std::string text;
    try {
        joinable::Join join{joinable::participants(ddp)};
        training.run(comm, ddp);
    } catch (std::exception const& error) {
        text = error.what();
    }
    CAPTURE(text);
    CHECK(text.find("the engine failed") != std::string::npos);
    ++signs.ended;
    // Nobody calls the communicator meanwhile. The deadline would end the others' wait later than this.
    for (int k = 0; k < 300 && signs.ended.load() != comm.size(); ++k) {
        std::this_thread::sleep_for(std::chrono::milliseconds{100});
    }
    CHECK(signs.ended.load() == comm.size());
}

TEST_CASE(
    "a guard that an exception ends leaves no rank waiting for a share of a sum that has begun"
) {
    for (bool const views : {false, true}) {
        run_with_signs({2, 3, 4, 8}, [&](auto& comm, Signs& signs) {
            check_that_nobody_waits(comm, signs, views);
        });
    }
    for (int const size : {2, 3, 4, 8}) {
        Shared<Signs> const signs;
        run_process_ranks({size}, [&](joinable::ProcessCommunicator& comm) {
            WithoutArenas on_heap{comm};
            check_that_nobody_waits(on_heap, *signs, true);
        });
    }
}

TEST_CASE("a joined rank that handles the failure of finish() leaves no rank waiting for its shares"
) {
    run_with_signs({2, 3, 4, 8}, [](auto& comm, Signs& signs) {
        std::vector<FixedParam> params; // the last one's bucket leaves first
        for (std::size_t const size : {300'000U, 1'000'000U, 1000U}) {
            constexpr auto f32 = joinable::DType::f32;
            params.push_back({{f32, {size}, {1}}, {f32, {size}, {1}}, {}});
            if (comm.rank() != 1) {
                params.back().need_grad();
            }
        }
        joinable::DistributedDataParallel ddp{
            comm, joinable::parameters(params), {.bucket_cap_bytes = 4, .rebuild_buckets = false}
        };
        int const others = comm.size() - 1;
        std::string text;
        try {
            joinable::Join join{joinable::participants(ddp)};
            if (comm.rank() == 1) { // it has no gradient to receive the first average in
                CHECK_THROWS_AS(join.finish(), joinable::ContractViolation);
                // The deadline would end the others' wait later than this.
                for (int k = 0; k < 300 && signs.ended.load() != others; ++k) {
                    std::this_thread::sleep_for(std::chrono::milliseconds{100});
                }
                CHECK(signs.ended.load() == others);
                CHECK_THROWS_AS(
                    ddp.forward([] {}), joinable::ContractViolation
                ); // the guard is over
                return;
            }
            ddp.forward([] {});
            ddp.backward([&](auto const& ready) {
                for (std::size_t i = params.size(); i-- > 0;) {
                    ready(i);
                }
            });
            join.finish();
        } catch (joinable::PeerFailed const& error) {
            CHECK(error.rank() == 1);
            text = error.what();
        }
        ++signs.ended;
        CAPTURE(text);
        CHECK(text.find("no gradient to receive the average in") != std::string::npos);
    });
}

} // namespace
