// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <joinable/config.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The settings of a job, with the secret that only its ranks know.
struct TcpJob {
    int size = 1;
    std::string job;
    std::string secret;

    static constexpr std::size_t most_text = 1024; ///< bytes in each text
};

/// The first message of a rank on its connection. Job and secret follow. The receiver does not know
/// yet who sent it.
struct Hello {
    std::uint64_t magic = joinable_magic;
    std::uint32_t protocol = own_protocol;
    std::uint32_t library = library_version;
    std::int32_t rank = 0;
    std::int32_t size = 0;
    std::uint32_t job_bytes = 0;
    std::uint32_t secret_bytes = 0;

    /// "joinable", and the byte order.
    static constexpr std::uint64_t joinable_magic = 0x656c'6261'6e69'6f6aU;
    static constexpr std::uint32_t own_protocol = 1;
};
static_assert(sizeof(Hello) == 32);

/// The answer of rank 0. The text follows.
struct Greeting {
    enum class Verdict : std::uint32_t { welcome, other_job, other_program };

    std::uint64_t magic = joinable_magic;
    Verdict verdict = Verdict::welcome;
    std::uint32_t text_bytes = 0;

    static constexpr std::uint64_t joinable_magic = Hello::joinable_magic + 1;
    static constexpr std::uint32_t most_text = 4096;
};
static_assert(sizeof(Greeting) == 16);

[[nodiscard]] std::vector<std::byte> hello_of(int rank, TcpJob const& job);
[[nodiscard]] std::vector<std::byte> greeting_of(Greeting::Verdict verdict, std::string_view text);

/// Takes the same time for all differences between texts of one length.
[[nodiscard]] bool is_same_secret(std::string_view a, std::string_view b) noexcept;

/// Length in bytes of the hello that starts with these bytes, as far as they show it; 0 if they
/// cannot start one.
[[nodiscard]] std::size_t size_of_hello(std::span<std::byte const> begun) noexcept;

/// Why rank 0 rejects a rank.
struct Refusal {
    Greeting::Verdict verdict;
    std::string text;
};
/// Why rank 0 of `job` rejects the sender of this hello, or nothing. @pre the hello is complete.
[[nodiscard]] std::optional<Refusal>
refusal_of(std::span<std::byte const> received, TcpJob const& job);

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/tcp/detail/impl/handshake.ipp>
#endif
