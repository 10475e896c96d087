// SPDX-License-Identifier: BSL-1.0
// Random collectives of thread ranks against a serial model that never heard of ranks or chunks.
#include <joinable/communicator/shared_memory/thread.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <numeric>
#include <optional>
#include <ostream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <rapidcheck.h>
#include <support/for_each_type.hpp>
#include <support/ranks.hpp>

#include <joinable/communicator/progress_thread.hpp>

namespace {

using joinable::DType;
using joinable::ReduceOp;
using joinable::ThreadCommunicator;
using joinable::ThreadWork;

enum class Operation : std::uint8_t {
    all_reduce,
    broadcast,
    reduce,
    all_gather,
    reduce_scatter,
    gather,
    scatter,
    all_to_all,
};
constexpr char const* names[] = {
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
};

struct Call {
    Operation operation;
    DType dtype;
    ReduceOp op;
    std::size_t count; ///< of a rank's part; by counts it is the most that a part has
    int root;
    bool by_counts;
    std::uint64_t seed;
};
std::ostream& operator<<(std::ostream& out, Call const& call) {
    return out << names[static_cast<std::size_t>(call.operation)] << '(' << name_of(call.dtype)
               << ", " << name_of(call.op) << ", count " << call.count << ", root " << call.root
               << (call.by_counts ? ", by counts" : "") << ", seed " << call.seed << ')';
}

/// Uniform in [low, high), also in the first cases, which rapidcheck would keep near `low`.
template <class T>
T random_below(T low, T high) {
    return *rc::gen::resize(rc::kNominalSize, rc::gen::inRange<T>(low, high));
}

Call random_call(int world) {
    Call call{};
    call.operation = static_cast<Operation>(random_below(0, static_cast<int>(std::size(names))));
    call.by_counts = call.operation > Operation::reduce && *rc::gen::arbitrary<bool>();
    call.dtype = static_cast<DType>(random_below(0, 10)); // others are not all reduced
    bool const is_integer = call.dtype >= DType::i8;
    call.op = static_cast<ReduceOp>(random_below(0, is_integer ? 6 : 4));
    // Within one cache line, in one chunk, and in many that do not divide evenly.
    auto const [low, high] = *rc::gen::elementOf(
        std::vector<std::pair<std::size_t, std::size_t>>{{0, 20}, {20, 700}, {4000, 9000}}
    );
    call.count = random_below(low, high);
    call.root = random_below(0, world);
    call.seed = *rc::gen::arbitrary<std::uint64_t>();
    return call;
}

// ---- the numbers: what rank `rank` gives at place `i` -------------------------------------------

/// The finaliser of SplitMix64: every bit of the result depends on every bit of the argument.
std::uint64_t mixed(std::uint64_t x) {
    x = (x ^ (x >> 30U)) * 0xbf58'476d'1ce4'e5b9U;
    x = (x ^ (x >> 27U)) * 0x94d0'49bb'1331'11ebU;
    return x ^ (x >> 31U);
}

template <class T>
T element(Call const& call, int rank, std::size_t i) {
    std::uint64_t const bits = mixed(mixed(call.seed + static_cast<std::uint64_t>(rank)) + i);
    if constexpr (std::same_as<T, std::int32_t> || std::same_as<T, std::int64_t>) {
        // A product of 8 must not overflow: it is undefined for these, and no question here.
        return static_cast<T>(static_cast<std::int64_t>(bits % 21) - 10);
    } else if constexpr (std::integral<T>) {
        return static_cast<T>(bits);
    } else {
        // Up to 2^15 with 15 bits, rounded to T: sums depend on their order, products of 8 are
        // finite in what they are accumulated in.
        auto const number = static_cast<float>(static_cast<int>(bits % 65'535) - 32'767);
        return T{number / static_cast<float>(1U << (bits >> 60U))};
    }
}

// ---- the serial model ---------------------------------------------------------------------------

/// Integers are combined modulo 2^64 and cut, as a machine does it whatever their width.
template <std::integral T>
T combined(ReduceOp op, T a, T b) {
    auto const x = static_cast<std::uint64_t>(a);
    auto const y = static_cast<std::uint64_t>(b);
    switch (op) {
    case ReduceOp::sum: return static_cast<T>(x + y);
    case ReduceOp::product: return static_cast<T>(x * y);
    case ReduceOp::min: return std::min(a, b);
    case ReduceOp::max: return std::max(a, b);
    case ReduceOp::bit_and: return static_cast<T>(x & y);
    case ReduceOp::bit_or: break;
    }
    return static_cast<T>(x | y);
}
template <std::floating_point T>
T combined(ReduceOp op, T a, T b) {
    switch (op) {
    case ReduceOp::sum: return a + b;
    case ReduceOp::product: return a * b;
    case ReduceOp::min: return std::min(a, b);
    default: break;
    }
    return std::max(a, b);
}

/// In rank order; numbers of 16 bits in float, rounded once at the end.
template <class T>
T reduced(Call const& call, int world, std::size_t i) {
    using Wide = std::conditional_t<std::is_arithmetic_v<T>, T, float>;
    auto result = static_cast<Wide>(element<T>(call, 0, i));
    for (int rank = 1; rank < world; ++rank) {
        result = combined<Wide>(call.op, result, static_cast<Wide>(element<T>(call, rank, i)));
    }
    return static_cast<T>(result);
}

/// How many elements rank `from` has for rank `to`. Only of an all_to_all does it depend on both.
std::size_t part(Call const& call, int from, int to) {
    if (!call.by_counts) {
        return call.count;
    }
    bool const is_sent = call.operation == Operation::all_to_all ||
                         call.operation == Operation::scatter ||
                         call.operation == Operation::reduce_scatter;
    bool const is_from = call.operation == Operation::all_to_all || !is_sent;
    auto const key = static_cast<std::uint64_t>((is_from ? from : 0) * 64 + (is_sent ? to : 0));
    return mixed(call.seed ^ key) % (call.count + 1);
}

std::vector<std::size_t> sent(Call const& call, int world, int from) {
    std::vector<std::size_t> counts;
    for (int to = 0; to < world; ++to) {
        counts.push_back(part(call, from, to));
    }
    return counts;
}
std::vector<std::size_t> received(Call const& call, int world, int to) {
    std::vector<std::size_t> counts;
    for (int from = 0; from < world; ++from) {
        counts.push_back(part(call, from, to));
    }
    return counts;
}

std::size_t sum(std::vector<std::size_t> const& counts) {
    return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
}

std::size_t before(std::vector<std::size_t> const& counts, int rank) {
    return sum({counts.begin(), counts.begin() + rank});
}

std::size_t input_size(Call const& call, int world, int rank) {
    switch (call.operation) {
    case Operation::reduce_scatter:
    case Operation::all_to_all: return sum(sent(call, world, rank));
    case Operation::scatter: return rank == call.root ? sum(sent(call, world, rank)) : 0;
    default: return part(call, rank, 0);
    }
}

/// What rank `rank` holds afterwards.
template <class T>
std::vector<T> expected(Call const& call, int world, int rank) {
    std::vector<T> result;
    auto const append = [&](std::size_t count, auto const& value) {
        for (std::size_t i = 0; i < count; ++i) {
            result.push_back(value(i));
        }
    };
    std::size_t const first = before(sent(call, world, 0), rank);
    switch (call.operation) {
    case Operation::all_reduce:
        append(call.count, [&](std::size_t i) { return reduced<T>(call, world, i); });
        break;
    case Operation::reduce:
        append(call.count, [&](std::size_t i) {
            return rank == call.root ? reduced<T>(call, world, i) : element<T>(call, rank, i);
        });
        break;
    case Operation::broadcast:
        append(call.count, [&](std::size_t i) { return element<T>(call, call.root, i); });
        break;
    case Operation::gather:
        if (rank != call.root) {
            break;
        }
        [[fallthrough]];
    case Operation::all_gather:
        for (int from = 0; from < world; ++from) {
            append(part(call, from, rank), [&](std::size_t i) {
                return element<T>(call, from, i);
            });
        }
        break;
    case Operation::reduce_scatter:
        append(part(call, 0, rank), [&](std::size_t i) {
            return reduced<T>(call, world, first + i);
        });
        break;
    case Operation::scatter:
        append(part(call, 0, rank), [&](std::size_t i) {
            return element<T>(call, call.root, first + i);
        });
        break;
    case Operation::all_to_all:
        for (int from = 0; from < world; ++from) {
            std::size_t const start = before(sent(call, world, from), rank);
            append(part(call, from, rank), [&](std::size_t i) {
                return element<T>(call, from, start + i);
            });
        }
        break;
    }
    return result;
}

// ---- the same by ranks --------------------------------------------------------------------------

/// A call in flight on one rank.
class Flight {
public:
    virtual ~Flight() = default;
    virtual void wait() = 0;
    [[nodiscard]] virtual bool is_as_expected() const = 0;
};

template <class T>
class TypedFlight : public Flight {
public:
    TypedFlight(ThreadCommunicator& comm, Call const& call)
        : expected_{expected<T>(call, comm.size(), comm.rank())},
          in_(input_size(call, comm.size(), comm.rank())), out_(expected_.size()),
          work_{(fill(call, comm.rank()), start(comm, call))} {}

    void wait() override { work_.wait(); }
    [[nodiscard]] bool is_as_expected() const override {
        return out_.empty() ||
               std::memcmp(out_.data(), expected_.data(), out_.size() * sizeof(T)) == 0;
    }

private:
    void fill(Call const& call, int rank) {
        for (std::size_t i = 0; i < in_.size(); ++i) {
            in_[i] = element<T>(call, rank, i);
        }
        if (call.operation <= Operation::reduce) {
            out_ = in_; // those are in place
        }
    }
    ThreadWork start(ThreadCommunicator& comm, Call const& call) {
        joinable::ConstBuffer const in{in_.data(), in_.size(), call.dtype};
        joinable::Buffer const out{out_.data(), out_.size(), call.dtype};
        int const world = comm.size();
        int const rank = comm.rank();
        bool const by_counts = call.by_counts;
        auto const counts_in = sent(call, world, rank);
        auto const counts_out = received(call, world, rank);
        switch (call.operation) {
        case Operation::all_reduce: return comm.all_reduce(out, call.op);
        case Operation::broadcast: return comm.broadcast(out, call.root);
        case Operation::reduce: return comm.reduce(out, call.op, call.root);
        case Operation::all_gather:
            return by_counts ? comm.all_gather(in, out, counts_out) : comm.all_gather(in, out);
        case Operation::reduce_scatter:
            return by_counts ? comm.reduce_scatter(in, out, call.op, counts_in)
                             : comm.reduce_scatter(in, out, call.op);
        case Operation::gather:
            return by_counts ? comm.gather(in, out, call.root, counts_out)
                             : comm.gather(in, out, call.root);
        case Operation::scatter:
            return by_counts ? comm.scatter(in, out, call.root, counts_in)
                             : comm.scatter(in, out, call.root);
        case Operation::all_to_all: break;
        }
        return by_counts ? comm.all_to_all(in, out, counts_in, counts_out)
                         : comm.all_to_all(in, out);
    }

    std::vector<T> expected_;
    std::vector<T> in_;
    std::vector<T> out_;
    ThreadWork work_; // the last member: destroyed before the memory that it works on
};

TEST_CASE("any collectives in flight together leave on every rank what a serial model computes") {
    CHECK(rc::check([] {
        int const world = random_below(1, 9);
        auto const number = random_below<std::size_t>(1, 7);
        std::vector<Call> calls;
        for (std::size_t k = 0; k < number; ++k) {
            calls.push_back(random_call(world));
        }
        bool const last_first = *rc::gen::arbitrary<bool>();
        auto const helped = random_below<unsigned>(0, 1U << 9U); // a bit for each rank
        RC_LOG() << world << " ranks, helped " << helped << ": " << rc::toString(calls) << '\n';
        std::vector<std::string> wrong(static_cast<std::size_t>(world));
        joinable_tests::run_ranks({world}, [&](ThreadCommunicator& comm) {
            std::optional<joinable::ProgressThread> thread;
            if ((helped >> static_cast<unsigned>(comm.rank()) & 1U) != 0) {
                thread.emplace(comm);
            }
            std::vector<std::unique_ptr<Flight>> flights;
            for (Call const& call : calls) {
                joinable_tests::visit_real(call.dtype, [&]<class T>(std::type_identity<T>) {
                    flights.push_back(std::make_unique<TypedFlight<T>>(comm, call));
                });
            }
            for (std::size_t k = 0; k < flights.size(); ++k) {
                flights[last_first ? flights.size() - 1 - k : k]->wait();
            }
            for (std::size_t k = 0; k < flights.size(); ++k) {
                if (!flights[k]->is_as_expected()) {
                    wrong[static_cast<std::size_t>(comm.rank())] += rc::toString(calls[k]);
                }
            }
        });
        RC_ASSERT(wrong == std::vector<std::string>(static_cast<std::size_t>(world)));
    }));
}

} // namespace
