// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/mpi/detail/calls.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// A rank's part, with `zeros` that must stay, in a collective that only the others have posted.
/// Like the others, it passes the parts of a request to MPI, and one buffer if that is both input
/// and output, because MPI's algorithms may depend on this.
[[nodiscard]] inline MpiTransfer stand_in_of(
    Descriptor const& signature, int rank, int size, std::deque<std::vector<std::byte>>& zeros
) {
    bool const is_one =
        is_one_buffer(signature.collective) || signature.collective == Collective::barrier;
    auto const parts = is_one ? std::size_t{1} : static_cast<std::size_t>(size);
    std::size_t const bytes = signature.count * size_of(signature.dtype) * parts;
    std::byte* const in = zeros.emplace_back(bytes).data();
    std::byte* const out = is_one ? in : zeros.emplace_back(bytes).data();
    auto const all = PartSizes::equal(signature.count);
    auto const those_of_root = rank == signature.root ? all : PartSizes{};
    auto const only_root = PartSizes::only(signature.root, signature.count);
    switch (signature.collective) {
    case Collective::gather: return {signature, in, out, only_root, those_of_root};
    case Collective::scatter: return {signature, in, out, those_of_root, only_root};
    default: return {signature, in, out, all, all};
    }
}

}}} // namespace joinable::v0::detail
