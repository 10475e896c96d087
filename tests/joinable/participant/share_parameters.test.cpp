// SPDX-License-Identifier: BSL-1.0
// Ranks whose models have their values in one memory.
#include <joinable/participant/share_parameters.hpp>

#include <atomic>
#include <csignal>
#include <cstddef>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <support/gathered_param.hpp>
#include <support/linear_model.hpp>
#include <support/numbers.hpp>
#include <support/process_ranks.hpp>
#include <support/shared.hpp>
#include <support/thrown_by.hpp>
#include <support/volume.hpp>

#include <joinable/communicator/collectives.hpp>
#include <joinable/communicator/self.hpp>
#include <joinable/communicator/shared_handle.hpp>
#include <joinable/error.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/participant/step.hpp>
#include <joinable/tensor/any_view.hpp>

namespace {

using namespace joinable_tests;
using joinable::AnyView;
using joinable::ContractViolation;
using joinable::DType;
using joinable::share_parameters;
using joinable::SharedParameters;

/// A permuted matrix, one with gaps, nothing, a frozen one of other elements, and a scalar.
std::vector<GatheredParam> make_model(int rank) {
    std::vector<StridedParam> params;
    auto const add = [&](DType dtype, joinable::Shape extents, joinable::Shape strides) {
        params.push_back({{{dtype, extents, strides}, {dtype, extents, strides}, {}, true}});
        Numbers numbers;
        for (std::size_t k = 0; k < params.back().value.view().numel(); ++k) {
            numbers.push_back(static_cast<double>(10 * params.size() + k) + 1000 * rank);
        }
        write(params.back().value.view(), numbers);
    };
    add(DType::f32, {3, 5}, {1, 3});
    add(DType::f64, {2, 2}, {7, 2});
    add(DType::f32, {0}, {1});
    add(DType::i64, {4}, {1});
    params.back().requires_grad = false;
    add(DType::f32, {}, {});
    return gathered(std::move(params));
}
Numbers numbers_of_rank_0(std::size_t parameter, std::size_t count) {
    Numbers numbers;
    for (std::size_t k = 0; k < count; ++k) {
        numbers.push_back(static_cast<double>(10 * (parameter + 1) + k));
    }
    return numbers;
}

template <class F>
std::string text_of(F const& f) {
    try {
        f();
    } catch (std::exception const& error) {
        return error.what();
    }
    return {};
}

TEST_CASE("the values of all ranks are rank 0's, in one memory, each in its order") {
    run_all_ranks({1, 2, 3, 4, 8}, [](auto& comm) {
        std::vector<GatheredParam> model = make_model(comm.rank());
        {
            SharedParameters const shared = share_parameters(comm, model);
            CHECK(shared.buffer().size() == 64 * 4);
            for (std::size_t i = 0; i < model.size(); ++i) {
                AnyView const value = model[i].value;
                CHECK(read(value) == numbers_of_rank_0(i, value.numel()));
                auto const* const data = static_cast<std::byte const*>(value.data());
                bool const is_in = data >= shared.buffer().begin() && data < shared.buffer().end();
                CHECK(is_in == (value.numel() != 0));
                CHECK(model[i].sets == (value.numel() != 0 ? 1 : 0));
            }
            CHECK(model[0].value.strides() == joinable::Shape{1, 3}); // which its engine reads
            CHECK(model[1].value.strides() == joinable::Shape{2, 1});
            comm.barrier();
            if (comm.rank() == comm.size() - 1) {
                write(model[0].value, Numbers(15, 7.0));
            }
            comm.barrier();
            CHECK(read(model[0].value) == Numbers(15, 7.0));
            CHECK(read(model[1].value) == numbers_of_rank_0(1, 4)); // none lies over another
            CHECK(read(model[3].value) == numbers_of_rank_0(3, 4));
            comm.barrier();
        }
        for (GatheredParam const& param : model) { // its memory has ended
            CHECK(param.releases == param.sets);
        }
    });
}

TEST_CASE("steps of all ranks train one model, each its share of the inputs") {
    run_all_ranks({1, 2, 3, 4, 8}, [](auto& comm) {
        std::vector<GatheredParam> model = make_model(comm.rank());
        SharedParameters shared = share_parameters(comm, joinable::parameters(model));
        SharedParameters const moved{std::move(shared)}; // which releases nothing
        auto const weights = model[0].value.template as<float>();
        int const inputs = 100 * (comm.rank() + 1); // uneven
        for (int i = 0; i < inputs; ++i) {
            std::atomic_ref{weights(2, 4)}.fetch_add(1.0F);
        }
        comm.barrier();
        int const all = 100 * comm.size() * (comm.size() + 1) / 2;
        CHECK(weights(2, 4) == 24.0F + static_cast<float>(all));
        CHECK(weights(0, 0) == 10.0F);
        comm.barrier();
    });
}

TEST_CASE("a handle of shared values opens them in another process") {
    run_process_ranks({2}, [](auto& comm) {
        std::vector<GatheredParam> model = make_model(comm.rank());
        SharedParameters const shared = share_parameters(comm, model);
        joinable::SharedHandle handle = shared.buffer().handle();
        joinable::broadcast(comm, handle, 0).wait();
        auto const opened = joinable::SharedBuffer<std::byte>::open(handle);
        CHECK(reinterpret_cast<float const*>(opened.data())[0] == 10.0F);
        comm.barrier();
    });
}

TEST_CASE("values that cannot be moved are refused in a sentence, and stay where they are") {
    run_ranks({1, 2, 3, 4, 8}, [](joinable::ThreadCommunicator& comm) {
        auto plain = make_params<float>({3, 2}, 1.0F);
        plain[0].name = "fc.weight";
        CHECK(
            text_of([&] { (void)share_parameters(comm, plain); }) ==
            "share_parameters: the value of parameter 0 (fc.weight) cannot be moved: parameter_traits of its "
            "type needs 'static void set_value(P&, AnyView)' and 'static void release_value(P&)'"
        );
        CHECK(plain[0].value == std::vector<float>(3, 1.0F));
        std::vector<CopyingParam> copying;
        copying.emplace_back(3, 1.0F);
        CHECK(
            text_of([&] { (void)share_parameters(comm, copying); }) ==
            "share_parameters: set_value copies the value of parameter 0, but must keep the view that it gets"
        );
        CHECK(copying[0].value == std::vector<float>(3, 1.0F));
        comm.barrier();
    });
}

TEST_CASE("what one rank cannot share, all ranks hear of") {
    run_all_ranks({2, 3, 4, 8}, [](auto& comm) {
        bool const is_last = comm.rank() == comm.size() - 1;
        std::string const last = "rank " + std::to_string(comm.size() - 1);
        auto const refusal = [&](std::vector<GatheredParam>& model) {
            return text_of([&] { (void)share_parameters(comm, model); });
        };
        std::vector<GatheredParam> model = make_model(comm.rank());
        if (is_last) {
            model.pop_back();
        }
        CHECK(
            refusal(model).find("models differ: number of parameters: rank 0 has 5, " + last) !=
            std::string::npos
        );
        CHECK(model[0].sets == 0);

        model = make_model(comm.rank());
        AnyView const value = model[1].value;
        model[1].value = is_last ? AnyView{} : value;
        CHECK(
            refusal(model).find(
                is_last ? "parameter 1 has no value" : last + " failed: parameter 1"
            ) != std::string::npos
        );
        CHECK(model[0].sets == 0);

        model[1].value = value; // after all this
        model[3].set_fails = is_last;
        std::string const fails = refusal(model);
        CAPTURE(fails);
        CHECK(fails.find(is_last ? "bad_alloc" : last + " failed") != std::string::npos);
        for (std::size_t i = 0; i < model.size(); ++i) {
            CHECK(model[i].releases == model[i].sets);
        }
        CHECK(model[0].releases == 1);

        model = make_model(comm.rank());
        SharedParameters const shared = share_parameters(comm, model); // they go on
        CHECK(read(model[4].value) == Numbers{50.0});
        comm.barrier();
    });
}

TEST_CASE("an engine whose value throws at any read on one rank fails all, which go on") {
    run_all_ranks({1, 2, 3, 4, 8}, [](auto& comm) {
        bool const is_last = comm.rank() == comm.size() - 1;
        std::string const last = "rank " + std::to_string(comm.size() - 1);
        int failures = 0;
        for (bool is_shared = false; !is_shared; failures += is_shared ? 0 : 1) {
            std::vector<GatheredParam> model = make_model(comm.rank());
            model[3].reads_to_failure = is_last ? failures + 1 : 0;
            std::string const text = text_of([&] {
                SharedParameters const shared = share_parameters(comm, model);
                model[3].reads_to_failure = 0;
                CHECK(read(model[4].value) == Numbers{50.0});
                comm.barrier();
                is_shared = true;
            });
            CAPTURE(text);
            bool const is_told =
                text.find(is_last ? "bad_alloc" : last + " failed") != std::string::npos;
            CHECK(is_told != is_shared);
            for (GatheredParam const& param : model) {
                CHECK(param.releases == param.sets);
            }
        }
        CHECK(failures > 5);
    });
}

TEST_CASE("a process that is killed ends the sharing of others, and what they share stays readable"
) {
    for (int const world : groups_of_participants({2, 3, 4, 8})) {
        for (bool const is_shared : {false, true}) {
            int const culprit = is_shared ? 0 : world - 1; // rank 0 made the memory
            CAPTURE(world);
            CAPTURE(is_shared);
            Shared<std::atomic<int>> told;
            auto const body = [&](joinable::ProcessCommunicator& comm) {
                std::vector<GatheredParam> model = make_model(comm.rank());
                std::optional<SharedParameters> shared;
                auto const share = [&] { shared.emplace(share_parameters(comm, model)); };
                if (is_shared) {
                    share();
                }
                comm.barrier();
                if (comm.rank() == culprit) {
                    std::raise(SIGKILL);
                }
                auto const error =
                    thrown_by<joinable::PeerFailed>([&] { is_shared ? comm.barrier() : share(); });
                *told += error.rank() == culprit ? 1 : 0;
                if (is_shared) {
                    CHECK(read(model[0].value) == numbers_of_rank_0(0, 15));
                }
                shared.reset();
                for (GatheredParam const& param : model) {
                    CHECK(param.releases == param.sets);
                }
            };
            CHECK_THROWS_AS(run_process_ranks({world}, body), joinable::PeerFailed);
            CHECK(*told == world - 1);
        }
    }
}

TEST_CASE("thread ranks do not share what they share already, nor inside a guard") {
    run_ranks({2, 3, 4, 8}, [](joinable::ThreadCommunicator& comm) {
        std::vector<GatheredParam> model = make_model(comm.rank());
        SharedParameters const shared = share_parameters(comm, model);
        std::string const again = text_of([&] { (void)share_parameters(comm, model); });
        CAPTURE(again);
        CHECK(again.find("share the value of parameter 0") != std::string::npos);
        CHECK(model[0].sets == 1);
        joinable::Step step{comm, [] {}};
        joinable::Join guard{joinable::participants(step)};
        CHECK(text_of([&] {
                  (void)share_parameters(comm, model);
              }).find("share_parameters()") != std::string::npos);
        guard.finish();
    });
}

TEST_CASE("a single rank shares its values with itself") {
    joinable::SelfCommunicator comm;
    std::vector<GatheredParam> model = make_model(0);
    SharedParameters const shared = share_parameters(comm, model);
    CHECK(read(model[0].value) == numbers_of_rank_0(0, 15));
    std::vector<GatheredParam> none;
    CHECK(share_parameters(comm, none).buffer().size() == 0);
}

} // namespace
