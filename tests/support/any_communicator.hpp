// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <concepts>
#include <cstddef>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/collective_members.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/make_arena.hpp>
#include <joinable/communicator/work.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/error.hpp>

namespace joinable_tests {

/// A work of any communicator.
class AnyWork {
public:
    template <class W>
        requires(!std::same_as<W, AnyWork> && joinable::Work<W>)
    explicit AnyWork(W work) : work_{std::make_unique<Of<W>>(std::move(work))} {}

    void wait() { work_->wait(); }
    [[nodiscard]] bool test() { return work_->test(); }
    [[nodiscard]] bool progress() { return work_->progress(); }

private:
    struct Interface {
        virtual ~Interface() = default;
        virtual void wait() = 0;
        virtual bool test() = 0;
        virtual bool progress() = 0;
    };
    template <class W>
    struct Of final : Interface {
        explicit Of(W from) : work{std::move(from)} {}
        void wait() override { work.wait(); }
        bool test() override { return work.test(); }
        bool progress() override { return joinable::detail::make_progress(work); }
        W work;
    };
    std::unique_ptr<Interface> work_;
};

/// A communicator of any transport behind one type, so that suites are compiled once for several of them.
/// A transport that has no arenas gives memory of the heap; one that cannot split throws.
class AnyCommunicator : public joinable::detail::Collectives<AnyCommunicator, AnyWork> {
public:
    /// Refers to `comm`.
    template <joinable::Communicator Comm>
        requires(!std::same_as<Comm, AnyCommunicator>)
    explicit AnyCommunicator(Comm& comm)
        : comm_{std::make_unique<Of<Comm&>>([&]() -> Comm& { return comm; })} {}

    [[nodiscard]] int rank() const { return comm_->rank(); }
    [[nodiscard]] int size() const { return comm_->size(); }
    void abort(joinable::AbortReason const& reason) { comm_->abort(reason); }
    [[nodiscard]] bool is_aborted() const { return comm_->is_aborted(); }
    [[nodiscard]] std::optional<joinable::AbortReason> abort_reason() const {
        return comm_->abort_reason();
    }
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) {
        return comm_->set_deadline(deadline);
    }
    void keep_alive() { comm_->keep_alive(); }
    [[nodiscard]] std::vector<int> missing_ranks() const { return comm_->missing_ranks(); }
    [[nodiscard]] joinable::Arena
    allocate(std::size_t bytes, std::size_t alignment = joinable::Arena::default_alignment) {
        return comm_->allocate(bytes, alignment);
    }
    [[nodiscard]] AnyCommunicator split(int color, int key) {
        return AnyCommunicator{comm_->split(color, key)};
    }

private:
    /// start() is for a communicator's own collectives only.
    template <class Comm>
    struct Start : Comm {
        static auto by(Comm& comm, joinable::detail::Request const& request) {
            return (comm.*&Start::start)(request);
        }
    };
    struct Interface {
        virtual ~Interface() = default;
        virtual int rank() const = 0;
        virtual int size() const = 0;
        virtual AnyWork post(joinable::detail::Request const& request) = 0;
        virtual void abort(joinable::AbortReason const& reason) = 0;
        virtual bool is_aborted() const = 0;
        virtual std::optional<joinable::AbortReason> abort_reason() const = 0;
        virtual std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) = 0;
        virtual void keep_alive() = 0;
        virtual std::vector<int> missing_ranks() const = 0;
        virtual joinable::Arena allocate(std::size_t bytes, std::size_t alignment) = 0;
        virtual std::unique_ptr<Interface> split(int color, int key) = 0;
    };
    /// `Comm` is a reference, or owned: a group.
    template <class Comm>
    struct Of final : Interface {
        using Type = std::remove_reference_t<Comm>;

        template <class Make>
        explicit Of(Make const& make) : comm(make()) {}
        int rank() const override { return comm.rank(); }
        int size() const override { return comm.size(); }
        AnyWork post(joinable::detail::Request const& request) override {
            return AnyWork{Start<Type>::by(comm, request)};
        }
        void abort(joinable::AbortReason const& reason) override { comm.abort(reason); }
        bool is_aborted() const override { return comm.is_aborted(); }
        std::optional<joinable::AbortReason> abort_reason() const override {
            return comm.abort_reason();
        }
        std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) override {
            return comm.set_deadline(deadline);
        }
        void keep_alive() override { comm.keep_alive(); }
        std::vector<int> missing_ranks() const override { return comm.missing_ranks(); }
        joinable::Arena allocate(std::size_t bytes, std::size_t alignment) override {
            return joinable::make_arena(comm, bytes, alignment);
        }
        std::unique_ptr<Interface> split(int color, int key) override {
            if constexpr (joinable::Splits<Type>) {
                using Group = decltype(comm.split(color, key));
                return std::make_unique<Of<Group>>([&] { return comm.split(color, key); });
            } else {
                throw joinable::ContractViolation{"this communicator does not split"};
            }
        }
        Comm comm;
    };

    explicit AnyCommunicator(std::unique_ptr<Interface> comm) : comm_{std::move(comm)} {}

    friend class joinable::detail::BasicCollectives<AnyCommunicator, AnyWork>;
    AnyWork post(joinable::detail::Request const& request) { return comm_->post(request); }

    std::unique_ptr<Interface> comm_;
};

} // namespace joinable_tests
