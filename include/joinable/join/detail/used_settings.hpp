// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <vector>

#include <joinable/agreement/agree.hpp>
#include <joinable/agreement/agreement_list.hpp>
#include <joinable/detail/hash.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The settings by which this rank has stepped in a guard, in rounds in which all ranks were active.
/// Roll calls compare their digest, so that ranks which step by other settings hear of it.
class UsedSettings {
public:
    /// Adds the settings of one step. `list`, whose hash is `hash`, names them; it lives as long as
    /// the guard, and each caller gives its own.
    void add(AgreementList const& list, std::uint64_t hash) {
        chain_ = Hash{}.add(chain_).add(hash).value();
        if (std::find(lists_.begin(), lists_.end(), &list) == lists_.end()) {
            lists_.push_back(&list);
        }
    }

    /// 0 before the first step.
    [[nodiscard]] std::uint32_t digest() const noexcept {
        return static_cast<std::uint32_t>(chain_) & digest_mask;
    }
    /// Lists the last settings, and last a hash of all, by which ranks differ in any case.
    [[nodiscard]] AgreementList list() const {
        AgreementList all;
        for (AgreementList const* const settings : lists_) {
            for (AgreementList::Item const& item : settings->items()) {
                all.add(item.label, item.value);
            }
        }
        all.begin_section("settings differ: ");
        all.add("hash over all steps of this guard", chain_);
        return all;
    }

private:
    std::uint64_t chain_ = 0;
    std::vector<AgreementList const*> lists_;
};

}}} // namespace joinable::v0::detail
