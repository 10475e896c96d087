// SPDX-License-Identifier: BSL-1.0
// The opt-in headers are installed, and need nlohmann-json alone beside the library.
#include <joinable/checkpoint.hpp>
#include <joinable/trace.hpp>

int main() {
    return joinable::TraceTimeline{}.events().empty() ? 0 : 1;
}
