"""Operations on one rank and their groups: receives and sends, waits, and ends."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Generator
from typing import Any, Protocol

import msgspec

from asyncpar.collectives.arrays import StagingPool
from asyncpar.collectives.causes import why_cancelled
from asyncpar.collectives.inquiry import Answer, Culprit, Inquiry
from asyncpar.collectives.ledger import Ledger
from asyncpar.collectives.protocol import Abort, Description, Reason, encode_control, shortened
from asyncpar.collectives.revocation import Revocation
from asyncpar.core.concurrency.tasks import check_home_loop
from asyncpar.core.observe.recorder import NO_TICKET, Recorder
from asyncpar.core.observe.records import RECORD_BYTES, RECORDS_OFFSET, STATE_OFFSET, EventState
from asyncpar.core.observe.waits import WaitEdge
from asyncpar.errors import PeerCancelled, PeerLost, UsageError
from asyncpar.net.transport.lane import Sending
from asyncpar.net.transport.links import LEFT, Links
from asyncpar.net.wire.frame import FrameKind, Key


class Limits(msgspec.Struct):
    """Settings that may change while operations run.  ``timeout``: seconds without progress, None for no limit."""

    timeout: float | None


class Closes(Protocol):
    """A resource of a group besides its operations, which is freed at the group's end."""

    def close(self) -> None:
        """Free everything; idempotent."""
        ...


TURN_SECONDS = 0.005
"""Seconds that operations which need not wait may run one after another before the loop gets its turn."""

_REMEMBERED = 256
_STARTED, _COMPLETED = int(EventState.STARTED), int(EventState.COMPLETED)
_FAILED, _CANCELLED = int(EventState.FAILED), int(EventState.CANCELLED)


class OperationContext:
    """Context of all operations of one rank: its links, its loop, and staging memory.

    ``watch`` ends an operation that waits for longer than its group allows.
    """

    def __init__(self, links: Links, watch: Callable[[Operation], None]) -> None:
        self.watch = watch
        self.links = links
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time
        self.clock = links.recorder.clock
        self.turn_at = 0.0
        """The loop's time at which an operation of a rank alone last gave the loop its turn."""
        self.pool = StagingPool()
        self.record_end = _ends(links.recorder)
        self.record_start = _starts(links.recorder)

    def check_home_loop(self, what: str) -> None:
        """Raise ``UsageError`` about ``what`` unless the running loop is that of the node."""
        if asyncio._get_running_loop() is not self.loop:  # asked here first: this is called twice per operation
            check_home_loop(self.loop, what)

    def is_turn_due(self, now: float) -> bool:
        """Decide whether an operation that need not wait must give the loop its turn at ``now``; if so, record it.

        A rank alone waits for no other: without this, a program that runs one operation after another would handle no
        signal, timer or connection.
        """
        if now - self.turn_at < TURN_SECONDS:
            return False
        self.turn_at = now
        return True

    def lost_member(self, group: Group) -> PeerLost | None:
        """Return the error of the rank of ``group`` that was lost first, this one included; None if all are present.

        Failed ranks come before those that have left, as they may be the reason for leaving.
        """
        links = self.links
        if links.closed is not None:
            return links.closed
        lost = links.lost
        if not lost:
            return None
        gone = [error for rank, error in lost.items() if rank in group.members]
        failed = [error for error in gone if error.cause != LEFT]
        return next(iter(failed or gone), None)


def _starts(recorder: Recorder) -> Callable[[int], None]:
    """Return a callback that records that the event of a ticket is awaited."""
    owners, mask, write = recorder.owners, recorder.mask, recorder.write_state

    def start(ticket: int) -> None:
        place = ticket & mask
        if owners[place] == ticket + 1:
            write(RECORDS_OFFSET + STATE_OFFSET + place * RECORD_BYTES, _STARTED)

    return start


def _ends(recorder: Recorder) -> Callable[[int, int], None]:
    """Return a faster equivalent of ``Recorder.end``, with everything it needs at hand."""
    owners, mask, write, clock = recorder.owners, recorder.mask, recorder.write_end, recorder.clock

    def end(ticket: int, state: int) -> None:
        place = ticket & mask
        if owners[place] == ticket + 1:
            owners[place] = 0
            write(RECORDS_OFFSET + STATE_OFFSET + place * RECORD_BYTES, state, clock())

    return end


