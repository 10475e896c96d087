// SPDX-License-Identifier: BSL-1.0
#pragma once

// joinable in single headers, for projects that copy files. Generated from include/joinable by
// single_include/amalgamate.py: change the headers there, not this file.

#include <algorithm>
#include <array>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <initializer_list>
#include <memory>
#include <new>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <thread>
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

// ---- joinable/communicator/detail/polling.hpp

#ifndef JOINABLE_COMMUNICATOR_DETAIL_POLLING_HPP_PART_1
#define JOINABLE_COMMUNICATOR_DETAIL_POLLING_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// A pause between two polls of a wait. There is none at first, as long as `spins` says. Then the
/// wait yields, because others may need this core. After 10 ms it sleeps.
class PollPause {
public:
    explicit PollPause(std::chrono::nanoseconds spins) noexcept : spins_{spins} {}

    void operator()() {
        auto const now = std::chrono::steady_clock::now();
        if (began_at_ == std::chrono::steady_clock::time_point{}) {
            began_at_ = now;
        }
        if (now - began_at_ >= std::chrono::milliseconds{10}) {
            std::this_thread::sleep_for(std::chrono::microseconds{50});
        } else if (now - began_at_ >= spins_) {
            std::this_thread::yield();
        }
    }

private:
    std::chrono::nanoseconds spins_;
    std::chrono::steady_clock::time_point began_at_{};
};

/// How a caller proceeds with operations in flight.
enum class Waiting : std::uint8_t {
    blocks,
    tests, ///< ends by the deadline
    polls, ///< like tests, without a deadline
};

