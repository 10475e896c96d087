// SPDX-License-Identifier: BSL-1.0
// Runs four participants in the one correct order, whatever order they are listed in. Each names
// what it runs before or after; a participant of another library is placed from outside.
#include <joinable/join.hpp>

#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdio>
#include <random>
#include <utility>
#include <vector>

// ---- another library, which does not know the participants beside it -----------------------------

namespace other_library {

/// Records the length of the gradient in each round and the error of the model at the end.
template <class Model>
class Recorder {
public:
    Recorder(joinable::ThreadCommunicator& comm, Model const& model) : comm_{comm}, model_{model} {}

    void operator()() {
        (void)joinable::notify_join_context(*this);
        note();
    }
    [[nodiscard]] double mean_length() const { return lengths_ / static_cast<double>(rounds_); }
    [[nodiscard]] double error_at_the_end() const { return error_; }

    struct Hook { // no label and no order
        Recorder& recorder;
        void main_hook() { recorder.note(); }
        void post_hook(bool) { recorder.error_ = recorder.model_.error(); }
    };
    Hook join_hook(joinable::arguments<joinable::keywords<>> const&) { return {*this}; }
    joinable::ThreadCommunicator& join_communicator() { return comm_; }
    joinable::JoinState& join_state() { return state_; }

private:
    void note() {
        lengths_ += model_.length_of_gradient();
        ++rounds_;
    }

    joinable::ThreadCommunicator& comm_;
    Model const& model_;
    joinable::JoinState state_;
    double lengths_ = 0;
    std::size_t rounds_ = 0;
    double error_ = 0;
};

} // namespace other_library

// ---- this program -------------------------------------------------------------------------------

/// A line, fitted to points around y = 2 x + 1.
class Line {
public:
    struct Parameter {
        std::vector<double> value = {0, 0}; // slope and height
        std::vector<double> grad = {0, 0};
    };

    void fit(double x, double y) {
        double const off = parameters[0].value[0] * x + parameters[0].value[1] - y;
        parameters[0].grad = {off * x, off};
    }
    void step() {
        for (std::size_t i = 0; i < 2; ++i) {
            parameters[0].value[i] -= 0.3 * parameters[0].grad[i];
        }
    }
    /// The mean squared distance from the true line, over x in [-1, 1].
    [[nodiscard]] double error() const {
        double const slope = parameters[0].value[0] - 2;
        double const height = parameters[0].value[1] - 1;
        return slope * slope / 3 + height * height;
    }
    [[nodiscard]] double length_of_gradient() const {
        auto const& grad = parameters[0].grad;
        return std::sqrt(grad[0] * grad[0] + grad[1] * grad[1]);
    }

    std::vector<Parameter> parameters = {{}};
};

/// Averages the parameters over the last steps and writes the average into the model at the end,
/// because it is less noisy than the last step's result. After Polyak and Juditsky (1992).
class Average {
public:
    Average(joinable::ThreadCommunicator& comm, Line& line) : comm_{comm}, line_{line} {}

    void operator()() {
        (void)joinable::notify_join_context(*this);
        add();
    }

    struct Label;
    struct Hook {
        using label = Label; // the name for other hooks
        using runs_after = joinable::labels_of<joinable::labels::step>;

        Average& average;
        void main_hook() { average.add(); }
        void post_hook(bool) { average.line_.parameters[0].value = average.value_; }
    };
    Hook join_hook(joinable::arguments<joinable::keywords<>> const&) { return {*this}; }
    joinable::ThreadCommunicator& join_communicator() { return comm_; }
    joinable::JoinState& join_state() { return state_; }

private:
    void add() {
        for (std::size_t i = 0; i < 2; ++i) {
            value_[i] += 0.02 * (line_.parameters[0].value[i] - value_[i]);
        }
    }

    joinable::ThreadCommunicator& comm_;
    Line& line_;
    joinable::JoinState state_;
    std::vector<double> value_ = {0, 0};
};

using Recorder = other_library::Recorder<Line>;

/// Places the recorder: in a round between the gradients and the step, at the end after the
/// average, whose error it records. Without the last two lines the order at the end would be that
/// of a round.
template <>
struct joinable::hook_order<Recorder::Hook> {
    using after = labels_of<labels::gradients>;
    using before = labels_of<labels::step>;
    using post_after = labels_of<Average::Label>;
    using post_before = labels_of<>;
};

template <std::size_t... I>
void print(char const* what, std::index_sequence<I...>) {
    constexpr std::array names{"average", "recorder", "step", "ddp"};
    std::printf("%s", what);
    (std::printf(" %s", names[I]), ...);
    std::printf("\n");
}

int main() {
    constexpr int ranks = 3;
    std::array<double, ranks> lengths{};
    std::array<double, ranks> unaveraged{};
    std::array<double, ranks> averaged{};
    joinable::run_threads(ranks, [&](joinable::ThreadCommunicator& comm) {
        auto const rank = static_cast<std::size_t>(comm.rank());
        Line line;
        Average average{comm, line};
        Recorder recorder{comm, line};
        joinable::Step step{comm, [&] { line.step(); }};
        joinable::DistributedDataParallel ddp{comm, line.parameters};
        {
            joinable::Join guard{joinable::participants(average, recorder, step, ddp)};
            std::mt19937 random{static_cast<std::mt19937::result_type>(rank)};
            auto const between_minus_one_and_one = [&] {
                return static_cast<double>(random()) / 0x1p31 - 1.0;
            };
            std::size_t const points = 200 + 100 * rank;
            for (std::size_t point = 0; point < points; ++point) {
                double const x = between_minus_one_and_one();
                double const y = 2 * x + 1 + between_minus_one_and_one();
                ddp.forward([] {});
                ddp.backward([&](auto ready) {
                    line.fit(x, y);
                    ready(0);
                });
                recorder();
                step.step();
                average();
                unaveraged[rank] += point + 100 < points ? 0 : line.error() / 100;
            }
        }
        lengths[rank] = recorder.mean_length();
        averaged[rank] = recorder.error_at_the_end();

        if (rank == 0) {
            using Rounds =
                joinable::hook_sequence<Average, Recorder, decltype(step), decltype(ddp)>;
            using End =
                joinable::post_hook_sequence<Average, Recorder, decltype(step), decltype(ddp)>;
            static_assert(std::same_as<Rounds, std::index_sequence<3, 1, 2, 0>>);
            static_assert(std::same_as<End, std::index_sequence<3, 2, 0, 1>>);
            print("listed:       ", std::make_index_sequence<4>{});
            print("in each round:", Rounds{});
            print("at the end:   ", End{});
        }
    });
    for (int rank = 0; rank < ranks; ++rank) {
        auto const r = static_cast<std::size_t>(rank);
        std::printf("rank %d: mean length of the gradients %.3f, ", rank, lengths[r]);
        std::printf("error of the average %.4f\n", averaged[r]);
    }
    std::printf(
        "error after each of the last 100 steps, in the mean: %.4f\n", unaveraged[ranks - 1]
    );
}

// Output:
// listed:        average recorder step ddp
// in each round: ddp recorder step average
// at the end:    ddp step average recorder
// rank 0: mean length of the gradients 0.314, error of the average 0.0019
// rank 1: mean length of the gradients 0.314, error of the average 0.0019
// rank 2: mean length of the gradients 0.314, error of the average 0.0019
// error after each of the last 100 steps, in the mean: 0.0204
