// SPDX-License-Identifier: BSL-1.0
// What an all_reduce costs beside a bare gloo::allreduce: one program, turn by turn, so that a busy machine
// slows both. It forks its ranks: bench_gloo [ranks] [turns]. Or it is the rank of one machine, which meets the others in
// an empty folder: bench_gloo ranks turns rank address folder. Rank 0 prints medians in microseconds. bench_gloo ranks
// plans: as bench_plans, over Gloo.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <gloo/allreduce.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>
#include <sys/wait.h>
#include <unistd.h>

#include <joinable/communicator/collectives.hpp>
#include <joinable/gloo.hpp>

#include "chosen_plans.hpp"

namespace {

using Clock = std::chrono::steady_clock;

double median(std::vector<double>& times) {
    auto const middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
    std::nth_element(times.begin(), middle, times.end());
    return *middle;
}

/// After all ranks have come.
template <class Run>
double microseconds(joinable::GlooCommunicator& comm, Run const& run) {
    comm.barrier();
    auto const start = Clock::now();
    run();
    return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

std::shared_ptr<gloo::Context>
bare_context(int rank, int size, std::string const& address, std::string const& folder) {
    gloo::rendezvous::FileStore store{folder};
    auto device = gloo::transport::tcp::CreateDevice(address.c_str());
    auto context = std::make_shared<gloo::rendezvous::Context>(rank, size);
    context->connectFullMesh(store, device);
    return context;
}

void compare(
    joinable::GlooCommunicator& comm,
    std::shared_ptr<gloo::Context> const& context,
    std::size_t bytes,
    std::size_t turns
) {
    std::size_t const count = bytes / sizeof(float);
    std::vector<float> buffer(count, 0);
    std::vector<std::uint64_t> words(7);
    auto const bare = [&](gloo::AllreduceOptions::Algorithm algorithm) {
        gloo::AllreduceOptions options{context};
        options.setAlgorithm(algorithm);
        options.setOutput(buffer.data(), count);
        options.setReduceFunction([](void* to, void const* a, void const* b, std::size_t n) {
            gloo::sum<float>(to, a, b, n);
        });
        gloo::allreduce(options);
    };
    std::vector<double> times[4];
    for (std::size_t turn = 0; turn < turns; ++turn) {
        times[0].push_back(microseconds(comm, [&] {
            bare(gloo::AllreduceOptions::Algorithm::RING);
        }));
        times[1].push_back(microseconds(comm, [&] {
            bare(gloo::AllreduceOptions::Algorithm::BCUBE);
        }));
        times[2].push_back(microseconds(comm, [&] { joinable::all_reduce(comm, buffer).wait(); }));
        times[3].push_back(microseconds(comm, [&] { joinable::all_reduce(comm, words).wait(); }));
    }
    if (comm.rank() == 0) {
        std::printf(
            "%9zu bytes, %d ranks: gloo::allreduce by ring %.0f, by cube %.0f; ours %.0f; a roll "
            "call %.0f\n",
            bytes,
            comm.size(),
            median(times[0]),
            median(times[1]),
            median(times[2]),
            median(times[3])
        );
    }
}

void run(
    int rank, int size, char const* turns, std::string const& address, std::string const& folder
) {
    joinable::GlooCommunicator comm{joinable::GlooOptions{
        .rank = rank,
        .size = size,
        .store = joinable::GlooFile{folder + "/ranks"},
        .address = address
    }};
    if (std::string_view{turns} == "plans") {
        print_chosen_plans("Gloo", comm);
        return;
    }
    std::size_t const times = std::strtoul(turns, nullptr, 10);
    auto const bare_folder = folder + "/bare";
    std::filesystem::create_directory(bare_folder); // by all ranks: one of them makes it
    auto const context = bare_context(rank, size, address, bare_folder);
    for (std::size_t const bytes : {std::size_t{8}, std::size_t{1} << 16U, std::size_t{1} << 20U}) {
        compare(comm, context, bytes, times);
    }
    compare(comm, context, std::size_t{25} << 20U, times / 10 + 1);
}

} // namespace

int main(int count, char** arguments) {
    int const size = count > 1 ? std::atoi(arguments[1]) : 2;
    char const* const turns = count > 2 ? arguments[2] : "200";
    if (count == 6) {
        run(std::atoi(arguments[3]), size, turns, arguments[4], arguments[5]);
        return 0;
    }
    std::string folder = (std::filesystem::temp_directory_path() / "joinable.XXXXXX").string();
    if (::mkdtemp(folder.data()) == nullptr) {
        return 1;
    }
    for (int rank = 0; rank < size; ++rank) {
        if (::fork() == 0) {
            run(rank, size, turns, "127.0.0.1", folder);
            return 0;
        }
    }
    bool is_right = true;
    for (int rank = 0; rank < size; ++rank) {
        int status = 0;
        ::wait(&status);
        is_right = is_right && status == 0;
    }
    std::filesystem::remove_all(folder);
    return is_right ? 0 : 1;
}
