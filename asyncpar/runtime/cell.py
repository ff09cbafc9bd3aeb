"""A cell: the task, the mailbox and the life of one actor.

Theory of operation.  One task constructs the actor, runs ``on_start``, handles one thing after the other and, at the
end, ends the children and runs ``on_stop``.  Endpoints run inside this task, not in tasks of their own, which makes a
message cheap; only concurrent endpoints have tasks (see ``side``).  Before each message the task looks, in this order,
whether the actor was killed (or its node closed, or it failed), then for notices of supervision, then for messages; it
was stopped if none of these is left.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import ActorDown, PeerLost, UsageError
from asyncpar.runtime.actor import Actor, Keeper
from asyncpar.runtime.delivery import CURRENT, Delivery
from asyncpar.runtime.ending import Down, End, Ending
from asyncpar.runtime.endpoint import EndpointSpec
from asyncpar.runtime.execution import ENDS_PROGRAM, is_task_cancelled
from asyncpar.runtime.executor import Answers, CancelledItself, Handler
from asyncpar.runtime.groups import Groups
from asyncpar.runtime.mailbox import BURST, Backlog, Side
from asyncpar.runtime.message import ABSENT, CLOSED, FULL, USAGE, Place
from asyncpar.runtime.ref import ActorRef
from asyncpar.runtime.watches import Watch

C = TypeVar("C")
C_contra = TypeVar("C_contra", contravariant=True)


class Household(Protocol[C_contra]):
    """What a cell asks of the system it lives in, and tells it."""

    groups: Groups

    def ended(self, cell: C_contra) -> None:
        """The cell handles nothing more."""
        ...

    def create_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` beside the cell's own task."""
        ...

    async def spawn_child(
        self, cell: C_contra, actor: type[Actor], args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str | None
    ) -> ActorRef[Any]:
        """Start an actor that ``cell`` owns.  Raises as ``ActorSystem.spawn``."""
        ...

    def watch(self, ref: ActorRef[Any], hear: Callable[[Down], None], among: set[Watch]) -> Watch:
        """Watch ``ref`` for the cell; until it ends, the watch is ``among`` those."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth(Generic[C]):
    """What a cell is made of.  ``create`` makes the actor; ``owner`` hears how it ends."""

    ref: ActorRef[Any]
    actor_class: type[Actor]
    create: Callable[[], Actor]
    endpoints: Mapping[str, EndpointSpec]
    owner: C | None = None
    place: Place | None = None


class Cell(Keeper):
    """One actor and its mailbox.  ``run`` is its task; everything else is called on the same loop."""

    def __init__(self, birth: Birth[Cell], *, answers: Answers, household: Household[Cell]) -> None:
        self.ref = birth.ref
        self.name = birth.ref.name
        self.owner = birth.owner
        self.place = birth.place
        self.ending = Ending()
        self.task: asyncio.Task[None] | None = None
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Ends when the actor is ready, with what its constructor or ``on_start`` raised if it never is."""
        self.has_served = False
        """Was it ever ready?"""
        self.is_finishing = False
        """Does it hear of nothing any more?"""
        self.is_dismissed = False
        """Does its owner end it itself, and needs no notice?"""
        self.watchers: set[tuple[int, int]] = set()
        """Who is to be told of the end: rank and number of each watch."""
        self.children: list[Cell] = []
        self.listeners = 0
        """How many will say what ``on_stop`` raises; if none does, it is logged."""
        self._birth = birth
        self._household = household
        self._handler = Handler(birth.ref.name, self.ending, answers, fail=self.fail)
        self._mailbox = Backlog(birth.actor_class.mailbox)
        self._notices: deque[tuple[str, Callable[[], Awaitable[None]], Down | None]] | None = None
        self._watches: set[Watch] | None = None
        self._side: Side | None = None
        self._waker: asyncio.Future[None] | None = None
        self._last: Cell | None = None
        self._is_over = False

    # -- outside ---------------------------------------------------------------------------------------------------

    def put(self, delivery: Delivery) -> None:
        """Add to the mailbox, or refuse what has no room there."""
        spec = delivery.spec = self._birth.endpoints.get(delivery.endpoint)
        if spec is None:
            names = sorted(self._birth.endpoints)
            text = f"{delivery.endpoint!r} is no endpoint of {self._birth.actor_class.__qualname__}; it has {names}"
            self._handler.decline(delivery, ABSENT, text)
            return
        misuse = spec.misuse(wants_stream=delivery.wants_stream, is_told=delivery.call is None)
        if misuse is not None:
            self._handler.decline(delivery, USAGE, misuse)
            return
        if spec.concurrency is None:
            refused = self._mailbox.put(delivery)
            self._wake()
        else:
            refused = self._besides().put(delivery)
        if refused is not None:
            limit = self._birth.actor_class.mailbox.limit
            self._handler.decline(refused, FULL, f"the mailbox is full ({limit} messages wait)")

    def notify(self, hook: str, down: Down) -> None:
        """Let the actor's ``hook`` hear of ``down`` before any message that waits."""
        self._hear_soon(hook, lambda: getattr(self._handler.actor, hook)(down), down)

    def stop(self) -> None:
        """Take no more messages, handle what waits, then end."""
        self._end_by(End.STOP)

    def close(self) -> None:
        """End because the node closes; what runs is cancelled, except an ``on_stop`` that has begun."""
        self._end_by(End.CLOSE)
        if self._last is not None:
            self._last.close()

    def fail(self, error: BaseException) -> None:
        """End because of ``error``; what runs is cancelled."""
        self._end_by(End.FAIL, error)

    def kill(self) -> None:
        """End at once, with all children."""
        self._end_by(End.KILL)
        for child in reversed(self.children):
            child.is_dismissed = True
            child.kill()

    def is_current_task(self) -> bool:
        """Is the caller running inside this actor's own task?"""
        return asyncio.current_task() is self.task

    def is_waiting_for(self) -> bool:
        """Does the caller run inside this actor, or inside a child of it, so that it cannot wait for its end?"""
        is_inside = self.is_current_task() or (self._side is not None and self._side.runs(CURRENT.get()))
        return is_inside or any(child.is_waiting_for() for child in self.children)

    async def wait_ended(self, within: float | None = None) -> bool:
        """Return when the task is over, however it ended; False if that takes longer than ``within`` seconds."""
        return self.task is None or not (await asyncio.wait({self.task}, timeout=within))[1]

    async def wait_stopped(self) -> None:
        """Return when the task is over, or raise what ``on_stop`` raised, which nobody else says then."""
        self.listeners += 1
        try:
            await self.wait_ended()
        except asyncio.CancelledError:
            self.listeners -= 1
            raise
        if self.ending.stop_error is not None:
            raise self.ending.stop_error

    @property
    def unheard(self) -> list[Down]:
        """How children ended of which this actor has not heard."""
        return [down for hook, _, down in self._notices or () if down is not None and hook == "on_child_down"]

    # -- the actor's side (Keeper) ---------------------------------------------------------------------------------

    async def spawn_child(
        self, actor: type[Actor], args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str | None
    ) -> ActorRef[Any]:
        if self.ending.is_urgent or self._is_over:
            raise UsageError(f"spawn: {self.ref!r} is ending, it can have no more children")
        return await self._household.spawn_child(self, actor, args, kwargs, name=name)

    async def stop_child(self, ref: ActorRef[Any]) -> None:
        child = self._child(ref)
        child.stop()
        await child.wait_stopped()

    async def kill_child(self, ref: ActorRef[Any]) -> None:
        child = self._child(ref)
        child.kill()
        await child.wait_ended()

    def group(self, axis: str | None) -> Communicator:
        return self._household.groups.find(self.ref, self.place, axis)

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
        self._hear_soon("a hook", work)

    @property
    def is_ending(self) -> bool:
        return self.ending.has_begun

    def watch(self, ref: ActorRef[Any]) -> Watch:
        if self._watches is None:
            self._watches = set()
        return self._household.watch(ref, lambda down: self.notify("on_down", down), self._watches)

    def _child(self, ref: ActorRef[Any]) -> Cell:
        child = self._find_child(ref)
        if child is None:
            raise UsageError(f"ref: {ref!r} is no child of {self.ref!r}, or has ended")
        return child

    def _find_child(self, ref: ActorRef[Any]) -> Cell | None:
        """Return the child that ``ref`` names, if there is one; it is dismissed from now on."""
        for child in self.children:
            if child.ref == ref:
                child.is_dismissed = True
                return child
        return None

    # -- the task --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Live: start, handle messages until told to end, end."""
        is_ready = False
        try:
            try:
                is_ready = await self._start()
                if is_ready:
                    await self._serve()
            finally:
                await self._finish(has_started=is_ready)
        finally:
            self.ending.begin(End.STOP)
            self._is_over = True
            self._refuse_waiting()
            self._handler.close()
            for watch in list(self._watches or ()):
                watch.cancel()
            if self._side is not None:
                self._side.close()
            if not self.started.done():
                self.started.set_exception(self._never_started())
            self._household.ended(self)

    async def _start(self) -> bool:
        """Make the actor; False if it will never be ready."""
        if self.started.done():
            self.ending.begin(End.KILL)  # whoever spawned it has been cancelled
        if self.ending.has_begun:
            return False
        try:
            actor = await self._make()
            object.__setattr__(actor, "_keeper", self)  # a frozen dataclass may be an actor, too
            self._handler.actor = actor
            await self._handler.execute(actor.on_start())
        except ENDS_PROGRAM:
            raise
        except asyncio.CancelledError as error:
            if is_task_cancelled():
                raise
            if not self.ending.is_urgent:
                self.ending.begin(End.FAIL, CancelledItself(f"actor {self.name!r}: on_start cancelled itself", error))
            return False
        except BaseException as error:  # noqa: BLE001  # user code; spawn raises it
            self.ending.begin(End.FAIL, error)
            return False
        CURRENT.set(None)  # from here on it does not belong to the call in which it was spawned
        if self.ending.is_urgent:
            return True  # and its end begins at once
        self.has_served = True
        if not self.started.done():
            self.started.set_result(None)
        if self._side is not None:
            self._side.open()
        return True

    async def _make(self) -> Actor:
        """Run the constructor; in a coroutine, since a future cannot hold the ``StopIteration`` that one may raise."""
        return self._birth.create()

    async def _serve(self) -> None:
        handled = 0
        while not self.ending.is_urgent:
            if self._notices:
                hook, work, _ = self._notices.popleft()
                await self._hear(hook, work)
            else:
                delivery = await self._next()
                if delivery is not None:
                    await self._handler.handle(delivery)
                elif not self._notices:
                    return
                del delivery  # an idle actor keeps no message alive
            handled += 1
            if handled % BURST == 0:
                await asyncio.sleep(0)

    async def _next(self) -> Delivery | None:
        """Return the next message; None if there is something else to do."""
        while not self.ending.is_urgent and not self._notices:
            delivery = self._mailbox.pop()
            if delivery is not None:
                return delivery
            if self.ending.has_begun and (self._side is None or not self._side.is_busy):
                return None
            self._waker = asyncio.get_running_loop().create_future()
            await self._waker
        return None

    async def _hear(self, hook: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run a hook of the actor, mostly to tell it of an end; if it cannot bear it, it fails."""
        try:
            await self._handler.execute(work())
        except ENDS_PROGRAM:
            raise
        except asyncio.CancelledError as error:
            if is_task_cancelled():
                raise
            if not self.ending.is_urgent:
                self.fail(CancelledItself(f"actor {self.name!r}: {hook} cancelled itself", error))
        except BaseException as error:  # noqa: BLE001  # user code; the owner is told
            self.fail(error)

    async def _finish(self, *, has_started: bool) -> None:
        """Come to the end: nothing more is handled, children end, ``on_stop`` runs."""
        if not self.ending.has_begun:
            self.ending.begin(End.CLOSE)  # the task is being cancelled: there is no other reason
        self.is_finishing = True
        self._refuse_waiting()
        if self._side is not None:
            self._side.interrupt()
            await self._side.wait_idle()
        actor = self._handler.actor if has_started else None
        if actor is not None and self.ending.end is not End.KILL:
            await self._run_last(actor._end_children)
        await self._end_children()
        if actor is not None and self.ending.end is not End.KILL:
            await self._run_last(actor.on_stop)
            await self._end_children()  # which ``on_stop`` may have started

    async def _end_children(self) -> None:
        while self.children:
            child = self.children[-1]
            child.is_dismissed = True
            await self._end(child)

    async def _end(self, child: Cell, within: float | None = None) -> bool:
        """End a child as softly as this actor itself may end; False if that takes longer than ``within`` seconds."""
        child.stop() if self.ending.end in (None, End.STOP) else child.close()
        self._last = child
        try:
            return await child.wait_ended(within)
        finally:
            self._last = None

    async def _run_last(self, hook: Callable[[], Awaitable[None]]) -> None:
        """Run a hook of the actor while it is coming to its end."""
        try:
            await self._handler.execute(hook())
        except ENDS_PROGRAM:
            raise
        except asyncio.CancelledError:
            if is_task_cancelled():
                raise
        except BaseException as error:  # noqa: BLE001  # user code; whoever stops the actor decides
            self.ending.stop_error = error

    # -- inside ----------------------------------------------------------------------------------------------------

    def _end_by(self, end: End, error: BaseException | None = None) -> None:
        self.ending.begin(end, error)
        if end is End.KILL or (end > End.STOP and not self.is_finishing):
            self._handler.interrupt()
            if self._side is not None:
                self._side.interrupt()
            self._refuse_waiting()
        self._wake()

    def _hear_soon(self, hook: str, work: Callable[[], Awaitable[None]], down: Down | None = None) -> None:
        if self._notices is None:
            self._notices = deque()
        self._notices.append((hook, work, down))
        self._wake()

    def _wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    def _besides(self) -> Side:
        if self._side is None:
            policy = self._birth.actor_class.mailbox
            self._side = Side(self.name, policy, self._handler.handle_beside, self._household.create_task)
            self._side.on_idle = self._wake
            if self.started.done():
                self._side.open()
        return self._side

    def _never_started(self) -> BaseException:
        error = self.ending.error
        if error is not None:
            return error
        if self.ending.refusal == CLOSED:
            return PeerLost("this node is closed", rank=self.ref.rank, cause="closed")
        return ActorDown(f"actor {self.name!r}: {self.ending.epitaph} before it had started", rank=self.ref.rank)

    def _refuse_waiting(self) -> None:
        waiting = self._mailbox.clear() + ([] if self._side is None else self._side.clear())
        for delivery in waiting:
            self._handler.turn_away(delivery)
