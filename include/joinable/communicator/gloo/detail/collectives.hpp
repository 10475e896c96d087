// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/ranks.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/gloo/detail/mesh.hpp>
#include <joinable/detail/hash.hpp>
#include <joinable/device/scratch.hpp>
#include <joinable/reduction/reduce.hpp>
#include <joinable/tensor/dtype.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Runs one collective of one rank from its beginning to its end, which blocks. Its messages are
/// Gloo's. Each rank combines one part of all inputs by the library's own arithmetic, in rank
/// order, so results have the same bits as those of other transports.
class GlooCollective {
public:
    /// Reductions and broadcasts of at most so many bytes take one step, in which each rank sends
    /// everything. Larger ones take two.
    static constexpr std::size_t most_in_one_step = 16 * 1024;
    /// So many bytes of each rank's part are combined while the next ones arrive.
    static constexpr std::size_t piece_bytes = 1024 * 1024;

    /// Memory for what a rank receives and combines. It is kept, because new pages cost more than what arrives in them.
    using Kept = std::array<Scratch, 2>;

    /// `request` must outlive this object. `number` is the collective's, the same on all ranks.
    GlooCollective(GlooLane& lane, Kept& scratch, Request const& request, std::uint64_t number)
        : lane_{lane}, scratch_{scratch}, request_{request}, signature_{request.signature},
          number_{number}, rank_{lane.mesh().rank()}, size_{lane.mesh().size()},
          element_{size_of(signature_.dtype)}, in_{static_cast<std::byte const*>(request.in.data)},
          out_{static_cast<std::byte*>(request.out.data)} {}

    void run() {
        switch (signature_.collective) {
        case Collective::barrier: meet(); break;
        case Collective::broadcast: broadcast(); break;
        case Collective::all_reduce:
        case Collective::scaled_all_reduce:
        case Collective::reduce:
            if (signature_.count * element_ <= most_in_one_step) {
                reduce_in_one_step();
            } else {
                reduce_by_parts(equal_parts(signature_.count));
            }
            break;
        case Collective::reduce_scatter:
        case Collective::scaled_reduce_scatter: reduce_by_parts(parts_of(request_.sends)); break;
        default: exchange();
        }
    }

private:
    /// One rank's part of a buffer, in elements.
    struct Part {
        std::size_t begin = 0;
        std::size_t count = 0;
    };
    using Parts = std::vector<Part>;

    // -- small tools ------------------------------------------------------------------------------

    /// Calls f(rank) for the other ranks, beginning with the next one, so that not all ranks send
    /// to the same one first.
    template <class F>
    void for_others(F const& f) const {
        for (int i = 1; i < size_; ++i) {
            f((rank_ + i) % size_);
        }
    }
    /// The name of the messages of one step. All that ranks could say differently is in it.
    [[nodiscard]] std::uint64_t name_of(std::uint64_t step) const noexcept {
        Hash name;
        name.add(number_)
            .add(signature_.word())
            .add(signature_.has_counts ? 1 : 0)
            .add(signature_.count)
            .add(step);
        return name.value();
    }
    [[nodiscard]] std::span<std::byte const> of_in(std::size_t begin, std::size_t count) const {
        return {in_ + begin * element_, count * element_};
    }
    [[nodiscard]] std::span<std::byte> of_out(std::size_t begin, std::size_t count) const {
        return {out_ + begin * element_, count * element_};
    }
    [[nodiscard]] Parts equal_parts(std::size_t count) const {
        Parts parts;
        std::size_t const ranks = as_index(size_);
        for (std::size_t rank = 0; rank < ranks; ++rank) {
            std::size_t const more = (std::min)(rank, count % ranks);
            std::size_t const own = count / ranks + (rank < count % ranks ? 1 : 0);
            parts.push_back({rank * (count / ranks) + more, own});
        }
        return parts;
    }
    [[nodiscard]] Parts parts_of(PartSizes const& sizes) const {
        Parts parts;
        std::size_t begin = 0;
        for (int rank = 0; rank < size_; ++rank) {
            parts.push_back({begin, sizes[rank]});
            begin += sizes[rank];
        }
        return parts;
    }

    // -- what combines nothing --------------------------------------------------------------------

    void meet() {
        GlooTransfers transfers{lane_, name_of(0)};
        std::vector<std::byte> words(as_index(size_) + 1);
        std::span<std::byte> const all{words};
        for_others([&](int other) { transfers.receive(other, all.subspan(as_index(other), 1)); });
        for_others([&](int other) { transfers.send(other, all.last(1)); });
        transfers.wait();
    }

