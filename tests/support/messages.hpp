// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <support/for_each_type.hpp>

#include <joinable/communicator/collectives.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/dtype.hpp>

/// @file
/// What messages do over every transport: bodies of tests, run by each rank.

namespace joinable_tests {

/// Each rank sends to the next one, in every dtype and in several sizes.
template <class Comm>
void pass_messages_around(Comm& comm) {
    int const next = (comm.rank() + 1) % comm.size();
    int const last = (comm.rank() + comm.size() - 1) % comm.size();
    for (std::size_t number = 0; number < joinable::dtype_count; ++number) {
        auto const dtype = static_cast<joinable::DType>(number);
        visit_real(dtype, [&]<class T>(std::type_identity<T>) {
            for (std::size_t const n :
                 {0U, 1U, 2U, 1000U, 100'000U}) { // 2 f64 are as long as a header of Gloo's
                std::vector<T> const mine(n, static_cast<T>(static_cast<float>(comm.rank())));
                std::vector<T> theirs(n, static_cast<T>(99.0F));
                auto sending = joinable::send(comm, mine, next);
                joinable::receive(comm, theirs, last).wait();
                sending.wait();
                sending.wait(); // again returns at once
                CHECK(sending.test());
                std::size_t wrong = 0;
                for (T const value : theirs) {
                    wrong += static_cast<float>(value) == static_cast<float>(last) ? 0U : 1U;
                }
                CHECK(wrong == 0);
            }
        });
    }
}

/// Every rank sends to every rank, itself included, in two tags; receivers take the second tag first,
/// and post all their receives before or after the sends.
template <class Comm>
void exchange_messages_in_two_tags(Comm& comm, std::size_t messages) {
    using Work = decltype(comm.receive({}, 0));
    std::vector<std::int32_t> sent(2 * messages);
    std::iota(sent.begin(), sent.end(), 0);
    std::vector<std::vector<std::int32_t>> received;
    std::vector<Work> works;
    auto const send_all = [&] {
        for (int to = 0; to < comm.size(); ++to) {
            for (std::size_t k = 0; k < sent.size(); ++k) {
                works.push_back(
                    comm.send({&sent[k], 1, joinable::DType::i32}, to, k % 2 == 0 ? 7 : -7)
                );
            }
        }
    };
    auto const receive_all = [&] {
        for (int from = 0; from < comm.size(); ++from) {
            received.emplace_back(2 * messages, -1);
            for (std::size_t const first : {1U, 0U}) {
                for (std::size_t k = first; k < sent.size(); k += 2) {
                    works.push_back(comm.receive(
                        {&received.back()[k], 1, joinable::DType::i32}, from, first == 0 ? 7 : -7
                    ));
                }
                if (first == 1 && from != comm.rank() && comm.rank() % 2 == 0) {
                    works.back().wait(); // those of the first tag have come before, and are kept
                }
            }
        }
    };
    received.reserve(static_cast<std::size_t>(comm.size()));
    if (comm.rank() % 2 == 0) {
        send_all();
        receive_all();
    } else {
        receive_all();
        send_all();
    }
    for (Work& work : works) {
        work.wait();
    }
    for (auto const& values : received) {
        CHECK(values == sent);
    }
    comm.barrier();
}

} // namespace joinable_tests
