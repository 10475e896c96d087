// SPDX-License-Identifier: BSL-1.0
#include <joinable/trace/picture.hpp>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

#include <support/decimal_comma.hpp>

namespace {

using joinable::to_svg;
using joinable::Trace;
using joinable::TraceKind;

constexpr std::int64_t ms = 1'000'000;

/// Whether each tag is closed in its turn and no text has a letter that XML gives a meaning.
bool is_well_formed(std::string_view text) {
    std::vector<std::string_view> open;
    for (std::size_t at = 0; at < text.size();) {
        if (text[at] != '<') {
            if (text[at] == '>' || text[at] == '&') {
                return false;
            }
            ++at;
            continue;
        }
        std::size_t const end = text.find('>', at);
        if (end == std::string_view::npos) {
            return false;
        }
        std::string_view const tag = text.substr(at + 1, end - at - 1);
        if (tag.starts_with('/')) {
            if (open.empty() || open.back() != tag.substr(1)) {
                return false;
            }
            open.pop_back();
        } else if (!tag.ends_with('/')) {
            open.push_back(tag.substr(0, tag.find(' ')));
        }
        at = end + 1;
    }
    return open.empty();
}

std::size_t count(std::string_view text, std::string_view part) {
    std::size_t found = 0;
    for (std::size_t at = 0; (at = text.find(part, at)) != std::string_view::npos; ++at) {
        ++found;
    }
    return found;
}

/// The rectangles that the path of this class fills in lane `lane`.
struct Filled {
    double area = 0;
    double first = 1e9; ///< left edge
    double last = 0;    ///< right edge
};
Filled filled(std::string const& picture, std::string const& kind, std::size_t lane = 0) {
    std::size_t at = 0;
    for (std::size_t i = 0; i <= lane; ++i) {
        at = picture.find("<rect class=\"lane\" x=\"80\"", at + 1);
    }
    std::size_t const next = picture.find("<rect class=\"lane\"", at + 1);
    std::size_t const path = picture.find("<path class=\"" + kind + "\" d=\"", at);
    Filled found;
    if (path == std::string::npos || path > next) {
        return found;
    }
    char const* text = picture.c_str() + picture.find("M", path);
    while (*text == 'M') { // "M100 120v-30h5v30z"
        char* end = nullptr;
        double const x = std::strtod(text + 1, &end);
        std::strtod(end, &end); // y
        double const height = -std::strtod(end + 1, &end);
        double const width = std::strtod(end + 1, &end);
        CHECK(std::strtod(end + 1, &end) == height);
        CHECK(height > 0);
        CHECK(*end == 'z');
        text = end + 1;
        found.area += height * width;
        found.first = std::fmin(found.first, x);
        found.last = std::fmax(found.last, x + width);
    }
    return found;
}

TEST_CASE("a lane shows when its rank trained, waited and shadowed") {
    Trace trace;
    trace.ranks.resize(2);
    trace.ranks[0].events = {
        {0 * ms, 40 * ms, 0, 0, TraceKind::round},
        {30 * ms, 40 * ms, 0, 0, TraceKind::wait}, // inside
        {50 * ms, 60 * ms, 0, 0, TraceKind::wait}, // alone
        {60 * ms, 100 * ms, 1, 0, TraceKind::shadow_round},
    };
    trace.ranks[1].events = {
        {0 * ms, 50 * ms, 0, 0, TraceKind::round},
        {10 * ms, 20 * ms, 0, 0, TraceKind::forward},
        {50 * ms, 100 * ms, 1, 0, TraceKind::round},
    };
    std::string const picture = to_svg(trace);
    CHECK(is_well_formed(picture));
    double const height = 32; // of a lane; 720 pixels are 100 ms
    Filled const trained = filled(picture, "train");
    CHECK(trained.area == doctest::Approx(height * 0.3 * 720));
    CHECK(trained.first == 80);
    CHECK(trained.last == 80 + 0.3 * 720);
    Filled const waited = filled(picture, "wait");
    CHECK(waited.area == doctest::Approx(height * 0.2 * 720));
    CHECK(waited.first == 80 + 0.3 * 720);
    CHECK(waited.last == 80 + 0.6 * 720);
    Filled const shadowed = filled(picture, "shadow");
    CHECK(shadowed.area == doctest::Approx(height * 0.4 * 720));
    CHECK(shadowed.last == 800);
    CHECK(filled(picture, "train", 1).area == doctest::Approx(height * 720));
    CHECK(filled(picture, "wait", 1).area == 0);
    CHECK(filled(picture, "shadow", 1).area == 0);
    CHECK(count(picture, ">2 ranks, 2 rounds in 100 ms<") == 2); // shown, and for screen readers
    CHECK(
        count(
            picture, ">Of their time, ranks trained 65.0 %, shadowed 20.0 % and waited 10.0 %.<"
        ) == 2
    );
    CHECK(count(picture, ">rank 0<") == 1);
    CHECK(count(picture, ">rank 1<") == 1);
    CHECK(count(picture, ">20.0 %<") == 1);
    CHECK(count(picture, ">0.0 %<") == 1);
    CHECK(count(picture, ">100 ms<") == 1);
    CHECK(count(picture, "dropped") == 0);
}

TEST_CASE("a curve below the lanes is the mean of what ranks sampled in a column's time") {
    auto const sample = [](std::int64_t when, double number) {
        return joinable::TraceEvent{
            when, when, std::bit_cast<std::uint64_t>(number), 0, TraceKind::sample
        };
    };
    Trace trace;
    trace.ranks.resize(2);
    trace.ranks[0].events = {
        {0 * ms, 100 * ms, 0, 0, TraceKind::round},
        sample(25 * ms, 6), // column 180 of 720
        sample(50 * ms, 1),
        sample(60 * ms, std::numeric_limits<double>::quiet_NaN()),
    };
    trace.ranks[1].events = {sample(0 * ms, 3), sample(50 * ms, 3), sample(100 * ms, 4)};
    std::string const picture = to_svg(trace, "loss <a & b>");
    CHECK(is_well_formed(to_svg(trace)));
    CHECK(count(picture, ">loss &lt;a &amp; b&gt;, mean of samples<") == 1);
    std::string const latin = to_svg(trace, "p\xe9rdida \x01 p\xc3\xa9rdida");
    CHECK(count(latin, ">p\xc3\xa9rdida   p\xc3\xa9rdida, mean of samples<") == 1);
    CHECK(count(picture, ">6<") == 1); // the range
    CHECK(count(picture, ">2<") == 1);
    // Lanes of 32 with gaps of 8 begin at 116; the chart, 110 high, 34 below them.
    double const top = 116 + 2 * (32 + 8) + 34;
    CHECK(count(picture, "points=\"80,312.5 260,230 440,340 799,285\"") == 1);
    CHECK(top == 230); // of the largest, 6; the mean of 1 and 3 is the least
    CHECK(count(to_svg(trace), ">sample, mean of samples<") == 1);

    trace.ranks[0].events = {{0 * ms, 100 * ms, 0, 0, TraceKind::round}, sample(50 * ms, 7)};
    trace.ranks[1].events.clear();
    CHECK(
        count(to_svg(trace), "points=\"440,285 80,285\"") == 1
    );                                            // one number alone is in the middle
    trace.ranks[0].events = {sample(50 * ms, 7)}; // and nothing else
    CHECK(count(to_svg(trace), ">Nothing was recorded.<") == 0);
    CHECK(count(to_svg(trace), "points=\"80,285 80,285\"") == 1);
    trace.ranks[0].events = {{0 * ms, 100 * ms, 0, 0, TraceKind::round}};
    CHECK(count(to_svg(trace), "curve\" points") == 0);
}

TEST_CASE("a picture is the same in every locale: its numbers have a point") {
    Trace trace;
    trace.ranks.resize(3);
    for (std::int64_t i = 0; i < 7; ++i) {
        trace.ranks[0].events.push_back({i * 3 * ms, (i * 3 + 1) * ms, 0, 0, TraceKind::round});
        trace.ranks[1].events.push_back({i * 3 * ms, (i * 3 + 2) * ms, 0, 0, TraceKind::wait});
    }
    std::string const picture = to_svg(trace);
    CHECK(count(picture, ".") > 0);
    joinable_tests::DecimalComma const comma;
    if (comma.is_set()) {
        CHECK(to_svg(trace) == picture);
    }
}

TEST_CASE("a picture of many rounds shows their shares and is no larger than one of a few") {
    std::int64_t const us = 1000;
    Trace trace;
    trace.ranks.resize(1);
    for (std::int64_t i = 0; i < 100'000; ++i) { // 60 us of round, 15 of them waiting, 40 outside
        std::int64_t const begin = i * 100 * us;
        trace.ranks[0].events.push_back({begin, begin + 60 * us, 0, 0, TraceKind::round});
        trace.ranks[0].events.push_back({begin + 10 * us, begin + 25 * us, 0, 0, TraceKind::wait});
    }
    std::string const picture = to_svg(trace);
    CHECK(is_well_formed(picture));
    CHECK(picture.size() < 60'000);
    CHECK(filled(picture, "train").area == doctest::Approx(32 * 0.45 * 720).epsilon(0.01));
    CHECK(filled(picture, "wait").area == doctest::Approx(32 * 0.15 * 720).epsilon(0.01));
    CHECK(count(picture, ">1 rank, 100000 rounds in 10 s<") == 2);
}

TEST_CASE("pictures of any number of ranks are well-formed, for light and dark") {
    for (std::size_t const world : {1U, 2U, 3U, 4U, 8U, 16U, 64U}) {
        Trace trace;
        trace.ranks.resize(world);
        for (std::size_t rank = 0; rank < world; ++rank) {
            std::int64_t const begin = static_cast<std::int64_t>(rank) * ms;
            trace.ranks[rank].events = {{begin, begin + 700'000 * ms, 0, 0, TraceKind::round}};
        }
        std::string const picture = to_svg(trace);
        CHECK(is_well_formed(picture));
        CHECK(count(picture, "<rect class=\"lane\" x=\"80\" y=") == world);
        CHECK(count(picture, "@media (prefers-color-scheme:dark)") == 1);
        CHECK(count(picture, " min<") > 3);
    }
}

TEST_CASE("a picture says what was dropped, and that nothing was recorded") {
    Trace trace;
    trace.ranks.resize(3);
    CHECK(is_well_formed(to_svg(trace)));
    CHECK(count(to_svg(trace), ">Nothing was recorded.<") == 2);
    CHECK(count(to_svg(trace), ">3 ranks, 0 rounds<") == 2);
    trace.ranks[1].dropped = 5;
    trace.ranks[2].dropped = 7;
    CHECK(count(to_svg(trace), ">12 events were dropped") == 1);
    CHECK(is_well_formed(to_svg(Trace{})));
}

} // namespace
