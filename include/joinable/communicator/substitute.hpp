// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <joinable/communicator/any_work.hpp>
#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/checks.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/device_of.hpp>
#include <joinable/detail/scope.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/copy_run.hpp>
#include <joinable/device/device.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// As many elements of a buffer, from `begin` on.
[[nodiscard]] inline Buffer within(Buffer whole, std::size_t begin, std::size_t count) noexcept {
    std::size_t const bytes = begin * size_of(whole.dtype);
    return {static_cast<std::byte*>(whole.data) + bytes, count, whole.dtype};
}
/// For a collective that only reads it here.
[[nodiscard]] inline Buffer readable(ConstBuffer in) noexcept {
    return {const_cast<void*>(in.data), in.count, in.dtype};
}
[[nodiscard]] constexpr std::size_t sum_of(Counts counts) noexcept {
    return offset_of(counts, counts.size());
}

/// The types that a caller can give to a Substitute.
struct Provided {
    /// If parts have counts: all of them, where other ranks than the root have them, too; in an all_to_all from
    /// each rank to each.
    Counts known = {};
    Buffer memory = {}; ///< for all parts; may be `in`, which then changes, except in an all_to_all
};

/// A collective that a communicator lacks, made of sums and broadcasts of whole buffers. All are posted at once.
class Substitute {
public:
    /// If tells_parts(), all counts are provided.
    template <Communicator Comm>
    Substitute(Comm& comm, Request const& request, Provided const& provided = {})
        : Substitute{request, provided.memory, comm.rank(), comm.size(), device_of(comm)} {
        plan(request.sends, request.expects, provided.known, has_scaled_all_reduce<Comm>);
        device_.submit();
        for (Part const& part : parts_) {
            works_.push_back(post(comm, part));
        }
    }
    Substitute(Substitute&&) = default;
    Substitute& operator=(Substitute&&) = delete;
    /// Delivers, unless it unwinds: then the works abort.
    ~Substitute() {
        if (copies_.empty() || unwinding_.has_begun()) {
            return;
        }
        try {
            wait();
        } catch (...) { // NOLINT(bugprone-empty-catch): all ranks are told already
        }
    }

    void wait() {
        for (AnyWork& work : works_) {
            work.wait();
        }
        finish();
    }
    [[nodiscard]] bool test() {
        return is_done([](AnyWork& work) { return work.test(); });
    }
    [[nodiscard]] bool progress() {
        return is_done([](AnyWork& work) { return work.progress(); });
    }

private:
    using Table = std::vector<std::size_t>; ///< elements by rank, or by sender and then receiver

    /// A broadcast, or a sum if there is no root.
    struct Part {
        Buffer buffer;
        std::optional<int> root;
    };
    struct Copy {
        Buffer to;
        Buffer from;
    };

    Substitute(Request const& request, Buffer memory, int rank, int size, Device& device)
        : signature_{request.signature}, in_{request.in}, out_{request.out}, memory_{memory},
          rank_{static_cast<std::size_t>(rank)}, size_{static_cast<std::size_t>(size)},
          device_{device} {}

    void plan(PartSizes const& sends, PartSizes const& expects, Counts known, bool can_scale) {
        auto const known_of = [&](std::size_t parts) {
            return known.empty() ? Table(parts, signature_.count)
                                 : Table(known.begin(), known.end());
        };
        switch (signature_.collective) {
        case Collective::scaled_all_reduce: sum(scaled(in_, out_)); break;
        case Collective::reduce:
            sum(out_.data == nullptr ? copied(in_, memory_of(in_.count)) : out_);
            break;
        case Collective::reduce_scatter:
        case Collective::scaled_reduce_scatter: {
            bool const scales = is_scaled(signature_.collective) && !can_scale;
            Buffer const memory = memory_of(in_.count);
            sum(scales ? scaled(in_, memory) : copied(in_, memory));
            take(memory, table_of(sends));
            break;
        }
        case Collective::all_gather: gather(out_, table_of(expects)); break;
        case Collective::gather: {
            Table const counts = known_of(size_);
            gather(out_.data == nullptr ? memory_of(sum_of(counts)) : out_, counts);
            break;
        }
        case Collective::scatter: scatter(known_of(size_)); break;
        default: all_to_all(known_of(size_ * size_));
        }
    }
    void sum(Buffer buffer) { parts_.push_back({buffer, std::nullopt}); }
    void send(Buffer buffer, std::size_t from) {
        if (buffer.count != 0) {
            parts_.push_back({buffer, static_cast<int>(from)});
        }
    }
    void take(Buffer all, Counts counts) {
        copies_.push_back({out_, within(all, offset_of(counts, rank_), out_.count)});
    }
    void gather(Buffer all, Counts counts) {
        copied(in_, within(all, offset_of(counts, rank_), in_.count));
        std::size_t begin = 0;
        for (std::size_t rank = 0; rank < size_; ++rank) {
            send(within(all, begin, counts[rank]), rank);
            begin += counts[rank];
        }
    }
    void scatter(Counts counts) {
        auto const root = static_cast<std::size_t>(signature_.root);
        Buffer const all = rank_ == root ? readable(in_) : memory_of(sum_of(counts));
        send(all, root);
        take(all, counts);
    }
    /// Each rank broadcasts all that it sends.
    void all_to_all(Counts sent) {
        Buffer const others = memory_of(sum_of(sent) - in_.count);
        std::size_t begin = 0;
        std::size_t written = 0;
        for (std::size_t rank = 0; rank < size_; ++rank) {
            Counts const counts = sent.subspan(rank * size_, size_);
            bool const is_own = rank == rank_;
            Buffer const all = is_own ? readable(in_) : within(others, begin, sum_of(counts));
            begin += is_own ? 0 : all.count;
            send(all, rank);
            std::size_t const count = counts[rank_];
            copies_.push_back(
                {within(out_, written, count), within(all, offset_of(counts, rank_), count)}
            );
            written += count;
        }
    }

