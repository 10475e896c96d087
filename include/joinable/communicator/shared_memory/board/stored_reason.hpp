// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// An AbortReason in memory of fixed size, which another process may read. A text that does not fit
/// ends in "...".
class StoredReason {
public:
    static constexpr std::size_t max_text = most_reason_text;

    void store(AbortReason const& reason) noexcept {
        kind_ = reason.kind;
        ranks_.fill(0);
        for (int const rank : reason.ranks) {
            if (rank >= 0 && rank < max_ranks) {
                auto const at = static_cast<std::size_t>(rank);
                ranks_[at / 64] |= std::uint64_t{1} << at % 64;
            }
        }
        length_ = reason.message.size();
        bool const is_cut = length_ > max_text;
        if (is_cut) {
            length_ = length_before_cut(reason.message);
            std::memcpy(text_.data() + length_, cut_mark.data(), cut_mark.size());
        }
        std::memcpy(text_.data(), reason.message.data(), length_);
        length_ += is_cut ? cut_mark.size() : 0;
    }

    [[nodiscard]] AbortReason load() const {
        AbortReason reason{kind_, {}, std::string{text_.data(), length_}};
        for (int rank = 0; rank < max_ranks; ++rank) {
            auto const at = static_cast<std::size_t>(rank);
            if ((ranks_[at / 64] >> at % 64 & 1U) != 0) {
                reason.ranks.push_back(rank);
            }
        }
        return reason;
    }

private:
    FailureKind kind_ = FailureKind::communication;
    std::array<std::uint64_t, max_ranks / 64> ranks_{}; ///< a bit for each
    std::size_t length_ = 0;
    std::array<char, max_text> text_{};
};

}}} // namespace joinable::v0::detail
