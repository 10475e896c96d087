// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/shared_memory/board/waiting.hpp>
#include <joinable/communicator/shared_memory/process/members.hpp>
#include <joinable/communicator/shared_memory/process/process_segment.hpp>
#include <joinable/communicator/shared_memory/process/shared_object.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/hash.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

#include <cerrno>
#include <cstring>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace joinable { inline namespace v0 { namespace detail {

/// Memory mapped from an object; unmapped with this.
class Mapping {
public:
    /// @throws CommunicationError  there is no address space.
    Mapping(SharedObject const& object, std::size_t bytes)
        : begin_{object.map(bytes)}, bytes_{bytes} {
        if (begin_ == nullptr) {
            throw CommunicationError{concat(
                "expected to map ",
                bytes,
                " bytes of shared memory, but the system says: ",
                std::strerror(errno),
                "; allow more address space"
            )};
        }
    }
    ~Mapping() {
        if (begin_ != nullptr) {
            munmap(begin_, bytes_);
        }
    }
    Mapping(Mapping&& other) noexcept
        : begin_{std::exchange(other.begin_, nullptr)}, bytes_{other.bytes_} {}
    Mapping& operator=(Mapping&&) = delete;

    [[nodiscard]] std::byte* begin() const noexcept { return begin_; }
    void keep() noexcept { begin_ = nullptr; }

private:
    std::byte* begin_;
    std::size_t bytes_;
};

/// The name under which the ranks of a job meet, as a path. Another user finds other names. Whoever
/// knows the job id can make an object of that name, but none that ranks would accept: it belongs to
/// him.
inline std::string path_of_job(std::string_view job) {
    std::uint64_t const hash = Hash{}.add(concat(geteuid(), ":", job)).value();
    std::string digits;
    for (int shift = 60; shift >= 0; shift -= 4) {
        digits += "0123456789abcdef"[hash >> shift & 0xfU];
    }
    return concat(shared_memory_folder, "/joinable-", geteuid(), "-", digits);
}

/// What one rank has of a segment in which unrelated processes meet by a name. Rank 0 makes it, and
/// the name is removed when all have come: so a job that is killed later leaves nothing. Whoever
/// gives up before removes it, too; what a job leaves that is killed as a whole before all have come,
/// the next job of that name removes, because it finds the creator dead. That is safe: nobody can
/// join any more what has no name, and who has joined it finds the death by itself.
class NamedSegment final : public ProcessSegment {
public:
    /// Returns when all ranks have come.
    /// @throws TimedOut            naming those that have not, at the deadline.
    /// @throws PeerFailed          a rank died meanwhile.
    /// @throws ContractViolation   another process has this rank; the object is another job's, or
    ///                             from programs that cannot share memory with this one.
    /// @throws CommunicationError  there is no memory, or what has the name is no such object.
    static std::shared_ptr<NamedSegment>
    attach(int rank, int size, std::string_view job, std::chrono::nanoseconds deadline) {
        static_cast<void>(Board::bytes_for(size)); // throws where no group can be so large
        std::string const path = path_of_job(job);
        auto const end = end_of_wait(deadline);
        for (;;) {
            auto segment = rank == 0 ? create(path, size) : find(path, rank, size);
            if (segment != nullptr) {
                segment->wait_for_all(end, deadline);
                return segment;
            }
            if (std::chrono::steady_clock::now() >= end) {
                throw TimedOut{
                    {0}, not_in_time({0}, path, deadline, concat(rank, " looks for it"))
                };
            }
            sleep_for(std::chrono::milliseconds{2});
        }
    }

    /// Leaves the group.
    ~NamedSegment() override {
        if (!table().member(rank_).leave(thread_)) {
            memory_.keep(); // the thread that attached still has a mutex in it
        }
    }
    NamedSegment(NamedSegment const&) = delete;
    NamedSegment& operator=(NamedSegment const&) = delete;

