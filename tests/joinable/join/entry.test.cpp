// SPDX-License-Identifier: BSL-1.0
// What ranks compare when they enter a guard.
#include <joinable/join/detail/entry.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

#include <over_ranks.hpp>
#include <support/all_reducer.hpp>
#include <support/keep_alive.hpp>
#include <support/process_ranks.hpp>
#include <support/recording_communicator.hpp>
#include <support/shared.hpp>
#include <support/volume.hpp>
#include <support/wait_until.hpp>

#include <joinable/join/guard.hpp>
#include <joinable/participant/step.hpp>

namespace {

using joinable::AgreementList;
using joinable::Join;
using joinable::JoinOptions;
using joinable::JoinState;
using joinable::participants;
using joinable::detail::class_name;
using joinable_tests::AllReducer;
using joinable_tests::groups_of_participants;
using joinable_tests::over_ranks;
using joinable_tests::RankCommunicator;

template <class T>
struct Outer {
    struct Inner {};
    template <class...>
    struct Other {};
};
static_assert(class_name<int>() == "int");
static_assert(class_name<JoinOptions>() == "JoinOptions");
static_assert(class_name<Outer<JoinOptions>>() == "Outer");
static_assert(class_name<Outer<Outer<JoinOptions>>::Inner>() == "Inner");
static_assert(class_name<Outer<int>::Other<Outer<int>, JoinOptions>>() == "Other");

TEST_CASE("the name of a class in a function is its own") {
    struct Local {};
    CHECK(class_name<Local>() == "Local");
    CHECK(class_name<Outer<Local>::Other<Local>>() == "Other");
}

/// What a participant needs, and nothing else: no label, no keyword.
template <class Comm>
class Plain {
public:
    explicit Plain(Comm& comm) : comm_{comm} {}

    struct Hook {
        void main_hook() {}
        void post_hook(bool) {}
    };
    Hook join_hook(joinable::arguments<joinable::keywords<>> const&) { return {}; }
    Comm& join_communicator() { return comm_; }
    JoinState& join_state() { return state_; }

private:
    Comm& comm_;
    JoinState state_;
};
template <class Comm>
struct First : Plain<Comm> {
    using Plain<Comm>::Plain;
};
template <class Comm>
struct Second : Plain<Comm> {
    using Plain<Comm>::Plain;
};

/// What all ranks throw, or nothing.
struct Outcome {
    std::string text;
    std::vector<int> ranks;
};
template <class Enter>
Outcome mismatch_of(Enter const& enter) {
    try {
        enter();
    } catch (joinable::Mismatch const& error) {
        return {error.what(), error.ranks()};
    }
    return {};
}

template <class Comm>
void check_swapped(Comm& comm) {
    First<Comm> a{comm};
    Second<Comm> b{comm};
    auto const enter = [&](bool is_odd) {
        return mismatch_of([&] {
            if (is_odd) {
                Join guard{participants(b, a)};
            } else {
                Join guard{participants(a, b)};
            }
        });
    };
    Outcome const seen = enter(comm.rank() == 1);
    CHECK(
        seen.text == "guards differ: participants: rank 0 has [\"First\", \"Second\"], rank 1 has "
                     "[\"Second\", \"First\"]"
    );
    CHECK(seen.ranks == std::vector{1});
    comm.barrier(); // the communicator stays usable
    CHECK(enter(true).text.empty());
}

TEST_CASE("two classes without labels in another order are told apart") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) { check_swapped(comm); });
}

TEST_CASE("processes enter as threads do") {
    joinable_tests::run_process_ranks({2, 3}, [](joinable::ProcessCommunicator& comm) {
        check_swapped(comm);
    });
}

TEST_CASE("a participant that only some ranks have is named") {
    over_ranks({2, 4}, [](RankCommunicator& comm) {
        First<RankCommunicator> a{comm};
        Second<RankCommunicator> b{comm};
        Outcome const seen = mismatch_of([&] {
            if (comm.rank() == 0) {
                Join guard{participants(a)};
            } else {
                Join guard{participants(a, b)};
            }
        });
        std::string const start = "guards differ: participants: rank 0 has [\"First\"], rank 1 has "
                                  "[\"First\", \"Second\"]";
        CHECK(
            seen.text ==
            (comm.size() == 2 ? start : start + "; ranks 1, 2 and 3 differ from rank 0")
        );
    });
}

