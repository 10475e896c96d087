// SPDX-License-Identifier: BSL-1.0
#pragma once

#if !defined(__linux__)
#error "<joinable/checkpoint.hpp> needs the files of Linux; elsewhere save zero.state()"
#endif

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/agreement/agree.hpp>
#include <joinable/agreement/agreement_list.hpp>
#include <joinable/agreement/on_all_ranks.hpp>
#include <joinable/checkpoint/detail/file.hpp>
#include <joinable/checkpoint/detail/model_layout.hpp>
#include <joinable/checkpoint/detail/safetensors.hpp>
#include <joinable/checkpoint/detail/settings.hpp>
#include <joinable/checkpoint/detail/tensor_part.hpp>
#include <joinable/checkpoint/detail/training_state.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/control.hpp>
#include <joinable/communicator/device_of.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/detail/type_name.hpp>
#include <joinable/device/arena.hpp>
#include <joinable/device/device.hpp>
#include <joinable/error.hpp>
#include <joinable/hook/keywords.hpp>
#include <joinable/hook/ordering.hpp>
#include <joinable/join/joinable.hpp>
#include <joinable/join/participants.hpp>
#include <joinable/optimizer/local_optimizer.hpp>
#include <joinable/optimizer/update_rule.hpp>
#include <joinable/participant/needs_header.hpp>
#include <joinable/participant/saved_model.hpp>
#include <joinable/participant/sharded/optimizer.hpp>
#include <joinable/reduction/reduce.hpp>
#include <joinable/tensor/any_view.hpp>
#include <joinable/tensor/parameters.hpp>
#include <joinable/tensor/reduce_op.hpp>
#include <joinable/tensor/tensor_list.hpp>

namespace joinable { inline namespace v0 {

/// Options of a Checkpoint. The same on every rank.
struct CheckpointOptions {
    std::size_t every = 1; ///< a file is written in every `every`-th round that syncs
};

namespace detail {

/// The rule of a training whose optimizer the checkpoint does not have.
struct NoRule {
    static std::span<std::string_view const> state_names() noexcept { return {}; }
};

/// Stands for a sharded optimizer where a model is saved alone: all values are as if they were frozen.
template <class Comm>
class NoOptimizer {
public:
    NoOptimizer(Comm& comm, JoinState& state) : comm_{comm}, state_{state} {}

    void list(ParameterList parameters) {
        groups_ = std::vector<ShardGroup>(1);
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            groups_[0].frozen.push_back(i);
        }
        groups_[0].steps.resize(parameters.size());
        groups_[0].parameters = std::move(parameters);
    }

