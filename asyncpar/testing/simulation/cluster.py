"""The machines of a simulation: processes on nodes, their disks, and the faults that affect them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, Final

from asyncpar.testing.simulation.disk import SimulatedDisk
from asyncpar.testing.simulation.faults import Fault
from asyncpar.testing.simulation.loop import SimulationLoop
from asyncpar.testing.simulation.network import Conditions, SimulatedNetwork
from asyncpar.testing.simulation.process import Health, SimulatedProcess
from asyncpar.testing.simulation.trace import Trace

Program = Callable[[SimulatedProcess], Coroutine[Any, Any, Any]]
"""The program of a process."""

AGENT: Final = "agent"
"""The role of the process that runs the others of its node."""

_BOOT_SECONDS: Final = 0.01
"""The most seconds that the start of a process takes."""


class SimulatedCluster:
    """``size`` nodes.  ``launch`` starts a process on one.

    ``on_death`` is called with every process that dies from a fault, ``on_stop`` with every one that is paused or goes
    on, ``on_restart`` with a node that has to run its programs again, and ``on_leave`` with one that is to leave.
    """

    def __init__(
        self,
        loop: SimulationLoop,
        *,
        size: int,
        seed: object,
        trace: Trace,
        conditions: Conditions,
    ) -> None:
        self.loop = loop
        self.size = size
        self.network = SimulatedNetwork(loop, trace, seed, conditions)
        self.disks = [SimulatedDisk(Random(f"{seed} disk {node}")) for node in range(size)]
        self.dice = Random(f"{seed} cluster")
        self.processes: list[SimulatedProcess] = []
        """All processes so far, in the order of their start."""
        self.helpers = 0
        """The number of further nodes, which never fail, but can be unreachable."""
        self.happened: list[Fault] = []
        self._trace = trace
        self.on_death: Callable[[SimulatedProcess], None] = lambda _: None
        self.on_stop: Callable[[SimulatedProcess], None] = lambda _: None
        self.on_restart: Callable[[int], None] = lambda _: None
        self.on_leave: Callable[[int], None] = lambda _: None
        self._healings: dict[Fault, Callable[[], None]] = {}
        """Lasting faults, with the functions that end them."""
        self._incarnations = defaultdict[tuple[int, str], int](int)

    # -- processes -------------------------------------------------------------------------------------------------

    def launch(self, node: int, program: Program, *, role: str = "") -> SimulatedProcess:
        """Start a new process on ``node``; its task is made at once and runs soon."""
        incarnation = self._incarnations[node, role]
        self._incarnations[node, role] += 1
        title = f"{role} of node {node}" if role else f"node {node}"
        process = SimulatedProcess(
            title + (f" ({incarnation + 1})" if incarnation else ""),
            number=len(self.processes) + 1,
            node=node,
            incarnation=incarnation,
            role=role,
        )
        process.offset = self.dice.random() * 1000.0  # clocks of machines do not begin together
        process.offset -= self.loop.now * process.rate
        self.processes.append(process)
        when = self.loop.now + self.dice.random() * _BOOT_SECONDS
        self.loop.schedule(process, when, lambda: self.loop.start(process, program(process)))
        return process

    def living(self, node: int, role: str = "") -> SimulatedProcess | None:
        """Return the newest process of ``node`` with ``role``, if it lives."""
        same = (process for process in reversed(self.processes) if process.node == node and process.role == role)
        found = next(same, None)
        return None if found is None or found.is_dead else found

    def _all_living(self, node: int) -> list[SimulatedProcess]:
        """Return the newest processes of ``node``, its agent first."""
        found = (self.living(node, role) for role in (AGENT, ""))
        return [process for process in found if process is not None]

    def kill(self, process: SimulatedProcess, *, notifies_peers: bool = True) -> None:
        """End ``process`` at once; it runs nothing more.  If it ``notifies_peers``, its machine resets connections."""
        if not process.is_dead:
            self.loop.kill(process)
            self.network.bury(process, notifies_peers=notifies_peers)

    def print(self, node: int, text: str) -> None:
        """Record the output of a process of ``node`` in the trace."""
        self._trace.event(self.loop.now, text.encode(), lambda: f"node {node} prints: {text}")

    # -- faults ----------------------------------------------------------------------------------------------------

    def plan(self, faults: tuple[Fault, ...]) -> None:
        """Schedule ``faults`` at their times."""
        for fault in faults:
            self.loop.schedule(self.loop.outside, fault.at, self.inject, fault)

    def inject(self, fault: Fault) -> None:
        """Inject ``fault`` now."""
        self._trace.event(self.loop.now, repr(fault).encode(), lambda: repr(fault))
        self.happened.append(fault)
        heal = getattr(self, f"_{fault.kind}")(fault)
        if heal is not None and fault.seconds is not None:
            self._healings[fault] = heal
            self.loop.schedule(self.loop.outside, self.loop.now + fault.seconds, self.heal, fault)

    def heal(self, fault: Fault) -> None:
        """End ``fault``, if it still lasts."""
        end = self._healings.pop(fault, None)
        if end is not None:
            self._trace.event(self.loop.now, f"end of {fault!r}".encode(), lambda: f"end of {fault!r}")
            end()

    def settle(self, core: frozenset[int]) -> None:
        """Heal faults that affect only nodes of ``core``, now; all other lasting faults are permanent from now on."""
        for fault in list(self._healings):
            if core.issuperset(fault.nodes):
                self.heal(fault)
            else:
                del self._healings[fault]
                if fault.kind == "clog" and fault.peer is not None:  # a permanently clogged network is silent
                    self.network.silence(fault.node, fault.peer)

    def _kill(self, fault: Fault) -> None:
        self._end(self.living(fault.node), notifies_peers=True)

    def _kill_agent(self, fault: Fault) -> None:
        self._end(self.living(fault.node, AGENT), notifies_peers=True)

    def _leave(self, fault: Fault) -> None:
        self.on_leave(fault.node)

    def _crash(self, fault: Fault) -> Callable[[], None]:
        node = fault.node
        for process in self._all_living(node):
            self._end(process, notifies_peers=False)
        self.network.take_down(node, self._others(node))
        self.disks[node].lose_unsynced()

        def heal() -> None:
            self.network.put_up(node)
            self.on_restart(node)

        return heal

    def _restart(self, fault: Fault) -> None:
        for process in self._all_living(fault.node):
            self._end(process, notifies_peers=True)
        self.network.put_up(fault.node)
        self.on_restart(fault.node)

    def _pause(self, fault: Fault) -> Callable[[], None] | None:
        return self._stop(self._all_living(fault.node))

    def _pause_agent(self, fault: Fault) -> Callable[[], None] | None:
        return self._stop([self.living(fault.node, AGENT)])

    def _pause_rank(self, fault: Fault) -> Callable[[], None] | None:
        return self._stop([self.living(fault.node)])

    def _stop(self, processes: list[SimulatedProcess | None] | list[SimulatedProcess]) -> Callable[[], None] | None:
        stopped = [one for one in processes if one is not None and one.health is Health.RUNNING]
        for process in stopped:
            self.loop.pause(process)
            self.on_stop(process)

        def heal() -> None:
            for process in stopped:
                self.loop.resume(process)
                self.on_stop(process)

        return heal if stopped else None

    def _isolate(self, fault: Fault) -> Callable[[], None]:
        pairs = [pair for other in self._others(fault.node) for pair in ((fault.node, other), (other, fault.node))]
        return self._silence_all(pairs)

    def _silence(self, fault: Fault) -> Callable[[], None]:
        assert fault.peer is not None
        return self._silence_all([(fault.node, fault.peer), (fault.peer, fault.node)])

    def _one_way(self, fault: Fault) -> Callable[[], None]:
        assert fault.peer is not None
        return self._silence_all([(fault.node, fault.peer)])

    def _silence_all(self, pairs: list[tuple[int, int]]) -> Callable[[], None]:
        for source, target in pairs:
            self.network.silence(source, target)

        def heal() -> None:
            for source, target in pairs:
                self.network.end_silence(source, target)

        return heal

    def _clog(self, fault: Fault) -> Callable[[], None]:
        node, peer = fault.node, fault.peer
        assert peer is not None
        self.network.clog(node, peer)
        return lambda: self.network.unclog(node, peer)

    def _slow(self, fault: Fault) -> Callable[[], None]:
        assert fault.factor is not None
        route, factor = self.network.route(fault.node, fault.peer), fault.factor
        route.slowness *= factor

        def heal() -> None:
            route.slowness /= factor

        return heal

    def _reset(self, fault: Fault) -> None:
        assert fault.peer is not None
        self.network.reset(fault.node, fault.peer)

    def _half_open(self, fault: Fault) -> None:
        assert fault.peer is not None
        self.network.reset(fault.node, fault.peer, is_half=True)

    def _replay(self, fault: Fault) -> None:
        assert fault.peer is not None
        self.network.replay(fault.node, fault.peer)

    def _damage(self, fault: Fault) -> None:
        assert fault.peer is not None
        self.network.damage(fault.node, fault.peer)

    def _clock(self, fault: Fault) -> None:
        for process in self._all_living(fault.node):
            if fault.factor is not None:
                self.loop.set_clock(process, fault.factor)

    def _jump(self, fault: Fault) -> None:
        for process in self._all_living(fault.node):
            if fault.seconds is not None:
                process.skew += fault.seconds

    def _disk(self, fault: Fault) -> Callable[[], None]:
        disk = self.disks[fault.node]
        disk.is_broken = True

        def heal() -> None:
            disk.is_broken = False

        return heal

    def _end(self, process: SimulatedProcess | None, *, notifies_peers: bool) -> None:
        if process is not None and not process.is_dead:
            self.kill(process, notifies_peers=notifies_peers)
            self.on_death(process)

    def _others(self, node: int) -> list[int]:
        return [other for other in range(self.size + self.helpers) if other != node]
