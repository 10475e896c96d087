// SPDX-License-Identifier: BSL-1.0
#include <joinable/agreement/agree.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <support/process_ranks.hpp>
#include <support/ranks.hpp>
#include <support/recording_communicator.hpp>
#include <support/wait_until.hpp>

#include <joinable/agreement/on_all_ranks.hpp>

namespace {

using joinable::AgreementList;
using joinable::ThreadCommunicator;
using joinable::detail::agree;
using joinable::detail::ControlCommunicator;
using joinable::detail::ControlOver;
using joinable::detail::DifferenceReport;
using joinable::detail::on_all_ranks;
using joinable_tests::RecordingCommunicator;
using joinable_tests::run_ranks;

AgreementList list_of(std::vector<int> const& values) {
    AgreementList list;
    list.begin_section("lists differ: ");
    for (std::size_t i = 0; i < values.size(); ++i) {
        list.add("item " + std::to_string(i), values[i]);
    }
    return list;
}

/// What agree() or on_all_ranks() threw on this rank.
struct Outcome {
    std::string type = "nothing";
    std::string text;
    std::vector<int> ranks;

    friend bool operator==(Outcome const&, Outcome const&) = default;
};
std::ostream& operator<<(std::ostream& stream, Outcome const& outcome) {
    return stream << outcome.type << ": " << outcome.text << " "
                  << joinable::detail::concat(outcome.ranks);
}

enum class By { agree, on_all_ranks };

template <class Comm>
Outcome outcome_of(
    Comm& comm, AgreementList const& list, std::exception_ptr const& error = {}, By by = By::agree
) {
    ControlOver<Comm&> control{comm};
    try {
        if (by == By::agree) {
            agree(control, list, error);
        } else {
            on_all_ranks(control, [&](AgreementList& compared) {
                compared = list;
                if (error) {
                    std::rethrow_exception(error);
                }
            });
        }
        return {};
    } catch (joinable::Mismatch const& failure) {
        return {"Mismatch", failure.what(), failure.ranks()};
    } catch (joinable::PeerFailed const& failure) {
        return {"PeerFailed", failure.what(), failure.ranks()};
    } catch (std::exception const& failure) {
        return {"own", failure.what(), {}};
    }
}

std::exception_ptr error(std::string const& text) {
    return std::make_exception_ptr(std::range_error{text});
}

TEST_CASE("ranks with the same lists agree by one sum of seven words, whatever the lists hold") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& inner) {
        for (std::size_t const count : {0U, 1U, 63U, 64U, 1000U}) {
            RecordingCommunicator comm{inner};
            CHECK(outcome_of(comm, list_of(std::vector<int>(count, 5))) == Outcome{});
            CHECK(comm.trace == std::vector<std::string>{"all_reduce 7 u64"});
        }
    });
}

TEST_CASE("the first item that differs is named, also behind the 64th") {
    run_ranks({2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        for (std::size_t const at : {0U, 1U, 62U, 63U, 64U, 125U, 126U, 127U, 199U}) {
            for (int const odd : {0, comm.size() - 1}) {
                std::vector<int> values(200, 1);
                if (comm.rank() == odd) {
                    values[at] = 2;
                    values.back() = 3; // a later one
                }
                Outcome const seen = outcome_of(comm, list_of(values));
                std::string const item =
                    "lists differ: item " + std::to_string(at) + ": rank 0 has ";
                std::string const two = at == 199 ? "3" : "2";
                CHECK(seen.type == "Mismatch");
                if (odd != 0) {
                    std::string const last = std::to_string(odd);
                    CHECK(seen.text == item + "1, rank " + last + " has " + two);
                    CHECK(seen.ranks == std::vector{odd});
                } else {
                    CHECK(seen.text.starts_with(item + two + ", rank 1 has 1"));
                    CHECK(seen.ranks.size() == static_cast<std::size_t>(comm.size() - 1));
                }
            }
        }
        CHECK(outcome_of(comm, list_of({1})) == Outcome{}); // the communicator stays usable
    });
}

