// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include <joinable/bucket/bucket.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/join/roll_call.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable::inline v0::detail {

inline void add(Digest& digest, AnyParameter const& parameter) {
    AnyView const value = parameter.value();
    digest.add(static_cast<std::uint64_t>(value.dtype())).add(parameter.requires_grad() ? 1 : 0);
    digest.add(value.extents().size());
    for (std::size_t d = 0; d < value.extents().size(); ++d) {
        digest.add(value.extents()[d]).add(value.strides()[d]);
    }
}

/// Collective, after digests differed: finds the first parameter that differs from rank 0's.
/// Every rank throws the same.
[[noreturn]] inline void
name_first_difference(ControlCommunicator& control, ParameterList const& parameters) {
    auto const size = static_cast<std::size_t>(control.size());
    auto const me = static_cast<std::size_t>(control.rank());
    auto const differing_from_first = [&](std::vector<std::uint64_t> const& lanes) {
        std::vector<int> ranks;
        for (std::size_t rank = 1; rank < size; ++rank) {
            if (lanes[rank] != lanes[0]) {
                ranks.push_back(static_cast<int>(rank));
            }
        }
        return ranks;
    };
    std::vector<std::uint64_t> lanes(size);
    lanes[me] = parameters.size();
    control.sum(lanes);
    if (auto const ranks = differing_from_first(lanes); !ranks.empty()) {
        throw Mismatch{
            ranks,
            concat(
                "models differ: rank 0 has ",
                lanes[0],
                " parameters, but rank ",
                ranks.front(),
                " has ",
                lanes[static_cast<std::size_t>(ranks.front())]
            )
        };
    }
    std::size_t const count = parameters.size();
    std::vector<std::uint64_t> hashes(size * count);
    for (std::size_t i = 0; i < count; ++i) {
        Digest digest;
        add(digest, parameters[i]);
        hashes[i * size + me] = digest.value();
    }
    control.sum(hashes);
    for (std::size_t i = 0; i < count; ++i) {
        lanes.assign(
            hashes.begin() + static_cast<std::ptrdiff_t>(i * size),
            hashes.begin() + static_cast<std::ptrdiff_t>((i + 1) * size)
        );
        if (auto const ranks = differing_from_first(lanes); !ranks.empty()) {
            throw Mismatch{
                ranks,
                concat(
                    "models differ: ",
                    describe_parameter(parameters, i),
                    " has another dtype, extents, strides or "
                    "requires_grad on ",
                    ranks_text(ranks),
                    " than on rank 0"
                )
            };
        }
    }
    throw Mismatch{{}, "models are the same on all ranks, but their DataParallelOptions differ"};
}

/// Collective. All ranks agree that they have the same parameters and options, or all throw: this
/// rank its `local_error`, the others PeerFailed or Mismatch. One sum where all is well.
inline void agree_on_parameters(
    ControlCommunicator& control,
    ParameterList const& parameters,
    DataParallelOptions const& options,
    std::exception_ptr const& local_error
) {
    Digest digest;
    digest.add(parameters.size()).add(options.bucket_cap_bytes).add(options.first_bucket_bytes);
    digest.add(options.gradient_as_bucket_view ? 1 : 0);
    digest.add(static_cast<std::uint64_t>(options.gradient_kind));
    for (AnyParameter const& parameter : parameters) {
        add(digest, parameter);
    }
    RollCallLanes lanes;
    lanes.active = 1;
    lanes.failed = local_error ? 1 : 0;
    lanes.digest = Agreement::of(digest.value());
    RollCall roll_call{control, EndPolicy::drain};
    roll_call.post(lanes);
    Verdict const verdict = roll_call.agree(failure_of(local_error).message);
    if (local_error) {
        std::rethrow_exception(local_error);
    }
    if (verdict == Verdict::mismatch) {
        name_first_difference(control, parameters);
    }
    if (verdict == Verdict::failed) {
        throw_failure(roll_call.failure());
    }
}

} // namespace joinable::inline v0::detail
