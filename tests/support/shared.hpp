// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace joinable_tests {

/// Where Shared has its memory: pages that this process shares with those that it forks. A program whose
/// ranks are not forked by its tests gives them other memory before the tests begin.
struct SharedPages {
#if defined(__linux__)
    void* (*take)(std::size_t bytes) = [](std::size_t bytes) {
        return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    };
    void (*give_back)(void* pages, std::size_t bytes) = [](void* pages, std::size_t bytes) {
        munmap(pages, bytes);
    };
#else // ranks are threads
    void* (*take)(std::size_t bytes) = [](std::size_t bytes) { return ::operator new(bytes); };
    void (*give_back)(void*, std::size_t) = [](void* pages, std::size_t) {
        ::operator delete(pages);
    };
#endif
};
inline SharedPages shared_pages;

/// A `T` that process ranks share with this process, and thread ranks anyway.
template <class T>
class Shared {
public:
    template <class... Arguments>
    explicit Shared(Arguments const&... arguments)
        : value_{::new(shared_pages.take(sizeof(T))) T{arguments...}} {}
    ~Shared() { shared_pages.give_back(value_, sizeof(T)); }
    Shared(Shared const&) = delete;
    Shared& operator=(Shared const&) = delete;
    T& operator*() const { return *value_; }
    T* operator->() const { return value_; }

private:
    T* value_;
};

} // namespace joinable_tests
