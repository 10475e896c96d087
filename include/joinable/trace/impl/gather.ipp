// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/trace/gather.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <span>
#include <system_error>
#include <vector>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/agreement/on_all_ranks.hpp>
#include <joinable/communicator/file_limit.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// Of events, as words that ranks can sum: one rank says them, and the others zeros.
class EventWords {
public:
    explicit EventWords(ControlCommunicator& control) : control_{control}, words_(piece * each) {}

    /// Collective. `root` has `events`, which are written to `to` on rank 0.
    void move(int root, std::uint64_t count, std::span<TraceEvent const> events, TraceEvent* to) {
        for (std::uint64_t first = 0; first < count; first += piece) {
            auto const here = static_cast<std::size_t>((std::min)(piece, count - first));
            std::span const words = std::span{words_}.first(here * each);
            for (std::size_t i = 0; i < here && control_.rank() == root; ++i) {
                auto const event = std::bit_cast<Words>(events[first + i]);
                std::copy(event.begin(), event.end(), words.data() + i * each);
            }
            control_.broadcast(words, root);
            for (std::size_t i = 0; i < here && control_.rank() == 0; ++i) {
                Words event{};
                std::copy_n(words.data() + i * each, each, event.begin());
                to[first + i] = std::bit_cast<TraceEvent>(event);
            }
        }
    }

private:
    static constexpr std::size_t each = sizeof(TraceEvent) / sizeof(std::uint64_t);
    static constexpr std::uint64_t piece = 2048; ///< events
    using Words = std::array<std::uint64_t, each>;

    ControlCommunicator& control_;
    std::vector<std::uint64_t> words_;
};

/// This rank's clock at about the time at which the others look at theirs.
inline std::uint64_t common_moment(ControlCommunicator& control) {
    for (int i = 0; i < 2; ++i) { // after the first one all ranks are there
        std::array<std::uint64_t, 1> nothing{};
        control.sum(nothing);
    }
    auto const now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<std::uint64_t>(std::chrono::nanoseconds{now}.count());
}

JOINABLE_DEFINITION Trace
gather_trace(ControlCommunicator& control, TraceTimeline const& mine, TraceOptions options) {
    std::optional<EventWords> words;
    on_all_ranks(control, [&](AgreementList& list) {
        list.add("TraceOptions::align_clocks", options.align_clocks);
        words.emplace(control);
    });
    std::array<std::uint64_t, 3> const own{
        mine.events().size(), mine.dropped(), options.align_clocks ? common_moment(control) : 0
    };
    std::vector<std::uint64_t> const words_of_all = control.gather(own);
    Trace trace;
    on_all_ranks(control, [&](AgreementList&) {
        if (control.rank() == 0) {
            trace.ranks.resize(static_cast<std::size_t>(control.size()));
            for (std::size_t rank = 0; rank < trace.ranks.size(); ++rank) {
                trace.ranks[rank].events.resize(words_of_all[rank * own.size()]);
                trace.ranks[rank].dropped = words_of_all[rank * own.size() + 1];
            }
        }
    });
    for (int rank = 0; rank < control.size(); ++rank) {
        auto const r = static_cast<std::size_t>(rank);
        TraceEvent* const to = trace.ranks.empty() ? nullptr : trace.ranks[r].events.data();
        words->move(rank, words_of_all[r * own.size()], mine.events(), to);
    }
    for (std::size_t rank = 0; rank < trace.ranks.size(); ++rank) {
        auto const ahead =
            static_cast<std::int64_t>(words_of_all[rank * own.size() + 2] - words_of_all[2]);
        for (TraceEvent& event : trace.ranks[rank].events) {
            event.begin -= ahead;
            event.end -= ahead;
        }
    }
    return trace;
}

JOINABLE_DEFINITION void write_on_first_rank(
    ControlCommunicator& control,
    std::string const& path,
    std::function<void(std::function<void(std::string_view)> const& sink)> const& write
) {
    on_all_ranks(control, [&](AgreementList&) {
        if (control.rank() != 0) {
            return;
        }
        auto const require = [&](bool is_done, char const* verb) {
            if (!is_done) {
                int const code = errno;
                throw CommunicationError{
                    concat("cannot ", verb, " ", path, ": ", std::generic_category().message(code))
                };
            }
        };
        std::unique_ptr<std::FILE, int (*)(std::FILE*)> file{
            std::fopen(path.c_str(), "wb"), &std::fclose
        };
        require(file != nullptr, "create");
        DeadlineRenewal renewal{control};
        std::uint64_t written = 0;
        write([&](std::string_view piece) {
            written += piece.size();
            errno = EFBIG;
            require(!exceeds_file_limit(written), "write");
            require(
                std::fwrite(piece.data(), 1, piece.size(), file.get()) == piece.size(), "write"
            );
            renewal.has_passed(piece.size());
        });
        require(std::fclose(file.release()) == 0, "write");
    });
}

}}} // namespace joinable::v0::detail
