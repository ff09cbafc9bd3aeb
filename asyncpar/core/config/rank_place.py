"""The place of a rank started by a foreign launcher, from that launcher's environment variables.

========== ============================================= ==============================================================
launcher   rank, size; local rank, local size            the job's name
========== ============================================= ==============================================================
Open MPI   ``OMPI_COMM_WORLD_RANK``, ``_SIZE``,          ``PMIX_NAMESPACE``
           ``_LOCAL_RANK``, ``_LOCAL_SIZE``
MPICH      ``PMI_RANK``, ``PMI_SIZE``,                   none: found from the ranks' parent process (``meeting.py``)
           ``MPI_LOCALRANKID``, ``MPI_LOCALNRANKS``
Intel MPI  as MPICH                                      ``I_MPI_HYDRA_UUID``
Slurm      ``SLURM_PROCID``, ``SLURM_STEP_NUM_TASKS``,   ``SLURM_JOB_ID``, ``SLURM_STEP_ID``
           ``SLURM_LOCALID``,
           ``SLURM_STEP_TASKS_PER_NODE``
========== ============================================= ==============================================================

They are tried in this order: an ``mpiexec`` in a Slurm job starts its proxies by ``srun``, and the ranks inherit their
variables.  ``SLURM_PROCID`` without ``SLURM_STEP_ID`` means a batch script, which is not a rank; it has
``SLURM_NTASKS``, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from asyncpar.core.config.hostlist import expand_hosts, expand_tasks
from asyncpar.errors import UsageError

_OPEN_MPI = "OMPI_COMM_WORLD_"
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignPlace:
    """A rank started by ``launcher``; fields are named as in ``LaunchEnvironment``.

    ``job`` is equal on all ranks, and unique among jobs that run at the same time; empty if the environment has no such
    name.  ``host`` is the launcher's name of this host, ``hosts`` those of all in order; empty if it does not provide
    them.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int
    group_world_size: int
    job: str
    restart_count: int = 0
    host: str = ""
    hosts: tuple[str, ...] = ()

    @property
    def generation(self) -> int:
        """The generation of the world: 0, since foreign launchers make only one."""
        return 0


def find_rank_place(environment: Mapping[str, str]) -> ForeignPlace | None:
    """Return the place of this process; None if no foreign launcher started it as one of several ranks.

    Raises ``UsageError`` naming the variable that is missing, wrong, or in conflict with another one.
    """
    place = _of_open_mpi(environment) or _of_hydra(environment) or _of_slurm(environment)
    if place is None:
        return None
    _check_same(environment, "RANK", place.rank, place)
    _check_same(environment, "WORLD_SIZE", place.world_size, place)
    return place if place.world_size > 1 else None


def explain_batch_script(environment: Mapping[str, str]) -> str | None:
    """Return a warning if this process runs in the batch script of a job of several tasks, and so is not a rank."""
    tasks = environment.get("SLURM_NTASKS", "")
    if not environment.get("SLURM_JOB_ID") or environment.get("SLURM_STEP_ID") or tasks in ("", "1"):
        return None
    return (
        f"this is the batch script of Slurm's job {environment['SLURM_JOB_ID']}, which has {tasks} tasks, but one "
        "process that is a world of its own; start the ranks with srun"
    )


def _of_open_mpi(environment: Mapping[str, str]) -> ForeignPlace | None:
    if f"{_OPEN_MPI}RANK" not in environment:
        return None
    rank = _number(environment, f"{_OPEN_MPI}RANK")
    size = _size(environment, f"{_OPEN_MPI}SIZE", rank, f"{_OPEN_MPI}RANK")
    local_rank = _number(environment, f"{_OPEN_MPI}LOCAL_RANK")
    local_size = _size(environment, f"{_OPEN_MPI}LOCAL_SIZE", local_rank, f"{_OPEN_MPI}LOCAL_RANK")
    return _unplaced("mpiexec (Open MPI)", rank, size, local_rank, local_size, environment.get("PMIX_NAMESPACE", ""))


