// SPDX-License-Identifier: BSL-1.0
#include <joinable/nccl.hpp>

#include <atomic>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>
#include <support/fake_cuda/fake_cuda.hpp>
#include <support/for_each_type.hpp>
#include <support/nccl_ranks.hpp>
#include <support/volume.hpp>
#include <support/wait_until.hpp>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/collectives.hpp>
#include <joinable/tensor/dtype.hpp>

namespace {

using namespace joinable_tests;
using joinable::NcclCommunicator;
using joinable::ReduceOp;

static_assert(joinable::models_communicator<NcclCommunicator>());
static_assert(joinable::Aborts<NcclCommunicator> && joinable::HasDeadline<NcclCommunicator>);
static_assert(joinable::ReportsMissing<NcclCommunicator> && joinable::Splits<NcclCommunicator>);
static_assert(joinable::AllGathers<NcclCommunicator> && joinable::Reduces<NcclCommunicator>);
static_assert(joinable::ReduceScatters<NcclCommunicator> && joinable::Gathers<NcclCommunicator>);
static_assert(joinable::Scatters<NcclCommunicator> && joinable::AllToAlls<NcclCommunicator>);
static_assert(joinable::SendsAndReceives<NcclCommunicator>);
static_assert(joinable::Communicator<joinable::NcclCommunicatorRef>);
static_assert(joinable::Aborts<joinable::NcclCommunicatorRef>);
static_assert(!joinable::detail::reduces_host_memory<NcclCommunicator>);

/// Small integers, which every element type holds.
template <class T>
T number(int value) {
    if constexpr (std::is_class_v<T>) {
        return T{static_cast<float>(value)};
    } else {
        return static_cast<T>(value);
    }
}
template <class T>
std::vector<T> numbers(std::vector<int> const& values) {
    std::vector<T> all;
    for (int const value : values) {
        all.push_back(number<T>(value));
    }
    return all;
}

int factorial(int n) {
    return n < 2 ? 1 : n * factorial(n - 1);
}

TEST_CASE("an all-reduce is right for every element type and every operation that NCCL has") {
    run_nccl_ranks({1, 2, 3, 4, 5}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        int const n = comm.size();
        for_each_type([&]<class T>() {
            auto const result = [&](ReduceOp op) {
                // Rank r has r + 1 and 2 (n - r): sums n (n + 1) / 2 and n (n + 1).
                DeviceArray<T> const data{
                    numbers<T>({comm.rank() + 1, 2 * (n - comm.rank())}), stream
                };
                comm.all_reduce(data.buffer(), op).wait();
                return data.read(comm, stream);
            };
            CAPTURE(joinable::name_of(joinable::dtype_of<T>));
            CHECK(result(ReduceOp::sum) == numbers<T>({n * (n + 1) / 2, n * (n + 1)}));
            CHECK(result(ReduceOp::min) == numbers<T>({1, 2}));
            CHECK(result(ReduceOp::max) == numbers<T>({n, 2 * n}));
            if (n <= 3) { // 3! * 2^3 is exact in every type
                CHECK(result(ReduceOp::product) == numbers<T>({factorial(n), factorial(n) << n}));
            }
        });
    });
}

/// A number that tells ranks and places apart.
int mark(int rank, std::size_t place) {
    return 10 * rank + static_cast<int>(place) % 7;
}

