// SPDX-License-Identifier: BSL-1.0
// EXPECT: ExchangesMessages: expected a member 'Work send(ConstBuffer, int to, int tag)'
#include <joinable/join.hpp>

#include <joinable/algorithms.hpp>

int main() {
    joinable::SelfCommunicator comm;
    (void)joinable::measure_costs(comm);
}
