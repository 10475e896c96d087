// SPDX-License-Identifier: BSL-1.0
// Shows how to make your own class joinable. Counts the inputs of all ranks with one all-reduce per
// input, although one rank has fewer inputs.
#include <joinable/join.hpp>

#include <cstdio>
#include <vector>

/// Keyword of the guard: find the largest count when all ranks are done.
inline constexpr struct sync_max_count_t : joinable::keyword<sync_max_count_t, bool> {
    using keyword::operator=;
} sync_max_count{};

class Counter {
public:
    explicit Counter(joinable::ThreadCommunicator& comm) : comm_{comm} {}

    /// Counts one input on every rank that has one.
    void operator()() {
        joinable::Round round = joinable::notify_join_context(*this);
        count_ += sum(1);
        round.done();
    }

    [[nodiscard]] int count() const { return count_; }
    [[nodiscard]] int max_count() const { return max_count_; }

    /// Runs on a rank without inputs: the same all-reduce with nothing to add.
    struct Hook {
        Counter& counter;
        bool syncs_max_count;

        void main_hook() { (void)counter.sum(0); }
        void post_hook(bool is_last_joiner) {
            if (syncs_max_count) { // the last joiners have counted all inputs
                counter.max_count_ = is_last_joiner ? counter.count_ : 0;
                all_reduce(counter.comm_, counter.max_count_, joinable::ReduceOp::max);
            }
        }
    };

    using join_keywords = joinable::keywords<sync_max_count_t>;
    Hook join_hook(joinable::arguments<join_keywords> const& args) {
        return {*this, args.get(sync_max_count, false)};
    }
    joinable::ThreadCommunicator& join_communicator() { return comm_; }
    joinable::JoinState& join_state() { return state_; }

private:
    static void all_reduce(joinable::ThreadCommunicator& comm, int& value, joinable::ReduceOp op) {
        comm.all_reduce({&value, 1, joinable::dtype_of<int>}, op).wait();
    }
    int sum(int value) {
        all_reduce(comm_, value, joinable::ReduceOp::sum);
        return value;
    }

    joinable::ThreadCommunicator& comm_;
    joinable::JoinState state_;
    int count_ = 0;
    int max_count_ = 0;
};

static_assert(joinable::models_joinable<Counter>());

int main() {
    std::vector<int> counts(2);
    std::vector<int> max_counts(2);
    joinable::run_threads(2, [&](joinable::ThreadCommunicator& comm) {
        Counter counter{comm};
        joinable::Join guard{joinable::participants(counter), sync_max_count = true};
        for (int input = 0; input < 5 + comm.rank(); ++input) {
            counter();
        }
        guard.finish();
        counts[static_cast<std::size_t>(comm.rank())] = counter.count();
        max_counts[static_cast<std::size_t>(comm.rank())] = counter.max_count();
    });
    std::printf("rank 0 with 5 inputs counted %d\n", counts[0]);
    std::printf("rank 1 with 6 inputs counted %d\n", counts[1]);
    std::printf("the maximum is %d on rank 0 and %d on rank 1\n", max_counts[0], max_counts[1]);
}

// Output:
// rank 0 with 5 inputs counted 10
// rank 1 with 6 inputs counted 11
// the maximum is 11 on rank 0 and 11 on rank 1
