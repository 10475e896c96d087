// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/shared_memory/board/first_reason.hpp>

#include <cstring>
#include <string>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION void StoredReason::store(AbortReason const& reason) noexcept {
    kind_ = reason.kind;
    has_left_ = reason.has_left;
    origin_ = reason.origin;
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

JOINABLE_DEFINITION AbortReason StoredReason::load() const {
    AbortReason reason{kind_, {}, std::string{text_.data(), length_}, origin_, has_left_};
    for (int rank = 0; rank < max_ranks; ++rank) {
        auto const at = static_cast<std::size_t>(rank);
        if ((ranks_[at / 64] >> at % 64 & 1U) != 0) {
            reason.ranks.push_back(rank);
        }
    }
    return reason;
}

}}} // namespace joinable::v0::detail
