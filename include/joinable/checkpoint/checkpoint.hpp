// SPDX-License-Identifier: BSL-1.0
#pragma once

#if !defined(__linux__)
#error "<joinable/checkpoint.hpp> needs the files of Linux; elsewhere save zero.state()"
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <joinable/agreement/agreement_list.hpp>
#include <joinable/agreement/control.hpp>
#include <joinable/agreement/on_all_ranks.hpp>
#include <joinable/checkpoint/detail/file.hpp>
#include <joinable/checkpoint/detail/model_layout.hpp>
#include <joinable/checkpoint/detail/safetensors.hpp>
#include <joinable/checkpoint/detail/settings.hpp>
#include <joinable/checkpoint/detail/tensor_part.hpp>
#include <joinable/checkpoint/detail/training_state.hpp>
#include <joinable/communicator/communicator.hpp>
#include <joinable/communicator/device_of.hpp>
#include <joinable/detail/hash.hpp>
#include <joinable/detail/text.hpp>
#include <joinable/detail/type_name.hpp>
#include <joinable/device/device.hpp>
#include <joinable/error.hpp>
#include <joinable/hook/keywords.hpp>
#include <joinable/hook/ordering.hpp>
#include <joinable/join/joinable.hpp>
#include <joinable/optimizer/update_rule.hpp>
#include <joinable/participant/sharded/optimizer.hpp>

