// SPDX-License-Identifier: BSL-1.0
// Buckets that travel in fewer bytes: what is delivered and what is kept add up to the gradients.
#include <joinable/compression.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <support/instruction_set.hpp>
#include <support/linear_model.hpp>
#include <support/numbers.hpp>
#include <support/process_ranks.hpp>
#include <support/ranks.hpp>
#include <support/recording_communicator.hpp>
#include <support/strided_param.hpp>

#include "recorded_by_pytorch.hpp"

#include <joinable/bucket/reducer.hpp>
#include <joinable/detail/hash.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/participant/data_parallel.hpp>

namespace {

using namespace joinable_tests;
using joinable::DType;
using joinable::Reducer;
using joinable::ThreadCommunicator;

constexpr std::size_t rounds = 9;
constexpr std::size_t of_nobody = 3; // the round in which no rank contributes
constexpr std::size_t of_infinity =
    6; // the round in which a gradient of rank 0 has an infinite element
std::size_t inputs_of(int rank) {
    return rounds - static_cast<std::size_t>(rank * 3 % 5);
}

std::vector<StridedParam> make_model(DType dtype) {
    using joinable::Shape;
    std::vector<StridedParam> model;
    for (auto const& [extents, strides] : {
             std::pair<Shape, Shape>{{24, 70}, {70, 1}},
             {{70, 24}, {1, 70}},
             {{7}, {1}},
             {{40, 3, 11}, {33, 11, 1}},
             {{1}, {1}},
         }) {
        model.push_back(StridedParam{
            {OwnedTensor{dtype, extents, strides}, OwnedTensor{dtype, extents, strides}, {}}
        });
        model.back().need_grad();
    }
    return model;
}
Numbers make_gradient(std::size_t parameter, std::size_t count, int rank, std::size_t round) {
    Numbers numbers(count);
    for (std::size_t i = 0; i < count; ++i) {
        double const x = static_cast<double>(i % 70) + 1.5 * static_cast<double>(parameter);
        double const y = static_cast<double>(i / 70) + static_cast<double>(round);
        auto const own = static_cast<double>(rank + 1);
        numbers[i] = std::sin(0.3 * x) * std::cos(0.2 * y) * own + 0.2 * std::cos(x * y + own);
    }
    return numbers;
}
/// The gradient of a rank in a round: of rank 2 as a matrix, and a little of everything. Each is computed once, because
/// every rank sums up those of all others in each training.
Numbers const& gradient_of(std::size_t parameter, int rank, std::size_t round) {
    static std::vector<Numbers> const all = [] {
        std::vector<Numbers> made;
        std::vector<StridedParam> const model = make_model(DType::f32);
        for (int r = 0; r < 8; ++r) {
            for (std::size_t of_round = 0; of_round < rounds; ++of_round) {
                for (std::size_t i = 0; i < model.size(); ++i) {
                    made.push_back(make_gradient(i, model[i].grad.numel(), r, of_round));
                }
            }
        }
        return made;
    }();
    std::size_t const parameters = all.size() / (8 * rounds);
    return all.at((static_cast<std::size_t>(rank) * rounds + round) * parameters + parameter);
}

/// Whether all ranks have the same bits.
template <class Comm>
bool is_same_everywhere(Comm& comm, std::vector<StridedParam> const& model, bool has_unused) {
    joinable::detail::Hash hash;
    for (std::size_t i = 0; i < model.size(); ++i) {
        if (has_unused && i == 2) { // whose gradient is each rank's
            continue;
        }
        for (double const number : read(model[i].grad)) {
            std::uint64_t bits;
            std::memcpy(&bits, &number, sizeof bits);
            hash.add(std::isnan(number) ? 0 : bits);
        }
    }
    std::uint64_t most = hash.value();
    std::uint64_t least = hash.value();
    comm.all_reduce({&most, 1, DType::u64}, joinable::ReduceOp::max).wait();
    comm.all_reduce({&least, 1, DType::u64}, joinable::ReduceOp::min).wait();
    return most == least;
}

void add(Numbers& to, Numbers const& numbers, double factor = 1.0) {
    double* out = to.data(); // by pointers, because tests are not optimized
    double const* in = numbers.data();
    for (double* const end = out + to.size(); out != end; ++out) {
        *out += *in++ * factor;
    }
}
double distance(Numbers const& a, Numbers const& b) {
    double most = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        double const apart = std::abs(a[i] - b[i]);
        most = apart > most || std::isnan(apart) ? apart : most;
    }
    return most;
}