TEST_CASE("the first difference of very many items takes a message for each 64 of them") {
    run_ranks({2}, [](ThreadCommunicator& inner) {
        for (std::size_t const at : {0U, 63U, 64U, 99'990U}) {
            RecordingCommunicator comm{inner};
            std::vector<int> values(100'000, 1);
            values[at] += comm.rank();
            Outcome const seen = outcome_of(comm, list_of(values));
            CHECK(
                seen.text ==
                "lists differ: item " + std::to_string(at) + ": rank 0 has 1, rank 1 has 2"
            );
            CHECK(
                comm.trace.size() == 1 + (at / 64 + 1) + 3
            ); // then its hash, the ranks, the texts
        }
    });
}

TEST_CASE("the search for a difference ends where no list goes on, though none differ") {
    run_ranks({1, 2, 3}, [](ThreadCommunicator& inner) {
        for (std::size_t const count : {0U, 1U, 63U, 64U, 65U, 128U}) {
            RecordingCommunicator comm{inner};
            ControlOver<RecordingCommunicator<ThreadCommunicator>&> control{comm};
            DifferenceReport report{control, 0, static_cast<std::uint64_t>(comm.size()), true};
            auto const reason = report.difference(list_of(std::vector<int>(count, 5)));
            CHECK(reason.ranks.empty());
            CHECK(comm.trace.size() == (count + 63) / 64 + 1 + 3);
        }
    });
}

TEST_CASE("messages grow neither with the ranks nor with the items") {
    run_ranks({2, 3, 8}, [](ThreadCommunicator& inner) {
        for (std::size_t const count : {1U, 63U}) {
            RecordingCommunicator comm{inner};
            std::vector<int> values(count, 5);
            values.back() = inner.rank();
            CHECK(outcome_of(comm, list_of(values)).type == "Mismatch");
            std::string const message = "all_reduce 384 u64";
            CHECK(
                comm.trace ==
                std::vector<std::string>{"all_reduce 7 u64", message, message, message, message}
            );
        }
    });
}

TEST_CASE("all ranks that differ from the lowest are named, with the value of the lowest of them") {
    run_ranks({3, 4, 8}, [](ThreadCommunicator& comm) {
        int const value = comm.rank() == 0 || comm.rank() == 1 ? 10 : 10 * comm.rank();
        Outcome const seen = outcome_of(comm, list_of({1, value, comm.rank()}));
        std::string const start = "lists differ: item 1: rank 0 has 10, rank 2 has 20";
        std::vector<int> ranks;
        for (int rank = 2; rank < comm.size(); ++rank) {
            ranks.push_back(rank);
        }
        CHECK(seen.ranks == ranks);
        if (comm.size() == 3) {
            CHECK(seen.text == start);
        } else if (comm.size() == 4) {
            CHECK(seen.text == start + "; ranks 2 and 3 differ from rank 0");
        } else {
            CHECK(seen.text == start + "; ranks 2, 3, 4, 5, 6 and 7 differ from rank 0");
        }
    });
}

TEST_CASE("a list that ends earlier has nothing where another one goes on") {
    run_ranks({2, 4}, [](ThreadCommunicator& comm) {
        for (std::size_t const count : {0U, 2U, 62U, 63U, 64U}) {
            for (int const shorter : {0, 1}) {
                bool const is_shorter = (comm.rank() == 1) == (shorter == 1);
                Outcome const seen =
                    outcome_of(comm, list_of(std::vector<int>(count + (is_shorter ? 0 : 1), 4)));
                std::string const item = "lists differ: item " + std::to_string(count);
                CHECK(seen.text.starts_with(
                    item + (shorter == 1 ? ": rank 0 has 4, rank 1 has nothing"
                                         : ": rank 0 has nothing, rank 1 has 4")
                ));
            }
        }
    });
}

TEST_CASE("labels that differ are both named, their title once, and what has another title, too") {
    run_ranks({2, 3}, [](ThreadCommunicator& comm) {
        AgreementList list;
        list.begin_section("models differ: ");
        list.add(comm.rank() == 1 ? "bias" : "weight", "f32");
        CHECK(
            outcome_of(comm, list) ==
            Outcome{"Mismatch", "models differ: weight: rank 0 has f32, rank 1 has bias: f32", {1}}
        );
        AgreementList other;
        other.begin_section(comm.rank() == 1 ? "options differ: " : "models differ: ");
        other.add("x", 1);
        CHECK(
            outcome_of(comm, other) ==
            Outcome{
                "Mismatch",
                "ranks are at different places of the program: rank 0 compares models (x: 1), rank 1 "
                "compares options (x: 1); do the same on every rank, in the same order",
                {1}
            }
        );
        AgreementList untitled;
        untitled.add(comm.rank() == 1 ? "xa" : "xb", 1);
        CHECK(
            outcome_of(comm, untitled) ==
            Outcome{"Mismatch", "xb: rank 0 has 1, rank 1 has xa: 1", {1}}
        );
    });
}

TEST_CASE("texts that are too long end with dots, and the value is still said") {
    run_ranks({2, 4}, [](ThreadCommunicator& comm) {
        AgreementList list;
        list.begin_section("lists differ: ");
        list.add(std::string(500, 'l'), std::string(500, comm.rank() == 1 ? 'b' : 'a'));
        std::string const label = "lists differ: " + std::string(95, 'l') + "...";
        CHECK(
            outcome_of(comm, list) ==
            Outcome{
                "Mismatch",
                label + ": rank 0 has " + std::string(141, 'a') + "..., rank 1 has " +
                    std::string(141, 'b') + "...",
                {1}
            }
        );
        AgreementList fits;
        fits.begin_section("lists differ: ");
        fits.add(std::string(98, 'l'), std::string(144, comm.rank() == 1 ? 'b' : 'a'));
        CHECK(
            outcome_of(comm, fits).text == "lists differ: " + std::string(98, 'l') +
                                               ": rank 0 has " + std::string(144, 'a') +
                                               ", rank 1 has " + std::string(144, 'b')
        );
        bool const fails = comm.rank() == 1;
        Outcome const failed = outcome_of(comm, {}, fails ? error(std::string(500, 'e')) : nullptr);
        CHECK(
            failed.text ==
            (fails ? std::string(500, 'e') : "rank 1 failed: " + std::string(253, 'e') + "...")
        );
        auto const umlauts = [](int count) { // of two bytes, none of which is cut
            std::string text;
            for (int i = 0; i < count; ++i) {
                text += "\u00e4";
            }
            return text;
        };
        CHECK(
            outcome_of(comm, {}, fails ? error(umlauts(200)) : nullptr).text ==
            (fails ? umlauts(200) : "rank 1 failed: " + umlauts(126) + "...")
        );
    });
}

TEST_CASE("a local error hides a difference: its rank throws it, the others its text") {
    run_ranks({2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        for (int const culprit : {0, comm.size() - 1}) {
            bool const fails = comm.rank() == culprit;
            Outcome const seen =
                outcome_of(comm, list_of({comm.rank()}), fails ? error("no memory") : nullptr);
            CHECK(
                seen ==
                (fails
                     ? Outcome{"own", "no memory", {}}
                     : Outcome{"PeerFailed", "rank " + std::to_string(culprit) + " failed: no memory", {culprit}}
                )
            );
        }
        CHECK(outcome_of(comm, {}) == Outcome{});
    });
}

TEST_CASE("of several local errors the text of the lowest rank is told, and all of them are named"
) {
    run_ranks({3, 4}, [](ThreadCommunicator& comm) {
        bool const fails = comm.rank() == 1 || comm.rank() == 2;
        Outcome const seen =
            outcome_of(comm, {}, fails ? error("disk " + std::to_string(comm.rank())) : nullptr);
        CHECK(
            seen == (fails ? Outcome{"own", "disk " + std::to_string(comm.rank()), {}}
                           : Outcome{"PeerFailed", "ranks 1 and 2 failed: disk 1", {1, 2}})
        );
    });
}

TEST_CASE("a rank that has no memory for one of the messages fails on all at once") {
    enum class Finds { difference, error, error_on_all_ranks };
    for (Finds const finds : {Finds::difference, Finds::error, Finds::error_on_all_ranks}) {
        bool const differs = finds == Finds::difference; // else another rank has an error
        By const by = finds == Finds::error_on_all_ranks ? By::on_all_ranks : By::agree;
        int const messages = differs ? 6 : 3;
        for (int const size : {2, 3, 4, 8}) {
            for (int const culprit : {0, size - 1}) {
                for (int nth = 1; nth <= messages; ++nth) {
                    CAPTURE(size);
                    CAPTURE(culprit);
                    CAPTURE(nth);
                    CAPTURE(static_cast<int>(finds));
                    std::atomic<int> ended = 0;
                    run_ranks({size}, [&](ThreadCommunicator& inner) {
                        RecordingCommunicator comm{inner};
                        bool const is_culprit = comm.rank() == culprit;
                        int sent = 0;
                        comm.before = [&](auto const&) {
                            if (++sent == nth && is_culprit) {
                                throw std::bad_alloc{};
                            }
                        };
                        std::vector<int> values(100, 1);
                        values.back() = differs ? comm.rank() : 1; // needs a message more
                        bool const fails = !differs && comm.rank() == (culprit + 1) % size;
                        Outcome const seen =
                            outcome_of(comm, list_of(values), fails ? error("disk") : nullptr, by);
                        if (fails) { // its own error, whatever ends the exchange
                            CHECK(seen == Outcome{"own", "disk", {}});
                            ++ended;
                        } else if (is_culprit) {
                            CHECK(seen.type == "own");
                            joinable_tests::wait_until(ended, size - 1);
                        } else {
                            CHECK(seen.type == "PeerFailed");
                            CHECK(seen.ranks == std::vector{culprit});
                            ++ended;
                        }
                    });
                }
            }
        }
    }
}

TEST_CASE("a local error that names ranks of a group is told without them if it cannot be exchanged"
) {
    for (bool const is_renumbered : {false, true}) {
        for (By const by : {By::agree, By::on_all_ranks}) {
            run_ranks({2, 3, 4, 8}, [&](ThreadCommunicator& inner) {
                RecordingCommunicator comm{inner};
                int const last = comm.size() - 1;
                bool const fails = comm.rank() == last;
                comm.before = [&](auto const&) {
                    if (fails) {
                        throw std::bad_alloc{};
                    }
                };
                std::exception_ptr const own = std::make_exception_ptr(
                    joinable::PeerFailed{{0}, "rank 0 failed: disk", is_renumbered}
                );
                Outcome const seen = outcome_of(comm, {}, fails ? own : nullptr, by);
                std::string const in_group =
                    "rank " + std::to_string(last) + " failed: in a group split off: ";
                bool const is_own = fails || !is_renumbered;
                CHECK(seen.type == "PeerFailed");
                CHECK(seen.ranks == std::vector{is_own ? 0 : last});
                CHECK(seen.text == (is_own ? "" : in_group) + "rank 0 failed: disk");
            });
        }
    }
}

TEST_CASE("processes agree as threads do") {
    joinable_tests::run_process_ranks({2, 3}, [](joinable::ProcessCommunicator& comm) {
        CHECK(outcome_of(comm, list_of({1, 2, 3})) == Outcome{});
        CHECK(
            outcome_of(comm, list_of({1, comm.rank() == 1 ? 5 : 2, 3})) ==
            Outcome{"Mismatch", "lists differ: item 1: rank 0 has 2, rank 1 has 5", {1}}
        );
        bool const fails = comm.rank() == 1;
        CHECK(
            outcome_of(comm, {}, fails ? error("disk") : nullptr) ==
            (fails ? Outcome{"own", "disk", {}} : Outcome{"PeerFailed", "rank 1 failed: disk", {1}})
        );
    });
}

/// One of many ranks, of which the others add nothing.
class LonelyControl final : public ControlCommunicator {
public:
    LonelyControl(int rank, int size) : rank_{rank}, size_{size} {}
    [[nodiscard]] int rank() const override { return rank_; }
    [[nodiscard]] int size() const override { return size_; }
    [[nodiscard]] void const* address() const noexcept override { return this; }
    [[nodiscard]] std::unique_ptr<ControlCommunicator> twin() override { return nullptr; }
    void post_sum(std::span<std::uint64_t>) override { ++sums; }
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

    int sums = 0;

private:
    int rank_;
    int size_;
};

TEST_CASE("more ranks than bits of a message are told by several") {
    for (int const rank : {0, 24'575, 24'576, 29'999}) {
        LonelyControl control{rank, 30'000};
        DifferenceReport inquiry{control, 0, 30'000, true};
        CHECK(inquiry.ranks_with(true) == std::vector{rank});
        CHECK(control.sums == 2);
        CHECK(inquiry.ranks_with(false).empty());
    }
}

TEST_CASE("hashes are common exactly when all ranks have the same 64 bits") {
    using joinable::detail::HashAgreement;
    std::uint64_t const values[] = {
        0, 1, 2, 1ULL << 21, 1ULL << 22, 1ULL << 43, 1ULL << 44, 1ULL << 63, ~0ULL
    };
    for (std::uint64_t const a : values) {
        for (std::uint64_t const b : values) {
            for (std::uint64_t const c : values) {
                std::uint64_t sum[HashAgreement::words] = {};
                for (std::uint64_t const hash : {a, b, c}) {
                    std::uint64_t words[HashAgreement::words];
                    HashAgreement::write(words, hash);
                    for (std::size_t i = 0; i < HashAgreement::words; ++i) {
                        sum[i] += words[i];
                    }
                }
                CHECK(HashAgreement::is_common(sum, 3) == (a == b && b == c));
            }
        }
    }
    auto const most = static_cast<std::uint64_t>(joinable::detail::max_world_size);
    std::uint64_t sum[HashAgreement::words];
    HashAgreement::write(sum, ~0ULL);
    for (std::uint64_t& word : sum) {
        CHECK(word <= ~0ULL / most);
        word *= most;
    }
    CHECK(HashAgreement::is_common(sum, most));
}

TEST_CASE("one rank's words reach all, and all ranks' words reach each") {
    run_ranks({1, 2, 3, 4, 8}, [](ThreadCommunicator& comm) {
        ControlOver<ThreadCommunicator&> control{comm};
        auto const me = static_cast<std::uint64_t>(comm.rank());
        for (int root = 0; root < comm.size(); ++root) {
            std::vector<std::uint64_t> words{10 + me, 20 + me};
            control.broadcast(words, root);
            auto const from = static_cast<std::uint64_t>(root);
            CHECK(words == std::vector<std::uint64_t>{10 + from, 20 + from});
        }
        std::vector<std::uint64_t> const mine{me, 100 + me};
        std::vector<std::uint64_t> all;
        for (std::uint64_t rank = 0; rank < static_cast<std::uint64_t>(comm.size()); ++rank) {
            all.insert(all.end(), {rank, 100 + rank});
        }
        CHECK(control.gather(mine) == all);
    });
}

} // namespace
