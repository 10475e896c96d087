// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include <joinable/bucket/broadcast_coalesced.hpp>
#include <joinable/bucket/reducer.hpp>
#include <joinable/joinable.hpp>
#include <joinable/participant/verify.hpp>

namespace joinable::inline v0 {

/// Keyword of a guard with a DistributedDataParallel: whether gradients are divided by the number
/// of all ranks (true, the default) or of the ranks that are still active. Weights win over it.
inline constexpr struct divide_by_initial_world_size_t
    : keyword<divide_by_initial_world_size_t, bool> {
    using keyword::operator=;
} divide_by_initial_world_size{};

/// Keeps the replicas of a model in step: parameters start as rank 0's, gradients are averaged
/// while the backward pass runs, and in a guard joined ranks shadow and receive the same averages.
///
/// @code
/// joinable::DistributedDataParallel ddp{comm, model.parameters()};
/// ddp.forward([&] { loss = model.forward(batch); }, {.weight = batch.size()});
/// ddp.backward([&](auto ready) { model.backward(ready); }); // ready(i): gradient i is final
/// @endcode
///
/// An engine with hooks of its own calls the verbs: prepare_for_forward, prepare_for_backward,
/// mark_ready, finalize_backward. The average is over the initial world, over the active ranks
/// (divide_by_initial_world_size = false), or by weight where notices carry one.
template <Communicator Comm>
class DistributedDataParallel {
public:
    /// Collective. `parameters` is a range that joinable::parameters() takes, or its result. All
    /// ranks agree on count, shapes, dtypes and options, then take rank 0's values.
    /// @throws ContractViolation  what Reducer refuses; the other ranks throw PeerFailed.
    /// @throws Mismatch  ranks have different models; the text names the first parameter.
    template <class Parameters>
    DistributedDataParallel(
        Comm& comm, Parameters&& parameters, DataParallelOptions const& options = {}
    )
        : comm_{comm}, gradient_kind_{options.gradient_kind} {
        std::exception_ptr error;
        ParameterList list;
        try {
            list = joinable::parameters(std::forward<Parameters>(parameters));
            check_parameters(list);
            reducer_.emplace(comm, list, options);
        } catch (...) {
            error = std::current_exception();
        }
        detail::ControlOver<Comm> control{comm};
        detail::agree_on_parameters(control, list, options, error);
        std::vector<AnyView> values;
        for (AnyParameter const& parameter : list) {
            values.push_back(parameter.value());
        }
        broadcast_coalesced(comm, values, broadcast_bytes, 0);
    }

    /// Announces a round and runs the forward pass, behind which the roll call hides.
    /// Returns what `pass` returns. Collective over the active ranks.
    template <class F>
    decltype(auto) forward(F&& pass, RoundNotice const& notice = {}) {
        prepare_for_forward(notice);
        return guarded(std::forward<F>(pass));
    }

    /// Runs the backward pass, averages gradients as they become ready, and waits for all of them.
    /// `pass` takes a callable `ready(i)`. In a round that does not sync it only runs the pass.
    template <class F>
    void backward(F&& pass) {
        prepare_for_backward();
        guarded([&] { std::forward<F>(pass)([this](std::size_t i) { mark_ready(i); }); });
        finalize_backward();
    }

    /// Collective over the active ranks; does not block in a round that syncs. Whether it syncs is
    /// what the round's opener said: under next() and iterate() the notice given there.
    /// @throws ContractViolation  the previous forward had no backward; see announce_round.
    void prepare_for_forward(RoundNotice const& notice = {}) {
        guarded([&] {
            if (stage_ != Stage::idle) {
                throw ContractViolation{
                    "a forward pass follows one without a backward pass; announce a round without "
                    "one with {.will_sync = false} or {.phase = Phase::evaluate}"
                };
            }
            pending_ = announce_round(*this, notice);
            syncs_ = pending_.will_sync();
            if (!syncs_ || pending_.is_answered()) {
                Round round = pending_.wait();
                syncs_ = round.will_sync();
                if (!syncs_) {
                    round.done(); // nothing is reduced: the part ends here
                }
            }
            stage_ = syncs_ ? Stage::forward : Stage::idle;
        });
    }

    /// Blocks until all ranks have opened the round. See PendingRound::wait for what throws;
    /// ContractViolation on all ranks if the weights sum to 0.
    void prepare_for_backward() {
        guarded([&] {
            if (stage_ != Stage::forward && syncs_) {
                throw ContractViolation{"a backward pass needs a forward pass before it"};
            }
            if (syncs_) {
                round_ = pending_.wait();
                round_.hold();
                reducer_->prepare_for_backward(factor_of(round_));
                stage_ = Stage::backward;
            }
        });
    }