/// A training of ranks with different numbers of inputs. What ranks receive in all rounds and what they keep is the sum of
/// their gradients, times the factor.
template <class Comm, class Reduction>
void check_conserved(
    Comm& comm, DType dtype, Reduction reduction, bool has_unused, double tolerance
) {
    std::vector<StridedParam> model = make_model(dtype);
    Reducer reducer{
        comm,
        joinable::parameters(model),
        joinable::BucketOptions{.find_unused = has_unused},
        std::move(reduction)
    };
    std::vector<Numbers> delivered;
    std::vector<Numbers> expected;
    for (StridedParam const& param : model) {
        delivered.emplace_back(param.value.view().numel());
        expected.emplace_back(param.value.view().numel());
    }
    double const factor = 1.0 / comm.size();
    for (std::size_t round = 0; round < rounds; ++round) {
        auto const is_unused = [&](std::size_t i) {
            return has_unused && round % 2 == 1 && i == 2;
        };
        if (round < inputs_of(comm.rank()) && round != of_nobody) {
            for (std::size_t i = 0; i < model.size(); ++i) {
                Numbers gradient = gradient_of(i, comm.rank(), round);
                if (round == of_infinity && comm.rank() == 0 && i == 0) {
                    gradient[5] = std::numeric_limits<double>::infinity();
                }
                write(model[i].grad, gradient);
            }
            reducer.prepare_for_backward(factor, is_unused);
            for (std::size_t i = model.size(); i-- > 0;) {
                if (!is_unused(i)) {
                    reducer.mark_ready(i);
                }
            }
            reducer.finalize_backward();
        } else {
            reducer.contribute_zeros();
        }
        for (std::size_t i = 0; i < model.size(); ++i) {
            if (!is_unused(i) && round != of_infinity) {
                add(delivered[i], read(model[i].grad));
            }
            for (int rank = 0; rank < comm.size(); ++rank) {
                if (!is_unused(i) && round != of_infinity && round != of_nobody &&
                    round < inputs_of(rank)) {
                    add(expected[i], gradient_of(i, rank, round), factor);
                }
            }
        }
        CHECK(is_same_everywhere(comm, model, has_unused));
        if (round == of_infinity) {
            double const number = read(model[0].grad)[5];
            CHECK(number - number != 0.0); // it is not finite
        }
        if (round == of_nobody) {
            CHECK(read(model[0].grad) == Numbers(model[0].grad.numel()));
        }
    }
    for (std::size_t i = 0; i < model.size(); ++i) {
        joinable::AnyView const& like = model[i].value.view();
        Numbers kept(like.numel());
        auto const read_kept = [&](auto& of, DType of_dtype) {
            joinable::detail::visit_number(of_dtype, [&]<class T>(T) {
                T* const residual = of.feedback.template residual<T>(i);
                kept = read({residual, joinable::dtype_of<T>, like.extents(), like.strides()});
            });
        };
        if constexpr (requires { reducer.reduction().feedback; }) {
            read_kept(reducer.reduction(), dtype);
        } else if constexpr (requires { reducer.reduction().next.feedback; }) {
            read_kept(reducer.reduction().next, DType::f64);
        }
        comm.all_reduce({kept.data(), kept.size(), DType::f64}, joinable::ReduceOp::sum).wait();
        add(kept, delivered[i]);
        INFO("parameter ", i);
        CHECK(distance(kept, expected[i]) < tolerance);
    }
}

