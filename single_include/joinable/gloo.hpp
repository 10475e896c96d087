// SPDX-License-Identifier: BSL-1.0
#pragma once

// joinable in single headers, for projects that copy files. Generated from include/joinable by
// single_include/amalgamate.py: change the headers there, not this file.

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <fcntl.h>
#include <functional>
#include <future>
#include <gloo/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>
#include <iterator>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <netdb.h>
#include <optional>
#include <random>
#include <sched.h>
#include <signal.h>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <sys/socket.h>
#include <sys/stat.h>
#include <thread>
#include <type_traits>
#include <unistd.h>
#include <utility>
#include <variant>
#include <vector>

#include "join.hpp"
#include "tcp.hpp"

// ---- joinable/communicator/detail/own_rank.hpp

#ifndef JOINABLE_COMMUNICATOR_DETAIL_OWN_RANK_HPP_PART_1
#define JOINABLE_COMMUNICATOR_DETAIL_OWN_RANK_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// Why a process that says so is no rank of any group; empty if it is one.
[[nodiscard]] inline std::string why_no_rank(int rank, int size) {
    bool const is_none = rank < 0 || rank >= size || size > max_ranks;
    std::string const given = concat(", but was given rank ", rank, " of ", size);
    char const* const what = "expected a rank from 0 to below the world size, which is at most ";
    return is_none ? concat(what, max_ranks, given) : std::string{};
}
/// @throws ContractViolation  a process says that it is a rank that no group has.
inline void check_own_rank(int rank, int size) {
    if (std::string const why = why_no_rank(rank, size); !why.empty()) {
        throw ContractViolation{why};
    }
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/gloo/detail/mesh.hpp

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

// ---- joinable/communicator/gloo/detail/messages.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// One message of this rank, from its post until the user has done with it.
struct GlooMessage {
    enum class State {
        posted,
        complete,
        broken, ///< its connection is closed, or the two sides differ
    };

    bool is_send = false;
    int peer = 0;
    int tag = 0;
    Buffer buffer = {};
    State state = State::posted; ///< guarded by the mutex of GlooMessages, as is the text
    std::string error = {};
    bool is_released = false; ///< by the user
    WaitClock waited = {};    ///< for the other rank
    WaitClock ending = {};    ///< since an end of all ranks, or since it broke

    [[nodiscard]] std::string text() const {
        return text_of_message(is_send, tag, buffer.count, buffer.dtype);
    }
};

/// The messages of a rank. Gloo blocks, and messages to or from one rank must not wait for those of
/// another one. So each peer has a thread for what is sent to it, and one for what comes from it,
/// from the first such message on. The messages of a thread go one after another: a header, then the
/// data. A message whose tag nobody has asked for yet is kept until somebody does.
class GlooMessages {
public:
    using State = GlooMessage::State;

    explicit GlooMessages(GlooMesh& mesh) noexcept : mesh_{mesh} {}
    GlooMessages(GlooMessages const&) = delete;
    GlooMessages& operator=(GlooMessages const&) = delete;
    /// @pre no message is under way
    ~GlooMessages() {
        {
            std::lock_guard const lock{mutex_};
            is_closed_ = true;
        }
        for (auto& [key, lane] : lanes_) {
            lane->has_work.notify_one();
            lane->thread.reset(); // waits for it
        }
    }

    [[nodiscard]] GlooMessage& post(bool is_send, int peer, int tag, Buffer buffer) {
        std::lock_guard const lock{mutex_};
        std::erase_if(open_, [](auto const& one) {
            return one->is_released && one->state != State::posted;
        });
        auto made = std::make_unique<GlooMessage>();
        made->is_send = is_send;
        made->peer = peer;
        made->tag = tag;
        made->buffer = buffer;
        GlooMessage& message = *open_.emplace_back(std::move(made));
        if (is_closed_) {
            finish(message, State::broken, "this rank has closed its connections");
        } else if (peer == mesh_.rank()) {
            meet_self(message);
        } else if (Lane& lane = lane_of(is_send, peer); lane.is_broken) {
            finish(message, State::broken, lane.error);
        } else if (is_send || !take_arrived(lane, message)) {
            lane.posted.push_back(&message);
            lane.has_work.notify_one();
        }
        return message;
    }
    [[nodiscard]] State state_of(GlooMessage const& message) const {
        std::lock_guard const lock{mutex_};
        return message.state;
    }
    void wait_until_over(GlooMessage const& message, std::chrono::microseconds most) const {
        std::unique_lock lock{mutex_};
        has_moved_.wait_for(lock, most, [&] { return message.state != State::posted; });
    }
    /// Two sides that differ, if some do.
    [[nodiscard]] std::optional<AbortReason> mismatch() const {
        std::lock_guard const lock{mutex_};
        return mismatch_;
    }

    /// Breaks all messages and waits until no thread uses a caller's memory. @pre the mesh is closed
    void end() noexcept {
        std::unique_lock lock{mutex_};
        is_closed_ = true;
        has_moved_.wait(lock, [this] {
            return std::none_of(lanes_.begin(), lanes_.end(), [](auto const& one) {
                return one.second->is_busy;
            });
        });
        for (auto const& one : open_) {
            if (one->state == State::posted) {
                one->state = State::broken;
            }
        }
    }

private:
    /// The words before the data of each message.
    struct Header {
        std::uint64_t count;
        std::int32_t tag;
        std::uint32_t dtype;

        [[nodiscard]] DType type() const noexcept { return static_cast<DType>(dtype); }
    };
    /// A message that came before anybody asked for its tag.
    struct Arrived {
        Header header;
        std::vector<std::byte> data;
        bool is_complete = false;
        GlooMessage* receive = nullptr; ///< asked for it meanwhile
    };
    /// One direction of one peer, with its thread.
    struct Lane {
        Lane(GlooMesh& mesh, bool sends, int other) : gloo{mesh}, is_send{sends}, peer{other} {}

        GlooLane gloo;
        bool is_send;
        int peer;
        std::uint64_t number = 0; ///< of the next message; both sides count alike
        std::deque<GlooMessage*> posted = {};
        std::list<Arrived> arrived = {};
        bool is_busy = false;
        bool is_broken = false;
        std::string error = {};
        std::condition_variable has_work = {};
        std::optional<BackgroundThread> thread = {};
    };
    using Lock = std::unique_lock<std::mutex>;

    [[nodiscard]] static std::span<std::byte> bytes_of_buffer(Buffer buffer) noexcept {
        return {static_cast<std::byte*>(buffer.data), buffer.bytes()};
    }

    void finish(GlooMessage& message, State state, std::string_view error = {}) {
        message.error = error;
        message.state = state;
        has_moved_.notify_all();
    }
    [[nodiscard]] Lane& lane_of(bool is_send, int peer) {
        std::pair const key{is_send, peer};
        if (auto const known = lanes_.find(key); known != lanes_.end()) {
            return *known->second;
        }
        Lane& lane =
            *lanes_.emplace(key, std::make_unique<Lane>(mesh_, is_send, peer)).first->second;
        char const* const does = is_send ? "sends to" : "receives from";
        try {
            static_cast<void>(lane.thread.emplace(
                concat("the thread that ", does, " rank ", peer, " by Gloo"),
                [this, &lane] { run(lane); }
            ));
        } catch (...) {
            lanes_.erase(key);
            throw;
        }
        return lane;
    }

    // -- two sides --------------------------------------------------------------------------------

    /// Whether `mine` may have the other side's message. If they differ, all ranks will be told.
    [[nodiscard]] bool is_same(GlooMessage& mine, Header const& theirs) {
        if (mine.buffer.count == theirs.count && mine.buffer.dtype == theirs.type()) {
            return true;
        }
        mismatch_ = reason_of_messages(
            mesh_.rank(),
            mine.peer,
            mine.text(),
            text_of_message(!mine.is_send, theirs.tag, theirs.count, theirs.type())
        );
        finish(mine, State::broken, mismatch_->message);
        return false;
    }
    [[nodiscard]] static Header header_of(GlooMessage const& message) noexcept {
        return {
            message.buffer.count, message.tag, static_cast<std::uint32_t>(message.buffer.dtype)
        };
    }
    /// Messages from this rank to itself.
    void meet_self(GlooMessage& message) {
        auto const other = std::find_if(to_self_.begin(), to_self_.end(), [&](auto const* one) {
            return one->is_send != message.is_send && one->tag == message.tag;
        });
        if (other == to_self_.end()) {
            to_self_.push_back(&message);
            return;
        }
        GlooMessage& first = **other;
        to_self_.erase(other);
        if (!is_same(message, header_of(first))) {
            finish(first, State::broken, message.error);
            return;
        }
        GlooMessage const& send = message.is_send ? message : first;
        GlooMessage const& receive = message.is_send ? first : message;
        copy(receive, bytes_of_buffer(send.buffer));
        finish(first, State::complete);
        finish(message, State::complete);
    }
    static void copy(GlooMessage const& receive, std::span<std::byte const> data) noexcept {
        if (!data.empty()) {
            std::memmove(receive.buffer.data, data.data(), data.size());
        }
    }
    /// Whether a message of this tag has come, or is coming, that no other receive takes.
    [[nodiscard]] bool take_arrived(Lane& lane, GlooMessage& receive) {
        auto const one =
            std::find_if(lane.arrived.begin(), lane.arrived.end(), [&](Arrived const& arrived) {
                return arrived.receive == nullptr && arrived.header.tag == receive.tag;
            });
        if (one == lane.arrived.end()) {
            return false;
        }
        if (is_same(receive, one->header)) {
            one->receive = &receive;
            deliver(lane, one);
        }
        return true;
    }
    /// @pre somebody receives it
    void deliver(Lane& lane, std::list<Arrived>::iterator arrived) {
        if (arrived->is_complete) {
            copy(*arrived->receive, arrived->data);
            finish(*arrived->receive, State::complete);
            lane.arrived.erase(arrived);
        }
    }

    // -- a thread ---------------------------------------------------------------------------------

    void run(Lane& lane) {
        Lock lock{mutex_};
        while (!lane.is_broken) {
            lane.has_work.wait(lock, [&] { return is_closed_ || !lane.posted.empty(); });
            if (is_closed_) {
                return;
            }
            lane.is_busy = true;
            GlooMessage* under_way = nullptr;
            try {
                lane.is_send ? send_next(lane, under_way, lock)
                             : receive_next(lane, under_way, lock);
            } catch (std::exception const& error) {
                if (!lock.owns_lock()) {
                    lock.lock();
                }
                lane.error = error.what();
                break_all(lane, under_way);
            }
            lane.is_busy = false;
            has_moved_.notify_all();
        }
    }
    void break_all(Lane& lane, GlooMessage* under_way) {
        lane.is_broken = true;
        if (under_way != nullptr) {
            finish(*under_way, State::broken, lane.error);
        }
        for (GlooMessage* const one : std::exchange(lane.posted, {})) {
            finish(*one, State::broken, lane.error);
        }
        for (Arrived const& one : lane.arrived) {
            if (one.receive != nullptr) {
                finish(*one.receive, State::broken, lane.error);
            }
        }
    }
    /// The name of the header, or of the data, of this lane's next message.
    [[nodiscard]] std::uint64_t name_of(Lane const& lane, bool is_data) const noexcept {
        constexpr std::uint64_t message = 0x6d657373616765; // no collective begins with this
        int const from = lane.is_send ? mesh_.rank() : lane.peer;
        return Hash{}
            .add(message)
            .add(static_cast<std::uint64_t>(from))
            .add(lane.number)
            .add(is_data ? 1 : 0)
            .value();
    }
    void send_next(Lane& lane, GlooMessage*& under_way, Lock& lock) {
        under_way = lane.posted.front();
        lane.posted.pop_front();
        Header const header = header_of(*under_way);
        std::span<std::byte const> const data = bytes_of_buffer(under_way->buffer);
        lock.unlock();
        {
            GlooTransfers first{lane.gloo, name_of(lane, false)};
            GlooTransfers second{lane.gloo, name_of(lane, true)};
            first.send(lane.peer, std::as_bytes(std::span{&header, 1}));
            second.send(lane.peer, data);
            first.wait();
            second.wait();
        }
        lock.lock();
        ++lane.number;
        finish(*under_way, State::complete);
    }
    void receive_next(Lane& lane, GlooMessage*& under_way, Lock& lock) {
        lock.unlock();
        Header header{};
        {
            GlooTransfers transfers{lane.gloo, name_of(lane, false)};
            transfers.receive(lane.peer, std::as_writable_bytes(std::span{&header, 1}));
            transfers.wait();
        }
        lock.lock();
        auto const receive =
            std::find_if(lane.posted.begin(), lane.posted.end(), [&](auto const* one) {
                return one->tag == header.tag;
            });
        std::span<std::byte> into;
        auto arrived = lane.arrived.end();
        if (receive != lane.posted.end()) {
            GlooMessage& mine = **receive;
            lane.posted.erase(receive);
            if (!is_same(mine, header)) {
                lane.error = mine.error;
                break_all(lane, nullptr);
                return;
            }
            under_way = &mine;
            into = bytes_of_buffer(mine.buffer);
        } else {
            arrived = lane.arrived.insert(arrived, Arrived{header, {}});
            arrived->data.resize(header.count * size_of(header.type()));
            into = arrived->data;
        }
        lock.unlock();
        {
            GlooTransfers transfers{lane.gloo, name_of(lane, true)};
            transfers.receive(lane.peer, into);
            transfers.wait();
        }
        lock.lock();
        ++lane.number;
        if (under_way != nullptr) {
            finish(*under_way, State::complete);
            return;
        }
        arrived->is_complete = true;
        if (arrived->receive != nullptr) {
            deliver(lane, arrived);
        }
    }

    GlooMesh& mesh_;
    mutable std::mutex mutex_; ///< for what follows, but the numbers of lanes
    mutable std::condition_variable has_moved_;
    std::deque<std::unique_ptr<GlooMessage>> open_; ///< in the order of posts
    std::deque<GlooMessage*> to_self_;
    std::map<std::pair<bool, int>, std::unique_ptr<Lane>> lanes_; ///< by direction and peer
    std::optional<AbortReason> mismatch_;
    bool is_closed_ = false;
};

}}} // namespace joinable::v0::detail