    [[nodiscard]] std::vector<ShardGroup> const& groups() const noexcept { return groups_; }
    [[nodiscard]] std::vector<NoRule> const& rules() const noexcept { return rules_; }
    [[nodiscard]] std::vector<NoRule> const& settings() const noexcept { return rules_; }
    static void resume(std::vector<NoRule> const&, std::span<std::uint64_t const>) noexcept {}
    static void take_settings(Round const&) noexcept {}
    [[nodiscard]] static bool writes_state() noexcept { return true; }
    template <class Loads>
    static void reload_masters(Loads const&) noexcept {}
    [[nodiscard]] Comm& join_communicator() noexcept { return comm_; }
    [[nodiscard]] JoinState& join_state() noexcept { return state_; }

private:
    Comm& comm_;
    JoinState& state_;
    std::vector<ShardGroup> groups_;
    std::vector<NoRule> rules_{1};
};
template <class Comm, class Rule>
using OptimizerIn = std::
    conditional_t<std::is_same_v<Rule, NoRule>, NoOptimizer<Comm>, ShardedOptimizer<Comm, Rule>&>;

template <class J>
concept saves_model = requires(J& joinable) {
    { joinable.saved() } -> std::same_as<detail::SavedModel>;
};
template <class Comm, class Rule>
std::type_identity<Rule> rule_in(ShardedOptimizer<Comm, Rule> const&);
template <class J>
concept gives_rule = requires(J& joinable) { detail::rule_in(joinable); };

/// Which of the participants are the model and the optimizer of a checkpoint.
template <class... Js>
struct Saved {
    using Model = void;
    using Rule = NoRule;
};
template <class J, class... Js>
struct Saved<J, Js...> : Saved<Js...> {};
template <gives_rule J, class... Js>
struct Saved<J, Js...> : Saved<Js...> {
    using Optimizer = J;
    using Rule = typename decltype(detail::rule_in(std::declval<J&>()))::type;
};
template <saves_model J, class... Js>
struct Saved<J, Js...> : Saved<Js...> {
    using Model = J;
};

} // namespace detail

/// Saves a training in one file: values and state of a ZeroRedundancyOptimizer or a ShardedDataParallel, settings of
/// the rules and step counts, and of a DistributedDataParallel its buffers, attached state, and what its reduction keeps
/// (<joinable/compression.hpp>). Each rank writes what it owns. Any number of ranks can read it, with either partition.
///
/// @code
/// joinable::Checkpoint save{zero, "model.safetensors", {.every = 100}};
/// if (std::filesystem::exists("model.safetensors")) {
///     save.read();                              // then skip the first save.rounds() batches: each round syncs
/// }
/// joinable::Join guard{joinable::participants(ddp, zero, save)};
/// for (auto const& batch : rest_of(my_shard, save.rounds())) {
///     train(batch);
///     zero.step();
///     save.step();                              // writes in every 100th round
/// }
/// guard.finish();
/// @endcode
///
/// The layout is safetensors: Python's `safetensors.torch.load_file` reads it. A parameter is
/// stored under its name, or its index if it has none; its state under "NAME/exp_avg", its master
/// under "NAME/master". What each rank has to itself has the rank's number behind its name: "buffers/0/2" is the first
/// buffer of rank 2, and "NAME/residual/2" what the reduction has left out of its gradients. If another number of ranks W
/// reads them, rank r gets the buffers of rank r mod (ranks of the file), and the residuals of rank r are added to those
/// of rank r mod W. What is the same on all ranks is there once: attached state as "state/0", and "NAME/warm_start".
/// A reduction with such state must be in the file, with the settings that it has here. attach() adds what else a
/// training has: averages of values, a loss scale, the state of a random generator. The settings of a rule are stored as texts under the labels of its
/// agree_on(), which it needs; what that leaves out is not in the file. A LocalOptimizer with state_names() has them in
/// its settings(). All ranks must see one file system. The new file is written beside the old
/// one as "FILE.part" and replaces it when it is complete and on the disk, so killing the training
/// at any time leaves a complete file. Groups of ranks that save different models need a file each. Memory of a device goes through the host's,
/// one tensor at a time, while the host waits. Only one training may write a file at a time. The caller
/// attaches what ZeroOptions::shared and the buffers of a ShardedDataParallel hold, and saves the position in the inputs.
template <class Comm, class Rule, class Model>
class Checkpoint {
    static constexpr bool has_model = !std::is_void_v<Model>;
    static constexpr bool has_optimizer = !std::is_same_v<Rule, detail::NoRule>;

    static_assert(models_communicator<Comm>());
    static_assert(
        has_model || has_optimizer,
        "Checkpoint: give it the sharded optimizer, or participants(...) of a DistributedDataParallel, a sharded "
        "optimizer, or both"
    );
    static_assert(
        UpdateRule<Rule> || detail::keeps_state_with_shard<Rule> || !has_optimizer,
        "Checkpoint: an engine's optimizer keeps its state itself; save and load it on the owner of each "
        "parameter, which owner_of() names"
    );
    static_assert(
        !UpdateRule<Rule> || detail::names_settings<Rule> || std::is_empty_v<Rule>,
        "Checkpoint: a rule with settings needs a const member 'void agree_on(joinable::AgreementList& "
        "list)' that adds them: a file has the settings by these labels"
    );

public:
    /// Local. The optimizer must outlive it. Groups may still be added to the optimizer.
    /// @throws ContractViolation  `every` is 0.
    Checkpoint(
        ShardedOptimizer<Comm, Rule>& zero,
        std::filesystem::path const& file,
        CheckpointOptions options = {}
    )
        : Checkpoint{zero, nullptr, file, options} {}

    /// A DistributedDataParallel, a sharded optimizer, or one of each, of one communicator. With both, the optimizer
    /// has all parameters of the model, and the file the optimizer's values. A model alone may be stepped by anything:
    /// attach_state() says what of that is to be in the file. In a guard a rank that trains on writes values and attached
    /// state, outside of one rank 0. All must outlive it. Local.
    /// @throws ContractViolation  `every` is 0, or there are two communicators.
    template <class... Js>
    Checkpoint(
        Participants<Js...> saved, std::filesystem::path const& file, CheckpointOptions options = {}
    )
        : Checkpoint{optimizer_of(saved), model_of(saved), file, options} {}

