// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include <joinable/join/joinable.hpp>

namespace joinable_tests {

inline constexpr struct reductions_t : joinable::keyword<reductions_t, int> {
    using keyword::operator=;
} reductions{};
inline constexpr struct runs_post_hook_t : joinable::keyword<runs_post_hook_t, bool> {
    using keyword::operator=;
} runs_post_hook{};

/// The inputs of rank r in upstream's test of its join context: 3 + r.
inline int upstream_inputs(int rank) {
    return 3 + rank;
}

/// What all sums of rank r add up to there: in round i all ranks with more than i inputs sum a 1.
inline int upstream_total(int rank, int world) {
    int total = 3 * world;
    for (int joined = 1; joined <= rank; ++joined) {
        total += world - joined;
    }
    return total;
}

/// The participant of that test: each call sums ones over the active
/// ranks; a post hook broadcasts 42 from the highest last joiner.
template <joinable::Communicator Comm>
class AllReducer {
public:
    explicit AllReducer(Comm& comm) : comm_{comm} {}

    /// Returns how many ranks took part, `n` times added up.
    int operator()(int n = 1) {
        joinable::Round round = joinable::notify_join_context(*this);
        before_reduction(round);
        int total = 0;
        for (int i = 0; i < n; ++i) {
            total += sum(1);
        }
        if (ends_its_part) {
            round.done();
        }
        return total;
    }

    struct Hook {
        AllReducer& owner;
        int reductions;
        bool runs_post_hook;

        void main_hook(joinable::Round const& round) {
            owner.before_shadow(round);
            for (int i = 0; i < reductions; ++i) {
                (void)owner.sum(0);
            }
            ++owner.shadows;
        }
        void post_hook(joinable::JoinResult const& result) {
            owner.before_post(result);
            ++owner.posts;
            if (runs_post_hook) {
                int value = owner.comm_.rank() == result.authoritative_rank ? 42 : owner.post_value;
                owner.comm_.broadcast({&value, 1, joinable::DType::i32}, result.authoritative_rank)
                    .wait();
                owner.post_value = value;
            }
        }
    };
    using join_keywords = joinable::keywords<reductions_t, runs_post_hook_t>;
    Hook join_hook(joinable::arguments<join_keywords> const& args) {
        before_hook();
        return {*this, args.get(reductions, 1), args.get(runs_post_hook, false)};
    }
    Comm& join_communicator() { return comm_; }
    joinable::JoinState& join_state() { return state_; }

    bool ends_its_part = false;
    int post_value = 41;
    int shadows = 0;
    int posts = 0;
    // Where tests inject faults.
    std::function<void()> before_hook = [] {};
    std::function<void(joinable::Round const&)> before_reduction = [](auto const&) {};
    std::function<void(joinable::Round const&)> before_shadow = [](auto const&) {};
    std::function<void(joinable::JoinResult const&)> before_post = [](auto const&) {};

private:
    int sum(int value) {
        comm_.all_reduce({&value, 1, joinable::DType::i32}, joinable::ReduceOp::sum).wait();
        return value;
    }

    Comm& comm_;
    joinable::JoinState state_;
};

template <class Comm>
AllReducer(Comm&) -> AllReducer<Comm>;

} // namespace joinable_tests
