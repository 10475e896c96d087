// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/config.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// An AbortReason in memory of fixed size, which another process may read. A longer text is cut and
/// ends in "...".
class StoredReason {
public:
    static constexpr std::size_t max_text = most_reason_text;

    void store(AbortReason const& reason) noexcept;

    [[nodiscard]] AbortReason load() const;

private:
    FailureKind kind_ = FailureKind::communication;
    bool has_left_ = false;
    int origin_ = -1;
    std::array<std::uint64_t, max_ranks / 64> ranks_{}; ///< a bit for each
    std::size_t length_ = 0;
    std::array<char, max_text> text_{};
};

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/shared_memory/board/stored_reason.ipp>
#endif
