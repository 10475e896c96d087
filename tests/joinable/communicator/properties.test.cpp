// SPDX-License-Identifier: BSL-1.0
// Random collectives of thread ranks against a serial model that never heard of ranks or chunks.
#include <joinable/communicator/thread.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <ostream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <rapidcheck.h>
#include <support/ranks.hpp>

namespace {

using joinable::DType;
using joinable::ReduceOp;
using joinable::ThreadCommunicator;
using joinable::ThreadWork;

enum class Operation : std::uint8_t { all_reduce, broadcast, all_gather, reduce_scatter };

struct Call {
    Operation operation;
    DType dtype;
    ReduceOp op;
    std::size_t count; ///< of all_gather's input and of reduce_scatter's output
    int root;
    std::uint64_t seed;
};
std::ostream& operator<<(std::ostream& out, Call const& call) {
    constexpr char const* names[] = {"all_reduce", "broadcast", "all_gather", "reduce_scatter"};
    return out << names[static_cast<std::size_t>(call.operation)] << '(' << name_of(call.dtype)
               << ", " << name_of(call.op) << ", count " << call.count << ", root " << call.root
               << ", seed " << call.seed << ')';
}

/// Uniform in [low, high), also in the first cases, which rapidcheck would keep near `low`.
template <class T>
T random_below(T low, T high) {
    return *rc::gen::resize(rc::kNominalSize, rc::gen::inRange<T>(low, high));
}

Call random_call(int world) {
    Call call{};
    call.operation = *rc::gen::element(
        Operation::all_reduce,
        Operation::broadcast,
        Operation::all_gather,
        Operation::reduce_scatter
    );
    call.dtype = static_cast<DType>(random_below(0, 10));
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

/// What rank `rank` holds afterwards.
template <class T>
std::vector<T> expected(Call const& call, int world, int rank) {
    bool const is_gathered = call.operation == Operation::all_gather;
    std::vector<T> result(call.count * (is_gathered ? static_cast<std::size_t>(world) : 1));
    for (std::size_t i = 0; i < result.size(); ++i) {
        switch (call.operation) {
        case Operation::all_reduce: result[i] = reduced<T>(call, world, i); break;
        case Operation::broadcast: result[i] = element<T>(call, call.root, i); break;
        case Operation::all_gather:
            result[i] = element<T>(call, static_cast<int>(i / call.count), i % call.count);
            break;
        case Operation::reduce_scatter:
            result[i] = reduced<T>(call, world, static_cast<std::size_t>(rank) * call.count + i);
            break;
        }
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
          in_(call.operation == Operation::reduce_scatter
                  ? call.count * static_cast<std::size_t>(comm.size())
                  : call.count),
          out_(expected_.size()), work_{(fill(call, comm.rank()), start(comm, call))} {}

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
        if (in_.size() == out_.size()) {
            out_ = in_; // for those in place
        }
    }
    ThreadWork start(ThreadCommunicator& comm, Call const& call) {
        joinable::ConstBuffer const in{in_.data(), in_.size(), call.dtype};
        joinable::Buffer const out{out_.data(), out_.size(), call.dtype};
        switch (call.operation) {
        case Operation::all_reduce: return comm.all_reduce(out, call.op);
        case Operation::broadcast: return comm.broadcast(out, call.root);
        case Operation::all_gather: return comm.all_gather(in, out);
        case Operation::reduce_scatter: break;
        }
        return comm.reduce_scatter(in, out, call.op);
    }

    std::vector<T> expected_;
    std::vector<T> in_;
    std::vector<T> out_;
    ThreadWork work_; // the last member: it is gone before the memory that it works on
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
        RC_LOG() << world << " ranks: " << rc::toString(calls) << '\n';
        std::vector<std::string> wrong(static_cast<std::size_t>(world));
        joinable_tests::run_ranks({world}, [&](ThreadCommunicator& comm) {
            std::vector<std::unique_ptr<Flight>> flights;
            for (Call const& call : calls) {
                joinable::visit_dtype(call.dtype, [&]<class T>(std::type_identity<T>) {
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
