// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdio>
#include <cstdlib>
#include <limits>

#include <doctest/doctest.h>

#include <support/failed_checks.hpp>

/// For the one source file of a program that has its main function.
namespace {

/// Counts failed assertions where a test can see it. A program that runs no test case fails: CTest
/// would call that a test that has passed. Each case of a range is named as it begins, so that one
/// that hangs is known.
struct CountFailedChecks : doctest::IReporter {
    explicit CountFailedChecks(doctest::ContextOptions const& options)
        : is_range_{options.first < options.last && options.last < no_limit} {}
    void report_query(doctest::QueryData const&) override {}
    void test_run_start() override {}
    void test_run_end(doctest::TestRunStats const&) override {
        if (!has_begun_) {
            std::puts("no test case passes the filters");
            std::exit(EXIT_FAILURE);
        }
    }
    void test_case_start(doctest::TestCaseData const& test) override {
        has_begun_ = true;
        if (is_range_) {
            std::printf("begins: %s\n", test.m_name);
            std::fflush(stdout);
        }
    }
    void test_case_reenter(doctest::TestCaseData const&) override {}
    void test_case_end(doctest::CurrentTestCaseStats const&) override {}
    void test_case_exception(doctest::TestCaseException const&) override {}
    void subcase_start(doctest::SubcaseSignature const&) override {}
    void subcase_end() override {}
    void log_assert(doctest::AssertData const& data) override {
        joinable_tests::failed_checks += data.m_failed ? 1 : 0;
    }
    void log_message(doctest::MessageData const& data) override {
        joinable_tests::failed_checks += data.m_severity == doctest::assertType::is_warn ? 0 : 1;
    }
    void test_case_skipped(doctest::TestCaseData const&) override {}

private:
    static constexpr unsigned no_limit = (std::numeric_limits<unsigned>::max)(); ///< doctest's
    bool is_range_;
    bool has_begun_ = false;
};

DOCTEST_REGISTER_LISTENER("failed checks", 1, CountFailedChecks);

} // namespace