def _of_hydra(environment: Mapping[str, str]) -> ForeignPlace | None:
    """Return the place given by Hydra, the launcher of MPICH and Intel MPI.

    ``PMI_RANK`` alone may come from ``srun --mpi=pmi2``.
    """
    if "PMI_RANK" not in environment or "MPI_LOCALRANKID" not in environment:
        return None
    rank = _number(environment, "PMI_RANK")
    size = _size(environment, "PMI_SIZE", rank, "PMI_RANK")
    local_rank = _number(environment, "MPI_LOCALRANKID")
    local_size = _size(environment, "MPI_LOCALNRANKS", local_rank, "MPI_LOCALRANKID")
    of_intel = environment.get("I_MPI_HYDRA_UUID", "")
    name = "mpiexec (Intel MPI)" if of_intel else "mpiexec (MPICH)"
    return _unplaced(name, rank, size, local_rank, local_size, of_intel)


def _unplaced(launcher: str, rank: int, size: int, local_rank: int, local_size: int, job: str) -> ForeignPlace:
    """Return the place for a launcher that does not number hosts: assume the same number of ranks on each."""
    if local_size > size:
        raise UsageError(f"{launcher}: expected at most {size} ranks on a host, all of the job, got {local_size}")
    hosts = -(-size // local_size)
    return ForeignPlace(
        launcher=launcher,
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
        group_rank=min(rank // local_size, hosts - 1),
        group_world_size=hosts,
        job=job,
    )


def _of_slurm(environment: Mapping[str, str]) -> ForeignPlace | None:
    if not environment.get("SLURM_STEP_ID") or "SLURM_PROCID" not in environment:
        return None
    rank = _number(environment, "SLURM_PROCID")
    size = _size(environment, "SLURM_STEP_NUM_TASKS", rank, "SLURM_PROCID")
    local_rank, node = _number(environment, "SLURM_LOCALID"), _number(environment, "SLURM_NODEID")
    tasks = _expanded(environment, "SLURM_STEP_TASKS_PER_NODE", expand_tasks)
    hosts = _expanded(environment, "SLURM_STEP_NODELIST", expand_hosts)
    if sum(tasks) != size:
        text = environment["SLURM_STEP_TASKS_PER_NODE"]
        raise UsageError(
            f"SLURM_STEP_TASKS_PER_NODE: expected {size} tasks (SLURM_STEP_NUM_TASKS), {text!r} has {sum(tasks)}"
        )
    if len(hosts) != len(tasks):
        text = environment["SLURM_STEP_NODELIST"]
        raise UsageError(
            f"SLURM_STEP_NODELIST: expected {len(tasks)} nodes (SLURM_STEP_TASKS_PER_NODE), {text!r} has {len(hosts)}"
        )
    if node >= len(tasks):
        raise UsageError(f"SLURM_NODEID: expected 0..{len(tasks) - 1} (SLURM_STEP_TASKS_PER_NODE), got {node}")
    if local_rank >= tasks[node]:
        raise UsageError(
            f"SLURM_LOCALID: expected 0..{tasks[node] - 1} on node {node} (SLURM_STEP_TASKS_PER_NODE), got {local_rank}"
        )
    job, step = environment.get("SLURM_JOB_ID", ""), environment["SLURM_STEP_ID"]
    if not job:
        raise UsageError("SLURM_JOB_ID: expected the number of the job, it is not set although SLURM_STEP_ID is")
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    return ForeignPlace(
        launcher="srun",
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=tasks[node],
        group_rank=node,
        group_world_size=len(tasks),
        job=f"slurm-{environment.get('SLURM_CLUSTER_NAME', '')}-{job}.{step}-{restarts}",
        restart_count=_number({"SLURM_RESTART_COUNT": restarts}, "SLURM_RESTART_COUNT"),
        host=hosts[node] if "SLURM_HET_SIZE" not in environment else environment.get("SLURMD_NODENAME", hosts[node]),
        hosts=tuple(hosts),
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"{name}: expected a whole number, " + (f"got {text!r}" if text else "it is not set"))
    return int(text)


def _size(environment: Mapping[str, str], name: str, rank: int, of: str) -> int:
    size = _number(environment, name)
    if rank >= size:
        raise UsageError(f"{name}: expected more than {of}, which is {rank}, got {size}")
    return size


def _expanded(environment: Mapping[str, str], name: str, expand: Callable[[str], list[Item]]) -> list[Item]:
    try:
        return expand(environment.get(name, ""))
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from error


def _check_same(environment: Mapping[str, str], name: str, found: int, place: ForeignPlace) -> None:
    text = environment.get(name, "")
    if text not in ("", str(found)):
        raise UsageError(
            f"{name}: it is {text!r}, but {place.launcher} has started this process as rank {place.rank} of "
            f"{place.world_size}; unset it"
        )
