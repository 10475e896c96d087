// SPDX-License-Identifier: BSL-1.0
// Participants as members of a class, which names their types.
#include <joinable/participant/step.hpp>

#include <functional>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/linear_model.hpp>
#include <support/ranks.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/participant/action.hpp>
#include <joinable/participant/data_parallel.hpp>

namespace {

using namespace joinable_tests;

/// Each type has the communicator first, as its constructor does.
template <class Comm>
class Trainer {
public:
    explicit Trainer(Comm& comm)
        : ddp_{comm, model_}, step_{comm, [this] { model_[0].value[0] -= model_[0].g(0); }},
          count_{comm, [this] { ++rounds_; }, [this] { ++rounds_; }} {}

    void train(int inputs) {
        joinable::Join guard{joinable::participants(ddp_, step_, count_)};
        for (int i = 0; i < inputs; ++i) {
            ddp_.forward([] {});
            ddp_.backward([&](auto ready) {
                model_[0].g(0) = 1;
                ready(0);
            });
            step_.step();
            count_();
        }
        guard.finish();
    }
    [[nodiscard]] double value() const { return model_[0].value[0]; }
    [[nodiscard]] int rounds() const { return rounds_; }

private:
    std::vector<Param<double>> model_ = make_params({1}, 0.0);
    int rounds_ = 0;
    joinable::DistributedDataParallel<Comm> ddp_;
    joinable::Step<Comm, std::function<void()>> step_;
    joinable::Action<Comm, std::function<void()>, std::function<void()>> count_;
};

TEST_CASE("a class has participants as members, whose types name the communicator first") {
    run_ranks({2}, [](auto& comm) {
        Trainer trainer{comm};
        trainer.train(1 + comm.rank());
        CHECK(trainer.value() == -1.5); // both ranks have a gradient of 1, then one of two
        CHECK(trainer.rounds() == 2);
    });
}

} // namespace