TEST_CASE("the order of participants that hooks decide may be written in any order") {
    over_ranks({2, 3, 4}, [](RankCommunicator& comm) {
        struct Gradients : Plain<RankCommunicator> {
            using Plain<RankCommunicator>::Plain;
            struct Hook : Plain<RankCommunicator>::Hook {
                using label = joinable::labels::gradients;
            };
            Hook join_hook(joinable::arguments<joinable::keywords<>> const&) { return {}; }
        };
        Gradients gradients{comm};
        joinable::Step step{comm, [] {}};
        Outcome const seen = mismatch_of([&] {
            if (comm.rank() == 0) {
                Join guard{participants(gradients, step)};
                guard.finish();
            } else {
                Join guard{participants(step, gradients)};
                guard.finish();
            }
        });
        CHECK(seen.text.empty());
    });
}

template <class Comm>
struct Named : Plain<Comm> {
    Named(Comm& comm, std::string text) : Plain<Comm>{comm}, name{std::move(text)} {}
    [[nodiscard]] std::string_view join_name() const { return name; }
    void agree_on(AgreementList& list) const {
        for (std::size_t i = 0; i < values.size(); ++i) {
            list.add("value " + std::to_string(i), values[i]);
        }
    }
    std::string name;
    std::vector<double> values = {};
};

TEST_CASE("participants have the names that they give themselves, and agree on what they add") {
    over_ranks({2, 3, 8}, [](RankCommunicator& comm) {
        bool const is_odd = comm.rank() == 1;
        Named<RankCommunicator> a{comm, is_odd ? "loss" : "accuracy"};
        auto const enter = [&] { return mismatch_of([&] { Join guard{participants(a)}; }).text; };
        CHECK(
            enter() ==
            "guards differ: participants: rank 0 has [\"accuracy\"], rank 1 has [\"loss\"]"
        );
        a.name = "loss";
        a.values = std::vector<double>(100, 0.5);
        CHECK(enter().empty());
        a.values[90] = is_odd ? 0.25 : 0.5;
        CHECK(
            enter() ==
            "guards differ: participant 0 (loss): value 90: rank 0 has 0.5, rank 1 has 0.25"
        );
        a.values[90] = 0.5;
        CHECK(enter().empty());
    });
}

template <class H>
struct Alike : Plain<RankCommunicator> {
    using Plain<RankCommunicator>::Plain;
    [[nodiscard]] std::string_view join_name() const { return "alike"; }
    H join_hook(joinable::arguments<joinable::keywords<>> const&) { return {}; }
};
struct AnyPlace : Plain<RankCommunicator>::Hook {
    using label = AnyPlace;
};
struct PostFirst : Plain<RankCommunicator>::Hook {
    using label = PostFirst;
    using post_runs_before = joinable::labels_of<AnyPlace>;
};

TEST_CASE("post hooks in another order are told apart, also of participants of one name") {
    over_ranks({2, 3, 4}, [](RankCommunicator& comm) {
        Alike<AnyPlace> a{comm};
        Alike<AnyPlace> b{comm};
        Alike<PostFirst> c{comm};
        CHECK(
            mismatch_of([&] {
                if (comm.rank() == 1) {
                    Join guard{participants(a, c)};
                } else {
                    Join guard{participants(a, b)};
                }
            }).text == "guards differ: order of post hooks: rank 0 has [0, 1], rank 1 has [1, 0]"
        );
    });
}

// -- keywords ----------------------------------------------------------------------------------------

struct Custom {
    int relevant = 0;
    int irrelevant = 0;
};
inline constexpr struct scale_t : joinable::keyword<scale_t, double> {
    using keyword::operator=;
} scale{};
inline constexpr struct log_file_t : joinable::keyword<log_file_t, std::string> {
    using keyword::operator=;
    static constexpr bool per_rank = true;
} log_file{};
inline constexpr struct limit_t : joinable::keyword<limit_t, std::optional<int>> {
    using keyword::operator=;
} limit{};
inline constexpr struct custom_t : joinable::keyword<custom_t, Custom> {
    using keyword::operator=;
    static void agree_on(AgreementList& list, Custom const& value) {
        list.add("custom.relevant", value.relevant);
    }
} custom{};

