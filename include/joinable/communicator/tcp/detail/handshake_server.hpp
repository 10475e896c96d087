// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/tcp/detail/frame.hpp>
#include <joinable/communicator/tcp/detail/handshake.hpp>
#include <joinable/communicator/tcp/detail/socket.hpp>
#include <joinable/detail/text.hpp>

#include <cerrno>
#include <cstring>

namespace joinable { inline namespace v0 { namespace detail {

/// Where rank 0 receives connections until all ranks have arrived. Each connection is a stranger at
/// first. It may be slow, silent, send anything, or be another job's rank. No stranger keeps a rank
/// out: all are heard at the same time, each for a limited time, and those that do not belong are
/// rejected.
class HandshakeServer {
public:
    /// A connection has to say who it is within `patience`.
    HandshakeServer(Socket listener, TcpJob job, std::chrono::nanoseconds patience)
        : listener_{std::move(listener)}, job_{std::move(job)}, patience_{patience} {}
    HandshakeServer(HandshakeServer&&) = default;
    HandshakeServer& operator=(HandshakeServer&&) = delete;
    /// Nobody listens at the port after this, not even a process that was forked meanwhile.
    ~HandshakeServer() { listener_.end_listening(); }

    [[nodiscard]] TcpJob const& job() const noexcept { return job_; }

    /// Why this process cannot accept connections; empty if it can.
    [[nodiscard]] std::string obstacle() const {
        return refused_for_ == 0        ? std::string{}
               : refused_for_ == EMFILE ? "too many open files: raise its limit of them (ulimit -n)"
                                        : std::string{std::strerror(refused_for_)};
    }

    /// The events to wait for before the next call of poll().
    void poll(std::vector<pollfd>& polled) const {
        if (std::chrono::steady_clock::now() >= accept_again_) {
            polled.push_back({listener_.handle(), POLLIN, 0});
        }
        for (Stranger const& stranger : strangers_) {
            polled.push_back({stranger.socket.handle(), POLLIN, 0});
        }
    }
    /// When to call poll() at the latest.
    [[nodiscard]] TimePoint next_look() const noexcept {
        TimePoint next = std::chrono::steady_clock::now() + std::chrono::hours{1};
        if (!strangers_.empty()) {
            next = (std::min)(next, strangers_.front().end); // they are in order of arrival
        }
        return accept_again_ > std::chrono::steady_clock::now() ? (std::min)(next, accept_again_)
                                                                : next;
    }

    /// `is_here(rank)` tells whether a rank has already arrived. `admit(rank, socket)` admits one.
    template <class IsHere, class Admit>
    void poll(IsHere const& is_here, Admit const& admit) {
        accept_all(is_here, admit);
        auto const now = std::chrono::steady_clock::now();
        std::erase_if(strangers_, [&](Stranger& stranger) {
            return !listen_to(stranger, is_here, admit) || now >= stranger.end;
        });
    }

private:
    struct Stranger {
        Socket socket;
        TimePoint end;
        std::vector<std::byte> received = {};
        bool is_refused = false; ///< keeps reading: closing could destroy its answer
    };
    static constexpr std::size_t most_strangers = 256;

    /// Reads from each connection as soon as it is accepted. If the process has hardly any file
    /// descriptors left, strangers must pass quickly; the first bytes already identify a rank.
    template <class IsHere, class Admit>
    void accept_all(IsHere const& is_here, Admit const& admit) {
        auto const now = std::chrono::steady_clock::now();
        for (int i = 0; i < 64 && now >= accept_again_; ++i) {
            Socket socket = listener_.accept();
            if (!socket.is_open()) {
                bool const is_full =
                    errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS;
                if (is_full && !strangers_.empty()) { // drop the oldest stranger
                    strangers_.pop_front();
                    continue;
                }
                refused_for_ = is_full ? errno : 0;
                if (is_full) {
                    accept_again_ = now + std::chrono::milliseconds{50};
                }
                return;
            }
            refused_for_ = 0;
            Stranger stranger{std::move(socket), end_of_wait(patience_, now)};
            prepare_connection(stranger.socket);
            if (!listen_to(stranger, is_here, admit)) {
                continue;
            }
            if (strangers_.size() == most_strangers) {
                strangers_.pop_front();
            }
            strangers_.push_back(std::move(stranger));
        }
    }

    /// Whether the connection stays open.
    template <class IsHere, class Admit>
    bool listen_to(Stranger& stranger, IsHere const& is_here, Admit const& admit) {
        if (stranger.is_refused) { // one piece at a time, or one that never pauses is heard alone
            std::array<std::byte, 512> ignored{};
            return stranger.socket.receive(ignored).has_value();
        }
        for (;;) {
            std::size_t const whole = size_of_hello(stranger.received);
            if (whole == 0) {
                return false;
            }
            if (whole == stranger.received.size()) {
                return decide(stranger, is_here, admit);
            }
            std::size_t const begun = stranger.received.size();
            stranger.received.resize(whole);
            auto const got = stranger.socket.receive(std::span{stranger.received}.subspan(begun));
            stranger.received.resize(begun + got.value_or(0));
            if (!got || *got == 0) {
                return got.has_value();
            }
        }
    }
    template <class IsHere, class Admit>
    bool decide(Stranger& stranger, IsHere const& is_here, Admit const& admit) {
        std::optional<Refusal> refusal = refusal_of(stranger.received, job_);
        int const rank = refusal ? 0 : object_at<Hello>(stranger.received).rank;
        if (!refusal && is_here(rank)) {
            refusal = Refusal{
                Greeting::Verdict::other_job,
                concat(
                    "expected no other rank ",
                    rank,
                    " of this job, but there is one: give each rank its number"
                )
            };
        }
        std::string const text = refusal ? refusal->text : "";
        auto const verdict = refusal ? refusal->verdict : Greeting::Verdict::welcome;
        std::vector<std::byte> const greeting = greeting_of(verdict, text);
        auto const sent = stranger.socket.send(greeting); // it fits: nothing was sent before
        if (refusal) {
            stranger.socket.end_sending();
            stranger.is_refused = true;
            return true;
        }
        if (sent == greeting.size()) {
            admit(rank, std::move(stranger.socket));
        }
        return false;
    }

    Socket listener_;
    TcpJob job_;
    std::chrono::nanoseconds patience_;
    std::deque<Stranger> strangers_;
    TimePoint accept_again_{};
    int refused_for_ = 0; ///< why the system gave no connection when it was last asked for one
};

}}} // namespace joinable::v0::detail
