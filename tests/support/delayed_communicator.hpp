// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <thread>

#include <support/recording_communicator.hpp>

#include <joinable/communicator/communicator.hpp>
#include <joinable/tensor/buffer.hpp>

namespace joinable_tests {

/// Its sums are there when they are asked for, or only after a wait of 2 ms.
template <class Comm>
class DelayedCommunicator : public CoreOnly<Comm> {
public:
    static constexpr std::chrono::milliseconds delay{2};

    DelayedCommunicator(Comm& inner, bool is_late) : CoreOnly<Comm>{inner}, is_late_{is_late} {}

    struct Work {
        bool is_late;
        void wait() const {
            if (is_late) {
                std::this_thread::sleep_for(delay);
            }
        }
        [[nodiscard]] bool test() const { return !is_late; }
    };
    Work all_reduce(joinable::Buffer buffer, joinable::ReduceOp op) {
        this->inner_.all_reduce(buffer, op).wait();
        return {is_late_};
    }
    Work broadcast(joinable::Buffer buffer, int root) {
        this->inner_.broadcast(buffer, root).wait();
        return {is_late_};
    }

private:
    bool is_late_;
};

} // namespace joinable_tests