    void broadcast() {
        bool const is_root = rank_ == signature_.root;
        if (signature_.count * element_ <= most_in_one_step || size_ == 2) {
            GlooTransfers transfers{lane_, name_of(0)};
            if (is_root) {
                for_others([&](int other) { transfers.send(other, of_in(0, signature_.count)); });
            } else {
                transfers.receive(signature_.root, of_out(0, signature_.count));
            }
            transfers.wait();
            return;
        }
        // The root sends each rank its part, and all ranks its own part. Ranks pass their parts on.
        Parts const parts = equal_parts(signature_.count);
        auto const part = [&](int rank) {
            return of_out(parts[as_index(rank)].begin, parts[as_index(rank)].count);
        };
        GlooTransfers from_root{lane_, name_of(0)};
        GlooTransfers of_root{lane_, name_of(1)};
        GlooTransfers among_others{lane_, name_of(2)};
        if (is_root) {
            for_others([&](int other) { from_root.send(other, part(other)); });
            for_others([&](int other) { of_root.send(other, part(rank_)); });
        } else {
            from_root.receive(signature_.root, part(rank_));
            of_root.receive(signature_.root, part(signature_.root));
            for_others([&](int other) {
                if (other != signature_.root) {
                    among_others.receive(other, part(other));
                }
            });
            from_root.wait();
            for_others([&](int other) {
                if (other != signature_.root) {
                    among_others.send(other, part(rank_));
                }
            });
        }
        from_root.wait();
        of_root.wait();
        among_others.wait();
    }

    /// all_gather, gather, scatter and all_to_all.
    void exchange() {
        bool const sends_one_part = signature_.collective == Collective::all_gather ||
                                    signature_.collective == Collective::gather;
        Parts const sent = parts_of(request_.sends);
        Parts const expected = parts_of(request_.expects);
        auto const outgoing = [&](int to) {
            auto const [begin, count] = sent[as_index(to)];
            return of_in(sends_one_part ? 0 : begin, count);
        };
        auto const incoming = [&](int from) {
            auto const [begin, count] = expected[as_index(from)];
            return of_out(begin, count);
        };
        GlooTransfers transfers{lane_, name_of(0)};
        for_others([&](int other) { transfers.receive(other, incoming(other)); });
        for_others([&](int other) { transfers.send(other, outgoing(other)); });
        auto const own = outgoing(rank_);
        if (!own.empty() && incoming(rank_).data() != own.data()) {
            std::memmove(incoming(rank_).data(), own.data(), own.size());
        }
        transfers.wait();
    }

    // -- reductions -------------------------------------------------------------------------------

    [[nodiscard]] bool has_result(int rank) const noexcept {
        return signature_.collective != Collective::reduce || rank == signature_.root;
    }
    /// All ranks that get the result tell each other their factors. These travel with the first
    /// data, and not in a round trip before it.
    void send_factors() {
        if (is_scaled(signature_.collective)) {
            factors_.assign(as_index(size_), signature_.factor);
            std::span<double> const all{factors_};
            auto& transfers = factors_under_way_.emplace(lane_, name_of(~std::uint64_t{0}));
            for_others([&](int other) {
                transfers.receive(other, std::as_writable_bytes(all.subspan(as_index(other), 1)));
            });
            auto const own = std::as_bytes(std::span{&signature_.factor, 1});
            for_others([&](int other) { transfers.send(other, own); });
        }
    }
    void wait_for_factors() {
        if (factors_under_way_) {
            factors_under_way_->wait();
        }
    }
    /// Combines this rank's elements `own` and those of the others, which lie `stride` bytes apart.
    void combine(
        std::byte const* own,
        std::byte* others,
        std::size_t stride,
        std::byte* to,
        std::size_t count
    ) const {
        auto const input = [&](std::size_t rank) {
            return rank == as_index(rank_) ? const_cast<std::byte*>(own) : others + rank * stride;
        };
        auto const output = [&](std::size_t) { return to; };
        auto const factor = [&](std::size_t rank) { return factors_[rank]; };
        reduce_to(
            signature_.dtype,
            signature_.op,
            {as_index(size_), input},
            {1, output},
            count,
            factors_.empty() ? Factors{} : Factors{as_index(size_), factor}
        );
    }

