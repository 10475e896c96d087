// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <joinable/communicator/detail/descriptor.hpp>
#include <joinable/communicator/detail/own_rank.hpp>
#include <joinable/communicator/shared_memory/process/members.hpp>
#include <joinable/communicator/shared_memory/process/process_segment.hpp>
#include <joinable/communicator/shared_memory/process/shared_object.hpp>
#include <joinable/communicator/shared_memory/process/start_notice.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/detail/hash.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

#include <sys/stat.h>
#include <unistd.h>

namespace joinable { inline namespace v0 { namespace detail {

/// The path under which the ranks of a job meet. If other users have that name, a number is
/// appended. Another user gets other names. A user who knows the job id can create objects with
/// such names, but ranks ignore them, because they have another owner.
inline std::string path_of_job(std::string_view job) {
    std::uint64_t const hash = Hash{}.add(concat(geteuid(), ":", job)).value();
    std::string digits;
    for (int shift = 60; shift >= 0; shift -= 4) {
        digits += "0123456789abcdef"[hash >> shift & 0xfU];
    }
    return concat(shared_memory_folder, "/joinable-", geteuid(), "-", digits);
}

/// One rank's view of a segment in which unrelated processes meet by a name. Rank 0 shows a start
/// notice, makes a table of members, publishes it under the name, and then makes the rest. If rank
/// 0 fails before it has published the table, the others see its notice end; if it fails later,
/// they find the reason in the table. The name is removed when all have arrived, so a job that is
/// killed later leaves nothing. A rank that gives up before removes it as well. If a whole job is killed
/// before all have arrived, the next job of that name finds its creator dead and removes the
/// leftover. That is safe: without a name no rank can join it, and a rank that has already joined
/// detects the death by itself.
///
/// The object has address space for all that ranks may ever use, and memory for what they do use:
/// the lines of a board from the start; slots, tables of counts, mailboxes and buffers at their
/// first use.
class NamedSegment final : public ProcessSegment {
public:
    /// Returns when all ranks have arrived.
    /// @throws TimedOut            some ranks, which it names, had not arrived at the deadline.
    /// @throws PeerFailed          a rank died meanwhile.
    /// @throws ContractViolation   another process has this rank; the object is another job's, or
    ///                             from programs that cannot share memory with this one.
    /// @throws CommunicationError  there is no memory, or the name belongs to something else.
    static std::shared_ptr<NamedSegment>
    attach(int rank, int size, std::string_view job, std::chrono::nanoseconds deadline) {
        check_own_rank(rank, size);
        std::string const path = path_of_job(job);
        auto const end = end_of_wait(deadline);
        std::optional<StartNoticeView> rank_zero;
        if (rank != 0) {
            rank_zero.emplace(path);
        }
        for (bool is_first = true;; is_first = false) {
            bool const has_ended = rank_zero && rank_zero->has_ended(is_first);
            auto segment = rank == 0 ? create(path, size, end, deadline)
                                     : find(path, rank, size, end, deadline, is_first);
            if (segment != nullptr) {
                segment->wait_for_all(end, deadline);
                return segment;
            }
            if (has_ended) { // and has published no table before that
                rank_zero->throw_failure_of_rank_zero();
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
    ~NamedSegment() override = default;
    NamedSegment(NamedSegment const&) = delete;
    NamedSegment& operator=(NamedSegment const&) = delete;

    std::chrono::nanoseconds look_for_deaths() noexcept override {
        auto const now = std::chrono::steady_clock::now().time_since_epoch();
        Ticks next = next_look_.load();
        if (now >= next && next_look_.compare_exchange_strong(next, now + between_looks)) {
            for (int other = 0; other < board().size(); ++other) {
                Member& member = table().member(other);
                if (other != rank_ && member.has_died()) {
                    group().mark_dead(
                        other,
                        member.has_failed() ? "it could not attach" : "its process died",
                        rank_
                    );
                }
            }
        }
        return next_look_.load() - now;
    }

    void reserve(std::byte const* data, std::size_t bytes) override {
        try {
            std::size_t const at = MemberTable::bytes_for(board().size());
            object_.reserve(at + static_cast<std::size_t>(data - memory_.begin()), bytes);
        } catch (CommunicationError const& error) {
            group().abort(blamed_on(rank_, {FailureKind::peer_failed, {}, error.what()}), rank_);
            throw;
        }
    }

private:
    /// Ranks throw PeerFailed within a tenth of a second of a death, plus the time for which other
    /// programs use this process's cores. A wait checks after it has yielded for a while, and then
    /// at this interval.
    static constexpr std::chrono::milliseconds between_looks{25};
    using Ticks = std::chrono::steady_clock::duration;

    /// How long a failed rank 0 waits for ranks that must learn of the failure; they start at the
    /// same time.
    static constexpr std::chrono::seconds patience_for_others{2};

    /// Takes ownership only when it can no longer fail.
    NamedSegment(
        SharedObject&& object,
        Membership&& membership,
        Mapping&& memory,
        std::string const& path,
        int rank
    )
        : ProcessSegment{static_cast<int>(membership.table().heading.size),
                         static_cast<std::size_t>(membership.table().heading.room), memory.begin(),
                         rank == 0},
          path_{path}, rank_{rank}, object_{std::move(object)},
          membership_{std::move(membership)}, memory_{std::move(memory)} {}

    /// Null: the name was a dead job's and is free now.
    static std::shared_ptr<NamedSegment> create(
        std::string const& path,
        int size,
        std::chrono::steady_clock::time_point end,
        std::chrono::nanoseconds deadline
    ) {
        for (std::string const& other : SharedObject::own_of(path)) {
            remove_if_dead(other, size);
        }
        auto published = publish_with_notice(path, size, end);
        if (!published) {
            return nullptr;
        }
        auto& [object, membership, named] = *published;
        MemberTable& table = membership.table();
        std::size_t const room = static_cast<std::size_t>(table.heading.room);
        std::size_t const table_bytes = MemberTable::bytes_for(size);
        try {
            object.resize(object_bytes(size, room));
            for (auto const& [at, bytes] : parts_at_start(size)) {
                if (!object.reserve(table_bytes + at, bytes, end)) {
                    throw TimedOut{
                        {0},
                        concat(
                            "rank 0 did not reserve memory in ",
                            named,
                            " within ",
                            std::chrono::duration<double>(deadline).count(),
                            " s"
                        )
                    };
                }
            }
            Mapping memory{object, bytes_for(size, room), table_bytes};
            std::shared_ptr<NamedSegment> segment{new NamedSegment{
                std::move(object), std::move(membership), std::move(memory), named, 0
            }};
            table.state.store(MemberTable::ready);
            return segment;
        } catch (...) {
            if (!membership.is_open()) { // this rank has left
                throw;
            }
            table.failure.store(blamed_on(0, failure_of(std::current_exception())));
            table.state.store(MemberTable::failed);
            auto const enough = (std::min)(end, end_of_wait(patience_for_others));
            while (!table.missing_ranks().empty() && std::chrono::steady_clock::now() < enough) {
                sleep_for(std::chrono::milliseconds{2});
            }
            object.remove_name(named);
            throw;
        }
    }
    struct Published {
        SharedObject object;
        Membership membership;
        std::string path;
    };
    /// Nothing if another rank 0 of this job does the same, or has done it.
    static std::optional<Published> publish_with_notice(
        std::string const& path, int size, std::chrono::steady_clock::time_point end
    ) {
        auto const notice = StartNotice::make(path);
        if (!notice) {
            return std::nullopt;
        }
        try {
            return publish_table(path, size);
        } catch (...) {
            if (size > 1) {
                notice->fail((std::min)(end, end_of_wait(patience_for_others)));
            }
            throw;
        }
    }
    /// Nothing if another object of this user has the name.
    static std::optional<Published> publish_table(std::string const& path, int size) {
        Heading heading;
        heading.size = static_cast<std::uint64_t>(size);
        auto object = SharedObject::create();
        heading.room = most_room;
        while (heading.room > least_room && !object.can_have(object_bytes(size, heading.room))) {
            heading.room /= 2;
        }
        std::size_t const table_bytes = MemberTable::bytes_for(size);
        object.resize(table_bytes);
        object.reserve(0, MemberTable::used_bytes_for(size));
        Mapping mapped{object, table_bytes};
        MemberTable::create(mapped.begin(), heading);
        auto membership = Membership::enter(std::move(mapped), 0);
        auto named = object.publish_first_free(path);
        if (!named) {
            return std::nullopt;
        }
        return Published{std::move(object), *std::move(membership), std::move(*named)};
    }
    static void remove_if_dead(std::string const& path, int size) {
        auto const other = SharedObject::find(path);
        if (!other) {
            return;
        }
        int const its_size = usable_size(*other, path);
        Mapping const found{*other, MemberTable::bytes_for(its_size)};
        Member& creator = Membership::at(found).member(0);
        if (!creator.has_died() && !creator.has_left()) {
            require_size(its_size, size, path);
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

    /// Null: there is none yet. A dead creator found at the first look belongs to an older job.
    static std::shared_ptr<NamedSegment> find(
        std::string const& base,
        int rank,
        int size,
        std::chrono::steady_clock::time_point end,
        std::chrono::nanoseconds deadline,
        bool is_first
    ) {
        for (std::string const& path : SharedObject::own_of(base)) {
            if (auto object = SharedObject::find(path)) {
                int const its_size = usable_size(*object, path);
                Mapping mapped{*object, MemberTable::bytes_for(its_size)};
                Member& creator = Membership::at(mapped).member(0);
                bool const is_dead = creator.has_died();
                if (is_dead && !is_first) {
                    throw_death_of_rank_zero(*object, path);
                }
                if (is_dead || creator.has_left()) { // apparently of an older job
                    object->remove_name(path);
                    continue;
                }
                require_size(its_size, size, path);
                return join(std::move(*object), std::move(mapped), path, rank, end, deadline);
            }
        }
        return nullptr;
    }
    /// Joins the segment that rank 0 makes.
    static std::shared_ptr<NamedSegment> join(
        SharedObject object,
        Mapping mapped,
        std::string const& path,
        int rank,
        std::chrono::steady_clock::time_point end,
        std::chrono::nanoseconds deadline
    ) {
        MemberTable& table = Membership::at(mapped);
        auto membership = Membership::enter(std::move(mapped), rank);
        if (!membership) {
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
        try {
            while (table.state.load() == MemberTable::starting) {
                if (table.member(0).has_died()) {
                    throw_death_of_rank_zero(object, path);
                }
                if (std::chrono::steady_clock::now() >= end) {
                    throw TimedOut{
                        {0}, not_in_time({0}, path, deadline, concat(rank, " is attached to it"))
                    };
                }
                sleep_for(std::chrono::milliseconds{1});
            }
            if (table.state.load() == MemberTable::failed) {
                throw_failure(table.failure.load());
            }
            int const size = static_cast<int>(table.heading.size);
            std::size_t const table_bytes = MemberTable::bytes_for(size);
            Mapping memory{object, bytes_for(size, table.heading.room), table_bytes};
            return std::shared_ptr<NamedSegment>{new NamedSegment{
                std::move(object), *std::move(membership), std::move(memory), path, rank
            }};
        } catch (...) {
            table.member(rank).fail();
            throw;
        }
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
        // Every rank does this, so that a rank that returns from here knows that the name is free.
        object_.remove_name(path_, missing.empty() ? end : std::chrono::steady_clock::time_point{});
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

    /// Checks that this process may use the object, and returns for how many ranks it was made. A
    /// dead job may have left one for another number.
    static int usable_size(SharedObject const& object, std::string const& path) {
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
        if (heading.size < 1 || heading.size > static_cast<std::uint64_t>(max_ranks)) {
            refuse(concat("between 1 and ", max_ranks, " ranks"), concat(heading.size));
        }
        auto const size = static_cast<int>(heading.size);
        // Map the table only, before rank 0 makes the rest.
        std::size_t const bytes = object_bytes(size, (std::min)(heading.room, most_room));
        auto const has = static_cast<std::size_t>(status.st_size);
        if ((has != bytes && has != MemberTable::bytes_for(size)) || heading.room > most_room) {
            refuse(concat(bytes, " bytes"), concat(has, " bytes"));
        }
        return size;
    }
    /// Checks that a living job has as many ranks as this one.
    static void require_size(int its_size, int size, std::string const& path) {
        if (its_size != size) {
            throw ContractViolation{concat(
                "expected a group of ",
                size,
                " ranks, but ",
                path,
                " was made for ",
                its_size,
                "; start all ranks of a job with the same world size, and give each job that runs "
                "at the same time another id"
            )};
        }
    }

    static std::size_t object_bytes(int size, std::size_t room) {
        return MemberTable::bytes_for(size) + bytes_for(size, room);
    }
    [[nodiscard]] MemberTable& table() const noexcept { return membership_.table(); }

    std::string path_;
    int rank_;
    SharedObject object_;
    Membership membership_;
    Mapping memory_;
    std::atomic<Ticks> next_look_{Ticks{}}; ///< for any waiting thread of this rank
};

}}} // namespace joinable::v0::detail
