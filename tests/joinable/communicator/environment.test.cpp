// SPDX-License-Identifier: BSL-1.0
// The variables are those that Open MPI 4.1, MPICH 4.0, torchrun 2 and srun 22 set.
#include <joinable/communicator/environment.hpp>

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

#include <joinable/error.hpp>

namespace {

using joinable::ContractViolation;
using joinable::LaunchEnvironment;
using Variables = std::map<std::string_view, char const*>;

LaunchEnvironment read(Variables const& variables) {
    return joinable::launch_environment([&](char const* name) {
        auto const found = variables.find(name);
        return found == variables.end() ? nullptr : found->second;
    });
}

Variables const open_mpi{
    {"OMPI_COMM_WORLD_RANK", "2"},
    {"OMPI_COMM_WORLD_SIZE", "3"},
    {"OMPI_COMM_WORLD_LOCAL_RANK", "2"},
    {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
    {"PMIX_NAMESPACE", "1505492993"},
    {"PMIX_RANK", "2"},
};
Variables const mpich{
    {"PMI_RANK", "1"},
    {"PMI_SIZE", "2"},
    {"PMI_FD", "8"},
    {"MPI_LOCALRANKID", "1"},
    {"MPI_LOCALNRANKS", "2"},
};
Variables const torchrun{
    {"RANK", "3"},
    {"WORLD_SIZE", "4"},
    {"LOCAL_RANK", "3"},
    {"LOCAL_WORLD_SIZE", "4"},
    {"MASTER_ADDR", "127.0.0.1"},
    {"MASTER_PORT", "29500"},
    {"TORCHELASTIC_RUN_ID", "none"},
    {"TORCHELASTIC_RESTART_COUNT", "0"},
};
Variables const srun{
    {"SLURM_PROCID", "5"},
    {"SLURM_NTASKS", "8"},
    {"SLURM_LOCALID", "5"},
    {"SLURM_JOB_ID", "4711"},
    {"SLURM_STEP_ID", "0"},
    {"SLURM_NNODES", "1"},
    {"SLURM_STEP_NUM_NODES", "1"},
};

Variables with(Variables variables, Variables const& others) {
    for (auto const& [name, value] : others) {
        variables[name] = value;
    }
    return variables;
}
Variables without(Variables variables, std::string_view name) {
    variables.erase(name);
    return variables;
}

TEST_CASE("each launcher's variables give rank, world size and job") {
    struct Case {
        Variables variables;
        int rank;
        int size;
        std::string job;
    };
    std::vector<Case> const cases{
        {open_mpi, 2, 3, "mpirun of Open MPI/1505492993"},
        {with(mpich, {{"PMI_JOBID", "77.1"}}), 1, 2, "mpiexec of MPICH/77.1"},
        {with(mpich, {{"JOINABLE_JOB", "77"}}), 1, 2, "77"},
        {torchrun, 3, 4, "torchrun/127.0.0.1/29500/none/0"},
        {srun, 5, 8, "srun/4711/0"},
        {{{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}},
         0,
         1,
         "torch.distributed/a/1"},
        {{{"JOINABLE_RANK", "7"}, {"JOINABLE_WORLD_SIZE", "9"}, {"JOINABLE_JOB", "x y"}},
         7,
         9,
         "x y"},
        {with(open_mpi, {{"JOINABLE_JOB", "mine"}}), 2, 3, "mine"},
    };
    for (Case const& expected : cases) {
        LaunchEnvironment const found = read(expected.variables);
        CAPTURE(found.launcher);
        CHECK(found.rank == expected.rank);
        CHECK(found.size == expected.size);
        CHECK(found.job == expected.job);
        CHECK(found.spread.empty());
    }
}

TEST_CASE("a launcher within another one is asked first, and our own variables before all") {
    CHECK(read(with(srun, open_mpi)).rank == 2);
    CHECK(read(with(with(srun, mpich), {{"PMI_JOBID", "4711.0"}})).rank == 1);
    CHECK(read(with(srun, torchrun)).rank == 3);
    CHECK(read(with(open_mpi, torchrun)).rank == 3);
    CHECK(read(with(open_mpi, {{"RANK", "0"}})).rank == 2);
    Variables const own{
        {"JOINABLE_RANK", "0"}, {"JOINABLE_WORLD_SIZE", "2"}, {"JOINABLE_JOB", "mine"}
    };
    for (auto const& launcher : {open_mpi, mpich, torchrun, srun}) {
        LaunchEnvironment const found = read(with(launcher, own));
        CHECK(found.rank == 0);
        CHECK(found.size == 2);
        CHECK(found.job == "mine");
    }
}

TEST_CASE("jobs that run at the same time, and restarts of one, have different ids") {
    auto const differ = [](Variables const& variables, Variables const& change) {
        CHECK(read(variables).job != read(with(variables, change)).job);
    };
    differ(open_mpi, {{"PMIX_NAMESPACE", "1505492994"}});
    differ(torchrun, {{"TORCHELASTIC_RESTART_COUNT", "1"}});
    differ(torchrun, {{"TORCHELASTIC_RUN_ID", "other"}});
    differ(torchrun, {{"MASTER_PORT", "29501"}});
    differ(torchrun, {{"MASTER_ADDR", "127.0.0.2"}});
    differ(srun, {{"SLURM_JOB_ID", "4712"}});
    differ(srun, {{"SLURM_STEP_ID", "1"}});
}

TEST_CASE("ranks whose agents count restarts apart have one job") {
    auto const job_after = [](char const* restarts, char const* local_size) {
        return read(with(
                        torchrun,
                        {{"TORCHELASTIC_RESTART_COUNT", restarts}, {"LOCAL_WORLD_SIZE", local_size}}
                    )
        ).job;
    };
    CHECK(job_after("0", "1") == "torchrun/127.0.0.1/29500/none");
    CHECK(job_after("2", "3") == job_after("0", "1"));
    CHECK(job_after("2", "4") == "torchrun/127.0.0.1/29500/none/2"); // one agent has all ranks
}

TEST_CASE("ranks on several machines are noticed where the launcher tells") {
    CHECK(
        read(with(open_mpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}})).spread ==
        "OMPI_COMM_WORLD_LOCAL_SIZE is 2 and OMPI_COMM_WORLD_SIZE is 3"
    );
    CHECK(
        read(with(torchrun, {{"LOCAL_WORLD_SIZE", "2"}})).spread ==
        "LOCAL_WORLD_SIZE is 2 and WORLD_SIZE is 4"
    );
    CHECK(
        read(with(mpich, {{"MPI_LOCALNRANKS", "1"}, {"JOINABLE_JOB", "1"}})).spread ==
        "MPI_LOCALNRANKS is 1 and PMI_SIZE is 2"
    );
    Variables const on_two = with(srun, {{"SLURM_STEP_NUM_NODES", "2"}});
    CHECK(read(on_two).spread == "SLURM_STEP_NUM_NODES is 2");
    Variables const by_pmi =
        with(with(on_two, without(mpich, "MPI_LOCALNRANKS")), {{"PMI_JOBID", "4711.0"}});
    CHECK(read(by_pmi).launcher == "mpiexec of MPICH"); // as srun --mpi=pmi2 says
    CHECK(read(by_pmi).spread == "SLURM_STEP_NUM_NODES is 2");
    CHECK(read(with(on_two, open_mpi)).spread.empty()); // it says that all are here
    CHECK(read(with(
                   on_two,
                   {{"JOINABLE_RANK", "0"}, {"JOINABLE_WORLD_SIZE", "2"}, {"JOINABLE_JOB", "mine"}}
               ))
              .spread.empty());
}

