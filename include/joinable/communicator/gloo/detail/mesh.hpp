// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <sched.h>
#include <signal.h>

#include <gloo/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include <joinable/communicator/detail/background_thread.hpp>
#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/detail/ranks.hpp>
#include <joinable/detail/hash.hpp>
#include <joinable/detail/text.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// While it lives, writing to a connection that the other side has closed raises no SIGPIPE in this
/// thread, nor in threads that this thread starts. Gloo writes without asking for that.
class WithoutSigpipe : BlockedSignals {
public:
    WithoutSigpipe() noexcept : BlockedSignals{only(SIGPIPE)} {}
};

/// While it lives, threads that this thread starts take no core from another thread when they wake up. Gloo's own thread
/// does so while a thread of this rank sends, and then asks again and again for the connection that this one has locked,
/// until the scheduler's next tick: 2 to 4 ms.
class WithoutPreemption {
public:
    WithoutPreemption() noexcept {
        ::sched_param const none{};
        is_set_ = ::sched_getscheduler(0) == SCHED_OTHER &&
                  ::sched_setscheduler(0, SCHED_BATCH, &none) == 0;
    }
    WithoutPreemption(WithoutPreemption const&) = delete;
    WithoutPreemption& operator=(WithoutPreemption const&) = delete;
    ~WithoutPreemption() {
        if (is_set_) {
            ::sched_param const none{};
            ::sched_setscheduler(0, SCHED_OTHER, &none);
        }
    }

private:
    bool is_set_;
};

class GlooLane;
class GlooTransfers;

/// Gloo's connections between each two ranks. Its own thread moves data.
class GlooMesh {
public:
    /// Collective; blocks. `address` is this machine's. `share(own)` returns what all ranks gave,
    /// by rank; all give the same number of bytes. `look()` is called while ranks connect, and throws
    /// what ends them.
    template <class Share, class Look>
    GlooMesh(
        int rank,
        int size,
        std::string const& address,
        std::chrono::nanoseconds timeout,
        Share const& share,
        Look const& look
    )
        : context_{std::make_shared<Context>(rank, size)} {
        WithoutSigpipe const at_device_thread;
        WithoutPreemption const of_that_thread;
        auto device = ::gloo::transport::tcp::CreateDevice(address.c_str());
        auto const left = std::chrono::ceil<std::chrono::milliseconds>(timeout);
        context_->setTimeout((std::max)(left, std::chrono::milliseconds{1})
        ); // 0 means none to Gloo
        context_->share_addresses(device, share);
        if (size > 1) {
            context_->connect(timeout, look);
        }
    }
    GlooMesh(GlooMesh const&) = delete;
    GlooMesh& operator=(GlooMesh const&) = delete;

    [[nodiscard]] int rank() const noexcept { return context_->rank; }
    [[nodiscard]] int size() const noexcept { return context_->size; }

    /// From any thread. Ends every transfer, here and on the ranks that take part in it. When it
    /// returns, Gloo neither reads nor writes the caller's memory.
    void close() noexcept;

private:
    friend class GlooTransfers;

    /// Gloo's own factory of contexts needs a store in which a rank waits for another one; here all
    /// ranks share their addresses at once.
    class Context : public ::gloo::Context {
    public:
        using ::gloo::Context::Context;

        template <class Share>
        void
        share_addresses(std::shared_ptr<::gloo::transport::Device>& device, Share const& share) {
            auto transport = device->createContext(rank, size);
            transport->setTimeout(getTimeout());
            // A rank has an address for each other one, which connects to it or is connected to.
            constexpr std::size_t most = ::gloo::transport::Address::kMaxByteSize;
            auto const ranks = static_cast<std::size_t>(size);
            std::vector<char> own(ranks * most);
            std::size_t bytes = 0;
            for (int other = 0; other < size; ++other) {
                if (other != rank) {
                    auto const address = transport->createPair(other)->address().bytes();
                    bytes = address.size();
                    std::copy(address.begin(), address.end(), &own[most * as_index(other)]);
                }
            }
            std::vector<char> const all = share(own);
            for (int other = 0; other < size; ++other) {
                auto const address =
                    all.begin() +
                    static_cast<std::ptrdiff_t>(most * (ranks * as_index(other) + as_index(rank)));
                addresses_.emplace_back(address, address + static_cast<std::ptrdiff_t>(bytes));
            }
            device_ = device;
            transportContext_ = std::move(transport);
        }
        /// A thread connects, because Gloo blocks, for five times its timeout: this one looks
        /// meanwhile whether it is in vain.
        template <class Look>
        void connect(std::chrono::nanoseconds timeout, Look const& look) {
            std::atomic<int> awaited{-1};
            std::atomic<bool> is_over{false};
            std::packaged_task<void()> connecting{[&] {
                for (int other = 0; other < size && !is_over; ++other) {
                    if (other != rank) {
                        awaited = other;
                        getPair(other)->connect(addresses_[as_index(other)]);
                    }
                }
            }};
            std::future<void> end = connecting.get_future();
            BackgroundThread const thread{
                concat("the thread that connects rank ", rank, " by Gloo"), std::ref(connecting)
            };
            auto const has_ended = [&] {
                return end.wait_for(std::chrono::milliseconds{10}) == std::future_status::ready;
            };
            auto const stop = [&] {
                is_over = true;
                do { // it may have begun with another one just before
                    // Not with all: close() resets, and Gloo's thread of a rank that then accepts ends its process.
                    if (int const other = awaited; other >= 0) {
                        getPair(other)->close();
                    }
                } while (!has_ended());
            };
            try {
                if (!wait_at_most(timeout, has_ended, look)) {
                    throw std::runtime_error{concat(
                        "rank ",
                        awaited.load(),
                        " is not connected after ",
                        std::chrono::duration<double>(timeout).count(),
                        " s"
                    )};
                }
            } catch (...) {
                stop();
                throw;
            }
            end.get();
        }

