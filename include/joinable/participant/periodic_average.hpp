// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <joinable/agreement/agree.hpp>
#include <joinable/agreement/agreement_list.hpp>
#include <joinable/bucket/broadcast_coalesced.hpp>
#include <joinable/bucket/bucket.hpp>
#include <joinable/bucket/memory.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/control.hpp>
#include <joinable/communicator/device_of.hpp>
#include <joinable/communicator/failure_report.hpp>
#include <joinable/communicator/model_table.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>
#include <joinable/hook/join_hook.hpp>
#include <joinable/hook/ordering.hpp>
#include <joinable/join/joinable.hpp>
#include <joinable/join/parameter_claims.hpp>
#include <joinable/participant/detail/model_checks.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/dtype.hpp>
#include <joinable/tensor/parameters.hpp>

namespace joinable { inline namespace v0 {

struct PeriodicAverageOptions {
    std::uint64_t start = 0;  ///< rounds without an average before the first period begins
    std::uint64_t period = 4; ///< rounds from one average to the next; at least 1
    std::size_t bucket_bytes = std::size_t{25} << 20U; ///< of the values that travel together
};

/// Averages the values of a model now and then, in place of its gradients in each round: local SGD. Each rank steps by its
/// own gradients. Source: Stich, "Local SGD Converges Fast and Communicates Little", 2019. PyTorch's
/// PeriodicModelAverager counts from its warm-up on, and does not weigh.
///
/// Active ranks call step() once in every training round, after their optimizer. Every `period`-th round, after the first
/// `start`, all ranks get the average of the values, each rank's weighted by how often it stepped since the last average:
/// the first one comes after `start + period` rounds. Joined ranks receive it, and contribute what they stepped before they
/// joined. finish() of a guard averages what is left; after a guard that is not enabled or ended early, and outside of
/// guards, average() does. Frozen parameters are not averaged, nor is the state of an optimizer. Parameters need no
/// gradients. Values of 16 bits are rounded when they are weighted, and again as a sum. Memory: the values once more.
template <Communicator Comm>
class PeriodicAverage {
public:
    /// Collective. All ranks agree on parameters and options, then take rank 0's values. `parameters` is a range that
    /// joinable::parameters() takes, or its result; `comm` and what it refers to must outlive this.
    /// @throws ContractViolation  the period is 0, a value is missing or on another device, a trained one is of
    ///         integers, thread ranks train the same memory, or the device has no kernels that scale; the other ranks
    ///         throw PeerFailed.
    /// @throws Mismatch  ranks have different options or models.
    template <class Parameters>
    PeriodicAverage(Comm& comm, Parameters&& parameters, PeriodicAverageOptions const& options = {})
        : comm_{comm}, options_{options}, control_{comm} {
        detail::require_unguarded(detail::identity_of(comm), "a PeriodicAverage that is made");
        detail::ModelEntry entry{comm};
        AgreementList compared;
        std::optional<detail::CoalescedBroadcast> values;
        std::exception_ptr const error = detail::exception_of([&] {
            parameters_ = joinable::parameters(std::forward<Parameters>(parameters));
            check();
            listed_.emplace(parameters_, true);
            compared.begin_section("options differ: ");
            compare_options(compared);
            model_ = detail::agree_on_model(compared, parameters_, detail::device_of(comm));
            layout_ = BucketLayout{
                parameters_,
                detail::expected_ready_order(parameters_),
                std::vector<std::size_t>{options.bucket_bytes},
                detail::BufferMemory{comm},
                [](ParameterList const& list, std::size_t i) { return list[i].value(); }
            };
            works_ = std::vector<std::optional<work_of<Comm>>>(layout_.buckets().size());
            values.emplace(
                detail::values_of(parameters_),
                options.bucket_bytes,
                "value",
                detail::BufferMemory{comm}
            );
            entry.enter(parameters_, false);
        });
        detail::agree(control_, compared, error);
        entry.leave();
        values->run(comm, 0);
    }

    /// This rank has stepped. Collective in a round that averages; else only the notification.
    /// It counts, also if it throws. After an error other than the following one go on with skip().
    /// @throws ContractViolation  a parameter that was frozen when this was made is trained now, or a value has another
    ///         dtype, other extents or another device; the other ranks throw PeerFailed. Call average() before such a
    ///         change, then make a new one. Outside of an enabled guard this aborts the communicator.
    /// @throws what the communicator throws.
    void step() { take_part(1); }
    /// The same for a rank that has not stepped in this round, because its batch failed.
    void skip() { take_part(0); }

    /// Averages what ranks have stepped since the last average, before its turn. Collective; outside of guards, or in
    /// one that is not enabled.
    /// @throws ContractViolation  the communicator is in an enabled guard, whose finish() does it; or a value has another
    ///         dtype, other extents or another device, then the other ranks throw PeerFailed and the communicator is aborted.
    void average() {
        detail::require_unguarded(detail::identity_of(comm_), "PeriodicAverage::average()");
        detail::abort_if_throws(comm_, [&] { average_values(); });
    }

    /// Rounds in which active ranks called step() or skip().
    [[nodiscard]] std::uint64_t rounds() const noexcept { return rounds_; }

    class Hook {
    public:
        using runs_after = labels_of<labels::gradients, labels::step>;

