// SPDX-License-Identifier: BSL-1.0
// Checkpoints of a sharded optimizer: write() and read(), with Adam. Beside them the same bytes without a format:
// one thread writes a file beside the old one, flushes it to the disk and renames it, and one thread reads it.
// A file that was just written is in the page cache, so what reads it is not limited by the disk. The folder is
// that of temporary files (TMPDIR).
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include <joinable/checkpoint.hpp>

#include "weights.hpp"

namespace {

using joinable_benchmarks::Weights;
using Clock = std::chrono::steady_clock;

std::filesystem::path file_of_this_process() {
    return std::filesystem::temp_directory_path() /
           ("joinable_checkpoint_" + std::to_string(getpid()) + ".safetensors");
}

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

/// A third of the file is values, the rest the two averages of Adam.
std::vector<Weights> model_of(std::int64_t megabytes_of_file) {
    std::vector<Weights> model;
    for (std::int64_t i = 0; i < megabytes_of_file / 3; ++i) {
        model.emplace_back(std::size_t{1} << 18U, 0.5F);
        model.emplace_back(std::size_t{512}, 0.5F);
    }
    return model;
}

enum class Verb { write, read };

template <Verb verb, joinable::Partition partition>
void checkpoint(benchmark::State& state) {
    auto const file = file_of_this_process();
    for (auto _ : state) {
        double seconds = 0;
        joinable::run_threads(static_cast<int>(state.range(0)), [&](auto& comm) {
            auto model = model_of(state.range(1));
            joinable::ZeroOptions const options{.partition = partition};
            joinable::ZeroRedundancyOptimizer zero{comm, model, joinable::Adam{}, options};
            joinable::Checkpoint save{zero, file};
            save.write();
            comm.barrier();
            auto const start = Clock::now();
            verb == Verb::write ? save.write() : save.read();
            comm.barrier();
            if (comm.rank() == 0) {
                seconds = seconds_since(start);
            }
        });
        state.SetIterationTime(seconds);
    }
    auto const bytes = static_cast<std::int64_t>(std::filesystem::file_size(file));
    state.SetBytesProcessed(state.iterations() * bytes);
    std::filesystem::remove(file);
}

void require(bool succeeded, char const* what) {
    if (!succeeded) {
        throw std::runtime_error{what};
    }
}

/// Moves the bytes by `move(descriptor, begin, count)`, which returns how many it moved.
template <class Move>
void move_all(int descriptor, std::vector<char>& bytes, Move const& move) {
    for (std::size_t at = 0; at < bytes.size();) {
        auto const moved = move(descriptor, bytes.data() + at, bytes.size() - at);
        require(moved > 0, "the file system refuses");
        at += static_cast<std::size_t>(moved);
    }
}

void write_plain(std::filesystem::path const& file, std::vector<char>& bytes) {
    std::string const part = file.string() + ".part";
    int const descriptor = open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    require(descriptor >= 0, "a file cannot be made");
    move_all(descriptor, bytes, [](int to, char const* begin, std::size_t count) {
        return ::write(to, begin, count);
    });
    require(fsync(descriptor) == 0, "a file cannot be flushed");
    close(descriptor);
    std::filesystem::rename(part, file);
}

void read_plain(std::filesystem::path const& file, std::vector<char>& bytes) {
    int const descriptor = open(file.c_str(), O_RDONLY | O_CLOEXEC);
    require(descriptor >= 0, "a file cannot be read");
    move_all(descriptor, bytes, [](int from, char* begin, std::size_t count) {
        return ::read(from, begin, count);
    });
    close(descriptor);
}

template <Verb verb>
void plain(benchmark::State& state) {
    auto const file = file_of_this_process();
    std::vector<char> bytes(static_cast<std::size_t>(state.range(1)) << 20U, 'x');
    write_plain(file, bytes);
    for (auto _ : state) {
        auto const start = Clock::now();
        verb == Verb::write ? write_plain(file, bytes) : read_plain(file, bytes);
        state.SetIterationTime(seconds_since(start));
    }
    state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(bytes.size()));
    std::filesystem::remove(file);
}

template <int most_ranks>
void with_sizes(benchmark::internal::Benchmark* benchmark) {
    benchmark->ArgNames({"ranks", "MB"});
    for (std::int64_t const megabytes : {25, 250}) {
        for (int ranks = 1; ranks <= most_ranks; ranks *= 2) {
            benchmark->Args({ranks, megabytes});
        }
    }
    benchmark->UseManualTime()->Iterations(1)->Repetitions(5)->ReportAggregatesOnly()->Unit(
        benchmark::kMillisecond
    );
}
using joinable::Partition;
BENCHMARK(plain<Verb::write>)->Apply(with_sizes<1>)->Name("plain_write");
BENCHMARK(checkpoint<Verb::write, Partition::by_parameters>)
    ->Apply(with_sizes<4>)
    ->Name("write_by_parameters");
BENCHMARK(checkpoint<Verb::write, Partition::flat>)->Apply(with_sizes<4>)->Name("write_flat");
BENCHMARK(plain<Verb::read>)->Apply(with_sizes<1>)->Name("plain_read");
BENCHMARK(checkpoint<Verb::read, Partition::by_parameters>)
    ->Apply(with_sizes<4>)
    ->Name("read_by_parameters");
BENCHMARK(checkpoint<Verb::read, Partition::flat>)->Apply(with_sizes<4>)->Name("read_flat");

} // namespace
