// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <utility>
#include <variant>

#include <joinable/communicator/gloo/detail/messages.hpp>
#include <joinable/communicator/gloo/detail/operation.hpp>
#include <joinable/communicator/gloo/detail/rank.hpp>
#include <joinable/detail/unwinding.hpp>

namespace joinable { inline namespace v0 {

/// A collective or message of ranks that Gloo connects. The destructor of unfinished work waits up to the
/// deadline; during unwinding it aborts. After that nothing writes to this rank's buffer. The
/// communicator must outlive this object.
class [[nodiscard("destroying the work waits for it: wait() where it is needed")]] GlooWork {
    template <class F>
    auto visit(F const& f) {
        return std::visit([&](auto* one) { return f(*one); }, one_);
    }

public:
    GlooWork(GlooWork&& other) noexcept
        : rank_{std::exchange(other.rank_, nullptr)}, one_{other.one_},
          unwinding_{other.unwinding_} {}
    GlooWork& operator=(GlooWork&&) = delete;

    ~GlooWork() {
        if (rank_ == nullptr || !rank_->home().is_here()) {
            return;
        }
        try {
            if (!visit([&](auto& one) { return rank_->is_complete(one); })) {
                if (unwinding_.has_begun()) {
                    bool const is_message = std::holds_alternative<detail::GlooMessage*>(one_);
                    rank_->abort_for_exception(is_message ? "a message" : "a collective");
                }
                wait();
            }
        } catch (...) { // NOLINT(bugprone-empty-catch): all ranks are told already
        }
        visit([](auto& one) { one.is_released = true; });
    }

    /// Blocks until this rank's buffers are final. Waiting again returns at once, or throws again.
    /// @throws Mismatch  the ranks' calls, or the two sides of a message, differ; no data moved.
    /// @throws TimedOut, PeerFailed, CommunicationError, ...  the reason why the communicator was
    ///         aborted, at once, unless this rank's part was complete before.
    void wait() {
        visit([&](auto& one) { rank_->finish(one); });
    }
    /// True once wait() would return at once. The data moves without tests.
    /// @throws as wait() does; TimedOut while some rank has not arrived, once the time between
    ///         tests of this work adds up to the deadline. Each gap counts as at most 10 ms.
    [[nodiscard]] bool test() {
        return visit([&](auto& one) { return rank_->test(one); });
    }
    /// test() without that deadline, for a rank that finally waits.
    [[nodiscard]] bool progress() {
        return visit([&](auto& one) { return rank_->progress(one); });
    }

private:
    friend class GlooCommunicator;
    template <class One>
    GlooWork(detail::GlooRank& rank, One& one) noexcept : rank_{&rank}, one_{&one} {}

    detail::GlooRank* rank_;
    std::variant<detail::GlooOperation*, detail::GlooMessage*> one_;
    detail::Unwinding unwinding_;
};

}} // namespace joinable::v0