    /// Adds a tensor to the file as `name`, or those of a range as "NAME/0", "NAME/1", ...; they are the same on all
    /// ranks. In a guard a rank that trains on writes them, outside of one rank 0; all ranks read them. Call it on all
    /// ranks, before the first write() or read() that they are for. The tensors are in memory of the communicator's
    /// device and outlive the checkpoint, a named `torch::Tensor` too: give a copy of such a handle if it ends. Local.
    /// @throws ContractViolation  the name is empty or given before, or a tensor is missing, without memory, on another
    ///         device, or its elements share memory; nothing was changed.
    template <class Range>
    void attach(std::string_view name, Range&& tensors) {
        attach(detail::KeptTensor::Kind::same, name, std::forward<Range>(tensors));
    }
    /// The same for tensors that each rank has to itself: that of rank r is "NAME/r", or "NAME/0/r" in a range. If
    /// another number of ranks reads the file, rank r gets those of rank r mod (ranks of the file).
    template <class Range>
    void attach_per_rank(std::string_view name, Range&& tensors) {
        attach(detail::KeptTensor::Kind::own, name, std::forward<Range>(tensors));
    }

    /// Collective, outside a guard. Writes the file now. Each rank brings 64 MiB at a time to the
    /// disk, and the deadline must cover that, for all ranks that write to one disk together. On the
    /// first three errors all ranks throw, and the communicator is usable: a rank that fails throws its
    /// own error, and the others that of the first rank that failed. The old file
    /// stays, with one exception: "cannot sync" the folder means that the new file, which is
    /// complete, has replaced it, but a power loss may bring the old one back.
    /// @throws CommunicationError  a rank cannot write.
    /// @throws ContractViolation  in a guard, two parameters have one name, a rule keeps another
    ///         number of states than when its group was added, or the optimizer lacks a parameter of the model.
    /// @throws Mismatch  settings or rounds() differ between ranks, as after a guard that failed: set
    ///         the settings on all ranks.
    /// @throws what the communicator throws.
    void write() {
        require_outside("write()");
        write_file(0);
    }

    /// Collective, outside a guard. Reads the file: values, state, settings and rounds(). On the
    /// first two errors all ranks throw as in write().
    /// @throws ContractViolation  in a guard, the file is not a complete checkpoint of this model, rule and reduction: the text
    ///         names the first tensor that differs; or the elements of a value come in another order than when it was
    ///         given. Nothing was changed.
    /// @throws Mismatch  ranks read different files or values, or have attached different tensors. Nothing was changed.
    /// @throws CommunicationError  a rank cannot read; what was read so far is kept.
    /// @throws what the communicator throws.
    void read() { read(file_); }
    /// Reads another file; write() keeps its own.
    void read(std::filesystem::path const& from) {
        require_outside("read()");
        read_file(from.string());
    }

    /// Reads values alone, from a safetensors file of any tool, by the names of parameters: all of them, and then the file
    /// has no other tensors; or those in `names`, which may also name what attach() was given, such as buffers. State,
    /// settings and rounds() stay; their masters are read again from them.
    /// Such a file has no hashes: damage to its numbers is not seen. Collective, outside a guard; throws as read() does.
    /// @throws ContractViolation  a dtype or a shape differs, a tensor or a parameter of that name is missing, or the file has
    ///         tensors that the model lacks. Nothing was changed.
    void
    read_values(std::filesystem::path const& from, std::vector<std::string> const& names = {}) {
        require_outside("read_values()");
        read_values_of(from.string(), names);
    }

    /// Counts a round and writes the file in every CheckpointOptions::every-th one. Call it once in
    /// each round that syncs, after the optimizer has stepped. Collective. Throws what write()
    /// throws.
    void step() {
        Round const round = notify_join_context(*this);
        detail::run_part(*this, round, [&] { run(round); });
    }

    /// The number of step() calls, one for each round that syncs, including joined rounds and those of the training that
    /// was read. Where each round syncs, a rank with enough inputs has had this many batches; with
    /// `JoinOptions::sync_every` that many times as many. Local.
    [[nodiscard]] std::uint64_t rounds() const noexcept { return rounds_; }

    /// Runs the same steps on joined ranks.
    class Hook {
    public:
        using runs_after = labels_of<labels::shards, labels::gradients, labels::step>;

