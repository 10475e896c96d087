// SPDX-License-Identifier: BSL-1.0
#include "../uneven_inputs.hpp"

bool uneven_inputs_run_in_another_unit() {
    return uneven_inputs_run();
}