// ---- joinable/detail/requested_checks.hpp

#ifndef JOINABLE_DETAIL_REQUESTED_CHECKS_HPP_PART_1
#define JOINABLE_DETAIL_REQUESTED_CHECKS_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// The checks that the environment variable JOINABLE_CHECK turns on, in programs that are not compiled for them.
struct RequestedChecks {
    std::string_view text; ///< as the variable has it; empty if it is not set
    bool collectives = false;
    bool ready = false;
    bool replicas = false;

    /// @throws ContractViolation  it has an unknown word.
    [[nodiscard]] static RequestedChecks read();
};

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/detail/comparison.hpp

#ifndef JOINABLE_COMMUNICATOR_DETAIL_COMPARISON_HPP_PART_1
#define JOINABLE_COMMUNICATOR_DETAIL_COMPARISON_HPP_PART_1

/// @file
/// How ranks compare what they are about to do.

namespace joinable { inline namespace v0 { namespace detail {

/// Why the signatures differ. `words` has as many words from each rank, in rank order, which begin with its
/// Descriptor::words().
[[nodiscard]] inline std::optional<AbortReason>
difference_of_signatures(int size, std::span<std::uint64_t const> words) {
    std::size_t const width = words.size() / static_cast<std::size_t>(size);
    return find_difference(size, [&](int rank) {
        return Descriptor::of_words(words.subspan(width * static_cast<std::size_t>(rank)));
    });
}

/// Whether ranks must be told the counts of others before they can pass data on.
[[nodiscard]] constexpr bool tells_parts(Descriptor const& signature) noexcept {
    return signature.has_counts && (signature.collective == Collective::gather ||
                                    signature.collective == Collective::scatter ||
                                    signature.collective == Collective::all_to_all);
}

/// The words that ranks sum before data moves: first the signatures, then, if these are equal and have
/// counts, the tables of counts. All find the same difference, or none. Its memory is kept for the next one.
class Comparison {
public:
    /// Begins with the signatures.
    void begin(Descriptor const& own, int rank, int size) {
        signature_ = own;
        rank_ = rank;
        size_ = size;
        has_tables_ = false;
        auto const mine = own.words();
        bool const has_pairs = own.has_counts && own.collective != Collective::gather &&
                               own.collective != Collective::scatter;
        words_.reserve(2 * as_index(size) * (has_pairs ? as_index(size) : 1)); // for go_on(), too
        words_.assign(mine.size() * as_index(size), 0);
        std::copy(mine.begin(), mine.end(), words_.data() + mine.size() * as_index(rank));
    }
    /// Goes on to the tables of the same collective. False if it has none, or they were compared.
    [[nodiscard]] bool go_on(PartSizes const& sends, PartSizes const& expects) {
        if (!signature_.has_counts || std::exchange(has_tables_, true)) {
            return false;
        }
        words_.clear();
        for (int from = 0; from < size_; ++from) {
            for (int to = 0; to < size_; ++to) {
                if (has_part(from, to)) {
                    words_.push_back(from == rank_ ? sends[to] : 0);
                    words_.push_back(to == rank_ ? expects[from] : 0);
                }
            }
        }
        return true;
    }
    /// There is nothing more to compare, until the next begin().
    void end() noexcept { words_.clear(); }
    [[nodiscard]] bool is_over() const noexcept { return words_.empty(); }

    /// To be summed over all ranks, in place.
    [[nodiscard]] std::span<std::uint64_t> words() noexcept { return words_; }
    /// @pre ranks have summed the words
    [[nodiscard]] std::optional<AbortReason> difference() const {
        if (!has_tables_) {
            return difference_of_signatures(size_, words_);
        }
        auto const word = [&](int from, int to, int side) -> std::uint64_t {
            int const pair = signature_.collective == Collective::gather    ? from
                             : signature_.collective == Collective::scatter ? to
                                                                            : size_ * from + to;
            return has_part(from, to) ? words_[static_cast<std::size_t>(2 * pair + side)] : 0;
        };
        return find_difference_of_counts(
            size_,
            signature_,
            [&](int from, int to) { return word(from, to, 0); },
            [&](int from, int to) { return word(from, to, 1); }
        );
    }
    /// The counts of all ranks, as a Substitute takes them. @pre ranks have summed the tables
    [[nodiscard]] std::vector<std::size_t> known() const {
        std::vector<std::size_t> counts;
        for (std::size_t pair = 0; pair < words_.size(); pair += 2) {
            counts.push_back(words_[pair]);
        }
        return counts;
    }

private:
    /// Only the root has parts for others in a scatter, or gets some in a gather.
    [[nodiscard]] bool has_part(int from, int to) const noexcept {
        return signature_.collective == Collective::gather    ? to == signature_.root
               : signature_.collective == Collective::scatter ? from == signature_.root
                                                              : true;
    }

