// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <joinable/communicator/algorithms/detail/message_engine.hpp>
#include <joinable/communicator/algorithms/options.hpp>
#include <joinable/communicator/algorithms/plan.hpp>
#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/detail/collective_members.hpp>
#include <joinable/communicator/detail/request.hpp>
#include <joinable/communicator/detail/work_of.hpp>
#include <joinable/communicator/model_table.hpp>
#include <joinable/detail/scope.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/tensor/buffer.hpp>

namespace joinable { inline namespace v0 {

/// Ranks that exchange messages in host memory. A MessageCommunicator needs nothing else. Every
/// communicator that models SendsAndReceives and reduces host memory is a model.
///
/// `comm` is an lvalue of `C`.
/// | expression                        | result             | meaning                                     |
/// |-----------------------------------|--------------------|---------------------------------------------|
/// | `comm.rank()`, `comm.size()`      | convertible to int | as in Communicator                          |
/// | `comm.send(in, to, tag)`          | Work               | returns before the receive is posted        |
/// | `comm.receive(buffer, from, tag)` | Work               | messages with one tag between two ranks     |
/// |                                   |                    | stay in order; count and dtype are the same |
template <class C>
concept ExchangesMessages = detail::has_rank<C> && detail::has_size<C> && detail::has_send<C> &&
                            detail::has_receive<C> && detail::reduces_host_memory<C>;

/// Explains in one sentence why a class does not model ExchangesMessages.
template <class C>
consteval bool models_exchanges_messages() {
    static_assert(detail::has_rank<C>, "ExchangesMessages: expected a member 'int rank() const'");
    static_assert(detail::has_size<C>, "ExchangesMessages: expected a member 'int size() const'");
    static_assert(
        detail::has_send<C>,
        "ExchangesMessages: expected a member 'Work send(ConstBuffer, int to, int tag)'"
    );
    static_assert(
        detail::has_receive<C>,
        "ExchangesMessages: expected a member 'Work receive(Buffer, int from, int tag)'"
    );
    static_assert(
        detail::reduces_host_memory<C>,
        "ExchangesMessages: expected a communicator of host memory, where messages are combined"
    );
    return ExchangesMessages<C>;
}

/// A collective of one rank, made of messages. Its wait() throws the errors of these messages
/// unchanged, or Mismatch: see MessageOptions::check.
template <class Comm>
using MessageWork = detail::WorkOf<detail::MessageEngine<Comm>, std::uint64_t>;

/// All-reduces, broadcasts and barriers, made of the messages of another communicator.
/// AllReduceAlgorithm lists the messages and the order in which elements are combined. All ranks
/// get the same bits, every time.
///
/// The underlying communicator must outlive this object and may also be used directly: see
/// MessageOptions::tag. If it has abort(), set_deadline() or keep_alive(), this object has them
/// too.
///
/// Collectives make progress inside wait() and test(). They run one at a time, in the order in
/// which they were posted. They need scratch memory, which is kept for reuse: see
/// AllReducePlan::segment_bytes.
///
/// The error of a message is thrown unchanged. If the underlying communicator models Aborts, it is
/// first aborted with the same reason: all ranks then throw that reason at once, and both
/// communicators are unusable. Otherwise each rank throws at its own deadline. That deadline
/// applies to one message, so TimedOut may name a rank that is itself waiting for others. If a rank
/// destroys this object while others wait for its messages, they time out, unless it is unwinding
/// or destroys the underlying communicator too.
///
/// One thread at a time may use an object and the underlying communicator.
template <class Comm>
class MessageCommunicator
    : public detail::BasicCollectives<MessageCommunicator<Comm>, MessageWork<Comm>> {
    static_assert(models_exchanges_messages<Comm>());

public:
    /// Local.
    /// @throws ContractViolation  the extents of a torus or mesh do not fit the number of ranks, or the tag
    ///                            range would exceed the largest int or begin below 0.
    [[nodiscard]] explicit MessageCommunicator(Comm& comm, MessageOptions const& options = {})
        : engine_{comm, options} {
        if (options.plan) {
            (void)detail::MessageSchedule::all_reduce(*options.plan, size(), 0, 1);
        }
        if (options.tag < 0 || options.tag > INT_MAX - tags) {
            throw ContractViolation{detail::concat(
                "MessageOptions::tag must be at least 0 and leave room for ",
                tags,
                " tags, but is ",
                options.tag
            )};
        }
    }
    MessageCommunicator(MessageCommunicator const&) = delete;
    MessageCommunicator& operator=(MessageCommunicator const&) = delete;
    ~MessageCommunicator() {
        if (unwinding_.has_begun()) {
            abort_for_exception(engine_, "the scope of its communicator");
        }
    }

    [[nodiscard]] int rank() const { return engine_.communicator().rank(); }
    [[nodiscard]] int size() const { return engine_.communicator().size(); }
    /// The plan for an all-reduce of this many bytes.
    [[nodiscard]] AllReducePlan plan_for(std::size_t bytes) const {
        return engine_.plan_for(bytes);
    }

    /// Not collective. Sends a message of the underlying communicator. Its tag must not be one of
    /// the collectives.
    auto send(ConstBuffer buffer, int to, int tag = 0) {
        check_tag(tag);
        return engine_.communicator().send(buffer, to, tag);
    }
    /// Not collective. Receives a message of send().
    auto receive(Buffer buffer, int from, int tag = 0) {
        check_tag(tag);
        return engine_.communicator().receive(buffer, from, tag);
    }

    /// Local. Aborts the underlying communicator.
    void abort(AbortReason const& reason)
        requires detail::has_abort<Comm>
    {
        engine_.communicator().abort(reason);
    }
    [[nodiscard]] bool is_aborted() const
        requires detail::has_abort<Comm>
    {
        return engine_.communicator().is_aborted();
    }
    [[nodiscard]] std::optional<AbortReason> abort_reason() const
        requires detail::has_abort_reason<Comm>
    {
        return engine_.communicator().abort_reason();
    }
    [[nodiscard]] bool is_renumbered() const { return engine_.is_renumbered(); }
    /// Local; for messages that start later. Returns the deadline that was in force.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline)
        requires detail::has_set_deadline<Comm>
    {
        return engine_.communicator().set_deadline(deadline);
    }
    /// Local. Ranks that wait for a message of this one now wait for one more deadline from this
    /// call.
    void keep_alive()
        requires detail::has_keep_alive<Comm>
    {
        engine_.communicator().keep_alive();
    }
    /// Local. The peers of the messages that this rank waits for.
    [[nodiscard]] std::vector<int> missing_ranks() const { return engine_.missing_ranks(); }
    /// Local. That of the underlying communicator: ranks that share memory there share it here.
    [[nodiscard]] detail::ModelTable* model_table()
        requires detail::has_model_table<Comm>
    {
        return engine_.communicator().model_table();
    }

private:
    static constexpr int tags = 129; ///< one per collective and operation, and one to compare

    friend class detail::BasicCollectives<MessageCommunicator, MessageWork<Comm>>;
    MessageWork<Comm> post(detail::Request const& request) {
        return {engine_, engine_.post(request)};
    }
    void check_tag(int tag) const {
        int const first = engine_.options().tag;
        if (tag >= first && tag - first < tags) {
            throw ContractViolation{detail::concat(
                "tags from ",
                first,
                " to ",
                first + tags - 1,
                " are those of collectives, but a message was given ",
                tag,
                ": take another one, or set MessageOptions::tag"
            )};
        }
    }

    detail::MessageEngine<Comm> engine_;
    detail::Unwinding unwinding_;
};

}} // namespace joinable::v0
