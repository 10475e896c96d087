// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <joinable/communicator/tcp/detail/handshake.hpp>

#include <joinable/communicator/detail/own_rank.hpp>
#include <joinable/communicator/tcp/detail/frame.hpp>
#include <joinable/detail/text.hpp>

namespace joinable { inline namespace v0 { namespace detail {

JOINABLE_DEFINITION std::vector<std::byte> hello_of(int rank, TcpJob const& job) {
    Hello hello;
    hello.rank = rank;
    hello.size = job.size;
    hello.job_bytes = static_cast<std::uint32_t>(job.job.size());
    hello.secret_bytes = static_cast<std::uint32_t>(job.secret.size());
    std::vector<std::byte> bytes;
    for (auto const part :
         {bytes_of(hello), std::as_bytes(std::span{job.job}), std::as_bytes(std::span{job.secret})
         }) {
        bytes.insert(bytes.end(), part.begin(), part.end());
    }
    return bytes;
}

JOINABLE_DEFINITION std::vector<std::byte>
greeting_of(Greeting::Verdict verdict, std::string_view text) {
    Greeting greeting;
    greeting.verdict = verdict;
    greeting.text_bytes = static_cast<std::uint32_t>(text.size());
    std::vector<std::byte> bytes;
    for (auto const part : {bytes_of(greeting), std::as_bytes(std::span{text})}) {
        bytes.insert(bytes.end(), part.begin(), part.end());
    }
    return bytes;
}

JOINABLE_DEFINITION bool is_same_secret(std::string_view a, std::string_view b) noexcept {
    if (a.size() != b.size()) {
        return false;
    }
    unsigned difference = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        difference |= static_cast<unsigned>(a[i] ^ b[i]);
    }
    return difference == 0;
}

JOINABLE_DEFINITION std::size_t size_of_hello(std::span<std::byte const> begun) noexcept {
    constexpr std::size_t up_to_protocol = sizeof(std::uint64_t) + sizeof(std::uint32_t);
    if (begun.size() < up_to_protocol) {
        return up_to_protocol;
    }
    if (object_at<std::uint64_t>(begun) != Hello::joinable_magic) {
        return 0;
    }
    if (object_at<std::uint32_t>(begun.subspan(sizeof(std::uint64_t))) != Hello::own_protocol) {
        return up_to_protocol; // the rest may be anything
    }
    if (begun.size() < sizeof(Hello)) {
        return sizeof(Hello);
    }
    auto const hello = object_at<Hello>(begun);
    bool const fits =
        hello.job_bytes <= TcpJob::most_text && hello.secret_bytes <= TcpJob::most_text;
    return fits ? sizeof(Hello) + hello.job_bytes + hello.secret_bytes : 0;
}

JOINABLE_DEFINITION std::optional<Refusal>
refusal_of(std::span<std::byte const> received, TcpJob const& job) {
    if (received.size() < sizeof(Hello) || object_at<Hello>(received).library != library_version) {
        return Refusal{
            Greeting::Verdict::other_program,
            concat(
                "expected version ",
                library_version,
                " of joinable, that of rank 0, but this rank has another one: build the programs "
                "of "
                "all ranks with the same version"
            )
        };
    }
    auto const hello = object_at<Hello>(received);
    std::string const their_job = unpacked_text(received.subspan(sizeof hello, hello.job_bytes));
    std::string const secret = unpacked_text(received.subspan(sizeof hello + hello.job_bytes));
    if (!is_same_secret(secret, job.secret)) {
        return Refusal{
            Greeting::Verdict::other_job,
            "expected the secret that rank 0 has, but this rank has another one: give all ranks of "
            "a "
            "job the same JOINABLE_SECRET"
        };
    }
    if (their_job != job.job) {
        return Refusal{
            Greeting::Verdict::other_job,
            concat(
                "expected a rank of job \"",
                job.job,
                "\", for which rank 0 listens here, but this is one of job \"",
                their_job,
                "\": give each job that runs at the same time another port"
            )
        };
    }
    if (hello.size != job.size) {
        return Refusal{
            Greeting::Verdict::other_job,
            concat(
                "expected a group of ",
                job.size,
                " ranks, as rank 0 says, but this rank says ",
                hello.size,
                ": start all ranks of a job with the same world size"
            )
        };
    }
    if (std::string const why = why_no_rank(hello.rank, job.size); !why.empty()) {
        return Refusal{Greeting::Verdict::other_job, why};
    }
    return std::nullopt;
}

}}} // namespace joinable::v0::detail
