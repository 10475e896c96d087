// SPDX-License-Identifier: BSL-1.0
// In-place all-reduce of f32, and what the machine could do at best. collectives.sh runs this in turn with
// other libraries and compares; each line of the output is "<name> <ranks> <mode> <bytes> <microseconds>".
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <pthread.h>
#include <sched.h>

#include <joinable/join.hpp>

namespace {

/// In bytes: those of SIZES, or from one number to gradients of a large model.
std::vector<std::size_t> sizes() {
    std::vector<std::size_t> listed;
    char const* const text = std::getenv("SIZES");
    std::istringstream stream{text != nullptr ? text : "8 1024 65536 1048576 26214400 104857600"};
    for (std::size_t size = 0; stream >> size;) {
        listed.push_back(size);
    }
    return listed;
}
constexpr std::size_t smallest_fresh = 64 << 10; ///< below, a message is on one line anyway

struct Free {
    void operator()(void* memory) const noexcept { std::free(memory); }
};
/// Memory from a page on.
std::unique_ptr<float[], Free> memory(std::size_t bytes, float value) {
    std::size_t const pages = (bytes + 4095) / 4096 * 4096;
    std::unique_ptr<float[], Free> data{static_cast<float*>(std::aligned_alloc(4096, pages))};
    std::fill_n(data.get(), pages / sizeof(float), value);
    return data;
}

void stay_on(int core) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(static_cast<unsigned>(core) % std::thread::hardware_concurrency(), &cores);
    pthread_setaffinity_np(pthread_self(), sizeof(cores), &cores);
}

double seconds() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}
double budget() { // seconds per size
    char const* const text = std::getenv("BUDGET");
    return text != nullptr ? std::atof(text) : 0.1;
}
double median(std::vector<double> values) {
    auto const middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
}
void print(std::string_view name, int ranks, char const* mode, std::size_t bytes, double time) {
    std::printf(
        "%.*s %d %s %zu %.4f\n",
        static_cast<int>(name.size()),
        name.data(),
        ranks,
        mode,
        bytes,
        time * 1e6
    );
    std::fflush(stdout);
}

/// The median time of `call()`, in batches so long that reading the clock does not count. `agree(n)` makes
/// rank 0's number that of all ranks. `prepare()` comes before each call, and is not timed: then a batch is
/// one call.
template <class Agree, class Prepare, class Call>
double time_of(bool is_fresh, Agree const& agree, Prepare const& prepare, Call const& call) {
    for (int i = 0; i < 3; ++i) {
        prepare();
        call();
    }
    double start = seconds();
    for (int i = 0; i < 5; ++i) {
        prepare();
        call();
    }
    double const one = (seconds() - start) / 5;
    int const batch = agree(is_fresh ? 1 : std::clamp(static_cast<int>(20e-6 / one), 1, 200));
    int const batches = agree(std::clamp(static_cast<int>(budget() / one / batch), 7, 5000));
    std::vector<double> times;
    for (int b = 0; b < batches; ++b) {
        prepare();
        start = seconds();
        for (int i = 0; i < batch; ++i) {
            call();
        }
        times.push_back((seconds() - start) / batch);
    }
    return median(std::move(times));
}

/// "same": the buffers stay as the last call left them. "fresh": every rank has just written its own, as
/// after a backward pass. Buffers lie in arenas of the communicator or in memory of the rank's own, from a
/// page on, which other ranks' memory does not share a line with.
template <class Comm>
void measure_rank(Comm& comm, std::string_view name, bool is_own_memory = false) {
    stay_on(comm.rank());
    for (std::size_t const bytes : sizes()) {
        joinable::Arena const arena =
            is_own_memory ? joinable::Arena{bytes, 4096} : joinable::make_arena(comm, bytes);
        auto* const data = reinterpret_cast<float*>(arena.data());
        joinable::Buffer const buffer{data, bytes / sizeof(float), joinable::DType::f32};
        auto const all_reduce = [&] { comm.all_reduce(buffer, joinable::ReduceOp::sum).wait(); };
        std::fill_n(data, buffer.count, static_cast<float>(comm.rank() + 1));
        all_reduce();
        auto const expected = static_cast<float>(comm.size() * (comm.size() + 1) / 2);
        if (std::count(data, data + buffer.count, expected) !=
            static_cast<std::ptrdiff_t>(buffer.count)) {
            std::fputs("the sum is wrong\n", stderr);
            std::abort();
        }
        auto const agree = [&](int number) {
            comm.broadcast(joinable::Buffer{&number, 1, joinable::DType::i32}, 0).wait();
            return number;
        };
        for (bool const is_fresh : {false, true}) {
            if (is_fresh && bytes < smallest_fresh) {
                continue;
            }
            auto const prepare = [&] {
                if (is_fresh) {
                    std::memset(data, 0, bytes);
                }
                comm.barrier();
            };
            std::memset(data, 0, bytes);
            double const time = time_of(is_fresh, agree, prepare, all_reduce);
            if (comm.rank() == 0) {
                print(name, comm.size(), is_fresh ? "fresh" : "same", bytes, time);
            }
        }
    }
}

