// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <joinable/bucket/bucket.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/join/detail/roll_call.hpp>
#include <joinable/participant/options.hpp>
#include <joinable/tensor/parameters.hpp>
#include <joinable/tensor/tensor_list.hpp>

namespace joinable::inline v0::detail {

/// What ranks compare of the tensors in a list: a number for each, and what errors say of it.
struct Fingerprints {
    std::string kind;     ///< "parameter"
    std::string features; ///< what the numbers are made of: "dtype or extents"
    std::vector<std::uint64_t> values = {};
    std::vector<std::string> names = {};

    void add(std::string name, AnyView const& view, Digest digest = {}) {
        digest.add(static_cast<std::uint64_t>(view.dtype())).add(view.extents().size());
        for (std::size_t const extent : view.extents()) {
            digest.add(extent);
        }
        values.push_back(digest.value());
        names.push_back(std::move(name));
    }
};

inline Fingerprints fingerprints_of(ParameterList const& parameters) {
    Fingerprints result{"parameter", "dtype, extents, strides or requires_grad"};
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        AnyView const value = parameters[i].value();
        Digest digest;
        digest.add(parameters[i].requires_grad());
        for (std::size_t const stride : value.strides()) {
            digest.add(stride);
        }
        result.add(describe_parameter(parameters, i), value, digest);
    }
    return result;
}

inline Fingerprints fingerprints_of(TensorList const& tensors, std::string const& kind) {
    Fingerprints result{kind, "dtype or extents"};
    for (AnyTensor const& tensor : tensors) {
        result.add(concat(kind, " ", result.names.size()), tensor.view());
    }
    return result;
}

inline Digest digest_of(DataParallelOptions const& options) {
    Digest digest;
    digest.add(options.bucket_cap_bytes).add(options.first_bucket_bytes);
    for (std::size_t const limit : options.bucket_caps_bytes) {
        digest.add(limit);
    }
    digest.add(options.gradient_as_bucket_view).add(options.rebuild_buckets);
    digest.add(options.find_unused).add(options.static_graph);
    digest.add(static_cast<std::uint64_t>(options.gradient_kind));
    digest.add(options.broadcast_buffers).add(static_cast<std::uint64_t>(options.buffer_sync));
    digest.add(options.sync_at_start).add(options.sync_at_end);
    return digest;
}

/// Collective; all ranks give as many numbers. Calls `report` with the index of the first one that
/// is not the same everywhere, what all ranks gave, and the ranks that differ from rank 0.
template <class Report>
void compare(
    ControlCommunicator& control, std::vector<std::uint64_t> const& mine, Report const& report
) {
    auto const size = static_cast<std::size_t>(control.size());
    std::vector<std::uint64_t> all(size * mine.size());
    for (std::size_t i = 0; i < mine.size(); ++i) {
        all[i * size + static_cast<std::size_t>(control.rank())] = mine[i];
    }
    control.sum(all);
    for (std::size_t i = 0; i < mine.size(); ++i) {
        std::uint64_t const* const given = all.data() + i * size;
        std::vector<int> ranks;
        for (int rank = 1; rank < control.size(); ++rank) {
            if (given[rank] != given[0]) {
                ranks.push_back(rank);
            }
        }
        if (!ranks.empty()) {
            report(i, given, ranks);
        }
    }
}

/// Collective, after digests differed: throws the first difference to rank 0, if there is one in
/// this list. Every rank throws the same.
inline void throw_difference(ControlCommunicator& control, Fingerprints const& list) {
    using Ranks = std::vector<int>;
    compare(control, {list.values.size()}, [&](auto, auto const* given, Ranks const& ranks) {
        int const other = ranks.front();
        auto const has = concat(" has ", given[0], " ", list.kind, given[0] == 1 ? "" : "s");
        auto const others = concat(", but rank ", other, " has ", given[other]);
        throw Mismatch{ranks, "models differ: rank 0" + has + others};
    });
    compare(control, list.values, [&](std::size_t i, auto const*, Ranks const& ranks) {
        auto const where = " on " + ranks_text(ranks) + " than on rank 0";
        throw Mismatch{
            ranks, "models differ: " + list.names[i] + " has another " + list.features + where
        };
    });
}

/// Collective. All ranks agree that they have the same tensors and options, or all throw: this
/// rank its `local_error`, the others PeerFailed or Mismatch. One sum where all is well.
inline void agree_on_model(
    ControlCommunicator& control,
    std::span<Fingerprints const> lists,
    Digest digest,
    std::exception_ptr const& local_error
) {
    for (Fingerprints const& list : lists) {
        digest.add(list.values.size());
        for (std::uint64_t const value : list.values) {
            digest.add(value);
        }
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
        for (Fingerprints const& list : lists) {
            throw_difference(control, list);
        }
        throw Mismatch{
            {}, "models are the same on all ranks, but their DataParallelOptions differ"
        };
    }
    if (verdict == Verdict::failed) {
        throw_failure(roll_call.failure());
    }
}

} // namespace joinable::inline v0::detail
