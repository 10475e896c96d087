// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/communicator/control.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/detail/type_name.hpp>
#include <joinable/hook/keywords.hpp>
#include <joinable/join/detail/attachments.hpp>
#include <joinable/join/detail/turn_order.hpp>
#include <joinable/join/joinable.hpp>
#include <joinable/join/parameter_claims.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// A participant of a guard, with its hook, behind virtual functions, so that a guard is compiled once for all lists of
/// participants.
class Entrant {
public:
    Entrant(ParticipantInfo facts, JoinState& join_state, Averages how)
        : info{std::move(facts)}, state{join_state}, averages{how} {}
    Entrant(Entrant const&) = delete;
    Entrant& operator=(Entrant const&) = delete;
    virtual ~Entrant() = default;

    ParticipantInfo const info;
    JoinState& state;
    Averages const averages;
    Accumulated held = Accumulated::none; ///< before the guard
    Attachment attachment;
    /// That of the ranks which share a state, if the participant names it. The guard ends it with the others.
    std::unique_ptr<ControlCommunicator> shards;
    bool has_hook =
        false; ///< to end: that of a destroyed participant refers to what was, and is left as it is

    [[nodiscard]] virtual ControlCommunicator& control() = 0;
    /// The gradients that it holds, if it averages.
    [[nodiscard]] virtual Accumulated accumulated() = 0;
    /// They were cleared before the guard.
    virtual void forget_before_guard() = 0;
    /// Tells the others of itself.
    virtual void add_to(GuardView& view) const = 0;
    virtual void list_claims(ParameterClaims& claims) const = 0;
    virtual void check_guard(GuardView const& view) const = 0;
    /// Adds its keywords and what its agree_on() adds.
    virtual void agree_on(AgreementList& list) const = 0;
    /// The same in a section of its own. `position`: in hook order.
    void list_at_entry(AgreementList& list, std::size_t position) const {
        list.begin_section(concat("guards differ: participant ", position, " (", info.name, "): "));
        agree_on(list);
    }

    virtual void make_hook() = 0;
    virtual void end_hook() noexcept = 0;
    /// Runs when this rank has no further input: cleared gradients count no more.
    virtual void forget_before_end() = 0;
    virtual void run_main_hook(Round const& round) = 0;
    virtual void run_post_hook(JoinResult const& result, bool is_last_joiner) = 0;
    virtual void run_end_hook() = 0;
};
using Entrants = std::vector<std::unique_ptr<Entrant>>;

template <class K>
void agree_on_keyword(AgreementList& list, std::optional<typename K::value_type> const& value) {
    std::string_view name = class_name<K>();
    name.remove_suffix(name.ends_with("_t") ? 2 : 0);
    std::string const label = concat("keyword ", name);
    if constexpr (compares_values<K>) {
        list.add(label, value ? "a value" : "no value");
        if (value) {
            K::agree_on(list, *value);
        }
    } else if constexpr (!is_per_rank<K>) {
        list.add(label, value);
    }
}

template <class J>
class EntrantOf final : public Entrant {
    using Hook = join_hook_t<J>;
    using Label = typename label_of<Hook>::type;
    static constexpr bool reduces = std::is_same_v<Label, labels::gradients>;

public:
    EntrantOf(J& joinable, arguments_of<J> arguments)
        : Entrant{info_of(joinable), joinable.join_state(), averages_of(joinable)},
          joinable_{joinable}, arguments_{std::move(arguments)},
          control_{joinable.join_communicator()} {
        if constexpr (requires { joinable.shard_communicator(); }) {
            shards =
                std::make_unique<ControlOver<join_communicator_t<J>&>>(joinable.shard_communicator()
                );
        }
    }
    ~EntrantOf() override { end_hook(); }

    [[nodiscard]] ControlCommunicator& control() override { return control_; }
    [[nodiscard]] Accumulated accumulated() override {
        if constexpr (requires { joinable_.accumulated_before_guard(); }) {
            if (averages != Averages::none) {
                return joinable_.accumulated_before_guard();
            }
        }
        return Accumulated::none;
    }
    void forget_before_guard() override {
        if constexpr (requires { joinable_.forget_cleared(); }) {
            joinable_.forget_cleared();
        }
    }