/// Each reduction, for buckets of this type. Roundings of 16 bits are kept by none.
template <class Comm>
void check_all_conserved(Comm& comm, DType dtype) {
    bool const is_half = joinable::is_half_precision(dtype);
    double const exact = dtype == DType::f64 ? 1e-11 : is_half ? 0.3 : 2e-4;
    for (bool const has_unused : {false, true}) {
        auto const check = [&](auto reduction, double tolerance) {
            CAPTURE(reduction.name);
            check_conserved(comm, dtype, std::move(reduction), has_unused, tolerance);
        };
        check(joinable::PowerSgd{.rank = 1, .start_iteration = 2}, exact);
        check(joinable::PowerSgd{.rank = 4, .start_iteration = 0, .warm_start = false}, exact);
        check(joinable::TopK{.density = 0.05}, exact);
        check(joinable::Int8Compression{}, exact);
        check(joinable::Fp16Compression<>{}, 0.1);
        check(joinable::Bf16Compression<>{}, 0.8);
        check(joinable::CastTo<DType::f32>{}, (std::max)(exact, 1e-5));
        check(
            joinable::CastTo<DType::f64, joinable::PowerSgd>{{.rank = 2, .start_iteration = 1}}, 0.8
        );
    }
}

TEST_CASE("what compressed rounds deliver and what ranks keep is the sum of the gradients") {
    for (DType const dtype : {DType::f32, DType::f64, DType::bf16}) {
        CAPTURE(joinable::name_of(dtype));
        run_participants({1, 2, 3, 4, 8}, [&](ThreadCommunicator& comm) {
            check_all_conserved(comm, dtype);
        });
    }
}

TEST_CASE("what compressed rounds of processes deliver and keep is the sum of the gradients") {
    run_process_ranks({1, 2, 3, 4, 8}, [](joinable::ProcessCommunicator& comm) {
        check_all_conserved(comm, DType::f32);
    });
}

TEST_CASE("ranks whose processors have different instruction sets end with the same bits") {
    using Set = joinable::detail::InstructionSet;
    run_process_ranks({2, 3, 4}, [](joinable::ProcessCommunicator& comm) {
        constexpr std::array sets{Set::baseline, Set::avx512, Set::avx2};
        OnlyInstructionSet const set{sets[static_cast<std::size_t>(comm.rank()) % 3]};
        for (DType const dtype : {DType::f32, DType::bf16}) {
            check_all_conserved(comm, dtype); // compares the bits of all averages, too
        }
    });
}

/// Counts what a rank gives to its collectives.
class Counted : public CoreOnly<ThreadCommunicator> {
public:
    using CoreOnly::CoreOnly;

    auto all_reduce(joinable::Buffer buffer, joinable::ReduceOp op) {
        bytes += buffer.bytes();
        return inner_.all_reduce(buffer, op);
    }
    template <class... Counts>
    auto all_gather(joinable::ConstBuffer in, joinable::Buffer out, Counts const&... counts) {
        bytes += in.bytes();
        return inner_.all_gather(in, out, counts...);
    }
    template <class... Counts>
    auto all_to_all(joinable::ConstBuffer in, joinable::Buffer out, Counts const&... counts) {
        bytes += in.bytes();
        return inner_.all_to_all(in, out, counts...);
    }

    std::size_t bytes = 0;
};