class Group:
    """The operations of one set of ranks under one number on the wire.

    ``ranks`` are ranks of the world, in the order of the group.  ``active`` holds pending operations that have a
    sequence number; ``loose`` those that have none: receives whose message is not known yet.
    """

    def __init__(
        self,
        *,
        number: int,
        name: str,
        ranks: tuple[int, ...],
        ledger: Ledger,
        limits: Limits,
        admit_early: Callable[[], None] | None = None,
        ancestors: frozenset[int] = frozenset(),
    ) -> None:
        self.number = number
        self.ancestors = ancestors
        """The numbers of the groups that it was made from: it ends when one of them is revoked."""
        self.name = name
        self.ranks = ranks
        self.members = frozenset(ranks)
        self.ledger = ledger
        self.limits = limits
        self.active: dict[int, Operation] = {}
        self.loose: dict[Operation, None] = {}
        self.given_up: tuple[int, str] | None = None
        """The rank of the world that is the cause, and the reason, once the group accepts no more operations."""
        self.is_closed = False
        """Whether its own rank has given it up with ``close``, or it was dropped."""
        self.revocation: Revocation | None = None
        """The revocation of the group, or of one that it was made from: its origin and reason."""
        self.agreements_called = 0
        """Number of agreements (see ``fault_tolerance``) and shrinks of the group."""
        self.on_left: Callable[[], None] | None = None
        """Unmaps memory of other ranks when this rank has left the world."""
        self.on_ended: Callable[[], list[tuple[int, int]]] | None = None
        """Frees the resources that its communicator holds for operations, all of which are over; returns the ranks that
        are linked to this one, with the number under which they send it messages."""
        self.has_left = False
        """Whether this rank has left the world of a revoked group."""
        self.channels: list[int] = []
        """The numbers of the channels of its messages between two ranks."""
        self.early: dict[int, Any] = {}
        """Calls that have no operation yet, by number: see ``quick``."""
        self._admit_early = admit_early
        self.history: OrderedDict[int, Description] = OrderedDict()
        self.notices: dict[int, Callable[[], None]] = {}
        """By number, the callback for a notice of another rank: see ``GroupNotice``."""

    def check_open(self) -> None:
        """Raise the reason why the group accepts no more operations, if it was closed here, revoked or given up."""
        if self.is_closed:
            raise UsageError(f"group {self.name}: it was closed on this rank; make another one")
        if self.revocation is not None:
            raise self.revocation.stale(self.name) if self.has_left else self.revocation.error(f"group {self.name}")
        if self.given_up is not None:
            rank, text = self.given_up
            raise PeerCancelled(f"group {self.name} was given up, because {text}", rank=rank, cause=text)

    def is_stale(self, sequence: int) -> bool:
        """Return whether the operation with this number is over here."""
        if sequence in self.active or sequence in self.early:
            return False
        return self.revocation is not None or self.ledger.is_past(sequence)

    def find(self, sequence: int) -> Operation | None:
        """Return the operation with this number, if it has begun and is not over."""
        if sequence in self.early and self._admit_early is not None:
            self._admit_early()
        return self.active.get(sequence)

    def retire(self, sequence: int, description: Description) -> None:
        """Remove the operation with this number, which is over, and keep its description for a while."""
        self.active.pop(sequence, None)
        self.history[sequence] = description
        if len(self.history) > _REMEMBERED:
            self.history.popitem(last=False)

    def pending(self) -> list[Operation]:
        """Return the pending operations."""
        if self.early and self._admit_early is not None:
            self._admit_early()
        return [*self.active.values(), *self.loose]