    Descriptor signature_;
    int rank_ = 0;
    int size_ = 0;
    bool has_tables_ = false;
    std::vector<std::uint64_t> words_;
};

/// `words` are an option of all ranks, 0 or 1, by rank. `option` is its name.
/// @throws Mismatch  ranks differ.
inline void check_same_option(
    std::vector<std::uint64_t> const& words, std::string_view option, bool is_renumbered = false
) {
    auto const others = ranks_where(static_cast<int>(words.size()), [&](int rank) {
        return words[as_index(rank)] != words[0];
    });
    if (!others.empty()) {
        throw Mismatch{
            others,
            concat(
                "options differ: ",
                option,
                words[0] != 0 ? ": rank 0 has true, rank " : ": rank 0 has false, rank ",
                others.front(),
                words[0] != 0 ? " has false" : " has true"
            ),
            is_renumbered
        };
    }
}

/// Collective. Whether all ranks compare collectives, because their options say so or JOINABLE_CHECK=collectives
/// does. `option` is the option's name, and `share(word)` returns the words of all ranks, by rank.
/// @throws Mismatch           ranks differ.
/// @throws ContractViolation  the variable has an unknown word; PeerFailed on the others.
template <class Share>
[[nodiscard]] bool agree_to_compare(
    bool by_options, std::string_view option, Share const& share, bool is_renumbered = false
) {
    constexpr std::uint64_t unknown = 2;
    bool compares = by_options;
    std::exception_ptr const error =
        exception_of([&] { compares = compares || RequestedChecks::read().collectives; });
    std::vector<std::uint64_t> words;
    try {
        words = share(error ? unknown : std::uint64_t{compares ? 1U : 0U});
    } catch (...) {
        std::rethrow_exception(error ? error : std::current_exception());
    }
    if (error) {
        std::rethrow_exception(error);
    }
    int const size = static_cast<int>(words.size());
    auto const failed =
        ranks_where(size, [&](int rank) { return words[as_index(rank)] == unknown; });
    if (!failed.empty()) {
        throw PeerFailed{
            failed, failure_text(failed, "JOINABLE_CHECK has an unknown word there"), is_renumbered
        };
    }
    check_same_option(words, concat(option, ", or JOINABLE_CHECK=collectives"), is_renumbered);
    return compares;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/gloo/detail/operation.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// The words that ranks sum when they arrive in a collective: each rank's Descriptor::words(), then for
/// each rank what others send to it less what it expects from them, by hashes, and then a few words
/// of data. The hashes add up to 0 unless tables of counts differ.
class GlooArrival {
public:
    static constexpr std::size_t most_data = 8; ///< a roll call has seven

    GlooArrival(Descriptor const& own, int rank, int size)
        : words_(3 * static_cast<std::size_t>(size) + most_data), size_{size}, signature_{own} {
        std::memcpy(&at(2 * rank), own.words().data(), sizeof own.words());
    }

    /// @pre of at most `most_data` words
    void take_data(ConstBuffer data) noexcept {
        if (data.count != 0) {
            std::memcpy(&at(3 * size_), data.data, data.bytes());
        }
    }
    void give_data(Buffer data) noexcept {
        if (data.count != 0) {
            std::memcpy(data.data, &at(3 * size_), data.bytes());
        }
    }

    void add_counts(int rank, PartSizes const& sends, PartSizes const& expects) {
        for (int other = 0; other < size_; ++other) {
            at(2 * size_ + other) += hash_of(rank, other, sends[other]);
            at(2 * size_ + rank) -= hash_of(other, rank, expects[other]);
        }
    }
    [[nodiscard]] Buffer buffer() noexcept { return {words_.data(), words_.size(), DType::u64}; }

    /// @pre the words have been summed over all ranks
    [[nodiscard]] std::optional<AbortReason> difference() const {
        auto const signatures = std::span{words_}.first(2 * static_cast<std::size_t>(size_));
        if (auto const reason = difference_of_signatures(size_, signatures)) {
            return reason;
        }
        auto ranks = ranks_where(size_, [&](int rank) { return at(2 * size_ + rank) != 0; });
        if (ranks.empty()) {
            return std::nullopt;
        }
        std::string text = concat(
            "counts differ in ",
            signature_.text(),
            ": other ranks do not have for ",
            ranks_text(ranks),
            " what is expected there"
        );
        return AbortReason{FailureKind::mismatch, std::move(ranks), std::move(text)};
    }

private:
    [[nodiscard]] std::uint64_t& at(int place) noexcept {
        return words_[static_cast<std::size_t>(place)];
    }
    [[nodiscard]] std::uint64_t at(int place) const noexcept {
        return words_[static_cast<std::size_t>(place)];
    }
    [[nodiscard]] static std::uint64_t hash_of(int from, int to, std::size_t count) noexcept {
        return Hash{}
            .add(static_cast<std::uint64_t>(from))
            .add(static_cast<std::uint64_t>(to))
            .add(count)
            .value();
    }

    std::vector<std::uint64_t> words_;
    int size_;
    Descriptor signature_;
};

/// One collective of this rank, from its post until the user and all ranks have done with it.
struct GlooOperation {
    enum class State {
        posted,
        complete,
        broken, ///< Gloo refused it, or this rank has closed its connections
    };

    GlooOperation(Request const& asked, std::uint64_t its_number, int rank, int size)
        : request{asked}, number{its_number}, arrival{asked.signature, rank, size} {
        if (goes_with_arrival()) {
            arrival.take_data(asked.in);
        }
        if (asked.signature.has_counts) {
            arrival.add_counts(rank, asked.sends, asked.expects);
            kept_.keep(request.sends, request.expects, size); // the caller's tables may end
        }
    }
    GlooOperation(GlooOperation const&) = delete;
    GlooOperation& operator=(GlooOperation const&) = delete;

    /// Whether the words of the arrival are all that it needs.
    [[nodiscard]] bool goes_with_arrival() const noexcept {
        auto const& signature = request.signature;
        return signature.collective == Collective::barrier ||
               (signature.collective == Collective::all_reduce && signature.dtype == DType::u64 &&
                signature.op == ReduceOp::sum && signature.count <= GlooArrival::most_data);
    }
    /// Whether it is over only when all ranks have arrived. Gloo moves nothing for those without
    /// elements, so it waits for nobody.
    [[nodiscard]] bool needs_arrivals() const noexcept {
        auto const& signature = request.signature;
        return goes_with_arrival() || signature.has_counts || signature.count == 0;
    }

    Request request;
    std::uint64_t number;
    GlooArrival arrival;
    std::optional<TcpWork> arriving; ///< the sum of `arrival`
    bool is_compared = false;        ///< all ranks have arrived, and in the same collective
    bool is_released = false;        ///< by the user
    WaitClock stalled;               ///< since all ranks have arrived, or Gloo has refused it
    std::uint64_t moved = 0;         ///< GlooLane::moved() when that time began
    State state = State::posted;     ///< guarded by the rank's mutex, as is the text
    std::string error;

private:
    KeptTables kept_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/detail/polling.hpp

#ifndef JOINABLE_COMMUNICATOR_DETAIL_POLLING_HPP_PART_1
#define JOINABLE_COMMUNICATOR_DETAIL_POLLING_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// A pause between two polls of a wait. There is none at first, as long as `spins` says. Then the
/// wait yields, because others may need this core. After 10 ms it sleeps.
class PollPause {
public:
    explicit PollPause(std::chrono::nanoseconds spins) noexcept : spins_{spins} {}

    void operator()() {
        auto const now = std::chrono::steady_clock::now();
        if (began_at_ == std::chrono::steady_clock::time_point{}) {
            began_at_ = now;
        }
        if (now - began_at_ >= std::chrono::milliseconds{10}) {
            std::this_thread::sleep_for(std::chrono::microseconds{50});
        } else if (now - began_at_ >= spins_) {
            std::this_thread::yield();
        }
    }

private:
    std::chrono::nanoseconds spins_;
    std::chrono::steady_clock::time_point began_at_{};
};

/// How a caller proceeds with operations in flight.
enum class Waiting : std::uint8_t {
    blocks,
    tests, ///< ends by the deadline
    polls, ///< like tests, without a deadline
};

/// Whether `work` is complete, or there is none. Complete work is destroyed.
template <Work W>
[[nodiscard]] bool is_complete(std::optional<W>& work, Waiting waiting) {
    if (!work) {
        return true;
    }
    if (waiting == Waiting::blocks) {
        work->wait();
    } else if (waiting == Waiting::tests ? !work->test() : !make_progress(*work)) {
        return false;
    }
    work.reset();
    return true;
}

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/device/scratch.hpp

#ifndef JOINABLE_DEVICE_SCRATCH_HPP_PART_1
#define JOINABLE_DEVICE_SCRATCH_HPP_PART_1

namespace joinable { inline namespace v0 { namespace detail {

/// Memory of a device for a while, such as for a tensor whose elements have to be rearranged. It grows
/// on demand.
class Scratch {
public:
    explicit Scratch(Device& device) noexcept : device_{device} {}

    [[nodiscard]] std::byte* data(std::size_t bytes) {
        if (arena_.bytes() < bytes) {
            if (is_on_host(device_)) {
                arena_ = Arena{};
            } else { // freeing it would wait for the device
                bytes = (std::max)(bytes, 2 * arena_.bytes());
                former_.push_back(std::move(arena_));
            }
            arena_ = device_.allocate(bytes, Arena::default_alignment);
        }
        return arena_.data();
    }

private:
    Device& device_;
    Arena arena_;
    std::vector<Arena> former_;
};

}}} // namespace joinable::v0::detail

#endif

// ---- joinable/communicator/gloo/detail/collectives.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// Runs one collective of one rank from its beginning to its end, which blocks. Its messages are
/// Gloo's. Each rank combines one part of all inputs by the library's own arithmetic, in rank
/// order, so results have the same bits as those of other transports.
class GlooCollective {
public:
    /// Reductions and broadcasts of at most so many bytes take one step, in which each rank sends
    /// everything. Larger ones take two.
    static constexpr std::size_t most_in_one_step = 16 * 1024;
    /// So many bytes of each rank's part are combined while the next ones arrive.
    static constexpr std::size_t piece_bytes = 1024 * 1024;

    /// Memory for what a rank receives and combines. It is kept, because new pages cost more than what arrives in them.
    using Kept = std::array<Scratch, 2>;

    /// `request` must outlive this object. `number` is the collective's, the same on all ranks.
    GlooCollective(GlooLane& lane, Kept& scratch, Request const& request, std::uint64_t number)
        : lane_{lane}, scratch_{scratch}, request_{request}, signature_{request.signature},
          number_{number}, rank_{lane.mesh().rank()}, size_{lane.mesh().size()},
          element_{size_of(signature_.dtype)}, in_{static_cast<std::byte const*>(request.in.data)},
          out_{static_cast<std::byte*>(request.out.data)} {}

    void run() {
        switch (signature_.collective) {
        case Collective::barrier: meet(); break;
        case Collective::broadcast: broadcast(); break;
        case Collective::all_reduce:
        case Collective::scaled_all_reduce:
        case Collective::reduce:
            if (signature_.count * element_ <= most_in_one_step) {
                reduce_in_one_step();
            } else {
                reduce_by_parts(equal_parts(signature_.count));
            }
            break;
        case Collective::reduce_scatter:
        case Collective::scaled_reduce_scatter: reduce_by_parts(parts_of(request_.sends)); break;
        default: exchange();
        }
    }

private:
    /// One rank's part of a buffer, in elements.
    struct Part {
        std::size_t begin = 0;
        std::size_t count = 0;
    };
    using Parts = std::vector<Part>;

    // -- small tools ------------------------------------------------------------------------------

    /// Calls f(rank) for the other ranks, beginning with the next one, so that not all ranks send
    /// to the same one first.
    template <class F>
    void for_others(F const& f) const {
        for (int i = 1; i < size_; ++i) {
            f((rank_ + i) % size_);
        }
    }
    /// The name of the messages of one step. All that ranks could say differently is in it.
    [[nodiscard]] std::uint64_t name_of(std::uint64_t step) const noexcept {
        Hash name;
        name.add(number_)
            .add(signature_.word())
            .add(signature_.has_counts ? 1 : 0)
            .add(signature_.count)
            .add(step);
        return name.value();
    }
    [[nodiscard]] std::span<std::byte const> of_in(std::size_t begin, std::size_t count) const {
        return {in_ + begin * element_, count * element_};
    }
    [[nodiscard]] std::span<std::byte> of_out(std::size_t begin, std::size_t count) const {
        return {out_ + begin * element_, count * element_};
    }
    [[nodiscard]] Parts equal_parts(std::size_t count) const {
        Parts parts;
        std::size_t const ranks = as_index(size_);
        for (std::size_t rank = 0; rank < ranks; ++rank) {
            std::size_t const more = (std::min)(rank, count % ranks);
            std::size_t const own = count / ranks + (rank < count % ranks ? 1 : 0);
            parts.push_back({rank * (count / ranks) + more, own});
        }
        return parts;
    }
    [[nodiscard]] Parts parts_of(PartSizes const& sizes) const {
        Parts parts;
        std::size_t begin = 0;
        for (int rank = 0; rank < size_; ++rank) {
            parts.push_back({begin, sizes[rank]});
            begin += sizes[rank];
        }
        return parts;
    }

    // -- what combines nothing --------------------------------------------------------------------

    void meet() {
        GlooTransfers transfers{lane_, name_of(0)};
        std::vector<std::byte> words(as_index(size_) + 1);
        std::span<std::byte> const all{words};
        for_others([&](int other) { transfers.receive(other, all.subspan(as_index(other), 1)); });
        for_others([&](int other) { transfers.send(other, all.last(1)); });
        transfers.wait();
    }

    void broadcast() {
        bool const is_root = rank_ == signature_.root;
        if (signature_.count * element_ <= most_in_one_step || size_ == 2) {
            GlooTransfers transfers{lane_, name_of(0)};
            if (is_root) {
                for_others([&](int other) { transfers.send(other, of_in(0, signature_.count)); });
            } else {
                transfers.receive(signature_.root, of_out(0, signature_.count));
            }
            transfers.wait();
            return;
        }
        // The root sends each rank its part, and all ranks its own part. Ranks pass their parts on.
        Parts const parts = equal_parts(signature_.count);
        auto const part = [&](int rank) {
            return of_out(parts[as_index(rank)].begin, parts[as_index(rank)].count);
        };
        GlooTransfers from_root{lane_, name_of(0)};
        GlooTransfers of_root{lane_, name_of(1)};
        GlooTransfers among_others{lane_, name_of(2)};
        if (is_root) {
            for_others([&](int other) { from_root.send(other, part(other)); });
            for_others([&](int other) { of_root.send(other, part(rank_)); });
        } else {
            from_root.receive(signature_.root, part(rank_));
            of_root.receive(signature_.root, part(signature_.root));
            for_others([&](int other) {
                if (other != signature_.root) {
                    among_others.receive(other, part(other));
                }
            });
            from_root.wait();
            for_others([&](int other) {
                if (other != signature_.root) {
                    among_others.send(other, part(rank_));
                }
            });
        }
        from_root.wait();
        of_root.wait();
        among_others.wait();
    }

    /// all_gather, gather, scatter and all_to_all.
    void exchange() {
        bool const sends_one_part = signature_.collective == Collective::all_gather ||
                                    signature_.collective == Collective::gather;
        Parts const sent = parts_of(request_.sends);
        Parts const expected = parts_of(request_.expects);
        auto const outgoing = [&](int to) {
            auto const [begin, count] = sent[as_index(to)];
            return of_in(sends_one_part ? 0 : begin, count);
        };
        auto const incoming = [&](int from) {
            auto const [begin, count] = expected[as_index(from)];
            return of_out(begin, count);
        };
        GlooTransfers transfers{lane_, name_of(0)};
        for_others([&](int other) { transfers.receive(other, incoming(other)); });
        for_others([&](int other) { transfers.send(other, outgoing(other)); });
        auto const own = outgoing(rank_);
        if (!own.empty() && incoming(rank_).data() != own.data()) {
            std::memmove(incoming(rank_).data(), own.data(), own.size());
        }
        transfers.wait();
    }

    // -- reductions -------------------------------------------------------------------------------

    [[nodiscard]] bool has_result(int rank) const noexcept {
        return signature_.collective != Collective::reduce || rank == signature_.root;
    }
    /// All ranks that get the result tell each other their factors. These travel with the first
    /// data, and not in a round trip before it.
    void send_factors() {
        if (is_scaled(signature_.collective)) {
            factors_.assign(as_index(size_), signature_.factor);
            std::span<double> const all{factors_};
            auto& transfers = factors_under_way_.emplace(lane_, name_of(~std::uint64_t{0}));
            for_others([&](int other) {
                transfers.receive(other, std::as_writable_bytes(all.subspan(as_index(other), 1)));
            });
            auto const own = std::as_bytes(std::span{&signature_.factor, 1});
            for_others([&](int other) { transfers.send(other, own); });
        }
    }
    void wait_for_factors() {
        if (factors_under_way_) {
            factors_under_way_->wait();
        }
    }
    /// Combines this rank's elements `own` and those of the others, which lie `stride` bytes apart.
    void combine(
        std::byte const* own,
        std::byte* others,
        std::size_t stride,
        std::byte* to,
        std::size_t count
    ) const {
        auto const input = [&](std::size_t rank) {
            return rank == as_index(rank_) ? const_cast<std::byte*>(own) : others + rank * stride;
        };
        auto const output = [&](std::size_t) { return to; };
        auto const factor = [&](std::size_t rank) { return factors_[rank]; };
        reduce_to(
            signature_.dtype,
            signature_.op,
            {as_index(size_), input},
            {1, output},
            count,
            factors_.empty() ? Factors{} : Factors{as_index(size_), factor}
        );
    }

    void reduce_in_one_step() {
        send_factors();
        std::size_t const bytes = signature_.count * element_;
        std::byte* const others = scratch_[0].data(has_result(rank_) ? as_index(size_) * bytes : 0);
        GlooTransfers transfers{lane_, name_of(0)};
        for_others([&](int other) {
            if (has_result(rank_)) {
                transfers.receive(other, {others + as_index(other) * bytes, bytes});
            }
        });
        for_others([&](int other) {
            if (has_result(other)) {
                transfers.send(other, of_in(0, signature_.count));
            }
        });
        transfers.wait();
        wait_for_factors();
        if (has_result(rank_) && signature_.count != 0) {
            combine(in_, others, bytes, out_, signature_.count);
        }
    }

    /// Two pieces are under way at a time: while one is combined, the next one arrives.
    struct Piece {
        std::byte* memory = nullptr; ///< the others' inputs, and this rank's result
        std::optional<GlooTransfers> inputs;
        std::optional<GlooTransfers> results;
    };

    /// Each rank combines its part. Then the ranks that get all parts receive them.
    void reduce_by_parts(Parts const& parts) {
        send_factors();
        std::size_t const most = (std::max)(piece_bytes / element_, std::size_t{1});
        Part const& own = parts[as_index(rank_)];
        std::size_t longest = 0;
        for (Part const& part : parts) {
            longest = (std::max)(longest, part.count);
        }
        std::size_t const pieces = (longest + most - 1) / most;
        std::size_t const stride = (std::min)(most, own.count) * element_;
        auto const piece_of = [&](Part const& part, std::size_t number) -> Part {
            std::size_t const at = (std::min)(number * most, part.count);
            return {part.begin + at, (std::min)(most, part.count - at)};
        };
        std::array<Piece, 2> two;
        auto const start = [&](std::size_t number) {
            Piece& piece = two[number % 2];
            piece.memory = scratch_[number % 2].data(as_index(size_) * stride);
            std::size_t const bytes = piece_of(own, number).count * element_;
            piece.inputs.emplace(lane_, name_of(2 * number));
            for_others([&](int other) {
                piece.inputs->receive(other, {piece.memory + as_index(other) * stride, bytes});
            });
            for_others([&](int other) {
                auto const [begin, count] = piece_of(parts[as_index(other)], number);
                piece.inputs->send(other, of_in(begin, count));
            });
        };
        auto const finish = [&](std::size_t number) {
            Piece& piece = two[number % 2];
            piece.inputs->wait();
            wait_for_factors();
            Part const mine = piece_of(own, number);
            std::byte* const result = place_of_result(
                piece.memory + as_index(rank_) * stride, mine.begin, mine.begin - own.begin
            );
            if (mine.count != 0) {
                combine(in_ + mine.begin * element_, piece.memory, stride, result, mine.count);
            }
            if (is_scattered()) {
                return;
            }
            piece.results.emplace(lane_, name_of(2 * number + 1));
            for_others([&](int other) {
                auto const [at, elements] = piece_of(parts[as_index(other)], number);
                if (has_result(rank_)) {
                    piece.results->receive(other, of_out(at, elements));
                }
                if (has_result(other)) {
                    piece.results->send(other, {result, mine.count * element_});
                }
            });
        };
        auto const wait_for_results = [&](std::size_t number) {
            if (auto& results = two[number % 2].results) {
                results->wait();
                results.reset();
            }
        };
        for (std::size_t number = 0; number < pieces; ++number) {
            if (number == 0) {
                start(0);
            }
            if (number + 1 < pieces) {
                start(number + 1);
            }
            finish(number);
            if (number > 0) {
                wait_for_results(number - 1);
            }
        }
        if (pieces > 0) {
            wait_for_results(pieces - 1);
        }
        wait_for_factors(); // of a sum without elements
    }
    [[nodiscard]] bool is_scattered() const noexcept {
        return signature_.collective == Collective::reduce_scatter ||
               signature_.collective == Collective::scaled_reduce_scatter;
    }
    /// Where this rank writes its elements from `begin` on, which are `at` after its part's first.
    /// A rank that gets no result has it in `memory`.
    [[nodiscard]] std::byte*
    place_of_result(std::byte* memory, std::size_t begin, std::size_t at) const noexcept {
        if (is_scattered()) {
            return out_ + at * element_;
        }
        return has_result(rank_) ? out_ + begin * element_ : memory;
    }

    GlooLane& lane_;
    Kept& scratch_;
    Request const& request_;
    Descriptor const& signature_;
    std::uint64_t number_;
    int rank_;
    int size_;
    std::size_t element_;
    std::byte const* in_;
    std::byte* out_;
    std::vector<double> factors_;
    std::optional<GlooTransfers> factors_under_way_; ///< reads and writes the factors
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/gloo/options.hpp

namespace joinable { inline namespace v0 {

/// The ranks of a job meet through a file that all of them can reach. Rank 0 writes it and removes
/// it when all ranks have come; it may replace what an earlier job left. The other ranks wait for
/// the file, and look again while nobody answers where an earlier job's file leads. A path is used
/// by one job at a time. The file has the secret of the job, so only its owner can read it; ranks
/// ignore a link, and a file that another user owns, or may read or write.
struct GlooFile {
    std::string path;
};

namespace detail {

/// The ranks of a job meet at a port of rank 0's machine. See TcpOptions, which has the same
/// members and says what the secret keeps out.
struct GlooHub {
    std::string job;
    std::string address; ///< of rank 0's machine
    std::uint16_t port = 0;
    std::string secret;
};

} // namespace detail

/// One rank of a group, for GlooCommunicator. Everything but the rank and its address is the same
/// on all ranks.
struct GlooOptions {
    int rank = 0;
    int size = 1;
    std::variant<GlooFile, detail::GlooHub> store = {};
    /// An address or name of this rank's machine by which the others reach it. If empty, it is the
    /// address from which this rank reaches rank 0. Rank 0 that writes a file then takes the name
    /// of its host.
    std::string address = {};
    std::chrono::nanoseconds connect_timeout = default_deadline; ///< for construction
    /// Applies to all waits after that. If all ranks have posted a collective in time, its data has
    /// one more deadline, which begins again with each message that has passed. So each message
    /// must pass within the deadline: a broadcast between two ranks, each part of an all_gather or
    /// all_to_all, and each send(). A slow link may need a longer deadline. If no message of a
    /// collective passes in time, all ranks throw CommunicationError, which says between which
    /// ranks no data moved.
    std::chrono::nanoseconds deadline = default_deadline;
};

}} // namespace joinable::v0

// ---- joinable/communicator/gloo/detail/rendezvous.hpp

/// @file
/// How the ranks of a job find each other: they attach to the hub of a TcpEnd, at an
/// address that they know or read in a file.

namespace joinable { inline namespace v0 { namespace detail {

[[nodiscard]] inline std::string host_name() {
    char name[256]{};
    return ::gethostname(name, sizeof name - 1) == 0 ? name : "localhost";
}

/// This machine's address in packets to `address`, in numbers. Sends nothing.
/// @throws CommunicationError  `address` is no address, or no network leads there.
[[nodiscard]] inline std::string own_address_towards(std::string const& address) {
    Resolved const found{address.c_str(), 9, 0};
    std::string own;
    for (auto const* one = found.first(); one != nullptr && own.empty(); one = one->ai_next) {
        Socket const socket{::socket(one->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0)};
        sockaddr_storage at{};
        socklen_t size = sizeof at;
        char text[256]{};
        if (::connect(socket.handle(), one->ai_addr, one->ai_addrlen) == 0 &&
            ::getsockname(socket.handle(), reinterpret_cast<sockaddr*>(&at), &size) == 0 &&
            ::getnameinfo(
                reinterpret_cast<sockaddr*>(&at),
                size,
                text,
                sizeof text,
                nullptr,
                0,
                NI_NUMERICHOST
            ) == 0) {
            own = text;
        }
    }
    if (own.empty()) {
        throw CommunicationError{
            concat("found no way from this machine to rank 0 at \"", address, "\"")
        };
    }
    return own;
}

[[nodiscard]] inline std::string new_secret() {
    std::random_device random;
    return concat(random(), "-", random(), "-", random(), "-", random());
}

/// The file by which ranks meet, as rank 0 writes it and the others read it. Other users may write
/// into its folder, so rank 0 writes a new file, and the others read no file of another user.
class MeetingFile {
public:
    explicit MeetingFile(std::string path) : path_{std::move(path)} {}

    /// The others see the whole file at once, or none.
    /// @throws CommunicationError
    void write(TcpOptions const& options) const {
        std::string const unfinished = concat(path_, ".", new_secret());
        constexpr int as_new = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
        Socket const file{::open(unfinished.c_str(), as_new, S_IRUSR | S_IWUSR)};
        int error = file.is_open() ? 0 : errno;
        if (error == 0) {
            std::string const text = concat(
                mark,
                "\n",
                options.address,
                "\n",
                options.port,
                "\n",
                options.secret,
                "\n",
                mark,
                "\n"
            );
            ssize_t const written = ::write(file.handle(), text.data(), text.size());
            error = written < 0 ? errno : written != std::ssize(text) ? ENOSPC : 0;
            if (error == 0 && ::rename(unfinished.c_str(), path_.c_str()) != 0) {
                error = errno;
            }
            if (error != 0) {
                ::unlink(unfinished.c_str());
            }
        }
        if (error != 0) {
            throw CommunicationError{concat(
                "rank 0 cannot write the file \"",
                path_,
                "\", by which the ranks are to meet: ",
                std::strerror(error)
            )};
        }
    }
    void remove() const noexcept { ::unlink(path_.c_str()); }
    /// Waits for the file.
    /// @throws TimedOut
    void read(TcpOptions& options) const {
        auto const nap = [] { std::this_thread::sleep_for(std::chrono::milliseconds{5}); };
        if (!wait_at_most(options.connect_timeout, [&] { return has_read(options); }, nap)) {
            throw TimedOut{
                {0},
                concat(
                    "rank 0 did not write the file \"",
                    path_,
                    "\", by which the ranks are to meet, within ",
                    std::chrono::duration<double>(options.connect_timeout).count(),
                    " s: start all ranks of a job as one user, with the same path; a file that "
                    "another user owns, or may read or write, does not count"
                )
            };
        }
    }
    /// Whether there is a file now. The options are changed only then.
    [[nodiscard]] bool has_read(TcpOptions& options) const {
        Socket const file{::open(path_.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC)};
        struct stat status{};
        if (!file.is_open() || ::fstat(file.handle(), &status) != 0 || !S_ISREG(status.st_mode) ||
            status.st_uid != ::geteuid() || (status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
            return false;
        }
        std::string text(most_bytes, ' ');
        ssize_t const bytes = ::read(file.handle(), text.data(), text.size());
        text.resize(bytes < 0 ? 0 : static_cast<std::size_t>(bytes));
        std::istringstream lines{text};
        std::string first;
        std::string address;
        std::string port;
        std::string secret;
        std::string last;
        if (!std::getline(lines, first) || first != mark || !std::getline(lines, address) ||
            !std::getline(lines, port) || !std::getline(lines, secret) ||
            !std::getline(lines, last) || last != mark) {
            return false;
        }
        options.address = address;
        options.port = static_cast<std::uint16_t>(std::strtoul(port.c_str(), nullptr, 10));
        options.secret = secret;
        return options.port != 0;
    }

private:
    static constexpr std::string_view mark = "ranks of joinable meet here";
    static constexpr std::size_t most_bytes = 4096;

    std::string path_;
};

/// How a rank attaches to the others. The hub lives in rank 0's process.
struct GlooMeeting {
    TcpOptions options = {};
    std::string own_address = {};             ///< of this rank's machine, if it was given
    std::optional<TcpListener> listener = {}; ///< of rank 0, if it has one already
    std::optional<MeetingFile> file = {};     ///< by which the ranks meet; there may be none
    Hear hear = {};                           ///< what else may end these ranks
    bool is_renumbered = false;               ///< see Communicator

    /// Blocks until this rank knows where to attach.
    explicit GlooMeeting(GlooOptions const& given) : own_address{given.address} {
        options.rank = given.rank;
        options.size = given.size;
        options.connect_timeout = given.connect_timeout;
        options.deadline = given.deadline;
        if (auto const* const hub = std::get_if<GlooHub>(&given.store)) {
            options.job = hub->job;
            options.address = hub->address;
            options.port = hub->port;
            options.secret = hub->secret;
        } else {
            find_by_file(std::get<GlooFile>(given.store).path);
        }
    }
    GlooMeeting() = default;

    /// Collective; blocks. An earlier job may have left its file: rank 0 writes another one then, and
    /// `options` are those by which the ranks have met.
    [[nodiscard]] TcpEnd attach() {
        struct Removal { // also when some ranks did not come
            MeetingFile const* file;
            ~Removal() {
                if (file != nullptr) {
                    file->remove();
                }
            }
        } const removal{options.rank == 0 && file ? &*file : nullptr};
        auto const look = [this](TcpOptions const& tried) -> std::optional<TcpOptions> {
            TcpOptions found = tried;
            bool const is_elsewhere = file && file->has_read(found) &&
                                      (found.address != tried.address || found.port != tried.port ||
                                       found.secret != tried.secret);
            if (!is_elsewhere) {
                return std::nullopt;
            }
            options = found;
            return found;
        };
        return TcpEnd{options, std::move(listener), {hear, look, is_renumbered}};
    }
    /// The address of this rank's machine on the way to rank 0. Call it after attach().
    /// @throws CommunicationError
    [[nodiscard]] std::string address_here() const {
        return own_address.empty() ? own_address_towards(options.address) : own_address;
    }

private:
    void find_by_file(std::string const& path) {
        file.emplace(path);
        if (options.rank != 0) {
            file->read(options);
            return;
        }
        options.address = own_address.empty() ? host_name() : own_address;
        options.secret = new_secret();
        listener.emplace(options.address);
        options.port = listener->port();
        file->write(options);
    }
};

// -- small exchanges of the ranks ---------------------------------------------------------------

/// The same number of bytes from each rank. Collective; blocks.
[[nodiscard]] inline std::vector<char> share(TcpEnd& comm, std::vector<char> const& own) {
    std::vector<char> all(own.size() * static_cast<std::size_t>(comm.size()));
    auto const begin = static_cast<std::ptrdiff_t>(own.size()) * comm.rank();
    std::copy(own.begin(), own.end(), all.begin() + begin);
    comm.all_reduce({all.data(), all.size(), DType::u8}, ReduceOp::bit_or).wait();
    return all;
}
template <class T>
[[nodiscard]] std::vector<T> share_value(TcpEnd& comm, T const& own) {
    std::vector<char> bytes(sizeof(T));
    std::memcpy(bytes.data(), &own, sizeof(T));
    bytes = share(comm, bytes);
    std::vector<T> all(static_cast<std::size_t>(comm.size()));
    std::memcpy(all.data(), bytes.data(), bytes.size());
    return all;
}

/// Where the ranks of one color meet. `number` is that of the split, `options` and `own_address` are
/// this rank's in `comm`. Collective; blocks.
[[nodiscard]] inline GlooMeeting meeting_of_group(
    TcpEnd& comm,
    TcpOptions const& options,
    std::string const& own_address,
    std::uint64_t number,
    int color,
    int key
) {
    auto const members = members_of(share_value(comm, GroupChoice{color, key}), color);
    auto const place = std::find(members.begin(), members.end(), comm.rank());
    GlooMeeting rendezvous;
    rendezvous.options = options;
    rendezvous.options.job = concat(options.job.substr(0, 900), "/", number, "/", color);
    rendezvous.options.rank = static_cast<int>(place - members.begin());
    rendezvous.options.size = static_cast<int>(members.size());
    rendezvous.own_address = own_address;
    rendezvous.is_renumbered = renumbers(members);
    struct Address {
        std::uint16_t port;
        char text[256];
    };
    Address own{};
    if (members.front() == comm.rank()) {
        rendezvous.listener.emplace(own_address);
        own.port = rendezvous.listener->port();
        std::memcpy(own.text, own_address.data(), (std::min)(own_address.size(), std::size_t{255}));
    }
    Address const found = share_value(comm, own)[as_index(members.front())];
    rendezvous.options.port = found.port;
    rendezvous.options.address = found.text;
    return rendezvous;
}

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/gloo/detail/rank.hpp

namespace joinable { inline namespace v0 { namespace detail {

/// How long a rank whose connection broke waits for the reason.
inline constexpr std::chrono::seconds gloo_patience{5};

/// One rank. A thread of its own runs its collectives in the order of posts, because Gloo blocks.
/// The user's thread has the TCP communicator by which all ranks say that they have arrived, and
/// why they fail: see poll().
class GlooRank : public HasWorks {
public:
    using Operation = GlooOperation;

    GlooRank(GlooMeeting rendezvous, std::shared_ptr<GlooRank> parent)
        : parent_{std::move(parent)}, control_{attached(rendezvous, parent_)},
          options_{rendezvous.options}, own_address_{rendezvous.address_here()} {
        control_.set_deadline(options_.connect_timeout); // until the last wait of construction
        try {
            mesh_.emplace(
                rank(),
                size(),
                own_address_,
                options_.connect_timeout,
                [&](std::vector<char> const& own) { return share(control_, own); },
                [&] {
                    if (abort_reason()) {
                        throw_reason();
                    }
                }
            );
            lane_.emplace(*mesh_);
            messages_.emplace(*mesh_);
            control_.barrier();
            control_.set_deadline(options_.deadline);
            static_cast<void>(worker_.emplace(
                concat("the thread of rank ", rank(), "'s collectives by Gloo"), [this] { work(); }
            ));
        } catch (CommunicationError const& error) { // there is no thread to connect, or to work
            fail({FailureKind::communication, {}, blame(error.what())});
        } catch (Error const&) {
            throw;
        } catch (std::exception const& error) {
            fail({FailureKind::communication, {}, blame(error.what())});
        }
    }
    GlooRank(GlooRank const&) = delete;
    GlooRank& operator=(GlooRank const&) = delete;
    ~GlooRank() = default; // see close()

    [[nodiscard]] int rank() const noexcept { return options_.rank; }
    [[nodiscard]] int size() const noexcept { return options_.size; }
    [[nodiscard]] bool is_renumbered() const noexcept { return control_.is_renumbered(); }

    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline) noexcept {
        options_.deadline = deadline;
        return control_.set_deadline(deadline);
    }
    void keep_alive() { control_.keep_alive(); }
    [[nodiscard]] std::vector<int> missing_ranks() const { return control_.missing_ranks(); }

    [[nodiscard]] Operation& post(Request const& request) {
        return ended_by_failure([&]() -> Operation& {
            take_over_from_parent();
            compare_arrivals();
            std::erase_if(open_, [&](auto const& one) {
                return one->is_released && one->is_compared && state_of(*one) != State::posted;
            });
            Operation& operation =
                *open_.emplace_back(std::make_unique<Operation>(request, posted_, rank(), size()));
            try {
                static_cast<void>(
                    operation.arriving.emplace(arrive(operation.arrival, request.signature))
                );
            } catch (...) {
                open_.pop_back();
                throw;
            }
            ++posted_;
            if (operation.goes_with_arrival()) {
                operation.state = State::complete; // once all ranks have arrived
                return operation;
            }
            {
                std::lock_guard const lock{mutex_};
                queue_.push_back(&operation);
            }
            has_work_.notify_one();
            return operation;
        });
    }
    [[nodiscard]] GlooMessage& post_message(bool is_send, int peer, int tag, Buffer buffer) {
        return ended_by_failure([&]() -> GlooMessage& {
            take_over_from_parent();
            return messages_->post(is_send, peer, tag, buffer);
        });
    }
    void finish(GlooMessage& message) {
        for (auto gap = WaitClock::gap_of_tests; !is_over(message, gap);
             gap = WaitClock::gap_of_waits) {
            messages_->wait_until_over(message, long_time);
        }
    }
    void finish(Operation& operation) {
        for (auto gap = WaitClock::gap_of_tests; !is_over(operation, gap);
             gap = WaitClock::gap_of_waits) {
            if (state_of(operation) == State::complete) { // but others are missing
                ended_by_failure([&] { operation.arriving->wait(); });
                continue;
            }
            std::unique_lock lock{mutex_};
            has_progress_.wait_for(lock, long_time, [&] {
                return operation.state == State::complete;
            });
        }
    }
    /// A collective or a message.
    template <class One>
    [[nodiscard]] bool test(One& one) {
        return is_over(one, WaitClock::gap_of_tests);
    }
    template <class One>
    [[nodiscard]] bool progress(One& one) {
        return is_over(one, std::nullopt);
    }
    [[nodiscard]] bool is_done(Operation const& operation) const {
        return state_of(operation) == State::complete &&
               (operation.is_compared || !operation.needs_arrivals());
    }
    [[nodiscard]] bool is_done(GlooMessage const& message) const {
        return messages_->state_of(message) == GlooMessage::State::complete;
    }

    [[nodiscard]] static char const* kind_of(Operation const&) noexcept { return "a collective"; }
    [[nodiscard]] static char const* kind_of(GlooMessage const&) noexcept { return "a message"; }
    static void release(Operation& operation) noexcept { operation.is_released = true; }
    static void release(GlooMessage& message) noexcept { message.is_released = true; }

    /// The reason reaches the others before the connections close.
    void abort(AbortReason const& reason) {
        let_arrive();
        own_reason_ = own_reason_.value_or(reason);
        control_.abort(reason);
        end();
    }
    [[nodiscard]] bool is_aborted() { return abort_reason().has_value(); }
    /// The first reason that reached rank 0.
    [[nodiscard]] std::optional<AbortReason> abort_reason() {
        if (parent_ != nullptr) {
            if (auto const reason = parent_->reason_for_groups()) {
                control_.abort(*reason);
            }
        }
        return control_.abort_reason();
    }

    /// Where the ranks of one color meet. Collective; blocks.
    [[nodiscard]] GlooMeeting split(int color, int key) {
        return ended_by_failure([&] {
            take_over_from_parent();
            Descriptor const split{split_collective};
            GlooArrival arrival{split, rank(), size()};
            arrive(arrival, split).wait();
            compare_arrivals();
            if (auto const reason = arrival.difference()) {
                fail(*reason);
            }
            try {
                return meeting_of_group(control_, options_, own_address_, splits_++, color, key);
            } catch (std::exception const& error) {
                // The others wait for this rank, which cannot listen; or they failed before it.
                fail({FailureKind::communication, {}, blame(error.what())});
            }
        });
    }

    /// The rank's last act.
    void close(bool is_unwinding) noexcept {
        try {
            take_over_from_parent(); // before the others hear that this rank leaves
        } catch (...) { // NOLINT(bugprone-empty-catch): the others notice that it leaves
        }
        if (is_unwinding) {
            abort_for_exception(*this, "the scope of its communicator");
        }
        {
            std::lock_guard const lock{mutex_};
            is_closing_ = true;
        }
        has_work_.notify_one();
        worker_.reset(); // waits for it
        open_.clear();   // waits for arrivals of other ranks
        messages_.reset();
        mesh_.reset();
    }

private:
    using State = Operation::State;

    static constexpr std::chrono::microseconds short_time{100};
    static constexpr std::chrono::milliseconds long_time{2};

    [[nodiscard]] State state_of(Operation const& operation) const {
        std::lock_guard const lock{mutex_};
        return operation.state;
    }
    [[nodiscard]] std::string blame(std::string const& error) const {
        return concat("rank ", rank(), " cannot go on by Gloo: ", error);
    }

    [[nodiscard]] static std::string waiting_in(GlooMessage const& message) {
        char const* const whose = message.is_send ? " to rank " : " from rank ";
        return concat(message.text(), whose, message.peer);
    }
    [[nodiscard]] std::string text_of_stall(Operation const& operation) const {
        double const seconds = std::chrono::duration<double>(options_.deadline).count();
        int const other = lane_->awaited();
        return concat(
            "no data moved ",
            other < 0 ? concat("on rank ", rank())
                      : "between " + ranks_text(both_ranks(rank(), other)),
            " within ",
            seconds,
            " s, in ",
            operation.request.signature.text(),
            ", which all ranks have posted: the network between them is broken or too slow for "
            "the deadline, or one is stopped"
        );
    }

    // -- the thread -------------------------------------------------------------------------------

    void work() {
        std::unique_lock lock{mutex_};
        for (;;) {
            has_work_.wait(lock, [this] { return is_closing_ || !queue_.empty(); });
            if (queue_.empty()) {
                return;
            }
            Operation& operation = *queue_.front();
            lock.unlock();
            std::string error;
            State const state = run(operation, error);
            lock.lock();
            operation.state = state;
            operation.error = std::move(error);
            queue_.pop_front();
            has_progress_.notify_all();
        }
    }
    [[nodiscard]] State run(Operation const& operation, std::string& error) {
        try {
            GlooCollective{*lane_, scratch_, operation.request, operation.number}.run();
            return State::complete;
        } catch (std::exception const& failure) {
            error = failure.what();
        } catch (...) {
            error = "an unknown exception";
        }
        mesh_->close(); // the others wait for what this rank no longer sends
        return State::broken;
    }

    // -- how collectives end ----------------------------------------------------------------------

    /// The most for which the time since the last look counts. None: there is no deadline.
    using Gap = std::optional<std::chrono::nanoseconds>;

    template <class One>
    [[nodiscard]] bool is_over(One& one, Gap longest_gap) {
        // In a forked process a thread that was not forked may hold the lock for ever.
        require_here(rank());
        if (!is_done(one)) {
            ended_by_failure([&] { poll(one, longest_gap); });
        }
        return is_done(one);
    }
    /// When a rank has left, the messages of others may still come. So that does not end this at
    /// once: a closed connection tells, or the patience is over.
    /// @throws what ends all ranks
    void poll(GlooMessage& message, Gap longest_gap) {
        take_over_from_parent();
        if (auto const reason = messages_->mismatch()) {
            fail(*reason);
        }
        auto const gap = longest_gap.value_or(WaitClock::gap_of_tests);
        bool const is_over = control_.is_aborted(); // what broke it was told before
        auto const state = messages_->state_of(message);
        if (state == GlooMessage::State::complete) {
            return;
        }
        bool const is_broken = state == GlooMessage::State::broken;
        if (is_broken || is_over) {
            bool const is_late = message.ending.reaches(gloo_patience, gap);
            if (is_over && (is_broken || is_late || !has_any_left())) {
                throw_reason(waiting_in(message));
            }
            if (is_late) {
                fail({FailureKind::communication, {}, blame(message.error)});
            }
        } else if (longest_gap) {
            message.waited.extend_when_reached(options_.deadline, gap, [&] {
                return std::optional{
                    control_.own_rank().ask_about(message.peer, "waits in " + waiting_in(message))
                };
            });
        }
    }
    /// Learns from the others. When all ranks have arrived, a rank that leaves or fails does not end
    /// this at once: the data may be complete without it, or its closed connections tell.
    /// @throws what ends all ranks
    void poll(Operation& operation, Gap longest_gap) {
        bool const is_over = control_.is_aborted(); // arrivals that came before that are compared
        compare_arrivals(&operation);               // throws the reason if one did not
        if (!operation.is_compared) {
            take_over_from_parent();
            auto const test = [&](TcpRank& hub, std::uint64_t number) {
                return hub.test(number, *longest_gap);
            };
            if (longest_gap && with_rank(*operation.arriving, test)) {
                compare_arrivals(&operation);
            }
        }
        if (is_done(operation)) {
            return;
        }
        std::unique_lock lock{mutex_};
        bool const is_broken = operation.state == State::broken;
        std::string const error = operation.error;
        lock.unlock();
        std::uint64_t const moved = lane_->moved();
        if (std::exchange(operation.moved, moved) != moved) {
            operation.stalled = {};
        }
        auto const has_stalled_for = [&](std::chrono::nanoseconds time) {
            return operation.stalled.reaches(time, longest_gap.value_or(WaitClock::gap_of_tests));
        };
        if (is_over && is_broken) {
            throw_reason(operation.request.signature.text());
        }
        if (is_broken) { // because another rank has closed its connections, which says why, or died
            if (has_stalled_for(gloo_patience)) {
                fail({FailureKind::communication, {}, blame(error)});
            }
        } else if (is_over) {
            if (has_stalled_for(gloo_patience)) {
                throw_reason(operation.request.signature.text());
            }
        } else if (longest_gap && operation.is_compared && has_stalled_for(options_.deadline)) {
            fail({FailureKind::communication, {}, text_of_stall(operation)});
        }
    }
    /// Arrivals complete in the order of posts. Stops behind `last`.
    void compare_arrivals(Operation const* last = nullptr) {
        for (auto const& one : open_) {
            if (!one->is_compared && !compare(*one)) {
                return;
            }
            if (one.get() == last) {
                return;
            }
        }
    }
    /// Data can arrive before the arrival words. Lets completed collectives finish before this rank aborts.
    void let_arrive() noexcept {
        auto const is_missing = [&](auto const& one) { return !one->is_compared && is_done(*one); };
        auto const is_over = [&] {
            if (control_.is_aborted() || std::none_of(open_.begin(), open_.end(), is_missing)) {
                return true;
            }
            compare_arrivals();
            return false;
        };
        try {
            wait_at_most(std::chrono::milliseconds{100}, is_over, PollPause{short_time});
        } catch (...) { // NOLINT(bugprone-empty-catch): another reason was first
        }
    }
    /// Whether all ranks have arrived. @throws Mismatch; what ends all ranks, if some did not arrive
    [[nodiscard]] bool compare(Operation& operation) {
        if (!operation.arriving->progress()) {
            return false;
        }
        if (auto const reason = operation.arrival.difference()) {
            fail(*reason);
        }
        operation.is_compared = true;
        if (operation.goes_with_arrival() &&
            !operation.is_released) { // else its buffer may be freed
            operation.arrival.give_data(operation.request.out);
        }
        return true;
    }
    void take_over_from_parent() {
        if (parent_ != nullptr) {
            if (auto const reason = parent_->reason_for_groups()) {
                fail(*reason);
            }
        }
    }
    /// Why this rank's groups end, if they do. A rank that has left does not end those of others.
    [[nodiscard]] std::optional<AbortReason> reason_for_groups() {
        auto reason = abort_reason();
        return !reason || has_any_left() ? own_reason_ : reason;
    }
    /// An abort of the parent reaches every wait. The rank with the hub of a group ends the parent if
    /// that hub cannot run: nobody else could tell the ranks that wait for it.
    static TcpEnd attached(GlooMeeting& rendezvous, std::shared_ptr<GlooRank> const& parent) {
        if (parent != nullptr) {
            rendezvous.hear = [parent] { return parent->reason_for_groups(); };
        }
        try {
            return rendezvous.attach();
        } catch (CommunicationError const& error) {
            if (parent == nullptr || rendezvous.options.rank != 0) {
                throw;
            }
            parent->abort({FailureKind::communication, {}, parent->blame(error.what())});
            parent->throw_reason();
        }
    }
    [[noreturn]] void fail(AbortReason const& reason) {
        control_.abort(reason);
        throw_reason();
    }
    /// Whether the ranks have ended because one of them left.
    [[nodiscard]] bool has_any_left() {
        auto const reason = control_.abort_reason();
        return reason && reason->has_left && reason->origin < 0; // by itself, without an abort
    }
    /// The first reason that reached rank 0. @pre control_.is_aborted()
    [[noreturn]] void throw_reason() { throw_failure(*control_.abort_reason()); }
    [[noreturn]] void throw_reason(std::string const& what) {
        throw_failure(in_words_of(rank(), what, *control_.abort_reason()));
    }
    /// After any failure no collective can complete, and nothing may write to the caller's memory.
    template <class F>
    std::invoke_result_t<F const&> ended_by_failure(F const& f) {
        require_here(rank());
        try {
            return f();
        } catch (...) {
            end();
            throw;
        }
    }
    void end() noexcept {
        if (mesh_) {
            mesh_->close();
            messages_->end();
            std::unique_lock lock{mutex_};
            has_progress_.wait(lock, [this] { return queue_.empty(); });
        }
    }

    [[nodiscard]] TcpWork arrive(GlooArrival& arrival, Descriptor const& shown) {
        RequestsOf const requests{rank(), size()};
        return control_.post(requests.all_reduce(arrival.buffer(), ReduceOp::sum), shown);
    }

    std::shared_ptr<GlooRank> parent_;
    TcpEnd control_;
    TcpOptions options_; ///< by which the ranks have met
    std::string own_address_;
    std::optional<GlooMesh> mesh_;
    std::optional<GlooLane> lane_;
    std::optional<GlooMessages> messages_;
    GlooCollective::Kept scratch_{Scratch{the_host()}, Scratch{the_host()}}; ///< of the thread
    std::deque<std::unique_ptr<Operation>> open_; ///< in the order of posts
    std::uint64_t posted_ = 0;
    std::uint64_t splits_ = 0;
    std::optional<AbortReason> own_reason_; ///< this rank's own abort

    mutable std::mutex mutex_; ///< for what follows
    std::condition_variable has_work_;
    std::condition_variable has_progress_;
    std::deque<Operation*> queue_; ///< the first one is under way
    bool is_closing_ = false;
    std::optional<BackgroundThread> worker_;
};

}}} // namespace joinable::v0::detail

// ---- joinable/communicator/gloo/communicator.hpp

namespace joinable { inline namespace v0 {

/// A collective or a message of ranks that Gloo connects. Its data moves without tests.
using GlooWork = detail::WorkOf<
    detail::GlooRank,
    std::reference_wrapper<detail::GlooOperation>,
    std::reference_wrapper<detail::GlooMessage>>;

/// Ranks are processes or threads on any machines, where there is no MPI. There is one object in
/// each. Gloo's TCP transport moves data directly between each two of them.
///
/// Collectives are asynchronous. A thread of each rank runs them in the order of posts, so data
/// moves while the rank computes. They combine in rank order by the library's own arithmetic: the
/// results are bitwise identical to those of ThreadCommunicator. 16-bit numbers are computed in f32
/// and rounded once. A rank combines its part of a buffer and sends it to the others, so a large
/// all-reduce sends each element twice, whatever the number of ranks.
///
/// A TcpCommunicator stands beside Gloo, with its hub in rank 0's process. In each collective every
/// rank sends three words for each rank there, and eight more. So ranks compare what they run, the hub
/// knows which ranks have not arrived, and all ranks get the same reason when one fails: a rank that
/// aborts tells the hub first, and then closes its connections of Gloo, which ends the waits of all.
/// Data does not pass through the hub, and most collectives do not wait for it; those with counts
/// or without elements do. Barriers and sums of at most eight u64, such as roll calls, go with these
/// words alone. Up to 64 collectives may be in flight; a further one waits for the oldest.
///
/// The death of a process reaches all others at once. An unreachable machine is noticed after 30 s,
/// or at the deadline. The first reason that reaches rank 0 wins; missing_ranks() asks rank 0. If rank 0 is stopped or out of reach, it answers nobody: each rank throws 5 s
/// after its deadline. If rank 0 dies, a collective may have completed on some ranks only. Each rank
/// connects to every other one, which suits up to some tens of ranks.
///
/// Messages between two ranks do not pass through the hub either. A send is complete when the other
/// rank has posted the receive and the system has the data; the caller may then reuse the buffer.
/// Count and dtype must be the same on both sides, else all ranks throw Mismatch. Messages that come
/// before those of the tag that a rank receives are kept. The first message to a rank, and the first
/// one from it, start a thread. A rank that leaves ends the messages between others that are not
/// complete 5 s later.
///
/// Nothing is encrypted. The secret of the job keeps strangers from its hub, but a stranger that
/// connects to a port of Gloo while ranks meet can make them fail. Use it in a network that you
/// trust. All machines must have the same byte order. A process that a rank forks says nothing for
/// it when it ends, and its calls throw ContractViolation.
///
/// One thread at a time may use an object and all groups split from it or from one of its groups,
/// because a group receives aborts through its parents.
class GlooCommunicator : public detail::RankMembers<GlooCommunicator>,
                         public detail::Collectives<GlooCommunicator, GlooWork>,
                         public detail::Messages<GlooCommunicator, GlooWork> {
public:
    static constexpr std::string_view transport = "gloo";
    /// Whether a launcher started this process and says where rank 0 is. Local.
    [[nodiscard]] static bool is_launched() { return detail::is_launched_with_address(); }

    /// Collective; blocks until all ranks are connected.
    /// @throws ContractViolation   the rank is out of range or already taken; the path is empty;
    ///                             rank 0 has another job, secret or world size.
    /// @throws TimedOut            some ranks had not arrived in time.
    /// @throws PeerFailed          a rank died meanwhile.
    /// @throws CommunicationError  rank 0 cannot listen or write the file; ranks cannot reach each
    ///                             other; another program answers.
    explicit GlooCommunicator(GlooOptions const& options)
        : GlooCommunicator{detail::GlooMeeting{checked(options)}, nullptr} {}

    /// Collective; blocks. For a rank that mpirun, mpiexec, torchrun or srun started; the ranks meet
    /// at the port that tcp_environment() finds.
    /// @throws as the constructor; ContractViolation if tcp_environment() fails.
    [[nodiscard]] static GlooCommunicator
    from_environment(std::chrono::nanoseconds deadline = default_deadline) {
        TcpOptions const found = tcp_environment();
        return GlooCommunicator{GlooOptions{
            found.rank,
            found.size,
            detail::GlooHub{found.job, found.address, found.port, found.secret},
            {},
            deadline,
            deadline
        }};
    }

    GlooCommunicator(GlooCommunicator const&) = delete;
    GlooCommunicator& operator=(GlooCommunicator const&) = delete;
    /// The rank leaves: ranks that wait for it throw PeerFailed. Waits up to the deadline for ranks
    /// that have not arrived in a collective of this rank. During unwinding it aborts without
    /// waiting. The rank has left only when all groups that it split off are destroyed, too; so
    /// destroy groups first.
    ~GlooCommunicator() {
        if (rank_->is_here()) {
            rank_->close(unwinding_.has_begun());
        } else { // a forked process has none of the threads that it would wait for
            static_cast<void>(new std::shared_ptr{std::move(rank_)});
        }
    }

    /// Collective; blocks. The ranks with the same `color` (>= 0) form a group, ordered by `key`,
    /// then by their rank here. The group has connections, a hub and a thread of its own, and
    /// inherits the deadline. Aborting this communicator aborts the group, but not the reverse. A
    /// rank that leaves this communicator ends no group of the others. It has left only when its
    /// groups are destroyed, too; so destroy groups first. Errors name ranks by their numbers in
    /// the group where they occur.
    /// @throws Mismatch            some ranks run something else.
    /// @throws CommunicationError  on all ranks: the first rank of a group cannot be where it meets.
    /// @throws PeerFailed          a rank died meanwhile.
    [[nodiscard]] GlooCommunicator split(int color, int key) {
        detail::check_color(color);
        return GlooCommunicator{rank_->split(color, key), rank_};
    }

private:
    GlooCommunicator(detail::GlooMeeting rendezvous, std::shared_ptr<detail::GlooRank> parent)
        : rank_{std::make_shared<detail::GlooRank>(std::move(rendezvous), std::move(parent))} {}

    /// Before the rank waits for the others.
    static GlooOptions const& checked(GlooOptions const& options) {
        detail::check_own_rank(options.rank, options.size);
        auto const* const file = std::get_if<GlooFile>(&options.store);
        if (file != nullptr && file->path.empty()) {
            throw ContractViolation{
                "expected where the ranks meet, a GlooFile with a path or a GlooHub, but "
                "GlooOptions::store was given neither"
            };
        }
        return options;
    }

    friend class detail::RankMembers<GlooCommunicator>;
    [[nodiscard]] detail::GlooRank& own_rank() const noexcept { return *rank_; }
    friend class detail::BasicCollectives<GlooCommunicator, GlooWork>;
    GlooWork post(detail::Request const& request) { return {*rank_, rank_->post(request)}; }
    friend class detail::Messages<GlooCommunicator, GlooWork>;
    GlooWork post_message(bool is_send, int peer, int tag, Buffer const& buffer) {
        return {*rank_, rank_->post_message(is_send, peer, tag, buffer)};
    }

    std::shared_ptr<detail::GlooRank> rank_;
    detail::Unwinding unwinding_;
};

}} // namespace joinable::v0

// ---- joinable/gloo.hpp

/// @file
/// Ranks on any number of machines, over Gloo's TCP transport. Needs Gloo 0.5 or later and Linux:
/// link joinable::gloo.