/// Two threads, one per core, which meet by spinning.
class Pair {
public:
    void meet() {
        int const round = round_.load();
        if (arrived_.fetch_add(1) == 1) {
            arrived_.store(0);
            round_.store(round + 1);
        } else {
            while (round_.load() == round) {
            }
        }
    }
    /// `body(thread)` on both.
    template <class Body>
    static void run(Body const& body) {
        auto const on = [&](int thread) {
            stay_on(thread);
            body(thread);
        };
        std::thread other{on, 1};
        on(0);
        other.join();
    }

private:
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> round_{0};
};

struct alignas(64) Line {
    std::atomic<int> value{0};
};

/// One way of a line between two cores.
void measure_ping_pong() {
    constexpr int trips = 2000;
    Line ping;
    Line pong;
    std::vector<double> times;
    Pair::run([&](int thread) {
        for (int repeat = 0; repeat < 21; ++repeat) {
            double const start = seconds();
            for (int i = 1; i <= trips; ++i) {
                int const number = repeat * trips + i;
                Line& mine = thread == 0 ? ping : pong;
                Line& theirs = thread == 0 ? pong : ping;
                if (thread == 0) {
                    mine.value.store(number, std::memory_order_release);
                }
                while (theirs.value.load(std::memory_order_acquire) != number) {
                }
                if (thread == 1) {
                    mine.value.store(number, std::memory_order_release);
                }
            }
            if (thread == 0) {
                times.push_back((seconds() - start) / (2 * trips));
            }
        }
    });
    print("one_way", 2, "limit", 8, median(times));
}

using Register [[gnu::vector_size(16)]] = unsigned;

/// What an all-reduce of two ranks cannot avoid: as many bytes read and written as it reads and writes, by
/// two threads in memory of their own, from place to place or in place; and half of each buffer read that
/// the other core has just written.
void measure_memory(std::size_t bytes) {
    std::size_t const half = bytes / 2;
    std::vector<double> copies;
    std::vector<double> updates;
    std::vector<double> pulls;
    std::unique_ptr<float[], Free> written[2];
    int repeats = 0;
    Pair pair;
    Pair::run([&](int thread) {
        auto const from = memory(half, 1.0F);
        auto const to = memory(half, 1.0F);
        written[thread] = memory(half, 1.0F);
        auto const timed = [&](auto const& call) {
            pair.meet();
            double const start = seconds();
            call();
            pair.meet();
            return seconds() - start;
        };
        auto const copy = [&] { // twice, there and back
            std::memcpy(to.get(), from.get(), half);
            std::memcpy(from.get(), to.get(), half);
        };
        auto const update = [&] { // of all bytes of one buffer
            for (float* const data : {from.get(), to.get()}) {
                for (std::size_t at = 0; at + sizeof(Register) <= half; at += sizeof(Register)) {
                    Register value;
                    std::memcpy(&value, data + at / sizeof(float), sizeof(value));
                    value += 1;
                    std::memcpy(data + at / sizeof(float), &value, sizeof(value));
                }
            }
        };
        auto const pull = [&] {
            constexpr std::size_t piece = 4096; // stays in the first-level cache
            alignas(64) char here[piece];
            auto const* const there = reinterpret_cast<char const*>(written[1 - thread].get());
            for (std::size_t at = 0; at < half; at += piece) {
                std::memcpy(here, there + at, std::min(piece, half - at));
                asm volatile("" : : "r"(here) : "memory");
            }
        };
        double const one = timed(copy);
        if (thread == 0) {
            repeats = std::clamp(static_cast<int>(budget() / 4 / one), 7, 2000);
        }
        pair.meet();
        for (int i = 0; i < repeats; ++i) {
            double const copied = timed(copy);
            double const updated = timed(update);
            std::memset(written[thread].get(), i, half);
            double const pulled = timed(pull);
            if (thread == 0) {
                copies.push_back(copied);
                updates.push_back(updated);
                pulls.push_back(pulled);
            }
        }
        pair.meet();
    });
    print("copy", 2, "limit", bytes, median(copies));
    print("update", 2, "limit", bytes, median(updates));
    print("pull", 2, "limit", bytes, median(pulls));
}

/// A way to run ranks: `run(ranks)` prints lines under its name. "processes_own" have their buffers in memory
/// of their own, as MPI's have.
struct Implementation {
    std::string_view name;
    void (*run)(int ranks);
};
constexpr Implementation implementations[] = {
    {"threads",
     [](int ranks) {
         joinable::run_threads(ranks, [](auto& comm) { measure_rank(comm, "threads"); });
     }},
    {"processes",
     [](int ranks) {
         joinable::run_processes(ranks, [](auto& comm) { measure_rank(comm, "processes"); });
     }},
    {"processes_own",
     [](int ranks) {
         joinable::run_processes(ranks, [](auto& comm) {
             measure_rank(comm, "processes_own", true);
         });
     }},
};

} // namespace

int main(int count, char** arguments) {
    std::string_view const what = count > 1 ? arguments[1] : "";
    if (what == "limits") {
        measure_ping_pong();
        for (std::size_t const bytes : sizes()) {
            if (bytes >= smallest_fresh) {
                measure_memory(bytes);
            }
        }
        return 0;
    }
    for (Implementation const& implementation : implementations) {
        if (count == 3 && what == implementation.name) {
            implementation.run(std::atoi(arguments[2]));
            return 0;
        }
    }
    std::fputs("expected \"limits\", or one of these and a number of ranks:", stderr);
    for (Implementation const& implementation : implementations) {
        std::fprintf(stderr, " %s", implementation.name.data());
    }
    std::fputs("\n", stderr);
    return 1;
}