template <class T>
void check_rooted(NcclCommunicator& comm, cudaStream_t stream) {
    int const n = comm.size();
    auto const ranks = static_cast<std::size_t>(n);
    auto const me = static_cast<std::size_t>(comm.rank());
    for (int root = 0; root < n; root += n > 2 ? n - 1 : 1) {
        bool const is_root = comm.rank() == root;
        DeviceArray<T> const values{numbers<T>({comm.rank(), comm.rank() + 1}), stream};
        comm.broadcast(values.buffer(), root).wait();
        CHECK(values.read(comm, stream) == numbers<T>({root, root + 1}));

        DeviceArray<T> const summed{numbers<T>({comm.rank(), 1}), stream};
        comm.reduce(summed.buffer(), ReduceOp::sum, root).wait();
        CHECK(
            summed.read(comm, stream) ==
            (is_root ? numbers<T>({n * (n - 1) / 2, n}) : numbers<T>({comm.rank(), 1}))
        );

        DeviceArray<T> const part{numbers<T>({mark(comm.rank(), 0), mark(comm.rank(), 1)}), stream};
        DeviceArray<T> const all{is_root ? 2 * ranks : 1};
        comm.gather(part.buffer(), is_root ? all.buffer() : joinable::Buffer{}, root).wait();
        std::vector<int> gathered;
        for (int rank = 0; rank < n; ++rank) {
            gathered.insert(gathered.end(), {mark(rank, 0), mark(rank, 1)});
        }
        if (is_root) {
            CHECK(all.read(comm, stream) == numbers<T>(gathered));
        }

        DeviceArray<T> const back{2};
        comm.scatter(is_root ? all.buffer() : joinable::Buffer{}, back.buffer(), root).wait();
        CHECK(back.read(comm, stream) == numbers<T>({mark(comm.rank(), 0), mark(comm.rank(), 1)}));

        // By counts: rank r has r elements.
        std::vector<std::size_t> counts;
        std::vector<int> shared;
        for (std::size_t rank = 0; rank < ranks; ++rank) {
            counts.push_back(rank);
            for (std::size_t k = 0; k < rank; ++k) {
                shared.push_back(mark(static_cast<int>(rank), k));
            }
        }
        std::vector<int> own;
        for (std::size_t k = 0; k < me; ++k) {
            own.push_back(mark(comm.rank(), k));
        }
        std::size_t const total = shared.size();
        DeviceArray<T> const uneven{numbers<T>(own), stream};
        DeviceArray<T> const together{is_root ? total : 0};
        comm.gather(uneven.buffer(), together.buffer(), root, counts).wait();
        CHECK(together.read(comm, stream) == numbers<T>(is_root ? shared : std::vector<int>{}));
        DeviceArray<T> const dealt{me};
        comm.scatter(together.buffer(), dealt.buffer(), root, counts).wait();
        CHECK(dealt.read(comm, stream) == numbers<T>(own));
    }
}

TEST_CASE("collectives with a root are right for every element type") {
    run_nccl_ranks({1, 2, 3, 4, 8}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        if (comm.size() == 3) {
            for_each_type([&]<class T>() { check_rooted<T>(comm, stream); });
        } else {
            check_rooted<float>(comm, stream);
        }
    });
}