class Operation:
    """The state of one call.

    ``home`` is the group whose loss or timeout ends it, ``route`` and ``sequence`` the key of its frames (None until a
    receive knows which message it gets), ``audience`` the ranks that are notified of its failure.  However it ends, its
    memory is not touched once it is over.
    """

    __slots__ = (
        "_label",
        "_outstanding",
        "audience",
        "awaited",
        "begun_at",
        "context",
        "description",
        "failure",
        "has_started",
        "has_warned",
        "home",
        "inquiry",
        "is_over",
        "is_standing",
        "messages_sent",
        "name",
        "payload_posted",
        "payload_sent",
        "posts",
        "progress_at",
        "route",
        "sendings",
        "sequence",
        "stand_in",
        "started_at",
        "steps",
        "suspects",
        "ticket",
        "waiter",
        "why_cancelled",
    )

    def __init__(
        self,
        *,
        context: OperationContext,
        home: Group,
        route: Group | None,
        sequence: int,
        description: Description,
        name: str,
        audience: tuple[int, ...],
        label: str | None = None,
    ) -> None:
        self.context = context
        self.home = home
        self.route = route
        self.sequence = sequence
        self.description = description
        self.name = name
        self._label = label
        self.audience = audience
        self.failure: BaseException | None = None
        self.why_cancelled: str | None = None
        self.has_started = False
        self.has_warned = False
        """Whether its long wait has been reported."""
        self.is_over = False
        self.is_standing = False
        """Whether it is a receive of a message that may never come, and has not come so far.  Nobody waits in it: see
        ``standing.py``."""
        self.begun_at = 0.0
        """Time at which the messages of a call began, by the recorder's clock; ``started_at`` is the loop's, in
        milliseconds."""
        self.started_at = 0.0
        self.progress_at = 0.0
        self.waiter: asyncio.Future[None] | None = None
        self.awaited: int | None = None
        self.posts: dict[tuple[int, int], asyncio.Future[None]] = {}
        self.sendings: dict[Sending, int] = {}
        self.inquiry: Inquiry | None = None
        """The questions to other ranks about it and their answers, once it has waited for long."""
        self.suspects: set[int] = set()
        self.stand_in: Operation | None = None
        """The operation in whose name a receive asks other ranks while its own message is not known."""
        self.payload_sent = 0
        self.payload_posted = 0
        self._outstanding: dict[object, int] = {}
        """Bytes of messages that were in flight at the last refresh."""
        self.messages_sent = 0
        self.steps = 0
        self.ticket = NO_TICKET
        """The ticket of its record: see ``Recorder``."""

    @property
    def algorithm(self) -> str:
        return self.description.algorithm

    @property
    def is_waiting(self) -> bool:
        """Whether the program, or a part of it, waits in it."""
        return self.has_started and not self.is_standing

    @property
    def label(self) -> str:
        """The name in messages: ``all_reduce #7``."""
        return self._label or f"{self.name} #{self.sequence}"

    @label.setter
    def label(self, label: str) -> None:
        self._label = label

    def bind(self, route: Group, sequence: int, peer: int) -> None:
        """Bind a receive to its message: the one with this number from ``peer``."""
        self.home.loose.pop(self, None)
        self.route, self.sequence, self.audience = route, sequence, (peer,)
        route.active[sequence] = self

    # -- moving payloads -----------------------------------------------------------------------------------------

    def begin(self, lost: PeerLost | None) -> None:
        """Begin, as the call is awaited.  Raises the error that ended the operation before it began, or ``lost``."""
        self.has_started = True
        self.context.record_start(self.ticket)
        self.started_at = self.progress_at = self.context.now()
        if self.failure is not None:
            raise self.failure
        if lost is not None:
            raise lost

    def post(self, peer: int, tag: int, buffer: memoryview) -> asyncio.Future[None] | None:
        """Receive into ``buffer``; return None if the payload is already there."""
        assert self.route is not None
        self.payload_posted += len(buffer)
        key = Key(self.route.number, self.sequence, tag)
        future = self.context.links.link(peer).post(key, self.description.fingerprint, buffer)
        if future is not None:
            self.posts[peer, tag] = future
        return future

    def send(self, peer: int, tag: int, payload: memoryview) -> Sending | None:
        """Send ``payload``; return None if its memory may be reused at once."""
        assert self.route is not None
        self.payload_sent += len(payload)
        self.messages_sent += 1
        key = Key(self.route.number, self.sequence, tag)
        sending = self.context.links.link(peer).send(key, self.description.fingerprint, payload)
        if sending is not None:
            self.sendings[sending] = peer
        return sending

    async def received(self, peer: int, tag: int, future: asyncio.Future[None]) -> None:
        """Wait until the payload that was posted as ``future`` has arrived."""
        await self.wait(peer, future)
        del self.posts[peer, tag]

    async def sent(self, peer: int, sending: Sending) -> None:
        """Wait until the memory of ``sending`` may be reused."""
        if self.failure is not None:  # which has released ``sending``: that is no cancellation
            raise self.failure
        if not sending.done.done():
            gate: asyncio.Future[None] = self.context.loop.create_future()
            sending.done.add_done_callback(lambda _: None if gate.done() else gate.set_result(None))
            await self.wait(peer, gate)
        sending.done.result()
        del self.sendings[sending]

    async def wait(self, peer: int | None, future: asyncio.Future[None]) -> None:
        """Wait for ``future``, which ``peer`` completes (None: any rank)."""
        if self.failure is not None:
            raise self.failure
        self.waiter = future
        self.awaited = peer
        await Cancellable(future, self)  # if this raises, the waiter stays until ``discard``, to show what was awaited
        self.waiter = None
        if self.failure is not None:
            raise self.failure
        self.progress_at = self.context.now()

    def refresh(self, now: float) -> None:
        """Note progress that was made while nobody waited for it: bytes of incomplete messages."""
        before, self._outstanding = self._outstanding, self.missing_bytes() | self.unsent_bytes()
        if any(left < before.get(message, 0) for message, left in self._outstanding.items()):
            self.progress_at = now

    def suspect(self, rank: int) -> None:
        """Ask ``rank``, which calls another operation, for its description, once."""
        if self.failure is None and rank not in self.suspects:
            self.suspects.add(rank)
            show(self.context.links, rank, self.key(), self.description)

    # -- ends ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """End the operation after success."""
        assert not self.posts, "an operation ended with posted receives"
        assert not self.sendings, "an operation ended with sends in flight"
        self._close(_COMPLETED)

    def fail(self, error: BaseException) -> None:
        """End it with ``error``: free memory now, and wake the caller."""
        if self.failure is not None or self.is_over:
            return
        self.failure = error
        waiter = self.waiter
        self._release(keep=waiter)
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    def discard(self) -> None:
        """End the operation after the caller has got its failure: free all memory, drop all traces."""
        self._release(keep=None)
        self.waiter = None
        self._close(_CANCELLED if self.failure is None else _FAILED)

    def report_failure(self, reason: Reason, text: str, *, lost: int | None = None, is_linked: bool = False) -> None:
        """Notify the audience that the operation has failed here, perhaps because rank ``lost`` is gone.

        With ``is_linked`` use only links that are up: every rank reports a lost one, and most detect it themselves.
        """
        if self.route is None or self.context.links.is_closing:
            return
        payload = encode_control(Abort(reason, shortened(text), rank=lost))
        for rank in self.audience:
            if not is_linked or self.context.links.is_up(rank):
                self.context.links.control(rank, FrameKind.ABORT, self.key(), payload)

    def key(self) -> Key:
        """Return the key of control frames about this operation."""
        assert self.route is not None
        return Key(self.route.number, self.sequence, 0)

    def _release(self, *, keep: asyncio.Future[None] | None) -> None:
        """Cancel every receive and send; ``keep`` is not cancelled, as it will get an exception."""
        links = self.context.links
        posts, self.posts = self.posts, {}
        for (peer, tag), future in posts.items():
            assert self.route is not None
            links.link(peer).withdraw(Key(self.route.number, self.sequence, tag))
            if future is not keep and not future.done():
                future.cancel()
            elif future.done() and not future.cancelled():
                future.exception()
        sendings, self.sendings = self.sendings, {}
        for sending in sendings:
            sending.release()
        if self.route is not None:
            links.forget(self.route.number, self.sequence)

    def _close(self, state: int) -> None:
        self.is_over = True
        if self.has_warned:
            self.context.links.observer.report_over(self, has_failed=state != _COMPLETED)
        self.context.record_end(self.ticket, state)
        self.home.loose.pop(self, None)
        if self.route is not None:
            self.route.retire(self.sequence, self.description)

    # -- missing ranks ---------------------------------------------------------------------------------------------

    @property
    def asker(self) -> Operation | None:
        """The operation in whose name other ranks are asked; None if they cannot be."""
        return self if self.route is not None else self.stand_in

    @property
    def answers(self) -> dict[int, Answer]:
        """The answers of other ranks."""
        inquiry = self.asker.inquiry if self.asker is not None else None
        return {} if inquiry is None else inquiry.answers

    def find_culprit(self, now: float) -> Culprit | None:
        """Return the rank that holds the operation up; None if it is not known."""
        asker = self.asker
        if asker is None or asker.inquiry is None:
            return None
        return asker.inquiry.find_culprit(self.waits_for(), me=self.context.links.rank, now=now)

    def is_culprit_sure(self, now: float) -> bool:
        """Return whether the rank that ``find_culprit`` returns is itself at fault rather than merely waiting."""
        asker = self.asker
        if asker is None or asker.inquiry is None:
            return False
        return asker.inquiry.is_sure(self.waits_for(), me=self.context.links.rank, now=now)

    # -- waits -----------------------------------------------------------------------------------------------------

    def waits_for(self) -> list[int]:
        """Return the ranks that this operation waits for, the one it needs next first."""
        ranks = [] if self.awaited is None or self.waiter is None else [self.awaited]
        ranks += [peer for (peer, _), future in self.posts.items() if not future.done()]
        ranks += self.sendings.values()
        return list(dict.fromkeys(ranks))

    @property
    def site(self) -> str:
        """The place of the call in the program, as in ``train.py:57``; "" if it is not known."""
        return self.context.links.recorder.site_of(self.ticket)

    def own_wait(self) -> WaitEdge | None:
        """Return this rank's wait in it; None if it waits for no rank in particular."""
        ranks = self.waits_for()
        if not ranks or (self.route is None and self.awaited is None):
            return None
        key = (self.home.number if self.route is None else self.route.number, self.sequence)
        return WaitEdge(self.context.links.rank, ranks[0], self.label, key, self.site)

    def known_waits(self) -> dict[int, WaitEdge]:
        """Return the known waits of other ranks, and its own, by rank."""
        asker, own = self.asker, self.own_wait()
        waits = dict(asker.inquiry.waits) if asker is not None and asker.inquiry is not None else {}
        return waits if own is None else waits | {own.rank: own}

    def missing_bytes(self) -> dict[object, int]:
        """Return the number of bytes of each posted message that have not arrived."""
        if self.route is None:
            return {}
        number, links = self.route.number, self.context.links
        return {
            (peer, tag): links.link(peer).missing_bytes(Key(number, self.sequence, tag))
            for (peer, tag), future in self.posts.items()
            if not future.done()
        }

    def unsent_bytes(self) -> dict[object, int]:
        """Return the number of bytes of each sent message that have not left."""
        return {sending: sending.waiting_bytes for sending in self.sendings}

    def lost(self, error: PeerLost) -> PeerLost:
        """Return ``error`` with this operation named.

        A rank may have left because another one is silent: then the error names the silent one.
        """
        error = self.context.links.explain(error)
        culprit = self.find_culprit(self.context.now()) if error.cause == LEFT else None
        if culprit is not None and culprit.silent_for is not None:
            host = self.context.links.world.members[culprit.rank].host
            cause = f"{culprit.describe()}; then rank {error.rank} left"
            error = PeerLost(f"rank {culprit.rank} on {host}: {cause}", rank=culprit.rank, host=host, cause=cause)
        return type(error)(
            f"rank {self.context.links.rank}: {self.label}: {error}",
            rank=error.rank,
            host=error.host,
            operation=self.label,
            cause=error.cause,
        )


