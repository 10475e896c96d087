// SPDX-License-Identifier: BSL-1.0
#include <joinable/bucket/reducer.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/linear_model.hpp>
#include <support/named_param.hpp>
#include <support/ranks.hpp>
#include <support/recording_communicator.hpp>
#include <support/wait_until.hpp>

namespace {

using namespace joinable_tests;
using joinable::DType;
using joinable::Reducer;

TEST_CASE("a bucket is launched before the last gradient is ready, in index order") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& inner) {
        RecordingCommunicator comm{inner};
        auto params = make_params<float>({4, 4, 4, 4});
        Reducer reducer{
            comm,
            joinable::parameters(params),
            {.bucket_cap_bytes = 16, .first_bucket_bytes = 16, .rebuild_buckets = false}
        };
        REQUIRE(reducer.buckets().size() == 4);
        reducer.prepare_for_backward(1.0);
        reducer.mark_ready(2); // its bucket is full, but not the first
        CHECK(comm.trace.empty());
        reducer.mark_ready(3);
        CHECK(comm.trace.size() == 2);
        reducer.mark_ready(1);
        CHECK(comm.trace.size() == 3);
        reducer.mark_ready(0);
        CHECK(comm.trace.size() == 4);
        reducer.finalize_backward();
    });
}

TEST_CASE("a pass that takes longer than the deadline is not cut short by what it sends") {
    std::atomic<bool> has_passed{false};
    run_ranks({2, 3}, [&](joinable::ThreadCommunicator& comm) {
        auto params = make_params<float>(std::vector<std::size_t>(16, 4));
        Reducer reducer{
            comm,
            joinable::parameters(params),
            {.bucket_cap_bytes = 16, .first_bucket_bytes = 16, .rebuild_buckets = false}
        };
        comm.barrier();
        if (comm.rank() == 0) {
            has_passed = false;
        }
        comm.barrier();
        auto const deadline = comm.set_deadline(std::chrono::milliseconds{50});
        if (comm.rank() == 0) {
            reducer.prepare_for_backward(1.0);
            for (std::size_t i = params.size(); i-- > 0;) { // no rank answers meanwhile
                std::this_thread::sleep_for(std::chrono::milliseconds{15});
                reducer.mark_ready(i);
            }
        }
        comm.set_deadline(deadline);
        if (comm.rank() == 0) {
            has_passed = true;
        } else {
            wait_until([&] { return has_passed || comm.is_aborted(); });
            reducer.prepare_for_backward(1.0);
            for (std::size_t i = params.size(); i-- > 0;) {
                reducer.mark_ready(i);
            }
        }
        reducer.finalize_backward();
    });
}

TEST_CASE("a factor scales as gradients are packed, in place where they live in the buckets") {
    for (bool const views : {false, true}) {
        over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
            auto params = make_params<float>({5, 3});
            Reducer reducer{comm, joinable::parameters(params), {.gradient_as_bucket_view = views}};
            for (int round = 0; round < 3; ++round) {
                reducer.prepare_for_backward(0.5);
                params[1].g(2) = 4.0F;
                params[0].g(4) = 2.0F;
                reducer.mark_ready(1);
                reducer.mark_ready(0);
                reducer.finalize_backward();
                CHECK(params[1].g(2) == 2.0F * static_cast<float>(comm.size()));
                CHECK(params[0].g(4) == static_cast<float>(comm.size()));
            }
            bool const aliases = params[0].grad.data() != params[0].storage.data();
            CHECK(aliases == views);
        });
    }
}

TEST_CASE("gradients move into the buckets with their contents") {
    over_ranks({1, 2}, [](RankCommunicator& comm) {
        auto params = make_params<float>({2});
        params[0].g(1) = 7.0F;
        Reducer const reducer{
            comm, joinable::parameters(params), {.gradient_as_bucket_view = true}
        };
        CHECK(params[0].g(1) == 7.0F);
        CHECK(params[0].grad.data() == reducer.buckets()[0].views[0].data());
    });
}

TEST_CASE("a parameter without gradient contributes zeros and receives the average") {
    over_ranks({1, 2, 4}, [](RankCommunicator& comm) {
        auto params = make_params<float>({2});
        if (comm.rank() == 0) {
            params[0].grad = {};
        } else {
            params[0].g(0) = 3.0F;
        }
        Reducer reducer{comm, joinable::parameters(params)};
        reducer.prepare_for_backward(1.0);
        reducer.mark_ready(0);
        reducer.finalize_backward();
        CHECK(params[0].g(0) == 3.0F * static_cast<float>(comm.size() - 1));
    });
}

