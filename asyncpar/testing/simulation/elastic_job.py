"""An elastic job in a simulation: an agent and a rank on every node, as in production."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from asyncpar.elasticity import job as elastic_job
from asyncpar.elasticity.pipe import PipeWorlds
from asyncpar.elasticity.worlds import WorldSource
from asyncpar.errors import LaunchError
from asyncpar.hosts.total_loss import ALL_LOST
from asyncpar.testing.simulation.agents import SimulatedAgents, simulated_job
from asyncpar.testing.simulation.cluster import SimulatedCluster
from asyncpar.testing.simulation.job import JobRecord
from asyncpar.testing.simulation.process import SimulatedProcess

ElasticMain = Callable[[], Awaitable[Any]]

MEET_SECONDS: Final = 2.0
"""Seconds that agents have to form a group before the job, and all faults, begin."""

_SOURCE: Final[ContextVar[WorldSource]] = ContextVar("asyncpar simulated worlds")


class SimulatedElasticJob(JobRecord):
    """Runs ``main()``, which uses ``ap.elastic``, on every node.

    A rank whose process dies starts again, as in a real job; a job all of whose ranks have died ends.
    """

    def __init__(self, cluster: SimulatedCluster, main: ElasticMain, *, seed: object, witnesses: int) -> None:
        super().__init__()
        self._main = main
        job = simulated_job((1, cluster.size))
        self.agents = SimulatedAgents(cluster, job, self._run, seed=seed, witnesses=witnesses)
        self.agents.on_rank, self.agents.on_over = self._started, self.changed.set
        cluster.on_stop, cluster.on_leave = self.agents.stopped, self.agents.leave

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let ``ap.elastic`` find the worlds of the process in which it is called."""
        saved = elastic_job._default_source
        elastic_job._default_source = _SOURCE.get
        try:
            yield
        finally:
            elastic_job._default_source = saved

    def begin(self) -> None:
        """Start the agents of all nodes, which form a group and then, at 0.0, start their ranks."""
        self.agents.cluster.loop.begin_before(MEET_SECONDS)
        self.agents.start_all()

    def begin_anew(self, node: int) -> None:
        """Start the agent of ``node`` again, unless it runs."""
        self.agents.start(node)
        self.changed.set()

    def ended(self, process: SimulatedProcess) -> None:
        """Handle the death of a process from a fault."""
        self.agents.died(process)
        self.changed.set()

    def is_over(self, nodes: frozenset[int]) -> bool:
        return all(self.agents.is_over(node) or self.agents.is_kept_out(node) for node in nodes)

    def excuses(self, process: SimulatedProcess, error: BaseException) -> bool:  # noqa: ARG002
        return isinstance(error, LaunchError) and self._may_be_lost(str(error))

    def failure(self) -> LaunchError | None:
        end = self.agents.end
        if end is None or end.is_complete or self._may_be_lost(end.message):
            return None
        return LaunchError(end.message or f"exit code {end.exit_code}")

    def _may_be_lost(self, why: str) -> bool:
        """Decide whether faults have ended all members of the job."""
        return ALL_LOST in why and len(self.agents.dead) == self.agents.cluster.size

    def _started(self, process: SimulatedProcess) -> None:
        self.ranks = [*(rank for rank in self.ranks if rank.node != process.node), process]

    async def _run(self, process: SimulatedProcess, worlds: PipeWorlds) -> bool:
        _SOURCE.set(worlds)
        await self.record(process, _awaited(self._main))
        return process in self.results


async def _awaited(main: ElasticMain) -> Any:
    return await main()
