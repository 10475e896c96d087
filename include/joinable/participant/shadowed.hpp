// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <joinable/agreement/agree.hpp>
#include <joinable/agreement/agreement_list.hpp>
#include <joinable/communicator/capabilities.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/control.hpp>
#include <joinable/detail/hash.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/join/joinable.hpp>
#include <joinable/join/round.hpp>
#include <joinable/participant/detail/model_collectives.hpp>
#include <joinable/participant/detail/replayed.hpp>
#include <joinable/tensor/buffer.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/reduce_op.hpp>

namespace joinable { inline namespace v0 {

class SelfCommunicator;

namespace detail {

/// The next step of the active ranks, which they announce to joined ranks.
struct ModelStep {
    enum class Kind : std::uint8_t { all_reduce, broadcast, barrier, section_end };

    Kind kind = Kind::section_end;
    std::size_t count = 0; ///< elements
    DType dtype = DType::u8;
    ReduceOp op = ReduceOp::sum;
    int root = 0;

    /// Everything but the count; below 2^36, because a rank takes at most 20 bits.
    [[nodiscard]] std::uint64_t word() const noexcept {
        return static_cast<std::uint64_t>(kind) | static_cast<std::uint64_t>(dtype) << 4U |
               static_cast<std::uint64_t>(op) << 8U | static_cast<std::uint64_t>(root) << 16U;
    }
    [[nodiscard]] static ModelStep of(std::uint64_t word, std::uint64_t count) noexcept {
        return {
            static_cast<Kind>(word & 0xfU),
            static_cast<std::size_t>(count),
            static_cast<DType>(word >> 4U & 0xfU),
            static_cast<ReduceOp>(word >> 8U & 0xffU),
            static_cast<int>(word >> 16U)
        };
    }
    [[nodiscard]] std::string text() const {
        std::string const elements = concat(count, " ", name_of(dtype));
        switch (kind) {
        case Kind::all_reduce: return concat("all_reduce of ", elements, " with ", name_of(op));
        case Kind::broadcast: return concat("broadcast of ", elements, " from rank ", root);
        case Kind::barrier: return "barrier";
        case Kind::section_end: break;
        }
        return "no more collectives in this pass";
    }
};

/// Waits for the round in whose passes this rank issues a collective, and returns it. Returns none outside
/// a guard. `parent` is the communicator of the guard.
/// @throws ContractViolation  joined ranks would not follow.
/// @throws what PendingRound::wait throws.
[[nodiscard]] inline std::optional<Round>
enter_round(ModelCollectives* rounds, void const* parent) {
    Session* const own = rounds == nullptr ? nullptr : rounds->session();
    Session* const session = own != nullptr ? own : Occupation::session_over(parent);
    if (session == nullptr || !session->runs_rounds()) {
        return {};
    }
    char const* const why =
        rounds == nullptr
            ? "a shadowed() communicator is used in a guard, but it is attached to no participant, so "
              "joined ranks would not follow; call ddp.attach_collectives(it) before the guard"
        : own == nullptr
            ? "a shadowed() communicator is used in a guard that does not list its participant, so "
              "joined ranks would not follow; add the participant to participants(...)"
        : !rounds->pending()
            ? "a shadowed() communicator is used outside the passes of its participant, where joined "
              "ranks do not follow; use it between forward() and the end of the backward pass, or after "
              "finish()"
            : nullptr;
    if (why != nullptr) {
        session->record_failure(why); // the guard's user may not be in a verb of a participant
        throw ContractViolation{why};
    }
    Round round = rounds->pending()->wait();
    round.hold(); // no other participant communicates until the passes have ended
    return round;
}

} // namespace detail

/// A communicator for collectives that a model issues within its passes, where no participant sees them:
/// a normalisation layer that sums over the samples of all ranks, or a metric. It is split from another
/// communicator and has the same ranks, so its collectives do not mix with gradients in flight. Made by
/// shadowed().
///
/// @code
/// auto in_model = joinable::shadowed(comm);
/// Model model{in_model};                    // its layers all-reduce over `in_model`
/// joinable::DistributedDataParallel ddp{comm, model.parameters()};
/// ddp.attach_collectives(in_model);
/// joinable::Join guard{joinable::participants(ddp, step)};
/// @endcode
///
/// In a guard that lists the participant, joined ranks take part in every collective of the active ranks,
/// including ranks that never had an input. They contribute elements that change no result: zeros to a sum,
/// ones to a product, infinities or limits to a minimum or maximum, all bits to a bit_and. They discard the
/// results. A sum of sample counts is therefore the number of samples of the active ranks.
///
/// | round                     | what is sent                                                           |
/// |---------------------------|------------------------------------------------------------------------|
/// | all ranks are active,     | the collectives, and nothing else                                      |
/// | or there is no guard      |                                                                        |
/// | some rank has joined      | a sum of eight words before each collective, in which active ranks     |
/// |                           | announce it, and one at the end of their passes; if buffers are sent   |
/// |                           | after the forward pass, one more before them                           |
///
/// Collectives may differ from round to round, and a layer may be used twice. Once some rank has joined, all
/// ranks throw Mismatch if active ranks issue different collectives; the text has both. While all ranks are
/// active, only the communicator detects such a difference: as Mismatch, or as TimedOut if one rank issues
/// more collectives than another.
///
/// The first collective of a round waits until all ranks have opened the round. Joined ranks follow training
/// rounds, whether they sync or not, until the end of their backward pass, and evaluations until forward()
/// returns. Elsewhere in a guard a collective throws ContractViolation, and so does any collective if the
/// communicator is not attached to a participant of the guard. The root of a broadcast must be active.
///
/// An exception between collectives must leave the guard, which ends the waits of the other ranks; skip() is
/// refused. A rank without samples gives its model an empty batch. Joined ranks send their share of the
/// gradients after the passes of the active ranks. In such rounds gradients therefore do not overlap with
/// the backward pass, and with Sharding::gradients all buckets keep their memory until then.
///
/// Neither copyable nor movable. It refers to `comm`, and aborting `comm` aborts it. It inherits the deadline,
/// but the timeout of a guard does not change it. One thread at a time may use it.
template <class Comm>
class ShadowedCommunicator final : public detail::ModelCommunicator {
    static_assert(models_communicator<Comm>());
    static_assert(
        Splits<Comm> || std::same_as<Comm, SelfCommunicator>,
        "shadowed: this communicator has no member 'split(int color, int key)'; use one that models "
        "Splits, as ThreadCommunicator, ProcessCommunicator, MpiCommunicator and NcclCommunicator do"
    );

