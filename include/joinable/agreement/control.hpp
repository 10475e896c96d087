// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/agreement/host_collectives.hpp>
#include <joinable/communicator/communicator.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// A communicator as guards, models and groups see it by which ranks agree: type-erased, so that the
/// type of a guard does not depend on it, and small, because they only sum words and abort.
class ControlCommunicator {
public:
    ControlCommunicator() = default;
    ControlCommunicator(ControlCommunicator const&) = delete;
    ControlCommunicator& operator=(ControlCommunicator const&) = delete;
    virtual ~ControlCommunicator() = default;

    [[nodiscard]] virtual int rank() const = 0;
    [[nodiscard]] virtual int size() const = 0;
    /// Identity: two participants over one communicator object have the same.
    [[nodiscard]] virtual void const* address() const noexcept = 0;

    /// Starts summing `words` over all ranks, in place. One sum at a time.
    virtual void post_sum(std::span<std::uint64_t> words) = 0;
    virtual bool test_sum() = 0;
    virtual void wait_sum() = 0;

    /// Local. Nothing where the communicator cannot abort.
    virtual void abort(AbortReason const& reason) = 0;
    [[nodiscard]] virtual bool can_abort() const noexcept = 0;

    /// Local. False where the communicator cannot renew deadlines.
    virtual bool keep_alive() = 0;

    /// Local. The deadline that was in force, none where the communicator has no deadline.
    virtual std::optional<std::chrono::nanoseconds>
    exchange_deadline(std::chrono::nanoseconds deadline) = 0;

    void sum(std::span<std::uint64_t> words) {
        post_sum(words);
        wait_sum();
    }
    /// `words` of one rank to all: the others' count as zeros.
    void broadcast(std::span<std::uint64_t> words, int root) {
        if (rank() != root) {
            std::fill(words.begin(), words.end(), 0);
        }
        sum(words);
    }
    /// What all ranks say, which is as much on each, one behind another.
    [[nodiscard]] std::vector<std::uint64_t> gather(std::span<std::uint64_t const> mine) {
        std::vector<std::uint64_t> all(static_cast<std::size_t>(size()) * mine.size());
        std::copy(
            mine.begin(), mine.end(), all.data() + static_cast<std::size_t>(rank()) * mine.size()
        );
        sum(all);
        return all;
    }
};

/// `Held` is a communicator, or a reference to one. A `Base` may ask for more than guards need: what
/// derives from this answers it.
template <class Held, class Base = ControlCommunicator>
class ControlOver : public Base {
    using Comm = std::remove_reference_t<Held>;

public:
    explicit ControlOver(Comm& comm) noexcept
        requires std::is_reference_v<Held>
        : comm_{comm}, host_{comm_} {}
    /// `make()` returns what is held, which need not be movable.
    template <std::invocable Make>
    explicit ControlOver(Make const& make) : comm_(make()), host_{comm_} {}

    [[nodiscard]] int rank() const override { return comm_.rank(); }
    [[nodiscard]] int size() const override { return comm_.size(); }
    [[nodiscard]] void const* address() const noexcept override { return &comm_; }

    void post_sum(std::span<std::uint64_t> words) override {
        work_.reset();
        static_cast<void>(work_.emplace( // nvcc 13 warns of a dropped reference to a work, too
            host_.all_reduce(Buffer{words.data(), words.size(), DType::u64}, ReduceOp::sum)
        ));
    }
    bool test_sum() override { return work_->test(); }
    void wait_sum() override {
        work_->wait();
        work_.reset();
    }

    void abort(AbortReason const& reason) override {
        if constexpr (Aborts<Comm>) {
            comm_.abort(reason);
        }
    }
    [[nodiscard]] bool can_abort() const noexcept override { return Aborts<Comm>; }

    bool keep_alive() override {
        if constexpr (RenewsDeadline<Comm>) {
            comm_.keep_alive();
        }
        return RenewsDeadline<Comm>;
    }

    std::optional<std::chrono::nanoseconds> exchange_deadline(std::chrono::nanoseconds deadline
    ) override {
        if constexpr (HasDeadline<Comm>) {
            return comm_.set_deadline(deadline);
        } else {
            return {};
        }
    }

protected:
    [[nodiscard]] Comm& communicator() noexcept { return comm_; }
    [[nodiscard]] Comm const& communicator() const noexcept { return comm_; }

private:
    Held comm_;
    HostCollectives<Comm> host_;
    std::optional<typename HostCollectives<Comm>::Work> work_;
};

}}} // namespace joinable::v0::detail