        explicit Hook(Checkpoint& checkpoint) noexcept : checkpoint_{checkpoint} {}
        static bool takes_part(Round const& round) noexcept { return round.will_sync(); }
        void main_hook(Round const& round) { checkpoint_.run(round); }
        void post_hook(bool) noexcept {}

    private:
        Checkpoint& checkpoint_;
    };

    [[nodiscard]] Hook join_hook(arguments<keywords<>> const&) noexcept { return Hook{*this}; }
    [[nodiscard]] Comm& join_communicator() noexcept { return zero_.join_communicator(); }
    [[nodiscard]] JoinState& join_state() noexcept { return state_; }
    [[nodiscard]] std::string_view join_name() const noexcept { return "Checkpoint"; }
    static constexpr std::string_view join_verb = "step()";
    void agree_on(AgreementList& list) const {
        list.add("file", file_);
        list.add("every", options_.every);
        list.add("rounds", rounds_);
    }

private:
    using Optimizer = detail::OptimizerIn<Comm, Rule>;

    template <class Given>
    Checkpoint(
        Given&& zero, Model* model, std::filesystem::path const& file, CheckpointOptions options
    )
        : zero_(std::forward<Given>(zero)), model_{model}, file_{file.string()},
          folder_{file.has_parent_path() ? file.parent_path().string() : "."}, options_{options} {
        if (options.every == 0) {
            throw ContractViolation{
                "CheckpointOptions::every is 0, but a file is written every 1 or more rounds"
            };
        }
        if constexpr (has_model) {
            if (detail::identity_of(model->join_communicator()) !=
                detail::identity_of(zero_.join_communicator())) {
                throw ContractViolation{
                    "Checkpoint: the model and the optimizer have two communicators; make both with one"
                };
            }
        }
    }
    template <class... Js>
    static Model* model_of(Participants<Js...> const& saved) {
        static_assert(
            sizeof...(Js) == std::size_t{has_model} + std::size_t{has_optimizer},
            "Checkpoint: participants(...) are a DistributedDataParallel, a sharded optimizer, or one of each; the "
            "others of a guard have nothing to save"
        );
        if constexpr (has_model) {
            return &std::get<Model&>(saved.joinables);
        } else {
            return nullptr;
        }
    }
    template <class... Js>
    static Optimizer optimizer_of(Participants<Js...> const& saved) {
        if constexpr (has_optimizer) {
            return std::get<typename detail::Saved<Js...>::Optimizer&>(saved.joinables);
        } else {
            auto& model = *model_of(saved);
            return {model.join_communicator(), model.join_state()};
        }
    }
    /// A model that is saved alone may list others than before.
    void list_parameters() {
        if constexpr (!has_optimizer) {
            zero_.list(model_->saved().parameters);
        }
    }
    /// All that the model has besides values, which the optimizer has.
    /// @throws ContractViolation  the optimizer lacks a parameter of the model.
    [[nodiscard]] detail::SavedModel saved_model() {
        if constexpr (has_model) {
            detail::SavedModel saved = model_->saved();
            std::set<void const*> values;
            for (detail::ShardGroup const& group : zero_.groups()) {
                for (AnyParameter const& parameter : group.parameters) {
                    static_cast<void>(values.insert(parameter.value().data()));
                }
            }
            for (std::size_t i = 0; i < saved.parameters.size(); ++i) {
                AnyView const value = saved.parameters[i].value();
                if (value.numel() != 0 && !values.contains(value.data())) {
                    throw ContractViolation{detail::concat(
                        "Checkpoint: the optimizer has no ",
                        detail::describe_parameter(saved.parameters, i),
                        " of the model, so the file would lack it; give the optimizer all parameters"
                    )};
                }
            }
            return saved;
        } else {
            return {};
        }
    }

    void require_outside(std::string_view verb) {
        bool is_inside = detail::session_of(state_) != nullptr ||
                         detail::session_of(zero_.join_state()) != nullptr;
        if constexpr (has_model) {
            is_inside = is_inside || detail::session_of(model_->join_state()) != nullptr;
        }
        if (is_inside) {
            throw ContractViolation{detail::concat(
                "Checkpoint::",
                verb,
                " was called in a guard; call it before or after, on every rank"
            )};
        }
        detail::require_listed(state_, join_communicator(), "Checkpoint");
    }

