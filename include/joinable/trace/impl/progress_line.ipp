// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/trace/progress_line.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include <unistd.h>

#include <joinable/detail/text.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// "8 s", "3 min 20 s", "2 h 5 min", "3 d 4 h": two units, as a person would say it.
inline std::string time_left(double seconds) {
    if (!(seconds < 1e9)) { // some 30 years
        return "years";
    }
    auto const whole = static_cast<std::uint64_t>(std::ceil(seconds));
    struct Unit {
        std::uint64_t seconds;
        char const* name;
        std::uint64_t smaller_seconds;
        char const* smaller;
    };
    constexpr std::array<Unit, 3> units{
        {{86400, " d", 3600, " h"}, {3600, " h", 60, " min"}, {60, " min", 1, " s"}}
    };
    for (Unit const& unit : units) {
        if (whole >= unit.seconds) {
            std::uint64_t const rest = whole % unit.seconds / unit.smaller_seconds;
            std::string const more = rest == 0 ? "" : concat(" ", rest, unit.smaller);
            return concat(whole / unit.seconds, unit.name, more);
        }
    }
    return concat(whole, " s");
}

JOINABLE_DEFINITION
ProgressWriter::ProgressWriter(Sink sink, ProgressOptions options)
    : sink_{std::move(sink)}, options_{std::move(options)},
      every_{options_.every.value_or(
          std::chrono::milliseconds{options_.rewrites.value_or(false) ? 100 : 5000}
      )} {}

JOINABLE_DEFINITION
ProgressWriter::ProgressWriter(std::FILE* file, ProgressOptions options)
    : ProgressWriter{
          [file](std::string_view text) {
              static_cast<void>(std::fwrite(text.data(), 1, text.size(), file));
              static_cast<void>(std::fflush(file));
          },
          [&]() -> ProgressOptions&& {
              if (!options.rewrites) {
                  options.rewrites = ::isatty(::fileno(file)) == 1;
              }
              return std::move(options);
          }()
      } {}

JOINABLE_DEFINITION void ProgressWriter::count(Round const& round, int world_size) {
    ++rounds_;
    world_size_ = world_size;
    joined_ = world_size - round.active_count();
    Time const now = options_.clock();
    if (rounds_ == 1 || now - written_at_ >= every_) {
        write(now);
    }
}

JOINABLE_DEFINITION void ProgressWriter::end() {
    if (written_rounds_ != rounds_) {
        write(options_.clock());
    }
    if (width_ != 0) {
        width_ = 0;
        sink_("\n");
    }
}

JOINABLE_DEFINITION void ProgressWriter::write(Time now) {
    if (written_rounds_ !=
        0) { // time is counted from the first round: what came before was no training
        double const seconds = std::chrono::duration<double>(now - written_at_).count();
        constexpr double memory = 30; // seconds after which a third is left of what was
        double const kept = std::exp(-seconds / memory);
        recent_seconds_ = recent_seconds_ * kept + seconds;
        recent_rounds_ = recent_rounds_ * kept + static_cast<double>(rounds_ - written_rounds_);
    }
    written_at_ = now;
    written_rounds_ = rounds_;
    std::string const line = text(recent_seconds_ > 0 ? recent_rounds_ / recent_seconds_ : 0);
    if (!options_.rewrites.value_or(false)) {
        sink_(line + "\n");
        return;
    }
    std::string const blanks((std::max)(width_, line.size()) - line.size(), ' ');
    width_ = line.size();
    sink_("\r" + line + blanks);
}

JOINABLE_DEFINITION std::string ProgressWriter::text(double rate) const {
    std::string line = concat("round ", rounds_);
    if (options_.rounds) {
        line += concat(" of ", *options_.rounds);
    }
    if (rate > 0) {
        line += concat(", ", rounded_text(rate), " rounds/s");
        if (options_.rounds && rounds_ < *options_.rounds) {
            line += concat(
                ", ", time_left(static_cast<double>(*options_.rounds - rounds_) / rate), " left"
            );
        }
    }
    line += concat(", ", joined_, " of ", world_size_);
    return line + (world_size_ == 1 ? " rank has joined" : " ranks have joined");
}

}}} // namespace joinable::v0::detail