    std::chrono::nanoseconds look_for_deaths() noexcept override {
        auto const now = std::chrono::steady_clock::now().time_since_epoch();
        Ticks next = next_look_.load();
        if (now >= next && next_look_.compare_exchange_strong(next, now + between_looks)) {
            for (int other = 0; other < board().size(); ++other) {
                if (other != rank_ && table().member(other).has_died()) {
                    group().mark_dead(other, "its process died", rank_);
                }
            }
        }
        return next_look_.load() - now;
    }

    void reserve(std::byte const* data, std::size_t bytes) override {
        try {
            object_.reserve(static_cast<std::size_t>(data - memory_.begin()), bytes);
        } catch (CommunicationError const& error) {
            group().abort(blamed_on(rank_, {FailureKind::peer_failed, {}, error.what()}), rank_);
            throw;
        }
    }

private:
    /// A death is PeerFailed within a tenth of a second, unless other programs keep this one from its
    /// cores: a wait yields a hundred times before it looks.
    static constexpr std::chrono::milliseconds between_looks{25};
    using Ticks = std::chrono::steady_clock::duration;

    NamedSegment(
        SharedObject object, Mapping memory, std::string path, int rank, Heading const& heading
    )
        : ProcessSegment{static_cast<int>(heading.size), static_cast<std::size_t>(heading.room),
                         memory.begin() + MemberTable::bytes_for(static_cast<int>(heading.size)),
                         rank == 0},
          object_{std::move(object)}, memory_{std::move(memory)}, path_{std::move(path)},
          rank_{rank} {}

    /// Null: the name was a dead job's, and is free now.
    static std::shared_ptr<NamedSegment> create(std::string const& path, int size) {
        Heading heading;
        heading.size = static_cast<std::uint64_t>(size);
        auto object = SharedObject::create();
        heading.room = most_room;
        while (heading.room > least_room && !object.can_have(object_bytes(size, heading.room))) {
            heading.room /= 2;
        }
        std::size_t const bytes = object_bytes(size, heading.room);
        object.resize(bytes);
        object.reserve(0, object_bytes(size, 0));
        Mapping memory{object, bytes};
        MemberTable::create(memory.begin(), heading);
        std::shared_ptr<NamedSegment> const segment{
            new NamedSegment{std::move(object), std::move(memory), path, 0, heading}
        };
        static_cast<void>(segment->table().member(0).enter());
        if (segment->object_.publish(path)) {
            return segment;
        }
        if (auto const other = SharedObject::find(path)) {
            Mapping const found{
                *other, object_bytes(size, require_usable(*other, path, size).room)
            };
            Member& creator = table_at(found).member(0);
            if (!creator.has_died()) {
                throw ContractViolation{concat(
                    "expected no other rank 0 of this job, but ",
                    path,
                    " belongs to process ",
                    creator.process(),
                    ", which is alive: give each job that runs at the same time another id"
                )};
            }
            other->remove_name(path);
        }
        return nullptr;
    }

    /// Null: there is none yet.
    static std::shared_ptr<NamedSegment> find(std::string const& path, int rank, int size) {
        auto object = SharedObject::find(path);
        if (!object) {
            return nullptr;
        }
        Heading const heading = require_usable(*object, path, size);
        Mapping memory{*object, object_bytes(size, heading.room)};
        MemberTable& table = table_at(memory);
        if (table.member(0).has_died()) { // of an older job, as far as anybody can tell
            object->remove_name(path);
            return nullptr;
        }
        if (!table.member(rank).enter()) {
            throw ContractViolation{concat(
                "expected no other rank ",
                rank,
                " of this job, but process ",
                table.member(rank).process(),
                " is attached to ",
                path,
                " as that rank: give each rank its number, and each job that runs at the same time "
                "another id"
            )};
        }
        return std::shared_ptr<NamedSegment>{
            new NamedSegment{std::move(*object), std::move(memory), path, rank, heading}
        };
    }

