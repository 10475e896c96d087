// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <mutex>
#include <vector>

#include <joinable/communicator/model_table.hpp>
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

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/group/thread_models.ipp>
#endif
