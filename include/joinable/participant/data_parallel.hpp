// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/agreement/agree.hpp>
#include <joinable/agreement/agreement_list.hpp>
#include <joinable/bucket/all_reduce.hpp>
#include <joinable/bucket/broadcast_coalesced.hpp>
#include <joinable/bucket/reducer.hpp>
#include <joinable/bucket/timeline.hpp>
#include <joinable/communicator/control.hpp>
#include <joinable/communicator/device_of.hpp>
#include <joinable/communicator/model_table.hpp>
#include <joinable/detail/failure.hpp>
#include <joinable/join/joinable.hpp>
#include <joinable/join/parameter_claims.hpp>
#include <joinable/participant/detail/model_checks.hpp>
#include <joinable/participant/gradient_participant.hpp>
#include <joinable/participant/options.hpp>
#include <joinable/participant/saved_model.hpp>

namespace joinable { inline namespace v0 {

namespace detail {

template <class T, class Comm, class Reduction>
concept describes_model =
    std::convertible_to<T, BufferList> || std::convertible_to<T, DataParallelOptions> ||
    (std::convertible_to<T, Reduction> && BucketReduction<Reduction, Comm>);

/// The refresh() of a participant. Stands for that of <joinable/refresh.hpp>.
template <class Participant>
struct Refresh {
    template <class... Lists>
    static void run(Participant&, Lists&&...) {
        static_assert(sizeof...(Lists) > 99, "refresh(): include <joinable/refresh.hpp>");
    }
};

/// Checks the communicator before a base class does.
template <class Comm, class Reduction, class Times>
struct ParticipantOver {
    static_assert(models_communicator<Comm>());
    static_assert(
        !Timeline<Reduction>,
        "DistributedDataParallel: a timeline is the third template argument, as in "
        "DistributedDataParallel<Comm, AllReduce, TraceTimeline>"
    );
    using type = GradientParticipant<Comm, Reducer<Comm, Reduction, Times>>;
};

} // namespace detail

/// Keeps the replicas of a model equal. Parameters start with rank 0's values, and gradients are
/// averaged while the backward pass runs. In a guard joined ranks shadow and receive the same
/// averages.
///
/// @code
/// joinable::DistributedDataParallel ddp{comm, model.parameters()};
/// ddp.forward([&] { loss = model.forward(batch); }, {.weight = batch.size()});
/// ddp.backward([&](auto ready) { model.backward(ready); }); // ready(i): gradient i is final
/// @endcode
///
/// An engine with its own hooks calls the verbs: prepare_for_forward, prepare_for_backward,
/// mark_ready, finalize_backward. The average is over the initial world, over the active ranks
/// (divide_by_initial_world_size = false), or by weight if notices carry one. `Reduction` defines
/// how a bucket travels, see BucketReduction. `Times` is notified when rounds and buckets begin and
/// end.
///
/// Zero gradients before the pass or after the step. A joined rank runs neither. Its gradients hold
/// the averages of the others' rounds until the guard ends, and are then zeroed, so that its first
/// pass in the next guard starts from zeros (DataParallelOptions::joined_gradients). If the body of
/// a Step zeros gradients after the step, it does so on joined ranks as well.
template <class Comm, class Reduction = AllReduce, Timeline Times = NoTimeline>
class DistributedDataParallel : public detail::ParticipantOver<Comm, Reduction, Times>::type {
    using Base = typename detail::ParticipantOver<Comm, Reduction, Times>::type;

public:
    /// Collective. `parameters` is a range that joinable::parameters() takes, or its result;
    /// `buffers` is the result of joinable::buffers(). All ranks agree on counts, extents, dtypes
    /// and options, then take rank 0's values.
    /// @throws ContractViolation  Reducer refuses the arguments, a buffer is missing, on another
    ///         device, or has elements that share memory (a stride of 0), or thread ranks train the
    ///         same memory; the other ranks throw PeerFailed, as after any other local failure, such
    ///         as std::bad_alloc.
    /// @throws Mismatch  ranks have different options or models; the text names the first option,
    ///         parameter or buffer that differs, with both values.
    template <class Parameters>
    DistributedDataParallel(
        Comm& comm,
        Parameters&& parameters,
        BufferList buffers,
        DataParallelOptions const& options = {},
        Reduction reduction = {}
    )
        : DistributedDataParallel{
              std::function<ParameterList()>{[&] {
                  require_no_names(options);
                  return joinable::parameters(std::forward<Parameters>(parameters));
              }},
              comm,
              std::move(buffers),
              options,
              std::move(reduction)
          } {}

