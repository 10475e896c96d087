// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <string_view>
#include <utility>
#include <variant>

#include <joinable/communicator/detail/home_process.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/scope.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The reason that the others get when an exception leaves `what` on `rank`.
[[nodiscard]] inline AbortReason reason_of_exception(int rank, std::string_view what) {
    return blamed_on(rank, {FailureKind::peer_failed, {}, concat("an exception left ", what)});
}
/// Aborts with that reason, if it can. `rank` has the members rank() and abort().
template <class Rank>
void abort_for_exception(Rank& rank, std::string_view what) noexcept {
    try {
        rank.abort(reason_of_exception(rank.rank(), what));
    } catch (...) { // NOLINT(bugprone-empty-catch): the others notice that it leaves
    }
}

/// The base of a rank that has works. The rank hides the members in which it differs.
class HasWorks {
public:
    /// Whether this process has the rank. One that was forked since has only a copy of it.
    [[nodiscard]] bool is_here() const noexcept { return home_.is_here(); }
    /// @throws ContractViolation  it does not.
    void require_here(int rank) const { home_.require_here(rank); }
    /// Keeps other threads from the rank as long as the result lives.
    [[nodiscard]] static std::monostate hold() noexcept { return {}; }
    /// The name of the work in errors.
    [[nodiscard]] static char const* kind_of(auto const&) noexcept { return "a collective"; }
    /// The work is destroyed.
    static void release(auto const&) noexcept {}

private:
    HomeProcess home_;
};

/// A collective or a message of one rank, which knows it by one of the handles. Its destructor waits
/// up to the deadline; during unwinding it aborts. After that nothing writes to this rank's buffers.
/// The rank's communicator must outlive it.
///
/// `Rank` derives from HasWorks. It has finish(), test() and progress() for each handle, is_done(), which
/// says that the destructor need not wait, rank() and abort().
template <class Rank, class... Handles>
class [[nodiscard("destroying the work waits for it: wait() where it is needed")]] WorkOf {
public:
    WorkOf(Rank& rank, std::variant<Handles...> handle) noexcept
        : rank_{&rank}, handle_{std::move(handle)} {}
    WorkOf(WorkOf&& other) noexcept
        : rank_{std::exchange(other.rank_, nullptr)}, handle_{std::move(other.handle_)},
          unwinding_{other.unwinding_} {}
    WorkOf& operator=(WorkOf&&) = delete;

    ~WorkOf() {
        if (rank_ == nullptr || !rank_->is_here()) {
            return;
        }
        with_rank(*this, [&](Rank& rank, auto& one) {
            try {
                if (!rank.is_done(one)) {
                    if (unwinding_.has_begun()) {
                        abort_for_exception(rank, rank.kind_of(one));
                    }
                    rank.finish(one);
                }
            } catch (...) { // NOLINT(bugprone-empty-catch): all ranks are told already
            }
            rank.release(one);
        });
    }

    /// Blocks until this rank's buffers are final. Waiting again returns at once, or throws again.
    /// @throws ContractViolation  a process that the rank has forked calls this.
    /// @throws Mismatch  the ranks' calls, or the two sides of a message, differ; no data moved.
    /// @throws TimedOut, PeerFailed, ...  the reason why the communicator was aborted, unless this
    ///         rank's part was complete before.
    void wait() {
        checked([](Rank& rank, auto& one) { rank.finish(one); });
    }
    /// Makes progress; true once wait() would return at once.
    /// @throws as wait() does; TimedOut while some rank has not arrived, once the time between
    ///         tests of this work adds up to the deadline. Each gap counts as at most 10 ms.
    [[nodiscard]] bool test() {
        return checked([](Rank& rank, auto& one) { return rank.test(one); });
    }
    /// test() without that deadline, for a rank that finally waits.
    [[nodiscard]] bool progress() {
        return checked([](Rank& rank, auto& one) { return rank.progress(one); });
    }

    /// f(rank, handle), for the communicator of the work.
    template <class F>
    friend auto with_rank(WorkOf& work, F const& f) {
        [[maybe_unused]] auto const held = work.rank_->hold();
        return std::visit([&](auto& one) { return f(*work.rank_, one); }, work.handle_);
    }

protected:
    /// with_rank(), but only in the rank's own process.
    template <class F>
    auto checked(F const& f) {
        rank_->require_here(rank_->rank());
        return with_rank(*this, f);
    }

private:
    Rank* rank_;
    std::variant<Handles...> handle_;
    Unwinding unwinding_;
};

}}} // namespace joinable::v0::detail
