// SPDX-License-Identifier: BSL-1.0
// Thread ranks that train the same memory: refused when the model is made, on all ranks, by name.
#include <joinable/communicator/model_table.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <support/gathered_param.hpp>
#include <support/linear_model.hpp>
#include <support/machines.hpp>
#include <support/ranks.hpp>
#include <support/volume.hpp>

#include <joinable/any_communicator.hpp>
#include <joinable/communicator/algorithms/communicator.hpp>
#include <joinable/communicator/self.hpp>
#include <joinable/communicator/shared_memory/thread.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/hierarchical.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/optimizer/rules.hpp>
#include <joinable/participant/data_parallel.hpp>
#include <joinable/participant/sharded/data_parallel.hpp>
#include <joinable/participant/sharded/zero_redundancy_optimizer.hpp>
#include <joinable/participant/step.hpp>
#include <joinable/tensor/any_view.hpp>

namespace {

using namespace joinable_tests;
using joinable::ContractViolation;
using joinable::DistributedDataParallel;
using joinable::PeerFailed;
using joinable::Sgd;
using joinable::ShardedDataParallel;
using joinable::ShardedOptions;
using joinable::Sharding;
using joinable::ThreadCommunicator;
using joinable::ZeroRedundancyOptimizer;

using Params = std::vector<Param<float>>;

/// Makes a model on every rank and checks that all ranks throw; those that see it say how.
void check_refused(
    std::atomic<int>& seen, std::string const& shared, std::function<void()> const& make
) {
    std::string text = "nothing";
    try {
        make();
    } catch (ContractViolation const& error) {
        text = error.what();
        ++seen;
    } catch (PeerFailed const& error) {
        text = error.what();
        CHECK(text.find(" failed: ") != std::string::npos);
    } catch (std::exception const& error) {
        text = error.what();
    }
    CAPTURE(text);
    CHECK(text.find(shared) != std::string::npos);
    CHECK(
        text.find("; make a model for each rank, in the body of run_threads") != std::string::npos
    );
}

TEST_CASE("thread ranks that train one model are told when they make its participant") {
    for (int const ranks : groups_of_participants({2, 3, 4})) {
        Params params = make_params<float>({3, 2});
        params[1].name = "fc.weight";
        params[0].requires_grad = false; // frozen parameters may be shared
        std::vector<CopyingParam> gathered;
        gathered.emplace_back(3);
        std::atomic<int> seen = 0;
        run_ranks({ranks}, [&](ThreadCommunicator& comm) {
            std::string const values = "share the value of parameter 1 (fc.weight)";
            for (int time = 0; time < 2; ++time) { // the group goes on
                check_refused(seen, values, [&] { DistributedDataParallel{comm, params}; });
                check_refused(seen, ", or set DataParallelOptions::shares_values", [&] {
                    DistributedDataParallel{comm, params};
                });
                for (Sharding const sharding :
                     {Sharding::none, Sharding::optimizer, Sharding::gradients}) {
                    check_refused(seen, values, [&] {
                        ShardedDataParallel{
                            comm, params, Sgd{}, ShardedOptions{.sharding = sharding}
                        };
                    });
                }
                check_refused(seen, "share the value of parameter 0", [&] {
                    ShardedDataParallel{
                        comm, gathered, Sgd{}, ShardedOptions{.sharding = Sharding::parameters}
                    };
                });
                check_refused(seen, values, [&] { ZeroRedundancyOptimizer{comm, params, Sgd{}}; });
                Params own = make_params<float>({1});
                ZeroRedundancyOptimizer zero{comm, own, Sgd{}};
                check_refused(seen, values, [&] { zero.add_parameter_group(params, Sgd{}); });
            }
        });
        CHECK(seen >= 2 * 8); // at least the last rank of each time
    }
}

TEST_CASE("thread ranks may share frozen parameters, and elements that views leave out") {
    run_ranks({1, 2, 3}, [](ThreadCommunicator& comm) {
        static std::vector<float> numbers(300); // each rank has every hundredth number
        static std::vector<float> frozen(7);
        struct View {
            joinable::AnyView value;
            joinable::AnyView grad;
            bool requires_grad = true;
        };
        std::size_t const rank = static_cast<std::size_t>(comm.rank());
        std::vector<float> gradient(3);
        std::vector<View> params{
            {joinable::AnyView{numbers.data() + rank, joinable::DType::f32, {3}, {100}},
             joinable::AnyView{gradient}},
            {joinable::AnyView{frozen}, joinable::AnyView{frozen}, false}
        };
        DistributedDataParallel ddp{comm, params, {.sync_at_start = false}};
        ddp.forward([] {});
        ddp.backward([](auto ready) { ready(0); });
    });
}

TEST_CASE("ranks may share values if they say so, but never gradients") {
    std::vector<float> values(4, 1.0F);
    std::vector<float> gradients(4);
    struct View {
        joinable::AnyView value;
        joinable::AnyView grad;
    };
    joinable::DataParallelOptions const options{
        .sync_at_start = false, .sync_at_end = false, .shares_values = true
    };
    std::atomic<int> seen = 0;
    run_ranks({2, 3}, [&](ThreadCommunicator& comm) {
        std::vector<float> own(4, static_cast<float>(comm.rank()));
        std::vector<View> params{{joinable::AnyView{values}, joinable::AnyView{own}}};
        {
            DistributedDataParallel ddp{comm, params, options};
            ddp.forward([] {});
            ddp.backward([](auto ready) { ready(0); });
            CHECK(own[0] == (comm.size() == 2 ? 0.5F : 1.0F));
        }
        params[0].grad = joinable::AnyView{gradients};
        check_refused(seen, "share the gradient of parameter 0; make a model", [&] {
            DistributedDataParallel{comm, params, options};
        });
        if (comm.rank() == 0) { // its gradient is the value of the others
            params[0] = {joinable::AnyView{own}, joinable::AnyView{values}};
        } else {
            params[0].grad = joinable::AnyView{own};
        }
        check_refused(
            seen,
            comm.size() == 2
                ? "the gradient of parameter 0 on rank 0 and the value of parameter 0 on rank 1 share memory; make"
                : " share ",
            [&] { DistributedDataParallel{comm, params}; }
        );
        std::string text; // an option that ranks have differently
        try {
            DistributedDataParallel{comm, params, {.shares_values = comm.rank() == 0}};
        } catch (std::exception const& error) {
            text = error.what();
        }
        CHECK_FALSE(text.empty());
    });
    CHECK(seen >= 4);
}

TEST_CASE("thread ranks behind any transport that train one model are told, too") {
    Params params = make_params<float>({3, 2});
    std::atomic<int> seen = 0;
    run_ranks({2, 3}, [&](ThreadCommunicator& threads) {
        joinable::AnyCommunicator comm{threads};
        std::string const values = "share the value of parameter 0";
        check_refused(seen, values, [&] { DistributedDataParallel{comm, params}; });
        check_refused(seen, values, [&] { ZeroRedundancyOptimizer{comm, params, Sgd{}}; });
        joinable::AnyCommunicator group = comm.split(0, 0);
        check_refused(seen, values, [&] { ShardedDataParallel{group, params, Sgd{}}; });
        joinable::MessageCommunicator messages{threads};
        check_refused(seen, values, [&] { DistributedDataParallel{messages, params}; });
    });
    CHECK(seen >= 2 * 4); // at least the last rank of each
}

/// A rank that counts who has entered.
struct OneOfThreads : joinable::SelfCommunicator {
    struct Table final : joinable::detail::ModelTable {
        void enter(joinable::detail::TrainedMemory const& /*memory*/) override { ++entered; }
        void leave(joinable::detail::TrainedMemory const& /*memory*/) noexcept override {
            --entered;
        }
        int entered = 0;
    };
    joinable::detail::ModelTable* model_table() { return &table; }
    Table table;
};

TEST_CASE("memory counts no longer when the ranks have agreed or failed") {
    run_ranks({2, 3}, [](ThreadCommunicator& comm) {
        static Params params = make_params<float>({3}); // one rank after another has it
        for (int turn = 0; turn < 2 * comm.size(); ++turn) {
            bool const has_it = turn % comm.size() == comm.rank();
            Params own = make_params<float>({3});
            if (turn >= comm.size()) { // a rank fails before it has entered anything
                Params none = make_params<float>({3});
                none[0].requires_grad = false;
                CHECK_THROWS((DistributedDataParallel{comm, has_it ? none : own}));
            }
            DistributedDataParallel const ddp{comm, has_it ? params : own};
            ZeroRedundancyOptimizer const zero{comm, has_it ? params : own, Sgd{}};
        }
    });
    OneOfThreads self;
    {
        Params params = make_params<float>({3});
        joinable::ParameterList const list = joinable::parameters(params);
        joinable::detail::ModelEntry entry{self};
        entry.enter(list, false);
        CHECK(self.table.entered == 1);
    }
    CHECK(self.table.entered == 0);
    // A rank whose exchange never ends leaves as well.
    run_ranks({2}, [](ThreadCommunicator& comm) {
        static Params params = make_params<float>({3});
        static std::atomic<bool> has_failed = false;
        ThreadCommunicator group = comm.split(0, comm.rank());
        group.set_deadline(std::chrono::milliseconds{20});
        if (comm.rank() == 0) {
            CHECK_THROWS_AS((DistributedDataParallel{group, params}), joinable::TimedOut);
            has_failed = true;
        } else {
            wait_until([] { return has_failed.load(); });
            joinable::detail::ModelEntry entry{group};
            joinable::ParameterList const list = joinable::parameters(params);
            CHECK_NOTHROW(entry.enter(list, false));
        }
    });
}

TEST_CASE("only ranks of one group, in one exchange, are compared") {
    run_ranks({2}, [](ThreadCommunicator& comm) {
        static Params params = make_params<float>({3});
        joinable::ParameterList const list = joinable::parameters(params);
        ThreadCommunicator group = comm.split(0, -comm.rank());
        joinable::detail::ModelEntry of_group{group};
        if (group.rank() == 1) {
            of_group.enter(list, false);
        }
        {
            joinable::detail::ModelEntry first{comm};
            if (comm.rank() == 0) { // which is rank 1 of the other group
                CHECK_NOTHROW(first.enter(list, false));
            }
            comm.barrier();
            if (comm.rank() == 1) {
                joinable::detail::ModelEntry second{comm};
                CHECK_NOTHROW(second.enter(list, false));
                CHECK_THROWS_AS(first.enter(list, false), ContractViolation);
            }
            comm.barrier();
        }
    });
}

TEST_CASE("thread ranks of one machine among several are compared, by their rank among all") {
    Params params = make_params<float>({3});
    std::atomic<int> seen = 0;
    run_machines({1, 2}, [&](ThreadMachines& comm) {
        Params own = make_params<float>({3});
        Params& given = comm.machine() == 1 ? params : own;
        check_refused(
            seen,
            "ranks 1 and 2 share the value of parameter 0; make a model for each rank",
            [&] { DistributedDataParallel{comm, given}; }
        );
    });
    CHECK(seen == 1);
}

} // namespace