TEST_CASE("a bucket of 24 x 70 numbers sends the bytes that its reduction needs") {
    run_ranks({1, 2, 3}, [](ThreadCommunicator& thread) {
        Counted comm{thread};
        auto const bytes_of = [&](auto reduction) {
            std::vector<StridedParam> model = make_model(DType::f32);
            model.erase(model.begin() + 1, model.end());
            Reducer reducer{
                comm,
                joinable::parameters(model),
                joinable::BucketOptions{.rebuild_buckets = false},
                std::move(reduction)
            };
            comm.bytes = 0;
            reducer.prepare_for_backward(1.0);
            reducer.mark_ready(0);
            reducer.finalize_backward();
            return comm.bytes;
        };
        std::size_t const whole = 24 * 70 * 4;
        CHECK(bytes_of(joinable::AllReduce{}) == whole);
        CHECK(bytes_of(joinable::Fp16Compression<>{}) == whole / 2);
        CHECK(bytes_of(joinable::CastTo<DType::f64>{}) == 2 * whole);
        // One number more says how many ranks contribute.
        CHECK(
            bytes_of(joinable::PowerSgd{.rank = 2, .start_iteration = 0}) == 4 + 2 * (24 + 70) * 4
        );
        CHECK(bytes_of(joinable::PowerSgd{.start_iteration = 1}) == whole);
        CHECK(
            bytes_of(joinable::PowerSgd{.rank = 9, .start_iteration = 0}) == 4 + whole
        ); // no gain
        CHECK(bytes_of(joinable::TopK{.density = 0.1}) == 4 + 168 * 8);
        CHECK(bytes_of(joinable::TopK{.density = 0.6}) == whole);
        std::size_t const parts = static_cast<std::size_t>(comm.size());
        std::size_t const sent = 24 * 70 + 7 * 4 + 4 * parts; // 7 blocks of 256
        std::size_t const part = (7 + parts - 1) / parts;     // blocks of the first rank
        if (comm.rank() == 0) {
            std::size_t const own = parts == 1 ? 24U * 70U : part * 256;
            CHECK(bytes_of(joinable::Int8Compression{}) == sent + own + part * 4 + 4);
        } else {
            bytes_of(joinable::Int8Compression{});
        }
    });
}

/// Vectors beyond the second one find only rounding errors.
template <class Comm>
void check_matrix_of_rank_2(Comm& comm, std::size_t vectors, double epsilon) {
    std::vector<StridedParam> model = make_model(DType::f64);
    model.erase(model.begin() + 2, model.end());
    Reducer reducer{
        comm,
        joinable::parameters(model),
        {},
        joinable::PowerSgd{.rank = vectors, .start_iteration = 0, .epsilon = epsilon}
    };
    double const tolerance = epsilon == 0 ? 1e-10 : 1e-7;
    double const ranks = comm.size();
    for (int round = 0; round < 2; ++round) {
        Numbers sums(24 * 70);
        for (std::size_t k = 0; k < sums.size(); ++k) {
            auto const i = static_cast<double>(k / 70);
            auto const j = static_cast<double>(k % 70);
            sums[k] =
                ranks * std::sin(i) * (j + 1) + (ranks + 1) * ranks / 2 * std::cos(i) * std::sin(j);
        }
        for (std::size_t k = 0; k < sums.size(); ++k) {
            auto const i = static_cast<double>(k / 70);
            auto const j = static_cast<double>(k % 70);
            double const own =
                std::sin(i) * (j + 1) + (comm.rank() + 1) * std::cos(i) * std::sin(j);
            model[0].grad.as<double>()(k / 70, k % 70) = own;
            model[1].grad.as<double>()(k % 70, k / 70) = own;
        }
        reducer.prepare_for_backward(1.0);
        reducer.mark_ready(1);
        reducer.mark_ready(0);
        reducer.finalize_backward();
        CHECK(distance(read(model[0].grad), sums) < tolerance * ranks * ranks);
        for (std::size_t k = 0; k < sums.size(); ++k) {
            CHECK(
                model[1].grad.as<double>()(k % 70, k / 70) ==
                doctest::Approx(sums[k]).epsilon(10 * tolerance)
            );
        }
    }
}
TEST_CASE(
    "a matrix of rank 2 travels by two vectors or more without loss, in whatever order it lies"
) {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        for (std::size_t const vectors : {2U, 4U}) {
            for (double const epsilon : {0.0, joinable::PowerSgd{}.epsilon}) {
                check_matrix_of_rank_2(comm, vectors, epsilon);
            }
        }
    });
}

