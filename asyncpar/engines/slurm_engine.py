"""Places on nodes of Slurm: an ``srun`` for each node runs the agent, and its streams carry orders and events.

The nodes are those of the job that the caller runs in, or of one that is requested with ``salloc`` and ends with the
caller: ``salloc`` runs a ``cat`` whose input the caller holds.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from asyncpar.core.config.hostlist import expand_hosts
from asyncpar.engines.interface import (
    Handle,
    JobSpec,
    Place,
    PlaceEvent,
    PlaceLost,
    PlacementEngine,
    PlaceOrder,
)
from asyncpar.engines.streamed_places import StreamedPlaces, StreamedProgram
from asyncpar.errors import LaunchError, UsageError

_ASK_SECONDS: Final = 60.0
_HOLD: Final = 'echo "$SLURM_JOB_ID $SLURM_JOB_NODELIST"; exec cat'
_KEPT: Final = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CONF_SERVER", "SLURM_JWT")


class SlurmEngine(PlacementEngine):
    """Nodes of Slurm, with ``per_place`` ranks of a job on each; ``allocation`` are options of ``salloc``."""

    def __init__(self, *, allocation: Sequence[str] = (), python: str = sys.executable) -> None:
        self._allocation = allocation
        self._python = python
        self._held: StreamedProgram | None = None
        self._places = StreamedPlaces()
        self._steps: dict[int, str] = {}

    async def allocate(self, spec: JobSpec) -> Sequence[Place]:
        if shutil.which("srun") is None:
            raise UsageError("srun: it is not in PATH; call this where jobs are submitted, or in a job")
        per_place = spec.per_place or 1
        size = -(-spec.ranks // per_place)
        job, nodes = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_JOB_NODELIST", "")
        if not job:
            job, nodes = await self._ask_for_nodes(spec, size, per_place)
        names = expand_hosts(nodes)
        if len(names) < size:
            raise UsageError(
                f"ranks: expected at most {len(names) * per_place}, {per_place} on each of the {len(names)} nodes of "
                f"Slurm's job {job}, got {spec.ranks}; per_node= puts more on each"
            )
        for name in names[:size]:
            await self._places.begin(self._step(job, name), _environment_of_steps())
        return [await self._describe(number, name, spec, per_place) for number, name in enumerate(names[:size])]

    def _step(self, job: str, node: str) -> list[str]:
        """Return the command that runs the agent on ``node``, beside other steps of the job."""
        step = ["srun", f"--jobid={job}", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--overlap", "--mpi=none"]
        return [*step, "--quiet", "--unbuffered", self._python, "-m", "asyncpar.engines.slurm_place"]

    async def start(self, place: Place, order: PlaceOrder, take: Callable[[PlaceEvent], None]) -> Handle:
        return await self._places.start(place, order, take)

    def failures(self) -> AsyncIterator[PlaceLost]:
        """Yield nodes whose ``srun`` ends, or that give no sign of life."""
        return self._places.failures()

    async def release(self) -> None:
        await self._places.release(self._kill_step)
        held, self._held = self._held, None
        if held is not None:
            await held.end()

    async def _kill_step(self, number: int) -> None:
        step = self._steps.get(number)
        if step is not None:
            killing = await StreamedProgram.begin(["scancel", "--signal=KILL", step], os.environ)
            await killing.end()

    async def _ask_for_nodes(self, spec: JobSpec, size: int, per_place: int) -> tuple[str, str]:
        """Return the number of a new job, and its nodes, once Slurm grants them."""
        wanted = [f"--nodes={size}", f"--ntasks={size}", "--ntasks-per-node=1", f"--cpus-per-task={per_place}"]
        wanted += [f"--job-name={spec.name}", *self._allocation]
        trial = await StreamedProgram.begin(["srun", "--test-only", *wanted, "true"], os.environ)
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                cause = await trial.cause()
        except TimeoutError as error:
            raise LaunchError(f"srun does not answer within {_ASK_SECONDS:g} s; try `scontrol ping`") from error
        finally:
            await trial.end()
        if trial.exit_code != 0:
            raise UsageError(f"ranks: Slurm has no nodes for {spec.ranks}, {per_place} on each of {size}: {cause}")
        self._held = await StreamedProgram.begin(["salloc", "--quiet", *wanted, "sh", "-c", _HOLD], os.environ)
        seconds = spec.timeout + spec.wait
        try:
            async with asyncio.timeout(seconds):
                given = (await self._held.read_line()).decode().split()
                if not given:
                    raise UsageError(f"ranks: Slurm gives no nodes for {spec.ranks}: {await self._held.cause()}")
        except TimeoutError as error:
            raise UsageError(
                f"ranks: Slurm has not given {size} nodes within {seconds:g} s (timeout= and wait=): others hold them"
            ) from error
        return given[0], given[1]

    async def _describe(self, number: int, name: str, spec: JobSpec, slots: int) -> Place:
        """Return the place on a node, when its Python has started."""
        called = f"Slurm's node {name}"
        seen = await self._places.describe(number, called, seconds=spec.timeout)
        self._steps[number] = seen["step"]
        return Place(name=called, host=seen["host"], address=seen["address"], slots=slots)


def _environment_of_steps() -> dict[str, str]:
    """Return an environment in which ``srun`` follows its options, even where Slurm runs this process."""
    return {name: text for name, text in os.environ.items() if not name.startswith("SLURM_") or name in _KEPT}
