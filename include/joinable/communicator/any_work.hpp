// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#include <joinable/communicator/work.hpp>

namespace joinable { inline namespace v0 {

/// A collective of any communicator. Works of up to `capacity` bytes, such as those of all transports here, lie
/// within; larger ones on the heap.
class [[nodiscard("destroying the work waits for it: wait() where it is needed")]] AnyWork {
public:
    static constexpr std::size_t capacity = 112;

    template <class W>
        requires(!std::same_as<std::remove_cvref_t<W>, AnyWork> && Work<std::remove_cvref_t<W>>)
    explicit AnyWork(W&& work) {
        using Given = std::remove_cvref_t<W>;
        if constexpr (fits<Held<Given>>) {
            work_ = ::new (static_cast<void*>(&storage_)) Held<Given>{std::forward<W>(work)};
        } else {
            work_ = ::new (static_cast<void*>(&storage_))
                Held<OnHeap<Given>>{OnHeap<Given>{std::make_unique<Given>(std::forward<W>(work))}};
        }
    }
    AnyWork(AnyWork&& other) noexcept : work_{other.work_->move_to(&storage_)} {}
    AnyWork& operator=(AnyWork&&) = delete;
    ~AnyWork() { work_->~Interface(); }

    /// @throws what the communicator's works throw.
    void wait() { work_->wait(); }
    /// Makes progress; true once wait() would return at once.
    [[nodiscard]] bool test() { return work_->test(); }
    /// test() without the deadline, for a rank that finally waits.
    [[nodiscard]] bool progress() { return work_->progress(); }

private:
    struct Interface {
        Interface() = default;
        Interface(Interface&&) noexcept = default;
        virtual ~Interface() = default;
        virtual Interface* move_to(void* place) noexcept = 0;
        virtual void wait() = 0;
        virtual bool test() = 0;
        virtual bool progress() = 0;
    };
    template <class W>
    struct Held final : Interface {
        explicit Held(W from) : work{std::move(from)} {}
        Interface* move_to(void* place) noexcept override {
            return ::new (place) Held{std::move(*this)};
        }
        void wait() override { work.wait(); }
        bool test() override { return work.test(); }
        bool progress() override { return detail::make_progress(work); }
        W work;
    };
    template <class W>
    struct OnHeap {
        void wait() { work->wait(); }
        [[nodiscard]] bool test() { return work->test(); }
        [[nodiscard]] bool progress() { return detail::make_progress(*work); }
        std::unique_ptr<W> work;
    };
    template <class H>
    static constexpr bool fits = sizeof(H) <= capacity && alignof(H) <= alignof(std::max_align_t) &&
                                 std::is_nothrow_move_constructible_v<H>;

    alignas(std::max_align_t) std::byte storage_[capacity];
    Interface* work_; ///< in storage_; after a move it holds a work that was moved from
};

}} // namespace joinable::v0
