// SPDX-License-Identifier: BSL-1.0
#pragma once

// The command line.

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include <CLI/CLI.hpp>

#include "options.hpp"
#include "train.hpp"

namespace train_text {

/// Without files the program reads this much of the repository's text. Four ranks train on it in
/// some seconds, however large the repository is.
inline constexpr std::size_t default_limit_bytes = 200'000;

inline std::map<std::string, Kind> kinds() {
    return {
        {"thread", Kind::thread},
        {"process", Kind::process},
        {"tcp", Kind::tcp},
        {"mpi", Kind::mpi},
        {"gloo", Kind::gloo},
        {"machines", Kind::machines}
    };
}
inline std::string name_of(Kind kind) {
    auto const all = kinds();
    return std::find_if(
               all.begin(), all.end(), [=](auto const& one) { return one.second == kind; }
    )->first;
}

/// Accepts one of these words.
template <class Choice>
CLI::Validator one_of(std::map<std::string, Choice> const& choices) {
    return CLI::Validator{
        [choices](std::string& word) {
            if (auto const found = choices.find(word); found != choices.end()) {
                word = std::to_string(static_cast<std::underlying_type_t<Choice>>(found->second));
                return std::string{};
            }
            std::string names;
            for (auto const& [name, choice] : choices) {
                names += (names.empty() ? "" : " or ") + name;
            }
            return word + " is not known; give " + names;
        },
        "" // the help text of the option explains the words
    };
}

/// Accepts numbers that a float holds, of at least 0 or above 0. CLI11's own checks accept NaN, and let a
/// std::size_t be -5.
inline CLI::Validator number(bool may_be_zero) {
    return CLI::Validator{
        [=](std::string& word) {
            char* end = nullptr;
            double const value = std::strtod(word.c_str(), &end);
            bool const is_number =
                end != word.c_str() && *end == '\0' && value <= std::numeric_limits<float>::max();
            return is_number && (value > 0 || (value == 0 && may_be_zero))
                       ? std::string{}
                       : word + " is not allowed; give a number " +
                             (may_be_zero ? "of at least 0" : "above 0");
        },
        ""
    };
}

/// Prints one empty line between groups, where CLI11 prints two.
struct HelpFormatter : CLI::Formatter {
    std::string
    make_help(CLI::App const* app, std::string name, CLI::AppFormatMode mode) const override {
        std::string help = CLI::Formatter::make_help(app, std::move(name), mode);
        for (std::size_t at = 0; (at = help.find("\n\n\n", at)) != std::string::npos;) {
            help.erase(at, 1);
        }
        return help;
    }
};

/// Adds options to a group of the help. Each has a word for its value and a text, which includes
/// the default of a number.
struct OptionGroup {
    CLI::App& app;
    char const* name;