struct Plain {
    std::vector<float> value;
    std::optional<std::vector<float>> grad;
};

TEST_CASE("a gradient that is missing and cannot be made is named") {
    over_ranks({1}, [](RankCommunicator& comm) {
        std::vector<Plain> params{{{1.0F}, {}}};
        Reducer reducer{comm, joinable::parameters(params)};
        CHECK_THROWS_WITH_AS(
            reducer.contribute_zeros(),
            "parameter 0 on rank 0 has no gradient to receive the average in; give it a zero "
            "gradient before "
            "the first iteration, or specialise parameter_traits::set_grad",
            joinable::ContractViolation
        );
        auto const with_views = [&] {
            Reducer views{comm, joinable::parameters(params), {.gradient_as_bucket_view = true}};
        };
        CHECK_THROWS_AS(with_views(), joinable::ContractViolation);
    });
}

TEST_CASE("an iteration whose averages were not all written is not finished by a second try") {
    over_ranks({1, 2}, [](RankCommunicator& comm) {
        std::vector<Plain> params{{{1.0F}, std::vector<float>{8.0F}}, {{1.0F}, {}}};
        Reducer reducer{comm, joinable::parameters(params)};
        reducer.prepare_for_backward(0.5);
        reducer.mark_ready(1);
        reducer.mark_ready(0);
        CHECK_THROWS_AS(reducer.finalize_backward(), joinable::ContractViolation);
        params[1].grad.emplace(1); // too late: parameter 0 was not reached
        CHECK_THROWS_WITH_AS(
            reducer.finalize_backward(),
            doctest::Contains("could not be written into all of its gradients"),
            joinable::ContractViolation
        );
    });
}

TEST_CASE("misuse of the verbs names the parameter, the rank and what to do") {
    over_ranks({1}, [](RankCommunicator& comm) {
        auto params = make_params<float>({2, 3, 1});
        params[1].name = "fc.weight";
        params[2].requires_grad = false;
        Reducer reducer{comm, joinable::parameters(params)};
        auto const text_of = [&](auto const& verb) {
            try {
                verb();
            } catch (joinable::ContractViolation const& error) {
                return std::string{error.what()};
            }
            return std::string{};
        };
        CHECK(
            text_of([&] { reducer.mark_ready(0); }) ==
            "parameter 0 on rank 0 was marked ready outside ddp.backward() or before "
            "prepare_for_backward()"
        );
        reducer.prepare_for_backward(1.0);
        CHECK(text_of([&] {
                  reducer.mark_ready(3);
              }) == "parameter 3 is out of range on rank 0: there are 3 parameters");
        CHECK(text_of([&] {
                  reducer.mark_ready(static_cast<std::size_t>(-1));
              }) == "parameter -1 is out of range on rank 0: there are 3 parameters");
        CHECK(text_of([&] {
                  reducer.mark_ready(2);
              }) == "parameter 2 on rank 0 was marked, but does not require a gradient");
        reducer.mark_ready(1);
        CHECK(
            text_of([&] { reducer.mark_ready(1); }) ==
            "parameter 1 (fc.weight) on rank 0 was marked ready twice in an iteration; mark a "
            "parameter that is shared by modules or used in several passes once, when its last use "
            "is done, or turn static_graph on, which counts its uses"
        );
        CHECK(
            text_of([&] { reducer.finalize_backward(); }) ==
            "not all gradients became ready; mark every trainable parameter in each "
            "iteration, set requires_grad to false where there is nothing to train, or turn "
            "the option find_unused or static_graph on (rank 0 did not mark parameter 0)"
        );
        CHECK(
            text_of([&] { reducer.prepare_for_backward(1.0); }) ==
            "the previous iteration was not finalized; call finalize_backward() first (rank 0 "
            "did not mark parameter 0)"
        );
    });
}