        explicit Hook(PeriodicAverage& average) noexcept : average_{average} {}
        static bool takes_part(Round const& round) noexcept {
            return round.phase() == Phase::train;
        }
        void main_hook() { average_.end_round(); }
        void post_hook(bool) { average_.average_values(); }

    private:
        PeriodicAverage& average_;
    };

    [[nodiscard]] Hook join_hook(arguments<keywords<>> const&) noexcept { return Hook{*this}; }
    [[nodiscard]] Comm& join_communicator() noexcept { return comm_; }
    [[nodiscard]] JoinState& join_state() noexcept { return state_; }
    [[nodiscard]] std::string_view join_name() const noexcept { return "PeriodicAverage"; }
    static constexpr std::string_view join_verb = "step() or skip()";
    void agree_on(AgreementList& list) const {
        compare_options(list);
        list.add("rounds", rounds_);
        list.add("model", model_);
    }
    void list_claims(ParameterClaims& claims) const { claims.add_averaged_values(parameters_); }
    /// For guards: a Step beside it runs on active ranks only.
    [[nodiscard]] static constexpr bool leaves_gradients_local() noexcept { return true; }

private:
    void check() const {
        if (options_.period == 0) {
            throw ContractViolation{
                "PeriodicAverage: period is 0; give the rounds from one average to the next"
            };
        }
        detail::check_parameters(parameters_, detail::device_of(comm_).id());
        for (std::size_t i = 0; i < parameters_.size(); ++i) {
            AnyParameter const& parameter = parameters_[i];
            if (parameter.requires_grad() && !is_floating_point(parameter.value().dtype())) {
                throw ContractViolation{detail::concat(
                    detail::describe_parameter(parameters_, i),
                    " is of ",
                    name_of(parameter.value().dtype()),
                    ": values are averaged, which needs floating point; set its requires_grad to false"
                )};
            }
        }
        if (!detail::device_of(comm_).can_scale()) {
            throw ContractViolation{
                "PeriodicAverage multiplies values, but the kernels of the device are missing; give it its kernels, see "
                "Device"
            };
        }
    }
    void compare_options(AgreementList& list) const {
        list.add("PeriodicAverage::start", options_.start);
        list.add("PeriodicAverage::period", options_.period);
        list.add("PeriodicAverage::bucket_bytes", options_.bucket_bytes);
    }

    void take_part(std::uint64_t steps) {
        steps_ += steps; // the optimizer has stepped, whatever comes
        auto const require_same = [&] { listed_->require_same(join_name(), false); };
        auto const take_turn = [&] {
            Round const round = notify_join_context(*this);
            detail::run_part(*this, round, [&] { end_round(); });
        };
        if (detail::session_of(state_) != nullptr) {
            detail::run_then(*this, require_same, take_turn);
        } else { // no roll call tells the others
            detail::abort_if_throws(comm_, require_same);
            take_turn();
        }
    }
    void end_round() {
        ++rounds_;
        if (rounds_ > options_.start && (rounds_ - options_.start) % options_.period == 0) {
            average_values();
        }
    }
    /// All ranks get the average over those that stepped. Nothing, if none did.
    void average_values() {
        for (Bucket const& bucket : layout_.buckets()) { // before others write an average
            for (std::size_t const i : bucket.parameters) {
                if (!parameters_[i].is_as(listed_->listed()[i])) {
                    listed_->require_same(i, join_name(), false);
                }
            }
        }
        std::uint64_t total = steps_;
        control_.sum({&total, 1});
        if (total == 0) {
            return;
        }
        double const factor = static_cast<double>(steps_) / static_cast<double>(total);
        Device& device = detail::device_of(comm_);
        std::vector<Bucket> const& buckets = layout_.buckets();
        for (std::size_t b = 0; b < buckets.size(); ++b) {
            for (std::size_t k = 0; k < buckets[b].views.size(); ++k) {
                AnyView const& place = buckets[b].views[k];
                if (steps_ == 0) { // whatever its values are
                    device.fill_zero(place);
                } else {
                    device.scale_copy(value_of(buckets[b], k), factor, place);
                }
            }
            device.submit();
            static_cast<void>(works_[b].emplace(comm_.all_reduce(buckets[b].buffer, ReduceOp::sum))
            );
        }
        for (std::size_t b = 0; b < buckets.size(); ++b) {
            works_[b]->wait();
            works_[b].reset();
            for (std::size_t k = 0; k < buckets[b].views.size(); ++k) {
                device.copy(buckets[b].views[k], value_of(buckets[b], k));
            }
        }
        device.finish();
        steps_ = 0;
    }
    [[nodiscard]] AnyView value_of(Bucket const& bucket, std::size_t k) const {
        return parameters_[bucket.parameters[k]].value();
    }

    Comm& comm_;
    PeriodicAverageOptions options_;
    ParameterList parameters_;
    std::optional<detail::ListedModel> listed_;
    std::string model_; ///< in the form that guards compare
    BucketLayout layout_;
    std::uint64_t rounds_ = 0;
    std::uint64_t steps_ = 0; ///< of this rank, since the last average
    JoinState state_;
    // Destroyed first, because they use the memory of the members above.
    detail::ControlOver<Comm&> control_;
    std::vector<std::optional<work_of<Comm>>> works_;
};

template <class Comm, class Parameters>
PeriodicAverage(Comm&, Parameters&&, PeriodicAverageOptions = {}) -> PeriodicAverage<Comm>;

}} // namespace joinable::v0
