// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/trace/picture.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <joinable/detail/text.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The uses of a rank's time, from first to last in a column from the bottom up.
enum class Spent : std::size_t { training, shadowing, waiting };
inline constexpr std::size_t spent_count = 3;

/// One rank's lane: for each column of the picture the shares of its time.
class Lane {
public:
    static constexpr std::size_t columns = 720;

    Lane(RankTrace const& rank, std::int64_t begin, std::int64_t end)
        : begin_{begin}, scale_{static_cast<double>(columns) / static_cast<double>(end - begin)},
          shares_(columns) {
        std::vector<TraceEvent> rounds;
        for (TraceEvent const& event : rank.events) {
            if (event.kind == TraceKind::round) {
                rounds.push_back(event);
                add(Spent::training, event.begin, event.end, 1);
            } else if (event.kind == TraceKind::shadow_round) {
                ++shadow_rounds_;
                add(Spent::shadowing, event.begin, event.end, 1);
            }
        }
        rounds_ = rounds.size();
        for (TraceEvent const& event : rank.events) {
            if (event.kind == TraceKind::wait) {
                add(Spent::waiting, event.begin, event.end, 1);
                take_from_training(rounds, event);
            }
        }
    }

    [[nodiscard]] std::size_t rounds() const noexcept { return rounds_; }
    [[nodiscard]] std::size_t shadow_rounds() const noexcept { return shadow_rounds_; }
    /// The share of the whole picture's time.
    [[nodiscard]] double share(Spent spent) const noexcept {
        double sum = 0;
        for (Shares const& column : shares_) {
            sum += column[static_cast<std::size_t>(spent)];
        }
        return sum / static_cast<double>(columns);
    }

    /// An SVG path of what is filled, in a lane at these coordinates. Columns that are alike are one.
    [[nodiscard]] std::string path(Spent spent, int x, int y, int height) const {
        std::string text;
        for (std::size_t first = 0; first < columns;) {
            auto const [bottom, top] = extent(first, spent, height);
            std::size_t last = first + 1;
            while (last < columns && extent(last, spent, height) == std::array{bottom, top}) {
                ++last;
            }
            if (bottom != top) {
                text += concat("M", x + static_cast<int>(first), " ");
                text += to_text(y + height - bottom / 10.0);
                text += concat("v", (bottom - top) / 10.0, "h", last - first);
                text += concat("v", (top - bottom) / 10.0, "z");
            }
            first = last;
        }
        return text;
    }

private:
    using Shares = std::array<double, spent_count>;

    void add(Spent spent, std::int64_t begin, std::int64_t end, double factor) {
        double const from = static_cast<double>(begin - begin_) * scale_;
        double const to = static_cast<double>(end - begin_) * scale_;
        for (auto column = static_cast<std::size_t>((std::max)(from, 0.0));
             column < columns && static_cast<double>(column) < to;
             ++column) {
            auto const left = static_cast<double>(column);
            double const share = (std::min)(to, left + 1) - (std::max)(from, left);
            shares_[column][static_cast<std::size_t>(spent)] += factor * share;
        }
    }
    /// Rounds of a rank do not overlap and are in order.
    void take_from_training(std::vector<TraceEvent> const& rounds, TraceEvent const& wait) {
        auto const ends_before = [](TraceEvent const& round, std::int64_t time) {
            return round.end <= time;
        };
        auto round = std::lower_bound(rounds.begin(), rounds.end(), wait.begin, ends_before);
        for (; round != rounds.end() && round->begin < wait.end; ++round) {
            std::int64_t const from = (std::max)(round->begin, wait.begin);
            add(Spent::training, from, (std::min)(round->end, wait.end), -1);
        }
    }

    /// Bottom and top of what is filled, in tenths of a pixel from the lane's bottom.
    [[nodiscard]] std::array<int, 2> extent(std::size_t column, Spent spent, int height) const {
        double below = 0;
        for (std::size_t s = 0; s < static_cast<std::size_t>(spent); ++s) {
            below += shares_[column][s];
        }
        double const above = below + shares_[column][static_cast<std::size_t>(spent)];
        auto const tenths = [&](double share) {
            return static_cast<int>(std::lround((std::clamp)(share, 0.0, 1.0) * 10 * height));
        };
        return {tenths(below), tenths(above)};
    }

