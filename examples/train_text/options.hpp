// SPDX-License-Identifier: BSL-1.0
#pragma once

// What a training is asked for and what it finds. It needs nothing of the library, so it costs nothing to
// include.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace train_text {

using Text = std::vector<std::uint8_t>;

/// The input cannot be read; the text says which one and why.
struct InputError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// The values of --checkpoint, --checkpoint-every and --resume.
struct SaveOptions {
    std::string file;
    std::size_t every = 100;
    std::string resume;

    [[nodiscard]] bool is_wanted() const { return !file.empty() || !resume.empty(); }
};

enum class Mode { join, drop, even };
/// What ranks are, or what connects their processes.
enum class Kind { thread, process, tcp, gloo, mpi, machines };
enum class Where { host, cuda }; ///< what ranks compute on
enum class Rule { sgd, adam, adamw };
/// How gradients travel; local: not at all, values are averaged now and then.
enum class Reduction { all_reduce, fp16, bf16, int8, topk, powersgd, local };
enum class Sharding { none, optimizer, gradients, parameters }; ///< what is divided among the ranks

struct Options {
    std::vector<std::string> paths;
    Mode mode = Mode::join;
    bool without_join = false;
    Kind communicator = Kind::thread;
    Where device = Where::host;
    int ranks = 4;
    bool has_tcp_roll_calls = false; ///< beside MPI, which moves the data
    double patience = 300;           ///< how many seconds a rank waits for the others
    int epochs = 3;
    std::size_t batch_size = 64;
    std::size_t bucket_bytes = std::size_t{1} << 20U;
    std::size_t limit_bytes = 0; ///< of the text to read; 0: everything
    std::uint64_t seed = 1;
    Rule rule = Rule::sgd;
    Sharding sharding = Sharding::none;
    bool only_plans = false; ///< the memory of a rank
    Reduction reduction = Reduction::all_reduce;
    double density = 0.1;    ///< of TopK
    std::size_t vectors = 2; ///< of each matrix, for PowerSgd
    std::size_t period = 4;  ///< rounds from one average of values to the next, for local
    std::optional<float> given_rate = {};
    float momentum = 0.9F;
    SaveOptions save = {};
    std::string picture = {}; ///< of who did what when; empty: none
    std::string trace = {};   ///< the same for ui.perfetto.dev

    /// Whether a launcher starts the ranks, each in its own process, or a process on each machine.
    [[nodiscard]] bool is_launched() const {
        return communicator != Kind::thread && communicator != Kind::process;
    }
    [[nodiscard]] std::chrono::nanoseconds deadline() const {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(
            std::chrono::duration<double>{(std::min)(patience, 3e7)} // a year is for ever
        );
    }

    /// The learning rate at the start.
    [[nodiscard]] float rate() const {
        return given_rate.value_or(rule == Rule::sgd ? 0.15F : 0.01F);
    }

    /// The number of batches of a text in all epochs. The last batch of an epoch may be smaller.
    [[nodiscard]] std::size_t batches_of(Text const& text) const {
        return static_cast<std::size_t>(epochs) * ((text.size() + batch_size - 1) / batch_size);
    }
};

/// The results of a rank. Plain bytes, so that processes can share them.
struct Findings {
    std::size_t rounds;     ///< of all epochs
    std::size_t own_rounds; ///< the rounds with a batch
    std::size_t shadow_rounds;
    std::uint64_t digest;       ///< of the bits of all parameters
    std::uint64_t state_digest; ///< of the optimizer's state, if every rank has all of it
    std::size_t value_bytes;    ///< of the parameters that this rank keeps between rounds
    std::size_t state_bytes;    ///< of the optimizer's state on this rank
    double seconds;             ///< of training
    std::uint64_t
        sent_bytes;     ///< of gradients, or of values in their place, if they are not sharded
    double waited;      ///< in roll calls, included in `seconds`
    double bits_before; ///< per held-out byte; measured by rank 0
    double bits_after;
};

} // namespace train_text