    /// A model without buffers.
    template <class Parameters>
    DistributedDataParallel(
        Comm& comm,
        Parameters&& parameters,
        DataParallelOptions const& options = {},
        Reduction reduction = {}
    )
        : DistributedDataParallel{
              comm,
              std::forward<Parameters>(parameters),
              joinable::buffers(),
              options,
              std::move(reduction)
          } {}
    /// With default options. The type is deduced, so that {} is never taken as a reduction.
    template <class Parameters, class R, std::enable_if_t<std::is_same_v<R, Reduction>, int> = 0>
    DistributedDataParallel(Comm& comm, Parameters&& parameters, BufferList buffers, R reduction)
        : DistributedDataParallel{
              comm,
              std::forward<Parameters>(parameters),
              std::move(buffers),
              DataParallelOptions{},
              std::move(reduction)
          } {}
    template <class Parameters, class R, std::enable_if_t<std::is_same_v<R, Reduction>, int> = 0>
    DistributedDataParallel(Comm& comm, Parameters&& parameters, R reduction)
        : DistributedDataParallel{
              comm,
              std::forward<Parameters>(parameters),
              joinable::buffers(),
              DataParallelOptions{},
              std::move(reduction)
          } {}

    /// Explains an argument in the place of buffers or options that is neither.
    template <
        class Parameters,
        class Other,
        class... Rest,
        // No requires clause: clang 14 ignores it in the implicit deduction guide.
        std::enable_if_t<!detail::describes_model<Other, Comm, Reduction>, int> = 0>
    DistributedDataParallel(Comm& comm, Parameters&& parameters, Other&&, Rest&&...)
        : DistributedDataParallel{comm, std::forward<Parameters>(parameters)} {
        static_assert(
            detail::describes_model<Other, Comm, Reduction>,
            "DistributedDataParallel: after the parameters come buffers(ranges...), if the model "
            "has any, then options in braces with the names and the order of DataParallelOptions"
        );
    }

    /// Lists the model again, after parameters became trainable or frozen or were added, or after their values have
    /// other types or extents. Needs <joinable/refresh.hpp>. Without arguments it lists the same parameters and
    /// buffers; refresh(parameters) takes others, and refresh(parameters, buffers) other buffers as well. Collective,
    /// outside a guard and a round, on all ranks in the same way.
    ///
    /// Ranks compare what the constructor compares. With sync_at_start, parameters that are new or newly trained take
    /// rank 0's values, and so do the buffers that are given. Buckets are cut anew, by the options and the reduction of the constructor;
    /// orders and a static graph that were recorded are forgotten. A parameter is the one of the same name, or, without a
    /// name, the one whose value is at the same address, unless that one has other memory now: what a reduction keeps of it moves along, if dtype and extents
    /// are the same, and is dropped where it is not trained any more. Attached state stays. Those that were listed before
    /// must exist until this returns; one that is left out while its gradient (or, with parameters_as_bucket_view, its
    /// value) lies in a bucket must live as long as this object. A gradient that lies in a bucket stays readable where it
    /// is frozen now.
    /// @throws ContractViolation  in a guard or a round; gradients hold batches that no round has reduced, and are not all
    ///         absent or zeros; or what the constructor throws. The other ranks throw PeerFailed.
    /// @throws Mismatch  ranks list different models, or other ranks do something else. After this and a
    ///         ContractViolation the model is as it was before.
    template <class... Lists>
    void refresh(Lists&&... lists) {
        detail::Refresh<DistributedDataParallel>::run(*this, std::forward<Lists>(lists)...);
    }

    [[nodiscard]] std::vector<Bucket> const& buckets() const noexcept {
        return reducer_->buckets();
    }
    /// Whether they will be cut anew, by the order in which gradients became ready. Local.
    [[nodiscard]] bool is_rebuild_due() const noexcept { return reducer_->is_rebuild_due(); }
    /// See Reducer::copies_without_need().
    [[nodiscard]] bool copies_without_need() const { return reducer_->copies_without_need(); }
    [[nodiscard]] DataParallelOptions const& options() const noexcept { return module_->options(); }
    [[nodiscard]] Reduction& reduction() noexcept { return reducer_->reduction(); }
    [[nodiscard]] Times& timeline() noexcept { return reducer_->timeline(); }

