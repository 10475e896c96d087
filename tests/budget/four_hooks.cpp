// SPDX-License-Identifier: BSL-1.0
// A guard over four participants that declare an order, as an engine's own would.
#include <joinable/communicator/self.hpp>
#include <joinable/core.hpp>

namespace {

using joinable::SelfCommunicator;

template <int Number>
struct Label;

template <int Number>
struct Hook {
    using label = Label<Number>;
    using runs_after = joinable::labels_of<Label<Number - 1>>;
    void main_hook() {}
    void post_hook(bool) {}
};

template <int Number>
class Participant {
public:
    explicit Participant(SelfCommunicator& comm) : comm_{comm} {}
    void operator()() { joinable::notify_join_context(*this); }
    Hook<Number> join_hook(joinable::arguments<joinable::keywords<>> const&) { return {}; }
    SelfCommunicator& join_communicator() { return comm_; }
    joinable::JoinState& join_state() { return state_; }

private:
    SelfCommunicator& comm_;
    joinable::JoinState state_;
};

} // namespace

int main() {
    SelfCommunicator comm;
    Participant<4> fourth{comm};
    Participant<3> third{comm};
    Participant<2> second{comm};
    Participant<1> first{comm};
    joinable::Join guard{joinable::participants(fourth, third, second, first)};
    first();
    second();
    third();
    fourth();
    return guard.finish().rounds == 1 ? 0 : 1;
}
