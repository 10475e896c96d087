// SPDX-License-Identifier: BSL-1.0
// EXPECT: BucketReduction: expected a member 'void finish(Comm&, BucketRun const&)'
#include <joinable/join.hpp>

struct Halfway {
    static constexpr std::string_view name = "Halfway";
    static constexpr bool delivers = true;
    static bool scales(joinable::SelfCommunicator&) { return false; }
    static joinable::CompletedWork
    start(joinable::SelfCommunicator& comm, joinable::BucketRun const& run, double, bool) {
        return comm.all_reduce(run.buffer, joinable::ReduceOp::sum);
    }
};

int main() {
    static_cast<void>(joinable::models_bucket_reduction<Halfway, joinable::SelfCommunicator>());
}
