// SPDX-License-Identifier: BSL-1.0
#pragma once

// Where train() saves the training: nowhere, or in a checkpoint, which needs nlohmann_json.

#include <joinable/join.hpp>
#include <joinable/zero.hpp>
#if __has_include(<nlohmann/json.hpp>)
#include <joinable/checkpoint.hpp>
#endif

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "options.hpp"

namespace train_text {

/// Saves nothing.
struct NotSaved {
    static std::size_t rounds() { return 0; }
    static void step() {}
    template <class... Js>
    static auto participants(Js&... joinables) {
        return joinable::participants(joinables...);
    }
};

#if __has_include(<nlohmann/json.hpp>)
inline constexpr bool can_save = true;

template <class Checkpoint>
struct Saved {
    Checkpoint& checkpoint;

    [[nodiscard]] std::size_t rounds() const { return checkpoint.rounds(); }
    void step() const { checkpoint.step(); }
    template <class... Js>
    auto participants(Js&... joinables) const {
        return joinable::participants(joinables..., checkpoint);
    }
};

/// Continues from a file, if one is given, and returns `train(save)`.
template <class Optimizer, class Train>
auto train_saved(Optimizer& optimizer, SaveOptions const& options, Train const& train) {
    bool const writes = !options.file.empty();
    joinable::Checkpoint save{
        optimizer,
        writes ? options.file : options.resume,
        {.every = writes ? options.every : std::numeric_limits<std::size_t>::max()}
    };
    if (!options.resume.empty()) {
        save.read(options.resume);
    }
    return train(Saved<decltype(save)>{save});
}
#else
inline constexpr bool can_save = false;

template <class Optimizer, class Train>
auto train_saved(Optimizer&, SaveOptions const&, Train const& train) {
    return train(NotSaved{});
}
#endif

/// @throws InputError  such a training cannot be saved.
inline void require_savable(SaveOptions const& options, bool is_sharded) {
    if (options.is_wanted() && !is_sharded) {
        throw InputError{
            "--checkpoint and --resume keep a sharded optimizer; add --sharding optimizer, gradients or "
            "parameters"
        };
    }
    if (options.is_wanted() && !can_save) {
        throw InputError{
            "--checkpoint and --resume need a program that was built with nlohmann_json, and this one was not; "
            "install it (Debian: nlohmann-json3-dev) and build again"
        };
    }
}

} // namespace train_text