    void
    wait_for_all(std::chrono::steady_clock::time_point end, std::chrono::nanoseconds deadline) {
        board().room.wake();
        auto const all_have_come = [&] { return table().missing_ranks().empty(); };
        bool const is_over = board().room.wait(
            [&] { return all_have_come() || board().is_aborted(); },
            end - std::chrono::steady_clock::now(),
            [&] { return look_for_deaths(); }
        );
        std::vector<int> const missing = table().missing_ranks();
        if (!is_over && !missing.empty()) {
            group().abort(
                {FailureKind::timed_out,
                 missing,
                 not_in_time(missing, path_, deadline, concat(rank_, " is attached to it"))},
                rank_
            );
        }
        // Everyone does, so that whoever returns from here knows that the name is free.
        object_.remove_name(path_);
        if (!missing.empty()) {
            throw_failure(board().reason());
        }
    }

    static std::string not_in_time(
        std::vector<int> const& missing,
        std::string const& path,
        std::chrono::nanoseconds deadline,
        std::string const& who_waits
    ) {
        return concat(
            ranks_text(missing),
            missing == std::vector{0} ? " did not make " : " did not attach to ",
            path,
            " within ",
            std::chrono::duration<double>(deadline).count(),
            " s, while rank ",
            who_waits,
            ": start all ranks of a job on one machine, as one user, with the same job id"
        );
    }

    /// The heading of an object that this process may use.
    static Heading require_usable(SharedObject const& object, std::string const& path, int size) {
        auto const refuse = [&](std::string const& expected, std::string const& given) {
            throw CommunicationError{concat(
                "expected ",
                path,
                " to have ",
                expected,
                ", but it has ",
                given,
                "; remove it, or give the job another id"
            )};
        };
        struct stat const status = object.status();
        if (status.st_uid != geteuid()) {
            refuse(concat("the owner ", geteuid()), concat("the owner ", status.st_uid));
        }
        if (!S_ISREG(status.st_mode)) {
            refuse("a regular file", "another type");
        }
        if (unsigned const mode = status.st_mode & 0777U; mode != (S_IRUSR | S_IWUSR)) {
            refuse("mode 600 (octal)", concat("mode ", mode >> 6U, mode >> 3U & 7U, mode & 7U));
        }
        Heading heading;
        if (!object.read(std::as_writable_bytes(std::span{&heading, 1}))) {
            refuse(
                concat("at least ", sizeof(Heading), " bytes"), concat(status.st_size, " bytes")
            );
        }
        if (heading.magic != Heading::joinable_magic) {
            refuse("what a joinable program writes first", "something else");
        }
        if (heading.layout != Heading::own_layout) {
            refuse(
                concat("layout ", Heading::own_layout, " of this program"),
                concat(
                    "layout ",
                    heading.layout,
                    ": build the programs of all ranks with the same version of joinable"
                )
            );
        }
        if (heading.size != static_cast<std::uint64_t>(size)) {
            throw ContractViolation{concat(
                "expected a group of ",
                size,
                " ranks, but ",
                path,
                " was made for ",
                heading.size,
                "; start all ranks of a job with the same world size, and give each job that runs "
                "at the same time another id"
            )};
        }
        std::size_t const bytes = object_bytes(size, (std::min)(heading.room, most_room));
        if (static_cast<std::size_t>(status.st_size) != bytes || heading.room > most_room) {
            refuse(concat(bytes, " bytes"), concat(status.st_size, " bytes"));
        }
        return heading;
    }

    static std::size_t object_bytes(int size, std::size_t room) {
        return MemberTable::bytes_for(size) + bytes_for(size, room);
    }
    static MemberTable& table_at(Mapping const& memory) noexcept {
        return *std::launder(reinterpret_cast<MemberTable*>(memory.begin()));
    }
    [[nodiscard]] MemberTable& table() const noexcept { return table_at(memory_); }

    SharedObject object_;
    Mapping memory_;
    std::string path_;
    int rank_;
    pthread_t thread_ = pthread_self();
    std::atomic<Ticks> next_look_{Ticks{}}; ///< whichever thread of this rank waits then
};

}}} // namespace joinable::v0::detail
