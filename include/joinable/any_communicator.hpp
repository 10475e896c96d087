// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// A communicator of any transport behind one type, for programs that choose the transport when they run.

#include <joinable/communicator/any/communicator.hpp>
#include <joinable/communicator/any/connect.hpp>
#include <joinable/communicator/any_work.hpp>