template <class Real>
void check_complex(NcclCommunicator& comm, cudaStream_t stream) {
    using Number = std::complex<Real>;
    constexpr joinable::DType dtype = joinable::dtype_of<Number>;
    CAPTURE(joinable::name_of(dtype));
    check_rooted<Number>(comm, stream);
    int const n = comm.size();
    auto const ranks = static_cast<Real>(n);
    auto const mine = static_cast<Real>(comm.rank());
    std::vector<Number> const given{{mine, 1}, {-1, 2 * mine}, {0, 3}};
    Number const total{ranks * (ranks - 1) / 2, ranks};
    std::vector<Number> const sum{total, {-total.imag(), 2 * total.real()}, {0, 3 * ranks}};
    std::vector<Number> half;
    for (Number const& number : sum) {
        half.push_back(number / Real{2});
    }
    DeviceArray<Number> const values{given, stream};
    comm.all_reduce(values.buffer(), ReduceOp::sum).wait();
    CHECK(values.read(comm, stream) == sum);
    DeviceArray<Number> const scaled{given, stream};
    comm.all_reduce(scaled.buffer(), ReduceOp::sum, 0.5).wait();
    CHECK(scaled.read(comm, stream) == half);
    // Each rank gets one element, then rank r gets r + 1: element i is (rank of the giver, i).
    auto const parts = static_cast<std::size_t>(n * (n + 1) / 2);
    auto const numbered = [&](std::size_t count, auto const& of) {
        std::vector<Number> all;
        for (std::size_t i = 0; i < count; ++i) {
            all.push_back(of(static_cast<Real>(i)));
        }
        return all;
    };
    auto const own = [&](Real i) { return Number{mine, i}; };
    DeviceArray<Number> const each{numbered(static_cast<std::size_t>(n), own), stream};
    DeviceArray<Number> const one{1};
    comm.reduce_scatter(each.buffer(), one.buffer(), ReduceOp::sum).wait();
    CHECK(one.read(comm, stream) == std::vector<Number>{{total.real(), ranks * mine}});
    std::vector<std::size_t> counts;
    for (std::size_t rank = 0; rank < static_cast<std::size_t>(n); ++rank) {
        counts.push_back(rank + 1);
    }
    auto const me = static_cast<std::size_t>(comm.rank());
    DeviceArray<Number> const uneven{numbered(parts, own), stream};
    DeviceArray<Number> const part{me + 1};
    comm.reduce_scatter(uneven.buffer(), part.buffer(), ReduceOp::sum, 0.5, counts).wait();
    CHECK(part.read(comm, stream) == numbered(me + 1, [&](Real i) {
              Real const place = static_cast<Real>(me * (me + 1) / 2) + i;
              return Number{total.real() / 2, ranks * place / 2};
          }));
    CHECK_THROWS_WITH_AS(
        (void)comm.all_reduce(values.buffer(), ReduceOp::product),
        (joinable::detail::concat("NCCL does not multiply ", joinable::name_of(dtype)) +
         "; sum the logarithms, or reduce on a communicator of the host")
            .c_str(),
        joinable::ContractViolation
    );
    CHECK_THROWS_AS(
        (void)comm.all_reduce(values.buffer(), ReduceOp::max), joinable::ContractViolation
    );
}

/// Integers of 16 bits and booleans: moved as they are.
template <class T>
void check_moved(NcclCommunicator& comm, cudaStream_t stream, joinable::DType dtype) {
    CAPTURE(joinable::name_of(dtype));
    auto const ranks = static_cast<std::size_t>(comm.size());
    auto const typed = [&](joinable::Buffer buffer) {
        buffer.dtype = dtype;
        return buffer;
    };
    auto const of_rank = [&](int rank) {
        return dtype == joinable::DType::boolean ? numbers<T>({rank % 2, 1, 0})
                                                 : numbers<T>({rank + 0x7c01, rank, 3});
    };
    DeviceArray<T> const values{of_rank(comm.rank()), stream};
    DeviceArray<T> const all{3 * ranks};
    comm.all_gather(typed(values.buffer()), typed(all.buffer())).wait();
    std::vector<T> expected;
    for (int rank = 0; rank < comm.size(); ++rank) {
        auto const part = of_rank(rank);
        expected.insert(expected.end(), part.begin(), part.end());
    }
    CHECK(all.read(comm, stream) == expected);
    comm.broadcast(typed(values.buffer()), comm.size() - 1).wait();
    CHECK(values.read(comm, stream) == of_rank(comm.size() - 1));
    CHECK_THROWS_AS(
        (void)comm.all_reduce(typed(values.buffer()), ReduceOp::sum), joinable::ContractViolation
    );
    CHECK(!comm.is_aborted());
}

TEST_CASE("complex numbers are summed and scaled over NCCL, and booleans, i16 and u16 are moved") {
    run_nccl_ranks({1, 2, 3, 4, 8}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        check_complex<float>(comm, stream);
        check_complex<double>(comm, stream);
        check_moved<std::int16_t>(comm, stream, joinable::DType::i16);
        check_moved<std::uint16_t>(comm, stream, joinable::DType::u16);
        check_moved<std::uint8_t>(comm, stream, joinable::DType::boolean);
        // Min and max of booleans are and and or.
        DeviceArray<std::uint8_t> const bits{
            {0, comm.rank() == 0 ? std::uint8_t{1} : std::uint8_t{0}, 1}, stream
        };
        joinable::Buffer buffer = bits.buffer();
        buffer.dtype = joinable::DType::boolean;
        comm.all_reduce(buffer, ReduceOp::max).wait();
        CHECK(bits.read(comm, stream) == std::vector<std::uint8_t>{0, 1, 1});
    });
}

