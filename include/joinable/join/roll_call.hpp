// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <joinable/config.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/join/control.hpp>
#include <joinable/join/options.hpp>

/// @file
/// The agreement that opens every round: one sum of seven words, from which every rank computes
/// the same verdict. Knows nothing of guards, participants or RAII.

namespace joinable::inline v0::detail {

inline constexpr int max_world_size = 1 << 18; ///< so that no lane of a roll call overflows
inline constexpr std::uint64_t max_weight = std::uint64_t{1} << 45;
inline constexpr std::uint32_t digest_mask = (1U << 23) - 1;

/// FNV-1a over numbers, cut to what a roll call can compare (see `Agreement`).
class Digest {
public:
    Digest& add(std::uint64_t value) noexcept {
        for (int byte = 0; byte < 8; ++byte) {
            hash_ = (hash_ ^ ((value >> (8 * byte)) & 0xffU)) * 0x100'0000'01b3U;
        }
        return *this;
    }
    [[nodiscard]] std::uint32_t value() const noexcept {
        return static_cast<std::uint32_t>(hash_ ^ (hash_ >> 23) ^ (hash_ >> 46)) & digest_mask;
    }

private:
    std::uint64_t hash_ = 0xcbf2'9ce4'8422'2325U;
};

/// Whether all of `count` ranks added the same value F < 2^23: sum and sum of squares determine it,
/// because the mean of squares equals the square of the mean for equal values only.
struct Agreement {
    std::uint64_t sum = 0;
    std::uint64_t squares = 0;

    static Agreement of(std::uint32_t value) noexcept {
        return {value, static_cast<std::uint64_t>(value) * value};
    }
    [[nodiscard]] std::optional<std::uint32_t> value(std::uint64_t count) const noexcept {
        if (count == 0) {
            return 0;
        }
        std::uint64_t const mean = sum / count;
        if (sum % count != 0 || squares != count * mean * mean) {
            return {};
        }
        return static_cast<std::uint32_t>(mean);
    }
};

/// The seven words of a roll call: what one rank adds, and after the sum what all ranks said.
struct RollCallLanes {
    std::uint32_t active = 0;
    std::uint32_t arrived = 0; ///< ran out of inputs since the previous roll call
    std::uint32_t failed = 0;  ///< leaves by an exception
    std::uint32_t stop = 0;    ///< votes to stop
    std::uint32_t syncs = 0;
    std::uint64_t weight = 0;
    Agreement code;   ///< readable: see RoundCode
    Agreement digest; ///< of what the rank is about to do

    using Words = std::array<std::uint64_t, 7>;

    [[nodiscard]] Words encode() const noexcept {
        return {
            {field(active, 0) | field(arrived, 1) | field(failed, 2),
             field(stop, 0) | field(syncs, 1),
             weight,
             code.sum,
             code.squares,
             digest.sum,
             digest.squares}
        };
    }
    static RollCallLanes decode(Words const& words) noexcept {
        return {
            take(words[0], 0),
            take(words[0], 1),
            take(words[0], 2),
            take(words[1], 0),
            take(words[1], 1),
            words[2],
            {words[3], words[4]},
            {words[5], words[6]}
        };
    }

private:
    static constexpr unsigned bits = 20; ///< 2^18 ranks fit, three fields in a word
    static std::uint64_t field(std::uint32_t value, unsigned index) noexcept {
        return static_cast<std::uint64_t>(value) << (bits * index);
    }
    static std::uint32_t take(std::uint64_t word, unsigned index) noexcept {
        return static_cast<std::uint32_t>(word >> (bits * index)) & ((1U << bits) - 1);
    }
};

/// How a rank opened a round.
enum class Opening : std::uint8_t { notification, next };

/// The code lane: everything about a round that active ranks must agree on and error texts name.
struct RoundCode {
    Phase phase = Phase::train;
    bool syncs = false;
    bool weighted = false;
    Opening opening = Opening::notification;
    std::uint32_t opener = 0; ///< index of the notifying participant

    [[nodiscard]] std::uint32_t encode() const noexcept {
        return static_cast<std::uint32_t>(phase == Phase::evaluate) | (syncs ? 2U : 0U) |
               (weighted ? 4U : 0U) | (opening == Opening::next ? 8U : 0U) | (opener << 4);
    }
    static RoundCode decode(std::uint32_t code) noexcept {
        return {
            (code & 1U) != 0 ? Phase::evaluate : Phase::train,
            (code & 2U) != 0,
            (code & 4U) != 0,
            (code & 8U) != 0 ? Opening::next : Opening::notification,
            code >> 4
        };
    }
    static std::string text(std::uint32_t code) {
        RoundCode const said = decode(code);
        return concat(
            said.phase == Phase::train ? "train" : "evaluate",
            said.syncs ? ", syncs" : ", does not sync",
            said.weighted ? ", weighted" : ", unweighted",
            said.opening == Opening::next ? ", opened by next()" : ", opened by participant ",
            said.opening == Opening::next ? std::string{} : std::to_string(said.opener)
        );
    }
};

/// What ranks must agree on when they enter a guard, in the same lane.
struct EntryCode {
    std::uint32_t participants = 0;
    EndPolicy end_policy = EndPolicy::drain;
    std::uint32_t version = library_version;

