// SPDX-License-Identifier: BSL-1.0
// EXPECT: NcclCommunicator: the control communicator needs members 'abort(AbortReason)' and 'bool
// EXPECT: is_aborted()', by which ranks learn that one of them failed; use one that models Aborts
#include <joinable/communicator/nccl/detail/control.hpp>
#include <joinable/communicator/self.hpp>

struct CannotAbort {
    joinable::SelfCommunicator inner;

    int rank() const { return 0; }
    int size() const { return 1; }
    auto all_reduce(joinable::Buffer buffer, joinable::ReduceOp op) {
        return inner.all_reduce(buffer, op);
    }
    auto broadcast(joinable::Buffer buffer, int root) { return inner.broadcast(buffer, root); }
    void barrier() {}
};
int main() {
    CannotAbort comm;
    static_cast<void>(joinable::detail::nccl_control<CannotAbort&>(comm));
}