    std::int64_t begin_;
    double scale_; ///< columns in a nanosecond
    std::vector<Shares> shares_;
    std::size_t rounds_ = 0;
    std::size_t shadow_rounds_ = 0;
};

/// The mean of the samples of all ranks in each column of the picture.
class Curve {
public:
    void add(RankTrace const& rank, std::int64_t begin, std::int64_t end) {
        for (TraceEvent const& event : rank.events) {
            if (event.kind == TraceKind::sample && std::isfinite(event.number())) {
                double const share =
                    static_cast<double>(event.begin - begin) / static_cast<double>(end - begin);
                auto const column =
                    static_cast<std::size_t>((std::clamp)(share, 0.0, 1.0) * Lane::columns);
                Column& here = columns_[(std::min)(column, Lane::columns - 1)];
                here.mean += (event.number() - here.mean) / static_cast<double>(++here.count);
            }
        }
    }

    /// The least and the largest mean, or nothing without samples.
    [[nodiscard]] std::optional<std::pair<double, double>> range() const {
        std::optional<std::pair<double, double>> found;
        for (Column const& column : columns_) {
            if (column.count != 0) {
                auto const [least, largest] = found.value_or(std::pair{column.mean, column.mean});
                found = std::pair{(std::min)(least, column.mean), (std::max)(largest, column.mean)};
            }
        }
        return found;
    }

    /// The points of an SVG polyline, in a chart at these coordinates whose height is the range.
    [[nodiscard]] std::string points(int x, int y, int height) const {
        auto const [least, largest] = range().value();
        std::string text;
        std::size_t points = 0;
        auto const add = [&](std::size_t column, double share) {
            double const at = std::round(10 * (y + height * (1 - share))) / 10;
            text += concat(text.empty() ? "" : " ", x + static_cast<int>(column), ",", at);
            ++points;
        };
        for (std::size_t c = 0; c < Lane::columns; ++c) {
            if (columns_[c].count != 0) {
                add(c, largest > least ? (columns_[c].mean - least) / (largest - least) : 0.5);
            }
        }
        if (points == 1) { // a line of one point is not drawn
            std::string const one = text;
            text += concat(" ", x, one.substr(one.find(',')));
        }
        return text;
    }

private:
    struct Column {
        double mean = 0;
        std::size_t count = 0;
    };
    std::array<Column, Lane::columns> columns_{};
};

/// Puts the parts of a picture one below another.
class Picture {
public:
    Picture(Trace const& trace, std::string_view samples) : samples_{samples} {
        begin_ = (std::numeric_limits<std::int64_t>::max)();
        for (RankTrace const& rank : trace.ranks) {
            dropped_ += rank.dropped;
            for (TraceEvent const& event : rank.events) {
                begin_ = (std::min)(begin_, event.begin);
                end_ = (std::max)(end_, event.end);
            }
        }
        is_empty_ = begin_ > end_;
        begin_ = is_empty_ ? 0 : begin_;
        end_ = (std::max)(end_, begin_ + 1);
        for (RankTrace const& rank : trace.ranks) {
            lanes_.emplace_back(rank, begin_, end_);
            curve_.add(rank, begin_, end_);
        }
        auto const ranks = static_cast<int>(lanes_.size());
        height_ = ranks <= 4 ? 32 : ranks <= 8 ? 24 : ranks <= 16 ? 18 : 12;
        gap_ = height_ / 4;
    }