TEST_CASE("a sum of which ranks get parts multiplies what each rank has by its own factor") {
    run_nccl_ranks({1, 2, 3, 4, 8}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        int const n = comm.size();
        std::vector<std::size_t> counts;
        for (int rank = 0; rank < n; ++rank) {
            counts.push_back(static_cast<std::size_t>(rank) + 1);
        }
        auto const me = static_cast<std::size_t>(comm.rank());
        for (bool const has_counts : {false, true}) {
            auto const ranks = static_cast<std::size_t>(n);
            std::size_t const all = has_counts ? ranks * (ranks + 1) / 2 : ranks;
            // Rank r has r + 1, twice, or as often as its factor takes back.
            int const times = 2 << comm.rank() % 2;
            std::vector<int> const own(all, times * (comm.rank() + 1));
            DeviceArray<float> const in{numbers<float>(own), stream};
            DeviceArray<float> const out{has_counts ? counts[me] : 1};
            if (has_counts) {
                comm.reduce_scatter(in.buffer(), out.buffer(), ReduceOp::sum, 1.0 / times, counts)
                    .wait();
            } else {
                comm.reduce_scatter(in.buffer(), out.buffer(), ReduceOp::sum, 1.0 / times).wait();
            }
            std::vector<int> const sums(has_counts ? counts[me] : 1, n * (n + 1) / 2);
            CHECK(out.read(comm, stream) == numbers<float>(sums));
        }
    });
}

/// Sums of `count` elements of one rank, in place and to another place.
template <class T>
void check_scaled_alone(NcclCommunicator& comm, cudaStream_t stream, std::size_t count) {
    std::vector<std::size_t> const counts{count};
    std::vector<T> const halves(count, number<T>(2));
    DeviceArray<T> const in_place{std::vector<T>(count, number<T>(4)), stream};
    DeviceArray<T> const parts{count};
    DeviceArray<T> const counted{count};
    comm.all_reduce(in_place.buffer(), ReduceOp::sum, 0.5).wait();
    CHECK(in_place.read(comm, stream) == halves);
    comm.all_reduce(in_place.buffer(), ReduceOp::sum, 2.0).wait();
    comm.reduce_scatter(in_place.buffer(), parts.buffer(), ReduceOp::sum, 0.5).wait();
    CHECK(parts.read(comm, stream) == halves);
    comm.reduce_scatter(in_place.buffer(), counted.buffer(), ReduceOp::sum, 0.5, counts).wait();
    CHECK(counted.read(comm, stream) == halves);
}

