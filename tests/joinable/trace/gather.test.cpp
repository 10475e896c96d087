// SPDX-License-Identifier: BSL-1.0
// Ranks whose limit of file sizes a trace exceeds: process ranks, whose limits are their own.
#include <joinable/trace/gather.hpp>

#include <cerrno>
#include <csignal>
#include <string>
#include <system_error>

#include <sys/resource.h>

#include <doctest/doctest.h>

#include <support/folder.hpp>
#include <support/process_ranks.hpp>

namespace {

using namespace joinable_tests;
using joinable::ProcessCommunicator;
using joinable::TraceTimeline;

/// From now on the system sends this process SIGXFSZ, which kills it, if it writes more to a file.
void limit_files(rlim_t bytes) {
    std::signal(SIGXFSZ, SIG_DFL);
    rlimit const none{0, 0};
    setrlimit(RLIMIT_CORE, &none);
    rlimit limit{};
    getrlimit(RLIMIT_FSIZE, &limit);
    limit.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
}

TEST_CASE(
    "a trace or a picture beyond the limit of file sizes is an error on all ranks, not a signal"
) {
    Folder const folder;
    std::string const path = folder.file("run");
    run_process_ranks({1, 2}, [&](ProcessCommunicator& comm) {
        TraceTimeline timeline;
        timeline.start(200);
        for (int i = 0; i < 200; ++i) {
            auto const range = timeline.round(false);
        }
        auto const check_both = [&](std::string const& expected) {
            auto const check_text = [&](auto const& write) {
                std::string text;
                try {
                    write();
                } catch (joinable::CommunicationError const& error) {
                    text = error.what();
                }
                CHECK(text.find(expected) != std::string::npos);
                CHECK(text.empty() == expected.empty());
            };
            check_text([&] { joinable::write_trace(comm, timeline, path); });
            check_text([&] { joinable::write_picture(comm, timeline, path); });
        };
        limit_files(1000);
        check_both("cannot write " + path + ": " + std::generic_category().message(EFBIG));
        limit_files(rlim_t{1} << 30U); // a second try succeeds
        check_both("");
    });
}

} // namespace