TEST_CASE("all instruction sets multiply thin matrices to the same bits") {
    joinable::detail::MatrixSize const size{3, 141, 3};
    auto const check = [&]<class T>(T) {
        std::vector<T> left(9);
        std::vector<T> right(3 * 141);
        auto const fill = [](std::vector<T>& to, std::uint64_t seed) {
            for (std::size_t i = 0; i < to.size(); ++i) {
                to[i] = joinable::detail::random_number<T>(seed, i);
            }
        };
        fill(left, 1);
        fill(right, 2);
        std::vector<T> first(141);
        std::vector<T> other(141);
        using joinable::detail::InstructionSet;
        joinable::detail::product_row(
            size, left.data(), right.data(), 1, first.data(), InstructionSet::baseline
        );
        for (auto const set : {InstructionSet::avx2, InstructionSet::avx512}) {
            if (set <= joinable::detail::instruction_set()) {
                joinable::detail::product_row(
                    size, left.data(), right.data(), 1, other.data(), set
                );
                CHECK(std::memcmp(first.data(), other.data(), 141 * sizeof(T)) == 0);
            }
        }
        for (std::size_t j = 0; j < 141; ++j) {
            double sum = 0;
            for (std::size_t r = 0; r < 3; ++r) {
                sum +=
                    static_cast<double>(left[r * 3 + 1]) * static_cast<double>(right[r * 141 + j]);
            }
            CHECK(static_cast<double>(first[j]) == doctest::Approx(sum).epsilon(1e-6));
        }
    };
    check(float{});
    check(double{});
}

TEST_CASE("gradients of zeros leave PowerSgd a direction for later ones") {
    run_ranks({1, 2, 3}, [](ThreadCommunicator& comm) {
        std::vector<StridedParam> model = make_model(DType::f32);
        Reducer reducer{
            comm, joinable::parameters(model), {}, joinable::PowerSgd{.start_iteration = 0}
        };
        for (float const number : {0.0F, 0.0F, 3.0F}) {
            for (StridedParam const& param : model) {
                write(param.grad, Numbers(param.grad.numel(), static_cast<double>(number)));
            }
            reducer.prepare_for_backward(1.0 / comm.size());
            for (std::size_t i = model.size(); i-- > 0;) {
                reducer.mark_ready(i);
            }
            reducer.finalize_backward();
            for (StridedParam const& param : model) { // all of one number: of rank 1
                CHECK(
                    distance(
                        read(param.grad), Numbers(param.grad.numel(), static_cast<double>(number))
                    ) < 1e-4
                );
            }
        }
    });
}

TEST_CASE("a joined rank's residual travels, and ranks that train on get it") {
    run_ranks({2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        std::vector<Param<float>> model = make_params<float>({400});
        joinable::DistributedDataParallel ddp{comm, model, joinable::TopK{.density = 0.02}};
        joinable::Join guard{joinable::participants(ddp)};
        double total = 0;
        std::size_t const own = comm.rank() == 0 ? 60 : 1;
        for (std::size_t round = 0; round < own; ++round) {
            ddp.forward([] {});
            for (std::size_t i = 0; i < 400; ++i) {
                model[0].g(i) = round == 0 ? static_cast<float>(i + 1) : 0.0F;
            }
            ddp.backward([](auto ready) { ready(0); });
            for (std::size_t i = 0; i < 400; ++i) {
                total += static_cast<double>(model[0].g(i));
            }
        }
        guard.finish();
        if (comm.rank() == 0) { // 8 of 400 in each round: after 50 all has come, from all ranks
            CHECK(total == doctest::Approx(400.0 * 401 / 2));
        }
    });
}

