// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <vector>

#include <joinable/communicator/algorithms/communicator.hpp>
#include <joinable/communicator/algorithms/plan.hpp>
#include <joinable/communicator/failure_report.hpp>
#include <joinable/reduction/reduce.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

/// The part of the shorter of two works that runs while the other one does, by the times of each alone and of both.
[[nodiscard]] constexpr double overlap_of(double one, double other, double both) noexcept {
    return (std::min)((std::max)((one + other - both) / (std::min)(one, other), 0.0), 1.0);
}

/// Times messages and additions on all ranks at once, as an all-reduce runs them.
template <class Clock, class Comm>
class CostMeasurement {
public:
    static constexpr std::size_t short_bytes = 64;
    static constexpr std::size_t long_bytes = std::size_t{1} << 20U;
    static constexpr std::size_t uncached_bytes = std::size_t{1} << 24U;

    explicit CostMeasurement(Comm& comm)
        : over_{comm}, sent_(long_bytes / sizeof(float)), received_(sent_.size()),
          sum_(sent_.size()), term_(sent_.size()), times_(kinds * places()) {}

    [[nodiscard]] MessageCosts run() {
        times_[addition * places() + own_place()] = timed([&] { add(); });
        each_round([&](int peer, std::size_t place) {
            times_[short_message * places() + place] = there_and_back(peer, short_bytes);
            times_[long_message * places() + place] = there_and_back(peer, long_bytes);
            times_[exchange * places() + place] = both_at_once(peer, [] {});
            times_[exchange_and_addition * places() + place] = both_at_once(peer, [&] { add(); });
        });
        gather();
        MessageCosts costs;
        double const combine = median_of(addition);
        costs.combine_seconds = combine / long_bytes;
        if (over_.size() > 1) {
            double const longer = median_of(long_message);
            double const shorter = (std::min)(median_of(short_message), longer / 2);
            double const exchanged = (std::max)(median_of(exchange), longer);
            costs.bytes_per_second = (long_bytes - short_bytes) / (longer - shorter);
            costs.message_seconds =
                (std::max)(shorter - short_bytes / costs.bytes_per_second, least_seconds);
            costs.both_ways = (std::min)((exchanged - shorter) / (longer - shorter), 2.0);
            costs.overlap = overlap_of(exchanged, combine, median_of(exchange_and_addition));
            costs.uncached = uncached_factor(shorter, exchanged + combine);
        }
        return costs;
    }

private:
    enum Kind : std::size_t {
        addition,
        short_message,
        long_message,
        exchange,
        exchange_and_addition,
        kinds
    };
    static constexpr double least_seconds = 1e-9; ///< what clocks tell apart
    static constexpr std::size_t most_times = 25;
    static constexpr double patience =
        0.25; ///< seconds for times of one kind, unless three take longer

    /// Times of one kind: of all ranks, in each round.
    [[nodiscard]] std::size_t places() const {
        auto const rounds = static_cast<std::size_t>((std::max)(rounded_up_log2(over_.size()), 1));
        return rounds * static_cast<std::size_t>(over_.size());
    }

    [[nodiscard]] std::size_t own_place() const { return static_cast<std::size_t>(over_.rank()); }
    /// Calls f(peer, place of its times): ranks whose numbers differ in one bit are peers.
    template <class F>
    void each_round(F const& f) {
        std::size_t place = own_place();
        for (int distance = 1; distance < over_.size(); distance *= 2) {
            f(over_.rank() ^ distance, place);
            place += static_cast<std::size_t>(over_.size());
        }
    }
    /// Other ranks have zeros in this rank's places, so all ranks get the bits of each.
    void gather() {
        over_.all_reduce({times_.data(), times_.size(), DType::f64}, ReduceOp::sum).wait();
    }

    /// How many times as long a byte takes in long buffers, by an exchange and a combination of 1 MiB, `cached`, which
    /// includes alpha. A link that takes its time is as slow there: it is not made to carry them.
    [[nodiscard]] double uncached_factor(double alpha, double cached) {
        constexpr std::size_t times_longer = uncached_bytes / long_bytes;
        if (cached * times_longer * 3 > patience) {
            return 1;
        }
        for (std::vector<float>* const floats : {&sent_, &received_, &sum_, &term_}) {
            floats->resize(uncached_bytes / sizeof(float));
        }
        std::fill(times_.begin(), times_.end(), 0.0);
        times_[addition * places() + own_place()] = timed([&] { add(); });
        each_round([&](int peer, std::size_t place) {
            times_[exchange * places() + place] = both_at_once(peer, [] {});
        });
        gather();
        double const uncached = median_of(addition) + median_of(exchange) - alpha;
        return (std::max)(uncached / times_longer / (cached - alpha), 1.0);
    }

