// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include <joinable/communicator/model_table.hpp>
#include <joinable/communicator/shared_memory/group/group.hpp>
#include <joinable/config.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The memory of the models that thread ranks are making, of all groups. Any thread may call it.
class ThreadModels {
public:
    /// `group` identifies the group whose ranks make the model.
    /// @throws ContractViolation  a rank that makes the same model has entered some of this memory.
    ///         The entry stays until leave().
    void enter(void const* group, TrainedMemory const& memory);
    void leave(TrainedMemory const& memory) noexcept;

private:
    static void require_apart(TrainedMemory const& memory, TrainedMemory const& other);

    struct Entry {
        void const* group;
        TrainedMemory const* memory;
    };

    std::mutex mutex_;
    std::vector<Entry> entries_;
};

/// The same for one rank of one group.
class ThreadModelTable final : public ModelTable {
public:
    ThreadModelTable(ThreadModels& models, void const* group) noexcept
        : models_{models}, group_{group} {}
    void enter(TrainedMemory const& memory) override { models_.enter(group_, memory); }
    void leave(TrainedMemory const& memory) noexcept override { models_.leave(memory); }

private:
    ThreadModels& models_;
    void const* group_;
};

/// The memory of a rank (Room) or of all thread ranks together (Heap), and the groups in it. The
/// communicators that use it keep it alive. Any thread may call it.
template <class Memory>
class GroupStorage {
public:
    template <class... Arguments>
    explicit GroupStorage(Arguments const&... arguments) : memory_{arguments...} {}
    ~GroupStorage() {
        for (Owned const& owned : groups_) {
            give_back(owned);
        }
    }
    GroupStorage(GroupStorage const&) = delete;
    GroupStorage& operator=(GroupStorage const&) = delete;

    [[nodiscard]] Memory& memory() noexcept { return memory_; }
    /// Of thread ranks, which all have this storage.
    [[nodiscard]] ThreadModels& models() noexcept { return models_; }

    /// Makes a group of ranks with these numbers; `maker` is the caller's number. Nothing if there
    /// is no memory. Also frees the memory of groups that all ranks have left.
    [[nodiscard]] std::optional<Group> make(std::span<int const> numbers, int maker) {
        std::lock_guard const lock{mutex_};
        for (std::size_t i = groups_.size(); i-- > 0;) { // subgroups before their parents
            if (groups_[i].group.retire(maker)) {
                give_back(groups_[i]);
                groups_.erase(groups_.begin() + static_cast<std::ptrdiff_t>(i));
            }
        }
        int const size = static_cast<int>(numbers.size());
        std::size_t const bytes = Group::bytes_for(size);
        groups_.reserve(groups_.size() + 1);
        std::byte* const block =
            memory_.allocate(bytes, Group::parts_at_start(size), Group::zeros_at_start(size));
        if (block == nullptr) {
            return std::nullopt;
        }
        groups_.push_back({Group::create(numbers, {block, bytes}), bytes});
        return groups_.back().group;
    }

private:
    struct Owned {
        Group group;
        std::size_t bytes;
    };
    void give_back(Owned const& owned) noexcept {
        memory_.free(reinterpret_cast<std::byte*>(&owned.group.board()), owned.bytes);
    }

    Memory memory_;
    ThreadModels models_;
    std::mutex mutex_;
    std::vector<Owned> groups_;
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/group/impl/group_storage.ipp>
#endif