def show(links: Links, rank: int, key: Key, description: Description, *, is_answer: bool = False) -> None:
    """Send ``description`` to ``rank``, which calls another operation under ``key``."""
    abort = Abort("mismatch", operation=description, is_answer=is_answer)
    links.control(rank, FrameKind.ABORT, key, encode_control(abort))


class Cancellable:
    """Await ``future``; if the task is cancelled meanwhile, ``operation`` records the reason: see ``causes.py``."""

    __slots__ = ("_asyncio_future_blocking", "_future", "_operation", "add_done_callback", "get_loop")

    def __init__(self, future: asyncio.Future[None], operation: Operation) -> None:
        self._future = future
        self._operation = operation
        self._asyncio_future_blocking = False
        self.get_loop = future.get_loop  # a task asks for these two
        self.add_done_callback = future.add_done_callback

    def __await__(self) -> Generator[Any, Any, None]:
        if not self._future.done():
            self._asyncio_future_blocking = True
            yield self
        return self._future.result()

    def cancel(self, msg: object = None) -> bool:
        self._operation.why_cancelled = why_cancelled(msg)
        return self._future.cancel(msg)


def take_turn(operation: Operation) -> Generator[Any, Any, None]:
    """Let the loop run its other callbacks; if the task is cancelled meanwhile, ``operation`` records the reason."""

    def end() -> None:
        if not turn.done():
            turn.set_result(None)

    turn: asyncio.Future[None] = operation.context.loop.create_future()
    operation.context.loop.call_soon(end)
    yield from Cancellable(turn, operation).__await__()
