// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>

namespace joinable_tests {

template <class Signature>
class FunctionRef;

/// A function that outlives the call it is given to. Compilers take a tenth of the time that they take for a
/// std::function, and most test bodies are given to one.
template <class Result, class... Args>
class FunctionRef<Result(Args...)> {
public:
    template <std::invocable<Args...> F>
        requires(!std::same_as<std::remove_cvref_t<F>, FunctionRef>)
    FunctionRef(F&& function
    ) // NOLINT(google-explicit-constructor): takes the place of the function
        : function_{const_cast<void*>(static_cast<void const*>(std::addressof(function)))},
          call_{[](void* given, Args... args) -> Result {
              auto& called = *static_cast<std::remove_reference_t<F>*>(given);
              if constexpr (std::is_void_v<Result>) {
                  static_cast<void>(called(std::forward<Args>(args)...));
              } else {
                  return called(std::forward<Args>(args)...);
              }
          }} {}

    Result operator()(Args... args) const { return call_(function_, std::forward<Args>(args)...); }

private:
    void* function_;
    Result (*call_)(void*, Args...);
};

} // namespace joinable_tests