    void run(Round const& round) {
        ++rounds_;
        if (rounds_ % options_.every == 0) {
            zero_.take_settings(round); // the loop may have set those of the next step
            write_file(round.buffer_source());
        }
    }

    template <class Rules>
    [[nodiscard]] detail::ModelLayout layout_by(
        std::string const& name,
        Rules const& rules,
        std::vector<detail::KeptTensor> kept,
        std::size_t writers
    ) const {
        std::vector<detail::ModelLayout::Names> names;
        for (auto const& rule : rules) {
            names.emplace_back(rule.state_names());
        }
        return {name, zero_.groups(), names, std::move(kept), writers};
    }

    struct Attached {
        detail::KeptTensor::Kind kind;
        std::string name;
        bool is_range;
        detail::FixedTensors tensors;
    };
    template <class Range>
    void attach(detail::KeptTensor::Kind kind, std::string_view name, Range&& tensors) {
        bool const is_known = std::any_of(attached_.begin(), attached_.end(), [&](auto const& one) {
            return one.name == name;
        });
        if (name.empty() || is_known) {
            throw ContractViolation{
                is_known
                    ? detail::concat(
                          "Checkpoint: ", name, " is attached twice; give it another name"
                      )
                    : "Checkpoint: attach() was given an empty name, which a tensor of a file cannot have"
            };
        }
        constexpr bool is_range = !WritableTensor<Range>;
        TensorList list = detail::tensor_list(std::forward<Range>(tensors));
        attached_.push_back(
            {kind,
             std::string{name},
             is_range,
             {std::move(list), "attached tensor", detail::device_of(join_communicator()).id()}}
        );
    }
    /// All that the file has besides parameters and their state. Ranks attach the same.
    [[nodiscard]] std::vector<detail::KeptTensor>
    kept_with(detail::SavedModel const& model, AgreementList& list) {
        std::vector<detail::KeptTensor> kept = detail::kept_tensors(model);
        std::vector<std::string> texts;
        for (Attached& one : attached_) {
            std::vector<AnyView> const& views = one.tensors.views();
            for (std::size_t i = 0; i < views.size(); ++i) {
                std::string name = one.is_range ? detail::concat(one.name, "/", i) : one.name;
                texts.push_back(detail::concat(
                    name,
                    one.kind == detail::KeptTensor::Kind::own ? " per rank, " : ", ",
                    detail::to_text(views[i])
                ));
                kept.push_back({one.kind, std::move(name), views[i]});
            }
        }
        list.add("attached tensors", texts);
        return kept;
    }

    /// On a device the host first waits for collectives in flight, which have a deadline; streams
    /// have none.
    void wait_for_work() {
        Comm& comm = join_communicator();
        detail::device_of(comm).submit(); // after the engine's work
        if constexpr (requires { comm.synchronize(); }) {
            comm.synchronize();
        }
    }

