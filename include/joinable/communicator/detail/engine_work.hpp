// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>
#include <utility>

#include <joinable/detail/unwinding.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// A collective of one rank that an engine makes of the operations of other communicators. The
/// engine knows it by its number. The destructor of unfinished work waits; during unwinding it
/// aborts, if the underlying communicators can. They and the engine must outlive it.
template <class Engine>
class [[nodiscard("destroying the work waits for it: wait() where it is needed")]] EngineWork {
public:
    EngineWork(Engine& engine, std::uint64_t number) noexcept : engine_{&engine}, number_{number} {}
    EngineWork(EngineWork&& other) noexcept
        : engine_{std::exchange(other.engine_, nullptr)}, number_{other.number_},
          unwinding_{other.unwinding_} {}
    EngineWork& operator=(EngineWork&&) = delete;

    ~EngineWork() {
        if (engine_ == nullptr || engine_->is_done(number_)) {
            return;
        }
        try {
            if (unwinding_.has_begun()) {
                engine_->abort_for_exception("a collective");
            }
            engine_->wait(number_);
        } catch (...) { // NOLINT(bugprone-empty-catch): all ranks are told already
        }
    }

    /// Blocks until this rank's part is done and its buffer is final. It first does this rank's
    /// part in the collectives that were posted earlier. Waiting again returns at once, or throws
    /// again.
    /// @throws errors of the underlying communicators, as the communicator of this work says.
    void wait() { engine_->wait(number_); }
    /// Makes progress; true once wait() would return at once.
    /// @throws as wait() does; TimedOut if test() of an underlying operation does.
    [[nodiscard]] bool test() { return engine_->test(number_); }
    /// test() without that deadline, for a rank that finally waits.
    [[nodiscard]] bool progress() { return engine_->progress(number_); }

private:
    Engine* engine_;
    std::uint64_t number_;
    Unwinding unwinding_;
};

}}} // namespace joinable::v0::detail