    private:
        std::vector<std::vector<char>> addresses_; ///< of the other ranks, for this one
    };

    std::shared_ptr<Context> context_;
    std::mutex mutex_;
    bool is_closed_ = false;
    std::vector<GlooTransfers*> open_; ///< those that are under way
};

/// The state of one thread of this rank that works by Gloo, for the others to see.
class GlooLane {
public:
    explicit GlooLane(GlooMesh& mesh) noexcept : mesh_{mesh} {}

    [[nodiscard]] GlooMesh& mesh() const noexcept { return mesh_; }
    /// How many messages it has waited for: a sign of progress.
    [[nodiscard]] std::uint64_t moved() const noexcept { return moved_; }
    /// The rank with which it exchanges the message that it waits for. -1: it does not wait.
    [[nodiscard]] int awaited() const noexcept { return awaited_; }

private:
    friend class GlooTransfers;

    GlooMesh& mesh_;
    std::atomic<std::uint64_t> moved_{0};
    std::atomic<int> awaited_{-1};
};

/// Messages of this rank that are under way together. Two ranks name a message by the number of the
/// collective and by its size, so messages of different collectives never match: their ranks wait,
/// and nothing is overwritten.
class GlooTransfers {
public:
    GlooTransfers(GlooLane& lane, std::uint64_t name)
        : lane_{lane}, mesh_{lane.mesh()}, name_{name} {
        std::lock_guard const lock{mesh_.mutex_};
        mesh_.open_.push_back(this);
    }
    GlooTransfers(GlooTransfers const&) = delete;
    GlooTransfers& operator=(GlooTransfers const&) = delete;
    ~GlooTransfers() {
        std::lock_guard const lock{mesh_.mutex_};
        mesh_.open_.erase(std::find(mesh_.open_.begin(), mesh_.open_.end(), this));
    }

    /// Starts to send. An empty message is none.
    void send(int to, std::span<std::byte const> bytes) {
        if (!bytes.empty()) {
            add(true, to, const_cast<std::byte*>(bytes.data()), bytes.size())
                .send(to, name_of(bytes.size()));
        }
    }
    void receive(int from, std::span<std::byte> bytes) {
        if (!bytes.empty()) {
            add(false, from, bytes.data(), bytes.size()).recv(from, name_of(bytes.size()));
        }
    }
    /// Blocks until all of them are complete. No deadline ends that, but GlooMesh::close() does.
    void wait() {
        constexpr std::chrono::milliseconds year = std::chrono::hours{24 * 365};
        for (auto const& [buffer, peer, is_send] : transfers_) {
            lane_.awaited_ = peer;
            if (!(is_send ? buffer->waitSend(year) : buffer->waitRecv(year))) {
                throw std::runtime_error{closed};
            }
            ++lane_.moved_;
        }
        lane_.awaited_ = -1;
        std::lock_guard const lock{mesh_.mutex_};
        transfers_.clear(); // waiting again returns at once
    }

private:
    friend class GlooMesh;
    static constexpr char const* closed = "this rank has closed its connections";

    struct Transfer {
        std::unique_ptr<::gloo::transport::UnboundBuffer> buffer;
        int peer;
        bool is_send;
    };

    [[nodiscard]] std::uint64_t name_of(std::size_t bytes) const noexcept {
        return Hash{}.add(name_).add(bytes).value();
    }
    [[nodiscard]] ::gloo::transport::UnboundBuffer&
    add(bool is_send, int peer, void* data, std::size_t bytes) {
        std::lock_guard const lock{mesh_.mutex_};
        if (mesh_.is_closed_) {
            throw std::runtime_error{closed};
        }
        transfers_.push_back({mesh_.context_->createUnboundBuffer(data, bytes), peer, is_send});
        return *transfers_.back().buffer;
    }
    /// From another thread.
    void stop_waiting() {
        for (auto const& [buffer, peer, is_send] : transfers_) {
            is_send ? buffer->abortWaitSend() : buffer->abortWaitRecv();
        }
    }

    GlooLane& lane_;
    GlooMesh& mesh_;
    std::uint64_t name_;
    std::vector<Transfer> transfers_;
};

inline void GlooMesh::close() noexcept {
    std::lock_guard const lock{mutex_};
    if (is_closed_) {
        return;
    }
    is_closed_ = true;
    if (context_->size > 1) {
        context_->closeConnections();
    }
    for (GlooTransfers* const transfers : open_) {
        transfers->stop_waiting();
    }
}

}}} // namespace joinable::v0::detail