TEST_CASE("a scaled sum of one rank reaches its last element") {
    // As many elements as NCCL's blocks share evenly, and some more or fewer.
    std::vector<std::size_t> const counts{0,       1,       2048,    4096,    4097,
                                          8192,    8193,    8200,    16'384,  16'385,
                                          100'016, 131'072, 131'073, 131'103, 262'144,
                                          262'145, 262'175, 300'001, 524'288, 524'319};
    run_nccl_ranks({1}, [&](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        for (std::size_t k = 0; k < counts.size(); ++k) {
            std::size_t turn = 0;
            auto const check = [&]<class T>(std::type_identity<T>) {
                if (!is_left_out(k, 4, turn++)) { // each count has its dtype there
                    check_scaled_alone<T>(comm, stream, counts[k]);
                }
            };
            check(std::type_identity<joinable::Half>{});
            check(std::type_identity<joinable::BFloat16>{});
            check(std::type_identity<float>{});
            check(std::type_identity<double>{});
        }
    });
}

template <class T>
void check_all_to_all(NcclCommunicator& comm, cudaStream_t stream) {
    int const n = comm.size();
    auto const ranks = static_cast<std::size_t>(n);
    auto const me = static_cast<std::size_t>(comm.rank());
    std::vector<int> mine;
    std::vector<int> gathered;
    std::vector<int> exchanged;
    std::vector<int> scattered;
    for (int rank = 0; rank < n; ++rank) {
        mine.push_back(mark(comm.rank(), static_cast<std::size_t>(rank)));
        gathered.push_back(mark(rank, 3));
        exchanged.push_back(mark(rank, me));
    }
    DeviceArray<T> const one{numbers<T>({mark(comm.rank(), 3)}), stream};
    DeviceArray<T> const all{ranks};
    comm.all_gather(one.buffer(), all.buffer()).wait();
    CHECK(all.read(comm, stream) == numbers<T>(gathered));

    DeviceArray<T> const parts{numbers<T>(mine), stream};
    comm.all_to_all(parts.buffer(), all.buffer()).wait();
    CHECK(all.read(comm, stream) == numbers<T>(exchanged));

    DeviceArray<T> const share{1};
    comm.reduce_scatter(parts.buffer(), share.buffer(), ReduceOp::max).wait();
    CHECK(share.read(comm, stream) == numbers<T>({mark(n - 1, me)}));

    // In place: a rank's part of the whole.
    comm.reduce_scatter(parts.buffer(), parts.part(me, 1), ReduceOp::max).wait();
    comm.all_gather(parts.part(me, 1), parts.buffer()).wait();
    for (std::size_t rank = 0; rank < ranks; ++rank) {
        scattered.push_back(mark(n - 1, rank));
    }
    CHECK(parts.read(comm, stream) == numbers<T>(scattered));

    // By counts: rank r has r + 1 elements, all told n (n + 1) / 2.
    std::vector<std::size_t> counts;
    std::vector<int> joined;
    std::vector<int> largest;
    for (int rank = 0; rank < n; ++rank) {
        counts.push_back(static_cast<std::size_t>(rank) + 1);
        for (int k = 0; k <= rank; ++k) {
            joined.push_back(mark(rank, static_cast<std::size_t>(k)));
        }
    }
    std::vector<int> const own(
        joined.begin() + comm.rank() * (comm.rank() + 1) / 2,
        joined.begin() + (comm.rank() + 1) * (comm.rank() + 2) / 2
    );
    DeviceArray<T> const uneven{numbers<T>(own), stream};
    DeviceArray<T> const together{joined.size()};
    comm.all_gather(uneven.buffer(), together.buffer(), counts).wait();
    CHECK(together.read(comm, stream) == numbers<T>(joined));

    DeviceArray<T> const reduced{own.size()};
    comm.reduce_scatter(together.buffer(), reduced.buffer(), ReduceOp::min, counts).wait();
    CHECK(reduced.read(comm, stream) == numbers<T>(own));

    // What rank a has for b: a + b elements, so what rank a sends, it receives the counts of, too.
    std::vector<std::size_t> to_each;
    std::vector<int> sent;
    std::vector<int> received;
    for (std::size_t other = 0; other < ranks; ++other) {
        to_each.push_back(me + other);
        for (std::size_t k = 0; k < me + other; ++k) {
            sent.push_back(mark(comm.rank(), k + other));
            received.push_back(mark(static_cast<int>(other), k + me));
        }
    }
    DeviceArray<T> const out{numbers<T>(sent), stream};
    DeviceArray<T> const in{sent.size()};
    comm.all_to_all(out.buffer(), in.buffer(), to_each, to_each).wait();
    CHECK(in.read(comm, stream) == numbers<T>(received));
}

TEST_CASE("collectives without a root are right for every element type") {
    run_nccl_ranks({1, 2, 3, 4, 8}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        if (comm.size() == 4) {
            for_each_type([&]<class T>() { check_all_to_all<T>(comm, stream); });
        } else {
            check_all_to_all<double>(comm, stream);
        }
    });
}