TEST_CASE("settings out of range are refused in a sentence, and settings that differ are a Mismatch"
) {
    run_ranks({1, 2, 3}, [](ThreadCommunicator& comm) {
        auto const refuses = [&](auto reduction, char const* text) {
            std::vector<StridedParam> model = make_model(DType::f32);
            CHECK_THROWS_WITH_AS(
                (joinable::DistributedDataParallel{comm, model, std::move(reduction)}),
                doctest::Contains(text),
                joinable::ContractViolation
            );
        };
        if (comm.size() == 1) {
            refuses(joinable::PowerSgd{.rank = 0}, "PowerSgd: rank is 0; give 1 or more");
            refuses(
                joinable::PowerSgd{.min_compression_rate = 0},
                "min_compression_rate is 0; give a number above 0"
            );
            refuses(joinable::PowerSgd{.min_compression_rate = NAN}, "give a number above 0");
            refuses(joinable::PowerSgd{.epsilon = -1}, "epsilon is -1; give 0 or more");
            refuses(joinable::TopK{.density = 0}, "TopK: density is 0; give the part");
            refuses(joinable::TopK{.density = 1.5}, "TopK: density is 1.5; give the part");
            refuses(joinable::TopK{.density = NAN}, "above 0 and at most 1");
            return;
        }
        bool const is_first = comm.rank() == 0;
        auto const differs = [&](auto reduction, char const* text) {
            std::vector<StridedParam> model = make_model(DType::f32);
            CHECK_THROWS_WITH_AS(
                (joinable::DistributedDataParallel{comm, model, std::move(reduction)}),
                doctest::Contains(text),
                joinable::Mismatch
            );
        };
        differs(joinable::PowerSgd{.rank = is_first ? 1U : 2U}, "options differ: PowerSgd::rank");
        differs(joinable::PowerSgd{.seed = is_first ? 1U : 2U}, "options differ: PowerSgd::seed");
        differs(joinable::TopK{.density = is_first ? 0.1 : 0.2}, "options differ: density");
        differs(
            joinable::CastTo<DType::f64, joinable::TopK>{{.density = is_first ? 0.1 : 0.2}},
            "options differ: density"
        );
        auto const sum = [](ThreadCommunicator& with, joinable::BucketRun const& run) {
            return with.all_reduce(run.buffer, joinable::ReduceOp::sum);
        };
        differs(
            joinable::reduce_by(is_first ? "mine" : "theirs", sum), "options differ: reduction"
        );
    });
}

TEST_CASE("a function says how a bucket travels") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        std::vector<Param<float>> model = make_params<float>({4, 5});
        std::size_t calls = 0;
        joinable::DistributedDataParallel ddp{
            comm,
            model,
            joinable::reduce_by(
                "maximum",
                [&](ThreadCommunicator& with, joinable::BucketRun const& run) {
                    ++calls;
                    return with.all_reduce(run.buffer, joinable::ReduceOp::max);
                }
            )
        };
        ddp.forward([] {});
        ddp.backward([&](auto ready) {
            for (std::size_t i : {1U, 0U}) {
                add_gradient(model[i], static_cast<double>((comm.rank() + 1) * comm.size()));
                ready(i);
            }
        });
        CHECK(calls == 1);
        CHECK(
            model[0].g(3) == static_cast<float>(comm.size())
        ); // divided by the ranks as it was packed
        CHECK(model[1].g(4) == static_cast<float>(comm.size()));
    });
}

/// As record_pytorch.py computes it.
Numbers recorded_gradient(
    std::size_t parameter, std::size_t columns, std::size_t count, int rank_, int round_
) {
    auto const p = static_cast<long>(parameter);
    long const rank = rank_;
    long const round = round_;
    Numbers numbers(count);
    for (std::size_t k = 0; k < count; ++k) {
        auto const i = static_cast<long>(k / columns);
        auto const j = static_cast<long>(k % columns);
        auto const part = [](long a, long b, long divisor) {
            return static_cast<double>(a * b) / static_cast<double>(divisor);
        };
        numbers[k] =
            part((5 * i + rank) % 17 - 8, (3 * j + p) % 13 - 6, 8) +
            part((7 * i + round) % 11 - 5, 5 * j % 19 - 9, 32) +
            part(3 * i % 23 - 11, (11 * j + round) % 29 - 14, 256) +
            part((11 * i + 2 * rank) % 13 - 6, 7 * j % 31 - 15, 1024) +
            part((7 * i * i + 13 * j * j * (rank + 1) + 3 * round * (i + j)) % 64 - 32, 1, 16384);
    }
    return numbers;
}

