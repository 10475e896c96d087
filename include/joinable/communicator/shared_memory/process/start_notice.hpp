// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include <joinable/communicator/shared_memory/process/shared_object.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

/// @file
/// How the other ranks of a job hear of a failure of rank 0 before its table of members exists.

namespace joinable { inline namespace v0 { namespace detail {

/// Says that rank 0 makes the object of a job: an empty file, which rank 0 keeps locked until it has
/// published the table of members. An empty file needs no memory, so it also serves
/// where /dev/shm is full.
class StartNotice {
public:
    /// The name of the notice for the object `path`. SharedObject::own_of(path) does not return it.
    [[nodiscard]] static std::string path_for(std::string const& path) {
        return concat(path, "-start");
    }
    /// Also removes what a dead rank 0 has left. Nothing if another rank 0 of this job shows one.
    /// Shows none where the system has no locks.
    /// @throws CommunicationError  the system refuses.
    [[nodiscard]] static std::optional<StartNotice> make(std::string const& path) {
        std::string const base = path_for(path);
        for (std::string const& other : SharedObject::own_of(base)) {
            auto const left = SharedObject::find(other);
            if (left && !left->is_locked()) {
                left->remove_name(other);
            }
        }
        auto object = SharedObject::create();
        if (!object.lock()) { // before others can see it
            return StartNotice{std::move(object), {}};
        }
        auto named = object.publish_first_free(base);
        if (!named) {
            return std::nullopt;
        }
        return StartNotice{std::move(object), std::move(*named)};
    }
    StartNotice(StartNotice&& other) noexcept
        : object_{std::move(other.object_)}, path_{std::exchange(other.path_, {})} {}
    StartNotice& operator=(StartNotice&&) = delete;
    /// The table is published, or fail() has told the others.
    ~StartNotice() {
        if (!path_.empty()) {
            object_.remove_name(path_);
        }
    }

    /// Tells the others that rank 0 has failed. Returns at `end`, because other ranks may not have
    /// looked before.
    void fail(std::chrono::steady_clock::time_point end) const {
        object_.resize(1); // needs no memory either
        while (std::chrono::steady_clock::now() < end) {
            sleep_for(std::chrono::milliseconds{2});
        }
    }

private:
    StartNotice(SharedObject object, std::string path) noexcept
        : object_{std::move(object)}, path_{std::move(path)} {}

    SharedObject object_;
    std::string path_;
};

/// For a rank that finds that rank 0 has died: removes what rank 0 left under this name, but not
/// before the other ranks had the time to find it as well.
[[noreturn]] inline void
throw_death_of_rank_zero(SharedObject const& object, std::string const& path) {
    sleep_for(std::chrono::milliseconds{100}); // the others look every two milliseconds
    object.remove_name(path);
    throw PeerFailed{{0}, "rank 0 failed: its process died"};
}

/// How another rank sees rank 0's notice.
class StartNoticeView {
public:
    /// `path` is the name of the object that rank 0 makes.
    /// @throws CommunicationError  the system lets this process make no object, as it lets no other
    ///                             one.
    explicit StartNoticeView(std::string const& path) : base_{StartNotice::path_for(path)} {
        static_cast<void>(SharedObject::create());
    }

    /// Whether rank 0 has shown a notice that has ended. Rank 0 has then published the table, or
    /// failed. A notice that had ended at this rank's first look is an older job's.
    [[nodiscard]] bool has_ended(bool is_first) {
        if (!object_) {
            find(is_first);
        }
        return object_ && (has_failed() || !object_->is_locked());
    }
    /// @pre has_ended(), and there is no table
    [[noreturn]] void throw_failure_of_rank_zero() const {
        if (!has_failed()) {
            throw_death_of_rank_zero(*object_, path_);
        }
        throw PeerFailed{
            {0},
            concat(
                "rank 0 failed before it had memory for a table of its ranks: its own error says "
                "why; ",
                shared_memory_folder,
                " has ",
                SharedObject::bytes_free()
            )
        };
    }

private:
    void find(bool is_first) {
        for (std::string const& path : SharedObject::own_of(base_)) {
            auto found = SharedObject::find(path);
            if (found && is_first && !found->is_locked()) {
                found->remove_name(path);
            } else if (found) {
                object_.emplace(std::move(*found));
                path_ = path;
                return;
            }
        }
    }
    [[nodiscard]] bool has_failed() const noexcept { return object_->status().st_size != 0; }

    std::string base_;
    std::optional<SharedObject> object_; ///< kept open once found, because its name may vanish
    std::string path_;
};

}}} // namespace joinable::v0::detail
