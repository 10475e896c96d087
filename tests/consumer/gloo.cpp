// SPDX-License-Identifier: BSL-1.0
// A program with two ranks in threads that Gloo connects: a guard over different numbers of inputs.
#include <cstddef>
#include <cstdio>
#include <thread>
#include <vector>

#include <joinable/gloo.hpp>
#include <joinable/join.hpp>

namespace {

bool run(int rank, int size, char const* path) {
    joinable::GlooCommunicator comm{joinable::GlooOptions{
        .rank = rank, .size = size, .store = joinable::GlooFile{path}, .address = "127.0.0.1"
    }};
    std::vector<float> value(1);
    joinable::Step step{comm, [&] {
                            value[0] = 1;
                            joinable::all_reduce(comm, value).wait();
                        }};
    joinable::Join guard{joinable::participants(step)};
    for (int input = 0; input < 3 + comm.rank(); ++input) {
        step.step();
    }
    auto const result = guard.finish();
    std::printf("rank %d of %d: %zu rounds\n", comm.rank(), comm.size(), result.rounds);
    return value[0] == static_cast<float>(comm.size()) &&
           result.rounds == static_cast<std::size_t>(2 + comm.size());
}

} // namespace

int main(int count, char** arguments) {
    char const* const path = count > 1 ? arguments[1] : "ranks";
    bool is_right[2]{};
    std::thread other{[&] { is_right[1] = run(1, 2, path); }};
    is_right[0] = run(0, 2, path);
    other.join();
    return is_right[0] && is_right[1] ? 0 : 1;
}