    /// The median of some times of `f()`. All ranks begin together and take as many.
    template <class F>
    [[nodiscard]] double timed(F const& f) {
        double first = once(f); // also brings memory into caches
        over_.all_reduce({&first, 1, DType::f64}, ReduceOp::max).wait();
        double const fit = first > 0 ? patience / first : double{most_times};
        std::size_t const count = fit < 3            ? 3
                                  : fit < most_times ? static_cast<std::size_t>(fit)
                                                     : most_times;
        std::vector<double> times;
        times.reserve(count);
        over_.barrier();
        while (times.size() < count) {
            times.push_back(once(f));
        }
        return (std::max)(median(times), least_seconds);
    }
    template <class F>
    [[nodiscard]] static double once(F const& f) {
        auto const begin = Clock::now();
        f();
        return std::chrono::duration<double>{Clock::now() - begin}.count();
    }
    /// Half of the time of `f()`, which sends two messages. 0 on a rank whose peer does not exist.
    template <class F>
    [[nodiscard]] double halved(int peer, F const& f) {
        bool const has_peer = peer < over_.size();
        double const seconds = timed([&] {
            if (has_peer) {
                f();
            }
        });
        return seconds / 2 * (has_peer ? 1 : 0);
    }
    /// The time of a message: half of there and back.
    [[nodiscard]] double there_and_back(int peer, std::size_t bytes) {
        std::size_t const count = bytes / sizeof(float);
        return halved(peer, [&] {
            if (over_.rank() < peer) {
                wait(send(peer, count));
                wait(receive(peer, count));
            } else {
                wait(receive(peer, count));
                wait(send(peer, count));
            }
        });
    }
    /// The time of messages of all of `sent_` in both directions at once. This rank does something else while they are
    /// under way.
    template <class F>
    [[nodiscard]] double both_at_once(int peer, F const& meanwhile) {
        return halved(peer, [&] {
            for (int i = 0; i < 2; ++i) {
                auto receiving = receive(peer, received_.size());
                auto sending = send(peer, sent_.size());
                meanwhile();
                wait(receiving);
                wait(sending);
            }
        });
    }
    /// The first elements go to or come from `peer`. All ranks hear what a message throws, as from a collective.
    [[nodiscard]] auto send(int peer, std::size_t count) {
        return abort_if_throws(over_, [&] {
            return over_.send({sent_.data(), count, DType::f32}, peer);
        });
    }
    [[nodiscard]] auto receive(int peer, std::size_t count) {
        return abort_if_throws(over_, [&] {
            return over_.receive({received_.data(), count, DType::f32}, peer);
        });
    }
    template <class W>
    void wait(W&& work) {
        abort_if_throws(over_, [&] { work.wait(); });
    }
    /// As a MessageCommunicator combines.
    void add() {
        std::array<void*, 2> const operands{sum_.data(), term_.data()};
        auto const operand = [&](std::size_t i) { return static_cast<std::byte*>(operands[i]); };
        auto const result = [&](std::size_t) { return static_cast<std::byte*>(operands[0]); };
        reduce_to(DType::f32, ReduceOp::sum, {2, operand}, {1, result}, sum_.size());
    }

    [[nodiscard]] double median_of(Kind kind) const {
        auto const begin = times_.begin() + static_cast<std::ptrdiff_t>(kind * places());
        std::vector<double> some(begin, begin + static_cast<std::ptrdiff_t>(places()));
        some.erase(std::remove(some.begin(), some.end(), 0.0), some.end());
        return some.empty() ? 0 : median(some);
    }
    [[nodiscard]] static double median(std::vector<double>& times) {
        auto const middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
        std::nth_element(times.begin(), middle, times.end());
        return *middle;
    }

    MessageCommunicator<Comm> over_;
    std::vector<float> sent_;
    std::vector<float> received_;
    std::vector<float> sum_; ///< what is added, also while messages are under way
    std::vector<float> term_;
    std::vector<double> times_; ///< of each kind, for each round and rank
};

} // namespace detail

/// The costs of messages between these ranks, for choose_algorithm() and MessageOptions::costs.
/// `comm` models SendsAndReceives or at least ExchangesMessages.
///
/// In each of log2 size() rounds, ranks whose numbers differ in one bit send each other messages of
/// 64 bytes and of 1 MiB, there and back, all pairs at the same time. Each number is the median of
/// up to 25 times, and of all pairs and rounds: links that differ give the costs of a usual one.
/// combine_seconds is that of a sum of 1 MiB of f32, on all ranks at the same time. The peers then also send each
/// other 1 MiB at once, for both_ways, and add meanwhile, for overlap; and, where that is fast enough to be a matter
/// of caches, 16 MiB, for uncached. A rank that is alone sends nothing, and keeps the defaults of all but combine_seconds.
///
/// Collective; returns the same numbers on all ranks. No message with tag 0 or with a tag of a
/// MessageCommunicator may be under way. Takes up to half a second and a quarter more a round in
/// shared memory, up to a second a round elsewhere, unless three messages of 1 MiB take longer. Allocates 64 MiB a rank
/// where links are fast.
/// @throws what messages throw; then all ranks throw, as from collectives of a MessageCommunicator.
template <class Clock = std::chrono::steady_clock, class Comm>
[[nodiscard]] MessageCosts measure_costs(Comm& comm) {
    static_assert(models_exchanges_messages<Comm>());
    if constexpr (ExchangesMessages<Comm>) {
        return detail::CostMeasurement<Clock, Comm>{comm}.run();
    }
}

}} // namespace joinable::v0
