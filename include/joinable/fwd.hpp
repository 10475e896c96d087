// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>

/// @file
/// Declarations of everything that other code may specialise or name before its definition.
///
/// Customization points. Class templates whose primary is undefined or a default:
/// | template               | adapts                                       | header                 |
/// |------------------------|----------------------------------------------|------------------------|
/// | `tensor_traits<T>`     | an engine's tensor                           | tensor/traits.hpp      |
/// | `parameter_traits<P>`  | an engine's parameter (a value and gradient) | tensor/parameter.hpp   |
/// | `hook_order<Hook>`     | where a hook of another library runs         | hook/ordering.hpp      |
///
/// Optional const members of a participant, and static members of a keyword:
/// | member                 | meaning                                      | header                 |
/// |------------------------|----------------------------------------------|------------------------|
/// | `join_name()`          | the name in guards and error texts           | join/joinable.hpp      |
/// | `agree_on(list)`       | what ranks compare when they enter a guard   | join/joinable.hpp      |
/// | `check_guard(view)`    | refuses a guard that a participant cannot be in | join/joinable.hpp   |
/// | `list_claims(claims)`  | parameters that a participant averages or steps | join/joinable.hpp   |
/// | `K::agree_on(list, v)` | how ranks compare values of a keyword        | hook/keywords.hpp      |
/// | `K::per_rank`          | ranks do not compare values of a keyword     | hook/keywords.hpp      |

namespace joinable { inline namespace v0 {

enum class DType : std::uint8_t;
struct Buffer;
struct ConstBuffer;
class Shape;
class AnyView;
template <class T>
class StridedView;

template <class T>
struct tensor_traits;
template <class P>
struct parameter_traits;
template <class Hook>
struct hook_order;

enum class ReduceOp : std::uint8_t;

class NcclCollectives;

class TraceTimeline; // trace.hpp
class NvtxTimeline;  // nvtx.hpp

class AgreementList;

class JoinState;
class Round;
class PendingRound;
struct RoundNotice;
struct JoinResult;

}} // namespace joinable::v0