TEST_CASE("what is missing, no number or no rank is named") {
    struct Case {
        Variables variables;
        char const* text;
    };
    std::vector<Case> const cases{
        {{},
         "expected the rank of this process in an environment variable, but found none of "
         "JOINABLE_RANK, RANK, OMPI_COMM_WORLD_RANK, PMI_RANK, SLURM_PROCID; start the ranks by "
         "mpirun, torchrun or srun, or set JOINABLE_RANK, JOINABLE_WORLD_SIZE and JOINABLE_JOB"},
        {without(open_mpi, "OMPI_COMM_WORLD_SIZE"),
         "OMPI_COMM_WORLD_RANK is set, so OMPI_COMM_WORLD_SIZE was expected, too, but it is not "
         "set; "
         "set both as mpirun of Open MPI does, or unset OMPI_COMM_WORLD_RANK"},
        {with(open_mpi, {{"OMPI_COMM_WORLD_RANK", "2x"}}),
         "expected a number in OMPI_COMM_WORLD_RANK, but it is \"2x\""},
        {with(torchrun, {{"WORLD_SIZE", " 4"}}), "expected a number in WORLD_SIZE, but it is \" 4\""
        },
        {with(torchrun, {{"RANK", "99999999999"}}),
         "expected a number in RANK, but it is \"99999999999\""},
        {with(torchrun, {{"RANK", "4"}}),
         "expected a rank below WORLD_SIZE = 4 in RANK, but it is \"4\""},
        {with(srun, {{"SLURM_PROCID", "-1"}}),
         "expected a rank below SLURM_NTASKS = 8 in SLURM_PROCID, but it is \"-1\""},
        {with(mpich, {{"PMI_SIZE", "0"}}), "expected at least 1 rank in PMI_SIZE, but it is \"0\""},
        {with(open_mpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "all"}}),
         "expected a number in OMPI_COMM_WORLD_LOCAL_SIZE, but it is \"all\""},
        {mpich,
         "expected a value that identifies this job in PMI_JOBID, but it is not set; MPICH's "
         "mpiexec "
         "names no job: start the ranks by mpiexec -genv JOINABLE_JOB $$"},
        {without(srun, "SLURM_STEP_ID"),
         "expected a value that identifies this job in SLURM_STEP_ID, but it is not set; start the "
         "ranks by srun, not by sbatch alone, or set JOINABLE_JOB"},
        {{{"JOINABLE_RANK", "0"}, {"JOINABLE_WORLD_SIZE", "2"}},
         "expected a value that identifies this job in JOINABLE_JOB, but it is not set; set it to a "
         "text that is the same on all ranks of this job and differs between jobs"},
        {with(torchrun, {{"MASTER_PORT", ""}}),
         "expected a value that identifies this job in MASTER_PORT, but it is not set; start the "
         "ranks by torchrun, or set JOINABLE_JOB"},
    };
    for (Case const& expected : cases) {
        CHECK_THROWS_WITH_AS(
            static_cast<void>(read(expected.variables)), expected.text, ContractViolation
        );
    }
}

} // namespace