    template <class Value>
    CLI::Option& add(char const* option, Value& value, char const* word, std::string text) const {
        CLI::Option& added = *app.add_option(option, value)->group(name)->option_text(word);
        if constexpr (std::is_arithmetic_v<Value>) {
            added.capture_default_str();
            text += " Default: " + added.get_default_str() + ".";
        }
        return *added.description(text);
    }
};

inline void add_text_options(CLI::App& app, Options& options) {
    OptionGroup const group{app, "Text"};
    app.add_option("files", options.paths)
        ->option_text(" ")
        ->description("Files and folders to read. Default: a part of this repository's text.");
    app.add_option("--limit-bytes", options.limit_bytes)
        ->group("Text")
        ->option_text("N")
        ->description(
            "Read at most N bytes; 0 reads everything. Default: everything of the files\n"
            "that are given, " +
            std::to_string(default_limit_bytes) + " bytes of this repository."
        )
        ->check(number(true));
    std::map<std::string, Mode> const modes{
        {"join", Mode::join}, {"drop", Mode::drop}, {"even", Mode::even}
    };
    group
        .add(
            "--mode",
            options.mode,
            "WORD",
            "How ranks get the text. Default: join.\n"
            "join: whole files in turn, so that ranks have different amounts.\n"
            "drop: the same, then every rank is cut to the shortest one.\n"
            "even: equal parts of all the text."
        )
        .transform(one_of(modes));
}

inline void add_rank_options(CLI::App& app, Options& options) {
    OptionGroup const group{app, "Ranks"};
    group.add("--ranks", options.ranks, "N", "How many there are, 1 to 256.")
        .check(CLI::Range(1, 256));
    group
        .add(
            "--communicator",
            options.communicator,
            "WORD",
            "What a rank is. Default: thread.\n"
            "thread, process: this program starts --ranks of them.\n"
            "tcp: a process that a launcher started, on any machine. Rank 0 sums all\n"
            "gradients. gloo: the same, but ranks send gradients to each other.\n"
            "These four give the same numbers, bit for bit.\n"
            "mpi: a process that mpirun started, on any machine. MPI orders the sums.\n"
            "machines: a launcher starts this program once on each machine, and it starts\n"
            "--ranks processes there. Each machine sums first; TCP connects the machines."
        )
        .transform(one_of(kinds()));
    app.add_flag(
           "--tcp-roll-calls",
           options.has_tcp_roll_calls,
           "With mpi: the guard's roll calls go by TCP, and MPI moves the gradients. \n"
           "JOINABLE_ADDR, JOINABLE_PORT and JOINABLE_SECRET say where rank 0 is."
    )
        ->group("Ranks");
    group.add("--deadline", options.patience, "X", "Seconds that a rank waits for the others.")
        .check(number(false));
    std::map<std::string, Where> const devices{{"host", Where::host}, {"cuda", Where::cuda}};
    group
        .add(
            "--device",
            options.device,
            "WORD",
            "What a rank computes on: host, or cuda for a GPU each, connected by NCCL.\n"
            "Default: host."
        )
        .transform(one_of(devices));
    app.add_flag(
           "--without-join",
           options.without_join,
           "Train without the guard, to see what happens when a rank runs out of text."
    )
        ->group("Ranks");
}

inline void add_training_options(CLI::App& app, Options& options) {
    OptionGroup const group{app, "Training"};
    group.add("--epochs", options.epochs, "N", "Passes over the text, 1 to 1000.")
        .check(CLI::Range(1, 1000));
    group.add("--batch", options.batch_size, "N", "Bytes that a rank takes in one iteration.")
        .check(CLI::Range(1, 1 << 20));
    std::map<std::string, Rule> const rules{
        {"sgd", Rule::sgd}, {"adam", Rule::adam}, {"adamw", Rule::adamw}
    };
    group
        .add(
            "--optimizer",
            options.rule,
            "WORD",
            "How parameters are stepped: sgd, adam or adamw. Default: sgd."
        )
        .transform(one_of(rules));
    std::map<std::string, Sharding> const shardings{
        {"none", Sharding::none},
        {"optimizer", Sharding::optimizer},
        {"gradients", Sharding::gradients},
        {"parameters", Sharding::parameters}
    };
    group
        .add(
            "--sharding",
            options.sharding,
            "WORD",
            "none: each rank has the whole state of the optimizer. optimizer: each has\n"
            "a part, and steps what it belongs to. gradients: it gets averages of this\n"
            "part only. parameters: it keeps values of this part only. All train to the\n"
            "same numbers. Default: none."
        )
        .transform(one_of(shardings));
    app.add_flag(
           "--plan",
           options.only_plans,
           "Print the bytes that a rank needs with each --sharding, and exit."
    )
        ->group("Training");
    std::map<std::string, Reduction> const reductions{
        {"all-reduce", Reduction::all_reduce},
        {"fp16", Reduction::fp16},
        {"bf16", Reduction::bf16},
        {"int8", Reduction::int8},
        {"topk", Reduction::topk},
        {"powersgd", Reduction::powersgd},
        {"local", Reduction::local}
    };
    group
        .add(
            "--reduction",
            options.reduction,
            "WORD",
            "How gradients travel, with sgd. all-reduce: whole. fp16, bf16: in half of\n"
            "the bytes. int8: in one byte each. topk: only the largest. powersgd: as\n"
            "products of thin matrices. What the last three leave out is sent later.\n"
            "local: not at all; each rank steps by its own, and ranks average values.\n"
            "Default: all-reduce."
        )
        .transform(one_of(reductions));
    group.add("--density", options.density, "X", "The part of the elements that topk sends.")
        .check(number(false))
        ->check(CLI::Range(1e-6, 1.0));
    group.add("--vectors", options.vectors, "N", "How many of each matrix powersgd sends.")
        .check(CLI::Range(1, 64));
    group.add("--period", options.period, "N", "Rounds from one average of local to the next.")
        .check(number(false));
    group
        .add(
            "--rate",
            options.given_rate,
            "X",
            "Learning rate at the start. Default: 0.15 for sgd, 0.01 for the others."
        )
        .check(number(false));
    group.add("--momentum", options.momentum, "X", "Momentum of sgd, 0 to 1.")
        .check(number(true))
        ->check(CLI::Range(0.0, 1.0));
    group.add("--seed", options.seed, "N", "Decides the first parameters and the order of batches.")
        .check(number(true));
    group
        .add(
            "--bucket-bytes",
            options.bucket_bytes,
            "N",
            "Bytes of gradients that travel together. With fewer the first ones travel\n"
            "earlier."
        )
        .check(number(false));
}

inline void add_save_options(CLI::App& app, Options& options) {
    OptionGroup const group{app, "Checkpoints, with --sharding"};
    group.add(
        "--checkpoint",
        options.save.file,
        "FILE",
        "Write the training into FILE, in the safetensors layout."
    );
    group.add("--checkpoint-every", options.save.every, "N", "Rounds from one to the next.")
        .check(number(false));
    group.add(
        "--resume",
        options.save.resume,
        "FILE",
        "Go on from FILE. The same number of ranks goes on bit for bit, another one\n"
        "after as many rounds."
    );
}

inline void add_picture_options(CLI::App& app, Options& options) {
    OptionGroup const group{app, "Pictures"};
    group.add(
        "--picture",
        options.picture,
        "FILE",
        "Draw into FILE, as SVG, who trained, waited and shadowed when."
    );
    group.add(
        "--trace", options.trace, "FILE", "Write FILE for ui.perfetto.dev: all of each round."
    );
}

/// Reads the command line. `repository` is the folder to read if no files are given.
/// @throws CLI::ParseError  it is wrong or asks for help: `app.exit` prints the text.
inline Options parse(CLI::App& app, int argc, char** argv, std::string const& repository) {
    Options options;
    app.name("train_text");
    app.description("Trains a small language model on ranks that have different amounts of text.");
    app.footer(
        "Exit status: 0 when the model is trained, or planned; 1 when a rank left or failed, or ranks hold\n"
        "different numbers; 2 when arguments are wrong or no text can be read; 3 when there is no\n"
        "GPU for --device cuda."
    );
    auto const formatter = std::make_shared<HelpFormatter>();
    formatter->column_width(24);
    formatter->label("OPTIONS", "options");
    formatter->label("Positionals", "Input");
    app.formatter(formatter);
    app.set_help_flag("-h,--help", "Print this text and exit.");
    add_text_options(app, options);
    add_rank_options(app, options);
    add_training_options(app, options);
    add_save_options(app, options);
    add_picture_options(app, options);
    app.parse(argc, argv);
    bool const is_told = options.is_launched() && options.communicator != Kind::machines;
    if (is_told && app.count("--ranks") != 0) {
        throw CLI::ValidationError{
            "--ranks", "the launcher says how many there are: leave it out with tcp, gloo or mpi"
        };
    }
    if (options.has_tcp_roll_calls && options.communicator != Kind::mpi) {
        throw CLI::ValidationError{"--tcp-roll-calls", "needs --communicator mpi"};
    }
    bool const can_choose = options.rule == Rule::sgd && options.sharding == Sharding::none &&
                            options.device == Where::host;
    if (options.reduction != Reduction::all_reduce && !can_choose) {
        throw CLI::ValidationError{"--reduction", "needs sgd, --sharding none and --device host"};
    }
    bool const can_plan = !options.is_launched() && options.device == Where::host &&
                          options.reduction == Reduction::all_reduce;
    if (options.only_plans && !can_plan) {
        throw CLI::ValidationError{
            "--plan", "needs thread or process ranks, --device host and --reduction all-reduce"
        };
    }
    for (auto const& [option, reduction, name] :
         {std::tuple{"--density", Reduction::topk, "topk"},
          {"--vectors", Reduction::powersgd, "powersgd"},
          {"--period", Reduction::local, "local"}}) {
        if (app.count(option) != 0 && options.reduction != reduction) {
            throw CLI::ValidationError{option, std::string{"needs --reduction "} + name};
        }
    }
    if (options.paths.empty()) {
        options.paths = {repository};
        if (app.count("--limit-bytes") == 0) {
            options.limit_bytes = default_limit_bytes;
        }
    }
    return options;
}

} // namespace train_text
