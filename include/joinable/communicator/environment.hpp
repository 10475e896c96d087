// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <charconv>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <string_view>
#include <system_error>

#include <joinable/detail/text.hpp>
#include <joinable/error.hpp>

namespace joinable { inline namespace v0 {

/// How a launcher describes this process in environment variables.
struct LaunchEnvironment {
    std::string_view launcher; ///< the launcher whose variables were used
    int rank = 0;
    int size = 0;
    std::string job;    ///< the same on all ranks; differs between jobs
    std::string spread; ///< evidence that the ranks are on several machines; else empty
};

namespace detail {

/// The environment variables of one launcher. An empty name means that it has no such variable.
struct Launcher {
    std::string_view name;
    char const* rank;
    char const* size;
    char const* marker;             ///< only this launcher sets it
    std::array<char const*, 3> job; ///< together they identify the job
    char const* restarts = "";      ///< of the agent of a machine; others count their own
    char const* local_size = "";    ///< ranks on this machine
    char const* machines = "";
    std::string_view without_job; ///< what to do if `job` is not set
};

/// The order matters: a launcher that another one starts comes first, because its variables are
/// more specific.
inline constexpr std::array<Launcher, 6> launchers{{
    {.name = "joinable",
     .rank = "JOINABLE_RANK",
     .size = "JOINABLE_WORLD_SIZE",
     .marker = "JOINABLE_RANK",
     .job = {"JOINABLE_JOB"},
     .without_job =
         "set it to a text that is the same on all ranks of this job and differs between jobs"},
    {.name = "torchrun",
     .rank = "RANK",
     .size = "WORLD_SIZE",
     .marker = "TORCHELASTIC_RUN_ID",
     .job = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"},
     .restarts = "TORCHELASTIC_RESTART_COUNT",
     .local_size = "LOCAL_WORLD_SIZE",
     .without_job = "start the ranks by torchrun, or set JOINABLE_JOB"},
    {.name = "mpirun of Open MPI",
     .rank = "OMPI_COMM_WORLD_RANK",
     .size = "OMPI_COMM_WORLD_SIZE",
     .marker = "OMPI_COMM_WORLD_RANK",
     .job = {"PMIX_NAMESPACE"},
     .local_size = "OMPI_COMM_WORLD_LOCAL_SIZE",
     .without_job = "start the ranks by mpirun, or set JOINABLE_JOB"},
    {.name = "mpiexec of MPICH",
     .rank = "PMI_RANK",
     .size = "PMI_SIZE",
     .marker = "PMI_RANK",
     .job = {"PMI_JOBID"},
     .local_size = "MPI_LOCALNRANKS",
     .without_job = "MPICH's mpiexec names no job: start the ranks by mpiexec -genv JOINABLE_JOB $$"
    },
    {.name = "torch.distributed",
     .rank = "RANK",
     .size = "WORLD_SIZE",
     .marker = "RANK",
     .job = {"MASTER_ADDR", "MASTER_PORT"},
     .local_size = "LOCAL_WORLD_SIZE",
     .without_job = "set it as for torch.distributed, or set JOINABLE_JOB"},
    {.name = "srun",
     .rank = "SLURM_PROCID",
     .size = "SLURM_NTASKS",
     .marker = "SLURM_PROCID",
     .job = {"SLURM_JOB_ID", "SLURM_STEP_ID"},
     .machines = "SLURM_STEP_NUM_NODES",
     .without_job = "start the ranks by srun, not by sbatch alone, or set JOINABLE_JOB"},
}};

/// Reads one environment by `lookup(name)`, which returns null for a variable that is not set.
template <class Lookup>
class LaunchReader {
public:
    explicit LaunchReader(Lookup const& lookup) noexcept : lookup_{lookup} {}

    /// The launcher that started this process, or null.
    [[nodiscard]] Launcher const* launcher() const {
        for (Launcher const& launcher : launchers) {
            if (is_set(launcher.marker)) {
                return &launcher;
            }
        }
        return nullptr;
    }
    /// Whether one of these variables is set.
    [[nodiscard]] bool finds_any(std::initializer_list<char const*> names) const {
        for (char const* const name : names) {
            if (is_set(name)) {
                return true;
            }
        }
        return false;
    }
    [[nodiscard]] LaunchEnvironment read() const {
        if (Launcher const* const found = launcher()) {
            return read(*found);
        }
        throw ContractViolation{concat(
            "expected the rank of this process in an environment variable, but found none of ",
            names_of_ranks(),
            "; start the ranks by mpirun, torchrun or srun, or set JOINABLE_RANK, "
            "JOINABLE_WORLD_SIZE and JOINABLE_JOB"
        )};
    }