/// Trains two ranks as record_pytorch.py does, and compares what rank 0 receives.
template <class Reduction>
void check_like_pytorch(RecordedHook const& recorded, Reduction const& make, double tolerance) {
    run_ranks({2}, [&](ThreadCommunicator& comm) {
        using joinable::Shape;
        std::vector<StridedParam> model;
        for (auto const& [extents, strides] : std::vector<std::pair<Shape, Shape>>{
                 {{24, 40}, {40, 1}}, {{7}, {1}}, {{16, 9}, {9, 1}}
             }) {
            model.push_back(StridedParam{
                {OwnedTensor{DType::f32, extents, strides},
                 OwnedTensor{DType::f32, extents, strides},
                 {}}
            });
            model.back().need_grad();
        }
        joinable::DistributedDataParallel ddp{comm, model, make()};
        if constexpr (requires { ddp.reduction().factors; }) {
            for (std::size_t k = 0; k < 2; ++k) {
                auto& factors = ddp.reduction().factors[2 * k];
                std::vector<float> const& right = recorded.rights[k];
                REQUIRE(factors.right.bytes() == right.size() * sizeof(float));
                std::copy(
                    right.begin(), right.end(), reinterpret_cast<float*>(factors.right.data())
                );
                factors.is_started = true;
            }
        }
        joinable::Join guard{joinable::participants(ddp)};
        std::size_t noted = 0;
        for (int round = 1; round <= (comm.rank() == 1 ? recorded.inputs : 50); ++round) {
            ddp.forward([] {});
            ddp.backward([&](auto ready) {
                for (std::size_t i = model.size(); i-- > 0;) {
                    write(
                        model[i].grad,
                        recorded_gradient(
                            i,
                            model[i].grad.extents()[model[i].grad.extents().size() - 1],
                            model[i].grad.numel(),
                            comm.rank(),
                            round
                        )
                    );
                    ready(i);
                }
            });
            if (comm.rank() == 0 && noted < recorded_rounds.size() &&
                round == recorded_rounds[noted]) {
                for (std::size_t i = 0; i < model.size(); ++i) {
                    Numbers const average = read(model[i].grad);
                    for (std::size_t k = 0; k < 5; ++k) {
                        INFO("round ", round, ", gradient ", i, ", sample ", k);
                        double const found = average[(k * 37 + 5) % average.size()];
                        double const expected = static_cast<double>(recorded.averages[noted][i][k]);
                        CHECK(std::abs(found - expected) <= tolerance * (1 + std::abs(expected)));
                    }
                }
                ++noted;
            }
        }
        guard.finish();
        CHECK((comm.rank() != 0 || noted == recorded_rounds.size()));
    });
}

TEST_CASE("reductions deliver what PyTorch's communication hooks deliver, with uneven inputs, too"
) {
    std::vector<RecordedHook> const all = recorded_hooks();
    CHECK(all.size() == 10);
    for (RecordedHook const& recorded : all) {
        CAPTURE(recorded.hook);
        CAPTURE(recorded.rank);
        CAPTURE(recorded.inputs);
        if (recorded.hook == "fp16") {
            check_like_pytorch(recorded, [] { return joinable::Fp16Compression<>{}; }, 1e-3);
        } else if (recorded.hook == "bf16") {
            check_like_pytorch(recorded, [] { return joinable::Bf16Compression<>{}; }, 8e-3);
        } else {
            auto const rank = static_cast<std::size_t>(recorded.rank);
            check_like_pytorch(
                recorded,
                [&] { return joinable::PowerSgd{.rank = rank, .start_iteration = 2}; },
                2e-4
            );
        }
    }
}

} // namespace