template <class Comm>
struct Keyed : Plain<Comm> {
    using Plain<Comm>::Plain;
    using join_keywords = joinable::keywords<scale_t, log_file_t, limit_t, custom_t>;
    typename Plain<Comm>::Hook join_hook(joinable::arguments<join_keywords> const&) { return {}; }
};

TEST_CASE("keyword values that differ are named, and not given is a value of its own") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        bool const is_odd = comm.rank() == 1;
        Keyed<RankCommunicator> a{comm};
        std::string const start = "guards differ: participant 0 (Keyed): keyword ";
        CHECK(mismatch_of([&] {
                  Join guard{participants(a), scale = is_odd ? 0.5 : 2.0};
              }).text == start + "scale: rank 0 has 2, rank 1 has 0.5");
        CHECK(mismatch_of([&] {
                  if (is_odd) {
                      Join guard{participants(a), scale = 0.0};
                  } else {
                      Join guard{participants(a)};
                  }
              }).text == start + "scale: rank 0 has no value, rank 1 has 0");
        CHECK(mismatch_of([&] {
                  if (is_odd) {
                      Join guard{participants(a), limit = std::optional<int>{}};
                  } else {
                      Join guard{participants(a)};
                  }
              }).text == start + "limit: rank 0 has no value, rank 1 has a value (no value)");
        CHECK(mismatch_of([&] {
                  if (is_odd) {
                      Join guard{participants(a)};
                  } else {
                      Join guard{participants(a), custom = Custom{}};
                  }
              }).text == start + "custom: rank 0 has a value, rank 1 has no value");
        CHECK(
            mismatch_of([&] { Join guard{participants(a), custom = Custom{is_odd ? 7 : 8, 0}}; }
            ).text ==
            "guards differ: participant 0 (Keyed): custom.relevant: rank 0 has 8, rank 1 has 7"
        );
        CHECK(
            mismatch_of([&] {
                std::string const name = "rank" + std::to_string(comm.rank());
                Join guard{
                    participants(a), log_file = name, custom = Custom{1, comm.rank()}, scale = -1.0
                };
            }).text.empty()
        );
    });
}

// -- options -----------------------------------------------------------------------------------------

TEST_CASE("each option that ranks must share is named with both values") {
    struct Row {
        std::function<void(JoinOptions&)> change;
        std::string text;
    };
    Row const rows[] = {
        {[](JoinOptions& o) { o.end_policy = joinable::EndPolicy::throw_early; },
         "end_policy: rank 0 has drain, rank 1 has throw_early"},
        {[](JoinOptions& o) { o.inputs = 0; }, "inputs: rank 0 has no value, rank 1 has a value"},
        {[](JoinOptions& o) { o.weight_per_input = 0; },
         "weight_per_input: rank 0 has no value, rank 1 has a value"},
        {[](JoinOptions& o) { o.sync_every = 2; }, "sync_every: rank 0 has 1, rank 1 has 2"},
        {[](JoinOptions& o) { o.carry_accumulated = false; },
         "carry_accumulated: rank 0 has true, rank 1 has false"},
    };
    for (Row const& row : rows) {
        over_ranks({2, 3, 4, 8}, [&](RankCommunicator& comm) {
            First<RankCommunicator> a{comm};
            JoinOptions options;
            if (comm.rank() == 1) {
                row.change(options);
            }
            Outcome const seen = mismatch_of([&] { Join guard{participants(a), options}; });
            CHECK(seen.text == "options differ: " + row.text);
            CHECK(seen.ranks == std::vector{1});
        });
    }
}