    static decltype(auto) split(Comm& comm) {
        if constexpr (Splits<Comm>) {
            return comm.split(0, static_cast<int>(comm.rank()));
        } else if constexpr (std::same_as<Comm, SelfCommunicator>) {
            return Comm{};
        } else {
            return (comm); // the assertion has explained the error
        }
    }
    using Own = decltype(split(std::declval<Comm&>()));

public:
    using device_type = typename detail::device_type_of<Own>::type;

    /// Collective, blocks: splits `comm`.
    explicit ShadowedCommunicator(Comm& comm) : parent_{comm}, own_{split(comm)}, control_{own_} {}

    [[nodiscard]] int rank() const { return own_.rank(); }
    [[nodiscard]] int size() const { return own_.size(); }

    /// Combines `buffer` over all ranks, in place.
    /// @throws Mismatch, ContractViolation  see above.
    /// @throws what PendingRound::wait and the communicator throw.
    auto all_reduce(Buffer buffer, ReduceOp op) {
        announce({Step::Kind::all_reduce, buffer.count, buffer.dtype, op});
        return own_.all_reduce(buffer, op);
    }
    /// Copies the buffer of `root` to all ranks.
    /// @throws ContractViolation  `root` has joined and has nothing to send.
    /// @throws what all_reduce() throws.
    auto broadcast(Buffer buffer, int root) {
        announce({Step::Kind::broadcast, buffer.count, buffer.dtype, ReduceOp::sum, root});
        return own_.broadcast(buffer, root);
    }
    /// Blocks until every active rank has called it and every joined rank has followed. Throws what
    /// all_reduce() throws.
    void barrier() {
        announce({Step::Kind::barrier});
        own_.barrier();
    }

