"""The node: one rank of a world in this process, with its server, links, collectives and actors.

A node lives in one task, created at start and ended by ``stop``.  It may therefore be started and stopped from any task
of a running loop, and it leaves signal handlers and the loop policy alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from asyncpar.actors.meshes.nodes import Nodes
from asyncpar.actors.runtime.actor import Actor
from asyncpar.actors.runtime.dead_letters import DeadLetters
from asyncpar.actors.runtime.ref import ActorRef
from asyncpar.actors.runtime.registry import describe_actor
from asyncpar.actors.runtime.system import ActorSystem
from asyncpar.actors.runtime.watches import Watch
from asyncpar.bootstrap import Attach, WorldBootstrap, attach_world, find_world
from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.shared_memory.group import ArenaHost
from asyncpar.core.concurrency.async_block import opened_by
from asyncpar.core.concurrency.broadcast import Broadcast
from asyncpar.core.concurrency.tasks import check_home_loop
from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.core.config.names import LaneName, Name
from asyncpar.core.config.transport import parse_calibrate
from asyncpar.core.config.world import World
from asyncpar.core.observe.agent_line import AgentLine
from asyncpar.core.observe.loop_watch import BLOCKED_AFTER, BlockedEvents, LoopWatch, OnBlocked, check_blocked_after
from asyncpar.core.observe.pauses import PauseRecorder
from asyncpar.core.observe.rank_observer import WAIT_WARNING, parse_wait_warning
from asyncpar.core.observe.reporting import mark_seen
from asyncpar.core.observe.spans import EventSpan
from asyncpar.core.observe.whereabouts import describe_program
from asyncpar.core.system_errors import note_limit
from asyncpar.core.tables import html_table
from asyncpar.errors import AsyncparError, NodeClosed, PeerLost, UsageError
from asyncpar.hosts.messages import WorldChange
from asyncpar.net.arena.arena import ArenaMemory
from asyncpar.net.arena.formation import form_arena
from asyncpar.net.checked_settings import check_settings
from asyncpar.net.transport.lane_kinds import parse_transport
from asyncpar.net.transport.links import LEFT, Links
from asyncpar.net.transport.rpc import BROKEN_GRACE_SECONDS, Credentials
from asyncpar.net.transport.serving import Register, Serving
from asyncpar.observe.node_observer import NodeObserver
from asyncpar.observe.service import is_open

A = TypeVar("A", bound=Actor)

_log = logging.getLogger(__name__)


class Node:
    """One rank.  Made by ``asyncpar.init``, ``Node.start`` or ``asyncpar.testing.local_world``.

    ``world`` is the communicator over all ranks, and ``nodes`` the mesh of all nodes along one axis, ``rank``.  Use a
    node only on the loop on which it was started.
    """

    def __init__(
        self, bootstrap: WorldBootstrap, links: Links, actors: ActorSystem, arena: ArenaHost | None = None
    ) -> None:
        self.links = links
        settings = bootstrap.arena
        self.world = Communicator.world(
            links,
            pin=bootstrap.pin,
            lane=bootstrap.lane,
            arena=arena,
            has_arenas=settings is not None and not settings.is_off,
        )
        actors.groups.world = self.world
        self.nodes = Nodes.of_world(actors, links.world.size)
        self._arena = arena
        self._actors = actors
        self._bootstrap = bootstrap
        self._loop = asyncio.get_running_loop()
        self._is_stopping = asyncio.Event()
        self._observer = NodeObserver(links, actors, arena, self._is_stopping)
        self._changes = Broadcast[WorldChange]()
        links.add_loss_listener(self._announce_loss)
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        environment: LaunchEnvironment | None = None,
        *,
        transport: LaneName | None = None,
        serve: str | None = None,
        services: Sequence[Register] = (),
        public_services: Sequence[str] = (),
        blocked_after: float | None = BLOCKED_AFTER,
    ) -> Node:
        """Join the world that ``environment`` describes (default: this process's); return once all ranks have joined.

        Ranks started by ``srun`` or an ``mpiexec`` find their places and each other by themselves; any other process
        outside a launched job is a world of one.  ``transport`` pins the lane kind (``tcp``, ``grpc``,
        ``package.module:NAME`` of a ``LaneKind``).
        ``serve`` is the ``host:port`` of the node's gRPC server.  A world of one has no server unless ``serve`` or
        ``services`` is given: functions that receive the server and add the program's servicers to it.  Calls to them
        need the job's token (see ``credentials``), except to the services whose full names are in ``public_services``;
        with certificates they also need one of the job's.
        Code that blocks the event loop for ``blocked_after`` seconds is reported to ``on_blocked`` and, while there are
        actors, logged with its stack (0: neither).
        Raises ``UsageError`` for wrong settings and ``PeerTimeout``, which names the missing ranks.
        """
        lane = parse_transport(transport)
        check_settings(os.environ)
        serving = Serving(address=serve, services=tuple(services), public=frozenset(public_services))
        found = find_world(os.environ) if environment is None else environment
        try:
            return await start_rank(attach_world(found, lane, serving, check_blocked_after(blocked_after)))
        except OSError as error:
            note_limit(error)
            raise

    def __repr__(self) -> str:
        where = f" at {self.address}" if self.address else ""
        return f"<node: rank {self.rank} of {self.size}{where}{', stopped' if self._is_stopping.is_set() else ''}>"

    def _repr_html_(self) -> str:
        """Return the same facts as an HTML table for notebooks."""
        state = "stopped" if self._is_stopping.is_set() else "running"
        rows = [("node", f"rank {self.rank} of {self.size}"), ("address", self.address or "none"), ("state", state)]
        return html_table(rows)

    @property
    def rank(self) -> int:
        return self._bootstrap.rank

    @property
    def size(self) -> int:
        return self._bootstrap.world.size

    @property
    def membership(self) -> World:
        """The members of this generation of the world."""
        return self._bootstrap.world

    @property
    def address(self) -> str:
        """``host:port`` of the node's gRPC server; empty for a node without one."""
        server = self._bootstrap.server
        return "" if server is None else server.address

    @property
    def credentials(self) -> Credentials:
        """The credentials for calls to servers of this world: pass ``credentials.metadata()`` with each call.

        A process that has them is trusted like a rank.  Raises ``UsageError`` for a node without a server.
        """
        server = self._bootstrap.server
        if server is None or server.credentials is None:
            raise UsageError("credentials: expected a node with a server; give serve= to Node.start")
        return server.credentials

    @property
    def has_arena(self) -> bool:
        """Whether the ranks of this host share memory."""
        return self._arena is not None

    @property
    def bytes_sent(self) -> int:
        """Bytes of frames sent by this rank, headers included, plus payload that it exposed in shared memory."""
        return self.links.bytes_sent + (0 if self._arena is None else self._arena.bytes_shown)

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Return a new array of ``dtype`` in memory that the ranks of this host share, as ``node.world.empty`` does."""
        return self.world.empty(shape, dtype)

    @property
    def actor_system(self) -> ActorSystem:
        """The actor system of this rank, for parts of the package that are built on actors."""
        return self._actors

    async def spawn(self, actor: type[A], *args: Any, name: str | None = None, **kwargs: Any) -> A:
        """Start an actor on this rank and return its reference once its ``on_start`` has returned.

        The constructor receives ``args`` and ``kwargs`` themselves, not copies.  Without ``name`` the actor gets a
        unique one.  Type checkers see the reference as the actor's class, so calls are checked.

        Raises any exception of the constructor or ``on_start``, and ``UsageError`` for a name that is taken.

        Example::

            class Counter(ap.Actor):
                def __init__(self, number: int) -> None:
                    self.number = number

                @ap.endpoint
                async def add(self, more: int) -> int:
                    self.number += more
                    return self.number

            counter = await node.spawn(Counter, 3, name="counter")
            number = await counter.add(2)  # 5
        """
        return await self._actors.spawn(actor, *args, name=name, **kwargs)

    @overload
    def ref(self, name: str, rank: int | None = None) -> ActorRef[Any]: ...
    @overload
    def ref(self, name: str, rank: int | None = None, *, actor_class: type[A]) -> A: ...
    def ref(self, name: str, rank: int | None = None, *, actor_class: type[Any] | None = None) -> Any:
        """Return a reference to the actor ``name`` on ``rank`` (default: this one), without sending anything.

        With ``actor_class`` results are typed, and wrong calls are refused before they are sent.
        """
        self._check_open("ref")
        if actor_class is None:
            return self._actors.ref(name, rank)
        return self._actors.ref(name, rank, actor_class=actor_class)

    def watch(self, ref: ActorRef[Any] | Actor) -> Watch:
        """Watch an actor on any rank: ``down = await node.watch(ref)`` returns exactly one ``Down``, whatever happens.

        It states how the actor ended, or that its rank was lost.  ``Watch.cancel`` ends the watch.
        """
        return self._actors.watch(ref)

    async def stop_actor(self, ref: ActorRef[Any] | Actor) -> None:
        """Stop an actor on any rank: messages in its mailbox are still handled, later ones are refused.

        Returns after its ``on_stop``, or raises what that raised.  Cancelling this call ends the wait; the actor stops
        all the same.
        """
        await self._actors.stop(ref)

    async def kill_actor(self, ref: ActorRef[Any] | Actor) -> None:
        """Kill an actor on any rank: cancel its current work and refuse waiting messages; ``on_stop`` does not run.

        Its children are killed, too.  A plain ``def`` endpoint cannot be interrupted: this waits for its end.  Does
        nothing for an actor that has ended; raises ``UsageError`` if there never was one.
        """
        await self._actors.kill(ref)

    @property
    def dead_letters(self) -> DeadLetters:
        """The told messages that no actor of this rank handled."""
        return self._actors.dead_letters

    @property
    def observe(self) -> NodeObserver:
        """The node's observer: ``node.observe.status()``, and ``async for event in node.observe.events()``."""
        return self._observer

    def span(self, name: str, **fields: object) -> EventSpan:
        """Return a span of this node: ``with node.span("load"):``.  See ``asyncpar.span``."""
        return EventSpan(name, fields, recorder=self.links.recorder)

    def on_blocked(self, callback: OnBlocked) -> Callable[[], None]:
        """Call ``callback`` when code has blocked the event loop for ``blocked_after`` seconds, and when that ends.

        It is called in another thread, since the loop cannot call it.  The returned function unsubscribes it.  Loops in
        virtual time, and those of ``local_world``, are not watched.
        """
        self._check_open("on_blocked")
        self._actors.loop_watch.sharpen()
        return self._actors.loop_watch.subscribe(callback)

    def watch_world(self) -> AsyncIterator[WorldChange]:
        """Iterate over changes, one for each rank that this world loses after this call, until this rank leaves it.

        ``left`` names the rank and its host; ``is_by_loss`` is False for a rank that left in good order.
        ``world.shrink()`` returns the communicator without the lost ranks; under ``asyncpar.elastic``,
        ``job.watch_world`` yields whole worlds.
        """
        return self._changes.listen()

    def _check_open(self, what: str) -> None:
        if self.links.closed is not None:
            raise NodeClosed.of(self.rank, what)

    def _announce_loss(self, rank: int, error: PeerLost) -> None:
        change = WorldChange(
            generation=self.membership.generation,
            left=(f"rank {rank} on {self.membership.members[rank].host}",),
            why=error.cause or str(error),
            is_by_loss=error.cause != LEFT,
        )
        self._changes.send(change)

    async def stop(self) -> None:
        """Leave the world in good order: stop actors, notify peers, close lanes and server.  Idempotent.

        If called while an exception that names another rank is handled, peers are notified that this rank leaves
        because of that one.  Lost ranks are not waited for.  A revoked world is left as soon as the actors have
        stopped, in less than 0.1 s, even when ranks are silent: operations under way are dropped, and calls of services
        have 20 ms to finish.
        """
        check_home_loop(self._loop, "stop")
        mark_seen(sys.exc_info()[1])
        self.links.leave_because(sys.exc_info()[1])
        self._is_stopping.set()
        self._changes.close()
        if self._task is not None:
            await asyncio.wait({self._task})
            self._task.result()

    async def _serve(self) -> None:
        await self._is_stopping.wait()


async def start_rank(attach: Attach) -> Node:
    """Start a node as ``start_node`` does, and calibrate its lanes where ``ASYNCPAR_CALIBRATE`` asks for it.

    The costs of the lanes are those of an earlier job of the last week, or are measured.
    """
    calibrates = parse_calibrate(os.environ.get("ASYNCPAR_CALIBRATE"))
    node = await start_node(attach)
    if calibrates and node.size > 1:
        try:
            await node.world.calibrate(cache=True)
        except BaseException:
            await node.stop()
            raise
    return node


async def start_node(attach: Attach) -> Node:
    """Start the task of a node and return the node once it is part of its world.

    An error on the way is raised after everything is torn down.  A cancellation meanwhile cuts the teardown short; the
    error is raised all the same, since it came first.
    """
    started: asyncio.Future[Node] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(_live(attach, started), name="asyncpar node")
    try:
        waited: set[asyncio.Future[Any]] = {task, started}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if _error_in(started) is not None:
            await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        if _error_in(started) is None:
            raise
        _error_in(task)  # else asyncio logs it as never retrieved
    else:
        if task.done():
            task.result()
            raise AsyncparError("the node ended before it had started")
    node = started.result()
    node._task = task
    return node


def _error_in(started: asyncio.Future[Any]) -> BaseException | None:
    return started.exception() if started.done() and not started.cancelled() else None


async def _live(attach: Attach, started: asyncio.Future[Node]) -> None:
    """Run the node in a task: build it, wait for its end, tear it down in reverse order.

    ``started`` receives the node, or the error that kept it out of its world; the error is set before the teardown.
    """
    async with AsyncExitStack() as stack:
        try:
            node, bootstrap = await _build(stack, attach)
        except Exception as error:
            started.set_exception(error)
            raise
        started.set_result(node)
        await node._serve()
        if node.links.is_broken and bootstrap.server is not None:
            bootstrap.server.grace = BROKEN_GRACE_SECONDS


async def _build(stack: AsyncExitStack, attach: Attach) -> tuple[Node, WorldBootstrap]:
    """Return the node once it is part of its world; push on ``stack`` what must be undone at the end."""
    bootstrap = await attach(stack)
    links = Links(world=bootstrap.world, rank=bootstrap.rank, connector=bootstrap.connector)
    sharing, line = _share_memory(bootstrap, links), bootstrap.line
    arena = await (sharing if line is None else line.unless_lost(sharing, "forming the arena"))
    if arena is not None:
        stack.callback(arena.close)
    await stack.enter_async_context(links)
    _observe(links, line)
    watch = LoopWatch(rank=links.rank, blocked_after=bootstrap.blocked_after, describe=describe_actor)
    watch.subscribe(BlockedEvents(links.recorder).record)
    stack.callback(watch.stop)
    if line is not None:
        links.pauses = PauseRecorder(links.recorder)
        links.pauses.start()
        stack.callback(links.pauses.stop)
    watch.start_quietly(None if line is None else line.reporter.blocked)
    actors = await stack.enter_async_context(ActorSystem(links, watch))
    node = Node(bootstrap, links, actors, arena)
    bootstrap.join(links)
    world = bootstrap.world
    _log.info("rank %d of %d joined the world, generation %d", bootstrap.rank, world.size, world.generation)
    if bootstrap.gateway is not None:
        bootstrap.gateway.open(actors)
        stack.callback(bootstrap.gateway.close)
    if is_open():
        from asyncpar.observe.rank_view import watch_node  # a rank without an agent reports to nobody

        def predict(operation: str, nbytes: int, algorithm: str) -> float:
            return node.world.predict(operation, nbytes, algorithm=Name(algorithm))

        stack.callback(watch_node(links, actors, arena, predict))
    if line is not None:
        line.deliver(links.end_job)
    return node, bootstrap


def _observe(links: Links, line: AgentLine | None) -> None:
    """Have ``links`` report long waits."""
    observer = links.observer
    observer.warn_after = parse_wait_warning(os.environ.get(WAIT_WARNING))
    if line is not None:  # else it may be one of several ranks of this process, which share the program
        observer.find_program = partial(describe_program, asyncio.get_running_loop())
        observer.reporter = line.reporter
        line.on_condition = observer.record_condition


async def _share_memory(bootstrap: WorldBootstrap, links: Links) -> ArenaHost | None:
    """Form an arena with the other ranks of this host, if there is to be one."""
    if bootstrap.arena is None:
        return None
    arena = await form_arena(
        world=bootstrap.world,
        rank=bootstrap.rank,
        secret=bootstrap.secret,
        settings=bootstrap.arena,
        on_lost=links.observe_end,
        on_left=links.observe_left,
    )
    if arena is None:
        return None
    links.shared = ArenaMemory(arena)
    return ArenaHost(arena, links)


@opened_by("async with ap.init() as node:")
async def init(*, transport: LaneName | None = None) -> AsyncIterator[Node]:
    """Join the world that ``asyncpar launch`` describes in the environment; outside a job, be a world of one.

    ``async with asyncpar.init() as node:``.  Raises as ``Node.start`` does.

    ``transport`` pins the lane kind (shm, tcp, grpc), as in ``Node.start``.

    Example::

        async with ap.init() as node:
            print(f"rank {node.rank} of {node.size}")
            total = await node.world.all_reduce(np.ones(3))
    """
    node = await Node.start(transport=transport)
    try:
        yield node
    except Exception:
        with suppress(asyncio.CancelledError):  # the error came first, so the program ends with it
            await node.stop()
        raise
    except BaseException:
        await node.stop()
        raise
    else:
        await node.stop()
