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

/// What all ranks of a job know, and nobody else.
struct TcpJob {
    int size = 1;
    std::string job;
    std::string secret;

    static constexpr std::size_t most_text = 1024; ///< of each, in bytes
};

/// What a rank says first on its connection; job and secret follow. Who reads it knows no more of the
/// sender than that it connected.
struct Hello {
    std::uint64_t magic = joinable_magic;
    std::uint32_t protocol = own_protocol;
    std::uint32_t library = library_version;
    std::int32_t rank = 0;
    std::int32_t size = 0;
    std::uint32_t job_bytes = 0;
    std::uint32_t secret_bytes = 0;

    /// "joinable", and the order of bytes.
    static constexpr std::uint64_t joinable_magic = 0x656c'6261'6e69'6f6aU;
    static constexpr std::uint32_t own_protocol = 1;
};
static_assert(sizeof(Hello) == 32);

/// What rank 0 answers; the text follows.
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

/// Takes as long wherever two texts of one length differ.
[[nodiscard]] bool is_same_secret(std::string_view a, std::string_view b) noexcept;

/// Length in bytes of the hello that starts with these bytes, as far as they tell; 0 if they cannot
/// start one.
[[nodiscard]] std::size_t size_of_hello(std::span<std::byte const> begun) noexcept;

/// Why a rank is turned away.
struct Refusal {
    Greeting::Verdict verdict;
    std::string text;
};
/// Whether rank 0 of `job` takes a rank in that says this. @pre the hello is complete.
[[nodiscard]] std::optional<Refusal> refusal_of(std::span<std::byte const> said, TcpJob const& job);

}}} // namespace joinable::v0::detail

#if JOINABLE_HAS_DEFINITIONS
#include <joinable/communicator/tcp/detail/handshake.ipp>
#endif