    /// Local. Aborts this communicator, not the one that it was split from.
    void abort(AbortReason reason)
        requires detail::has_abort<Own>
    {
        own_.abort(std::move(reason));
    }
    [[nodiscard]] bool is_aborted() const
        requires detail::has_abort<Own>
    {
        return own_.is_aborted();
    }
    [[nodiscard]] std::optional<AbortReason> abort_reason() const
        requires detail::has_abort_reason<Own>
    {
        return own_.abort_reason();
    }
    /// Local; for waits that start later. Returns the deadline that was in force.
    std::chrono::nanoseconds set_deadline(std::chrono::nanoseconds deadline)
        requires detail::has_set_deadline<Own>
    {
        return own_.set_deadline(deadline);
    }
    [[nodiscard]] std::vector<int> missing_ranks() const
        requires detail::has_missing_ranks<Own>
    {
        return own_.missing_ranks();
    }
    [[nodiscard]] device_type& device_memory()
        requires(!detail::reduces_host_memory<Own>)
    {
        return own_.device_memory();
    }

private:
    using Step = detail::ModelStep;

    [[nodiscard]] void const* parent() const noexcept override {
        return detail::identity_of(parent_);
    }

    // -- active ranks ----------------------------------------------------------------------------

    void announce(Step const& next) {
        std::optional<Round> const round = detail::enter_round(this->rounds(), parent());
        if (!round || round->active_count() == own_.size()) {
            return;
        }
        if (next.root < 0 || next.root >= own_.size()) {
            return; // the communicator refuses it
        }
        if (next.kind == Step::Kind::broadcast && !round->is_active(next.root)) {
            throw ContractViolation{detail::concat(
                "broadcast from rank ",
                next.root,
                " over a shadowed() communicator, but that rank has run out of inputs; broadcast from an "
                "active rank, as Round::buffer_source() is"
            )};
        }
        static_cast<void>(exchange(next, *round));
    }
    void end_section(Round const& round) override {
        if (round.active_count() != own_.size()) {
            static_cast<void>(exchange({}, round));
        }
    }

    /// Collective. Returns the step that all active ranks announce. Joined ranks announce none.
    Step exchange(Step const& step, Round const& round) {
        std::array<std::uint64_t, 2 + detail::HashAgreement::words> sum{};
        if (!round.is_shadow()) {
            sum[0] = step.word();
            sum[1] = step.count;
            detail::HashAgreement::write(&sum[2], detail::Hash{}.add(sum[0]).add(sum[1]).value());
        }
        control_.sum(sum);
        auto const ranks = static_cast<std::uint64_t>(round.active_count());
        if (!detail::HashAgreement::is_common(&sum[2], ranks)) {
            AgreementList list;
            list.add("collectives within the passes differ: the next one", step.text());
            detail::DifferenceReport report{
                control_, round.buffer_source(), ranks, !round.is_shadow()
            };
            detail::throw_failure(report.difference(list));
        }
        return Step::of(sum[0] / ranks, sum[1] / ranks);
    }

    // -- joined ranks ----------------------------------------------------------------------------

    void follow(Round const& round) override {
        struct Dropped { // if an exception leaves this function
            ~Dropped() { replayed.drop(); }
            detail::ReplayedCollectives<Own>& replayed;
        } const dropped{replayed_};
        try {
            replay_section(round);
        } catch (Mismatch const&) {
            // Destroyed before it is complete, a work would abort. Ranks that still ask for the difference would
            // then hear of this rank instead.
            try {
                replayed_.wait();
            } catch (Error const&) { // NOLINT(bugprone-empty-catch): the difference is the reason
            }
            throw;
        }
        replayed_.wait();
    }
    void replay_section(Round const& round) {
        for (;;) {
            Step const next = exchange({}, round);
            switch (next.kind) {
            case Step::Kind::all_reduce:
                replayed_.all_reduce(next.count, next.dtype, next.op);
                break;
            case Step::Kind::broadcast:
                replayed_.broadcast(next.count, next.dtype, next.root);
                break;
            case Step::Kind::barrier: own_.barrier(); break;
            case Step::Kind::section_end: return;
            }
        }
    }

    Comm& parent_;
    detail::ReplayedCollectives<Own> replayed_{own_}; ///< its memory outlives the communicator
    Own own_;
    detail::ControlOver<Own&> control_;
};

/// Collective, blocks. Makes a communicator of the same ranks for collectives within the passes of a model:
/// see ShadowedCommunicator. Give it to attach_collectives() of the participant that runs the passes, before
/// the guard.
template <class Comm>
[[nodiscard]] ShadowedCommunicator<Comm> shadowed(Comm& comm) {
    return ShadowedCommunicator<Comm>{comm};
}

}} // namespace joinable::v0