    void add_to(GuardView& view) const override {
        view.steps |= info.steps;
        view.shards |= std::is_same_v<Label, labels::shards>;
        view.reduces |= reduces;
        view.leaves_local |= info.leaves_local;
        if constexpr (requires(J const& joinable) { joinable.list_averaged(view.averaged); }) {
            std::as_const(joinable_).list_averaged(view.averaged);
        } else if constexpr (reduces) {
            view.lists_all_averaged = false;
        }
    }
    void list_claims([[maybe_unused]] ParameterClaims& claims) const override {
        if constexpr (has_list_claims<J>) {
            std::as_const(joinable_).list_claims(claims);
        }
    }
    void check_guard([[maybe_unused]] GuardView const& view) const override {
        if constexpr (has_check_guard<J>) {
            std::as_const(joinable_).check_guard(view);
        }
    }
    void agree_on([[maybe_unused]] AgreementList& list) const override {
        if constexpr (!std::is_same_v<arguments_of<J>, arguments<keywords<>>>) {
            arguments_.for_each([&]<class K>(K, auto const& value) {
                agree_on_keyword<typename K::type>(list, value);
            });
        }
        if constexpr (has_agree_on<J>) {
            std::as_const(joinable_).agree_on(list);
        }
    }

    void make_hook() override {
        ::new (static_cast<void*>(std::addressof(hook_))) Hook(joinable_.join_hook(arguments_));
        has_hook = true;
    }
    void end_hook() noexcept override {
        if (std::exchange(has_hook, false)) {
            std::destroy_at(std::addressof(hook_));
        }
    }
    void forget_before_end() override {
        if constexpr (requires { hook_.forget_cleared(); }) {
            hook_.forget_cleared();
        }
    }
    void run_main_hook(Round const& round) override {
        if constexpr (has_main_hook_of_round<Hook>) {
            hook_.main_hook(round);
        } else {
            hook_.main_hook();
        }
    }
    void run_post_hook(JoinResult const& result, bool is_last_joiner) override {
        if constexpr (has_post_hook_of_result<Hook>) {
            hook_.post_hook(result);
        } else {
            hook_.post_hook(is_last_joiner);
        }
    }
    void run_end_hook() override {
        if constexpr (has_end_hook<Hook>) {
            hook_.end_hook();
        }
    }

private:
    static ParticipantInfo info_of(J const& joinable) {
        ParticipantInfo info{std::string{join_name_of(joinable)}, type_name<J>()};
        if constexpr (has_takes_part<Hook>) {
            info.takes_part = [](Round const& round) -> bool { return Hook::takes_part(round); };
        }
        if constexpr (has_join_verb<J>) {
            info.verb = J::join_verb;
        }
        info.steps = std::is_same_v<Label, labels::step> || std::is_same_v<Label, labels::shards>;
        if constexpr (requires { joinable.leaves_gradients_local(); }) {
            info.leaves_local = joinable.leaves_gradients_local();
        }
        return info;
    }
    static Averages averages_of(J const& joinable) {
        bool averages = reduces;
        if constexpr (requires { joinable.leaves_gradients_local(); }) {
            averages = averages && !joinable.leaves_gradients_local();
        }
        if constexpr (requires { joinable.averages_gradients(); }) {
            averages = joinable.averages_gradients();
        }
        bool leaves_untouched = false;
        if constexpr (requires { joinable.leaves_joined_untouched(); }) {
            leaves_untouched = joinable.leaves_joined_untouched();
        }
        return !averages          ? Averages::none
               : leaves_untouched ? Averages::but_leaves_joined_untouched
                                  : Averages::gradients;
    }

    J& joinable_;
    arguments_of<J> arguments_;
    ControlOver<join_communicator_t<J>&> control_;
    union {
        Hook hook_; ///< constructed in place, so that it need not be movable
    };
};

/// A std::make_unique of each type would cost more to compile than all else here.
template <class J, class... Ks>
std::unique_ptr<Entrant> entrant_of(J& joinable, KeywordArgument<Ks> const&... keywords) {
    arguments_of<J> arguments{};
    (arguments.set(keywords), ...);
    return std::unique_ptr<Entrant>{new EntrantOf<J>{joinable, std::move(arguments)}};
}

}}} // namespace joinable::v0::detail
