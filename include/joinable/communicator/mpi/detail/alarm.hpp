// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <list>
#include <optional>
#include <span>
#include <vector>

#include <mpi.h>

#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/reasons.hpp>
#include <joinable/communicator/mpi/detail/api.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 { namespace detail {

/// The control messages between ranks. The value is the message's tag.
enum class MpiWord : int {
    abort,      ///< with a reason
    leave,      ///< the last message of a rank that closes: what it has done
    gone,       ///< the last message of a rank that has stopped
    unwound,    ///< the same of a rank whose operations were complete when an exception ended it
    keep_alive, ///< it is working
    question,   ///< how many collectives have you posted? Has a number
    answer,     ///< that number, and the count
};

/// Small control messages between all ranks, over a separate communicator, so that data does not
/// delay them. Every wait polls them. They are small enough that MPI sends them at once, whatever
/// the receivers do.
class MpiAlarm {
public:
    /// MPI implementations send about 4 KiB without asking the receiver. A reason also has a bit
    /// for each rank.
    static constexpr std::size_t most_bytes = 3800;

    MpiAlarm(MPI_Comm comm, int rank, int size) : comm_{comm}, rank_{rank}, size_{size} {
        listen();
    }
    MpiAlarm(MpiAlarm const&) = delete;
    MpiAlarm& operator=(MpiAlarm const&) = delete;

    void tell(int to, MpiWord word, std::span<std::byte const> body = {}) {
        Sent& sent = sent_.emplace_back();
        sent.body.assign(body.begin(), body.end());
        check_mpi(
            MPI_Isend(
                sent.body.data(),
                static_cast<int>(body.size()),
                MPI_BYTE,
                to,
                static_cast<int>(word),
                comm_,
                &sent.request
            ),
            "MPI_Isend"
        );
    }
    void tell_all(MpiWord word, std::span<std::byte const> body = {}) {
        for (int to = 0; to < size_; ++to) {
            if (to != rank_) {
                tell(to, word, body);
            }
        }
    }

    /// Calls take(word, from, body) for each message that has arrived. A message for which that
    /// throws, because there is no memory, stays for the next poll; and so does an error of MPI.
    template <class Take>
    void poll(Take const& take) {
        while (has_arrived()) {
            take(arrived_->word, arrived_->from, std::span{received_}.first(arrived_->bytes));
            arrived_.reset();
            listen();
        }
        if (!sent_.empty()) {
            static_cast<void>(has_sent());
        }
    }
    /// Whether MPI has taken all messages.
    [[nodiscard]] bool has_sent() {
        sent_.remove_if([](Sent& sent) {
            int is_done = 0;
            check_mpi(MPI_Test(&sent.request, &is_done, MPI_STATUS_IGNORE), "MPI_Test");
            return is_done != 0;
        });
        return sent_.empty();
    }

    /// Stops receiving.
    void stop_listening() {
        if (receive_ != MPI_REQUEST_NULL) {
            check_mpi(MPI_Cancel(&receive_), "MPI_Cancel");
            check_mpi(MPI_Wait(&receive_, MPI_STATUS_IGNORE), "MPI_Wait");
        }
    }
    /// Frees the communicator. @pre each rank has sent its last message and has received the last
    /// messages of all
    void close() {
        stop_listening();
        check_mpi(MPI_Comm_free(&comm_), "MPI_Comm_free");
    }

private:
    struct Sent {
        std::vector<std::byte> body;
        MPI_Request request = MPI_REQUEST_NULL;
    };

    /// A message in received_.
    struct Arrived {
        MpiWord word;
        int from;
        std::size_t bytes;
    };

    [[nodiscard]] bool has_arrived() {
        if (receive_ != MPI_REQUEST_NULL) {
            int is_there = 0;
            MPI_Status status;
            code_ = MPI_Test(&receive_, &is_there, &status);
            if (code_ != MPI_SUCCESS) {
                receive_ = MPI_REQUEST_NULL; // do not test it again: MPI may have freed it
            } else if (is_there != 0) {
                int bytes = 0;
                static_cast<void>(MPI_Get_count(&status, MPI_BYTE, &bytes));
                arrived_ = {
                    static_cast<MpiWord>(status.MPI_TAG),
                    status.MPI_SOURCE,
                    static_cast<std::size_t>(bytes)
                };
            }
        }
        check_mpi(code_, "MPI_Test");
        return arrived_.has_value();
    }
    void listen() {
        if (size_ > 1) {
            check_mpi(
                MPI_Irecv(
                    received_.data(),
                    static_cast<int>(received_.size()),
                    MPI_BYTE,
                    MPI_ANY_SOURCE,
                    MPI_ANY_TAG,
                    comm_,
                    &receive_
                ),
                "MPI_Irecv"
            );
        }
    }

    MPI_Comm comm_;
    int rank_;
    int size_;
    std::array<std::byte, most_bytes> received_{};
    MPI_Request receive_ = MPI_REQUEST_NULL;
    int code_ = MPI_SUCCESS;         ///< of its last test
    std::optional<Arrived> arrived_; ///< until it is taken
    std::list<Sent> sent_;           ///< a list, because bodies must not move
};

/// A reason in the form that all ranks send: its text is cut to fit into a message. A group may receive the
/// reason of its parent, with ranks that the group does not have.
[[nodiscard]] inline AbortReason sendable(AbortReason reason, int size) {
    std::erase_if(reason.ranks, [&](int rank) { return reason.origin < 0 && rank >= size; });
    return *unpacked_reason(packed(reason, MpiAlarm::most_bytes));
}

/// The last message of a rank that closes, to one other rank.
struct MpiLeave {
    /// A collective that the rank has posted and that is not complete.
    struct Open {
        std::uint64_t number = 0;
        std::uint64_t word = 0; ///< of its Descriptor
        std::uint64_t count = 0;
        std::uint64_t has_counts = 0;

        friend bool operator==(Open const&, Open const&) = default;
    };
    std::uint64_t posted = 0;   ///< collectives
    std::uint64_t sent = 0;     ///< messages to that rank
    std::uint64_t received = 0; ///< receives that it has posted for messages from that rank
    std::uint64_t blamed = 0;   ///< the rank whose exception came first, if it is unwound
    std::vector<Open> open = {};
    bool is_gone = false;

    static constexpr std::size_t most_open = (MpiAlarm::most_bytes - 32) / sizeof(Open);

    [[nodiscard]] std::vector<std::byte> packed() const {
        std::vector<std::byte> bytes(32 + open.size() * sizeof(Open));
        std::memcpy(bytes.data(), &posted, 8);
        std::memcpy(bytes.data() + 8, &sent, 8);
        std::memcpy(bytes.data() + 16, &received, 8);
        std::memcpy(bytes.data() + 24, &blamed, 8);
        if (!open.empty()) {
            std::memcpy(bytes.data() + 32, open.data(), open.size() * sizeof(Open));
        }
        return bytes;
    }
    [[nodiscard]] static MpiLeave unpacked(std::span<std::byte const> bytes) {
        MpiLeave leave;
        std::memcpy(&leave.posted, bytes.data(), 8);
        std::memcpy(&leave.sent, bytes.data() + 8, 8);
        std::memcpy(&leave.received, bytes.data() + 16, 8);
        std::memcpy(&leave.blamed, bytes.data() + 24, 8);
        leave.open.resize((bytes.size() - 32) / sizeof(Open));
        if (!leave.open.empty()) {
            std::memcpy(leave.open.data(), bytes.data() + 32, leave.open.size() * sizeof(Open));
        }
        return leave;
    }
};

}}} // namespace joinable::v0::detail
