// SPDX-License-Identifier: BSL-1.0
#pragma once

// joinable in single headers, for projects that copy files. Generated from include/joinable by
// single_include/amalgamate.py: change the headers there, not this file.

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "join.hpp"

// ---- joinable/communicator/any_work.hpp

#ifndef JOINABLE_COMMUNICATOR_ANY_WORK_HPP_PART_1
#define JOINABLE_COMMUNICATOR_ANY_WORK_HPP_PART_1

namespace joinable { inline namespace v0 {

/// A collective of any communicator. Works of up to `capacity` bytes, such as those of all transports here, lie
/// within; larger ones on the heap.
class [[nodiscard("destroying the work waits for it: wait() where it is needed")]] AnyWork {
public:
    static constexpr std::size_t capacity = 112;

    template <class W>
        requires(!std::same_as<std::remove_cvref_t<W>, AnyWork> && Work<std::remove_cvref_t<W>>)
    explicit AnyWork(W&& work) {
        using Given = std::remove_cvref_t<W>;
        if constexpr (fits<Held<Given>>) {
            work_ = ::new (static_cast<void*>(&storage_)) Held<Given>{std::forward<W>(work)};
        } else {
            work_ = ::new (static_cast<void*>(&storage_))
                Held<OnHeap<Given>>{OnHeap<Given>{std::make_unique<Given>(std::forward<W>(work))}};
        }
    }
    AnyWork(AnyWork&& other) noexcept : work_{other.work_->move_to(&storage_)} {}
    AnyWork& operator=(AnyWork&&) = delete;
    ~AnyWork() { work_->~Interface(); }

    /// @throws what the communicator's works throw.
    void wait() { work_->wait(); }
    /// Makes progress; true once wait() would return at once.
    [[nodiscard]] bool test() { return work_->test(); }
    /// test() without the deadline, for a rank that finally waits.
    [[nodiscard]] bool progress() { return work_->progress(); }

private:
    struct Interface {
        Interface() = default;
        Interface(Interface&&) noexcept = default;
        virtual ~Interface() = default;
        virtual Interface* move_to(void* place) noexcept = 0;
        virtual void wait() = 0;
        virtual bool test() = 0;
        virtual bool progress() = 0;
    };
    template <class W>
    struct Held final : Interface {
        explicit Held(W from) : work{std::move(from)} {}
        Interface* move_to(void* place) noexcept override {
            return ::new (place) Held{std::move(*this)};
        }
        void wait() override { work.wait(); }
        bool test() override { return work.test(); }
        bool progress() override { return detail::make_progress(work); }
        W work;
    };
    template <class W>
    struct OnHeap {
        void wait() { work->wait(); }
        [[nodiscard]] bool test() { return work->test(); }
        [[nodiscard]] bool progress() { return detail::make_progress(*work); }
        std::unique_ptr<W> work;
    };
    template <class H>
    static constexpr bool fits = sizeof(H) <= capacity && alignof(H) <= alignof(std::max_align_t) &&
                                 std::is_nothrow_move_constructible_v<H>;

    alignas(std::max_align_t) std::byte storage_[capacity];
    Interface* work_; ///< in storage_; after a move it holds a work that was moved from
};

}} // namespace joinable::v0

#endif

// ---- joinable/communicator/detail/by_members.hpp

