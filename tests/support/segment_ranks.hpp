// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdio>
#include <cstring>

#include <support/failed_checks.hpp>
#include <support/hang.hpp>

#include <joinable/communicator/shared_memory/run_processes.hpp>

namespace joinable_tests {

/// Process ranks over memory that is still there when they have ended: what they copied into it can
/// be looked at.
class SegmentRanks {
public:
    explicit SegmentRanks(int size) : segment_{size} {}

    /// As run_processes, with a limit in time, and with checks that fail here.
    template <class Body>
    void run(Body const& body) {
        Alarm const at_hang;
        std::fflush(nullptr); // or each rank prints what is not printed yet
        joinable::detail::ChildProcesses children{segment_};
        auto const checked = [&](joinable::ProcessCommunicator& comm) {
            failed_checks = 0;
            body(comm);
            if (failed_checks != 0) {
                throw joinable::ContractViolation{"checks failed"};
            }
        };
        for (int rank = 0; rank < segment_.board().size(); ++rank) {
            if (children.start()) {
                joinable::detail::run_rank(segment_, rank, checked);
            }
        }
        children.wait();
        joinable::detail::throw_first_failure(segment_, children);
    }

    [[nodiscard]] joinable::detail::ProcessSegment& segment() noexcept { return segment_; }

    /// Where the last copy of a buffer of `rank` ended, in bytes, of those within the first 4 MiB.
    /// @pre what was copied ended in a byte that is not 0
    [[nodiscard]] std::size_t copied(int rank) const {
        static constexpr std::array<std::byte, 4096> zeros{};
        std::size_t end = std::size_t{4} << 20U;
        std::byte const* const memory = segment_.staging(rank).first(end).data();
        while (end != 0 && std::memcmp(memory + end - zeros.size(), zeros.data(), zeros.size()) == 0
        ) {
            end -= zeros.size();
        }
        while (end != 0 && memory[end - 1] == std::byte{}) {
            --end;
        }
        return end;
    }

private:
    joinable::detail::ProcessSegment segment_;
};

} // namespace joinable_tests
