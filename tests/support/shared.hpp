// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <new>

#include <sys/mman.h>

namespace joinable_tests {

/// A `T` that process ranks share with this process, and thread ranks anyway.
template <class T>
class Shared {
public:
    template <class... Arguments>
    explicit Shared(Arguments const&... arguments)
        : value_{::new(
              mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)
          ) T{arguments...}} {}
    ~Shared() { munmap(value_, sizeof(T)); }
    Shared(Shared const&) = delete;
    Shared& operator=(Shared const&) = delete;
    T& operator*() const { return *value_; }
    T* operator->() const { return value_; }

private:
    T* value_;
};

} // namespace joinable_tests