TEST_CASE("messages go between two ranks, and around a ring in a group") {
    run_nccl_ranks({1, 2, 3, 4, 8}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        int const n = comm.size();
        DeviceArray<int> const mine{{comm.rank(), -comm.rank()}, stream};
        DeviceArray<int> const other{2};
        {
            auto group = comm.group();
            auto sent = comm.send(mine.buffer(), (comm.rank() + 1) % n);
            auto received = comm.receive(other.buffer(), (comm.rank() + n - 1) % n);
            group.end();
            sent.wait();
            received.wait();
        }
        int const before = (comm.rank() + n - 1) % n;
        CHECK(other.read(comm, stream) == std::vector{before, -before});

        if (n > 1 && comm.rank() == 0) {
            comm.send(mine.buffer(), n - 1, 7).wait();
        } else if (n > 1 && comm.rank() == n - 1) {
            comm.receive(other.buffer(), 0, 7).wait();
            CHECK(other.read(comm, stream) == std::vector{0, 0});
        }
        comm.barrier();
    });
}

TEST_CASE("collectives of a group are launched as one, each with its own result") {
    run_nccl_ranks({1, 2, 4, 8}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        std::vector<DeviceArray<float>> data;
        for (int k = 0; k < 5; ++k) {
            data.emplace_back(std::vector{static_cast<float>(comm.rank() * k), 1.0F}, stream);
        }
        std::size_t const before = fake_nccl::calls("ncclGroupEnd");
        {
            std::vector<joinable::NcclWork> works;
            auto group = comm.group();
            for (auto const& array : data) {
                works.push_back(comm.all_reduce(array.buffer(), ReduceOp::sum));
            }
            works.push_back(comm.broadcast(data[0].buffer(), 0));
            CHECK_THROWS_WITH_AS(
                works.back().wait(), doctest::Contains("end the group"), joinable::ContractViolation
            );
            CHECK_THROWS_AS(static_cast<void>(comm.group()), joinable::ContractViolation);
            group.end();
            group.end(); // again is fine
            works.back().wait();
            works.front().wait();
            for (auto& work : works) {
                work.synchronize();
                CHECK(work.test());
            }
        }
        CHECK(fake_nccl::calls("ncclGroupEnd") == before + 1);
        int const ranks = comm.size() * (comm.size() - 1) / 2;
        for (int k = 0; k < 5; ++k) {
            CHECK(
                data[static_cast<std::size_t>(k)].read(comm, stream) ==
                std::vector{static_cast<float>(ranks * k), static_cast<float>(comm.size())}
            );
        }
    });
}

TEST_CASE("a group that holds nothing does nothing") {
    run_nccl_ranks({2}, [](NcclCommunicator& comm, auto&, cudaStream_t) {
        {
            auto const group = comm.group();
        }
        comm.synchronize();
        CHECK_FALSE(comm.is_aborted());
    });
}

TEST_CASE("waiting for a work orders streams and leaves the host free") {
    run_nccl_ranks({2}, [](NcclCommunicator& comm, auto& hosts, cudaStream_t stream) {
        DeviceArray<int> const data{{1}, stream};
        DeviceArray<int> const copy{1};
        if (comm.rank() == 0) {
            // Rank 1 comes only after this rank has waited: so waiting does not block.
            auto work = comm.all_reduce(data.buffer(), ReduceOp::sum);
            CHECK_FALSE(work.test());
            work.wait();
            CHECK_FALSE(work.test());
            cuda(cudaMemcpyAsync(
                copy.buffer().data, data.buffer().data, 4, cudaMemcpyDeviceToDevice, stream
            ));
            CHECK_FALSE(fake_cuda::is_idle(stream));
            CHECK(comm.missing_ranks() == std::vector{1});
            hosts.barrier();
            work.synchronize();
            CHECK(work.test());
        } else {
            hosts.barrier();
            comm.all_reduce(data.buffer(), ReduceOp::sum).wait();
            cuda(cudaMemcpyAsync(
                copy.buffer().data, data.buffer().data, 4, cudaMemcpyDeviceToDevice, stream
            ));
        }
        CHECK(copy.read(comm, stream) == std::vector{2});
        CHECK(comm.missing_ranks().empty());
    });
}

