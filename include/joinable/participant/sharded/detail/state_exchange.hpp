// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <joinable/communicator/device_of.hpp>
#include <joinable/communicator/host_collectives.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/optimizer/local_optimizer.hpp>
#include <joinable/optimizer/optimizer_state.hpp>
#include <joinable/optimizer/shard.hpp>
#include <joinable/participant/sharded/detail/group.hpp>
#include <joinable/participant/sharded/detail/plan.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The state of all ranks' shards on one rank, gathered from them or dealt out to them. The
/// collective members take `together`, which runs a function on all ranks and throws on all if it
/// throws on one.
template <class Rule>
class StateExchange {
public:
    /// Frees what was gathered. Local.
    void reset() noexcept { gathered_.reset(); }

    /// Returns the state that was gathered on this rank, and keeps none. Local.
    [[nodiscard]] OptimizerState<Rule> take() {
        OptimizerState<Rule> taken = std::move(gathered_).value();
        gathered_.reset();
        return taken;
    }

    /// @throws ContractViolation  nothing was gathered on this rank.
    [[nodiscard]] OptimizerState<Rule> const& on(int rank) const {
        if (!gathered_) {
            throw ContractViolation{concat(
                "rank ", rank, " has no state: call consolidate(", rank, ") on every rank before"
            )};
        }
        return *gathered_;
    }

    /// Collective.
    template <class Comm, class Together>
    void gather(
        Comm& comm,
        HostCollectives<Comm>& host,
        int to_rank,
        std::deque<Rule> const& rules,
        std::span<ShardGroup const> groups,
        Together const& together
    ) {
        bool const is_root = comm.rank() == to_rank;
        OptimizerState<Rule> state;
        std::optional<StateMessages> messages;
        together([&] {
            check_rank("to_rank", to_rank, comm.size());
            check_before_save(groups, rules);
        });
        gathered_.reset(); // not before all ranks agree, and then before its successor takes memory
        together([&] {
            messages.emplace(groups, device_of(comm));
            if (is_root) {
                state = {
                    {rules.begin(), rules.end()}, std::vector<Parameter>(parameter_count(groups))
                };
                for (std::size_t k = 0; k < groups.size(); ++k) {
                    auto const names = state_names_of(rules[k]);
                    make_tensors<Parameter>(groups[k], names, state.parameters);
                }
            }
        });
        for (ShardGroup const& group : groups) {
            gather_state<Comm, Parameter>(comm, host, to_rank, group, *messages, state.parameters);
        }
        if (is_root) {
            gathered_ = std::move(state);
        }
    }

    /// Replaces rules, step counts and state by those of one rank. Collective.
    template <class Comm, class Together>
    void deal(
        Comm& comm,
        HostCollectives<Comm>& host,
        int from_rank,
        OptimizerState<Rule> const& state,
        std::deque<Rule>& rules,
        std::span<ShardGroup> groups,
        Together const& together
    ) {
        bool const is_root = comm.rank() == from_rank;
        std::vector<Rule> taken;
        together([&] {
            check_rank("from_rank", from_rank, comm.size());
            for (ShardGroup const& group : groups) {
                check_layouts(group); // state comes in the order of values
            }
            if (is_root) {
                check(state, groups);
            }
            taken = is_root ? state.rules : std::vector<Rule>{rules.begin(), rules.end()};
        });
        Buffer const message{taken.data(), taken.size() * sizeof(Rule), DType::u8};
        host.broadcast(message, from_rank).wait();
        std::vector<std::vector<OptimizerShard>> shards;
        std::optional<StateMessages> messages;
        together([&] { // if rules keep as much state as before, its memory is reused
            messages.emplace(groups, device_of(comm));
            shards.resize(groups.size());
            for (std::size_t k = 0; k < groups.size(); ++k) {
                for (OptimizerShard const& shard : groups[k].shards) {
                    if (std::size_t const names = state_names_of(taken[k]).size();
                        names != shard.state().names()) {
                        shards[k].push_back(shard.with_state(names));
                    }
                }
            }
        });
        std::move(taken.begin(), taken.end(), rules.begin());
        for (std::size_t k = 0; k < groups.size(); ++k) {
            if (!shards[k].empty()) {
                groups[k].shards = std::move(shards[k]);
            }
            scatter_state<Comm, Parameter>(
                comm, host, from_rank, groups[k], *messages, state.parameters
            );
        }
        gathered_.reset(); // not before: `state` may be it
    }

    static void check_rank(char const* name, int rank, int size) {
        if (rank < 0 || rank >= size) {
            throw ContractViolation{
                concat("expected a ", name, " from 0 to ", size - 1, ", but got ", rank)
            };
        }
    }

private:
    using Parameter = typename OptimizerState<Rule>::Parameter;

    /// Throws ContractViolation unless the state fits the groups.
    static void check(OptimizerState<Rule> const& state, std::span<ShardGroup const> groups) {
        std::size_t const parameters = parameter_count(groups);
        if (state.rules.size() != groups.size() || state.parameters.size() != parameters) {
            throw ContractViolation{concat(
                "the state is of ",
                state.rules.size(),
                " groups of ",
                state.parameters.size(),
                " parameters, but the optimizer has ",
                groups.size(),
                " of ",
                parameters
            )};
        }
        for (std::size_t k = 0; k < groups.size(); ++k) {
            check_rule(state.rules[k]);
            auto const names = state_names_of(state.rules[k]);
            check_state<Parameter>(groups[k], names, state.parameters);
        }
    }

    std::optional<OptimizerState<Rule>> gathered_;
};

}}} // namespace joinable::v0::detail