TEST_CASE(
    "a parameter that is frozen or unfrozen after the model was made is named, with what to do"
) {
    over_ranks({1}, [](RankCommunicator& comm) {
        auto params = make_params<float>({1, 1, 1});
        params[2].requires_grad = false;
        Reducer reducer{comm, joinable::parameters(params)};
        reducer.prepare_for_backward(1.0);
        reducer.mark_ready(1);
        params[0].requires_grad = false;
        params[2].requires_grad = true;
        CHECK_THROWS_WITH_AS(
            reducer.mark_ready(2),
            "parameter 2 on rank 0 was marked and requires a gradient now, but did not when the model was made; "
            "make the model anew after unfreezing parameters",
            joinable::ContractViolation
        );
        CHECK_THROWS_WITH_AS(
            reducer.finalize_backward(),
            doctest::Contains(
                "(rank 0 did not mark parameter 0); parameter 0 requires no gradient any more, but "
                "did when the model was made: make the model anew after freezing parameters"
            ),
            joinable::ContractViolation
        );
    });
}

TEST_CASE("a model that cannot be reduced is refused at construction, by a text that says why") {
    over_ranks({1}, [](RankCommunicator& comm) {
        auto const text_of = [&](auto& params) {
            try {
                Reducer const reducer{comm, joinable::parameters(params)};
            } catch (joinable::ContractViolation const& error) {
                return std::string{error.what()};
            }
            return std::string{};
        };
        auto frozen = make_params<float>({2});
        frozen[0].requires_grad = false;
        CHECK(
            text_of(frozen) ==
            "no parameter requires a gradient: there is nothing to reduce; give the parameters "
            "to train, with requires_grad = true, or run without this model"
        );
        auto none = make_params<float>({});
        CHECK(
            text_of(none) ==
            "the list of parameters is empty: there is nothing to reduce; give the parameters to "
            "train, with requires_grad = true, or run without this model"
        );
        std::vector<Plain> longer{{{1.0F}, std::vector<float>(2)}};
        CHECK(
            text_of(longer) ==
            "the gradient of parameter 0 on rank 0 is f32 (2), but its value is f32 (1); both need "
            "the same dtype, extents and device"
        );
        std::vector<NamedParam> turned;
        turned.push_back(
            {{{DType::f32, {8, 4}, {4, 1}}, {DType::f32, {4, 8}, {8, 1}}, {}}, "fc.weight"}
        );
        turned[0].grad = turned[0].own.view();
        CHECK(
            text_of(turned) ==
            "the gradient of parameter 0 (fc.weight) on rank 0 is f32 (4, 8), but its value is f32 (8, 4); "
            "both need the same dtype, extents and device"
        );
        auto elsewhere = make_params<float>({2});
        joinable::AnyView const host = elsewhere[0].grad;
        elsewhere[0].grad = {
            host.data(),
            host.dtype(),
            host.extents(),
            host.strides(),
            joinable::DeviceId{joinable::DeviceKind::cuda, 0}
        };
        CHECK(
            text_of(elsewhere) ==
            "the gradient of parameter 0 on rank 0 is f32 (2) on CUDA device 0, but its value is f32 (2) on "
            "the host; both need the same dtype, extents and device"
        );
    });
}

TEST_CASE("no two buckets share a cache line, and gradients keep the strides of dense values") {
    over_ranks({1}, [](RankCommunicator& comm) {
        std::vector<float> dense(12);
        std::vector<float> gaps(24);
        struct View {
            joinable::StridedView<float> value;
            joinable::StridedView<float> grad;
        };
        auto const by_columns = joinable::as_strided(dense, {3, 4}, {1, 3});
        auto const padded = joinable::as_strided(gaps, {3, 4}, {8, 1});
        std::vector<View> views{{by_columns, by_columns}, {padded, padded}};
        auto params = make_params<float>({3, 5, 0});
        Reducer const reducer{
            comm,
            joinable::parameters(views, params),
            {.bucket_cap_bytes = 1, .first_bucket_bytes = 1}
        };
        for (joinable::Bucket const& bucket : reducer.buckets()) {
            CHECK(reinterpret_cast<std::uintptr_t>(bucket.buffer.data) % 64 == 0);
        }
        auto const strides_of = [&](std::size_t parameter) {
            for (joinable::Bucket const& bucket : reducer.buckets()) {
                for (std::size_t k = 0; k < bucket.parameters.size(); ++k) {
                    if (bucket.parameters[k] == parameter) {
                        return bucket.views[k].strides();
                    }
                }
            }
            return joinable::Shape{};
        };
        CHECK(strides_of(0) == joinable::Shape{1, 3});
        CHECK(strides_of(1) == joinable::Shape{4, 1});
    });
}

} // namespace