TEST_CASE("options of one rank alone may differ") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        First<RankCommunicator> a{comm};
        auto const rank = static_cast<std::size_t>(comm.rank());
        JoinOptions options;
        options.timeout = std::chrono::seconds{60 + comm.rank()};
        options.inputs = 0;
        options.weight_per_input = 3 + rank;
        options.skew_limit = 5 + rank;
        if (rank == 0) {
            options.warn = [](std::string_view) {};
        }
        CHECK(mismatch_of([&] { Join guard{participants(a), options}; }).text.empty());
    });
}

TEST_CASE("a rank that does not enter with the others is missing, and they say what it may be") {
    for (int const size : groups_of_participants({2, 3, 4})) {
        joinable_tests::Shared<std::atomic<int>> arrived;
        joinable_tests::Shared<std::atomic<int>> ended;
        over_ranks({size}, [&](RankCommunicator& inner) {
            joinable_tests::RecordingCommunicator comm{inner};
            comm.posted = [&] { ++*arrived; };
            First<joinable_tests::RecordingCommunicator<RankCommunicator>> a{comm};
            if (comm.rank() == 1) {
                Join guard{participants(a), {.enable = false}};
                joinable_tests::wait_until(*ended, size - 1);
                return;
            }
            if (comm.rank() == 0) { // gives up, when rank 1 is the only one to miss
                joinable_tests::wait_until(*arrived, size - 2);
                comm.set_deadline(std::chrono::milliseconds{300});
            } else { // hears it from rank 0, but for ranks that only rank 1 connects with it
                comm.set_deadline(2 * joinable_tests::long_deadline);
            }
            std::string text;
            try {
                Join guard{participants(a)};
            } catch (joinable::TimedOut const& error) {
                text = error.what();
                CHECK(error.missing() == std::vector{1});
            }
            CHECK(text.ends_with("; a Join with enable = false does not enter"));
            ++*ended;
        });
    }
}

// -- failures ----------------------------------------------------------------------------------------

TEST_CASE("a rank whose hook cannot be made hides a difference of another one") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        AllReducer a{comm};
        int const culprit = comm.size() - 1;
        a.before_hook = [&] {
            if (comm.rank() == culprit) {
                throw std::range_error{"no hook"};
            }
        };
        auto const enter = [&] {
            Join guard{participants(a), {.sync_every = comm.rank() == 0 ? 3U : 1U}};
        };
        if (comm.rank() == culprit) {
            CHECK_THROWS_AS(enter(), std::range_error);
        } else {
            CHECK_THROWS_WITH_AS(
                enter(),
                joinable::detail::concat("rank ", culprit, " failed: no hook").c_str(),
                joinable::PeerFailed
            );
        }
        comm.barrier();
    });
}

TEST_CASE("a rank that cannot enter says why, though the others do not come to hear it") {
    for (int const size : groups_of_participants({2, 3, 4})) {
        joinable_tests::Shared<std::atomic<int>> ended;
        over_ranks({size}, [&](RankCommunicator& comm) {
            if (comm.rank() != 0) {
                joinable_tests::wait_until(*ended, 1);
                return;
            }
            comm.set_deadline(std::chrono::milliseconds{100});
            AllReducer a{comm};
            a.before_hook = [] { throw std::range_error{"no hook"}; };
            std::string text;
            try {
                Join guard{participants(a)};
            } catch (std::exception const& error) {
                text = error.what();
            }
            ++*ended;
            CHECK(text == "no hook");
        });
    }
}

template <class Comm>
struct Unlisted : Plain<Comm> {
    using Plain<Comm>::Plain;
    void agree_on(AgreementList&) const {
        if (this->has_no_memory) {
            throw std::bad_alloc{};
        }
    }
    bool has_no_memory = false;
};

TEST_CASE("a rank that has no memory for its list fails on all") {
    over_ranks({2, 3, 4, 8}, [](RankCommunicator& comm) {
        Unlisted<RankCommunicator> a{comm};
        a.has_no_memory = comm.rank() == 0;
        auto const enter = [&] { Join guard{participants(a)}; };
        if (comm.rank() == 0) {
            CHECK_THROWS_AS(enter(), std::bad_alloc);
        } else {
            CHECK_THROWS_WITH_AS(enter(), "rank 0 failed: std::bad_alloc", joinable::PeerFailed);
        }
        comm.barrier();
    });
}

} // namespace
