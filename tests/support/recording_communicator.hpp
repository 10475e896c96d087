// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <joinable/communicator/communicator.hpp>
#include <joinable/detail/hash.hpp>
#include <joinable/detail/text.hpp>

namespace joinable_tests {

/// Exactly the members of the core concept: what every feature must be content with.
template <joinable::Communicator Comm>
class CoreOnly {
public:
    explicit CoreOnly(Comm& inner) : inner_{inner} {}
    [[nodiscard]] int rank() const { return inner_.rank(); }
    [[nodiscard]] int size() const { return inner_.size(); }
    auto all_reduce(joinable::Buffer buffer, joinable::ReduceOp op) {
        return inner_.all_reduce(buffer, op);
    }
    auto broadcast(joinable::Buffer buffer, int root) { return inner_.broadcast(buffer, root); }
    void barrier() { inner_.barrier(); }

protected:
    Comm& inner_;
};

/// Logs every collective of its rank, so that the traces of ranks can be compared.
template <joinable::Communicator Comm>
class RecordingCommunicator : public CoreOnly<Comm> {
public:
    explicit RecordingCommunicator(Comm& inner) : CoreOnly<Comm>{inner} {}

    auto all_reduce(joinable::Buffer buffer, joinable::ReduceOp op) {
        before(buffer);
        log("all_reduce", buffer);
        auto work = this->inner_.all_reduce(buffer, op);
        posted();
        return work;
    }
    auto broadcast(joinable::Buffer buffer, int root) {
        log("broadcast", buffer);
        return this->inner_.broadcast(buffer, root);
    }
    void barrier() {
        trace.emplace_back("barrier");
        this->inner_.barrier();
    }
    void abort(joinable::AbortReason const& reason) { this->inner_.abort(reason); }
    [[nodiscard]] bool is_aborted() const { return this->inner_.is_aborted(); }
    [[nodiscard]] auto abort_reason() const { return this->inner_.abort_reason(); }
    auto set_deadline(std::chrono::nanoseconds deadline) {
        return this->inner_.set_deadline(deadline);
    }

    /// Collective, and not logged. Whether all ranks have logged the same.
    [[nodiscard]] bool has_trace_of_all() {
        joinable::detail::Hash hash;
        for (std::string const& entry : trace) {
            hash.add(entry);
        }
        std::uint64_t lowest = hash.value();
        std::uint64_t highest = hash.value();
        auto const buffer = [](std::uint64_t& number) {
            return joinable::Buffer{&number, 1, joinable::DType::u64};
        };
        this->inner_.all_reduce(buffer(lowest), joinable::ReduceOp::min).wait();
        this->inner_.all_reduce(buffer(highest), joinable::ReduceOp::max).wait();
        return lowest == highest;
    }

    std::vector<std::string> trace;
    std::function<void(joinable::Buffer)> before = [](auto const&) {}; ///< an all_reduce begins
    std::function<void()> posted = [] {}; ///< called when an all_reduce has begun

private:
    void log(char const* what, joinable::Buffer buffer) {
        trace.push_back(
            joinable::detail::concat(what, " ", buffer.count, " ", name_of(buffer.dtype))
        );
    }
};

template <class Comm>
RecordingCommunicator(Comm&) -> RecordingCommunicator<Comm>;
template <class Comm>
CoreOnly(Comm&) -> CoreOnly<Comm>;

} // namespace joinable_tests