    /// The divisor of the last average: the number of all ranks, or of those that contributed, or the
    /// sum of weights. 0 if nothing was averaged yet, or these weights summed to 0. Local.
    [[nodiscard]] double divisor() const noexcept {
        return leaves_gradients_local() ? 0 : averaging_.last_divisor;
    }
    /// Whether an enabled guard has had this model, so that ranks may have different numbers of inputs. Local.
    [[nodiscard]] bool has_had_guard() const noexcept { return has_had_guard_; }
    /// Calls `report` after every DataParallelOptions::report_every rounds that train and sync, counted from
    /// here, also after those that this rank shadows. report_to() writes lines by it. An exception leaves the
    /// guard. Local, between rounds; each rank may choose. A null function ends the calls.
    /// @throws ContractViolation  report_every is 0.
    void set_report_hook(std::function<void()> report) {
        if (options().report_every == 0) {
            throw ContractViolation{
                "a report is written in every DataParallelOptions::report_every rounds, but that is 0, which is never; "
                "set it on all ranks"
            };
        }
        this->set_report(std::move(report));
    }

    using Base::leaves_gradients_local;
    [[nodiscard]] std::string_view join_name() const noexcept { return "DistributedDataParallel"; }
    /// Lists the options and the model. Models whose parameters are listed in another order differ.
    void agree_on(AgreementList& list) const {
        module_->agree_on(list);
        detail::agree_on_reduction(list, reducer_->reduction());
        list.add("model", this->name_);
        model_collectives_.agree_on(list);
    }
    /// For Checkpoint: what it writes, and where it reads to. Local, between rounds.
    [[nodiscard]] detail::SavedModel saved() {
        detail::SavedModel saved = module_->saved();
        if constexpr (detail::saves_state<Reduction>) {
            detail::agree_on_reduction(saved.settings, reducer_->reduction());
            reducer_->reduction().save(saved.reduction);
            saved.order.assign(reducer_->order().begin(), reducer_->order().end());
        }
        return saved;
    }
    /// Whether `order` is one of the parameters that these buckets have. Local.
    [[nodiscard]] bool is_order(std::span<std::uint64_t const> order) const {
        return reducer_->is_order(order);
    }
    /// For Checkpoint, once what saved() listed has the contents of a file: continues with the buckets of the training
    /// that wrote it, in this order; empty: with those that are there. Local, between rounds.
    void resume(std::span<std::uint64_t const> order) {
        if (!order.empty()) {
            reducer_->take_order(order);
        }
        if constexpr (detail::saves_state<Reduction>) {
            ReductionState state;
            reducer_->reduction().save(state);
            reducer_->reduction().load(state);
        }
    }
    /// For GuardView::averaged.
    void list_averaged(std::vector<void const*>& values) const {
        for (AnyParameter const& parameter : reducer_->parameters()) {
            if (parameter.requires_grad() && !leaves_gradients_local()) {
                values.push_back(parameter.value().data());
            }
        }
    }
    /// The values of gradients that stay local may be averaged by another participant.
    void list_claims(ParameterClaims& claims) const {
        ParameterList const& parameters = reducer_->parameters();
        if constexpr (leaves_gradients_local()) {
            for (std::size_t i = 0; i < parameters.size(); ++i) {
                if (parameters[i].requires_grad()) {
                    claims.add_averaged(parameters[i].grad(), i);
                }
            }
        } else {
            claims.add_averaged(parameters);
        }
    }
    /// @throws ContractViolation  joined ranks leave their gradients untouched, but other
    ///         participants use them; or nothing is averaged, but weights are given.
    void check_guard(GuardView const& guard) const {
        if (leaves_gradients_local()) {
            if (guard.weighs) {
                throw ContractViolation{
                    "JoinOptions::weight_per_input weighs averages, but NoReduction averages nothing; leave it out"
                };
            }
            return;
        }
        char const* const why =
            guard.carries_accumulated
                ? "JoinedGradients::untouched leaves on a joined rank what it accumulated, which the "
                  "guard would reduce as well; give it {.carry_accumulated = false}"
            : guard.steps
                ? "JoinedGradients::untouched keeps averages from joined ranks, so a Step or a "
                  "sharded optimizer beside it would step by old gradients; leave the option out"
                : nullptr;
        if (module_->options().joined_gradients == JoinedGradients::untouched && why != nullptr) {
            throw ContractViolation{why};
        }
    }

protected:
    /// All types of parameters share this constructor. `list_parameters` may throw; the other ranks learn of it.
    DistributedDataParallel(
        std::function<ParameterList()> const& list_parameters,
        Comm& comm,
        BufferList buffers,
        DataParallelOptions options,
        Reduction reduction
    )
        : Base{comm, state_, options.gradient_kind, false, true} {
        detail::require_unguarded(
            detail::identity_of(comm), "a DistributedDataParallel that is made"
        );
        list_model(list_parameters, std::move(buffers), options, {}, &reduction);
    }

private:
    /// The steps of refresh() between those by which a model is made.
    struct Relisting {
        std::shared_ptr<Reduction> reduction; ///< of the model before, like the next one
        std::shared_ptr<Times> timeline;
        /// May throw. Adds to what ranks compare.
        std::function<void(ParameterList const& list, AgreementList& compared)> compare;
        std::function<bool(std::size_t i)> is_equal; ///< on all ranks: the value of parameter i
        std::function<void()> accept;                ///< all ranks have accepted the list
    };