namespace joinable { inline namespace v0 {

/// Options of a Checkpoint. The same on every rank.
struct CheckpointOptions {
    std::size_t every = 1; ///< a file is written in every `every`-th round that syncs
};

/// Saves the training of a ZeroRedundancyOptimizer or a ShardedDataParallel in one file: values,
/// state, settings of the rules and step counts. Each rank writes what it owns. Any number of ranks
/// can read it, with either partition.
///
/// @code
/// joinable::Checkpoint save{zero, "model.safetensors", {.every = 100}};
/// if (std::filesystem::exists("model.safetensors")) {
///     save.read();                              // then skip the first save.rounds() batches
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
/// under "NAME/master". The settings of a rule are stored as texts under the labels of its
/// agree_on(), which it needs; what that leaves out is not in the file. All ranks must see one file system. The new file is written beside the old
/// one as "FILE.part" and replaces it when it is complete and on the disk, so killing the training
/// at any time leaves a complete file. Memory of a device goes through the host's,
/// one tensor at a time, while the host waits. Only one training may write a file at a time. The caller
/// saves ZeroOptions::shared, buffers and the position in the inputs.
template <class Comm, class Rule>
class Checkpoint {
    static_assert(models_communicator<Comm>());
    static_assert(
        UpdateRule<Rule>,
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
        : zero_{zero}, file_{file.string()},
          folder_{file.has_parent_path() ? file.parent_path().string() : "."}, options_{options} {
        if (options.every == 0) {
            throw ContractViolation{
                "CheckpointOptions::every is 0, but a file is written every 1 or more rounds"
            };
        }
    }

    /// Collective, outside a guard. Writes the file now. Each rank brings 64 MiB at a time to the
    /// disk, and the deadline must cover that, for all ranks that write to one disk together. On the
    /// first three errors all ranks throw, and the communicator is usable: a rank that fails throws its
    /// own error, and the others that of the first rank that failed. The old file
    /// stays, with one exception: "cannot sync" the folder means that the new file, which is
    /// complete, has replaced it, but a power loss may bring the old one back.
    /// @throws CommunicationError  a rank cannot write.
    /// @throws ContractViolation  in a guard, two parameters have one name, or a rule keeps another
    ///         number of states than when its group was added.
    /// @throws Mismatch  settings or rounds() differ between ranks, as after a guard that failed: set
    ///         the settings on all ranks.
    /// @throws what the communicator throws.
    void write() {
        require_outside("write()");
        write_file();
    }

    /// Collective, outside a guard. Reads the file: values, state, settings and rounds(). On the
    /// first two errors all ranks throw as in write().
    /// @throws ContractViolation  in a guard, the file is not a complete checkpoint of this model and rule: the text
    ///         names the first tensor that differs; or the elements of a value come in another order than when it was
    ///         given. Nothing was changed.
    /// @throws CommunicationError  a rank cannot read; what was read so far is kept.
    /// @throws what the communicator throws.
    void read() { read(file_); }
    /// Reads another file; write() keeps its own.
    void read(std::filesystem::path const& from) {
        require_outside("read()");
        read_file(from.string());
    }

    /// Counts a round and writes the file in every CheckpointOptions::every-th one. Call it once in
    /// each round that syncs, after the optimizer has stepped. Collective. Throws what write()
    /// throws.
    void step() {
        Round const round = notify_join_context(*this);
        detail::run_part(*this, round, [&] { run(round); });
    }

    /// The number of step() calls, including joined rounds and the rounds of the training that was
    /// read. Each rank with enough inputs has had this many batches. Local.
    [[nodiscard]] std::uint64_t rounds() const noexcept { return rounds_; }

    /// Runs the same steps on joined ranks.
    class Hook {
    public:
        using runs_after = labels_of<labels::shards, labels::gradients>;

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
    void require_outside(std::string_view verb) {
        if (detail::session_of(state_) != nullptr ||
            detail::session_of(zero_.join_state()) != nullptr) {
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
            write_file();
        }
    }

    template <class Rules>
    [[nodiscard]] detail::ModelLayout layout_by(std::string const& name, Rules const& rules) const {
        std::vector<detail::ModelLayout::Names> names;
        for (Rule const& rule : rules) {
            names.emplace_back(rule.state_names());
        }
        return {name, zero_.groups(), names};
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

    void write_file() {
        detail::ControlOver<Comm&> control{join_communicator()};
        bool const is_root = control.rank() == 0;
        std::optional<detail::ModelLayout> layout;
        std::vector<detail::TensorPart> parts;
        std::vector<std::uint64_t> words; // steps of each parameter, hash of each tensor
        detail::PartsOnHost on_host{detail::device_of(join_communicator())};
        detail::on_all_ranks(control, [&](AgreementList& list) {
            detail::agree_on_rules(list, zero_.rules());
            list.add("rounds", rounds_);
            wait_for_work();
            detail::check_before_save(zero_.groups(), zero_.rules());
            layout.emplace(layout_by(file_, zero_.rules()));
            layout->place();
            parts = layout->own_state();
            for (detail::TensorPart const& part : layout->own_values(is_root)) {
                parts.push_back(part);
            }
            words = layout->own_steps();
            std::size_t const parameters = words.size();
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
            header = header_of(*layout, words, control.size());
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
        detail::ModelLayout const& layout, std::span<std::uint64_t const> words, int world_size
    ) const {
        detail::TrainingState state;
        state.rounds = rounds_;
        state.world_size = static_cast<std::uint64_t>(world_size);
        state.rule = detail::class_name<Rule>();
        state.group_sizes = layout.group_sizes();
        for (Rule const& rule : zero_.rules()) {
            state.rules.push_back(detail::stored_settings(rule));
        }
        std::size_t const parameters = words.size() - layout.tensors().size();
        state.steps.assign(words.begin(), words.begin() + std::ptrdiff_t(parameters));
        for (std::size_t k = 0; k < layout.tensors().size(); ++k) {
            state.hashes.emplace(layout.tensors()[k].name, words[parameters + k]);
        }
        return detail::header_text(file_, {layout.tensors(), detail::metadata_of(state)});
    }

    void read_file(std::string const& name) {
        detail::ControlOver<Comm&> control{join_communicator()};
        std::optional<detail::File> file;
        std::optional<detail::ModelLayout> layout;
        detail::TrainingState state;
        std::vector<Rule> rules;
        std::uint64_t first = 0;
        detail::PartsOnHost on_host{detail::device_of(join_communicator())};
        detail::on_all_ranks(control, [&](AgreementList& list) {
            wait_for_work();
            for (detail::ShardGroup const& group : zero_.groups()) {
                detail::check_layouts(group); // the state comes in the order of values
            }
            file.emplace(name, detail::File::Access::read);
            std::string const text = read_header(name, *file);
            list.add("hash of the header of the checkpoint", detail::Hash{}.add(text).value());
            first = detail::length_bytes + text.size();
            detail::FileHeader const header =
                detail::HeaderParser{name, file->bytes() - first}.parse(text);
            state = detail::MetadataReader{name, header.metadata}.state();
            rules = rules_of(name, state);
            layout.emplace(layout_by(name, rules));
            layout->place_as(name, header);
            check(name, state, *layout);
        });
        detail::FileData data{*file, first, control};
        check_hashes(name, control, *layout, state, data);
        detail::on_all_ranks(control, [&](AgreementList&) {
            zero_.resume(rules, state.steps);
            std::vector<detail::TensorPart> parts = layout->kept_state();
            for (detail::TensorPart const& part : layout->values()) {
                parts.push_back(part);
            }
            for (detail::TensorPart const& part : parts) {
                detail::StoredTensor const& tensor = layout->tensors()[part.tensor];
                on_host.write(tensor, part, [&](detail::TensorPart const& here) {
                    data.read(tensor, here);
                });
            }
            detail::device_of(join_communicator()).finish(); // the engine's stream sees the values
        });
        rounds_ = state.rounds;
    }

    [[nodiscard]] std::string read_header(std::string const& name, detail::File const& file) const {
        std::uint64_t const bytes = file.bytes();
        std::string start(bytes < detail::length_bytes ? 0 : detail::length_bytes, '\0');
        file.read(start.data(), start.size(), 0);
        std::string text(detail::header_length(name, start, bytes), '\0');
        file.read(text.data(), text.size(), detail::length_bytes);
        return text;
    }

    [[nodiscard]] std::vector<Rule>
    rules_of(std::string const& name, detail::TrainingState const& state) const {
        if (state.rule != detail::class_name<Rule>()) {
            detail::refuse_file(
                name, "its rule is ", state.rule, ", but expected is ", detail::class_name<Rule>()
            );
        }
        std::vector<Rule> rules{zero_.rules().begin(), zero_.rules().end()};
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

    ShardedOptimizer<Comm, Rule>& zero_;
    std::string file_;
    std::string folder_;
    CheckpointOptions options_;
    std::uint64_t rounds_ = 0;
    JoinState state_;
};

template <class Comm, class Rule>
Checkpoint(ShardedOptimizer<Comm, Rule>&, std::filesystem::path const&) -> Checkpoint<Comm, Rule>;
template <class Comm, class Rule>
Checkpoint(ShardedOptimizer<Comm, Rule>&, std::filesystem::path const&, CheckpointOptions)
    -> Checkpoint<Comm, Rule>;

}} // namespace joinable::v0