#ifndef JOINABLE_COMMUNICATOR_DETAIL_BY_MEMBERS_HPP_PART_1
#define JOINABLE_COMMUNICATOR_DETAIL_BY_MEMBERS_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// Starts a request by the members of any communicator, and returns run(its work). If the communicator lacks the
/// collective, returns lacks(its name) instead.
template <Communicator Comm, class Run, class Lacks>
[[nodiscard]] auto
by_members(Comm& comm, Request const& request, Run const& run, Lacks const& lacks) {
    Descriptor const& signature = request.signature;
    ConstBuffer const in = request.in;
    Buffer const out = request.out;
    // Where a collective has one buffer, a rank that only sends reads it.
    Buffer const in_place =
        out.data == nullptr ? Buffer{const_cast<void*>(in.data), in.count, signature.dtype} : out;
    auto const by_parts = [&](PartSizes const& parts, auto const& post) {
        return signature.has_counts ? run(post(parts.table(comm.size()))) : run(post());
    };
    switch (signature.collective) {
    case Collective::barrier: comm.barrier(); return run(CompletedWork{});
    case Collective::broadcast: return run(comm.broadcast(in_place, signature.root));
    case Collective::all_reduce: return run(comm.all_reduce(in_place, signature.op));
    case Collective::scaled_all_reduce:
        if constexpr (has_sum_of_pieces<Comm>) {
            if (request.pieces.number != 0) {
                return run(comm.sum_pieces(request.pieces, signature.factor));
            }
        }
        if constexpr (has_scaled_all_reduce<Comm>) {
            return run(comm.all_reduce(in_place, signature.op, signature.factor));
        }
        break;
    case Collective::reduce:
        if constexpr (has_reduce<Comm>) {
            return run(comm.reduce(in_place, signature.op, signature.root));
        }
        break;
    case Collective::all_gather:
        if constexpr (has_all_gather<Comm>) {
            return by_parts(request.expects, [&](auto... counts) {
                return comm.all_gather(in, out, counts...);
            });
        }
        break;
    case Collective::reduce_scatter:
        if constexpr (has_reduce_scatter<Comm>) {
            return by_parts(request.sends, [&](auto... counts) {
                return comm.reduce_scatter(in, out, signature.op, counts...);
            });
        }
        break;
    case Collective::scaled_reduce_scatter:
        if constexpr (has_scaled_reduce_scatter<Comm>) {
            return by_parts(request.sends, [&](auto... counts) {
                return comm.reduce_scatter(in, out, signature.op, signature.factor, counts...);
            });
        }
        break;
    case Collective::gather:
        if constexpr (has_gather<Comm>) {
            return by_parts(request.expects, [&](auto... counts) {
                return comm.gather(in, out, signature.root, counts...);
            });
        }
        break;
    case Collective::scatter:
        if constexpr (has_scatter<Comm>) {
            return by_parts(request.sends, [&](auto... counts) {
                return comm.scatter(in, out, signature.root, counts...);
            });
        }
        break;
    case Collective::all_to_all:
        if constexpr (has_all_to_all<Comm>) {
            int const size = comm.size();
            return signature.has_counts
                       ? run(comm.all_to_all(
                             in, out, request.sends.table(size), request.expects.table(size)
                         ))
                       : run(comm.all_to_all(in, out));
        }
        break;
    }
    return lacks(signature.collective);
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/detail/can_split.hpp

#ifndef JOINABLE_COMMUNICATOR_DETAIL_CAN_SPLIT_HPP_PART_1
#define JOINABLE_COMMUNICATOR_DETAIL_CAN_SPLIT_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

template <class C>
concept says_whether_it_splits = requires(C const& comm) {
    { comm.can_split() } -> std::same_as<bool>;
};

/// Whether it has split(), and its transport too, if it stands for one that is known when the program runs. Local, the
/// same on all ranks.
template <Communicator Comm>
[[nodiscard]] bool can_split(Comm const& comm) {
    if constexpr (says_whether_it_splits<Comm>) {
        return comm.can_split();
    } else {
        return has_split<Comm>;
    }
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/detail/requested_checks.hpp

#ifndef JOINABLE_DETAIL_REQUESTED_CHECKS_HPP_PART_1
#define JOINABLE_DETAIL_REQUESTED_CHECKS_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// The checks that the environment variable JOINABLE_CHECK turns on, in programs that are not compiled for them.
struct RequestedChecks {
    std::string_view text; ///< as the variable has it; empty if it is not set
    bool collectives = false;
    bool ready = false;
    bool replicas = false;

    /// @throws ContractViolation  it has an unknown word.
    [[nodiscard]] static RequestedChecks read();
};

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/detail/comparison.hpp

#ifndef JOINABLE_COMMUNICATOR_DETAIL_COMPARISON_HPP_PART_1
#define JOINABLE_COMMUNICATOR_DETAIL_COMPARISON_HPP_PART_1

/// @file
/// How ranks compare what they are about to do.

namespace joinable { inline namespace v0 { namespace detail {

/// Why the signatures differ. `words` has as many words from each rank, in rank order, which begin with its
/// Descriptor::words().
[[nodiscard]] inline std::optional<AbortReason>
difference_of_signatures(int size, std::span<std::uint64_t const> words) {
    std::size_t const width = words.size() / static_cast<std::size_t>(size);
    return find_difference(size, [&](int rank) {
        return Descriptor::of_words(words.subspan(width * static_cast<std::size_t>(rank)));
    });
}

/// Whether ranks must be told the counts of others before they can pass data on.
[[nodiscard]] constexpr bool tells_parts(Descriptor const& signature) noexcept {
    return signature.has_counts && (signature.collective == Collective::gather ||
                                    signature.collective == Collective::scatter ||
                                    signature.collective == Collective::all_to_all);
}

/// The words that ranks sum before data moves: first the signatures, then, if these are equal and have
/// counts, the tables of counts. All find the same difference, or none. Its memory is kept for the next one.
class Comparison {
public:
    /// Begins with the signatures.
    void begin(Descriptor const& own, int rank, int size) {
        signature_ = own;
        rank_ = rank;
        size_ = size;
        has_tables_ = false;
        auto const mine = own.words();
        bool const has_pairs = own.has_counts && own.collective != Collective::gather &&
                               own.collective != Collective::scatter;
        words_.reserve(2 * as_index(size) * (has_pairs ? as_index(size) : 1)); // for go_on(), too
        words_.assign(mine.size() * as_index(size), 0);
        std::copy(mine.begin(), mine.end(), words_.data() + mine.size() * as_index(rank));
    }
    /// Goes on to the tables of the same collective. False if it has none, or they were compared.
    [[nodiscard]] bool go_on(PartSizes const& sends, PartSizes const& expects) {
        if (!signature_.has_counts || std::exchange(has_tables_, true)) {
            return false;
        }
        words_.clear();
        for (int from = 0; from < size_; ++from) {
            for (int to = 0; to < size_; ++to) {
                if (has_part(from, to)) {
                    words_.push_back(from == rank_ ? sends[to] : 0);
                    words_.push_back(to == rank_ ? expects[from] : 0);
                }
            }
        }
        return true;
    }
    /// There is nothing more to compare, until the next begin().
    void end() noexcept { words_.clear(); }
    [[nodiscard]] bool is_over() const noexcept { return words_.empty(); }

    /// To be summed over all ranks, in place.
    [[nodiscard]] std::span<std::uint64_t> words() noexcept { return words_; }
    /// @pre ranks have summed the words
    [[nodiscard]] std::optional<AbortReason> difference() const {
        if (!has_tables_) {
            return difference_of_signatures(size_, words_);
        }
        auto const word = [&](int from, int to, int side) -> std::uint64_t {
            int const pair = signature_.collective == Collective::gather    ? from
                             : signature_.collective == Collective::scatter ? to
                                                                            : size_ * from + to;
            return has_part(from, to) ? words_[static_cast<std::size_t>(2 * pair + side)] : 0;
        };
        return find_difference_of_counts(
            size_,
            signature_,
            [&](int from, int to) { return word(from, to, 0); },
            [&](int from, int to) { return word(from, to, 1); }
        );
    }
    /// The counts of all ranks, as a Substitute takes them. @pre ranks have summed the tables
    [[nodiscard]] std::vector<std::size_t> known() const {
        std::vector<std::size_t> counts;
        for (std::size_t pair = 0; pair < words_.size(); pair += 2) {
            counts.push_back(words_[pair]);
        }
        return counts;
    }

private:
    /// Only the root has parts for others in a scatter, or gets some in a gather.
    [[nodiscard]] bool has_part(int from, int to) const noexcept {
        return signature_.collective == Collective::gather    ? to == signature_.root
               : signature_.collective == Collective::scatter ? from == signature_.root
                                                              : true;
    }

    Descriptor signature_;
    int rank_ = 0;
    int size_ = 0;
    bool has_tables_ = false;
    std::vector<std::uint64_t> words_;
};

/// `words` are an option of all ranks, 0 or 1, by rank. `option` is its name.
/// @throws Mismatch  ranks differ.
inline void check_same_option(
    std::vector<std::uint64_t> const& words, std::string_view option, bool is_renumbered = false
) {
    auto const others = ranks_where(static_cast<int>(words.size()), [&](int rank) {
        return words[as_index(rank)] != words[0];
    });
    if (!others.empty()) {
        throw Mismatch{
            others,
            concat(
                "options differ: ",
                option,
                words[0] != 0 ? ": rank 0 has true, rank " : ": rank 0 has false, rank ",
                others.front(),
                words[0] != 0 ? " has false" : " has true"
            ),
            is_renumbered
        };
    }
}

/// Collective. Whether all ranks compare collectives, because their options say so or JOINABLE_CHECK=collectives
/// does. `option` is the option's name, and `share(word)` returns the words of all ranks, by rank.
/// @throws Mismatch           ranks differ.
/// @throws ContractViolation  the variable has an unknown word; PeerFailed on the others.
template <class Share>
[[nodiscard]] bool agree_to_compare(
    bool by_options, std::string_view option, Share const& share, bool is_renumbered = false
) {
    constexpr std::uint64_t unknown = 2;
    bool compares = by_options;
    std::exception_ptr const error =
        exception_of([&] { compares = compares || RequestedChecks::read().collectives; });
    std::vector<std::uint64_t> words;
    try {
        words = share(error ? unknown : std::uint64_t{compares ? 1U : 0U});
    } catch (...) {
        std::rethrow_exception(error ? error : std::current_exception());
    }
    if (error) {
        std::rethrow_exception(error);
    }
    int const size = static_cast<int>(words.size());
    auto const failed =
        ranks_where(size, [&](int rank) { return words[as_index(rank)] == unknown; });
    if (!failed.empty()) {
        throw PeerFailed{
            failed, failure_text(failed, "JOINABLE_CHECK has an unknown word there"), is_renumbered
        };
    }
    check_same_option(words, concat(option, ", or JOINABLE_CHECK=collectives"), is_renumbered);
    return compares;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/device/copy_run.hpp

#ifndef JOINABLE_DEVICE_COPY_RUN_HPP_PART_1
#define JOINABLE_DEVICE_COPY_RUN_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// Copies elements that lie one after another: on the host at once, else in the order of submissions.
inline void copy_run(Device& device, void const* from, void* to, std::size_t count, DType dtype) {
    if (count == 0 || from == to) {
        return;
    }
    if (is_on_host(device)) {
        std::memcpy(to, from, count * size_of(dtype));
        return;
    }
    auto const all = [&](void* data) {
        return AnyView{data, dtype, Shape{count}, Shape{1}, device.id()};
    };
    device.copy(all(const_cast<void*>(from)), all(to));
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/substitute.hpp

#ifndef JOINABLE_COMMUNICATOR_SUBSTITUTE_HPP_PART_1
#define JOINABLE_COMMUNICATOR_SUBSTITUTE_HPP_PART_1

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

#endif

// ---- joinable/communicator/any/communicator.hpp

#ifndef JOINABLE_COMMUNICATOR_ANY_COMMUNICATOR_HPP_PART_1
#define JOINABLE_COMMUNICATOR_ANY_COMMUNICATOR_HPP_PART_1

namespace joinable { inline namespace v0 {

namespace detail {

template <class C>
concept names_transport = requires {
    { C::transport } -> std::convertible_to<std::string_view>;
};

/// A communicator as a BasicAnyCommunicator calls it.
class AnyInterface : public ControlCommunicator {
public:
    [[nodiscard]] virtual std::string_view transport() const = 0;
    [[nodiscard]] virtual AnyWork post(Request const& request, Provided const& provided) = 0;
    [[nodiscard]] virtual AnyWork send(ConstBuffer buffer, int to, int tag) = 0;
    [[nodiscard]] virtual AnyWork receive(Buffer buffer, int from, int tag) = 0;
    [[nodiscard]] virtual std::unique_ptr<AnyInterface> split(int color, int key) = 0;
    [[nodiscard]] virtual bool can_split() const = 0;
    [[nodiscard]] virtual bool is_in_reach(ConstBuffer buffer) const noexcept = 0;
    [[nodiscard]] virtual bool sums_pieces() const noexcept = 0;
    [[nodiscard]] virtual std::vector<int> missing_ranks() const = 0;
    [[nodiscard]] virtual Arena allocate(std::size_t bytes, std::size_t alignment) = 0;
    [[nodiscard]] virtual ModelTable* model_table() = 0;
    [[nodiscard]] virtual void* device_memory() = 0;
};

[[noreturn]] inline void lacks(std::string_view transport, std::string_view what) {
    throw ContractViolation{
        concat("a ", transport, " has no ", what, "; choose a transport that has it on all ranks")
    };
}

/// `Held` is a communicator or a reference to one.
template <class Held>
class AnyHeld : public ControlOver<Held, AnyInterface> {
    using Base = ControlOver<Held, AnyInterface>;
    using Comm = std::remove_reference_t<Held>;

public:
    using Base::Base;
    using Base::communicator;

    [[nodiscard]] std::string_view transport() const override {
        if constexpr (names_transport<Comm>) {
            return Comm::transport;
        } else {
            return class_name<Comm>();
        }
    }
    [[nodiscard]] AnyWork post(Request const& request, Provided const& provided) override {
        return by_members(
            communicator(),
            request,
            []<Work W>(W&& work) { return AnyWork{std::forward<W>(work)}; },
            [&](Collective collective) { return substituted(collective, request, provided); }
        );
    }
    [[nodiscard]] AnyWork send(ConstBuffer buffer, int to, int tag) override {
        if constexpr (has_send<Comm>) {
            return AnyWork{communicator().send(buffer, to, tag)};
        } else {
            lacks("messages between two ranks");
        }
    }
    [[nodiscard]] AnyWork receive(Buffer buffer, int from, int tag) override {
        if constexpr (has_receive<Comm>) {
            return AnyWork{communicator().receive(buffer, from, tag)};
        } else {
            lacks("messages between two ranks");
        }
    }
    [[nodiscard]] std::unique_ptr<AnyInterface> split(int color, int key) override {
        if constexpr (has_split<Comm>) {
            using Part = decltype(communicator().split(color, key));
            return std::make_unique<AnyHeld<Part>>([&] { return communicator().split(color, key); }
            );
        } else {
            check_color(color);
            if (!can_split()) {
                lacks("split()");
            }
            if (auto const reason = this->abort_reason()) { // a later one does not reach the group
                throw_failure(*reason);
            }
            return std::make_unique<AnyHeld<SelfCommunicator>>([] { return SelfCommunicator{}; });
        }
    }
    [[nodiscard]] bool can_split() const override {
        return detail::can_split(communicator()) ||
               (reduces_host_memory<Comm> && communicator().size() == 1);
    }
    [[nodiscard]] bool sums_pieces() const noexcept override {
        return detail::sums_pieces(communicator());
    }
    [[nodiscard]] bool is_in_reach([[maybe_unused]] ConstBuffer buffer) const noexcept override {
        if constexpr (has_sum_of_pieces<Comm>) {
            return communicator().is_in_reach(buffer);
        } else {
            return false;
        }
    }
    [[nodiscard]] std::vector<int> missing_ranks() const override {
        if constexpr (has_missing_ranks<Comm>) {
            return communicator().missing_ranks();
        } else {
            return {};
        }
    }
    [[nodiscard]] Arena allocate(std::size_t bytes, std::size_t alignment) override {
        return make_arena(communicator(), bytes, alignment);
    }
    [[nodiscard]] ModelTable* model_table() override {
        if constexpr (has_model_table<Comm>) {
            return communicator().model_table();
        } else {
            return nullptr;
        }
    }
    [[nodiscard]] void* device_memory() override {
        if constexpr (reduces_host_memory<Comm>) {
            return nullptr;
        } else {
            return std::addressof(communicator().device_memory());
        }
    }

private:
    [[noreturn]] static void lacks(std::string_view what) {
        detail::lacks(class_name<Comm>(), what);
    }
    [[nodiscard]] AnyWork
    substituted(Collective collective, Request const& request, Provided provided) {
        if constexpr (reduces_host_memory<Comm>) {
            std::vector<std::size_t> known;
            if (provided.known.empty() && tells_parts(request.signature)) {
                known = exchanged(request);
                provided.known = known;
            }
            return AnyWork{Substitute{communicator(), request, provided}};
        } else {
            lacks(name_of(collective));
        }
    }
    /// Collective; blocks.
    /// @throws Mismatch  on all ranks: their tables of counts differ. The communicator is aborted.
    [[nodiscard]] std::vector<std::size_t> exchanged(Request const& request) {
        Comparison counts;
        counts.begin(request.signature, communicator().rank(), communicator().size());
        static_cast<void>(counts.go_on(request.sends, request.expects));
        std::span<std::uint64_t> const words = counts.words();
        communicator().all_reduce({words.data(), words.size(), DType::u64}, ReduceOp::sum).wait();
        if (auto difference = counts.difference()) {
            difference->is_renumbered = this->is_renumbered();
            communicator().abort(*difference);
            throw_failure(communicator().abort_reason().value_or(*difference));
        }
        return counts.known();
    }
};

/// The first base, so that the communicator outlives the one that refers to it.
template <class Comm>
struct AnyOwned {
    std::unique_ptr<Comm> owned;
};
template <class Comm>
class AnyOwner final : AnyOwned<Comm>, public AnyHeld<Comm&> {
public:
    explicit AnyOwner(std::unique_ptr<Comm> comm)
        : AnyOwned<Comm>{std::move(comm)}, AnyHeld<Comm&>{*this->owned} {}
};

/// A communicator that a BasicAnyCommunicator takes.
template <class Comm, class Memory>
consteval bool fits_any() {
    static_assert(
        std::same_as<typename device_type_of<Comm>::type, Memory>,
        "BasicAnyCommunicator: this communicator moves memory of another device; AnyCommunicator is for host "
        "memory, and BasicAnyCommunicator<CudaDevice> for NCCL"
    );
    static_assert(
        TellsReason<Comm>,
        "BasicAnyCommunicator: expected members 'abort(AbortReason)', 'bool is_aborted()' and "
        "'std::optional<AbortReason> abort_reason() const'; use a communicator that models TellsReason"
    );
    return models_communicator<Comm>();
}

} // namespace detail

/// A communicator of any transport behind one type, for programs that choose the transport when they run, and
/// compile their training once.
///
/// @code
/// joinable::AnyCommunicator refers{comm};
/// joinable::AnyCommunicator owns{std::make_unique<joinable::MpiCommunicator>(MPI_COMM_WORLD)};
/// @endcode
///
/// A collective of the transport costs one virtual call more and allocates nothing more. In host memory, all_gather, gather, scatter,
/// all_to_all, reduce, reduce_scatter and scaled sums that the transport lacks are made of its all_reduce and
/// broadcast of whole buffers. A scaled sum then rounds each product to the dtype, in the buffer, before ranks compare
/// what they run. A gather, scatter or all_to_all by counts blocks in the call until all ranks have come, and
/// takes two words for each pair of ranks that exchange parts. Messages, split() and deadlines that the transport lacks are a
/// ContractViolation; a keep_alive() that it lacks does nothing. Everything else is as the transport documents it.
template <class DeviceType = HostDevice>
class BasicAnyCommunicator : public detail::Collectives<BasicAnyCommunicator<DeviceType>, AnyWork> {
public:
    using device_type = DeviceType;

    /// Refers to `comm`, which must outlive this object. Local.
    template <Communicator Comm>
        requires(!std::same_as<Comm, BasicAnyCommunicator>)
    explicit BasicAnyCommunicator(Comm& comm)
        : comm_{std::make_unique<detail::AnyHeld<Comm&>>(comm)} {
        static_assert(detail::fits_any<Comm, DeviceType>());
    }
    /// Owns `comm`. Local.
    /// @throws ContractViolation  the pointer is null.
    template <Communicator Comm>
    explicit BasicAnyCommunicator(std::unique_ptr<Comm> comm) {
        static_assert(detail::fits_any<Comm, DeviceType>());
        if (comm == nullptr) {
            throw ContractViolation{
                "AnyCommunicator: expected a std::unique_ptr to a communicator, given a null one"
            };
        }
        comm_ = std::make_unique<detail::AnyOwner<Comm>>(std::move(comm));
    }

    /// The transport's name, such as "mpi"; the name of the class if it names no `transport`.
    [[nodiscard]] std::string_view transport() const { return comm_->transport(); }

    [[nodiscard]] int rank() const { return comm_->rank(); }
    [[nodiscard]] int size() const { return comm_->size(); }

    /// Not collective. See SendsAndReceives.
    /// @throws ContractViolation  the transport has no messages.
    AnyWork send(ConstBuffer buffer, int to, int tag = 0) { return comm_->send(buffer, to, tag); }
    AnyWork receive(Buffer buffer, int from, int tag = 0) {
        return comm_->receive(buffer, from, tag);
    }
    /// Collective; blocks. See Splits.
    /// @throws ContractViolation  on all ranks: the transport cannot split.
    [[nodiscard]] BasicAnyCommunicator split(int color, int key) {
        return BasicAnyCommunicator{comm_->split(color, key)};
    }
    /// Local, the same on all ranks. Whether the transport can.
    [[nodiscard]] bool can_split() const { return comm_->can_split(); }

    /// Local. See Aborts and TellsReason.
    void abort(AbortReason const& reason) { comm_->abort(reason); }
    [[nodiscard]] bool is_aborted() const { return comm_->is_aborted(); }
    [[nodiscard]] std::optional<AbortReason> abort_reason() const { return comm_->abort_reason(); }
    /// Local. Whether its group numbers some ranks differently from the communicator that was split.
    [[nodiscard]] bool is_renumbered() const { return comm_->is_renumbered(); }
    /// Local. See HasDeadline.
    /// @throws ContractViolation  the transport has none.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) {
        auto const before = exchange_deadline(deadline);
        if (!before) {
            detail::lacks(transport(), "deadlines");
        }
        return *before;
    }
    /// Local. The same for callers that can do without: nothing if the transport has none.
    std::optional<std::chrono::nanoseconds> exchange_deadline(std::chrono::nanoseconds deadline) {
        return comm_->exchange_deadline(deadline);
    }
    /// Local. See RenewsDeadline. Does nothing, and returns false, if the transport cannot renew deadlines.
    bool keep_alive() { return comm_->keep_alive(); }
    /// The same, for callers that can do without. Guards call it, so a class that hides keep_alive()
    /// hides both.
    bool renew_deadline() { return keep_alive(); }
    /// Local. Empty if the transport does not report them.
    [[nodiscard]] std::vector<int> missing_ranks() const { return comm_->missing_ranks(); }

    /// Local. See make_arena().
    [[nodiscard]] Arena
    allocate(std::size_t bytes, std::size_t alignment = Arena::default_alignment) {
        return comm_->allocate(bytes, alignment);
    }
    [[nodiscard]] device_type& device_memory()
        requires(!std::same_as<DeviceType, HostDevice>)
    {
        return *static_cast<DeviceType*>(comm_->device_memory());
    }
    /// For participants that train a model.
    [[nodiscard]] detail::ModelTable* model_table() { return comm_->model_table(); }
    /// For reducers: see detail::has_sum_of_pieces.
    [[nodiscard]] bool is_in_reach(ConstBuffer buffer) const noexcept {
        return comm_->is_in_reach(buffer);
    }
    [[nodiscard]] bool sums_pieces() const noexcept { return comm_->sums_pieces(); }
    AnyWork sum_pieces(detail::BufferPieces const& buffer, double factor) {
        return post(this->requests().sum_pieces(buffer, factor));
    }
    /// For guards.
    [[nodiscard]] void const* identity() const noexcept { return comm_->address(); }

private:
    friend class detail::BasicCollectives<BasicAnyCommunicator, AnyWork>;

    explicit BasicAnyCommunicator(std::unique_ptr<detail::AnyInterface> comm)
        : comm_{std::move(comm)} {}
    [[nodiscard]] AnyWork post(detail::Request const& request) { return comm_->post(request, {}); }

    std::unique_ptr<detail::AnyInterface> comm_;
};

/// For transports of host memory.
using AnyCommunicator = BasicAnyCommunicator<HostDevice>;

}} // namespace joinable::v0

#endif

// ---- joinable/communicator/any/connect.hpp

namespace joinable { inline namespace v0 {

namespace detail {

template <class C>
concept is_launchable = Communicator<C> && names_transport<C> && requires {
    { C::is_launched() } -> std::same_as<bool>;
    { C::from_environment() } -> std::same_as<C>;
};

template <class Comm, class Memory>
consteval bool check_launchable() {
    static_assert(
        is_launchable<Comm>,
        "connect: a transport needs 'static constexpr std::string_view transport', 'static bool is_launched()' "
        "and 'static from_environment()'; threads have none, because run_threads() starts them"
    );
    static_assert(
        std::same_as<typename device_type_of<Comm>::type, Memory>,
        "connect: the transports move memory of different devices; name those of one"
    );
    return true;
}

} // namespace detail

/// Connects the ranks of a job by the transport of this name, or by the first one that was launched: what PyTorch's
/// init_process_group(backend) does. Collective; blocks. All ranks must choose the same.
///
/// @code
/// auto comm = joinable::connect<joinable::MpiCommunicator, joinable::ProcessCommunicator>(name);
/// @endcode
///
/// `C` is each of `Comms`.
/// | expression              | result      | meaning                                                      |
/// |-------------------------|-------------|--------------------------------------------------------------|
/// | `C::transport`          | string_view | static constexpr; its name, such as "mpi"                    |
/// | `C::is_launched()`      | bool        | static; local, without an exchange: this process seems to be |
/// |                         |             | one of its ranks; throws what the variables make it throw    |
/// | `C::from_environment()` | C           | static; collective: connects them                            |
/// @throws ContractViolation  no transport has that name; or none was launched.
/// @throws what from_environment() of the chosen one throws.
template <class First, class... Comms>
[[nodiscard]] auto connect(std::string_view transport = {}) {
    using Memory = typename detail::device_type_of<First>::type;
    static_assert(
        (detail::check_launchable<First, Memory>() && ... &&
         detail::check_launchable<Comms, Memory>())
    );
    std::optional<BasicAnyCommunicator<Memory>> comm;
    std::string names;
    auto const connects = [&]<class Comm>(std::type_identity<Comm>) {
        names += detail::concat(names.empty() ? "" : ", ", Comm::transport);
        if (transport.empty() ? Comm::is_launched() : transport == Comm::transport) {
            comm.emplace(std::unique_ptr<Comm>{new Comm(Comm::from_environment())});
        }
        return comm.has_value();
    };
    if (!(connects(std::type_identity<First>{}) || ... || connects(std::type_identity<Comms>{}))) {
        throw ContractViolation{
            transport.empty()
                ? detail::concat(
                      "expected that a launcher of one of these transports started this process: ",
                      names,
                      "; start the ranks by mpirun, torchrun or srun, which set one of ",
                      detail::own_environment().names_of_ranks(),
                      "; a transport between machines needs JOINABLE_ADDR or MASTER_ADDR, too, and "
                      "processes must be on one machine"
                  )
                : detail::concat(
                      "expected the name of one of these transports: ",
                      names,
                      "; given \"",
                      transport,
                      "\""
                  )
        };
    }
    return std::move(*comm);
}

}} // namespace joinable::v0

// ---- joinable/any_communicator.hpp

/// @file
/// A communicator of any transport behind one type, for programs that choose the transport when they run.
