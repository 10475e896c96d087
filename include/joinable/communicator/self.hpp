// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/collective_members.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/copy.hpp>
#include <joinable/tensor/any_view.hpp>

namespace joinable { inline namespace v0 {

/// The communicator of a single rank. Every operation is complete when it starts. It checks its
/// arguments as the other communicators do, so a program that runs alone also runs on several
/// ranks. It cannot send, receive or split.
class SelfCommunicator : public detail::Collectives<SelfCommunicator, CompletedWork> {
public:
    [[nodiscard]] int rank() const noexcept { return 0; }
    [[nodiscard]] int size() const noexcept { return 1; }

    /// See shared_buffer().
    [[nodiscard]] Arena share(std::size_t bytes) {
        throw_if_aborted();
        return Arena{bytes};
    }

    void abort(AbortReason reason) {
        if (!reason_) {
            reason_ = std::move(reason);
        }
    }
    [[nodiscard]] bool is_aborted() const noexcept { return reason_.has_value(); }
    [[nodiscard]] std::optional<AbortReason> abort_reason() const { return reason_; }

    /// Local. No wait of a single rank lasts. Returns the deadline that was in force.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        return std::exchange(deadline_, deadline);
    }
    /// Local. Does nothing, because no other rank waits.
    void keep_alive() const noexcept {}
    /// Local. None.
    [[nodiscard]] std::vector<int> missing_ranks() const noexcept { return {}; }

private:
    friend class detail::BasicCollectives<SelfCommunicator, CompletedWork>;

    void throw_if_aborted() const {
        if (reason_) {
            detail::throw_failure(*reason_);
        }
    }
    [[nodiscard]] CompletedWork post(detail::Request const& request) const {
        auto const& [signature, in, out, sends, expects, pieces] = request;
        throw_if_aborted();
        if (detail::is_scaled(signature.collective)) {
            auto const view = [](void const* data, Buffer const& like) {
                return AnyView{const_cast<void*>(data), like.dtype, {like.count}, {1}};
            };
            scale_copy(view(in.data, out), signature.factor, view(out.data, out));
        } else if (in.count != 0 && in.data != out.data) {
            std::memcpy(out.data, in.data, in.bytes());
        }
        return {};
    }

    std::optional<AbortReason> reason_;
    std::chrono::nanoseconds deadline_ = default_deadline;
};

}} // namespace joinable::v0