    void reduce_in_one_step() {
        send_factors();
        std::size_t const bytes = signature_.count * element_;
        std::byte* const others = scratch_[0].data(has_result(rank_) ? as_index(size_) * bytes : 0);
        GlooTransfers transfers{lane_, name_of(0)};
        for_others([&](int other) {
            if (has_result(rank_)) {
                transfers.receive(other, {others + as_index(other) * bytes, bytes});
            }
        });
        for_others([&](int other) {
            if (has_result(other)) {
                transfers.send(other, of_in(0, signature_.count));
            }
        });
        transfers.wait();
        wait_for_factors();
        if (has_result(rank_) && signature_.count != 0) {
            combine(in_, others, bytes, out_, signature_.count);
        }
    }

    /// Two pieces are under way at a time: while one is combined, the next one arrives.
    struct Piece {
        std::byte* memory = nullptr; ///< the others' inputs, and this rank's result
        std::optional<GlooTransfers> inputs;
        std::optional<GlooTransfers> results;
    };

    /// Each rank combines its part. Then the ranks that get all parts receive them.
    void reduce_by_parts(Parts const& parts) {
        send_factors();
        std::size_t const most = (std::max)(piece_bytes / element_, std::size_t{1});
        Part const& own = parts[as_index(rank_)];
        std::size_t longest = 0;
        for (Part const& part : parts) {
            longest = (std::max)(longest, part.count);
        }
        std::size_t const pieces = (longest + most - 1) / most;
        std::size_t const stride = (std::min)(most, own.count) * element_;
        auto const piece_of = [&](Part const& part, std::size_t number) -> Part {
            std::size_t const at = (std::min)(number * most, part.count);
            return {part.begin + at, (std::min)(most, part.count - at)};
        };
        std::array<Piece, 2> two;
        auto const start = [&](std::size_t number) {
            Piece& piece = two[number % 2];
            piece.memory = scratch_[number % 2].data(as_index(size_) * stride);
            std::size_t const bytes = piece_of(own, number).count * element_;
            piece.inputs.emplace(lane_, name_of(2 * number));
            for_others([&](int other) {
                piece.inputs->receive(other, {piece.memory + as_index(other) * stride, bytes});
            });
            for_others([&](int other) {
                auto const [begin, count] = piece_of(parts[as_index(other)], number);
                piece.inputs->send(other, of_in(begin, count));
            });
        };
        auto const finish = [&](std::size_t number) {
            Piece& piece = two[number % 2];
            piece.inputs->wait();
            wait_for_factors();
            Part const mine = piece_of(own, number);
            std::byte* const result = place_of_result(
                piece.memory + as_index(rank_) * stride, mine.begin, mine.begin - own.begin
            );
            if (mine.count != 0) {
                combine(in_ + mine.begin * element_, piece.memory, stride, result, mine.count);
            }
            if (is_scattered()) {
                return;
            }
            piece.results.emplace(lane_, name_of(2 * number + 1));
            for_others([&](int other) {
                auto const [at, elements] = piece_of(parts[as_index(other)], number);
                if (has_result(rank_)) {
                    piece.results->receive(other, of_out(at, elements));
                }
                if (has_result(other)) {
                    piece.results->send(other, {result, mine.count * element_});
                }
            });
        };
        auto const wait_for_results = [&](std::size_t number) {
            if (auto& results = two[number % 2].results) {
                results->wait();
                results.reset();
            }
        };
        for (std::size_t number = 0; number < pieces; ++number) {
            if (number == 0) {
                start(0);
            }
            if (number + 1 < pieces) {
                start(number + 1);
            }
            finish(number);
            if (number > 0) {
                wait_for_results(number - 1);
            }
        }
        if (pieces > 0) {
            wait_for_results(pieces - 1);
        }
        wait_for_factors(); // of a sum without elements
    }
    [[nodiscard]] bool is_scattered() const noexcept {
        return signature_.collective == Collective::reduce_scatter ||
               signature_.collective == Collective::scaled_reduce_scatter;
    }
    /// Where this rank writes its elements from `begin` on, which are `at` after its part's first.
    /// A rank that gets no result has it in `memory`.
    [[nodiscard]] std::byte*
    place_of_result(std::byte* memory, std::size_t begin, std::size_t at) const noexcept {
        if (is_scattered()) {
            return out_ + at * element_;
        }
        return has_result(rank_) ? out_ + begin * element_ : memory;
    }

    GlooLane& lane_;
    Kept& scratch_;
    Request const& request_;
    Descriptor const& signature_;
    std::uint64_t number_;
    int rank_;
    int size_;
    std::size_t element_;
    std::byte const* in_;
    std::byte* out_;
    std::vector<double> factors_;
    std::optional<GlooTransfers> factors_under_way_; ///< reads and writes the factors
};

}}} // namespace joinable::v0::detail