    /// `source` writes what is the same on all ranks that have not joined.
    void write_file(int source) {
        detail::ControlOver<Comm&> control{join_communicator()};
        bool const is_root = control.rank() == 0;
        bool const is_source = control.rank() == (has_optimizer ? 0 : source);
        std::optional<detail::ModelLayout> layout;
        detail::SavedModel model;
        std::vector<detail::TensorPart> parts;
        std::vector<std::uint64_t> words; // steps of each parameter, hash of each tensor
        detail::PartsOnHost on_host{detail::device_of(join_communicator())};
        detail::on_all_ranks(control, [&](AgreementList& list) {
            bool const writes_state = zero_.writes_state(); // before this rank may throw
            list_parameters();
            detail::agree_on_rules(list, zero_.rules());
            list.begin_section("checkpoints differ: ");
            list.add("rounds", rounds_);
            wait_for_work();
            detail::check_before_save(zero_.groups(), zero_.rules());
            model = saved_model();
            auto const rank = static_cast<std::size_t>(control.rank());
            auto const ranks = static_cast<std::size_t>(control.size());
            layout.emplace(layout_by(file_, zero_.rules(), kept_with(model, list), ranks));
            layout->place();
            auto const add = [&](std::vector<detail::TensorPart> const& more) {
                parts.insert(parts.end(), more.begin(), more.end());
            };
            words = layout->own_steps();
            std::size_t const parameters = words.size();
            if (writes_state) {
                add(layout->own_state());
                add(layout->own_values(is_source));
            } else { // another group of shards has the same
                std::fill(words.begin(), words.end(), 0);
            }
            add(layout->own_kept(rank, control.rank() == source));
            words.resize(parameters + layout->tensors().size());
            detail::DeadlineRenewal renewal{control};
            for (detail::TensorPart const& part : parts) {
                detail::StoredTensor const& tensor = layout->tensors()[part.tensor];
                on_host.read(tensor, part, [&](detail::TensorPart const& here) {
                    words[parameters + part.tensor] += hash_part(tensor, here, renewal);
                });
            }
        });
        control.sum(words);

        std::string const temporary = file_ + ".part";
        std::string header;
        std::optional<detail::TemporaryFile> made; // on rank 0
        detail::on_all_ranks(control, [&](AgreementList& list) {
            header = header_of(*layout, words, control.size(), model);
            list.add("bytes of the header of the checkpoint", header.size());
            if (is_root) {
                static_cast<void>(made.emplace(temporary));
            }
        });
        detail::on_all_ranks(control, [&](AgreementList&) {
            std::optional<detail::File> opened;
            if (!is_root) {
                static_cast<void>(opened.emplace(temporary, detail::File::Access::write));
            }
            detail::File const& file = is_root ? made->file() : *opened;
            if (is_root) {
                file.write(header.data(), header.size(), 0);
            }
            detail::FileData data{file, header.size(), control};
            for (detail::TensorPart const& part : parts) {
                detail::StoredTensor const& tensor = layout->tensors()[part.tensor];
                on_host.read(tensor, part, [&](detail::TensorPart const& here) {
                    data.write(tensor, here);
                });
            }
            file.sync();
        });
        detail::on_all_ranks(control, [&](AgreementList&) {
            if (is_root) {
                made->replace(file_, folder_);
            }
        });
    }

    [[nodiscard]] std::string header_of(
        detail::ModelLayout const& layout,
        std::span<std::uint64_t const> words,
        int world_size,
        detail::SavedModel const& model
    ) const {
        detail::TrainingState state;
        state.rounds = rounds_;
        state.world_size = static_cast<std::uint64_t>(world_size);
        state.rule = detail::class_name<Rule>();
        state.group_sizes = layout.group_sizes();
        for (Rule const& rule : zero_.rules()) {
            state.rules.push_back(detail::stored_settings(rule));
        }
        state.reduction = detail::settings_of_reduction(model.settings);
        state.order = model.order;
        std::size_t const parameters = words.size() - layout.tensors().size();
        state.steps.assign(words.begin(), words.begin() + std::ptrdiff_t(parameters));
        for (std::size_t k = 0; k < layout.tensors().size(); ++k) {
            detail::StoredTensor const& tensor = layout.tensors()[k];
            state.hashes.emplace(tensor.name, words[parameters + k]);
            if (tensor.is_complex) {
                state.complex.push_back(tensor.name);
            }
        }
        return detail::header_text(file_, {layout.tensors(), detail::metadata_of(state)});
    }

    void prepare_to_read() {
        list_parameters();
        wait_for_work();
        for (detail::ShardGroup const& group : zero_.groups()) {
            detail::check_layouts(group); // values and state come in this order
        }
    }

    void read_file(std::string const& name) {
        detail::ControlOver<Comm&> control{join_communicator()};
        std::optional<detail::StoredFile> file;
        std::optional<detail::ModelLayout> layout;
        detail::TrainingState state;
        std::vector<detail::SettingsOf<Rule>> rules;
        detail::SavedModel model;
        std::vector<std::uint64_t> counts; // of the reduction
        detail::PartsOnHost on_host{detail::device_of(join_communicator())};
        detail::on_all_ranks(control, [&](AgreementList& list) {
            prepare_to_read();
            file.emplace(name).agree_on(list);
            detail::FileHeader const header = file->header();
            state = detail::MetadataReader{name, header.metadata}.state();
            rules = rules_of(name, state);
            model = saved_model();
            counts = counts_of(name, state, model);
            layout.emplace(layout_by(name, rules, kept_with(model, list), state.world_size));
            layout->place_as(name, header);
            check(name, state, *layout);
        });
        detail::FileData data = file->data(control);
        check_hashes(name, control, *layout, state, data);
        detail::on_all_ranks(control, [&](AgreementList&) {
            zero_.resume(rules, state.steps);
            std::vector<detail::TensorPart> parts = layout->kept_state();
            for (detail::TensorPart const& part : layout->values()) {
                parts.push_back(part);
            }
            read_parts(*layout, parts, on_host, data);
            layout->for_each_kept(
                static_cast<std::size_t>(control.rank()),
                static_cast<std::size_t>(control.size()),
                [&](AnyView const& to, std::span<detail::TensorPart const> from) {
                    read_sum(*layout, to, from, on_host, data);
                }
            );
            if constexpr (has_model) {
                for (std::size_t k = 0; k < counts.size(); ++k) {
                    *model.reduction.counts[k].value = counts[k];
                }
                model_->resume(state.order);
            }
            detail::device_of(join_communicator()).finish(); // the engine's stream sees the values
        });
        rounds_ = state.rounds;
    }

