// SPDX-License-Identifier: BSL-1.0
#include <joinable/trace/progress_line.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>
#include <over_ranks.hpp>
#include <support/all_reducer.hpp>
#include <support/folder.hpp>

#include <fcntl.h>
#include <unistd.h>

#include <joinable/join/guard.hpp>

namespace {

using namespace joinable_tests;
using joinable::ProgressLine;
using joinable::ProgressOptions;
using Time = std::chrono::steady_clock::time_point;
static_assert(joinable::models_joinable<ProgressLine<RankCommunicator>>());

/// What was written, and the time as the line sees it.
struct Screen {
    Time now{};
    std::vector<std::string> texts = {};

    [[nodiscard]] auto sink() {
        return [this](std::string_view text) { texts.emplace_back(text); };
    }
    [[nodiscard]] ProgressOptions options(ProgressOptions options) {
        options.clock = [this] { return now; };
        return options;
    }
};

/// A guard in which rank r has `inputs` * (r + 1), each after `time`. Ranks meet in each round.
template <class Comm>
void train(
    Comm& comm, ProgressLine<Comm>& line, Screen& screen, int inputs, std::chrono::nanoseconds time
) {
    AllReducer reducer{comm};
    reducer.before_shadow = [&](joinable::Round const&) { screen.now += time; };
    joinable::Join guard{joinable::participants(reducer, line)};
    for (int input = 0; input < inputs * (comm.rank() + 1); ++input) {
        screen.now += time;
        reducer();
        line.step();
    }
    guard.finish();
}

TEST_CASE("lines say the rounds, the rate, the time left and how many ranks have joined") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        using std::chrono::milliseconds;
        Screen screen;
        std::size_t const rounds = 4 * static_cast<std::size_t>(comm.size());
        ProgressLine line{
            comm, screen.sink(), screen.options({.rounds = rounds, .every = milliseconds{500}})
        };
        train(comm, line, screen, 4, milliseconds{500});
        if (comm.rank() != 0) {
            CHECK(screen.texts.empty());
            return;
        }
        std::vector<std::string> expected;
        for (std::size_t round = 1; round <= rounds; ++round) {
            std::string text = "round " + std::to_string(round) + " of " + std::to_string(rounds);
            text += round == 1 ? "" : ", 2 rounds/s";
            if (round != 1 && round != rounds) {
                text += ", " + std::to_string((rounds - round + 1) / 2) + " s left";
            }
            text += ", " + std::to_string((round - 1) / 4) + " of " + std::to_string(comm.size());
            expected.push_back(
                text + (comm.size() == 1 ? " rank has joined\n" : " ranks have joined\n")
            );
        }
        CHECK(screen.texts == expected);
    });
}

TEST_CASE("between two lines is the time that was asked for, and the last state is always said") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        Screen screen;
        ProgressLine line{comm, screen.sink(), screen.options({.rank = comm.size() - 1})};
        train(comm, line, screen, 20, std::chrono::seconds{1}); // a line each 5 s
        if (comm.rank() == comm.size() - 1) {
            int const rounds = 20 * comm.size();
            CHECK(screen.texts.size() == static_cast<std::size_t>(rounds) / 5 + 1);
            CHECK(screen.texts.at(1).starts_with("round 6, 1 rounds/s, 0 of "));
            CHECK(screen.texts.back().starts_with(
                "round " + std::to_string(rounds) + ", 1 rounds/s, "
            ));
        } else {
            CHECK(screen.texts.empty());
        }
        std::size_t const before = screen.texts.size();
        train(comm, line, screen, 1, std::chrono::seconds{1}); // goes on counting
        if (comm.rank() == comm.size() - 1) {
            CHECK(screen.texts.size() > before);
            CHECK(screen.texts.back().starts_with("round " + std::to_string(21 * comm.size())));
        }
    });
}

TEST_CASE("the rate follows a training that slows down") {
    over_ranks({1}, [](RankCommunicator& comm) {
        Screen screen;
        ProgressLine line{comm, screen.sink(), screen.options({.rounds = 10'000})};
        auto const rate = [&] {
            std::string const& text = screen.texts.back();
            std::size_t const comma = text.find(", ");
            return std::atof(text.c_str() + comma + 2);
        };
        train(comm, line, screen, 1000, std::chrono::milliseconds{10});
        CHECK(rate() == doctest::Approx(100));
        train(comm, line, screen, 10, std::chrono::seconds{1});
        CHECK(rate() < 60);
        train(comm, line, screen, 200, std::chrono::seconds{1});
        CHECK(rate() == doctest::Approx(1).epsilon(0.05));
        CHECK(screen.texts.back().find(" h ") != std::string::npos); // 8790 rounds at 1 a second
    });
}

TEST_CASE("on a terminal one line changes, and a shorter one leaves nothing of a longer one") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        Screen screen;
        ProgressLine line{comm, screen.sink(), screen.options({.rounds = 4, .rewrites = true})};
        train(comm, line, screen, 4, std::chrono::milliseconds{300});
        if (comm.rank() != 0) {
            return;
        }
        CHECK(screen.texts.back() == "\n");
        screen.texts.pop_back();
        CHECK(screen.texts.size() == 4 * static_cast<std::size_t>(comm.size()));
        std::size_t width = 0;
        for (std::string const& text : screen.texts) {
            CHECK(text[0] == '\r');
            CHECK(text.find_first_of("\r\n", 1) == std::string::npos);
            CHECK(text.size() >= width);
            width = text.find_last_not_of(' ') + 1;
        }
    });
}

