// SPDX-License-Identifier: BSL-1.0
// Ranges of other libraries, whose iterators have less than the standard asks of them.
#include <joinable/communicator/collectives.hpp>
#include <joinable/join/guard.hpp>
#include <joinable/participant/action.hpp>

#include <cstddef>
#include <iterator>
#include <span>

#include <doctest/doctest.h>
#include <support/ranks.hpp>

namespace {

/// Loads its next batch into one place, as libtorch's data loaders do. Read by no const iterator.
class Loader {
public:
    explicit Loader(int batches) : batches_{batches} {}

    class iterator {
    public:
        using difference_type = std::ptrdiff_t;
        using value_type = int;
        using pointer = int*;
        using reference = int&;
        using iterator_category = std::input_iterator_tag;

        explicit iterator(Loader* loader) : loader_{loader} {}
        int& operator*() { return ++loader_->reads, loader_->batch_; }
        iterator& operator++() {
            ++loader_->batch_;
            return *this;
        }
        bool operator==(iterator const& other) const {
            return other.loader_ == nullptr ? loader_->batch_ > loader_->batches_
                                            : loader_ == other.loader_;
        }

    private:
        Loader* loader_;
    };
    iterator begin() { return iterator{this}; }
    iterator end() { return iterator{nullptr}; }

    int reads = 0;

private:
    int batches_;
    int batch_ = 1;
};

TEST_CASE("iterate() reads a loader that has one batch at a time and only iterators to change") {
    for (bool const weighs : {false, true}) {
        joinable_tests::run_ranks({1, 2, 3, 4, 8}, [&](joinable::ThreadCommunicator& comm) {
            int const batches = comm.rank() % 3;
            Loader loader{batches};
            int total = 0;
            auto const add = [&](int batch) {
                joinable::all_reduce(comm, std::span{&batch, 1}).wait();
                total += batch;
            };
            int current = 0;
            joinable::Action sum{comm, [&] { add(current); }, [&] { add(0); }};
            joinable::Join join{joinable::participants(sum)};
            auto const run = [&](auto&& range) {
                for (int& batch : range) {
                    current = batch;
                    sum();
                }
            };
            if (weighs) {
                run(join.iterate(loader, [](int const& batch) {
                    return joinable::RoundNotice{.weight = batch};
                }));
            } else {
                run(join.iterate(loader));
            }
            join.finish();
            int expected = 0;
            for (int rank = 0; rank < comm.size(); ++rank) {
                expected += (rank % 3) * (rank % 3 + 1) / 2;
            }
            CHECK(total == expected);
            CHECK(loader.reads == batches);
        });
    }
}

} // namespace
