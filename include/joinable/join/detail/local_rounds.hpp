// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <optional>

#include <joinable/join/options.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The rounds of a guard that is not enabled. Nothing is sent, but the options and the notices of
/// next() apply to the participants as in an enabled guard.
class LocalRounds {
public:
    explicit LocalRounds(JoinOptions const& options) : options_{options} {}
    /// The rounds before the guard that did not sync.
    void begin(std::size_t unsynced) noexcept { unsynced_ = unsynced; }
    LocalRounds(LocalRounds const&) = delete; // knows the options by address
    LocalRounds& operator=(LocalRounds const&) = delete;

    /// Opens a round by next().
    void open(RoundNotice const& notice) noexcept {
        opened_ = completed(notice, options_, training_rounds_);
        count(*opened_);
    }
    /// Completes a participant's notice. If next() opened no round, the first participant opens it.
    /// Later participants use their own notice or the options', not the first one's.
    [[nodiscard]] RoundNotice announce(bool is_first, RoundNotice const& notice) noexcept {
        if (opened_) {
            return repeats(notice, *opened_) ? *opened_ : notice;
        }
        bool const opens = is_first || rounds_ == 0;
        std::size_t const last_trains = last_phase_ == Phase::train ? 1 : 0;
        RoundNotice const said =
            completed(notice, options_, training_rounds_ - (opens ? 0 : last_trains));
        if (is_first) {
            count(said);
        }
        return said;
    }

    /// The notice of a batch that next() announced; null if it is skipped, or there is none.
    [[nodiscard]] RoundNotice const* announced_batch() const noexcept {
        return opened_ && !opened_->skips ? &*opened_ : nullptr;
    }

    [[nodiscard]] std::size_t count() const noexcept { return rounds_; }
    /// The training rounds after the last one that synced.
    [[nodiscard]] std::size_t unsynced() const noexcept { return unsynced_; }

private:
    void count(RoundNotice const& notice) noexcept {
        ++rounds_;
        last_phase_ = notice.phase;
        training_rounds_ += notice.phase == Phase::train ? 1 : 0;
        if (notice.phase == Phase::train) {
            unsynced_ = notice.will_sync ? 0 : unsynced_ + 1;
        }
    }

    JoinOptions const& options_;
    std::optional<RoundNotice> opened_; ///< by the last next()
    std::size_t rounds_ = 0;
    std::size_t training_rounds_ = 0;
    Phase last_phase_ = Phase::evaluate;
    std::size_t unsynced_ = 0;
};

}}} // namespace joinable::v0::detail
