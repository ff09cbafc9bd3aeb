"""The network of a simulation: routes between nodes, the traffic on them, and their faults.

A route goes one way, from one node to another.  Traffic on it arrives after a drawn latency and the time that its bytes
take; a *pipe*, one direction of a connection, keeps its order.  A route can be *clogged* (traffic waits until that is
over, and no node notices) or *silent* (the same, but nothing is received from the other end either: connections over it
end after ``link_timeout``, calls fail, single messages are lost).

Messages and calls are for what real programs do by RPC; lanes are made by ``connect`` (see ``lane``).
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, Protocol

from asyncpar.core.config.transport import LINK_SECONDS
from asyncpar.errors import UsageError
from asyncpar.testing.simulation.loop import SimulationLoop
from asyncpar.testing.simulation.process import CURRENT, SimulatedProcess
from asyncpar.testing.simulation.trace import Trace

SILENT: Final = "the peer's host does not answer"
RESET: Final = "the connection broke: Connection reset by peer"

_INSTANT: Final = 1e-9
_RETRANSMISSION_SECONDS: Final = 0.2
"""The most seconds from the end of a blockage until held traffic arrives."""

_RECORDED: Final = 32
"""The number of last pieces between two nodes that are kept, to be sent again."""

Service = Callable[[Any], Awaitable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Settings of the simulated network.

    ``latency`` and ``spread`` in seconds: a message takes the one plus up to the other; ``bandwidth`` in bytes a second
    and direction; ``window``: bytes of a connection that may be under way.  A connection whose other end is silent
    for ``link_timeout`` seconds is lost.
    """

    latency: float = 50e-6
    spread: float = 200e-6
    bandwidth: float = 1e9
    window: int = 1 << 18
    link_timeout: float = LINK_SECONDS

    def __post_init__(self) -> None:
        for name in ("latency", "bandwidth", "window", "link_timeout"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name}: expected a positive number, got {getattr(self, name)!r}")
        if not self.spread >= 0:
            raise UsageError(f"spread: expected 0 or a positive number of seconds, got {self.spread!r}")


class SimulatedRoute:
    """The connection between two nodes, in one direction."""

    __slots__ = ("clogs", "damages", "pipes", "silences", "slowness", "waiting")

    def __init__(self) -> None:
        self.damages = 0
        self.clogs = 0
        self.silences = 0
        self.slowness = 1.0
        self.pipes: dict[SimulatedPipe, None] = {}
        self.waiting: list[Callable[[], None]] = []
        """Continuations of calls that wait for the route to be free."""

    @property
    def is_blocked(self) -> bool:
        return self.clogs > 0 or self.silences > 0


class ConnectionEnd(Protocol):
    """One end of a connection, as the network sees it."""

    process: SimulatedProcess

    @property
    def peer_node(self) -> int | None:
        """The node of the other end."""
        ...

    def reset(self, cause: str) -> None:
        """End this side at once; the other is not notified."""
        ...

    def send_reset(self) -> None:
        """Notify the other end, behind all data sent so far, that this one is dead."""
        ...


@dataclass(slots=True, eq=False)
class SimulatedPipe:
    """One direction of a connection."""

    route: SimulatedRoute
    source: SimulatedProcess
    target: SimulatedProcess
    deliver: Callable[[bytes | str], None]
    """Takes arriving bytes, or the reason for which nothing follows."""
    last: float = -math.inf
    held: deque[bytes | str] = field(default_factory=deque)
    is_closed: bool = False
    is_checked: bool = False
    """Whether it detects damaged bytes itself, and requests them again."""


@dataclass(slots=True)
class _Call:
    """A call that is not answered yet."""

    source: SimulatedProcess
    target: int
    callee: SimulatedProcess | None = None


