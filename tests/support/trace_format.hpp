// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace joinable_tests {

/// A slice of a track, or an asynchronous one. Nanoseconds.
struct Slice {
    std::string name;
    std::int64_t begin = 0;
    std::int64_t end = 0;
    std::vector<std::string> inside; ///< the names of the slices around it, the outermost first
    nlohmann::json args = {};
};

/// A value of a counter.
struct Counted {
    std::string series;
    std::int64_t time = 0; ///< nanoseconds
    double number = 0;

    friend bool operator==(Counted const&, Counted const&) = default;
};

/// A trace as a viewer reads it: throws where it is not what the description of the Trace Event Format
/// says. Its rules, as far as joinable's traces have to do with them:
///
/// | of              | rule                                                                               |
/// |-----------------|------------------------------------------------------------------------------------|
/// | the file        | an object whose traceEvents is an array; displayTimeUnit is "ms" or "ns"            |
/// | every event     | ph is one letter, name a string, pid and tid are integers                           |
/// | all but M       | ts is a number of microseconds                                                     |
/// | X               | dur is a number of microseconds, not negative; slices of a thread nest: two are     |
/// |                 | disjoint, or one is inside the other                                               |
/// | b, e            | cat and id are there; each b has one e of the same pid, cat, id and name, not earlier |
/// | C               | args has numbers alone                                                             |
/// | i               | s is g, p or t                                                                     |
/// | M               | process_name and thread_name have args.name, a string; process_sort_index has       |
/// |                 | args.sort_index, an integer; each at most once for a track                          |
struct ReadTrace {
    using Track = std::pair<int, int>; ///< process and thread
    std::map<Track, std::string> names;
    std::map<Track, std::vector<Slice>> slices;
    std::map<Track, std::vector<Slice>> asynchronous;
    std::map<Track, std::vector<std::string>> instants;
    std::map<Track, std::vector<Counted>> counters;
    nlohmann::json other;

    explicit ReadTrace(std::string const& text) {
        auto const file = nlohmann::json::parse(text);
        require(file.is_object() && file.at("traceEvents").is_array(), "an object with events");
        std::string const unit = file.value("displayTimeUnit", "ms");
        require(unit == "ms" || unit == "ns", "a unit");
        other = file.value("otherData", nlohmann::json::object());
        for (auto const& event : file.at("traceEvents")) {
            read(event);
        }
        require(open_.empty(), "an end of each asynchronous event");
        for (auto& [track, found] : slices) {
            nest(found);
        }
    }

private:
    static void require(bool is_so, char const* what) {
        if (!is_so) {
            throw std::runtime_error{std::string{"a viewer expects "} + what};
        }
    }
    static std::int64_t nanoseconds(nlohmann::json const& time) {
        require(time.is_number(), "a number");
        return std::llround(time.get<double>() * 1000);
    }

    void read(nlohmann::json const& event) {
        require(event.at("ph").is_string() && event.at("name").is_string(), "strings");
        require(
            event.at("pid").is_number_integer() && event.at("tid").is_number_integer(), "integers"
        );
        std::string const phase = event.at("ph");
        std::string const name = event.at("name");
        Track const track{event.at("pid"), event.at("tid")};
        if (phase == "M") {
            read_metadata(event, name, track);
            return;
        }
        std::int64_t const time = nanoseconds(event.at("ts"));
        auto const args = event.value("args", nlohmann::json::object());
        if (phase == "X") {
            std::int64_t const length = nanoseconds(event.at("dur"));
            require(length >= 0, "a duration that is not negative");
            slices[track].push_back({name, time, time + length, {}, args});
        } else if (phase == "b" || phase == "e") {
            std::string const id = event.at("cat").get<std::string>() + event.at("id").dump() +
                                   name + std::to_string(track.first);
            if (phase == "b") {
                require(open_.emplace(id, Slice{name, time, time, {}, args}).second, "other ids");
            } else {
                auto const found = open_.find(id);
                require(found != open_.end() && time >= found->second.begin, "a begin before");
                found->second.end = time;
                asynchronous[track].push_back(found->second);
                open_.erase(found);
            }
        } else if (phase == "C") {
            for (auto const& [series, number] : args.items()) {
                require(number.is_number(), "a number");
                counters[track].push_back({name + "." + series, time, number.get<double>()});
            }
        } else {
            require(phase == "i", "a phase that is known here");
            std::string const scope = event.at("s");
            require(scope == "g" || scope == "p" || scope == "t", "a scope");
            instants[track].push_back(name);
        }
    }
    void read_metadata(nlohmann::json const& event, std::string const& name, Track const& track) {
        require(metadata_.emplace(name, track).second, "metadata once");
        if (name == "process_sort_index") {
            require(event.at("args").at("sort_index").is_number_integer(), "an index");
            return;
        }
        require(name == "process_name" || name == "thread_name", "metadata that is known here");
        std::string const said = event.at("args").at("name");
        require(names.emplace(track, said).first->second == said, "one name");
    }
    /// By a stack, in the order of the file: what begins first stands first, an outer slice before inner ones.
    static void nest(std::vector<Slice>& found) {
        std::vector<Slice const*> stack;
        for (Slice& slice : found) {
            while (!stack.empty() && stack.back()->end <= slice.begin) {
                stack.pop_back();
            }
            require(
                stack.empty() ||
                    (stack.back()->begin <= slice.begin && slice.end <= stack.back()->end),
                "slices that nest"
            );
            for (Slice const* outer : stack) {
                slice.inside.push_back(outer->name);
            }
            stack.push_back(&slice);
        }
    }

    std::set<std::pair<std::string, Track>> metadata_;
    std::map<std::string, Slice> open_;
};

} // namespace joinable_tests
