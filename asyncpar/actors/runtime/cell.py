"""The task, the mailbox and the lifecycle of one actor.

Theory of operation.  One task constructs the actor, runs ``on_start``, handles one message after the other and, at the
end, ends the children and runs ``on_stop``.  Endpoints run inside this task, not in tasks of their own, which makes a
message cheap; only concurrent endpoints have tasks (see ``mailbox``).  Before each message the task checks, in this
order, whether the actor was killed (or its node closed, or it failed), then for notices of supervision, then for
messages; it was stopped if none of these is left.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import msgspec

from asyncpar.actors.runtime.actor import Actor, ActorContext
from asyncpar.actors.runtime.callee import Callee
from asyncpar.actors.runtime.calls import CURRENT, Delivery
from asyncpar.actors.runtime.ending import Down, End, Ending
from asyncpar.actors.runtime.endpoint import EndpointSpec
from asyncpar.actors.runtime.executor import EndpointGuard, Executor, SelfCancelled
from asyncpar.actors.runtime.groups import Groups
from asyncpar.actors.runtime.mailbox import BURST, ConcurrentEndpoints, Mailbox
from asyncpar.actors.runtime.message import ABSENT, FULL, USAGE, MeshPlace
from asyncpar.actors.runtime.ref import ActorRef
from asyncpar.actors.runtime.watches import Watch, Watches
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError


class ActorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Immutable description of an actor to start.  ``create`` constructs it; ``owner`` is notified of its end."""

    ref: ActorRef[Any]
    actor_class: type[Actor]
    create: Callable[[], Actor]
    endpoints: Mapping[str, EndpointSpec]
    owner: Cell | None = None
    place: MeshPlace | None = None
    guard: EndpointGuard | None = None
    """Called where each endpoint begins and ends."""


