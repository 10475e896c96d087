// SPDX-License-Identifier: BSL-1.0
#include <joinable/join/detail/roll_call.hpp>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <doctest/doctest.h>

#include <support/ranks.hpp>

namespace {

using namespace joinable::detail;
using joinable::EndPolicy;
using joinable::Phase;

/// Adds what other ranks would have said, one script line per sum: no other rank is needed.
class ScriptedControl final : public ControlCommunicator {
public:
    ScriptedControl(int rank, int size, std::vector<std::vector<std::uint64_t>> others)
        : rank_{rank}, size_{size}, others_{std::move(others)} {}

    [[nodiscard]] int rank() const override { return rank_; }
    [[nodiscard]] int size() const override { return size_; }
    [[nodiscard]] void const* address() const noexcept override { return this; }
    [[nodiscard]] std::unique_ptr<ControlCommunicator> twin() override { return nullptr; }
    void post_sum(std::span<std::uint64_t> words) override {
        REQUIRE(sums < others_.size());
        REQUIRE(words.size() == others_[sums].size());
        for (std::size_t i = 0; i < words.size(); ++i) {
            words[i] += others_[sums][i];
        }
        ++sums;
    }
    [[nodiscard]] bool test_sum() override { return true; }
    void wait_sum() override {}
    void abort(joinable::AbortReason const&) override {}
    [[nodiscard]] bool can_abort() const noexcept override { return false; }
    [[nodiscard]] bool is_aborted() override { return false; }
    [[nodiscard]] std::optional<joinable::AbortReason> abort_reason() const override { return {}; }
    [[nodiscard]] bool is_renumbered() const override { return false; }
    bool keep_alive() override { return false; }
    std::optional<std::chrono::nanoseconds> exchange_deadline(std::chrono::nanoseconds) override {
        return {};
    }