class SimulatedNetwork:
    """Routes, services and connections."""

    def __init__(self, loop: SimulationLoop, trace: Trace, seed: object, conditions: Conditions) -> None:
        self.loop = loop
        self.conditions = conditions
        self.recorded: dict[tuple[int, int], deque[bytes]] = {}
        """The last pieces that went from node to node, over any connection."""
        self._trace = trace
        self._dice = Random(f"{seed} network")
        self._routes: dict[tuple[int, int], SimulatedRoute] = {}
        self._services: dict[tuple[int, str], tuple[SimulatedProcess, Service]] = {}
        self._down: set[int] = set()
        self._is_muted = False
        self._cut_off: dict[tuple[int, int], float] = {}
        """Pairs of nodes that receive nothing from each other, and since when."""
        self._calls: dict[asyncio.Future[Any], _Call] = {}
        self.lanes: dict[ConnectionEnd, None] = {}
        """The ends of connections that are open."""

    # -- routes ----------------------------------------------------------------------------------------------------

    def route(self, source: int | None, target: int | None) -> SimulatedRoute:
        """Return the route between two nodes."""
        assert source is not None
        assert target is not None
        return self._routes.setdefault((source, target), SimulatedRoute())

    def clog(self, source: int, target: int) -> None:
        """Hold all traffic from one node to the other until ``unclog``."""
        self.route(source, target).clogs += 1

    def unclog(self, source: int, target: int) -> None:
        """Release held traffic, unless another blockage remains."""
        self.route(source, target).clogs -= 1
        self._free(self.route(source, target))

    def silence(self, source: int, target: int) -> None:
        """Let nothing pass from one node to the other until ``end_silence``."""
        self.route(source, target).silences += 1
        self._note_silence(source, target)

    def end_silence(self, source: int, target: int) -> None:
        """Let traffic pass again; data sent meanwhile is sent again."""
        route = self.route(source, target)
        route.silences -= 1
        if not self.is_cut_off(source, target):
            self._cut_off.pop(_pair(source, target), None)
        self._free(route)

    def take_down(self, node: int, others: Iterable[int]) -> None:
        """Make ``node`` unresponsive, not even refusing connections: its machine is off."""
        self._down.add(node)
        for other in others:
            self._note_silence(node, other)

    def is_down(self, node: int) -> bool:
        """Return whether the machine of ``node`` is off."""
        return node in self._down

    def put_up(self, node: int) -> None:
        """Make the machine of ``node`` respond again."""
        self._down.discard(node)
        for pair in [pair for pair in self._cut_off if node in pair and not self.is_cut_off(*pair)]:
            del self._cut_off[pair]

    def reset(self, node: int, other: int, *, is_half: bool = False) -> None:
        """Break the connections between two nodes; with ``is_half`` only ``node`` notices it now."""
        for lane in self._lanes_between(node, other):
            if not is_half or lane.process.node == node:
                self.loop.call_soon(lane.reset, RESET, context=lane.process.context)

    def replay(self, source: int, target: int) -> None:
        """Deliver an earlier piece from the source to the target again, over any connection."""
        pieces = self.recorded.get((source, target))
        pipes = [pipe for pipe in self.route(source, target).pipes if not pipe.is_closed]
        if pieces and pipes:
            self.send(pipes[-1], pieces[int(self._dice.random() * len(pieces))])

    def damage(self, source: int, target: int) -> None:
        """Change a bit of the next bytes that the source sends to the target."""
        self.route(source, target).damages += 1

    def bury(self, process: SimulatedProcess, *, notifies_peers: bool) -> None:
        """End the connections of a dead process; if it ``notifies_peers``, its machine resets them at once."""
        for lane in [lane for lane in self.lanes if lane.process is process]:
            del self.lanes[lane]
            if notifies_peers:
                lane.send_reset()
        if notifies_peers:
            for answer, call in list(self._calls.items()):
                if call.callee is process:
                    self._reply(call.target, call.source, answer, None, ConnectionResetError(RESET))

    def _free(self, route: SimulatedRoute) -> None:
        """Send held traffic, if the route is no longer blocked."""
        if route.is_blocked:
            return
        for pipe in list(route.pipes):
            if pipe.held:
                when = self.loop.now + self._dice.random() * _RETRANSMISSION_SECONDS
                self.loop.schedule(pipe.target, when, self._flush, pipe)
        waiting, route.waiting = route.waiting, []
        for go_on in waiting:
            go_on()

    def is_cut_off(self, node: int, other: int) -> bool:
        """Return whether one of two nodes receives nothing from the other.  (Then neither gets acknowledgements.)"""
        is_silent = self.route(node, other).silences > 0 or self.route(other, node).silences > 0
        return is_silent or node in self._down or other in self._down

    def _note_silence(self, node: int, other: int) -> None:
        pair = _pair(node, other)
        if pair not in self._cut_off:
            self._cut_off[pair] = self.loop.now
            when = self.loop.now + self.conditions.link_timeout
            self.loop.schedule(self.loop.outside, when, self._give_up, pair, self.loop.now)

    def _give_up(self, pair: tuple[int, int], since: float) -> None:
        """End the traffic between two nodes that have received nothing from each other for too long."""
        if self._cut_off.get(pair) != since:
            return
        for lane in self._lanes_between(*pair):
            self.loop.call_soon(lane.reset, SILENT, context=lane.process.context)
        for answer, call in list(self._calls.items()):
            if _pair(call.source.node, call.target) == pair:
                self._settle(call.source, answer, None, TimeoutError(SILENT))

    def _lanes_between(self, node: int, other: int) -> list[ConnectionEnd]:
        return [
            lane
            for lane in self.lanes
            if lane.peer_node in (node, other) and lane.process.node in (node, other) and node != other
        ]

    def mute(self) -> None:
        """Stop carrying traffic: the simulation is over."""
        self._is_muted = True
        self._services.clear()
        for answer, call in list(self._calls.items()):
            self._settle(call.source, answer, None, ConnectionResetError(RESET))

    # -- connections -----------------------------------------------------------------------------------------------

    def open_pipe(
        self,
        source: SimulatedProcess,
        target: SimulatedProcess,
        deliver: Callable[[bytes | str], None],
        *,
        is_checked: bool = False,
    ) -> SimulatedPipe:
        """Return a new direction of a connection; one that ``is_checked`` delivers no damaged bytes."""
        route = self.route(source.node, target.node)
        pipe = SimulatedPipe(route, source, target, deliver, is_checked=is_checked)
        route.pipes[pipe] = None
        return pipe

    def close_pipe(self, pipe: SimulatedPipe) -> None:
        """Deliver nothing more."""
        pipe.is_closed = True
        pipe.held.clear()
        pipe.route.pipes.pop(pipe, None)

    def send(self, pipe: SimulatedPipe, piece: bytes | str) -> None:
        """Send ``piece``, behind all earlier ones."""
        if pipe.is_closed or self._is_muted:
            return
        pipe.last = max(pipe.last + _INSTANT, self.loop.now + self._travel(pipe.route, len(piece)))
        self.loop.schedule(pipe.target, pipe.last, self._arrive, pipe, piece)

    def record(self, pipe: SimulatedPipe, piece: bytes) -> None:
        """Keep ``piece``, so a fault can send it again."""
        assert pipe.source.node is not None
        assert pipe.target.node is not None
        pieces = self.recorded.setdefault((pipe.source.node, pipe.target.node), deque(maxlen=_RECORDED))
        pieces.append(piece)

    def _arrive(self, pipe: SimulatedPipe, piece: bytes | str) -> None:
        if pipe.is_closed or self._is_muted or (pipe.source.is_dead and pipe.source.node in self._down):
            return  # a machine that is off does not retransmit data lost in transit
        if pipe.held or pipe.route.is_blocked:
            pipe.held.append(piece)
        else:
            self._deliver(pipe, piece)

    def _flush(self, pipe: SimulatedPipe) -> None:
        """Deliver the traffic that a blockage of the route has held up."""
        while pipe.held and not pipe.route.is_blocked:
            self._deliver(pipe, pipe.held.popleft())

    def _deliver(self, pipe: SimulatedPipe, piece: bytes | str) -> None:
        if pipe.route.damages and isinstance(piece, bytes) and not pipe.is_checked:
            pipe.route.damages -= 1
            place = int(self._dice.random() * len(piece))
            piece = piece[:place] + bytes([piece[place] ^ 1 << int(self._dice.random() * 8)]) + piece[place + 1 :]
        content = piece if isinstance(piece, bytes) else piece.encode()
        size = len(piece) if isinstance(piece, bytes) else 0
        self._trace.event(
            self.loop.now,
            content,
            lambda: f"{pipe.source.name} -> {pipe.target.name}: {f'{size} bytes' if size else piece!r}",
        )
        pipe.deliver(piece)

    # -- messages and calls ----------------------------------------------------------------------------------------

    def serve(self, name: str, service: Service) -> None:
        """Let the running process answer calls of ``name`` at its node from now on."""
        process = CURRENT.get()
        assert process is not None
        assert process.node is not None
        self._services[process.node, name] = (process, service)

    def served_by(self, process: SimulatedProcess) -> list[str]:
        """Return the names of the services of ``process``."""
        return [name for (_, name), (server, _) in self._services.items() if server is process]

    def lanes_of(self, process: SimulatedProcess) -> int:
        """Return the number of connection ends that ``process`` has open."""
        return sum(lane.process is process for lane in self.lanes)

    def withdraw(self, name: str, process: SimulatedProcess | None = None) -> None:
        """Stop ``process``, by default the running one, from answering calls of ``name``."""
        process = process or CURRENT.get()
        assert process is not None
        assert process.node is not None
        if self._services.get((process.node, name), (None,))[0] is process:
            del self._services[process.node, name]

    def post(self, target: int, name: str, message: Any) -> None:
        """Send ``message`` to the service ``name`` of a node; lost if the route is silent or there is no service."""
        source = self._running()
        route = self.route(source.node, target)
        if route.silences or target in self._down:
            return
        self._carry(source, target, route, lambda: self._take(source, target, name, message, None))

    async def call(self, target: int, name: str, request: Any, *, timeout: float) -> Any:
        """Return the answer of the service ``name`` of node ``target``.

        Raises ``ConnectionRefusedError`` if there is no service, ``TimeoutError`` if no answer comes in time; errors of
        the service pass through.
        """
        source = self._running()
        answer: asyncio.Future[Any] = self.loop.create_future()
        self._calls[answer] = _Call(source, target)
        answer.add_done_callback(lambda _: self._calls.pop(answer, None))
        route = self.route(source.node, target)
        self._carry(source, target, route, lambda: self._take(source, target, name, request, answer))
        async with asyncio.timeout(timeout):
            return await answer

    async def reach(self, target: int, name: str, *, timeout: float) -> None:
        """Check that a process of node ``target`` serves ``name``; its machine answers even if the process is paused.

        Raises as ``call`` does.
        """
        source = self._running()
        answer: asyncio.Future[None] = self.loop.create_future()

        def arrive() -> None:
            process, _ = self._services.get((target, name), (None, None))
            error = None
            if process is None or process.is_dead:
                error = ConnectionRefusedError(f"no process of node {target} answers {name}")
            self._reply(target, source, answer, None, error)

        self._carry(source, target, self.route(source.node, target), arrive)
        async with asyncio.timeout(timeout):
            await answer

    def _running(self) -> SimulatedProcess:
        process = CURRENT.get()
        assert process is not None, "only a simulated process has a place in the network"
        return process

    def _carry(
        self,
        source: SimulatedProcess,
        target: int,
        route: SimulatedRoute,
        arrive: Callable[[], None],
        size: int = 0,
    ) -> None:
        """Call ``arrive``, outside all processes, when a message has reached the node ``target``."""
        if target in self._down or source.node in self._down:
            return
        if route.is_blocked:
            route.waiting.append(lambda: self._carry(source, target, route, arrive, size))
            return
        self.loop.schedule(self.loop.outside, self.loop.now + self._travel(route, size), arrive)

    def _take(
        self,
        source: SimulatedProcess,
        target: int,
        name: str,
        request: Any,
        answer: asyncio.Future[Any] | None,
    ) -> None:
        """Pass a message that has reached its node to the process that serves it."""
        process, service = self._services.get((target, name), (None, None))
        self._trace.event(
            self.loop.now,
            f"{source.name} {target} {name}".encode(),
            lambda: f"{source.name} -> node {target}: {name} {request}",
        )
        if process is None or service is None or process.is_dead:
            if answer is not None:
                error = ConnectionRefusedError(f"no process of node {target} answers {name}")
                self._reply(target, source, answer, None, error)
            return

        if answer is not None and answer in self._calls:
            self._calls[answer].callee = process

        async def work() -> None:
            try:
                value, failure = await service(request), None
            except Exception as error:  # noqa: BLE001  # raised in the caller
                value, failure = None, error
            if answer is not None:
                self._reply(target, source, answer, value, failure)

        self.loop.call_soon(
            lambda: self.loop.start(process, work(), name=f"{process.name}, {name}"), context=process.context
        )

    def _reply(
        self, node: int, caller: SimulatedProcess, answer: asyncio.Future[Any], value: Any, failure: Exception | None
    ) -> None:
        route = self.route(node, caller.node)
        size = len(value) if isinstance(value, bytes) else getattr(value, "nbytes", 0)
        self._carry(caller, node, route, lambda: self._settle(caller, answer, value, failure), size)

    def _settle(
        self, caller: SimulatedProcess, answer: asyncio.Future[Any], value: Any, failure: Exception | None
    ) -> None:
        def settle() -> None:
            if answer.done():
                return
            if failure is not None:
                answer.set_exception(failure)
            else:
                answer.set_result(value)

        self.loop.call_soon(settle, context=caller.context)

    def _travel(self, route: SimulatedRoute, size: int) -> float:
        conditions = self.conditions
        seconds = conditions.latency + self._dice.random() * conditions.spread + size / conditions.bandwidth
        return seconds * route.slowness


def _pair(node: int | None, other: int) -> tuple[int, int]:
    assert node is not None
    return (node, other) if node < other else (other, node)
