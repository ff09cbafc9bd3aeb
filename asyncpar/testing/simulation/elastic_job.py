"""An elastic job in a simulation: members on all nodes, and newcomers wherever a process starts again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from random import Random
from typing import Any, Final

from asyncpar.elasticity import job as elastic_job
from asyncpar.elasticity.worlds import WorldSource
from asyncpar.errors import LaunchError, PeerLost, StaleGeneration
from asyncpar.net.membership.world_director import ElasticDirector
from asyncpar.testing.simulation.cluster import SimulatedCluster
from asyncpar.testing.simulation.elastic_worlds import DirectorService, SimulatedWorldSource
from asyncpar.testing.simulation.job import JobRecord
from asyncpar.testing.simulation.process import SimulatedProcess

ElasticMain = Callable[[], Awaitable[Any]]

_SOURCE: Final[ContextVar[WorldSource]] = ContextVar("asyncpar simulated worlds")
_NOTICE_SECONDS: Final = 0.02
_RESTART_SECONDS: Final = 1.0


class SimulatedElasticJob(JobRecord):
    """Runs ``main()``, which uses ``ap.elastic``, on every node.

    A node that starts again runs a newcomer, and so does one whose process was held for lost, and finds that out.
    """

    def __init__(self, cluster: SimulatedCluster, main: ElasticMain, *, seed: object) -> None:
        super().__init__()
        self._cluster = cluster
        self._main = main
        self._dice = Random(f"{seed} lanes")
        self._service: DirectorService | None = None
        self._director_process: SimulatedProcess | None = None
        self._awaited: set[int] = set()
        """Nodes whose next process is about to start."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let ``ap.elastic`` find the worlds of the process that it is called in."""
        saved = elastic_job._default_source
        elastic_job._default_source = _SOURCE.get
        try:
            yield
        finally:
            elastic_job._default_source = saved

    def begin(self) -> None:
        """Start the director and a member on every node."""
        size = self._cluster.size
        self._cluster.helpers = 1
        self._director_process = self._cluster.launch(size, self._direct)
        self.ranks = [self._cluster.launch(node, self._run) for node in range(size)]

    def begin_anew(self, node: int) -> None:
        """Start a newcomer on ``node``, unless something runs there."""
        self._awaited.discard(node)
        if self._cluster.living(node) is None or self.has_ended(self.ranks[node]):
            self.ranks[node] = self._cluster.launch(node, self._run)
        self.changed.set()

    def ended(self, process: SimulatedProcess) -> None:
        """Handle the death of a process by a fault; its machine says so, if it is not off."""
        service, director = self._service, self._director_process
        assert process.node is not None
        if service is not None and director is not None and not self._cluster.network.is_down(process.node):
            when = self._cluster.loop.now + self._cluster.dice.random() * _NOTICE_SECONDS
            self._cluster.loop.schedule(director, when, service.died, _name(process), "was killed")
        self.changed.set()

    def excuses(self, process: SimulatedProcess, error: BaseException) -> bool:
        """Did a newcomer come when no member was left?"""
        service = self._service
        if service is None or service.director.members or not isinstance(error, LaunchError | PeerLost):
            return False
        return _name(process) not in service.placed

    def is_over(self, nodes: frozenset[int]) -> bool:
        return not self._awaited & nodes and super().is_over(nodes)

    async def _direct(self, process: SimulatedProcess) -> None:
        del process
        self._service = DirectorService(self._cluster.network, ElasticDirector(self._cluster.size))
        await self._service.run()

    async def _run(self, process: SimulatedProcess) -> None:
        source = SimulatedWorldSource(
            self._cluster.network, process, self._dice, name=_name(process), director_node=self._cluster.size
        )
        _SOURCE.set(source)
        await self.record(process, source.run(_awaited(self._main)))
        error = self.errors.get(process)
        if isinstance(error, StaleGeneration) and process.node is not None:
            self._awaited.add(process.node)
            when = self._cluster.loop.now + _RESTART_SECONDS
            self._cluster.loop.schedule(self._cluster.loop.outside, when, self.begin_anew, process.node)


async def _awaited(main: ElasticMain) -> Any:
    return await main()


def _name(process: SimulatedProcess) -> str:
    return f"node-{process.node}.{process.incarnation}"
