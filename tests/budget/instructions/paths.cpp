// SPDX-License-Identifier: BSL-1.0
// The paths whose instructions check_instructions.py counts: `paths NAME` runs the path NAME a thousand times
// inside joinable_measured(). No path waits for another thread, so the count is the same in every run. A
// path of two ranks replays the words that its peer sent when both ran.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string_view>
#include <utility>
#include <vector>

#include <joinable/communicator/self.hpp>
#include <joinable/join.hpp>
#include <joinable/zero.hpp>

namespace {

constexpr int iterations = 1000;

/// What each rank put into its sums, in order.
using Script = std::array<std::vector<std::vector<std::uint64_t>>, 2>;

std::vector<std::uint64_t> words_of(joinable::Buffer buffer) {
    std::vector<std::uint64_t> words(buffer.count);
    std::memcpy(words.data(), buffer.data, buffer.bytes());
    return words;
}

/// A rank of two threads that writes down its words.
class Recorder {
public:
    Recorder(joinable::ThreadCommunicator& inner, Script& script)
        : inner_{inner}, own_{script[static_cast<std::size_t>(inner.rank())]} {}
    [[nodiscard]] int rank() const { return inner_.rank(); }
    [[nodiscard]] int size() const { return inner_.size(); }
    auto all_reduce(joinable::Buffer buffer, joinable::ReduceOp op) {
        own_.push_back(words_of(buffer));
        return inner_.all_reduce(buffer, op);
    }
    auto broadcast(joinable::Buffer buffer, int root) { return inner_.broadcast(buffer, root); }
    void barrier() { inner_.barrier(); }

private:
    joinable::ThreadCommunicator& inner_;
    std::vector<std::vector<std::uint64_t>>& own_;
};

/// The same rank alone: its peer has said everything before. It must say what it said then.
class Replayer {
public:
    Replayer(int rank, Script const& script)
        : rank_{rank}, own_{script[static_cast<std::size_t>(rank)]},
          peer_{script[static_cast<std::size_t>(1 - rank)]} {}
    [[nodiscard]] int rank() const { return rank_; }
    [[nodiscard]] int size() const { return 2; }
    joinable::CompletedWork all_reduce(joinable::Buffer buffer, joinable::ReduceOp /*sum*/) {
        auto* const words = static_cast<std::uint64_t*>(buffer.data);
        if (next_ >= own_.size() || own_[next_].size() != buffer.count ||
            std::memcmp(own_[next_].data(), words, buffer.bytes()) != 0) {
            std::fputs("the rank does not repeat what it said\n", stderr);
            std::_Exit(1);
        }
        for (std::size_t i = 0; i < buffer.count; ++i) {
            words[i] += peer_[next_][i];
        }
        ++next_;
        return {};
    }
    joinable::CompletedWork broadcast(joinable::Buffer /*buffer*/, int /*root*/) { return {}; }
    void barrier() {}

private:
    int rank_;
    std::size_t next_ = 0;
    std::vector<std::vector<std::uint64_t>> const& own_;
    std::vector<std::vector<std::uint64_t>> const& peer_;
};

template <class Comm>
struct Nothing {
    Comm& comm;
    joinable::JoinState state = {};

    struct Hook {
        void main_hook() {}
        void post_hook(bool) {}
    };
    Hook join_hook(joinable::arguments<joinable::keywords<>> const&) { return {}; }
    Comm& join_communicator() { return comm; }
    joinable::JoinState& join_state() { return state; }
};

/// A guard in which rank 0 has all inputs and rank 1 has `others`.
template <class Comm>
void run_guard(Comm& comm, int others) {
    Nothing<Comm> nothing{comm};
    joinable::Join guard{joinable::participants(nothing)};
    for (int i = 0; i < (comm.rank() == 0 ? iterations : others); ++i) {
        static_cast<void>(joinable::notify_join_context(nothing));
    }
    guard.finish();
}

struct Param {
    std::vector<float>* value_;
    std::vector<float>* grad_;
};
struct Model {
    std::vector<std::vector<float>> values{{1, 2, 3}, {4}, {5, 6}, {7, 8, 9, 10}};
    std::vector<std::vector<float>> grads = values;
    std::vector<Param> parameters;

    Model() {
        for (std::size_t i = 0; i < values.size(); ++i) {
            parameters.push_back({&values[i], &grads[i]});
        }
    }
};

} // namespace

template <>
struct joinable::parameter_traits<Param> {
    static std::vector<float>* value(Param const& p) { return p.value_; }
    static std::vector<float>* grad(Param const& p) { return p.grad_; }
};

/// Callgrind counts what runs in here.
extern "C" [[gnu::noinline]] void joinable_measured(std::function<void()> const& path) {
    path();
}

namespace {

/// Rank `rank` of a guard beside a scripted peer.
void replay(int rank, int others) {
    Script script;
    joinable::run_threads(2, [&](joinable::ThreadCommunicator& inner) {
        Recorder comm{inner, script};
        run_guard(comm, others);
    });
    Replayer comm{rank, script};
    joinable_measured([&] { run_guard(comm, others); });
}

void train() {
    joinable::SelfCommunicator comm;
    Model model;
    joinable::DistributedDataParallel ddp{comm, model.parameters};
    joinable::Join guard{joinable::participants(ddp)};
    joinable_measured([&] {
        for (int i = 0; i < iterations; ++i) {
            ddp.forward([] {});
            ddp.backward([&](auto ready) {
                for (std::size_t k = model.parameters.size(); k-- != 0;) {
                    ready(k);
                }
            });
        }
    });
    guard.finish();
}

void step() {
    joinable::SelfCommunicator comm;
    Model model;
    joinable::ZeroRedundancyOptimizer zero{comm, model.parameters, joinable::Adam{}};
    joinable_measured([&] {
        for (int i = 0; i < iterations; ++i) {
            zero.step();
        }
    });
}

void sum_alone() {
    joinable::run_threads(1, [](joinable::ThreadCommunicator& comm) {
        std::uint64_t words[7] = {};
        joinable_measured([&] {
            for (int i = 0; i < iterations; ++i) {
                comm.all_reduce({words, 7, joinable::DType::u64}, joinable::ReduceOp::sum).wait();
            }
        });
    });
}

void pack() {
    std::vector<float> from(64 * 64);
    std::vector<float> to(64 * 64);
    joinable::AnyView const columns{from.data(), joinable::DType::f32, {64, 64}, {1, 64}};
    joinable::AnyView const rows{to.data(), joinable::DType::f32, {64, 64}, {64, 1}};
    joinable_measured([&] {
        for (int i = 0; i < iterations; ++i) {
            joinable::copy(columns, rows);
        }
    });
}

} // namespace

int main(int argc, char** argv) {
    std::string_view const name = argc == 2 ? argv[1] : "";
    std::pair<std::string_view, std::function<void()>> const paths[] = {
        {"guarded_iteration", [] { replay(0, iterations); }},
        {"shadow_round", [] { replay(1, 0); }},
        {"iteration_of_ddp", train},
        {"step_of_zero", step},
        {"sum_of_one_thread", sum_alone},
        {"transposed_copy", pack},
    };
    for (auto const& [known, run] : paths) {
        if (known == name) {
            run();
            return 0;
        }
    }
    std::fputs("usage: paths NAME\n", stderr);
    return 2;
}
