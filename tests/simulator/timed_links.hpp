// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>

#include <joinable/communicator/algorithms/plan.hpp>
#include <joinable/tensor/buffer.hpp>

namespace joinable_tests {

/// Links between all ranks of threads. A message takes alpha + bytes / B from when both sides have posted it, by the
/// clock.
class TimedLinks {
public:
    explicit TimedLinks(joinable::MessageCosts const& costs) : costs_{costs} {}

    struct Message {
        joinable::ConstBuffer sent{};
        joinable::Buffer received{};
        int sides = 0;
        std::chrono::steady_clock::time_point arrives;
    };

    /// One side posts the next message of its direction. The second one copies it.
    std::shared_ptr<Message>
    post(int from, int to, int tag, joinable::ConstBuffer const* sent, joinable::Buffer received) {
        std::lock_guard const lock{mutex_};
        auto& waiting = (sent != nullptr ? sends_ : receives_)[{from, to, tag}];
        auto& others = (sent != nullptr ? receives_ : sends_)[{from, to, tag}];
        std::shared_ptr<Message> message;
        if (others.empty()) {
            message = std::make_shared<Message>();
            waiting.push_back(message);
        } else {
            message = others.front();
            others.pop_front();
        }
        if (sent != nullptr) {
            message->sent = *sent;
        } else {
            message->received = received;
        }
        if (++message->sides == 2) {
            std::size_t const bytes = message->sent.count * size_of(message->sent.dtype);
            std::memcpy(message->received.data, message->sent.data, bytes);
            std::chrono::duration<double> const takes{costs_.message(static_cast<double>(bytes))};
            message->arrives =
                std::chrono::steady_clock::now() +
                std::chrono::duration_cast<std::chrono::steady_clock::duration>(takes);
            posted_.notify_all();
        }
        return message;
    }
    void wait(Message const& message) {
        std::unique_lock lock{mutex_};
        posted_.wait(lock, [&] { return message.sides == 2; });
        lock.unlock();
        std::this_thread::sleep_until(message.arrives);
    }
    bool test(Message const& message) {
        std::lock_guard const lock{mutex_};
        return message.sides == 2 && std::chrono::steady_clock::now() >= message.arrives;
    }

private:
    joinable::MessageCosts costs_;
    using Queues = std::map<std::tuple<int, int, int>, std::deque<std::shared_ptr<Message>>>;
    std::mutex mutex_;
    std::condition_variable posted_;
    Queues sends_; ///< that no receive has met yet
    Queues receives_;
};

/// A rank that has these links: it models ExchangesMessages.
class Linked {
public:
    struct Work {
        TimedLinks* links;
        std::shared_ptr<TimedLinks::Message> message;
        void wait() const { links->wait(*message); }
        [[nodiscard]] bool test() const { return links->test(*message); }
    };
    Linked(TimedLinks& links, int rank, int size) : links_{&links}, rank_{rank}, size_{size} {}
    [[nodiscard]] int rank() const { return rank_; }
    [[nodiscard]] int size() const { return size_; }
    Work send(joinable::ConstBuffer buffer, int to, int tag) {
        return {links_, links_->post(rank_, to, tag, &buffer, {})};
    }
    Work receive(joinable::Buffer buffer, int from, int tag) {
        return {links_, links_->post(from, rank_, tag, nullptr, buffer)};
    }

private:
    TimedLinks* links_;
    int rank_;
    int size_;
};

} // namespace joinable_tests