    /// The variables by which launchers tell ranks, for texts.
    [[nodiscard]] static std::string names_of_ranks() {
        std::string names;
        for (Launcher const& launcher : launchers) {
            if (names.find(concat(" ", launcher.rank)) == std::string::npos) {
                names += concat(names.empty() ? "" : ", ", launcher.rank);
            }
        }
        return names;
    }

private:
    [[nodiscard]] std::string_view text(char const* name) const {
        char const* const value = *name == '\0' ? nullptr : lookup_(name);
        return value == nullptr ? std::string_view{} : value;
    }
    [[nodiscard]] bool is_set(char const* name) const { return !text(name).empty(); }

    [[nodiscard]] LaunchEnvironment read(Launcher const& launcher) const {
        LaunchEnvironment found{launcher.name, 0, 0, {}, {}};
        found.size = number(launcher, launcher.size);
        if (found.size < 1) {
            refuse(launcher.size, "at least 1 rank");
        }
        found.rank = number(launcher, launcher.rank);
        if (found.rank < 0 || found.rank >= found.size) {
            refuse(launcher.rank, concat("a rank below ", launcher.size, " = ", found.size));
        }
        found.spread = spread(launcher, found.size);
        found.job = job(launcher, found.spread.empty() ? launcher.restarts : "");
        return found;
    }

    [[nodiscard]] int number(Launcher const& launcher, char const* name) const {
        std::string_view const given = text(name);
        if (given.empty()) {
            throw ContractViolation{concat(
                launcher.marker,
                " is set, so ",
                name,
                " was expected, too, but it is not set; set both as ",
                launcher.name,
                " does, or unset ",
                launcher.marker
            )};
        }
        int value = 0;
        auto const [end, error] = std::from_chars(given.data(), given.data() + given.size(), value);
        if (error != std::errc{} || end != given.data() + given.size()) {
            refuse(name, "a number");
        }
        return value;
    }
    [[noreturn]] void refuse(char const* name, std::string const& expected) const {
        throw ContractViolation{
            concat("expected ", expected, " in ", name, ", but it is \"", text(name), "\"")
        };
    }

    [[nodiscard]] std::string job(Launcher const& launcher, char const* restarts) const {
        if (is_set("JOINABLE_JOB")) {
            return std::string{text("JOINABLE_JOB")};
        }
        std::string job{launcher.name};
        for (char const* const name : launcher.job) {
            if (name != nullptr && !is_set(name)) {
                throw ContractViolation{concat(
                    "expected a value that identifies this job in ",
                    name,
                    ", but it is not set; ",
                    launcher.without_job
                )};
            }
            job += name != nullptr ? concat("/", text(name)) : "";
        }
        job += *restarts != '\0' ? concat("/", text(restarts)) : "";
        return job;
    }

    [[nodiscard]] std::string spread(Launcher const& launcher, int size) const {
        if (is_set(launcher.local_size)) {
            return number(launcher, launcher.local_size) == size ? std::string{}
                                                                 : concat(
                                                                       launcher.local_size,
                                                                       " is ",
                                                                       text(launcher.local_size),
                                                                       " and ",
                                                                       launcher.size,
                                                                       " is ",
                                                                       size
                                                                   );
        }
        if (launcher.name == launchers.front().name) {
            return {}; // set by hand, perhaps for ranks within one task of a launcher
        }
        for (Launcher const& outer : launchers) { // srun sets the ranks of MPICH, too
            if (is_set(outer.machines) && number(outer, outer.machines) != 1) {
                return concat(outer.machines, " is ", text(outer.machines));
            }
        }
        return {};
    }

    Lookup const& lookup_;
};

struct ProcessEnvironment {
    [[nodiscard]] char const* operator()(char const* name) const noexcept {
        return std::getenv(name);
    }
};
/// Reads the environment of this process.
[[nodiscard]] inline LaunchReader<ProcessEnvironment> own_environment() noexcept {
    static constexpr ProcessEnvironment lookup;
    return LaunchReader<ProcessEnvironment>{lookup};
}

} // namespace detail

/// Reads what the launcher of this process says: mpirun of Open MPI, mpiexec of MPICH, torchrun, or
/// srun. JOINABLE_RANK and JOINABLE_WORLD_SIZE take precedence over these. JOINABLE_JOB names the
/// job under every launcher. `lookup(name)` returns the value of a variable, or null if it is not
/// set.
/// @throws ContractViolation  variables are missing, are not numbers, or contradict each other.
template <class Lookup>
[[nodiscard]] LaunchEnvironment launch_environment(Lookup const& lookup) {
    return detail::LaunchReader<Lookup>{lookup}.read();
}
[[nodiscard]] inline LaunchEnvironment launch_environment() {
    return detail::own_environment().read();
}

}} // namespace joinable::v0