    /// See Reducer::mark_ready. Ignored in a round that does not sync.
    void mark_ready(std::size_t i) {
        if (syncs_) {
            guarded([&] { reducer_->mark_ready(i); });
        }
    }

    /// See Reducer::finalize_backward. Nothing in a round that does not sync.
    void finalize_backward() {
        if (syncs_) {
            guarded([&] {
                reducer_->finalize_backward();
                stage_ = Stage::idle;
                round_.done();
            });
        }
    }

    [[nodiscard]] std::vector<Bucket> const& buckets() const noexcept {
        return reducer_->buckets();
    }

    /// What joined ranks run: the same buckets with zeros, and the averages into their gradients.
    class Hook {
    public:
        using label = labels::gradients;
        static constexpr bool gives_notice = true;

        Hook(DistributedDataParallel& ddp, bool divides_by_initial_world_size) noexcept
            : ddp_{ddp},
              before_{
                  std::exchange(ddp.divides_by_initial_world_size_, divides_by_initial_world_size)
              } {}
        Hook(Hook const&) = delete;
        Hook& operator=(Hook const&) = delete;
        ~Hook() { ddp_.divides_by_initial_world_size_ = before_; }

        void main_hook(Round const& round) {
            if (round.will_sync()) {
                (void)ddp_.factor_of(round); // refuses what the active ranks refuse
                ddp_.reducer_->contribute_zeros();
            }
        }
        void post_hook(bool) noexcept {}

    private:
        DistributedDataParallel& ddp_;
        bool before_;
    };

    using join_keywords = keywords<divide_by_initial_world_size_t>;
    [[nodiscard]] Hook join_hook(arguments<join_keywords> const& args) {
        return Hook{*this, args.get(divide_by_initial_world_size, true)};
    }
    [[nodiscard]] Comm& join_communicator() noexcept { return comm_; }
    [[nodiscard]] JoinState& join_state() noexcept { return state_; }

private:
    enum class Stage : std::uint8_t { idle, forward, backward };
    static constexpr std::size_t broadcast_bytes = std::size_t{250} << 20U;

    static void check_parameters(ParameterList const& list) {
        std::vector<std::pair<void const*, std::size_t>> addresses;
        for (std::size_t i = 0; i < list.size(); ++i) {
            detail::check_value(list, i);
            if (AnyView const value = list[i].value(); value.numel() != 0) {
                addresses.emplace_back(value.data(), i);
            }
        }
        std::sort(addresses.begin(), addresses.end());
        auto const shared = std::adjacent_find(
            addresses.begin(),
            addresses.end(),
            [](auto const& a, auto const& b) { return a.first == b.first; }
        );
        if (shared != addresses.end()) {
            throw ContractViolation{detail::concat(
                detail::describe_parameter(list, shared->second),
                " and ",
                detail::describe_parameter(list, std::next(shared)->second),
                " share their storage; list a shared parameter once"
            )};
        }
    }

    /// What this rank's gradients are multiplied with, so that their sum is the average.
    double factor_of(Round const& round) {
        if (!round.is_weighted()) {
            return 1.0 / (divides_by_initial_world_size_ ? comm_.size() : round.active_count());
        }
        std::uint64_t total = round.weight_sum();
        if (!round.in_guard()) { // no roll call has summed the weights
            comm_.all_reduce(Buffer{&total, 1, DType::u64}, ReduceOp::sum).wait();
        }
        if (total == 0) {
            throw ContractViolation{
                "the weights of all ranks sum to 0: there is nothing to average in this round"
            };
        }
        double const own =
            gradient_kind_ == GradientKind::mean ? static_cast<double>(round.weight()) : 1.0;
        return own / static_cast<double>(total);
    }

    template <class F>
    decltype(auto) guarded(F&& verb) {
        try {
            return std::forward<F>(verb)();
        } catch (...) {
            if (stage_ == Stage::forward) { // no data moved: a new guard may go on with this model
                stage_ = Stage::idle;
            }
            record_failure(*this, {});
            throw;
        }
    }

    Comm& comm_;
    GradientKind gradient_kind_;
    std::optional<Reducer<Comm>> reducer_;
    PendingRound pending_;
    Round round_;
    Stage stage_ = Stage::idle;
    bool syncs_ = true;
    bool divides_by_initial_world_size_ = true;
    JoinState state_;
};

template <class Comm, class Parameters>
DistributedDataParallel(Comm&, Parameters&&) -> DistributedDataParallel<Comm>;
template <class Comm, class Parameters>
DistributedDataParallel(Comm&, Parameters&&, DataParallelOptions) -> DistributedDataParallel<Comm>;

} // namespace joinable::inline v0
