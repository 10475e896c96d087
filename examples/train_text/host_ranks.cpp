// SPDX-License-Identifier: BSL-1.0
#include "host_ranks.hpp"

#include <joinable/join.hpp>
#include <joinable/zero.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "model.hpp"
#include "reduction.hpp"
#include "rule.hpp"
#include "saving.hpp"

namespace train_text {

namespace {

/// Trains with a rule of joinable; every rank has all of its state.
Findings train_by_rule(
    joinable::AnyCommunicator& comm,
    joinable::AnyCommunicator& hosts,
    Model& model,
    ChosenRule const& rule,
    Job const& job
) {
    FallingRate const rate{job.options.rate(), job.longest};
    joinable::SelfCommunicator alone; // so that one rank owns everything
    joinable::ZeroRedundancyOptimizer whole{alone, model.parameters(), rule};
    std::size_t round = 0;
    joinable::Step step{comm, std::function{[&] {
                            whole.rule().set_rate(rate.at(round++));
                            whole.step();
                        }}};
    auto ddp = data_parallel(comm, model, job.options);
    auto const finish = [&](Findings& findings) {
        findings.sent_bytes = sent_bytes(ddp.reduction(), findings);
        whole.consolidate();
        findings.state_digest = digest_of(whole.state());
        findings.state_bytes = whole.state_bytes();
    };
    return train(
        comm, hosts, model, Trainer{ddp, step, [](std::size_t) {}, finish, NotSaved{}}, job
    );
}

} // namespace

Findings
train_on_host(joinable::AnyCommunicator& comm, joinable::AnyCommunicator& hosts, Job const& job) {
    Options const& o = job.options;
    // Ranks start with different values, and ddp takes rank 0's.
    Model model{o.seed + static_cast<std::uint64_t>(comm.rank())};
    if (o.sharding != Sharding::none) {
        return train_sharded(comm, hosts, model, rule_of(o), job);
    }
    if (o.rule != Rule::sgd) {
        return train_by_rule(comm, hosts, model, rule_of(o), job);
    }
    Sgd optimizer{model.parameters(), {o.rate(), job.longest}, o.momentum};
    if (o.reduction == Reduction::local) {
        return train_locally(comm, hosts, model, optimizer, job);
    }
    if (o.reduction != Reduction::all_reduce) {
        return train_by_engine(comm, hosts, model, optimizer, job, reduction_of(o));
    }
    return train_by_engine(comm, hosts, model, optimizer, job);
}

std::vector<Findings>
train_ranks(Options const& options, std::vector<Text> const& texts, Text const& held_out) {
    return run_ranks(
        options,
        texts,
        held_out,
        [](joinable::AnyCommunicator& hosts, Job const& job) {
            return train_on_host(hosts, hosts, job);
        }
    );
}

} // namespace train_text