TEST_CASE("what is said of the time left has two units") {
    struct Case {
        std::size_t rounds;
        char const* text;
    };
    for (Case const& expected : std::vector<Case>{
             {3, "1 s left"},
             {61, "59 s left"},
             {62, "1 min left"},
             {202, "3 min 20 s left"},
             {3602, "1 h left"},
             {7502, "2 h 5 min left"},
             {273'602, "3 d 4 h left"},
             {static_cast<std::size_t>(-1), "years left"}
         }) {
        over_ranks({1}, [&](RankCommunicator& comm) {
            Screen screen;
            ProgressLine line{
                comm,
                screen.sink(),
                screen.options({.rounds = expected.rounds, .every = std::chrono::seconds{1}})
            };
            train(comm, line, screen, 2, std::chrono::seconds{1});
            CHECK(
                screen.texts.back() == "round 2 of " + std::to_string(expected.rounds) +
                                           ", 1 rounds/s, " + expected.text +
                                           ", 0 of 1 rank has joined\n"
            );
        });
    }
}

TEST_CASE("a file gets whole lines without control characters, a terminal one line that changes") {
    int const any = ::posix_openpt(O_RDWR | O_NOCTTY);
    if (any < 0) {
        MESSAGE("skipped: this machine has no terminals in /dev/pts");
        return;
    }
    ::close(any);
    Folder const folder;
    over_ranks({1, 2, 3, 4, 8}, [&](RankCommunicator& comm) {
        using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;
        Screen screen;
        std::string const path = folder.file("progress" + std::to_string(comm.rank()));
        int const terminal = ::posix_openpt(O_RDWR | O_NOCTTY);
        REQUIRE(terminal >= 0);
        REQUIRE(::grantpt(terminal) == 0);
        REQUIRE(::unlockpt(terminal) == 0);
        {
            File const file{std::fopen(path.c_str(), "w"), &std::fclose};
            std::array<char, 64> name{}; // ptsname() answers all threads in the same place
            REQUIRE(::ptsname_r(terminal, name.data(), name.size()) == 0);
            File const tty{std::fopen(name.data(), "w"), &std::fclose};
            REQUIRE(file != nullptr);
            REQUIRE(tty != nullptr);
            ProgressLine to_file{comm, file.get(), screen.options({})};
            ProgressLine to_terminal{comm, tty.get(), screen.options({})};
            joinable::Join guard{joinable::participants(to_file, to_terminal)};
            for (int input = 0; input < 12; ++input) {
                screen.now += std::chrono::seconds{1};
                to_file.step();
                to_terminal.step();
            }
            guard.finish();
        }
        std::string shown;
        std::array<char, 4096> part{};
        for (::ssize_t bytes = 1; comm.rank() == 0 && bytes > 0;) { // to the end, which is an error
            bytes = ::read(terminal, part.data(), part.size());
            shown.append(part.data(), static_cast<std::size_t>(bytes > 0 ? bytes : 0));
        }
        ::close(terminal);
        std::string const lines = contents_of(path);
        if (comm.rank() != 0) {
            CHECK(lines.empty());
            return;
        }
        CHECK(std::count(lines.begin(), lines.end(), '\n') == 4); // rounds 1, 6, 11 and 12
        CHECK(lines.back() == '\n');
        CHECK(std::all_of(lines.begin(), lines.end(), [](char c) { return c == '\n' || c >= ' '; })
        );
        CHECK(std::count(shown.begin(), shown.end(), '\r') == 13); // 12 rounds, and of "\r\n"
        CHECK(std::count(shown.begin(), shown.end(), '\n') == 1);
        CHECK(shown.find("\rround 12, 1 rounds/s, ") != std::string::npos);
    });
}

TEST_CASE("what the sink throws leaves the guard on all ranks, but a full disk does not") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        Screen screen;
        auto const run = [&] {
            ProgressLine line{
                comm,
                [](std::string_view) { throw std::runtime_error{"the sink is closed"}; },
                screen.options({})
            };
            train(comm, line, screen, 2, std::chrono::seconds{1});
        };
        if (comm.rank() == 0) {
            CHECK_THROWS_WITH_AS(run(), "the sink is closed", std::runtime_error);
        } else {
            CHECK_THROWS_AS(run(), joinable::PeerFailed);
        }
    });
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        Screen screen;
        std::unique_ptr<std::FILE, int (*)(std::FILE*)> const full{
            std::fopen("/dev/full", "w"), &std::fclose
        };
        REQUIRE(full != nullptr);
        ProgressLine line{comm, full.get(), screen.options({})};
        train(comm, line, screen, 2, std::chrono::seconds{1});
    });
}

TEST_CASE("without a guard each rank's rounds are its own, and none has joined") {
    over_ranks({1, 2, 3, 4, 8}, [](RankCommunicator& comm) {
        Screen screen;
        {
            ProgressLine line{comm, screen.sink(), screen.options({.rank = comm.rank()})};
            for (int round = 0; round < 3; ++round) {
                screen.now += std::chrono::seconds{1};
                line.step();
            }
            CHECK(screen.texts.size() == 1);
        }
        CHECK(screen.texts.size() == 2);
        CHECK(screen.texts.at(1).starts_with(
            "round 3, 1 rounds/s, 0 of " + std::to_string(comm.size())
        ));
    });
}

} // namespace
