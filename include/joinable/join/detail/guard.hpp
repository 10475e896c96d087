// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include <joinable/communicator/control.hpp>
#include <joinable/config.hpp>
#include <joinable/detail/scope.hpp>
#include <joinable/join/detail/attachments.hpp>
#include <joinable/join/detail/entrant.hpp>
#include <joinable/join/detail/entry.hpp>
#include <joinable/join/detail/local_rounds.hpp>
#include <joinable/join/detail/occupation.hpp>
#include <joinable/join/detail/session.hpp>
#include <joinable/join/detail/turn_order.hpp>
#include <joinable/join/options.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// A Join, without the types of its participants: see there for its members.
class Guard final : private HookRunner {
public:
    /// Collective. `control` is null where the first participant's communicator serves the roll calls.
    Guard(
        Entrants entrants,
        HookOrder const& order,
        std::unique_ptr<ControlCommunicator> control,
        MakesGroups make_groups,
        JoinOptions const& options
    );
    ~Guard() noexcept(false);

    bool next(bool have_input, RoundNotice const& notice, Opening opening);
    void announce_ahead(std::optional<RoundNotice> const& notice);
    /// Calls f(), which reads an input or opens a round, so exceptions before were handled, unless
    /// this is in a handler. One that it throws will leave the guard, and peers see its text.
    template <class F>
    decltype(auto) recorded(F const& f) {
        if (!std::current_exception()) {
            session_.forget_failure();
        }
        return session_.recorded(f);
    }

    void vote_stop() {
        session_.recorded([&] { session_.vote_stop(); });
    }
    void keep_alive() const;
    void fail(std::string_view text) { session_.fail(text); }
    [[nodiscard]] bool enabled() const noexcept { return options_.enable; }
    [[nodiscard]] Round const& round() const noexcept {
        return options_.enable ? session_.round() : local_rounds_.round();
    }
    JoinResult finish();

private:
    /// The distinct communicators: the control communicator, then the others in hook order. The
    /// first one serves the roll calls.
    [[nodiscard]] std::vector<ControlCommunicator*> communicators() const;
    /// A description of each participant for a session, in hook order.
    [[nodiscard]] std::vector<ParticipantInfo> infos() const;

    /// The local checks and the hooks. A failure here fails on all ranks in the entry exchange.
    void prepare();
    template <class Rounds>
    void attach(Rounds& rounds);
    /// Restores everything that the guard attached.
    void release() noexcept;
    void end_hooks() noexcept;

    void forget_cleared() override {
        for (auto const& entrant : entrants_) {
            entrant->forget_before_end();
        }
    }
    void run_main_hook(std::size_t position, Round const& round) override {
        entrants_[order_.main[position]]->run_main_hook(round);
    }
    void run_post_hooks(JoinResult const& result, bool is_last_joiner) override {
        for (std::size_t const place : order_.post) {
            if (session_.groups() != nullptr) {
                session_.groups()->run_post_hook(*entrants_[place], result);
            } else {
                entrants_[place]->run_post_hook(result, is_last_joiner);
            }
        }
        for (std::size_t const place : order_.post) {
            entrants_[place]->run_end_hook();
        }
    }

    JoinOptions options_;
    HookOrder order_;
    Unwinding unwinding_;
    [[nodiscard]] ControlCommunicator& all_ranks() const {
        return control_ ? *control_ : entrants_.front()->control();
    }

    std::unique_ptr<ControlCommunicator> control_;
    Entrants entrants_;
    Occupation occupation_;
    Deadlines deadlines_;
    Session session_;
    LocalRounds local_rounds_{options_, session_.turns()}; ///< used when it is not enabled
    /// Releases while the session is there, also where the construction fails.
    struct Leaving {
        Guard& guard;
        ~Leaving() { guard.release(); }
    } leaving_{*this};
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/join/detail/impl/guard.ipp>
#endif
