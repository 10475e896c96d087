// SPDX-License-Identifier: BSL-1.0
#include "../uneven_inputs.hpp"

extern "C" [[gnu::visibility("default")]] bool RUN() {
    return uneven_inputs_run();
}
