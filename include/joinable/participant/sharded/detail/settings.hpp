// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <span>
#include <vector>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/communicator/control.hpp>
#include <joinable/communicator/device_of.hpp>
#include <joinable/join/joinable.hpp>
#include <joinable/optimizer/local_optimizer.hpp>
#include <joinable/optimizer/state_arrays.hpp>
#include <joinable/participant/sharded/detail/group.hpp>
#include <joinable/participant/sharded/detail/plan.hpp>
#include <joinable/participant/sharded/zero_options.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Sends what a step depends on to ranks that have joined: settings of the rules, shared objects,
/// and which parameters have gradients.
template <class Rule>
class ShardedSettings {
public:
    /// Makes room for a message of so many groups and parameters. Local.
    void reserve(
        std::size_t groups, std::size_t parameters, std::span<joinable::SharedObject const> shared
    ) {
        std::size_t bytes = groups * sizeof(Settings) + parameters;
        for (joinable::SharedObject const& object : shared) {
            bytes += object.bytes();
        }
        message_.resize((std::max)(message_.size(), words_of(bytes))
        ); // a refused group may need less
    }

    /// Begins the step of each group. If ranks have joined, or `always`, they take the settings of the lowest
    /// active rank by `words`, and step the parameters that it steps. Collective.
    template <class Comm>
    void share(
        Comm& comm,
        ControlCommunicator& words,
        Round const& round,
        std::deque<Rule>& rules,
        std::span<joinable::SharedObject const> shared,
        std::span<ShardGroup> groups,
        bool always
    ) {
        bool const is_source = comm.rank() == round.buffer_source();
        for (ShardGroup& group : groups) {
            group.gradients.begin_step(round.is_shadow(), device_of(comm));
            if (is_source) {
                group.gradients.list(group.parameters);
            }
        }
        if (always || round.active_count() != comm.size()) {
            send(words, round.buffer_source(), rules, shared, groups);
        }
    }

    /// Sends rules, shared objects and the parameters that these groups step from one rank to all. Collective.
    void send(
        ControlCommunicator& words,
        int source,
        std::deque<Rule>& rules,
        std::span<joinable::SharedObject const> shared,
        std::span<ShardGroup> groups
    ) {
        bool const is_source = words.rank() == source;
        auto const pass = [&](auto const& copy) {
            auto* const begin = reinterpret_cast<std::byte*>(message_.data());
            std::byte* at = begin;
            auto const one = [&](void* object, std::size_t bytes) {
                copy(static_cast<std::byte*>(object), at, bytes);
                at += bytes;
            };
            for (Rule& rule : rules) {
                one(&settings_of(rule), sizeof(Settings));
            }
            for (joinable::SharedObject const& object : shared) {
                one(object.data(), object.bytes());
            }
            for (ShardGroup& group : groups) {
                one(group.gradients.listed().data(), group.gradients.listed().size());
            }
            return static_cast<std::size_t>(at - begin);
        };
        std::size_t const bytes = pass([&](std::byte* object, std::byte* at, std::size_t n) {
            copy_bytes(at, object, is_source ? n : 0);
        });
        // Not the whole buffer: it is longer on a rank that made room for a group which another
        // rank refused.
        words.broadcast(std::span{message_}.first(words_of(bytes)), source);
        pass([&](std::byte* object, std::byte* at, std::size_t n) {
            copy_bytes(object, at, is_source ? 0 : n);
        });
        for (Rule& rule : rules) {
            apply_settings_of(rule);
        }
    }

    /// Notes the settings of the step that is about to be made in the guard of `state`, if there is
    /// one and its ranks are this rule's. Lists them again only if they have changed. Local.
    void note(JoinState const& state, std::deque<Rule>& rules) {
        if (detail::words_of(state) == nullptr) {
            return; // in a guard it steps with some of the ranks only
        }
        std::size_t const bytes = rules.size() * sizeof(Settings);
        bool is_same = used_.size() == bytes;
        used_.resize(bytes);
        for (std::size_t group = 0; group < rules.size(); ++group) {
            std::byte* const used = used_.data() + group * sizeof(Settings);
            Settings const& now = settings_of(rules[group]);
            if (std::memcmp(used, &now, sizeof now) != 0) {
                is_same = false;
                std::memcpy(used, &now, sizeof now);
            }
        }
        if (!is_same) {
            list_of_used_ = {};
            agree_on_rules(list_of_used_, rules);
            hash_of_used_ = list_of_used_.hash_from(0);
        }
        session_of(state)->note_settings(list_of_used_, hash_of_used_);
    }

private:
    using Settings = SettingsOf<Rule>;

    [[nodiscard]] static std::size_t words_of(std::size_t bytes) noexcept {
        return (bytes + sizeof(std::uint64_t) - 1) / sizeof(std::uint64_t);
    }

    std::vector<std::uint64_t> message_;
    std::vector<std::byte> used_; ///< the settings of the last step that was noted, by group
    AgreementList list_of_used_;
    std::uint64_t hash_of_used_ = 0;
};

}}} // namespace joinable::v0::detail