    [[nodiscard]] std::string draw() const {
        auto const ranks = static_cast<int>(lanes_.size());
        int const below_lanes = top + ranks * (height_ + gap_);
        int const bottom = below_lanes + (curve_.range() ? above_curve + curve_height + 8 : 0);
        std::string text = concat(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 ",
            width,
            " ",
            bottom + 52,
            "\" width=\"",
            width,
            "\" height=\"",
            bottom + 52,
            "\" role=\"img\">\n<title>",
            title(),
            "</title>\n<desc>",
            summary(),
            "</desc>\n",
            style
        );
        text += element("rect", "page", {{"width", width}, {"height", bottom + 52}});
        text += label("title", left, 30, title());
        text += label("note", left, 51, summary());
        text += legend();
        text += label("head", trained_at, top - 8, "trained");
        text += label("head", shadowed_at, top - 8, "shadowed");
        text += label("head", waited_at, top - 8, "waited");
        for (int rank = 0; rank < ranks; ++rank) {
            text += lane(rank, top + rank * (height_ + gap_));
        }
        text += curve(below_lanes + above_curve) + axis(bottom) + "</svg>\n";
        return text;
    }

private:
    static constexpr int width = 1040;
    static constexpr int left = 80; ///< where lanes begin
    static constexpr int top = 116;
    static constexpr int curve_height = 110;
    static constexpr int above_curve = 34; ///< for its name
    static constexpr int plot = static_cast<int>(Lane::columns);
    static constexpr int trained_at = left + plot + 74; ///< right edges of the numbers
    static constexpr int shadowed_at = trained_at + 74;
    static constexpr int waited_at = shadowed_at + 70;
    static constexpr std::array<char const*, spent_count> classes{"train", "shadow", "wait"};
    // Each pair of neighbours differs in lightness, too, for readers who see fewer colours.
    static constexpr char const* style =
        "<style>\n"
        "text{font-family:system-ui,sans-serif;font-size:13px;fill:#1f2328}\n"
        ".title{font-size:18px;font-weight:600}\n"
        ".note,.head,.tick{fill:#59636e}\n"
        ".rank,.head,.number{text-anchor:end;font-variant-numeric:tabular-nums}\n"
        ".tick{text-anchor:middle;font-size:12px}\n"
        ".warn{fill:#b42318}\n"
        ".page{fill:#ffffff}.lane{fill:#eaeef2}.line{stroke:#8c959f}\n"
        ".train{fill:#2a6fbb}.shadow{fill:#9fb3c8}.wait{fill:#e8961e}\n"
        ".curve{fill:none;stroke:#1a7f37;stroke-width:1.5}\n"
        "@media (prefers-color-scheme:dark){\n"
        "text{fill:#e6edf3}.note,.head,.tick{fill:#9198a1}.warn{fill:#ff8f83}\n"
        ".page{fill:#0d1117}.lane{fill:#21262d}.line{stroke:#6e7681}\n"
        ".train{fill:#4c9bf0}.shadow{fill:#566b85}.wait{fill:#f0b23e}\n"
        ".curve{stroke:#56d364}\n"
        "}\n"
        "</style>\n";

    static std::string label(char const* kind, int x, int y, std::string_view text) {
        return concat("<text class=\"", kind, "\" x=\"", x, "\" y=\"", y, "\">", text, "</text>\n");
    }
    using Attributes = std::initializer_list<std::pair<char const*, int>>;
    static std::string element(char const* name, char const* kind, Attributes attributes) {
        std::string text = concat("<", name, " class=\"", kind, "\"");
        for (auto const& [key, value] : attributes) {
            text += concat(" ", key, "=\"", value, "\"");
        }
        return text + "/>\n";
    }
    static std::string percent(double share) {
        return number_text(100 * share, std::chars_format::fixed, 1) + " %";
    }
    [[nodiscard]] double seconds() const noexcept {
        return static_cast<double>(end_ - begin_) / 1e9;
    }

    [[nodiscard]] std::string title() const {
        std::size_t rounds = 0; // of all ranks: each trained or shadowed
        for (Lane const& lane : lanes_) {
            rounds = (std::max)(rounds, lane.rounds() + lane.shadow_rounds());
        }
        auto const count = [](std::size_t number, char const* thing) {
            return concat(number, " ", thing, number == 1 ? "" : "s");
        };
        std::string text = count(lanes_.size(), "rank") + ", " + count(rounds, "round");
        if (!is_empty_) {
            text += concat(" in ", duration(seconds(), seconds()));
        }
        return text;
    }
    [[nodiscard]] std::string summary() const {
        if (is_empty_) {
            return "Nothing was recorded.";
        }
        auto const share = [&](Spent spent) {
            double sum = 0;
            for (Lane const& lane : lanes_) {
                sum += lane.share(spent);
            }
            return percent(sum / static_cast<double>(lanes_.size()));
        };
        return concat(
            "Of their time, ranks trained ",
            share(Spent::training),
            ", shadowed ",
            share(Spent::shadowing),
            " and waited ",
            share(Spent::waiting),
            "."
        );
    }
    /// In the unit that `longest` has.
    static std::string duration(double time, double longest) {
        return longest < 1e-3  ? rounded_text(1e6 * time) + " us"
               : longest < 1.0 ? rounded_text(1e3 * time) + " ms"
               : longest < 600 ? rounded_text(time) + " s"
                               : rounded_text(time / 60) + " min";
    }