TEST_CASE("a collective comes after what is on the caller's stream, whichever that is") {
    run_nccl_ranks({3}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        Stream const other;
        DeviceArray<int> const first{{1}, stream};
        DeviceArray<int> const second{{2}, other};
        auto one = comm.all_reduce(first.buffer(), ReduceOp::sum);
        comm.set_stream(other);
        auto two = comm.all_reduce(second.buffer(), ReduceOp::sum);
        one.wait(other);
        two.wait();
        CHECK(first.read(comm, other) == std::vector{3});
        CHECK(second.read(comm, other) == std::vector{6});
    });
}

TEST_CASE("a work that is destroyed unfinished makes the host wait") {
    std::atomic<int> posted{0};
    run_nccl_ranks({4}, [&](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        DeviceArray<int> const data{{comm.rank()}, stream};
        if (comm.rank() == 3) {
            wait_until(posted, 3);
        }
        {
            auto const work = comm.all_reduce(data.buffer(), ReduceOp::max);
            ++posted;
        }
        fake_cuda::DeviceCode const code; // as a kernel that waits for nothing any more
        CHECK(*static_cast<int const*>(data.buffer().data) == 3);
    });
}

TEST_CASE("many collectives at once are finished in any order, however long NCCL takes to launch") {
    for (int const polls : {0, 1, 7}) {
        fake_nccl::set_polls_in_progress(polls);
        run_nccl_ranks({1, 2, 4}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
            for (int turn = 0; turn < 3; ++turn) { // launches are used again
                std::vector<DeviceArray<std::int64_t>> data;
                std::vector<joinable::NcclWork> works;
                for (int k = 0; k < 40; ++k) {
                    data.emplace_back(
                        std::vector<std::int64_t>(static_cast<std::size_t>(1 + 10 * (k % 3)), k),
                        stream
                    );
                    works.push_back(comm.all_reduce(data.back().buffer(), ReduceOp::sum));
                }
                for (std::size_t k = works.size(); k-- > 0;) {
                    works[k].wait();
                }
                for (std::size_t k = 0; k < data.size(); ++k) {
                    auto const values = data[k].read(comm, stream);
                    CHECK(
                        values ==
                        std::vector(values.size(), static_cast<std::int64_t>(k) * comm.size())
                    );
                }
            }
        });
    }
    fake_nccl::set_polls_in_progress(1);
}

TEST_CASE("works that are only waited for give their events back once the device has run them") {
    run_nccl_ranks({1, 3}, [](NcclCommunicator& comm, auto& hosts, cudaStream_t stream) {
        DeviceArray<int> const data{{0}, stream};
        auto const run_late = [&] { // the host is done before the device begins
            std::atomic<int> begun{0};
            fake_cuda::enqueue(stream, [&] { wait_until(begun, 1); });
            for (int k = 0; k < 4; ++k) {
                comm.all_reduce(data.buffer(), ReduceOp::sum).wait();
            }
            ++begun;
            cuda(cudaStreamSynchronize(stream));
        };
        run_late();
        hosts.barrier();
        std::size_t const events = fake_cuda::live_events();
        hosts.barrier();
        for (int turn = 0; turn < 30; ++turn) {
            run_late();
        }
        hosts.barrier();
        CHECK(fake_cuda::live_events() == events);
        hosts.barrier();
    });
}

TEST_CASE("nothing is left of a communicator after its destruction") {
    std::size_t const streams = fake_cuda::live_streams();
    std::size_t const events = fake_cuda::live_events();
    run_nccl_ranks({1, 4}, [](NcclCommunicator& comm, auto&, cudaStream_t stream) {
        DeviceArray<float> const data{{1.0F}, stream};
        comm.all_reduce(data.buffer(), ReduceOp::sum).wait();
        comm.synchronize();
    });
    CHECK(fake_nccl::live_communicators() == 0);
    CHECK(fake_cuda::live_streams() == streams);
    CHECK(fake_cuda::live_events() == events);
}

} // namespace