    [[nodiscard]] std::uint32_t encode() const noexcept {
        return participants | static_cast<std::uint32_t>(end_policy) << 5 | version << 7;
    }
    static std::string text(std::uint32_t code) {
        return concat(
            code & 31U,
            " participants, end policy ",
            name_of(static_cast<EndPolicy>((code >> 5) & 3U)),
            ", library version ",
            code >> 7
        );
    }
};

enum class Verdict : std::uint8_t { go_on, failed, mismatch, stop, early_end, end };

/// What all ranks said, judged in the order that makes every rank see the same: a failure hides a
/// mismatch (a leaving rank cannot say what it would have done), and both hide an end.
[[nodiscard]] inline Verdict judge(RollCallLanes const& said, EndPolicy policy) noexcept {
    if (said.failed > 0) {
        return Verdict::failed;
    }
    if ((said.syncs != 0 && said.syncs != said.active) || !said.code.value(said.active) ||
        !said.digest.value(said.active)) {
        return Verdict::mismatch;
    }
    if (said.stop > 0) {
        return said.active > 0 ? Verdict::stop : Verdict::end;
    }
    if (said.active == 0) {
        return Verdict::end;
    }
    if (said.arrived > 0 && policy == EndPolicy::stop_at_first) {
        return Verdict::stop;
    }
    if (said.arrived > 0 && policy == EndPolicy::throw_early) {
        return Verdict::early_end;
    }
    return Verdict::go_on;
}

/// Who is where, and the exchanges that find it out. All ranks of `control` make the same calls.
class RollCall {
public:
    /// Bytes of error text that a failing rank can send along.
    static constexpr std::size_t text_bytes = 256;

    RollCall(ControlCommunicator& control, EndPolicy policy)
        : control_{control}, policy_{policy},
          joined_after_(static_cast<std::size_t>(control.size())),
          is_active_(static_cast<std::size_t>(control.size()), true) {}

    /// Starts a roll call; `answer()` ends it. Asynchronous, no allocation.
    void post(RollCallLanes const& mine) {
        mine_ = mine;
        words_ = mine.encode();
        control_.post_sum(words_);
        posted_ = true;
    }
    [[nodiscard]] bool is_posted() const noexcept { return posted_; }
    [[nodiscard]] bool test() { return control_.test_sum(); }

    /// Waits for the roll call that was posted and returns the verdict, the same on every rank.
    /// One more message only when a rank arrives or fails, or when ranks disagree.
    /// `text` is sent along if this rank failed. Throws what the communicator throws.
    Verdict answer(std::string_view text = {}) {
        Verdict const verdict = hear(text);
        if (verdict == Verdict::mismatch) {
            name_differences(
                concat("ranks disagree about round ", rounds_),
                "every active rank must open the same round",
                RoundCode::text
            );
        }
        rounds_ += verdict == Verdict::go_on ? 1 : 0;
        return verdict;
    }

    /// The same for an agreement that opens no round and in which all ranks are active. After a
    /// mismatch the caller names the differences.
    Verdict agree(std::string_view text) { return hear(text); }

    /// Collective, after a mismatch: one slot per rank with its code and digest, so that the error
    /// can say who said what. `describe` makes a code readable.
    void name_differences(
        std::string const& what, std::string_view advice, std::string (*describe)(std::uint32_t)
    ) {
        auto const size = static_cast<std::size_t>(control_.size());
        std::vector<std::uint64_t> words(2 * size);
        auto const me = static_cast<std::size_t>(control_.rank());
        if (mine_.active != 0) {
            words[2 * me] = mine_.code.sum + 1; // 0 is left to ranks that are not active
            words[2 * me + 1] = mine_.digest.sum;
        }
        control_.sum(words);
        failure_ = {FailureKind::mismatch, {}, what + ":"};
        std::optional<std::size_t> lowest;
        for (std::size_t rank = 0; rank < size; ++rank) {
            if (words[2 * rank] == 0) {
                continue;
            }
            lowest = lowest.value_or(rank);
            bool const differs = words[2 * rank] != words[2 * *lowest] ||
                                 words[2 * rank + 1] != words[2 * *lowest + 1];
            if (differs) {
                failure_.ranks.push_back(static_cast<int>(rank));
            }
            if (differs || rank == *lowest) {
                failure_.message += concat(
                    rank == *lowest ? " rank " : "; rank ",
                    rank,
                    " says: ",
                    describe(static_cast<std::uint32_t>(words[2 * rank] - 1)),
                    " (digest ",
                    words[2 * rank + 1],
                    ")"
                );
            }
        }
        failure_.message += concat("; ", advice);
    }