    std::size_t sums = 0;

private:
    int rank_;
    int size_;
    std::vector<std::vector<std::uint64_t>> others_;
};

RollCallLanes active_rank(
    RoundCode code, std::uint32_t digest = 5, std::uint64_t weight = 0, bool is_weighted = false
) {
    RollCallLanes lanes;
    lanes.active = 1;
    lanes.contributors = 1;
    lanes.weight = weight;
    lanes.weighted = is_weighted ? 1 : 0;
    lanes.code = Agreement::of(code.encode());
    lanes.digest = Agreement::of(digest);
    return lanes;
}

std::vector<std::uint64_t> sum_of(std::vector<RollCallLanes> const& ranks) {
    std::vector<std::uint64_t> sum(7);
    for (RollCallLanes const& rank : ranks) {
        auto const words = rank.encode();
        for (std::size_t i = 0; i < 7; ++i) {
            sum[i] += words[i];
        }
    }
    return sum;
}

constexpr RoundCode training{Phase::train, true, Opening::notification, 0};
constexpr RoundCode evaluation{Phase::evaluate, false, Opening::notification, 0};

RollCallLanes arriving() {
    RollCallLanes lanes;
    lanes.arrived = 1;
    return lanes;
}

TEST_CASE("values agree exactly when all ranks added the same one") {
    for (std::uint32_t const a : {0U, 1U, 2U, 3U, 7U, digest_mask}) {
        for (std::uint32_t const b : {0U, 1U, 2U, 3U, 7U, digest_mask}) {
            for (std::uint32_t const c : {0U, 1U, 2U, 3U, 7U, digest_mask}) {
                Agreement sum;
                for (std::uint32_t const value : {a, b, c}) {
                    sum.sum += Agreement::of(value).sum;
                    sum.squares += Agreement::of(value).squares;
                }
                auto const agreed = sum.value(3);
                CHECK(agreed.has_value() == (a == b && b == c));
                if (agreed) {
                    CHECK(*agreed == a);
                }
            }
        }
    }
}

TEST_CASE("no lane overflows with the largest world and the largest values") {
    auto const n = static_cast<std::uint64_t>(max_world_size);
    Agreement const sum{n * digest_mask, n * digest_mask * digest_mask};
    CHECK(sum.value(n) == digest_mask);
    CHECK((n * digest_mask * digest_mask) / n / digest_mask == digest_mask);
    CHECK((n * max_weight) / n == max_weight);
    RollCallLanes lanes;
    lanes.active = lanes.arrived = lanes.failed = lanes.stop = lanes.contributors = lanes.weighted =
        lanes.silent = static_cast<std::uint32_t>(n);
    lanes.code = lanes.digest = sum;
    RollCallLanes const decoded = RollCallLanes::decode(lanes.encode());
    CHECK(decoded.active == n);
    CHECK(decoded.arrived == n);
    CHECK(decoded.failed == n);
    CHECK(decoded.stop == n);
    CHECK(decoded.contributors == n);
    CHECK(decoded.weighted == n);
    CHECK(decoded.silent == n);
    CHECK(decoded.code.value(n) == digest_mask);
    CHECK(decoded.digest.value(n) == digest_mask);
}

TEST_CASE("the verdict follows the order failed, mismatch, stop, early end, end, go on") {
    auto const says = [](std::uint32_t active,
                         std::uint32_t arrived,
                         std::uint32_t failed,
                         std::uint32_t stop,
                         bool mismatch) {
        RollCallLanes lanes;
        lanes.active = active;
        lanes.arrived = arrived;
        lanes.failed = failed;
        lanes.stop = stop;
        lanes.code = {active * 3ULL + (mismatch ? 1 : 0), active * 9ULL};
        return lanes;
    };
    struct Row {
        std::uint32_t active, arrived, failed, stop;
        bool mismatch;
        Verdict drain, stop_at_first, throw_early;
    };
    using enum Verdict;
    Row const table[] = {
        {2, 0, 0, 0, false, go_on, go_on, go_on},
        {2, 1, 0, 0, false, go_on, joinable::detail::Verdict::stop, early_end},
        {0, 2, 0, 0, false, end, end, end},
        {0, 0, 0, 0, false, end, end, end},
        {2, 1, 1, 1, true, failed, failed, failed},
        {0, 1, 1, 0, false, failed, failed, failed},
        {2, 1, 0, 1, true, mismatch, mismatch, mismatch},
        {2,
         1,
         0,
         1,
         false,
         joinable::detail::Verdict::stop,
         joinable::detail::Verdict::stop,
         joinable::detail::Verdict::stop},
        {0, 1, 0, 1, false, end, end, end},
    };
    for (Row const& row : table) {
        CAPTURE(&row - table);
        auto const lanes = says(row.active, row.arrived, row.failed, row.stop, row.mismatch);
        CHECK(judge(lanes, EndPolicy::drain) == row.drain);
        CHECK(judge(lanes, EndPolicy::stop_at_first) == row.stop_at_first);
        CHECK(judge(lanes, EndPolicy::throw_early) == row.throw_early);
    }
}

TEST_CASE("a round in which nothing happens costs one sum") {
    ScriptedControl control{
        0, 3, {sum_of({active_rank(training, 5, 10), active_rank(training, 5, 4)})}
    };
    RollCall roll_call{control, EndPolicy::drain};
    roll_call.post(active_rank(training, 5, 6));
    CHECK(roll_call.answer() == Verdict::go_on);
    CHECK(control.sums == 1);
    CHECK(roll_call.totals().active == 3);
    CHECK(roll_call.totals().contributors == 3);
    CHECK(roll_call.totals().weight == 20);
    CHECK(roll_call.rounds() == 1);
}

TEST_CASE("a rank that arrives costs one more sum and is known by its number") {
    // Rank 2 of 3 arrives in the second roll call, this one (0) later, rank 1 stays active.
    std::vector<std::uint64_t> const map{0b100, 1, 70, 1}; // who arrives; its carry
    ScriptedControl control{
        0,
        3,
        {sum_of({active_rank(training), active_rank(training)}),
         sum_of({active_rank(training), arriving()}),
         map}
    };
    RollCall roll_call{control, EndPolicy::drain};
    roll_call.post(active_rank(training));
    CHECK(roll_call.answer() == Verdict::go_on);
    roll_call.post(active_rank(training));
    CHECK(roll_call.answer() == Verdict::go_on);
    CHECK(control.sums == 3);
    CHECK(roll_call.arrived() == std::vector{2});
    CHECK(roll_call.carry() == Carry{1, 70, 1});
    CHECK(roll_call.is_active(0));
    CHECK_FALSE(roll_call.is_active(2));
    CHECK(roll_call.rounds_of(0) == 2);
    CHECK(roll_call.rounds_of(2) == 1);
}

TEST_CASE("the lowest active rank moves up when the lower ones have joined") {
    std::vector<std::uint64_t> const map{0b0011, 0, 0, 0};
    ScriptedControl control{3, 4, {sum_of({arriving(), arriving(), active_rank(training)}), map}};
    RollCall roll_call{control, EndPolicy::drain};
    roll_call.post(active_rank(training));
    CHECK(roll_call.answer() == Verdict::go_on);
    CHECK(roll_call.lowest_active() == 2);
}

TEST_CASE("a failed rank is named with its text on every rank that asks") {
    RollCallLanes leaving;
    leaving.failed = 1;
    std::vector<std::uint64_t> who(384);
    std::vector<std::uint64_t> text(384);
    who[0] = 0b10;
    text[0] = 0x6b'73'69'64; // "disk", little endian
    ScriptedControl control{0, 2, {sum_of({leaving}), who, text}};
    RollCall roll_call{control, EndPolicy::drain};
    roll_call.post(active_rank(training));
    CHECK(roll_call.answer() == Verdict::failed);
    CHECK(roll_call.failure().kind == joinable::FailureKind::peer_failed);
    CHECK(roll_call.failure().ranks == std::vector{1});
    CHECK(roll_call.failure().message == "rank 1 failed: disk");
}

TEST_CASE("of ranks that open different rounds the first difference is named, among active ranks") {
    joinable_tests::run_ranks({3, 4, 8}, [](joinable::ThreadCommunicator& comm) {
        RoundCode const weighted{Phase::train, true, Opening::next, 0};
        ControlOver<joinable::ThreadCommunicator&> control{comm};
        RollCall roll_call{control, EndPolicy::drain};
        roll_call.post(comm.rank() == 0 ? arriving() : active_rank(training));
        CHECK(roll_call.answer() == Verdict::go_on);
        roll_call.post(
            comm.rank() == 0   ? RollCallLanes{}
            : comm.rank() == 2 ? active_rank(weighted, 5, 0, true)
                               : active_rank(training)
        );
        CHECK(roll_call.answer() == Verdict::mismatch);
        CHECK(roll_call.failure().kind == joinable::FailureKind::mismatch);
        CHECK(roll_call.failure().ranks == std::vector{2});
        CHECK(
            roll_call.failure().message ==
            "ranks disagree about round 1: has a weight: rank 1 has false, rank 2 has true; every "
            "active rank must open the same round"
        );
    });
}

RollCallLanes silent_rank(RoundCode code) {
    RollCallLanes lanes = active_rank(code);
    lanes.contributors = 0;
    lanes.silent = 1;
    return lanes;
}

TEST_CASE("a rank that skips and gives no weight goes along with weighted rounds and with others") {
    for (bool const is_weighted : {false, true}) {
        RollCallLanes const speaking = active_rank(training, 5, 0, is_weighted);
        ScriptedControl control{0, 3, {sum_of({speaking, silent_rank(training)})}};
        RollCall roll_call{control, EndPolicy::drain};
        roll_call.post(speaking);
        CHECK(roll_call.answer() == Verdict::go_on);
        CHECK(roll_call.totals().weighted == (is_weighted ? 2 : 0));
        CHECK(roll_call.totals().silent == 1);
    }
}

TEST_CASE("where weights differ, ranks that do not say whether they have one are not blamed") {
    joinable_tests::run_ranks({3, 4, 8}, [](joinable::ThreadCommunicator& comm) {
        ControlOver<joinable::ThreadCommunicator&> control{comm};
        RollCall roll_call{control, EndPolicy::drain};
        roll_call.post(
            comm.rank() == 0 ? silent_rank(training) : active_rank(training, 5, 0, comm.rank() == 2)
        );
        CHECK(roll_call.answer() == Verdict::mismatch);
        CHECK(roll_call.failure().ranks == std::vector{2});
        CHECK(
            roll_call.failure().message ==
            "ranks disagree about round 0: has a weight: rank 1 has false, rank 2 has true; every "
            "active rank must open the same round"
        );
    });
}

TEST_CASE("what else ranks disagree on is named before a weight that a rank does not give") {
    joinable_tests::run_ranks({2, 3, 4}, [](joinable::ThreadCommunicator& comm) {
        ControlOver<joinable::ThreadCommunicator&> control{comm};
        RollCall roll_call{control, EndPolicy::drain};
        RoundCode const other{Phase::train, true, Opening::next, 0};
        roll_call.post(comm.rank() == 0 ? silent_rank(training) : active_rank(other, 5, 0, true));
        CHECK(roll_call.answer() == Verdict::mismatch);
        CHECK(
            roll_call.failure().message.find(
                "opened by: rank 0 has participant 0, rank 1 has next()"
            ) != std::string::npos
        );
    });
}

TEST_CASE("a rank that evaluates while another trains is a mismatch") {
    joinable_tests::run_ranks({2, 3, 4}, [](joinable::ThreadCommunicator& comm) {
        ControlOver<joinable::ThreadCommunicator&> control{comm};
        RollCall roll_call{control, EndPolicy::drain};
        roll_call.post(active_rank(comm.rank() == 0 ? training : evaluation));
        CHECK(roll_call.answer() == Verdict::mismatch);
        CHECK(roll_call.failure().message.starts_with(
            "ranks disagree about round 0: phase: rank 0 has train, rank 1 has evaluate"
        ));
    });
}

TEST_CASE("the names of more than 64 ranks fit") {
    std::vector<std::uint64_t> map(5);
    map[1] = std::uint64_t{1} << 3; // rank 67
    std::vector<RollCallLanes> others(68, active_rank(training));
    others.push_back(arriving());
    ScriptedControl control{69, 70, {sum_of(others), map}};
    RollCall roll_call{control, EndPolicy::drain};
    roll_call.post(active_rank(training));
    CHECK(roll_call.answer() == Verdict::go_on);
    CHECK(roll_call.arrived() == std::vector{67});
}

} // namespace
