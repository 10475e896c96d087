// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <joinable/communicator/detail/background_thread.hpp>
#include <joinable/communicator/detail/deadline.hpp>
#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/communicator/gloo/detail/mesh.hpp>
#include <joinable/detail/hash.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/dtype.hpp>

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
