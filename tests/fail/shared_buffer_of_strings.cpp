// SPDX-License-Identifier: BSL-1.0
// EXPECT: shared_buffer: processes share bytes, so the elements must be trivially copyable
#include <joinable/join.hpp>

#include <string>

void share(joinable::ThreadCommunicator& comm) {
    auto const names = joinable::shared_buffer<std::string>(comm, 8);
}