    /// What all ranks said in the last roll call, summed.
    [[nodiscard]] RollCallLanes const& said() const noexcept { return said_; }
    /// The ranks that arrived in the last roll call in which any did, ascending.
    [[nodiscard]] std::vector<int> const& arrived() const noexcept { return arrived_; }
    /// After the verdicts failed and mismatch: what every rank throws.
    [[nodiscard]] AbortReason const& failure() const noexcept { return failure_; }

    /// Rounds that were opened, the current one included.
    [[nodiscard]] std::size_t rounds() const noexcept { return rounds_; }
    [[nodiscard]] bool is_active(int rank) const { return is_active_[index(rank)]; }
    [[nodiscard]] std::size_t rounds_of(int rank) const {
        return is_active(rank) ? rounds_ : joined_after_[index(rank)];
    }
    [[nodiscard]] int lowest_active() const noexcept { return lowest_active_; }

private:
    static std::size_t index(int rank) noexcept { return static_cast<std::size_t>(rank); }

    Verdict hear(std::string_view text) {
        control_.wait_sum();
        posted_ = false;
        said_ = RollCallLanes::decode(words_);
        if (said_.arrived > 0 || said_.failed > 0) {
            exchange_names(text);
        }
        return judge(said_, policy_);
    }

    /// Two bitmaps, each the sum of one bit per rank: who arrived and who failed. The text travels
    /// only when one rank failed, because sums of several texts would be noise.
    void exchange_names(std::string_view text) {
        auto const size = static_cast<std::size_t>(control_.size());
        auto const me = static_cast<std::size_t>(control_.rank());
        std::size_t const map_words = (size + 63) / 64;
        std::size_t const text_words = said_.failed == 1 ? text_bytes / 8 : 0;
        std::vector<std::uint64_t> words(2 * map_words + text_words);
        std::uint64_t const my_bit = std::uint64_t{1} << (me % 64);
        words[me / 64] = mine_.arrived != 0 ? my_bit : 0;
        words[map_words + me / 64] = mine_.failed != 0 ? my_bit : 0;
        if (mine_.failed != 0 && text_words != 0) {
            for (std::size_t i = 0; i < text.size() && i < text_bytes; ++i) {
                words[2 * map_words + i / 8] |=
                    static_cast<std::uint64_t>(static_cast<unsigned char>(text[i]))
                    << (8 * (i % 8));
            }
        }
        control_.sum(words);
        auto const has_bit = [&](std::size_t map, std::size_t rank) {
            return ((words[map * map_words + rank / 64] >> (rank % 64)) & 1U) != 0;
        };
        if (said_.arrived > 0) {
            arrived_.clear();
        }
        failure_ = {FailureKind::peer_failed, {}, {}};
        for (std::size_t rank = 0; rank < size; ++rank) {
            if (has_bit(0, rank)) {
                arrived_.push_back(static_cast<int>(rank));
                is_active_[rank] = false;
                joined_after_[rank] = rounds_;
            }
            if (has_bit(1, rank)) {
                failure_.ranks.push_back(static_cast<int>(rank));
            }
        }
        while (index(lowest_active_) + 1 < size && !is_active_[index(lowest_active_)]) {
            ++lowest_active_;
        }
        std::string said;
        for (std::size_t i = 0; i < 8 * text_words; ++i) {
            auto const byte = (words[2 * map_words + i / 8] >> (8 * (i % 8))) & 0xffU;
            if (byte != 0) {
                said += static_cast<char>(static_cast<unsigned char>(byte));
            }
        }
        failure_.message = concat(
            ranks_text(failure_.ranks),
            " failed: ",
            said.empty() ? std::string{"an exception left the guard"} : said
        );
    }

    ControlCommunicator& control_;
    EndPolicy policy_;
    RollCallLanes mine_;
    RollCallLanes said_;
    RollCallLanes::Words words_{};
    bool posted_ = false;
    std::size_t rounds_ = 0;
    int lowest_active_ = 0;
    std::vector<std::size_t> joined_after_;
    std::vector<bool> is_active_;
    std::vector<int> arrived_;
    AbortReason failure_;
};

} // namespace joinable::inline v0::detail