    [[nodiscard]] static std::string legend() {
        constexpr std::array<char const*, 4> kinds{"train", "wait", "shadow", "lane"};
        constexpr std::array<char const*, 4> texts{
            "training", "waiting in roll calls", "shadowing the others", "outside rounds"
        };
        constexpr std::array<int, 4> widths{100, 170, 180, 0};
        std::string text;
        int x = left;
        for (std::size_t i = 0; i < kinds.size(); ++i) {
            text += element("rect", kinds[i], {{"x", x}, {"y", 68}, {"width", 14}, {"height", 14}});
            text += label("key", x + 20, 80, texts[i]);
            x += widths[i];
        }
        return text;
    }

    [[nodiscard]] std::string lane(int rank, int y) const {
        Lane const& drawn = lanes_[static_cast<std::size_t>(rank)];
        int const base = y + height_ / 2 + 5;
        std::string text = label("rank", left - 10, base, concat("rank ", rank));
        text +=
            element("rect", "lane", {{"x", left}, {"y", y}, {"width", plot}, {"height", height_}});
        for (std::size_t s = 0; s < spent_count; ++s) {
            std::string const path = drawn.path(static_cast<Spent>(s), left, y, height_);
            if (!path.empty()) {
                text += concat("<path class=\"", classes[s], "\" d=\"", path, "\"/>\n");
            }
        }
        text += label("number", trained_at, base, to_text(drawn.rounds()));
        text += label("number", shadowed_at, base, to_text(drawn.shadow_rounds()));
        text += label("number", waited_at, base, percent(drawn.share(Spent::waiting)));
        return text;
    }

    /// The chart of the samples with its name, and its range at the left.
    [[nodiscard]] std::string curve(int y) const {
        auto const range = curve_.range();
        if (!range) {
            return {};
        }
        std::string name;
        for (char const letter : as_utf8(samples_)) { // XML gives some a meaning, and has no others
            name += letter == '<'                                ? "&lt;"
                    : letter == '>'                              ? "&gt;"
                    : letter == '&'                              ? "&amp;"
                    : static_cast<unsigned char>(letter) < 0x20U ? " "
                                                                 : std::string(1, letter);
        }
        std::string text = label("note", left, y - 10, concat(name, ", mean of samples"));
        text += label("head", left - 10, y + 5, rounded_text(range->second));
        if (range->first != range->second) {
            text += label("head", left - 10, y + curve_height + 5, rounded_text(range->first));
        }
        text += concat(
            "<polyline class=\"curve\" points=\"", curve_.points(left, y, curve_height), "\"/>\n"
        );
        return text;
    }

    /// Ticks at one, two or five of a power of ten, and what was dropped.
    [[nodiscard]] std::string axis(int y) const {
        std::string text =
            element("line", "line", {{"x1", left}, {"y1", y}, {"x2", left + plot}, {"y2", y}});
        if (!is_empty_) {
            double const unit = seconds() < 600 ? 1 : 60;
            double const least = seconds() / unit / 8;
            double step = std::pow(10, std::floor(std::log10(least)));
            step *= least <= step ? 1 : least <= 2 * step ? 2 : least <= 5 * step ? 5 : 10;
            for (int i = 0; i * step * unit <= seconds(); ++i) {
                double const time = i * step * unit;
                int const x = left + static_cast<int>(std::lround(plot * time / seconds()));
                text += element("line", "line", {{"x1", x}, {"y1", y}, {"x2", x}, {"y2", y + 5}});
                text += label("tick", x, y + 20, duration(time, seconds()));
            }
        }
        if (dropped_ != 0) {
            text += label(
                "warn",
                left,
                y + 42,
                concat(
                    dropped_,
                    " events were dropped because there was no room for them; start() with more."
                )
            );
        }
        return text;
    }

    std::string_view samples_;
    std::vector<Lane> lanes_;
    Curve curve_;
    std::int64_t begin_ = 0;
    std::int64_t end_ = 0;
    std::uint64_t dropped_ = 0;
    bool is_empty_ = false;
    int height_ = 0;
    int gap_ = 0;
};

}}} // namespace joinable::v0::detail

namespace joinable { inline namespace v0 {

JOINABLE_DEFINITION std::string to_svg(Trace const& trace, std::string_view samples) {
    return detail::Picture{trace, samples}.draw();
}

}} // namespace joinable::v0