/// Whether `work` is complete, or there is none. Complete work is destroyed.
template <Work W>
[[nodiscard]] bool is_complete(std::optional<W>& work, Waiting waiting) {
    if (!work) {
        return true;
    }
    if (waiting == Waiting::blocks) {
        work->wait();
    } else if (waiting == Waiting::tests ? !work->test() : !make_progress(*work)) {
        return false;
    }
    work.reset();
    return true;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/hierarchical/detail/machines.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Which ranks are on which machine. They are numbered machine by machine, and by their local rank
/// on each. A machine has also a number among the machines, which is the rank of its leader there.
class Machines {
public:
    Machines() = default; ///< not known yet
    Machines(std::span<std::uint64_t const> sizes, int own) : own_{own} {
        for (std::uint64_t const size : sizes) {
            firsts_.push_back(firsts_.back() + static_cast<int>(size));
        }
    }

    [[nodiscard]] bool are_known() const noexcept { return firsts_.size() > 1; }
    [[nodiscard]] int count() const noexcept { return static_cast<int>(firsts_.size()) - 1; }
    [[nodiscard]] int ranks() const noexcept { return firsts_.back(); }
    [[nodiscard]] int own() const noexcept { return own_; }
    /// The rank of its leader.
    [[nodiscard]] int first_of(int machine) const noexcept {
        return firsts_[static_cast<std::size_t>(machine)];
    }
    [[nodiscard]] int machine_of(int rank) const noexcept {
        auto const after = std::upper_bound(firsts_.begin(), firsts_.end(), rank);
        return static_cast<int>(after - firsts_.begin()) - 1;
    }

    /// A reason that has this origin or a greater one names ranks of a communicator around these machines. A level of
    /// a group hears the reasons of the level that it was split from, so both count alike.
    [[nodiscard]] int first_origin_around() const noexcept {
        return (std::max)(ranks(), first_origin_around_);
    }
    /// These are machines of a group that was split from `parent`.
    void become_group_of(Machines const& parent) noexcept {
        first_origin_around_ = parent.first_origin_around();
    }

private:
    std::vector<int> firsts_{0}; ///< of each machine, then the number of ranks
    int own_ = 0;
    int first_origin_around_ = 0; ///< of the communicator that it is a group of
};

/// The levels on which ranks meet.
enum class Level : std::uint8_t { local, across };

/// Cuts a reason, so that it is the same on ranks which get it by abort().
[[nodiscard]] inline AbortReason cut(AbortReason reason) {
    constexpr std::size_t most_text = most_reason_text / 2; // MPI sends ranks in the same message
    constexpr std::size_t most_ranks = 300;                 // more are left out, on every rank
    if (reason.ranks.size() > most_ranks) {
        reason.ranks.resize(most_ranks);
    }
    reason.message = cut_text(std::move(reason.message), most_text);
    return reason;
}

/// The reason to abort a level with, on `rank` of all machines. It keeps the ranks of all machines.
/// See Machines::first_origin_around() for ranks of a communicator around this one.
[[nodiscard]] inline AbortReason to_level(AbortReason reason, int rank, Machines const& machines) {
    reason.origin = reason.origin < 0 ? rank : machines.first_origin_around() + reason.origin;
    return reason;
}

/// The same reason, by the ranks of all machines. If they have other numbers on the level where it
/// arose, the text says so.
[[nodiscard]] inline AbortReason
to_global(AbortReason reason, Level level, Machines const& machines) {
    if (reason.origin >= 0) { // from to_level()
        int const around = machines.first_origin_around();
        bool const is_around = machines.are_known() && reason.origin >= around;
        reason.origin = is_around ? reason.origin - around : -1;
        return reason;
    }
    if (reason.kind == FailureKind::communication || reason.kind == FailureKind::contract) {
        reason.ranks.clear(); // as on ranks that learn of it by its exception
    }
    int const own = machines.own();
    int const first = machines.first_of(own);
    int const numbers = !machines.are_known()    ? 0
                        : level == Level::across ? machines.count()
                                                 : machines.first_of(own + 1) - first;
    // A group around this level may number its ranks differently.
    if (std::any_of(reason.ranks.begin(), reason.ranks.end(), [&](int rank) {
            return rank < 0 || rank >= numbers;
        })) {
        reason.ranks.clear();
        return cut(std::move(reason));
    }
    bool is_same = level == Level::across || first == 0;
    for (int& rank : reason.ranks) {
        int const number = level == Level::local ? first + rank : machines.first_of(rank);
        is_same = is_same && number == rank;
        rank = number;
    }
    if (!is_same && level == Level::local) {
        std::string const where = concat(
            "on machine ", own, ", which counts its ranks from ", first, " on as 0, 1, ...: "
        );
        reason.message = where + reason.message;
    } else if (!is_same) {
        reason.message = ranks_text(reason.ranks) +
                         concat(
                             reason.ranks.size() == 1 ? " leads a machine" : " lead machines",
                             ", and machines are counted here: ",
                             reason.message
                         );
    }
    return cut(std::move(reason));
}

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/hierarchical/options.hpp

namespace joinable { inline namespace v0 {

/// How a HierarchicalCommunicator behaves. The same on all ranks.
struct HierarchicalOptions {
    /// Ranks of all machines compare what they are about to do before data moves: collective,
    /// dtype, operation, root, count and tables of counts. If it differs, all throw Mismatch, which
    /// names the ranks. This puts a sum of two words per rank before each collective, and one of two
    /// words for each pair of ranks before those with tables. A rank posts what follows inside its
    /// own waits and tests. Without it each level compares what it is asked for: see
    /// HierarchicalCommunicator.
    /// JOINABLE_CHECK=collectives turns it on, too. Ranks agree on it when they make a communicator.
    bool check = false;
};

}} // namespace joinable::v0

// ---- joinable/communicator/hierarchical/detail/groups.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The communicators of a rank. `across` is null on ranks that do not lead their machine, and
/// on all ranks of a group on one machine.
struct Levels {
    std::unique_ptr<AnyInterface> local;
    std::unique_ptr<AnyInterface> across;
    HierarchicalOptions options;
    // The parts of a group, which split() makes.
    Machines machines = {};
    std::function<std::optional<AbortReason>()> parent = {
    }; ///< why its ranks have ended, if they have
    bool is_renumbered = false; ///< see Communicator
    bool can_split = true;      ///< all ranks can; the same on all of them

    /// Whether this rank can.
    [[nodiscard]] bool can_split_here() const {
        return local->can_split() && (across == nullptr || across->can_split());
    }
};

/// The machines of this rank's group, with those of its ranks that are in it.
/// @throws ContractViolation  on all ranks: some group cannot be made of these machines. All groups
///                            are checked, so that all ranks find the same.
[[nodiscard]] inline Machines
machines_of_group(std::span<GroupChoice const> choices, Machines const& machines, int rank) {
    std::set<std::int32_t> colors;
    for (GroupChoice const& choice : choices) {
        colors.insert(choice.color);
    }
    Machines result;
    for (std::int32_t const color : colors) {
        std::vector<std::uint64_t> sizes; // of the group's machines
        std::vector<int> heads;           // the first rank of each of them
        int own = -1;
        for (int const member : members_of(choices, color)) {
            int const machine = machines.machine_of(member);
            if (heads.empty() || machines.machine_of(heads.back()) != machine) {
                if (std::any_of(heads.begin(), heads.end(), [&](int head) {
                        return machines.machine_of(head) == machine;
                    })) {
                    throw ContractViolation{concat(
                        "split needs keys that keep the ranks of a machine next to each other, but in "
                        "the group of color ",
                        color,
                        " rank ",
                        member,
                        " of machine ",
                        machine,
                        " comes after ranks of another machine"
                    )};
                }
                sizes.push_back(0);
                heads.push_back(member);
            }
            ++sizes.back();
            own = member == rank ? static_cast<int>(heads.size()) - 1 : own;
        }
        for (int const head : heads) {
            int const machine = machines.machine_of(head);
            if (heads.size() > 1 && head != machines.first_of(machine)) {
                throw ContractViolation{concat(
                    "split needs the leader of each machine, if a group has ranks of several, because "
                    "leaders alone are connected; but in the group of color ",
                    color,
                    " the first rank of machine ",
                    machine,
                    " is rank ",
                    head,
                    ", and its leader is rank ",
                    machines.first_of(machine)
                )};
            }
        }
        if (own >= 0) {
            result = Machines{sizes, own};
        }
    }
    return result;
}

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/hierarchical/detail/level_plan.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Bytes that a leader copies within its memory. Source and destination do not overlap.
struct LeadersCopy {
    std::byte* to;
    std::byte const* from;
    std::size_t bytes;
};

/// A collective of one level, which is a part of one of all ranks. Or, if it has copies, only these.
struct LevelStep {
    Level level = Level::local;
    Descriptor signature = {}; ///< with counts if parts differ
    ConstBuffer in = {};       ///< as `out` if the collective is in place
    Buffer out = {};
    std::vector<std::size_t> counts = {}; ///< of each rank of the level
    std::vector<std::size_t> pairs = {
    }; ///< in an all_to_all: from each rank, then from each to each
    Buffer memory = {}; ///< of what replaces it
    std::vector<LeadersCopy> copies = {};
};

[[nodiscard]] inline AnyWork start_step(AnyInterface& level, LevelStep const& step) {
    PartSizes const parts = PartSizes::of(step.counts);
    bool const exchanges = step.signature.collective == Collective::all_to_all;
    return level.post(
        {step.signature, step.in, step.out, parts, exchanges ? PartSizes::of(step.pairs) : parts},
        {exchanges ? Counts{step.pairs}.subspan(step.counts.size()) : step.counts, step.memory}
    );
}

/// Divides a collective of all ranks into the steps of one rank on its levels. On each machine a
/// step moves data from its ranks to the leader or back; the leaders' steps are between these.
class LevelPlan {
public:
    /// `parts` has the elements of each rank, if ranks have parts. In an all_to_all by counts it has
    /// those from rank 0 to each, then those from rank 1, and so on. A leader's steps use `scratch`
    /// until they are done.
    LevelPlan(
        Machines const& machines,
        AnyInterface& local,
        Request const& request,
        std::span<std::size_t const> parts,
        Arena& scratch
    )
        : machines_{machines}, local_{local}, signature_{request.signature}, in_{request.in},
          out_{request.out}, parts_{parts}, scratch_{scratch} {}

    [[nodiscard]] std::vector<LevelStep> steps() && {
        switch (signature_.collective) {
        case Collective::broadcast: broadcast(); break;
        case Collective::reduce: reduce(); break;
        case Collective::all_gather: all_gather(); break;
        case Collective::reduce_scatter:
        case Collective::scaled_reduce_scatter: reduce_scatter(); break;
        case Collective::gather: gather(); break;
        case Collective::scatter: scatter(); break;
        case Collective::all_to_all: all_to_all(); break;
        default: all_reduce();
        }
        return std::move(steps_);
    }

private:
    /// Neighbours.
    struct Ranks {
        int begin;
        int end;
    };

    void broadcast() {
        LevelStep across = spread(Level::across, out_, root_machine());
        LevelStep local = spread(Level::local, out_, has_root_here() ? local_root() : 0);
        if (has_root_here(
            )) { // also from the leader: so its machine compares before others get data
            std::swap(across, local);
        }
        take(std::move(across));
        take(std::move(local));
    }
    void all_reduce() {
        if (is_scaled(signature_.collective)) {
            sum_on_machine(out_, out_);
        } else {
            take(in_place(Level::local, Collective::reduce, out_));
        }
        take(in_place(Level::across, Collective::all_reduce, out_));
        take(spread(Level::local, out_));
    }
    void reduce() {
        Buffer const sum = at_leader(in_.count, has_root() ? out_ : Buffer{});
        sum_on_machine(sum);
        take(in_place(Level::across, Collective::reduce, sum, root_machine()));
        give_to_root(sum);
    }
    void reduce_scatter() {
        Buffer const sum = at_leader(in_.count);
        sum_on_machine(sum);
        LevelStep across = by_machines(Collective::reduce_scatter, sum, part_of(sum));
        across.memory = sum;
        take(std::move(across));
        take(by_ranks(Collective::scatter, part_of(sum), out_));
    }
    void all_gather() {
        Buffer const all = at_leader(out_.count, out_);
        take(by_ranks(Collective::gather, in_, part_of(all)));
        take(by_machines(Collective::all_gather, part_of(all), all));
        take(spread(Level::local, out_));
    }
    void gather() {
        Buffer const all = at_leader(has_root_here() ? sum_of(parts_) : own_parts(), out_);
        Buffer const part = has_root_here() ? part_of(all) : all;
        take(by_ranks(Collective::gather, in_, part));
        take(by_machines(Collective::gather, part, has_root_here() ? all : none(), root_machine()));
        give_to_root(all);
    }
    void scatter() {
        Buffer const all = at_leader(has_root_here() ? sum_of(parts_) : own_parts(), readable(in_));
        Buffer part = has_root_here() ? part_of(all) : all;
        if (has_root() && machines_.count() > 1) { // a level may write there, even what it holds
            part = at_leader(own_parts());
        }
        if (has_root_here() && local_root() != 0) {
            LevelStep step = at_one(Collective::gather, local_root(), sum_of(parts_));
            step.in = has_root() ? in_ : none();
            step.out = all;
            take(std::move(step));
        }
        take(by_machines(Collective::scatter, has_root_here() ? all : none(), part, root_machine())
        );
        take(by_ranks(Collective::scatter, part, out_));
    }

    /// Leaders exchange blocks. A block has what one machine's ranks send to another's, by sender,
    /// then by receiver. Before that a leader makes blocks of what its ranks send, and afterwards
    /// what each of them receives.
    void all_to_all() {
        Ranks const own = ranks_at(machines_.own());
        Ranks const all{0, machines_.ranks()};
        std::size_t const sent = between(own, all);
        std::size_t const received = between(all, own);
        std::size_t const most = (std::max)(sent, received);
        Buffer const memory = at_leader(2 * most);
        Buffer const whole = within(memory, 0, most);
        Buffer const blocks = within(memory, is_leader() ? most : 0, most);

        take(by_ranks(Collective::gather, in_, within(whole, 0, sent), [&](Ranks rank) {
            return between(rank, all);
        }));
        if (is_leader()) {
            if (machines_.count() > 1) { // else its ranks have sent the one block
                make_blocks(whole, blocks);
                exchange_blocks(within(blocks, 0, sent), within(whole, 0, received));
            }
            make_parts(whole, blocks);
        }
        take(by_ranks(Collective::scatter, within(blocks, 0, received), out_, [&](Ranks rank) {
            return between(all, rank);
        }));
    }
    void exchange_blocks(Buffer blocks, Buffer arrived) {
        LevelStep step = in_place(Level::across, Collective::all_to_all, arrived);
        step.signature.has_counts = true;
        step.in = blocks;
        for (int other = 0; other < machines_.count(); ++other) {
            step.counts.push_back(between(ranks_at(machines_.own()), ranks_at(other)));
            step.pairs.push_back(between(ranks_at(other), ranks_at(machines_.own())));
        }
        for (int from = 0; from < machines_.count(); ++from) {
            for (int to = 0; to < machines_.count(); ++to) {
                step.pairs.push_back(between(ranks_at(from), ranks_at(to)));
            }
        }
        take(std::move(step));
    }
    /// From what each rank of this machine sends.
    void make_blocks(Buffer whole, Buffer blocks) {
        Ranks const own = ranks_at(machines_.own());
        std::vector<std::size_t> next; // of each rank, in `whole`
        for (int from = own.begin; from < own.end; ++from) {
            next.push_back(between({own.begin, from}, {0, machines_.ranks()}));
        }
        std::size_t written = 0;
        LevelStep step;
        for (int machine = 0; machine < machines_.count(); ++machine) {
            for (int from = own.begin; from < own.end; ++from) {
                std::size_t const count = between({from, from + 1}, ranks_at(machine));
                std::size_t& read = next[static_cast<std::size_t>(from - own.begin)];
                add_copy(step, within(blocks, written, count), within(whole, read, count));
                read += count;
                written += count;
            }
        }
        take_copies(std::move(step));
    }
    /// To what each rank of this machine receives.
    void make_parts(Buffer blocks, Buffer whole) {
        Ranks const own = ranks_at(machines_.own());
        std::vector<std::size_t> next; // of each rank, in `whole`
        for (int to = own.begin; to < own.end; ++to) {
            next.push_back(between({0, machines_.ranks()}, {own.begin, to}));
        }
        std::size_t read = 0;
        LevelStep step;
        for (int machine = 0; machine < machines_.count(); ++machine) {
            Ranks const those = ranks_at(machine);
            for (int from = those.begin; from < those.end; ++from) {
                for (int to = own.begin; to < own.end; ++to) {
                    std::size_t const count = between({from, from + 1}, {to, to + 1});
                    std::size_t& written = next[static_cast<std::size_t>(to - own.begin)];
                    add_copy(step, within(whole, written, count), within(blocks, read, count));
                    read += count;
                    written += count;
                }
            }
        }
        take_copies(std::move(step));
    }

    // -- steps of several of them -----------------------------------------------------------------

    /// Sums the inputs of a machine at its leader. The others' inputs do not change, unless they are `memory`.
    void sum_on_machine(Buffer sum, Buffer memory = {}) {
        LevelStep step = at_one(
            is_scaled(signature_.collective) ? Collective::scaled_reduce_scatter
                                             : Collective::reduce_scatter,
            0,
            in_.count
        );
        step.in = in_;
        step.out = is_leader() ? sum : none();
        step.memory = memory;
        take(std::move(step));
    }
    /// On the root's machine, if its leader has it and is another rank.
    void give_to_root(Buffer all) {
        if (has_root_here() && local_root() != 0) {
            std::size_t const count =
                signature_.collective == Collective::reduce ? in_.count : sum_of(parts_);
            LevelStep step = at_one(Collective::scatter, local_root(), count);
            step.in = all;
            step.out = has_root() ? out_ : none();
            take(std::move(step));
        }
    }

    // -- one step ---------------------------------------------------------------------------------

    [[nodiscard]] LevelStep
    in_place(Level level, Collective collective, Buffer buffer, int root = 0) const {
        Descriptor signature = signature_; // with its operation and factor
        signature.collective = collective;
        signature.root = root;
        return {level, signature, buffer, buffer};
    }
    [[nodiscard]] LevelStep spread(Level level, Buffer buffer, int root = 0) const {
        return in_place(level, Collective::broadcast, buffer, root);
    }
    /// With the parts of this machine's ranks.
    [[nodiscard]] LevelStep by_ranks(Collective collective, ConstBuffer in, Buffer out) const {
        return by_ranks(collective, in, out, [&](Ranks rank) {
            return parts_[static_cast<std::size_t>(rank.begin)];
        });
    }
    /// With parts of `count_of(rank)` elements.
    template <class F>
    [[nodiscard]] LevelStep
    by_ranks(Collective collective, ConstBuffer in, Buffer out, F const& count_of) const {
        LevelStep step = in_place(Level::local, collective, out);
        step.in = in;
        Ranks const own = ranks_at(machines_.own());
        for (int rank = own.begin; rank < own.end; ++rank) {
            step.counts.push_back(count_of(Ranks{rank, rank + 1}));
        }
        return step;
    }
    /// With the parts of machines.
    [[nodiscard]] LevelStep
    by_machines(Collective collective, ConstBuffer in, Buffer out, int root = 0) const {
        LevelStep step = in_place(Level::across, collective, out, root);
        step.signature.has_counts = true;
        step.in = in;
        for (int machine = 0; machine < machines_.count(); ++machine) {
            step.counts.push_back(sum_of(ranks_of(machine)));
        }
        return step;
    }
    /// All elements are one local rank's.
    [[nodiscard]] LevelStep at_one(Collective collective, int rank, std::size_t count) const {
        LevelStep step = in_place(Level::local, collective, {});
        step.signature.has_counts = true;
        step.counts.resize(static_cast<std::size_t>(local_.size()));
        step.counts[static_cast<std::size_t>(rank)] = count;
        return step;
    }
    /// Keeps a step that this rank takes part in, unless it has nobody to exchange data with.
    void take(LevelStep&& step) {
        bool const is_local = step.level == Level::local;
        bool const is_alone = is_local ? local_.size() == 1 : machines_.count() == 1;
        bool const is_done =
            is_alone && step.in.data == step.out.data && !is_scaled(step.signature.collective);
        if ((is_local || is_leader()) && !is_done) {
            steps_.push_back(std::move(step));
        }
    }

    static void add_copy(LevelStep& step, Buffer to, Buffer from) {
        auto* const data = static_cast<std::byte*>(to.data);
        auto const* const read = static_cast<std::byte const*>(from.data);
        if (!step.copies.empty()) {
            LeadersCopy& last = step.copies.back();
            if (last.to + last.bytes == data && last.from + last.bytes == read) {
                last.bytes += to.bytes();
                return;
            }
        }
        if (to.count != 0) {
            step.copies.push_back({data, read, to.bytes()});
        }
    }
    void take_copies(LevelStep step) {
        if (!step.copies.empty()) {
            steps_.push_back(std::move(step));
        }
    }

    // -- places -----------------------------------------------------------------------------------

    [[nodiscard]] bool is_leader() const { return local_.rank() == 0; }
    [[nodiscard]] int root_machine() const { return machines_.machine_of(signature_.root); }
    [[nodiscard]] bool has_root_here() const { return root_machine() == machines_.own(); }
    [[nodiscard]] int local_root() const {
        return signature_.root - machines_.first_of(machines_.own());
    }
    [[nodiscard]] bool has_root() const { return has_root_here() && local_root() == local_.rank(); }

    [[nodiscard]] Buffer none() const { return {nullptr, 0, signature_.dtype}; }
    /// Memory of a leader: what the caller gave, if it has so many elements, else scratch.
    [[nodiscard]] Buffer at_leader(std::size_t count, Buffer given = {}) {
        if (!is_leader()) {
            return none();
        }
        if (given.data != nullptr && given.count == count) {
            return given;
        }
        std::size_t const bytes = count * size_of(signature_.dtype);
        if (scratch_.bytes() < bytes) {
            scratch_ = Arena{}; // first: both need not fit
            scratch_ = local_.allocate(bytes, Arena::default_alignment);
        }
        return {scratch_.data(), count, signature_.dtype};
    }
    /// The parts of this machine's ranks in the parts of all, which only leaders have.
    [[nodiscard]] Buffer part_of(Buffer all) const {
        auto const first = static_cast<std::size_t>(machines_.first_of(machines_.own()));
        return within(all, offset_of(parts_, first), own_parts());
    }
    /// So many elements of a leader's memory.
    [[nodiscard]] Buffer within(Buffer memory, std::size_t first, std::size_t count) const {
        return is_leader() ? detail::within(memory, first, count) : none();
    }

    [[nodiscard]] std::span<std::size_t const> ranks_of(int machine) const {
        int const first = machines_.first_of(machine);
        return parts_.subspan(
            static_cast<std::size_t>(first),
            static_cast<std::size_t>(machines_.first_of(machine + 1) - first)
        );
    }
    [[nodiscard]] std::size_t own_parts() const { return sum_of(ranks_of(machines_.own())); }
    [[nodiscard]] Ranks ranks_at(int machine) const {
        return {machines_.first_of(machine), machines_.first_of(machine + 1)};
    }
    /// The elements that some ranks send to others in an all_to_all.
    [[nodiscard]] std::size_t between(Ranks from, Ranks to) const {
        auto const senders = static_cast<std::size_t>(from.end - from.begin);
        auto const receivers = static_cast<std::size_t>(to.end - to.begin);
        if (!signature_.has_counts) {
            return senders * receivers * signature_.count;
        }
        std::size_t sum = 0;
        for (std::size_t sender = 0; sender < senders; ++sender) {
            std::size_t const row = (static_cast<std::size_t>(from.begin) + sender) *
                                    static_cast<std::size_t>(machines_.ranks());
            sum += sum_of(parts_.subspan(row + static_cast<std::size_t>(to.begin), receivers));
        }
        return sum;
    }

    Machines const& machines_;
    AnyInterface& local_;
    Descriptor signature_;
    ConstBuffer in_;
    Buffer out_;
    std::span<std::size_t const> parts_;
    Arena& scratch_;
    std::vector<LevelStep> steps_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/hierarchical/detail/engine.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The collectives of one rank. Local rank 0 leads its machine: it takes part in both levels, one
/// collective after another, and carries failures from level to level. The other ranks post at once
/// what they do on their machine, unless they compare first.
///
/// A wait on one level does not end when the other level fails, so a leader polls both. While it polls,
/// it tells both levels that it is alive. So only the ranks of its own machine name a late rank, and all
/// ranks get that reason.
class HierarchicalEngine : public HasWorks {
public:
    /// Collective, unless the levels are a group's: split() has met.
    explicit HierarchicalEngine(Levels levels)
        : levels_{std::move(levels)}, local_{*levels_.local}, across_{levels_.across.get()},
          machines_{levels_.machines}, parent_{levels_.parent} {
        find_deadline();
        if (!machines_.are_known()) {
            meet();
        }
    }
    HierarchicalEngine(HierarchicalEngine const&) = delete;
    HierarchicalEngine& operator=(HierarchicalEngine const&) = delete;

    [[nodiscard]] AnyInterface& local() const noexcept { return local_; }
    [[nodiscard]] Machines const& machines() const noexcept { return machines_; }
    [[nodiscard]] int rank() const { return machines_.first_of(machines_.own()) + local_.rank(); }
    [[nodiscard]] int size() const noexcept { return machines_.ranks(); }

    /// Returns the collective's number, for the other members.
    /// @throws the error that ended the engine.
    [[nodiscard]] std::uint64_t post(Request const& request) {
        if (failure_) {
            throw_failure(in_words_of(rank(), request.signature.text(), *failure_));
        }
        hear_parent();
        std::uint64_t const number = done_ + operations_.size();
        operations_.emplace_back(request, machines_.ranks());
        if (is_leader()) {
            (void)advance(number, Waiting::polls); // earlier ones
        } else {
            start_posted();
        }
        return number;
    }
    [[nodiscard]] bool is_done(std::uint64_t number) const noexcept { return number < done_; }
    void finish(std::uint64_t number) {
        if (has_two_levels() || parent_) {
            for (PollPause pause{std::chrono::microseconds{20}}; !advance(number, Waiting::tests);
                 pause()) {
            }
        } else {
            (void)advance(number, Waiting::blocks);
        }
    }
    [[nodiscard]] bool test(std::uint64_t number) { return advance(number, Waiting::tests); }
    [[nodiscard]] bool progress(std::uint64_t number) { return advance(number, Waiting::polls); }

    /// The same on all ranks.
    [[nodiscard]] bool can_split() const noexcept { return levels_.can_split; }
    /// Collective; blocks. Makes the group of one rank, when ranks know the choices of all: its
    /// `members`, in its order.
    /// @throws ContractViolation  on all ranks, which can go on: a level refuses a group.
    [[nodiscard]] Levels
    split(GroupChoice choice, Machines group, std::vector<int> const& members) {
        group.become_group_of(machines_);
        Levels levels{
            nullptr, nullptr, options(), group, [this] { return heard(); }, renumbers(members)
        };
        std::exception_ptr refusal; // the ranks of that level go on
        auto const part_of = [&](Level level, AnyInterface& whole, int key) {
            return on_level(level, [&]() -> std::unique_ptr<AnyInterface> {
                try {
                    return whole.split(choice.color, key);
                } catch (ContractViolation const&) {
                    end_by(reason_on(whole, level));
                    refusal = std::current_exception();
                    return nullptr;
                }
            });
        };
        levels.local = part_of(Level::local, local_, choice.key);
        if (across_ != nullptr) { // one group for each color, in the order of the group's machines
            levels.across = part_of(Level::across, *across_, group.own());
        }
        if (group.count() == 1) { // any of its ranks may be the first one
            levels.across.reset();
        }
        enum Answer : std::uint64_t { can, cannot, refused };
        // By rank: whether its part can split again.
        std::vector<std::uint64_t> answers(as_index(size()));
        answers[as_index(rank())] = refusal ? refused : levels.can_split_here() ? can : cannot;
        share_answers(answers);
        if (auto const others = std::count(answers.begin(), answers.end(), refused); others != 0) {
            levels.across.reset(); // before an exception is under way, which would abort them
            levels.local.reset();
            if (refusal) {
                std::rethrow_exception(refusal);
            }
            throw ContractViolation{concat(
                "split was refused by the communicator of a machine's ranks, or of the leaders, on ",
                others,
                " other ranks, which throw why: choose groups that each level can make"
            )};
        }
        levels.can_split = std::none_of(members.begin(), members.end(), [&](int member) {
            return answers[as_index(member)] == cannot;
        });
        return levels;
    }

    /// Local. Why all ranks have ended, also if no collective of theirs is under way, and tells both
    /// levels. A rank that has left does not end the groups of the others.
    [[nodiscard]] std::optional<AbortReason> heard() {
        auto reason = failure_;
        if (!reason && parent_) {
            reason = parent_();
        }
        if (!reason) {
            reason = reason_on_levels();
        }
        if (!reason || reason->has_left) {
            return std::nullopt;
        }
        abort(*reason);
        return failure_;
    }

    /// All ranks throw the first reason that reaches them.
    void abort(AbortReason const& reason) {
        if (!failure_) {
            failure_ = here(cut(reason));
        }
        on_levels([&](AnyInterface& level) { level.abort(to_level(*failure_, rank(), machines_)); }
        );
    }
    [[nodiscard]] bool is_aborted() const {
        return failure_ || local_.is_aborted() || (across_ != nullptr && across_->is_aborted()) ||
               (parent_ && parent_());
    }

    /// The first reason that this rank has heard, by the ranks of all machines.
    [[nodiscard]] std::optional<AbortReason> abort_reason() const {
        auto reason = failure_;
        if (!reason) {
            reason = reason_on_levels();
        }
        if (!reason && parent_) {
            reason = parent_();
        }
        return reason ? std::optional{here(*std::move(reason))} : reason;
    }
    [[nodiscard]] bool is_renumbered() const noexcept { return levels_.is_renumbered; }

    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) {
        on_levels([&](AnyInterface& level) { // before one of them is changed
            if (!own_deadline(level) && level.size() > 1) {
                lacks(level.transport(), "deadlines");
            }
        });
        bool const is_first = deadline == first_deadline_; // a guard puts it back
        on_levels([&](AnyInterface& level) {
            level.exchange_deadline(is_first ? own_deadline(level).value_or(deadline) : deadline);
        });
        return std::exchange(deadline_, deadline);
    }
    void keep_alive() {
        on_levels([](AnyInterface& level) { level.keep_alive(); });
    }
    [[nodiscard]] std::vector<int> missing_ranks() const {
        std::vector<int> ranks = local_.missing_ranks();
        for (int& rank : ranks) {
            rank += machines_.first_of(machines_.own());
        }
        if (across_ != nullptr) {
            for (int const machine : across_->missing_ranks()) {
                ranks.push_back(machines_.first_of(machine));
            }
        }
        std::sort(ranks.begin(), ranks.end());
        return ranks;
    }

private:
    /// The next step of a collective. Its steps are known when it begins: leaders have one scratch.
    enum class Stage : std::uint8_t { posted, comparing, moving };

    struct Operation {
        Operation(Request const& asked, int ranks) : request{asked} {
            if (request.signature.has_counts) { // the caller's tables may end
                kept.keep(request.sends, request.expects, ranks);
            }
        }
        explicit Operation(std::vector<LevelStep> all)
            : stage{Stage::moving}, steps{std::move(all)} {}

        Request request;
        KeptTables kept;
        Stage stage = Stage::posted;
        Comparison comparison;
        std::vector<std::size_t> parts; ///< of ranks, if they have some: see LevelPlan
        std::vector<LevelStep> steps;   ///< of this stage
        std::size_t started = 0;
        std::vector<std::pair<Level, std::optional<AnyWork>>> running;
    };

    [[nodiscard]] bool is_leader() const { return local_.rank() == 0; }
    /// Whether this rank waits for others on both levels. If not, it may block.
    [[nodiscard]] bool has_two_levels() const {
        return local_.size() > 1 && across_ != nullptr && across_->size() > 1;
    }

    [[nodiscard]] HierarchicalOptions const& options() const noexcept { return levels_.options; }
    template <class F>
    void on_levels(F const& f) const {
        f(local_);
        if (across_ != nullptr) {
            f(*across_);
        }
    }
    /// The deadline that a level had at first, if it has deadlines.
    [[nodiscard]] std::optional<std::chrono::nanoseconds>& own_deadline(AnyInterface const& level) {
        return own_deadlines_[&level == &local_ ? 0 : 1];
    }
    /// The shorter one, if both levels have one.
    void find_deadline() {
        std::optional<std::chrono::nanoseconds> shorter;
        on_levels([&](AnyInterface& level) {
            auto& own = own_deadline(level);
            own = level.exchange_deadline(deadline_);
            if (own) {
                level.exchange_deadline(*own);
                shorter = (std::min)(shorter.value_or(*own), *own);
            }
        });
        first_deadline_ = deadline_ = shorter.value_or(deadline_);
    }

    // -- meeting ----------------------------------------------------------------------------------

    void meet() {
        std::array<std::uint64_t, 2> wrong{
            is_leader() && across_ == nullptr ? 1U : 0U,
            !is_leader() && across_ != nullptr ? 1U : 0U
        };
        run({step(Level::local, Collective::all_reduce, wrong)});
        if (wrong[0] != 0) {
            fail(
                {FailureKind::contract,
                 {},
                 "expected a communicator of the machines' leaders on local rank 0, which leads its "
                 "machine, but it has none"}
            );
        }
        if (wrong[1] != 0) {
            fail(
                {FailureKind::contract,
                 {},
                 concat(
                     "expected a communicator of the machines' leaders on local rank 0 alone, but ",
                     wrong[1],
                     " other ranks of its machine have one: leave the optional empty there"
                 )}
            );
        }
        std::array<std::uint64_t, 2> place{};
        if (across_ != nullptr) {
            place = {
                static_cast<std::uint64_t>(across_->size()),
                static_cast<std::uint64_t>(across_->rank())
            };
        }
        run({step(Level::local, Collective::broadcast, place)});
        // The last one counts leaders that cannot split a level.
        std::vector<std::uint64_t> sizes(place[0] + 1);
        if (is_leader()) {
            sizes[place[1]] = static_cast<std::uint64_t>(local_.size());
            sizes.back() = levels_.can_split_here() ? 0 : 1;
        }
        run({
            step(Level::across, Collective::all_reduce, sizes),
            step(Level::local, Collective::broadcast, sizes),
        });
        levels_.can_split = sizes.back() == 0;
        sizes.pop_back();
        machines_ = Machines{sizes, static_cast<int>(place[1])};
        auto const share = [&](std::uint64_t word) {
            std::vector<std::uint64_t> words(as_index(machines_.ranks()));
            words[as_index(rank())] = word;
            Buffer const buffer{words.data(), words.size(), DType::u64};
            finish(post(RequestsOf{rank(), size()}.all_reduce(buffer, ReduceOp::sum)));
            return words;
        };
        bool const compares = std::exchange(levels_.options.check, false); // not this sum
        levels_.options.check = agree_to_compare(compares, "HierarchicalOptions::check", share);
    }
    template <class Words>
    [[nodiscard]] static LevelStep step(Level level, Collective collective, Words& words) {
        Buffer const buffer{words.data(), words.size(), DType::u64};
        return {level, {collective, DType::u64}, buffer, buffer};
    }
    void run(std::initializer_list<LevelStep> steps) {
        std::vector<LevelStep> taken;
        for (LevelStep const& step : steps) {
            if (step.level == Level::local ? local_.size() > 1
                                           : across_ != nullptr && across_->size() > 1) {
                taken.push_back(step);
            }
        }
        operations_.emplace_back(std::move(taken));
        finish(done_);
    }

    /// Collective. Sums answers to split(). A leader may arrive one deadline late: while it is in
    /// split() of the leaders, it gives no sign of life.
    void share_answers(std::vector<std::uint64_t>& answers) {
        Request request = RequestsOf{rank(), size()}.all_reduce(
            {answers.data(), answers.size(), DType::u64}, ReduceOp::sum
        );
        request.signature.collective = split_collective; // errors call it so
        constexpr std::chrono::nanoseconds longest = (std::chrono::nanoseconds::max)();
        auto const before = is_leader()
                                ? std::nullopt
                                : local_.exchange_deadline(2 * (std::min)(deadline_, longest / 2));
        finish(post(request)); // if this throws, no rank waits on this level again
        if (before) {
            local_.exchange_deadline(*before);
        }
    }

    // -- collectives ------------------------------------------------------------------------------

    [[nodiscard]] static bool has_parts(Collective collective) noexcept {
        return collective == Collective::all_gather || collective == Collective::reduce_scatter ||
               collective == Collective::scaled_reduce_scatter ||
               collective == Collective::gather || collective == Collective::scatter;
    }
    /// Whether ranks compare first. The elements of ranks are told after that.
    [[nodiscard]] bool compares(Descriptor const& signature) const noexcept {
        return options().check || tells_parts(signature);
    }
    /// Ranks other than leaders start what they can: all up to one that compares first.
    void start_posted() {
        for (Operation& operation : operations_) {
            if (operation.stage == Stage::posted) {
                (void)start_more(operation);
            }
            if (operation.stage != Stage::moving) {
                return;
            }
        }
    }
    /// Starts what follows the steps that are done, if there is something. A leader starts one
    /// step. The steps of other ranks are all local, and the leader starts the second one when it
    /// has all that the first one reads: so they start all of a stage.
    [[nodiscard]] bool start_more(Operation& operation) {
        while (operation.started == operation.steps.size()) {
            if (operation.stage == Stage::moving) {
                return false;
            }
            begin_stage(operation);
        }
        do {
            LevelStep const& next = operation.steps[operation.started++];
            for (LeadersCopy const& copy : next.copies) {
                std::memcpy(copy.to, copy.from, copy.bytes);
            }
            if (!next.copies.empty()) {
                continue;
            }
            on_level(next.level, [&] {
                operation.running.emplace_back(
                    next.level, start_step(next.level == Level::local ? local_ : *across_, next)
                );
            });
        } while (!is_leader() && operation.started != operation.steps.size());
        return true;
    }
    void begin_stage(Operation& operation) {
        Request const& request = operation.request;
        Descriptor const& signature = request.signature;
        if (operation.stage == Stage::posted && compares(signature)) {
            operation.stage = Stage::comparing;
            operation.comparison.begin(signature, rank(), machines_.ranks());
            plan_sum(operation, operation.comparison.words());
            return;
        }
        if (operation.stage == Stage::comparing) {
            end_by(operation.comparison.difference());
            if (operation.comparison.go_on(request.sends, request.expects)) {
                plan_sum(operation, operation.comparison.words());
                return;
            }
        }
        if (tells_parts(signature)) {
            operation.parts = operation.comparison.known();
        } else if (has_parts(signature.collective)) {
            PartSizes const sizes = !signature.has_counts ? PartSizes::equal(signature.count)
                                    : signature.collective == Collective::all_gather
                                        ? request.expects
                                        : request.sends;
            operation.parts.resize(static_cast<std::size_t>(machines_.ranks()));
            sizes.copy_to(std::span{operation.parts});
        }
        operation.stage = Stage::moving;
        Request all = request;
        if (request.signature.collective == Collective::barrier) {
            all.in = all.out = Buffer{&met_, 1, DType::u8};
        }
        plan(operation, all);
    }
    void plan_sum(Operation& operation, std::span<std::uint64_t> words) {
        Buffer const sum{words.data(), words.size(), DType::u64};
        plan(operation, {{Collective::all_reduce, DType::u64}, sum, sum});
    }
    void plan(Operation& operation, Request const& request) {
        operation.started = 0;
        on_level(Level::local, [&] { // it may have no memory
            operation.steps =
                LevelPlan{machines_, local_, request, operation.parts, scratch_}.steps();
        });
    }
    /// Whether that collective is done. Also does those before it.
    [[nodiscard]] bool advance(std::uint64_t number, Waiting waiting) {
        while (!is_done(number)) {
            if (failure_) {
                end();
            }
            if (!advance_first(waiting)) {
                hear_parent();
                if (has_two_levels()) {
                    listen();
                }
                return false;
            }
            operations_.pop_front();
            ++done_;
        }
        return true;
    }
    [[nodiscard]] bool advance_first(Waiting waiting) {
        Operation& first = operations_.front();
        for (;;) {
            for (auto& [level, step] : first.running) {
                if (!on_level(level, [&, &running = step] {
                        return is_complete(running, waiting);
                    })) {
                    return false;
                }
            }
            first.running.clear();
            if (!start_more(first)) {
                return true;
            }
            if (!is_leader()) {
                start_posted();
            }
        }
    }

    // -- failures ---------------------------------------------------------------------------------

    /// An error of a level ends all ranks.
    template <class F>
    std::invoke_result_t<F const&> on_level(Level level, F const& f) {
        try {
            return f();
        } catch (...) {
            AbortReason reason = reason_of(std::current_exception());
            auto told = level == Level::local ? local_.abort_reason() : across_->abort_reason();
            if (told && is_same_failure(*told, reason)) {
                reason = *std::move(told);
            }
            fail(to_global(std::move(reason), level, machines_));
        }
    }
    /// Carries failures from level to level, and tells both that this rank waits. Steps in flight
    /// report failures themselves. Checks only the levels that the collective still needs: ranks may
    /// leave a level once their part is done.
    void listen() {
        Operation const& first = operations_.front();
        auto const is_ahead = [&](Level level) {
            return first.stage != Stage::moving ||
                   std::any_of(
                       first.steps.begin() + static_cast<std::ptrdiff_t>(first.started),
                       first.steps.end(),
                       [&](LevelStep const& step) { return step.level == level; }
                   );
        };
        if (is_ahead(Level::local)) {
            end_by(reason_on(local_, Level::local));
        }
        if (is_ahead(Level::across)) {
            end_by(reason_on(*across_, Level::across));
        }
        auto const now = std::chrono::steady_clock::now();
        if (now - last_sign_ >= deadline_ / 8) {
            last_sign_ = now;
            keep_alive();
        }
    }
    void hear_parent() {
        if (parent_) {
            if (auto const reason = parent_()) {
                fail(*reason);
            }
        }
    }
    /// The reason as these ranks throw it.
    [[nodiscard]] AbortReason here(AbortReason reason) const {
        reason.is_renumbered = is_renumbered();
        return reason;
    }
    [[nodiscard]] std::optional<AbortReason>
    reason_on(AnyInterface const& comm, Level level) const {
        auto reason = comm.abort_reason();
        return reason ? to_global(*std::move(reason), level, machines_) : reason;
    }
    [[nodiscard]] std::optional<AbortReason> reason_on_levels() const {
        auto reason = reason_on(local_, Level::local);
        return reason || across_ == nullptr ? reason : reason_on(*across_, Level::across);
    }
    void end_by(std::optional<AbortReason> const& reason) {
        if (reason) {
            fail(*reason);
        }
    }
    [[noreturn]] void fail(AbortReason const& reason) {
        abort(reason);
        end();
    }
    /// No rank uses the buffers after that.
    [[noreturn]] void end() {
        if (!operations_.empty()) {
            waits_in_ = operations_.front().request.signature.text();
            operations_.clear();
        }
        throw_failure(in_words_of(rank(), waits_in_, *failure_));
    }

    Levels levels_; // before what refers to them
    AnyInterface& local_;
    AnyInterface* across_;
    Machines machines_;
    std::function<std::optional<AbortReason>()> parent_; ///< of a group
    Arena scratch_; ///< of the collective that a leader has begun
    std::chrono::nanoseconds deadline_ = default_deadline;
    std::chrono::nanoseconds first_deadline_ = deadline_;
    std::array<std::optional<std::chrono::nanoseconds>, 2> own_deadlines_; ///< of local and across
    std::chrono::steady_clock::time_point last_sign_{}; ///< of life, from a leader that waits
    std::deque<Operation> operations_;                  ///< posted and not done
    std::uint64_t done_ = 0;                            ///< number of finished collectives
    std::uint8_t met_ = 0;                              ///< of barriers
    std::optional<AbortReason> failure_;
    std::string waits_in_; ///< the collective that the failure ended
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/hierarchical/communicator.hpp

namespace joinable { inline namespace v0 {

/// A collective over all machines. Its wait() throws as HierarchicalCommunicator says.
using HierarchicalWork = detail::WorkOf<detail::HierarchicalEngine, std::uint64_t>;

namespace detail {
/// A std::optional, a smart pointer or a plain one.
template <class P>
concept points_to_communicator = requires(P& pointer) {
    static_cast<bool>(pointer);
    requires Communicator<std::remove_reference_t<decltype(*pointer)>>;
};

/// A communicator that a HierarchicalCommunicator takes for a level.
template <class Comm>
consteval bool fits_level() {
    static_assert(
        reduces_host_memory<Comm>,
        "HierarchicalCommunicator: expected communicators of host memory for both levels"
    );
    static_assert(
        TellsReason<Comm>,
        "HierarchicalCommunicator: expected members 'abort(AbortReason)', 'bool is_aborted()' and "
        "'std::optional<AbortReason> abort_reason() const' of both levels, by which a leader learns "
        "why ranks failed; use communicators that model TellsReason"
    );
    return reduces_host_memory<Comm> && TellsReason<Comm> && models_communicator<Comm>();
}
} // namespace detail

/// The ranks of several machines. `local` connects the ranks of a machine, for example through
/// shared memory. Its rank 0 leads the machine, and `across` connects the leaders, by any transport.
/// Each buffer crosses the network once per machine, and not once per rank.
///
/// @code
/// std::optional<joinable::MpiCommunicator> across; // empty on ranks that lead no machine
/// if (local.rank() == 0) {
///     across.emplace(leaders);
/// }
/// joinable::HierarchicalCommunicator comm{local, across};
/// @endcode
///
/// Ranks are numbered machine by machine, in the order of the leaders' ranks in `across`, and by
/// local rank on each machine. Machines may have different numbers of ranks.
///
/// An all-reduce combines the buffers of a machine, as `local.reduce()` or else `all_reduce()` does,
/// and then those of the machines, as `across.all_reduce()` does; the result is broadcast on each
/// machine. If both combine in rank order, the sum is that of the machines' sums, in order of
/// machines, each in order of local ranks; 16-bit numbers are rounded once per level. All ranks get
/// the same bits. The other sums are made in the same way. Factors apply within machines.
///
/// It has every collective. A level needs sums and broadcasts alone; what it lacks is made of these, and
/// split() or a deadline that it lacks is a ContractViolation, as AnyCommunicator says. Parts cross the
/// network once per machine, because ranks of a machine have neighbouring parts. For a reduce,
/// reduce-scatter, gather or scatter a leader has scratch memory, at most for the parts of all ranks, and
/// for an all_to_all twice what its ranks send or receive; it keeps that. Where a level lacks a gather,
/// scatter or all_to_all, its ranks have memory for what all of them send while that runs.
///
/// Collectives run one after another in the order in which they were posted. A leader makes
/// progress inside wait(), test() and posts; the other ranks post at once what they do on their
/// machine. Each takes up to two places of those that `local` has in flight. A gather or scatter by
/// counts first tells all ranks the counts, because only the root has them all; ranks then post it,
/// and what follows, inside their waits and tests. So does an all_to_all by counts. That takes two
/// words for each rank, and two for each pair of ranks that exchange parts.
///
/// An error on one rank becomes the same error on all, which names ranks by their number here. If
/// the text comes from `local` or `across`, it says how that one numbers them. It travels by aborts
/// of `local` and `across`, which model TellsReason; a busy leader carries it on at its next wait or
/// test. Exceptions of `local` and `across` themselves then name no ranks. While a leader waits, it
/// calls keep_alive() on both levels. A rank that is late is therefore missed by the ranks of its
/// machine only, if both can renew deadlines. If they cannot, ranks of other machines may miss their leaders at the same time, with other errors. A rank that
/// is told of an abort throws it from collectives that it has not seen complete.
///
/// HierarchicalOptions::check compares what ranks are about to do. Without it that is compared as far as
/// `local` and `across` compare what they do for it. Then a rank whose machine has done its part may
/// have the result before another machine's ranks find that they differ; its next collective throws.
/// Not compared are: two roots on one machine, by the ranks of other machines; the parts of other
/// machines' ranks in a table of counts, only their sums; and a barrier, with an all-reduce of one
/// byte. The counts of gathers, scatters and all_to_alls are always compared before data moves.
///
/// abort() aborts both levels; the first reason that reaches a rank wins there. set_deadline() sets the deadline of both,
/// and returns the shorter one if they had two; the deadline that this communicator had at first gives each level its own
/// back. It throws ContractViolation if a level of several ranks has none. missing_ranks() names ranks of this machine and,
/// on a leader, also leaders.
///
/// `local` and `across` must outlive this object, and nothing else uses them meanwhile. One thread
/// at a time may use an object.
class HierarchicalCommunicator
    : public detail::RankMembers<HierarchicalCommunicator>,
      public detail::Collectives<HierarchicalCommunicator, HierarchicalWork> {
public:
    /// Collective over all machines; blocks. Both levels run some small collectives, each within
    /// its deadline. `across` is null on ranks other than local rank 0.
    /// @throws ContractViolation  on all ranks that can be reached: a local rank 0 has no `across`,
    ///                            or another rank has one; an unknown word in JOINABLE_CHECK, and then
    ///                            PeerFailed on the others.
    /// @throws Mismatch           ranks differ in `check`, or in JOINABLE_CHECK=collectives.
    /// @throws TimedOut, ...      what a collective of a level throws, on all ranks; without
    ///                            culprits, because the numbers of ranks are not known.
    template <Communicator Local, Communicator Across>
    [[nodiscard]] HierarchicalCommunicator(
        Local& local, Across* across, HierarchicalOptions const& options = {}
    )
        : engine_{{refer_to(&local), refer_to(across), options}} {}
    /// The same for a std::optional, which is empty there, or a smart pointer.
    template <Communicator Local, detail::points_to_communicator Pointer>
    [[nodiscard]] HierarchicalCommunicator(
        Local& local, Pointer& across, HierarchicalOptions const& options = {}
    )
        : HierarchicalCommunicator{local, across ? &*across : nullptr, options} {}
    /// Explains what is missing.
    template <class... Others>
    [[nodiscard]] explicit HierarchicalCommunicator(Others const&...) : engine_{detail::Levels{}} {
        static_assert(
            sizeof...(Others) == std::size_t(-1),
            "HierarchicalCommunicator: expected the communicator of a machine's ranks, then a std::optional or a "
            "pointer with the communicator of the machines' leaders, which is empty on all other ranks"
        );
    }
    HierarchicalCommunicator(HierarchicalCommunicator const&) = delete;
    HierarchicalCommunicator& operator=(HierarchicalCommunicator const&) = delete;
    /// Leaves `local` and `across` as they are. During unwinding it aborts them.
    ~HierarchicalCommunicator() {
        if (unwinding_.has_begun()) {
            abort_for_exception(engine_, "the scope of its communicator");
        }
    }

    /// The number of this machine, which is its leader's rank in `across`.
    [[nodiscard]] int machine() const { return engine_.machines().own(); }
    /// The machine of a rank.
    [[nodiscard]] int machine_of(int rank) const { return engine_.machines().machine_of(rank); }

    /// Collective; blocks. The ranks of each color form a group, ordered by key, then by rank. Each
    /// level is split in the same way, and the group owns the results, with the deadline and
    /// the options of this communicator. Aborting this communicator aborts the group, but not the
    /// reverse. Errors name ranks by their numbers in the group where they occur. Destroy groups
    /// before this communicator.
    ///
    /// Leaders alone are connected. So a group with ranks of several machines has the leaders of
    /// these machines, each as the first of its machine's ranks. A group on one machine may have any
    /// of its ranks. In both cases ranks of one machine follow each other.
    /// @throws ContractViolation  on all ranks, which can go on: a group is not as described above, or a
    ///                            level cannot split, or refuses its part of a group.
    ///                            On this rank alone, before it communicates: the color is negative.
    /// @throws what all_reduce() and split() of the levels throw, on all ranks.
    [[nodiscard]] HierarchicalCommunicator split(int color, int key) {
        detail::check_color(color);
        if (!can_split()) {
            throw ContractViolation{
                "split needs the split() of both levels, but the communicator of a machine's ranks or that of the "
                "leaders has none; choose transports that have it on all ranks"
            };
        }
        std::vector<detail::GroupChoice> choices(static_cast<std::size_t>(size()));
        detail::GroupChoice& own = choices[static_cast<std::size_t>(rank())];
        own = {color, key};
        detail::Request request = detail::RequestsOf{rank(), size()}.all_reduce(
            {choices.data(), 2 * choices.size(), DType::i32}, ReduceOp::bit_or
        );
        request.signature.collective = detail::split_collective; // errors call it so
        post(request).wait();
        detail::Machines const group =
            detail::machines_of_group(choices, engine_.machines(), rank());
        return HierarchicalCommunicator{
            engine_.split(own, group, detail::members_of(choices, color))
        };
    }

    /// Local, the same on all ranks. Whether both levels can, on all machines.
    [[nodiscard]] bool can_split() const noexcept { return engine_.can_split(); }

    /// For participants that train a model: that of the ranks of this machine.
    [[nodiscard]] detail::ModelTable* model_table() { return engine_.local().model_table(); }

    /// Local. Memory that the ranks of this machine need not copy: see AllocatesArena.
    [[nodiscard]] Arena
    allocate(std::size_t bytes, std::size_t alignment = Arena::default_alignment) {
        return engine_.local().allocate(bytes, alignment);
    }

private:
    friend class detail::RankMembers<HierarchicalCommunicator>;
    [[nodiscard]] detail::HierarchicalEngine& own_rank() noexcept { return engine_; }
    [[nodiscard]] detail::HierarchicalEngine const& own_rank() const noexcept { return engine_; }
    friend class detail::BasicCollectives<HierarchicalCommunicator, HierarchicalWork>;
    HierarchicalWork post(detail::Request const& request) {
        return {engine_, engine_.post(request)};
    }

    explicit HierarchicalCommunicator(detail::Levels group) : engine_{std::move(group)} {}
    template <class Comm>
    [[nodiscard]] static std::unique_ptr<detail::AnyInterface> refer_to(Comm* comm) {
        if constexpr (detail::fits_level<Comm>()) { // else its sentence is the only error
            if (comm != nullptr) {
                return std::make_unique<detail::AnyHeld<Comm&>>(*comm);
            }
        }
        return nullptr;
    }

    detail::HierarchicalEngine engine_;
    detail::Unwinding unwinding_;
};

}} // namespace joinable::v0

// ---- joinable/hierarchical.hpp

/// @file
/// Ranks of several machines: collectives within each machine, and between one rank of each.
