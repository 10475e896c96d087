// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include <joinable/communicator/any/work.hpp>
#include <joinable/communicator/detail/checks.hpp>
#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/detail/unwinding.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/copy.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// What every communicator that can abort has. The other collectives can be made of it.
struct BasicPosts {
    int rank;
    int size;
    std::function<AnyWork(Buffer, ReduceOp)> all_reduce;
    std::function<AnyWork(Buffer, int)> broadcast;
    std::function<void(AbortReason)> fail; ///< aborts, and throws what was the first reason
};

/// A collective over host memory that a communicator lacks, made of sums and broadcasts of whole buffers. All are
/// posted at once. Only tables of counts that not every rank has are exchanged before, which blocks.
class Substitute {
public:
    /// @throws Mismatch  on all ranks: their tables of counts differ. The communicator is aborted.
    Substitute(BasicPosts const& posts, Request const& request)
        : posts_{posts}, said_{request.signature}, in_{request.in}, out_{request.out} {
        switch (said_.collective) {
        case Collective::scaled_all_reduce: sum(scaled(in_, out_)); break;
        case Collective::reduce:
            sum(out_.data == nullptr ? copied(in_, allocated(in_.count)) : out_);
            break;
        case Collective::reduce_scatter:
            take(copied(in_, allocated(in_.count)), request.sends);
            break;
        case Collective::scaled_reduce_scatter:
            take(scaled(in_, allocated(in_.count)), request.sends);
            break;
        case Collective::all_gather: gather(out_, table_of(request.expects)); break;
        case Collective::gather: gather_to_root(sent_by_all(request)); break;
        case Collective::scatter: scatter(sent_by_all(request)); break;
        default: all_to_all(sent_by_all(request)); break;
        }
    }

    Substitute(Substitute&&) = default;
    Substitute& operator=(Substitute&&) = delete;
    /// Delivers, unless it unwinds: then the parts abort.
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
        for (AnyWork& part : parts_) {
            part.wait();
        }
        finish();
    }
    [[nodiscard]] bool test() {
        return is_done([](AnyWork& part) { return part.test(); });
    }
    [[nodiscard]] bool progress() {
        return is_done([](AnyWork& part) { return part.progress(); });
    }

