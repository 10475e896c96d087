// SPDX-License-Identifier: BSL-1.0
// EXPECT: Communicator: expected a member 'Work all_reduce(Buffer, ReduceOp)' (in place)
#include <joinable/join.hpp>

#include <support/misuse.hpp>

static_assert(joinable::models_communicator<Deaf>());
