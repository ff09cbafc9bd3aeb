"""A rank finds its place in the variables of other launchers: tables of what these really set."""

from __future__ import annotations

import pytest

from asyncpar.core.config.rank_place import explain_batch_script, find_rank_place
from asyncpar.errors import UsageError

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "PMIX_NAMESPACE": "prterun-first-17700@1",
    "PMIX_RANK": "1",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "9", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}
INTEL = {**MPICH, "I_MPI_HYDRA_UUID": "8d450000-8fab-af0c-f360-060047b94d6e"}
SLURM = {
    "SLURM_CLUSTER_NAME": "test",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "n[01-03]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
}
BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "5", "SLURM_JOB_NAME": "bash"}
PLACES = {
    "open mpi": (OPEN_MPI, ("mpiexec (Open MPI)", 1, 3, 0, 2, 0, 2)),
    "mpich": (MPICH, ("mpiexec (MPICH)", 3, 4, 3, 4, 0, 1)),
    "intel": (INTEL, ("mpiexec (Intel MPI)", 3, 4, 3, 4, 0, 1)),
    "slurm": (SLURM, ("srun", 4, 5, 0, 1, 2, 3)),
    # srun --mpi=pmi2 sets PMI_RANK, too, but nothing about the host
    "slurm with pmi2": ({**SLURM, "PMI_RANK": "4", "PMI_SIZE": "5"}, ("srun", 4, 5, 0, 1, 2, 3)),
    # mpiexec within a job starts one proxy on each node by srun; its ranks inherit the proxies' variables
    "mpich in slurm": ({**SLURM, **MPICH}, ("mpiexec (MPICH)", 3, 4, 3, 4, 0, 1)),
    "open mpi in slurm": ({**SLURM, **OPEN_MPI}, ("mpiexec (Open MPI)", 1, 3, 0, 2, 0, 2)),
    # tasks 1 to 3 of `srun -n1 : -n3 -N2`
    "heterogeneous step": (
        {**SLURM, "SLURM_HET_SIZE": "2", "SLURM_PROCID": "2", "SLURM_NODEID": "1", "SLURM_LOCALID": "1"}
        | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1,2,1"},
        ("srun", 2, 4, 1, 2, 1, 3),
    ),
    "task of an array": ({**SLURM, "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}, ("srun", 4, 5, 0, 1, 2, 3)),
    "torch's variables, which agree": ({**SLURM, "RANK": "4", "WORLD_SIZE": "5"}, ("srun", 4, 5, 0, 1, 2, 3)),
}


@pytest.mark.parametrize("name", PLACES)
def test_the_place_is_found(name: str) -> None:
    environment, expected = PLACES[name]
    place = find_rank_place(environment)
    assert place is not None
    found = (place.launcher, place.rank, place.world_size, place.local_rank, place.local_world_size)
    assert (*found, place.group_rank, place.group_world_size) == expected


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "4"},
        {"PMI_RANK": "0", "PMI_SIZE": "2"},
        BATCH_SCRIPT,
        {**MPICH, "PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
        {**SLURM, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
        | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NODELIST": "n1"},
    ],
)
def test_who_is_alone_has_no_place(environment: dict[str, str]) -> None:
    assert find_rank_place(environment) is None


def test_jobs_steps_and_requeued_jobs_have_different_names() -> None:
    variants = [SLURM, {**SLURM, "SLURM_JOB_ID": "8"}, {**SLURM, "SLURM_STEP_ID": "1"}]
    variants += [{**SLURM, "SLURM_RESTART_COUNT": "1"}, {**SLURM, "SLURM_CLUSTER_NAME": "other"}, OPEN_MPI, INTEL]
    names = {place.job for variant in variants if (place := find_rank_place(variant))}
    assert len(names) == len(variants)


def test_slurm_names_the_hosts() -> None:
    place = find_rank_place(SLURM)
    assert place is not None
    assert (place.host, place.hosts) == ("n03", ("n01", "n02", "n03"))


WRONG = {
    "no size": ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE: .* it is not set"),
    "no number": ({**MPICH, "PMI_RANK": "x"}, "PMI_RANK: expected a whole number, got 'x'"),
    "rank beyond the size": ({**MPICH, "PMI_RANK": "4"}, "PMI_SIZE: expected more than PMI_RANK, which is 4, got 4"),
    "local rank beyond": ({**INTEL, "MPI_LOCALRANKID": "4"}, "MPI_LOCALNRANKS: expected more than MPI_LOCALRANKID"),
    "more on a host than in all": ({**MPICH, "MPI_LOCALNRANKS": "5"}, "at most 4 ranks on a host"),
    "fewer tasks than ranks": (
        {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x3)"},
        r"SLURM_STEP_TASKS_PER_NODE: expected 5 tasks \(SLURM_STEP_NUM_TASKS\), '1\(x3\)' has 3",
    ),
    "fewer nodes": ({**SLURM, "SLURM_STEP_NODELIST": "n[1-2]"}, "SLURM_STEP_NODELIST: expected 3 nodes"),
    "node beyond": ({**SLURM, "SLURM_NODEID": "3"}, r"SLURM_NODEID: expected 0\.\.2"),
    "local task beyond": ({**SLURM, "SLURM_LOCALID": "1"}, r"SLURM_LOCALID: expected 0\.\.0 on node 2"),
    "a list that is cut": ({**SLURM, "SLURM_STEP_NODELIST": "n[1-"}, "SLURM_STEP_NODELIST: hosts: expected a list"),
    "no list": ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": ""}, "SLURM_STEP_TASKS_PER_NODE: tasks per node: expected"),
    "no job": ({**SLURM, "SLURM_JOB_ID": ""}, "SLURM_JOB_ID: expected the number of the job"),
    "another rank": ({**SLURM, "RANK": "0"}, "RANK: it is '0', but srun has started this process as rank 4 of 5"),
    "another size": ({**MPICH, "WORLD_SIZE": "8"}, "WORLD_SIZE: it is '8', but mpiexec .MPICH. has started"),
}


@pytest.mark.parametrize("name", WRONG)
def test_variables_that_do_not_fit_are_named(name: str) -> None:
    environment, message = WRONG[name]
    with pytest.raises(UsageError, match=message):
        find_rank_place(environment)


def test_a_batch_script_of_several_tasks_learns_that_it_is_no_rank() -> None:
    assert "start the ranks with srun" in (explain_batch_script(BATCH_SCRIPT) or "")
    for environment in ({}, {**BATCH_SCRIPT, "SLURM_NTASKS": "1"}, SLURM):
        assert explain_batch_script(environment) is None