private:
    using Table = std::vector<std::size_t>; ///< elements by rank, or by sender and then receiver
    struct Copy {
        Buffer to;
        Buffer from;
    };

    void sum(Buffer buffer) { parts_.push_back(posts_.all_reduce(buffer, said_.op)); }
    void send(Buffer buffer, int from) {
        if (buffer.count != 0) {
            parts_.push_back(posts_.broadcast(buffer, from));
        }
    }
    void take(Buffer all, PartSizes const& sends) {
        sum(all);
        copies_.push_back({out_, within(all, offset_of(table_of(sends), index()), out_.count)});
    }
    void gather(Buffer all, Table const& counts) {
        copied(in_, within(all, offset_of(counts, index()), in_.count));
        std::size_t begin = 0;
        for (int rank = 0; rank < posts_.size; ++rank) {
            std::size_t const count = counts[static_cast<std::size_t>(rank)];
            send(within(all, begin, count), rank);
            begin += count;
        }
    }
    void gather_to_root(Table const& sent) {
        Table counts;
        for (std::size_t rank = 0; rank < size(); ++rank) {
            counts.push_back(sent[rank * size() + root()]);
        }
        gather(out_.data == nullptr ? allocated(sum_of(counts)) : out_, counts);
    }
    void scatter(Table const& sent) {
        std::span<std::size_t const> const counts = row_of(sent, root());
        Buffer const all = posts_.rank == said_.root ? read(in_) : allocated(sum_of(counts));
        send(all, said_.root);
        copies_.push_back({out_, within(all, offset_of(counts, index()), out_.count)});
    }
    /// Each rank broadcasts all that it sends.
    void all_to_all(Table const& sent) {
        Buffer const others = allocated(sum_of(sent) - in_.count);
        std::size_t begin = 0;
        std::size_t written = 0;
        for (std::size_t rank = 0; rank < size(); ++rank) {
            std::span<std::size_t const> const counts = row_of(sent, rank);
            bool const is_own = rank == index();
            Buffer const all = is_own ? read(in_) : within(others, begin, sum_of(counts));
            begin += is_own ? 0 : all.count;
            send(all, static_cast<int>(rank));
            std::size_t const count = counts[index()];
            copies_.push_back(
                {within(out_, written, count), within(all, offset_of(counts, index()), count)}
            );
            written += count;
        }
    }

    /// What each rank sends to each. Ranks exchange it unless all parts are equal.
    [[nodiscard]] Table sent_by_all(Request const& request) {
        if (!said_.has_counts) {
            return Table(size() * size(), said_.count);
        }
        std::vector<std::uint64_t> words(2 * size() * size());
        std::span<std::uint64_t> const all{words};
        request.sends.copy_to(all.subspan(index() * size(), size()));
        request.expects.copy_to(all.subspan((size() + index()) * size(), size()));
        posts_.all_reduce({words.data(), words.size(), DType::u64}, ReduceOp::sum).wait();
        auto const word = [&](std::size_t row, int column) {
            return words[row * size() + static_cast<std::size_t>(column)];
        };
        auto const difference = find_difference_of_counts(
            posts_.size,
            said_,
            [&](int from, int to) { return word(static_cast<std::size_t>(from), to); },
            [&](int from, int to) { return word(size() + static_cast<std::size_t>(to), from); }
        );
        if (difference) {
            posts_.fail(*difference);
        }
        return Table(words.begin(), words.begin() + static_cast<std::ptrdiff_t>(size() * size()));
    }

    template <class Test>
    [[nodiscard]] bool is_done(Test const& test) {
        for (; tested_ < parts_.size(); ++tested_) {
            if (!test(parts_[tested_])) {
                return false;
            }
        }
        finish();
        return true;
    }
    void finish() {
        for (Copy const& copy : std::exchange(copies_, {})) {
            copied(copy.from, copy.to);
        }
    }

    // -- memory -----------------------------------------------------------------------------------

    [[nodiscard]] Buffer allocated(std::size_t count) {
        scratch_ = Arena{count * size_of(said_.dtype)};
        return {scratch_.data(), count, said_.dtype};
    }
    static Buffer copied(ConstBuffer from, Buffer to) {
        if (from.count != 0 && from.data != to.data) {
            std::memcpy(to.data, from.data, from.bytes());
        }
        return to;
    }
    [[nodiscard]] Buffer scaled(ConstBuffer from, Buffer to) const {
        auto const view = [](Buffer buffer) {
            return AnyView{buffer.data, buffer.dtype, {buffer.count}, {1}};
        };
        scale_copy(view(read(from)), said_.factor, view(to));
        return to;
    }
    /// For a collective that only reads it here.
    [[nodiscard]] static Buffer read(ConstBuffer in) {
        return {const_cast<void*>(in.data), in.count, in.dtype};
    }
    [[nodiscard]] static Buffer within(Buffer memory, std::size_t begin, std::size_t count) {
        std::size_t const bytes = begin * size_of(memory.dtype);
        return {static_cast<std::byte*>(memory.data) + bytes, count, memory.dtype};
    }

    [[nodiscard]] std::size_t index() const { return static_cast<std::size_t>(posts_.rank); }
    [[nodiscard]] std::size_t root() const { return static_cast<std::size_t>(said_.root); }
    [[nodiscard]] std::size_t size() const { return static_cast<std::size_t>(posts_.size); }
    [[nodiscard]] Table table_of(PartSizes const& parts) const {
        Table table(size());
        parts.copy_to(std::span{table});
        return table;
    }
    [[nodiscard]] std::span<std::size_t const> row_of(Table const& sent, std::size_t rank) const {
        return std::span{sent}.subspan(rank * size(), size());
    }
    [[nodiscard]] static std::size_t sum_of(std::span<std::size_t const> counts) {
        return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
    }

    BasicPosts const& posts_; ///< used by the constructor alone
    Descriptor said_;
    ConstBuffer in_;
    Buffer out_;
    Arena scratch_;
    std::vector<Copy> copies_;   ///< when all parts are done
    std::vector<AnyWork> parts_; // after the memory: its works end before that does
    std::size_t tested_ = 0;     ///< so many are done
    Unwinding unwinding_;
};

}}} // namespace joinable::v0::detail
