// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <vector>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/host_collectives.hpp>
#include <joinable/communicator/work.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The type-erased communicator by which the ranks of guards, models and groups agree. Erasure
/// keeps the type of a guard independent of it. It is small, because its users only sum words and
/// abort.
class ControlCommunicator {
public:
    ControlCommunicator() = default;
    ControlCommunicator(ControlCommunicator const&) = delete;
    ControlCommunicator& operator=(ControlCommunicator const&) = delete;
    virtual ~ControlCommunicator() = default;

    [[nodiscard]] virtual int rank() const = 0;
    [[nodiscard]] virtual int size() const = 0;
    /// An identity: the same for two participants over one communicator object.
    [[nodiscard]] virtual void const* address() const noexcept = 0;
    /// Another object over the same communicator, which must outlive it. While a sum of this one is
    /// under way, it may have one, too. Local.
    [[nodiscard]] virtual std::unique_ptr<ControlCommunicator> twin() = 0;

    /// Starts summing `words` over all ranks, in place. One sum at a time.
    virtual void post_sum(std::span<std::uint64_t> words) = 0;
    /// Makes progress. Only wait_sum() ends at the deadline.
    [[nodiscard]] virtual bool test_sum() = 0;
    virtual void wait_sum() = 0;

    /// Local. Does nothing if the communicator cannot abort.
    virtual void abort(AbortReason const& reason) = 0;
    [[nodiscard]] virtual bool can_abort() const noexcept = 0;
    /// Local. False if the communicator cannot abort.
    [[nodiscard]] virtual bool is_aborted() = 0;
    /// Local. Empty also if the communicator does not tell it.
    [[nodiscard]] virtual std::optional<AbortReason> abort_reason() const = 0;
    /// See Communicator. False if the communicator does not know.
    [[nodiscard]] virtual bool is_renumbered() const = 0;

    /// Local. Returns false if the communicator cannot renew deadlines.
    virtual bool keep_alive() = 0;

    /// Local. Returns the previous deadline, or none if the communicator has no deadline.
    virtual std::optional<std::chrono::nanoseconds>
    exchange_deadline(std::chrono::nanoseconds deadline) = 0;

    /// Whether the reason of an exception may name ranks of this communicator. Those of a group that
    /// numbers its ranks otherwise are this communicator's only if it is such a group, or aborted itself.
    [[nodiscard]] bool may_have_thrown(AbortReason const& reason) {
        return !reason.is_renumbered || is_renumbered() || is_aborted();
    }

    void sum(std::span<std::uint64_t> words) {
        post_sum(words);
        wait_sum();
    }
    /// Sends `words` of one rank to all. The other ranks add zeros.
    void broadcast(std::span<std::uint64_t> words, int root) {
        if (rank() != root) {
            std::fill(words.begin(), words.end(), 0);
        }
        sum(words);
    }
    /// The concatenation of all ranks' words. Every rank gives the same number of words.
    [[nodiscard]] std::vector<std::uint64_t> gather(std::span<std::uint64_t const> mine) {
        std::vector<std::uint64_t> all(static_cast<std::size_t>(size()) * mine.size());
        std::size_t const first = static_cast<std::size_t>(rank()) * mine.size();
        std::copy(mine.begin(), mine.end(), all.data() + first);
        sum(all);
        return all;
    }
};

/// `Held` is a communicator or a reference to one. A `Base` may have more members than guards need;
/// a class derived from this implements them.
template <class Held, class Base = ControlCommunicator>
class ControlOver : public Base {
    using Comm = std::remove_reference_t<Held>;

public:
    explicit ControlOver(Comm& comm) noexcept
        requires std::is_reference_v<Held>
        : comm_{comm}, host_{comm_} {}
    /// `make()` returns the communicator, which need not be movable.
    template <std::invocable Make>
    explicit ControlOver(Make const& make) : comm_(make()), host_{comm_} {}

    [[nodiscard]] int rank() const override { return comm_.rank(); }
    [[nodiscard]] int size() const override { return comm_.size(); }
    [[nodiscard]] void const* address() const noexcept override { return identity_of(comm_); }
    [[nodiscard]] std::unique_ptr<ControlCommunicator> twin() override {
        return std::make_unique<ControlOver<Comm&>>(comm_);
    }

    void post_sum(std::span<std::uint64_t> words) override {
        work_.reset();
        static_cast<void>(work_.emplace( // nvcc 13 warns of a dropped reference to a work, too
            host_.all_reduce(Buffer{words.data(), words.size(), DType::u64}, ReduceOp::sum)
        ));
    }
    [[nodiscard]] bool test_sum() override { return make_progress(*work_); }
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
    [[nodiscard]] bool is_aborted() override {
        if constexpr (Aborts<Comm>) {
            return comm_.is_aborted();
        }
        return false;
    }
    [[nodiscard]] std::optional<AbortReason> abort_reason() const override {
        if constexpr (TellsReason<Comm>) {
            return comm_.abort_reason();
        } else {
            return std::nullopt;
        }
    }
    [[nodiscard]] bool is_renumbered() const override { return is_renumbered_group(comm_); }

    bool keep_alive() override {
        if constexpr (requires { bool{comm_.renew_deadline()}; }) { // whether it did anything
            return comm_.renew_deadline();
        } else if constexpr (RenewsDeadline<Comm>) {
            comm_.keep_alive();
        }
        return RenewsDeadline<Comm>;
    }

    std::optional<std::chrono::nanoseconds> exchange_deadline(std::chrono::nanoseconds deadline
    ) override {
        if constexpr (requires { comm_.exchange_deadline(deadline); }) {
            return comm_.exchange_deadline(deadline);
        } else if constexpr (HasDeadline<Comm>) {
            return comm_.set_deadline(deadline);
        }
        return {};
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