    template <Communicator Comm>
    [[nodiscard]] AnyWork post(Comm& comm, Part const& part) const {
        if (part.root) {
            return AnyWork{comm.broadcast(part.buffer, *part.root)};
        }
        if constexpr (has_scaled_all_reduce<Comm>) {
            if (is_scaled(signature_.collective)) {
                return AnyWork{comm.all_reduce(part.buffer, signature_.op, signature_.factor)};
            }
        }
        return AnyWork{comm.all_reduce(part.buffer, signature_.op)};
    }
    template <class Test>
    [[nodiscard]] bool is_done(Test const& test) {
        for (; tested_ < works_.size(); ++tested_) {
            if (!test(works_[tested_])) {
                return false;
            }
        }
        finish();
        return true;
    }
    void finish() {
        if (!copies_.empty()) {
            for (Copy const& copy : std::exchange(copies_, {})) {
                copied(copy.from, copy.to);
            }
            device_.submit(); // before the memory is used again
        }
    }

    // -- memory -----------------------------------------------------------------------------------

    [[nodiscard]] Buffer memory_of(std::size_t count) {
        if (memory_.count >= count) {
            return {memory_.data, count, signature_.dtype};
        }
        scratch_ = device_.allocate(count * size_of(signature_.dtype), Arena::default_alignment);
        return {scratch_.data(), count, signature_.dtype};
    }
    Buffer copied(ConstBuffer from, Buffer to) const {
        copy_run(device_, from.data, to.data, from.count, signature_.dtype);
        return to;
    }
    [[nodiscard]] Buffer scaled(ConstBuffer from, Buffer to) const {
        auto const view = [&](Buffer buffer) {
            return AnyView{buffer.data, buffer.dtype, {buffer.count}, {1}, device_.id()};
        };
        device_.scale_copy(view(readable(from)), signature_.factor, view(to));
        return to;
    }
    [[nodiscard]] Table table_of(PartSizes const& parts) const {
        Table table(size_);
        parts.copy_to(std::span{table});
        return table;
    }

    Descriptor signature_;
    ConstBuffer in_;
    Buffer out_;
    Buffer memory_; ///< of the caller
    std::size_t rank_;
    std::size_t size_;
    Device& device_;
    Arena scratch_;
    std::vector<Part> parts_;
    std::vector<Copy> copies_;   ///< when all works are done
    std::vector<AnyWork> works_; // after the memory: they end before that does
    std::size_t tested_ = 0;     ///< so many are done
    Unwinding unwinding_;
};

// Collectives of any communicator: its own, or else substitutes. All ranks know all counts, and those that `whole` is
// not for give it as memory.

template <Communicator Comm>
[[nodiscard]] auto any_all_gather(Comm& comm, ConstBuffer part, Buffer whole, Counts counts) {
    if constexpr (AllGathers<Comm>) {
        return comm.all_gather(part, whole, counts);
    } else {
        RequestsOf const requests{comm.rank(), comm.size()};
        return Substitute{comm, requests.all_gather(part, whole, counts)};
    }
}
template <Communicator Comm>
[[nodiscard]] auto any_gather(Comm& comm, ConstBuffer part, Buffer whole, int root, Counts counts) {
    if constexpr (Gathers<Comm>) {
        return comm.gather(part, whole, root, counts);
    } else {
        return any_all_gather(comm, part, whole, counts);
    }
}
template <Communicator Comm>
[[nodiscard]] auto any_scatter(Comm& comm, Buffer whole, Buffer part, int root, Counts counts) {
    if constexpr (Scatters<Comm>) {
        return comm.scatter(whole, part, root, counts);
    } else {
        RequestsOf const requests{comm.rank(), comm.size()};
        return Substitute{comm, requests.scatter(whole, part, root, counts), {counts, whole}};
    }
}
/// Sums, with a factor only on communicators whose sums scale. `whole` may change.
template <Communicator Comm>
[[nodiscard]] auto any_reduce_scatter(
    Comm& comm, Buffer whole, Buffer part, std::optional<double> factor, Counts counts
) {
    auto const start = [&](auto&& by, auto... factors) {
        return by.reduce_scatter(whole, part, ReduceOp::sum, factors..., counts);
    };
    if constexpr (ScalesScatteredSums<Comm>) {
        return factor ? start(comm, *factor) : start(comm);
    } else if constexpr (ReduceScatters<Comm>) {
        return start(comm);
    } else {
        RequestsOf const requests{comm.rank(), comm.size()};
        return Substitute{
            comm, factor ? start(requests, *factor) : start(requests), {counts, whole}
        };
    }
}

}}} // namespace joinable::v0::detail