    void read_values_of(std::string const& name, std::vector<std::string> const& names) {
        detail::ControlOver<Comm&> control{join_communicator()};
        std::optional<detail::StoredFile> file;
        std::optional<detail::ModelLayout> layout;
        std::vector<detail::TensorPart> parts;
        detail::on_all_ranks(control, [&](AgreementList& list) {
            prepare_to_read();
            file.emplace(name).agree_on(list);
            list.add("names of values to read", names);
            layout.emplace(layout_by(name, zero_.rules(), kept_with({}, list), 1));
            parts = layout->values_as(name, file->header(), names);
        });
        detail::on_all_ranks(control, [&](AgreementList&) {
            detail::PartsOnHost on_host{detail::device_of(join_communicator())};
            detail::FileData data = file->data(control);
            read_parts(*layout, parts, on_host, data);
            zero_.reload_masters([&](detail::ShardGroup const& group, std::size_t i) {
                return layout->has_value(parts, group, i);
            });
            detail::device_of(join_communicator()).finish(); // the engine's stream sees the values
        });
    }
    static void read_parts(
        detail::ModelLayout const& layout,
        std::span<detail::TensorPart const> parts,
        detail::PartsOnHost& on_host,
        detail::FileData& data
    ) {
        for (detail::TensorPart const& part : parts) {
            detail::StoredTensor const& tensor = layout.tensors()[part.tensor];
            on_host.write(tensor, part, [&](detail::TensorPart const& here) {
                data.read(tensor, here);
            });
        }
    }

    /// Reads the sum of tensors of a file, in rank order. Sums of several, or of none, are dense.
    void read_sum(
        detail::ModelLayout const& layout,
        AnyView const& to,
        std::span<detail::TensorPart const> parts,
        detail::PartsOnHost& on_host,
        detail::FileData& data
    ) {
        std::size_t const bytes = to.numel() * size_of(to.dtype());
        if (parts.size() == 1 || bytes == 0) {
            read_parts(layout, parts, on_host, data);
            return;
        }
        Device& device = detail::device_of(join_communicator());
        Arena const sum = device.allocate_staging(bytes); // zeroed
        std::vector<std::byte> summand(parts.empty() ? 0 : bytes);
        for (std::size_t k = 0; k < parts.size(); ++k) {
            detail::TensorPart part = parts[k];
            part.data = k == 0 ? sum.data() : summand.data();
            data.read(layout.tensors()[part.tensor], part);
            if (k == 0) {
                continue;
            }
            std::byte* const both[] = {sum.data(), summand.data()};
            detail::reduce_to(
                to.dtype(),
                ReduceOp::sum,
                {2, [&](std::size_t i) { return both[i]; }},
                {1, [&](std::size_t i) { return both[i]; }},
                to.numel()
            );
        }
        device.upload(sum.data(), to.data(), bytes);
        device.download(to.data(), sum.data(), bytes); // waits until it is there
    }

    /// The file's values of the counts of the model's reduction.
    /// @throws ContractViolation  it is of another reduction, or its buckets are of other parameters.
    [[nodiscard]] std::vector<std::uint64_t> counts_of(
        std::string const& name, detail::TrainingState const& state, detail::SavedModel const& model
    ) const {
        if (state.world_size == 0 || state.world_size > detail::max_world_size) {
            detail::refuse_file(
                name,
                "its world size is ",
                state.world_size,
                ", but expected is 1 to ",
                detail::max_world_size
            );
        }
        std::vector<std::uint64_t> counts = detail::counts_of_reduction(
            name,
            state.reduction,
            detail::settings_of_reduction(model.settings),
            model.reduction.counts
        );
        if constexpr (has_model) {
            if (!state.order.empty() && !model_->is_order(state.order)) {
                detail::refuse_file(
                    name,
                    "it is of another model: its buckets have parameters ",
                    state.order,
                    ", which are not those that the model trains"
                );
            }
        }
        return counts;
    }

