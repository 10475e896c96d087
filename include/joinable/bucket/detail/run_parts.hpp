// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <vector>

#include <joinable/bucket/bucket.hpp>
#include <joinable/bucket/bucket_reduction.hpp>
#include <joinable/tensor/any_view.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The parts of the runs of a reducer, for reductions that look at them.
template <bool are_wanted>
class RunParts {
public:
    void list(std::vector<Bucket> const& buckets) {
        parts_.clear();
        first_.clear();
        for (std::size_t index = 0; index < buckets.size(); ++index) {
            auto const& [buffer, parameters, views] = buckets[index];
            first_.push_back(parts_.size());
            std::size_t offset = 0;
            for (std::size_t k = 0; k < views.size(); ++k) {
                AnyView const& view = views[k];
                std::size_t const count = view.numel();
                parts_.push_back(
                    {index,
                     parameters[k],
                     offset,
                     count,
                     view.dtype(),
                     view.extents(),
                     view.strides()}
                );
                offset += count;
            }
        }
    }
    [[nodiscard]] BucketParts all() const noexcept { return {parts_.data(), parts_.size()}; }
    /// Parts [first, last) of a bucket.
    [[nodiscard]] BucketParts
    of(std::size_t bucket, std::size_t first, std::size_t last) const noexcept {
        return {parts_.data() + first_[bucket] + first, last - first};
    }

private:
    std::vector<BucketPart> parts_;  ///< of all buckets, in their order
    std::vector<std::size_t> first_; ///< per bucket
};
template <>
class RunParts<false> {
public:
    void list(std::vector<Bucket> const& /*buckets*/) noexcept {}
    [[nodiscard]] BucketParts
    of(std::size_t /*bucket*/, std::size_t /*first*/, std::size_t /*last*/) const noexcept {
        return {};
    }
};

}}} // namespace joinable::v0::detail