    void list_model(
        std::function<ParameterList()> const& list_parameters,
        BufferList buffers,
        DataParallelOptions options,
        Relisting const& again,
        Reduction* reduction = nullptr ///< of a model that is made
    ) {
        Comm& comm = this->comm_;
        detail::ModelEntry entry{comm};
        AgreementList compared;
        std::optional<detail::CoalescedBroadcast> start;
        std::exception_ptr const error = detail::exception_of([&] {
            ParameterList const list = list_parameters();
            Device& device = detail::device_of(comm);
            detail::check_parameters(list, device.id());
            check_options(options);
            auto const shared = reduction == nullptr
                                    ? again.reduction
                                    : std::make_shared<Reduction>(std::move(*reduction));
            compared.begin_section("options differ: ");
            detail::add_requested_checks(compared, options, !leaves_gradients_local(), device);
            detail::agree_on(compared, options);
            detail::agree_on_reduction(compared, *shared);
            std::string model = detail::agree_on_model(compared, list, device, buffers);
            module_ = std::make_unique<detail::ModuleState<Comm>>(
                comm, list, std::move(buffers), options
            );
            if (again.compare) {
                again.compare(list, compared);
            }
            BucketOptions const buckets = detail::bucket_options(options);
            detail::BufferMemory const memory{comm};
            auto const rank = static_cast<int>(comm.rank());
            auto const size = static_cast<int>(comm.size());
            constexpr bool sends = detail::sends_runs<Reduction>;
            auto gradients = detail::gradients_in_buckets(list, buckets, rank, size, memory, sends);
            reducer_ = std::make_unique<Reducer<Comm, Reduction, Times>>(
                comm,
                shared,
                std::move(gradients),
                buckets,
                again.timeline ? again.timeline : std::make_shared<Times>()
            );
            listed_ = std::make_unique<detail::ListedModel>(list, true);
            if (options.verify_ready) {
                ready_check_ = std::make_unique<detail::ReadyCheck>(
                    list, device, detail::CheckedMarks::after_pass
                );
            }
            if (options.verify_replicas != 0) {
                replica_check_ =
                    std::make_unique<detail::ReplicaCheck>(list, device, options.verify_replicas);
            }
            if (options.sync_at_start) {
                start.emplace(module_->plan_sync(again.is_equal));
            }
            entry.enter(list, options.shares_values);
            this->name_ = std::move(model);
        });
        detail::ControlOver<Comm&> control{comm};
        detail::agree(control, compared, error);
        entry.leave();
        // After all ranks have accepted the model.
        detail::abort_if_throws(comm, [&] {
            if (again.accept) {
                again.accept();
            }
            reducer_->take_gradients();
        });
        reducer_->register_memory();
        if (start) {
            start->run(comm, 0);
        }
    }

    static void require_no_names(DataParallelOptions const& options) {
        if (!options.ignore.empty() || !options.sparse.empty()) {
            throw ContractViolation{
                "DataParallelOptions::ignore and sparse name tensors of a module, which only "
                "joinable::torch::DistributedDataParallel has; list the parameters and buffers that are averaged and sent, "
                "without the others, and let parameter_traits::is_sparse tell which gradients are rows"
            };
        }
    }
    static void check_options(DataParallelOptions const& options) {
        char const* const why =
            !leaves_gradients_local() ? nullptr
            : options.sync_at_end
                ? "sync_at_end gives all ranks the values of one, but with NoReduction each rank has stepped its "
                  "own; turn it off, a PeriodicAverage averages them"
            : options.verify_replicas != 0
                ? "verify_replicas compares values, which with NoReduction differ on purpose; leave it out"
            : options.gradient_kind != GradientKind::mean
                ? "GradientKind::sum says how gradients are averaged, but NoReduction averages nothing; leave it out"
                : nullptr;
        if (why != nullptr) {
            throw ContractViolation{why};
        }
    }