    [[nodiscard]] std::vector<detail::SettingsOf<Rule>>
    rules_of(std::string const& name, detail::TrainingState const& state) {
        if (state.rule != detail::class_name<Rule>()) {
            detail::refuse_file(
                name, "its rule is ", state.rule, ", but expected is ", detail::class_name<Rule>()
            );
        }
        std::vector<detail::SettingsOf<Rule>> rules = zero_.settings();
        if (state.rules.size() != rules.size()) {
            detail::refuse_file(
                name,
                "it is of another model: it has ",
                state.rules.size(),
                " groups, but expected are ",
                rules.size()
            );
        }
        for (std::size_t k = 0; k < rules.size(); ++k) {
            detail::set_settings(name, k, state.rules[k], rules[k]);
            detail::check_rule(rules[k]);
        }
        return rules;
    }

    void check(
        std::string const& name,
        detail::TrainingState const& state,
        detail::ModelLayout const& layout
    ) const {
        auto const sizes = layout.group_sizes();
        std::size_t const parameters = layout.own_steps().size();
        if (state.group_sizes != sizes || state.steps.size() != parameters) {
            detail::refuse_file(
                name,
                "it is of another model: its groups have ",
                state.group_sizes,
                " parameters and it has steps of ",
                state.steps.size(),
                ", but expected are groups of ",
                sizes
            );
        }
        for (detail::StoredTensor const& tensor : layout.tensors()) {
            if (!state.hashes.contains(tensor.name)) {
                detail::refuse_file(name, "it has no hash of tensor ", tensor.name);
            }
        }
    }

    /// Each rank reads an equal share of each tensor.
    void check_hashes(
        std::string const& name,
        detail::ControlCommunicator& control,
        detail::ModelLayout const& layout,
        detail::TrainingState const& state,
        detail::FileData& data
    ) const {
        std::vector<std::uint64_t> hashes(layout.tensors().size());
        detail::on_all_ranks(control, [&](AgreementList&) {
            auto const ranks = static_cast<std::size_t>(control.size());
            auto const rank = static_cast<std::size_t>(control.rank());
            for (std::size_t k = 0; k < hashes.size(); ++k) {
                detail::StoredTensor const& tensor = layout.tensors()[k];
                std::size_t const share = (tensor.numel() + ranks - 1) / ranks;
                std::size_t const begin = (std::min)(rank * share, tensor.numel());
                std::size_t const end = (std::min)(begin + share, tensor.numel());
                hashes[k] = data.hash(tensor, begin, end - begin);
            }
        });
        control.sum(hashes);
        for (std::size_t k = 0; k < hashes.size(); ++k) { // alike on all ranks
            std::string const& tensor = layout.tensors()[k].name;
            if (hashes[k] != state.hashes.at(tensor)) {
                detail::refuse_file(
                    name,
                    "tensor ",
                    tensor,
                    " has hash ",
                    detail::hex_of(hashes[k]),
                    ", but expected is ",
                    detail::hex_of(state.hashes.at(tensor)),
                    ": the file is damaged"
                );
            }
        }
    }

    Optimizer zero_;
    Model* model_;
    std::string file_;
    std::string folder_;
    CheckpointOptions options_;
    std::vector<Attached> attached_;
    std::uint64_t rounds_ = 0;
    JoinState state_;
};

template <class Comm, class Rule>
Checkpoint(ShardedOptimizer<Comm, Rule>&, std::filesystem::path const&) -> Checkpoint<Comm, Rule>;
template <class Comm, class Rule>
Checkpoint(ShardedOptimizer<Comm, Rule>&, std::filesystem::path const&, CheckpointOptions)
    -> Checkpoint<Comm, Rule>;
template <class... Js>
Checkpoint(Participants<Js...>, std::filesystem::path const&, CheckpointOptions = {}) -> Checkpoint<
    std::remove_cvref_t<
        decltype(std::get<0>(std::declval<Participants<Js...>&>().joinables).join_communicator())>,
    typename detail::Saved<Js...>::Rule,
    typename detail::Saved<Js...>::Model>;

}} // namespace joinable::v0
