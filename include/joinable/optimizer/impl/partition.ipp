// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/optimizer/partition.hpp>

#include <algorithm>
#include <utility>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION std::vector<int>
owners_by_size(std::span<std::size_t const> sizes, std::vector<std::size_t>& loads) {
    std::vector<std::size_t> order(sizes.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return sizes[a] != sizes[b] ? sizes[a] > sizes[b] : a < b;
    });
    std::vector<int> owners(sizes.size());
    for (std::size_t const i : order) {
        auto const least = std::min_element(loads.begin(), loads.end());
        owners[i] = static_cast<int>(least - loads.begin());
        *least += sizes[i];
    }
    return owners;
}

JOINABLE_DEFINITION std::vector<std::vector<std::size_t>> runs_by_size(
    ParameterList const& parameters,
    std::span<std::size_t const> chosen,
    std::size_t cap,
    std::size_t alone
) {
    std::vector<std::vector<std::size_t>> runs;
    for (std::size_t dtype = 0; dtype < dtype_count; ++dtype) {
        std::vector<std::size_t> run;
        std::size_t bytes = 0;
        for (std::size_t const i : chosen) {
            AnyView const value = parameters[i].value();
            if (static_cast<std::size_t>(value.dtype()) != dtype) {
                continue;
            }
            std::size_t const own = value.numel() * size_of(value.dtype());
            if (own >= alone || parameters[i].is_sparse()) {
                runs.push_back({i});
                continue;
            }
            run.push_back(i);
            bytes += own;
            if (bytes >= cap) {
                runs.push_back(std::exchange(run, {}));
                bytes = 0;
            }
        }
        if (!run.empty()) {
            runs.push_back(std::move(run));
        }
    }
    return runs;
}

JOINABLE_DEFINITION ShardBucket bucket_by_owners(
    ParameterList const& parameters,
    std::vector<std::size_t> run,
    std::span<int const> owners,
    std::size_t ranks
) {
    std::sort(run.begin(), run.end(), [&](std::size_t a, std::size_t b) {
        return owners[a] != owners[b] ? owners[a] < owners[b] : a < b;
    });
    ShardBucket bucket{
        parameters[run.front()].value().dtype(), {}, {}, parameters[run.front()].is_sparse()
    };
    bucket.counts.resize(ranks);
    std::size_t offset = 0;
    for (std::size_t const i : run) {
        std::size_t const size = parameters[i].value().numel();
        bucket.pieces.push_back({i, 0, size, owners[i], offset});
        bucket.counts[static_cast<std::size_t>(owners[i])] += size;
        offset += size;
    }
    return bucket;
}

JOINABLE_DEFINITION ShardBucket flat_bucket(
    ParameterList const& parameters, std::vector<std::size_t> const& run, std::size_t ranks
) {
    ShardBucket bucket{parameters[run.front()].value().dtype(), {}, {}, false};
    std::size_t total = 0;
    for (std::size_t const i : run) {
        total += parameters[i].value().numel();
    }
    std::size_t const line = 64 / size_of(bucket.dtype);
    std::size_t const lines = (total + ranks * line - 1) / (ranks * line);
    std::size_t const part = (std::max)(lines, std::size_t{1}) * line;
    bucket.counts.assign(ranks, part);
    std::size_t offset = 0;
    for (std::size_t const i : run) {
        std::size_t left = parameters[i].value().numel();
        std::size_t begin = 0;
        do { // a parameter without elements has a piece, too
            std::size_t const owner = (std::min)(offset / part, ranks - 1);
            std::size_t const taken = (std::min)(left, (owner + 1) * part - offset);
            bucket.pieces.push_back({i, begin, taken, static_cast<int>(owner), offset});
            begin += taken;
            offset += taken;
            left -= taken;
        } while (left != 0);
    }
    return bucket;
}

}}} // namespace joinable::v0::detail