    using Base::averaging_;
    using Base::has_had_guard_;
    using Base::listed_;
    using Base::model_collectives_;
    using Base::module_;
    using Base::ready_check_;
    using Base::reducer_;
    using Base::replica_check_;

    friend struct detail::Refresh<DistributedDataParallel>;

    JoinState state_;
    std::vector<std::unique_ptr<Reducer<Comm, Reduction, Times>>>
        former_; ///< by which refresh() was called: gradients may lie in its buckets
};

template <class Comm, class Parameters>
DistributedDataParallel(Comm&, Parameters&&, DataParallelOptions = {})
    -> DistributedDataParallel<Comm>;
template <class Comm, class Parameters>
DistributedDataParallel(Comm&, Parameters&&, BufferList, DataParallelOptions = {})
    -> DistributedDataParallel<Comm>;

template <class Comm, class Parameters, class Reduction>
    requires BucketReduction<Reduction, Comm>
DistributedDataParallel(Comm&, Parameters&&, Reduction) -> DistributedDataParallel<Comm, Reduction>;
template <class Comm, class Parameters, class Reduction>
    requires BucketReduction<Reduction, Comm>
DistributedDataParallel(Comm&, Parameters&&, DataParallelOptions, Reduction)
    -> DistributedDataParallel<Comm, Reduction>;
template <class Comm, class Parameters, class Reduction>
    requires BucketReduction<Reduction, Comm>
DistributedDataParallel(Comm&, Parameters&&, BufferList, Reduction)
    -> DistributedDataParallel<Comm, Reduction>;
template <class Comm, class Parameters, class Reduction>
    requires BucketReduction<Reduction, Comm>
DistributedDataParallel(Comm&, Parameters&&, BufferList, DataParallelOptions, Reduction)
    -> DistributedDataParallel<Comm, Reduction>;

/// Makes a DistributedDataParallel that is kept by a pointer, without naming its type. Collective; see the
/// constructor. std::make_unique cannot deduce the arguments of a class template. A member that is made in
/// the constructor's list, or a std::optional, needs no pointer.
template <class Comm, class Parameters>
[[nodiscard]] std::unique_ptr<DistributedDataParallel<Comm>> make_data_parallel(
    Comm& comm, Parameters&& parameters, BufferList buffers, DataParallelOptions const& options = {}
) {
    return std::make_unique<DistributedDataParallel<Comm>>(
        comm, std::forward<Parameters>(parameters), std::move(buffers), options
    );
}
/// A model without buffers.
template <class Comm, class Parameters>
[[nodiscard]] std::unique_ptr<DistributedDataParallel<Comm>>
make_data_parallel(Comm& comm, Parameters&& parameters, DataParallelOptions const& options = {}) {
    return joinable::make_data_parallel(
        comm, std::forward<Parameters>(parameters), joinable::buffers(), options
    );
}

namespace detail {

/// Stands for the communicator if options in braces have a wrong name.
template <class Options>
struct MisspeltOptions {
    static_assert(
        !std::is_same_v<Options, DataParallelOptions>,
        "DistributedDataParallel: after the parameters come buffers(ranges...), if the model has any, "
        "then options in braces with the names and the order of DataParallelOptions; write "
        "DataParallelOptions{...} to be told which name is wrong"
    );
};

} // namespace detail

/// The class that a model with such options becomes. It holds only the explanation.
template <class Options>
class DistributedDataParallel<detail::MisspeltOptions<Options>> : detail::MisspeltOptions<Options> {
public:
    template <class... Arguments>
    explicit DistributedDataParallel(Arguments&&...);
    explicit DistributedDataParallel(...);
};
/// `...` takes braces with a misspelt name.
DistributedDataParallel(detail::AnyArgument, detail::AnyArgument, ...)
    -> DistributedDataParallel<detail::MisspeltOptions<DataParallelOptions>>;

}} // namespace joinable::v0