class Services(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of the actor system that the cells of a rank share.  ``spawn`` and ``ended`` are those of ``Lifecycle``."""

    callee: Callee
    groups: Groups
    tasks: asyncio.TaskGroup
    watches: Watches
    spawn: Callable[[type[Actor], Callable[[], Actor], str | None, Cell | None], Awaitable[ActorRef[Any]]]
    ended: Callable[[Cell], None]


class Cell(ActorContext):
    """One actor and its mailbox.  ``run`` is its task; everything else is called on the same loop."""

    __slots__ = (
        "__weakref__",
        "_class",
        "_concurrent",
        "_create",
        "_endpoints",
        "_executor",
        "_is_over",
        "_last",
        "_mailbox",
        "_notices",
        "_services",
        "_waker",
        "_watches",
        "children",
        "ending",
        "has_served",
        "is_dismissed",
        "is_finishing",
        "listeners",
        "name",
        "owner",
        "place",
        "ref",
        "started",
        "task",
        "watchers",
    )

    def __init__(self, spec: ActorSpec, services: Services) -> None:
        self.ref = spec.ref
        self.name = spec.ref.name
        self.owner = spec.owner
        self.place = spec.place
        self.ending = Ending()
        self.task: asyncio.Task[None] | None = None
        self.started: asyncio.Future[None] | None = asyncio.get_running_loop().create_future()
        """Completes with None when the actor is ready; raises the exception of its constructor or ``on_start``."""
        self.has_served = False
        """Whether the actor has ever been ready."""
        self.is_finishing = False
        """Whether the end is in progress.  Notices are no longer delivered."""
        self.is_dismissed = False
        """Whether its owner ends it, so that the owner gets no notice."""
        self.watchers: set[tuple[int, int]] | None = None  # like everything that most actors never need: they are idle
        """Watches to be notified of the end: rank and number of each."""
        self.children: list[Cell] | None = None
        self.listeners = 0
        """Number of waiters that raise an error of ``on_stop``; without one the error is logged."""
        self._class = spec.actor_class
        self._endpoints = spec.endpoints
        self._create: Callable[[], Actor] | None = spec.create
        self._services = services
        self._executor = Executor(spec.ref.name, self.ending, services.callee, owner=self, guard=spec.guard)
        self._mailbox: Mailbox | None = None
        self._notices: deque[tuple[str, Callable[[], Awaitable[None]], Down | None]] | None = None
        self._watches: dict[Watch, None] | None = None
        self._concurrent: ConcurrentEndpoints | None = None
        self._waker: asyncio.Future[None] | None = None
        self._last: Cell | None = None
        self._is_over = False

    # -- interface of the system -----------------------------------------------------------------------------------

    def put(self, delivery: Delivery) -> None:
        """Add a message to the mailbox, or refuse one if there is no room."""
        spec = delivery.spec = self._endpoints.get(delivery.endpoint)
        if spec is None:
            names = sorted(self._endpoints)
            text = f"{delivery.endpoint!r} is no endpoint of {self._class.__qualname__}; it has {names}"
            self._executor.decline(delivery, ABSENT, text)
            return
        misuse = spec.misuse(wants_stream=delivery.wants_stream, is_told=delivery.call is None)
        if misuse is not None:
            self._executor.decline(delivery, USAGE, misuse)
            return
        if spec.concurrency is None:
            if self._mailbox is None:
                self._mailbox = Mailbox(self._class.mailbox)
            refused = self._mailbox.put(delivery)
            self._wake()
        else:
            refused = self._concurrent_endpoints().put(delivery)
        if refused is not None:
            limit = self._class.mailbox.limit
            self._executor.decline(refused, FULL, f"the mailbox is full ({limit} messages wait)")

    def notify(self, hook: str, down: Down) -> None:
        """Call the actor's ``hook`` with ``down`` before any waiting message."""
        self._queue_hook(hook, lambda: getattr(self._executor.actor, hook)(down), down)

    def stop(self) -> None:
        """Accept no more messages, handle waiting ones, then end."""
        self._end_by(End.STOP)

    def retire(self, *, handles_waiting: bool) -> None:
        """Accept no more messages, finish running ones (and waiting ones, if it ``handles_waiting``), then end.

        Messages are refused as by a closing node.
        """
        self.ending.is_retired = True
        self._end_by(End.STOP)
        if not handles_waiting:
            self._refuse_waiting()

    def close(self) -> None:
        """End because the node closes; cancel running work, except an ``on_stop`` that has begun."""
        self._end_by(End.CLOSE)
        if self._last is not None:
            self._last.close()

    def fail(self, error: BaseException) -> None:
        """End because of ``error``; cancel running work."""
        self._end_by(End.FAIL, error)

    def kill(self) -> None:
        """End at once, with all children."""
        self._end_by(End.KILL)
        for child in reversed(self.children or []):
            child.is_dismissed = True
            child.kill()

    @staticmethod
    def is_concurrent(delivery: Delivery) -> bool:
        """Return whether ``delivery`` is for a concurrent endpoint, not for the actor's own task."""
        return delivery.spec is not None and delivery.spec.concurrency is not None

    def is_current_task(self) -> bool:
        """Whether the caller runs in this actor's own task."""
        return asyncio.current_task() is self.task

    def is_waiting_for(self) -> bool:
        """Whether the caller runs in this actor or in a child of it, so that it cannot await the actor's end."""
        is_inside = self.is_current_task() or (self._concurrent is not None and self._concurrent.runs(CURRENT.get()))
        return is_inside or any(child.is_waiting_for() for child in self.children or ())

    async def wait_ended(self, within: float | None = None) -> bool:
        """Wait until the task has ended in any way, and return True; return False after ``within`` seconds."""
        return self.task is None or not (await asyncio.wait({self.task}, timeout=within))[1]

    async def wait_stopped(self) -> None:
        """Wait until the task has ended; raise the error of ``on_stop``, which is then not logged."""
        self.listeners += 1
        try:
            await self.wait_ended()
        except asyncio.CancelledError:
            self.listeners -= 1
            raise
        if self.ending.stop_error is not None:
            raise self.ending.stop_error

    @property
    def unreported(self) -> list[Down]:
        """Ends of children that were not delivered to ``on_child_down``."""
        return [down for hook, _, down in self._notices or () if down is not None and hook == "on_child_down"]

    # -- ActorContext -----------------------------------------------------------------------------------------

    async def spawn_child(
        self, actor: type[Actor], args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str | None
    ) -> ActorRef[Any]:
        if self.ending.is_urgent or self._is_over:
            raise UsageError(f"spawn: {self.ref!r} is ending, it can have no more children")
        return await self._services.spawn(actor, lambda: actor(*args, **kwargs), name, self)

    async def stop_child(self, ref: ActorRef[Any]) -> None:
        child = self._child(ref)
        child.stop()
        await child.wait_stopped()

    async def kill_child(self, ref: ActorRef[Any]) -> None:
        child = self._child(ref)
        child.kill()
        await child.wait_ended()

    def group(self, axis: str | None) -> Communicator:
        return self._services.groups.find(self.ref, self.place, axis)

    async def end_child(self, ref: ActorRef[Any], *, within: float | None) -> BaseException | None:
        child = self._find_child(ref)
        if child is None:
            return None
        child.listeners += 1
        if not await self._end(child, within):
            child.kill()
            await child.wait_ended()
        return child.ending.stop_error

    def run_soon(self, work: Callable[[], Awaitable[None]]) -> None:
        self._queue_hook("a hook", work)

    @property
    def is_ending(self) -> bool:
        return self.ending.has_begun

    def watch(self, ref: ActorRef[Any]) -> Watch:
        if self._watches is None:
            self._watches = {}
        return self._services.watches.begin(ref, lambda down: self.notify("on_down", down), self._watches)

    def _child(self, ref: ActorRef[Any]) -> Cell:
        child = self._find_child(ref)
        if child is None:
            raise UsageError(f"ref: {ref!r} is no child of {self.ref!r}, or has ended")
        return child

    def _find_child(self, ref: ActorRef[Any]) -> Cell | None:
        """Return the child that ``ref`` names and mark it as dismissed; None if there is none."""
        for child in self.children or ():
            if child.ref == ref:
                child.is_dismissed = True
                return child
        return None

    # -- the task --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Start the actor, handle messages until it has to end, and end it.

        Messages are handled here and not in a coroutine of its own, whose frame every idle actor would keep.
        """
        is_ready = False
        try:
            try:
                is_ready, handled = await self._start(), 0
                while is_ready and not self._has_served_all():
                    work = self._next()
                    if work is None:
                        self._waker = asyncio.get_running_loop().create_future()
                        await self._waker
                        continue
                    await work
                    work = None  # an idle actor keeps no message alive
                    handled += 1
                    if handled % BURST == 0:
                        await asyncio.sleep(0)
            finally:
                await self._finish(has_started=is_ready)
        finally:
            self.ending.begin(End.STOP)
            self._is_over = True
            self._refuse_waiting()
            self._executor.close()
            for watch in list(self._watches or {}):
                watch.cancel()
            if self._concurrent is not None:
                self._concurrent.close()
            if self.started is not None and not self.started.done():
                self.started.set_exception(self.ending.start_error(self.ref))
            self._services.ended(self)

    async def _start(self) -> bool:
        """Construct the actor and run ``on_start``; return False if one of them failed or the actor is to end."""
        if self.started is None or self.started.done():
            self.ending.begin(End.KILL)  # the spawn was cancelled
        if self.ending.has_begun:
            return False
        error = await self._executor.attempt("on_start", self._make())
        if error is not None:
            if not self._is_interruption(error):
                self.ending.begin(End.FAIL, error)
            return False
        if CURRENT.get() is not None:  # a modified context takes memory of its own
            CURRENT.set(None)  # from here on it is not part of the call in which it was spawned
        if self.ending.is_urgent:
            return True  # and its end begins at once
        self.has_served = True
        if self.started is not None and not self.started.done():
            self.started.set_result(None)
        self.started = None
        if self._concurrent is not None:
            self._concurrent.open()
        return True

    async def _make(self) -> None:
        """Construct the actor and run ``on_start``."""
        assert self._create is not None, "it is made once"
        create, self._create = self._create, None  # it holds the arguments
        actor = create()
        object.__setattr__(actor, "_actor_context", self)  # a frozen dataclass may be an actor, too
        self._executor.actor = actor
        await actor._begin()

    def _is_interruption(self, error: BaseException) -> bool:
        """Whether user code raised ``error`` because the end of the actor interrupted it."""
        return isinstance(error, SelfCancelled) and self.ending.is_urgent

    def _has_served_all(self) -> bool:
        """Return whether there is nothing more to handle, or the rest is to be dropped."""
        if self.ending.is_urgent or not self.ending.has_begun:
            return self.ending.is_urgent
        is_busy = self._notices or self._mailbox or (self._concurrent is not None and self._concurrent.is_busy)
        return not is_busy

    def _next(self) -> Coroutine[Any, Any, None] | None:
        """Return the handling of the next notice or message; None if none waits."""
        if self._notices:
            hook, work, _ = self._notices.popleft()
            return self._run_hook(hook, work)
        delivery = None if self._mailbox is None else self._mailbox.pop()
        return None if delivery is None else self._executor.handle(delivery)

    async def _run_hook(self, hook: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run a hook of the actor; if it raises, the actor fails."""
        error = await self._executor.attempt(hook, work())
        if error is not None and not self._is_interruption(error):
            self.fail(error)

    async def _finish(self, *, has_started: bool) -> None:
        """Refuse the waiting messages, end the children, run ``on_stop``."""
        if not self.ending.has_begun:
            self.ending.begin(End.CLOSE)  # the task is being cancelled: there is no other reason
        self.is_finishing = True
        self._refuse_waiting()
        if self._concurrent is not None:
            self._concurrent.interrupt()
            await self._concurrent.wait_idle()
        actor = self._executor.actor if has_started else None
        if actor is not None and self.ending.end is not End.KILL:
            await self._run_last(actor._end_children)
        await self._end_children()
        if actor is not None and self.ending.end is not End.KILL:
            await self._run_last(actor._conclude)
            await self._end_children()  # children that ``on_stop`` may have started

    async def _end_children(self) -> None:
        while self.children:
            child = self.children[-1]
            child.is_dismissed = True
            await self._end(child)

    async def _end(self, child: Cell, within: float | None = None) -> bool:
        """Stop or close a child, as this actor itself ends; return False if it takes longer than ``within`` seconds."""
        child.stop() if self.ending.end in (None, End.STOP) else child.close()
        self._last = child
        try:
            return await child.wait_ended(within)
        finally:
            self._last = None

    async def _run_last(self, hook: Callable[[], Awaitable[None]]) -> None:
        """Run a hook of the actor during its end; store its error as ``stop_error``."""
        error = await self._executor.attempt("a hook", hook())
        if error is not None and not isinstance(error, SelfCancelled):
            self.ending.stop_error = error

    # -- internals -------------------------------------------------------------------------------------------------

    def _end_by(self, end: End, error: BaseException | None = None) -> None:
        self.ending.begin(end, error)
        if end is End.KILL or (end > End.STOP and not self.is_finishing):
            self._executor.interrupt()
            if self._concurrent is not None:
                self._concurrent.interrupt()
            self._refuse_waiting()
        self._wake()

    def _queue_hook(self, hook: str, work: Callable[[], Awaitable[None]], down: Down | None = None) -> None:
        if self._notices is None:
            self._notices = deque()
        self._notices.append((hook, work, down))
        self._wake()

    def _wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    def _concurrent_endpoints(self) -> ConcurrentEndpoints:
        if self._concurrent is None:
            policy = self._class.mailbox
            self._concurrent = ConcurrentEndpoints(
                self.name, policy, self._executor.handle, self._services.tasks.create_task
            )
            self._concurrent.on_idle = self._wake
            if self.started is None or self.started.done():
                self._concurrent.open()
        return self._concurrent

    def _refuse_waiting(self) -> None:
        waiting = [] if self._mailbox is None else self._mailbox.clear()
        waiting += [] if self._concurrent is None else self._concurrent.clear()
        for delivery in waiting:
            self._executor.turn_away(delivery)
