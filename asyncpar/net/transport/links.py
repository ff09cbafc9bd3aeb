"""All links of one rank: opened on demand, watched for loss, closed together."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from asyncpar.core.config.world import World
from asyncpar.core.observe.pauses import PauseRecorder
from asyncpar.core.observe.rank_observer import RankObserver
from asyncpar.core.observe.recorder import open_recorder
from asyncpar.core.observe.records import NO_PEER, EventKind, RankIdentity
from asyncpar.core.observe.reporting import find_peer_error
from asyncpar.errors import AsyncparError, LinkDamaged, NodeClosed, PeerCancelled, PeerLost, PeerTimeout, UsageError
from asyncpar.net.transport.lane import Lane, Sending
from asyncpar.net.transport.link import Link
from asyncpar.net.transport.protection import DAMAGED
from asyncpar.net.transport.recycling import MemoryPool
from asyncpar.net.transport.shared import SharedMemory
from asyncpar.net.wire.frame import FrameHeader, FrameKind, Key, Payload

LEFT = "it left the world"
"""The ``cause`` when a rank is gone but did not fail: it has closed its links in good order."""

_REASON_SECONDS = 0.2
"""Seconds for which the end of a rank is held back: its goodbye, or another rank's end, may explain it."""

_REASON_BYTES = 1024

_LAST_SECONDS = 0.05
"""Seconds for which a rank that closes its links waits for peers to which nothing needs to be sent any more."""

MAX_MESSAGE_BYTES = 1 << 30
MESSAGE_BUDGET = 64 << 20

OnMessage = Callable[[int, memoryview, Callable[[], None]], None]
"""Called with the sender's rank, the payload, and the function that releases the payload's share of the budget."""


_log = logging.getLogger(__name__)


class Connector(ABC):
    """Opens lanes to other ranks of the world."""

    @abstractmethod
    async def connect(self, links: Links, rank: int) -> None:
        """Bring up the link to ``rank``.

        On return ``links.adopt`` has been called for it, by us or by the side that accepts connections.  Raises
        ``PeerLost`` if the peer cannot be reached.
        """

    @abstractmethod
    def default_lane(self, rank: int) -> str:
        """Return the kind of lane that will be used with ``rank``, as far as it is known before the link is up."""


T = TypeVar("T")


class OperationEvents(Protocol):
    """The owner of collective operations, as links see it: queries and events."""

    def is_stale(self, group: int, sequence: int) -> bool:
        """Return whether this operation is over here, so that frames for it must be dropped."""
        ...

    def frame_mismatch(self, rank: int, header: FrameHeader) -> None:
        """Handle a frame of ``rank`` whose fingerprint differs from that of the local operation with its key."""
        ...

    def control(self, rank: int, header: FrameHeader, payload: bytes) -> None:
        """Handle an ABORT, PROBE, STATUS, REVOKE, AGREE or CONTRIBUTORS frame of ``rank``."""
        ...

    def peer_lost(self, rank: int, error: PeerLost) -> None:
        """Handle the failure of ``rank``.  Not called for a rank that left: operations fail when they need it."""
        ...

    def job_ends(self, error: PeerLost) -> None:
        """End every wait with ``error``: the whole job ends because of a lost rank."""
        ...

    def closed(self, error: PeerLost) -> None:
        """End every pending operation with ``error``: this rank leaves."""
        ...


class _NoOperations:
    """A stand-in until a group is made: early frames wait, nothing is stale."""

    def is_stale(self, group: int, sequence: int) -> bool:  # noqa: ARG002
        return False

    def frame_mismatch(self, rank: int, header: FrameHeader) -> None: ...
    def control(self, rank: int, header: FrameHeader, payload: bytes) -> None: ...
    def peer_lost(self, rank: int, error: PeerLost) -> None: ...
    def job_ends(self, error: PeerLost) -> None: ...
    def closed(self, error: PeerLost) -> None: ...


class _LinkReferee:
    """The calls from one link to the owner of operations."""

    def __init__(self, operations: OperationEvents, rank: int) -> None:
        self._rank = rank
        self.ask(operations)

    def ask(self, operations: OperationEvents) -> None:
        """Direct calls to ``operations`` from now on."""
        self.is_stale = operations.is_stale
        self.mismatch = partial(operations.frame_mismatch, self._rank)


class _LinksByRank(dict[int, Link]):
    """Existing links; a missing one is made when it is looked up."""

    def __init__(self, make: Callable[[int], Link]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, rank: int) -> Link:
        return self._make(rank)


class Links:
    """The links of ``rank`` in ``world``; use as ``async with``.

    ``operations`` and ``on_message`` are set once by the layers above, before the first frame can arrive.
    """

    def __init__(self, *, world: World, rank: int, connector: Connector) -> None:
        if not 0 <= rank < world.size:
            raise UsageError(f"rank: expected 0..{world.size - 1}, got {rank}")
        self.world = world
        self.rank = rank
        self._operations: OperationEvents = _NoOperations()
        self._on_message: OnMessage = _refuse_message
        self.shared: SharedMemory | None = None
        """Memory for large messages to ranks of this host; set before the first link is made."""
        self.lost: dict[int, PeerLost] = {}
        """Ranks that are gone, with the error for operations that need them."""
        self.refuse_fixed_ranks: Callable[[str, str], UsageError] | None = None
        """Makes the error for what requires fixed ranks; None unless another world follows when ranks leave or join."""
        member = world.members[rank]
        self.observer = RankObserver(rank)
        self.recorder = open_recorder(
            RankIdentity(
                rank=rank,
                size=world.size,
                host=member.host,
                host_id=member.host_id,
                job=world.job,
                generation=world.generation,
            ),
            asyncio.get_running_loop(),
        )
        """The recorder of this rank's recent events; the layers above write to it, too."""
        self._record_change(f"world {world.generation} of {world.size} ranks")
        self.pauses: PauseRecorder | None = None
        """Recorder of pauses of a launched rank; to be sampled a few times a second."""
        self._connector = connector
        self._links = _LinksByRank(self._first_link)
        self._referees: list[_LinkReferee] = []
        self.link: Callable[[int], Link] = self._links.__getitem__
        """Returns the link to a rank, which is opened in the background if it is new."""
        self.memory = MemoryPool()
        """Memory for received data: large messages, and results that are returned without ``out``."""
        self._tasks = asyncio.TaskGroup()
        self._opening: dict[int, asyncio.Task[None]] = {}
        self._leaving: list[asyncio.TimerHandle] = []
        """Timers of ranks that were seen to leave, but have not given a reason yet."""
        self._listeners: list[Callable[[int, PeerLost], None]] = []
        self.closed: PeerLost | None = None
        """The error of every operation once this rank has begun to leave; None until then."""
        self._reasons: dict[int, tuple[int, str]] = {}
        """Ranks that left because of another rank, with that rank and its failure."""
        self._job_end: PeerLost | None = None
        self.is_revoked = False
        """Whether the whole world has been revoked, so that operations under way do not matter any more."""
        self.expelled: PeerLost | None = None
        """The error if a live rank has notified this one that it has declared it lost."""
        self._goodbye = _name_culprit(None, rank)
        self._suspect: tuple[int, str] | None = None
        """A rank that was silent when an operation of this rank ended, and how; None once it is heard from again."""

    @property
    def operations(self) -> OperationEvents:
        """The owner of collective operations."""
        return self._operations

    @operations.setter
    def operations(self, operations: OperationEvents) -> None:
        self._operations = operations
        for referee in self._referees:
            referee.ask(operations)

    @property
    def on_message(self) -> OnMessage:
        """Called with the rank, payload and release of each actor message."""
        return self._on_message

    @on_message.setter
    def on_message(self, on_message: OnMessage) -> None:
        self._on_message = on_message
        for rank, link in self._links.items():
            link.deliver_to(partial(on_message, rank))

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self.close()
        finally:
            await self._tasks.__aexit__(None, None, None)

    # -- use -------------------------------------------------------------------------------------------------------

    def send_message(self, to: int, payload: Payload) -> Sending | None:
        """See ``Link.send_message``."""
        return self.link(to).send_message(payload)

    def control(self, to: int, kind: FrameKind, key: Key, payload: bytes = b"") -> None:
        """Send a control frame; opens the link if need be, dropped if ``to`` is lost."""
        self.link(to).control(kind, key, payload)

    def start_task(self, coroutine: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Run a background task, until these links are closed at the latest; it must not raise."""
        return self._tasks.create_task(coroutine, name=name)

    def forget(self, group: int, sequence: int | None = None) -> None:
        """Drop every trace of an operation that is over, or of a whole group, on all links."""
        for link in self._links.values():
            link.forget(group, sequence)

    def _first_link(self, rank: int) -> Link:
        """Make the link to ``rank``, and open it in the background."""
        link = self._make(rank)
        error = self.closed or self.lost.get(rank)
        if error is not None:
            link.fail(error)
        else:
            opening = self._tasks.create_task(self._open(rank, link), name=f"open link {self.rank}-{rank}")
            self._opening[rank] = opening
            opening.add_done_callback(lambda _: self._opening.pop(rank, None))
        return link

    def lane_kind(self, rank: int) -> str:
        """Return the kind of lane that carries, or will carry, the link to ``rank``."""
        link = self._links.get(rank)
        if link is not None and link.lane is not None:
            return link.lane.kind
        return self._connector.default_lane(rank)

    def add_loss_listener(self, listener: Callable[[int, PeerLost], None]) -> Callable[[], None]:
        """Call ``listener(rank, error)`` once per rank that fails or leaves, until the returned function is called."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    @property
    def bytes_sent(self) -> int:
        """Bytes of frames sent by this rank, headers included."""
        return sum(link.bytes_sent for link in self._links.values())

    @property
    def bytes_received(self) -> int:
        """Bytes of frames received by this rank, headers included."""
        return sum(link.bytes_received for link in self._links.values())

    # -- the connector's side ----------------------------------------------------------------------------------------

    @property
    def is_broken(self) -> bool:
        """Whether the world is revoked, or one of its ranks has failed."""
        return self.is_revoked or any(error.cause != LEFT for error in self.lost.values())

    @property
    def is_closing(self) -> bool:
        """Whether this rank has begun to leave."""
        return self.closed is not None

    def is_up(self, rank: int) -> bool:
        """Return whether the link to ``rank`` is in service."""
        link = self._links.get(rank)
        return link is not None and link.lane is not None and link.error is None

    def adopt(self, rank: int, lane: Lane) -> None:
        """Put ``lane`` into service as the link to ``rank``; close it if the rank is lost, or this one is leaving."""
        error = self.closed or self.lost.get(rank)
        if error is not None:
            lane.abort(error)
            return
        link = self._links.get(rank) or self._make(rank)
        link.attach(lane)
        _log.info("rank %d has a %s lane to rank %d on %s", self.rank, lane.kind, rank, self.world.members[rank].host)
        for lost, failure in list(self.lost.items()):
            if failure.cause != LEFT:
                link.control(FrameKind.NOTICE, Key(0, lost, 0), _reason_bytes(failure.cause))

    def report_lost(self, rank: int, cause: str, *, because: BaseException | None = None) -> PeerLost:
        """Mark ``rank`` as failed, notify all linked ranks, and return the error.

        ``rank`` is notified, too, in case it lives: it must not wait for us, nor report us as lost to others.
        """
        error = self.lost.get(rank)
        if error is not None:
            return error
        error = self._lost_error(rank, cause)
        error.__cause__ = because
        if self.closed is not None:
            return error
        self.lost[rank] = error
        for link in list(self._links.values()):
            if link.lane is not None:
                link.control(FrameKind.NOTICE, Key(0, rank, 0), _reason_bytes(cause))
        self._give_up(rank, error)
        return error

    def observe_end(self, rank: int, cause: str) -> None:
        """Mark ``rank``, whose end was observed, as failed (see ``report_lost``)."""
        self.report_lost(rank, cause)

    def end_job(self, rank: int, cause: str) -> None:
        """End the job because ``rank`` is lost, as the launcher does."""
        if self.closed is None:
            error = self.report_lost(rank, cause)
            self._job_end = self._job_end or error
            self._operations.job_ends(error)

    def observe_left(self, rank: int) -> None:
        """Mark ``rank`` as left, after a delay in which its goodbye, with the reason, may still arrive."""
        if self.closed is None:
            self._leaving.append(asyncio.get_running_loop().call_later(_REASON_SECONDS, self.report_left, rank))

    def report_left(self, rank: int) -> None:
        """Mark ``rank`` as left in good order."""
        if rank not in self.lost and self.closed is None:
            self._mark_lost(rank, self._lost_error(rank, LEFT))

    def explain(self, error: PeerLost) -> PeerLost:
        """Return ``error``, or the error of the rank that caused it.

        A rank that leaves in good order may do so because of another one, which the error must name: the one in its
        goodbye, or the first that has failed.  In a job that ends, it is the rank that caused the end.
        """
        if error.rank is None or error.rank == self.rank:
            return error
        if self._job_end is not None and error.rank != self._job_end.rank:
            return self._behind(error.rank, self._job_end.rank, self._job_end.cause)
        if error.cause != LEFT:
            return error
        culprit, why = self._reasons.get(error.rank, (None, ""))
        if culprit is None:
            failed = next((lost for lost in self.lost.values() if lost.cause != LEFT), None)
            return error if failed is None else self._behind(error.rank, failed.rank, failed.cause)
        if culprit == self.rank:
            text = f"{LEFT} because of this rank, {culprit}: {why}"
            return self._lost_error(error.rank, text)
        return self._behind(error.rank, culprit, why)

    def leave_because(self, error: BaseException | None) -> None:
        """Put the rank that ``error`` names, if any, into this rank's goodbye."""
        self._goodbye = _name_culprit(error, self.rank)

    def suspect(self, rank: int, cause: str) -> None:
        """Put ``rank``, which does not answer, into this rank's goodbye unless it is heard from again.

        A program may handle the error of the operation, and then leave: others that wait for this rank must not blame
        it.
        """
        self._suspect = rank, cause

    async def close(self) -> None:
        """Send a goodbye on every link and close the lanes; pending operations end with ``PeerLost``.  Idempotent."""
        if self.closed is not None:
            return
        self.closed = NodeClosed.of(self.rank)
        if self._suspect is not None and self._goodbye == _name_culprit(None, self.rank):
            self._goodbye = _goodbye_because_of(*self._suspect)
        for opening in list(self._opening.values()):
            opening.cancel()
        for timer in self._leaving:  # they would keep this node's objects alive until they fire
            timer.cancel()
        self._leaving.clear()
        links = list(self._links.values())
        for link in links:
            if link.lane is not None:
                link.control(FrameKind.GOODBYE, *self._goodbye)
        for link in links:
            link.fail(self.closed)
        self._operations.closed(self.closed)
        await asyncio.gather(*(self._close_link(link) for link in links))
        self.memory.close()
        self.recorder.close()

    async def _close_link(self, link: Link) -> None:
        """Flush and close ``link``; do not wait for a peer that does not answer, or whose world is over."""
        lost = self.lost.get(link.peer)
        is_silent = (lost is not None and lost.cause != LEFT) or self._goodbye[0].sequence == link.peer + 1
        if not (self.is_revoked or is_silent):
            await link.close()
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_SECONDS):
                await link.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _make(self, rank: int) -> Link:
        if not 0 <= rank < self.world.size:
            raise UsageError(f"rank: expected 0..{self.world.size - 1}, got {rank}")
        if rank == self.rank:
            raise UsageError(f"rank: {rank} is this rank itself; there is no link to oneself")
        self._referees.append(referee := _LinkReferee(self._operations, rank))
        link = Link(
            peer=rank,
            generation=self.world.generation,
            referee=referee,
            on_control=self._on_control,
            on_lost=self._lane_lost,
            on_message=partial(self._on_message, rank),
            max_message_bytes=MAX_MESSAGE_BYTES,
            message_budget=MESSAGE_BUDGET,
            allocate=self.memory.allocate,
            shared=self.shared,
        )
        self._links[rank] = link
        return link

    async def _open(self, rank: int, link: Link) -> None:
        try:
            await self._connector.connect(self, rank)
        except PeerLost as error:
            await asyncio.sleep(_REASON_SECONDS)  # a silent rank may have left because of another one
            if error.cause == LEFT:
                self.report_left(rank)
            else:
                link.fail(self.report_lost(rank, error.cause or str(error), because=error))
        except AsyncparError as error:
            link.fail(self.report_lost(rank, f"{type(error).__name__}: {error}", because=error))
        else:
            if link.lane is None and link.error is None:
                link.fail(self.report_lost(rank, "the connection was made, but closed before it was used"))

    def _on_control(self, rank: int, header: FrameHeader, payload: bytes) -> None:
        if self._suspect is not None and self._suspect[0] == rank:
            self._suspect = None
        if header.kind is FrameKind.NOTICE:
            self._receive_notice(rank, header.sequence, payload.decode(errors="replace"))
        elif header.kind is FrameKind.GOODBYE:
            if 0 < header.sequence <= self.world.size:
                self._reasons[rank] = (header.sequence - 1, payload.decode(errors="replace"))
            self.report_left(rank)
        else:
            self._operations.control(rank, header, payload)

    def _receive_notice(self, rank: int, lost: int, cause: str) -> None:
        if self.closed is not None or rank in self.lost:
            return
        if lost == self.rank:
            error = self._lost_error(rank, f"it has declared this rank, {lost}, lost: {cause}")
            self.expelled = self.expelled or error
            self._give_up(rank, error)
        elif lost < self.world.size and lost not in self.lost:
            self.report_lost(lost, as_reported(cause, rank))

    def _record_change(self, name: str, *, peer: int = NO_PEER) -> None:
        """Record a change of the world, with the current time."""
        recorder = self.recorder
        recorder.end(recorder.begin(EventKind.WORLD, recorder.name(name), peer=peer))

    def _lane_lost(self, rank: int, cause: str) -> PeerLost:
        """Handle the end of the lane to ``rank``."""
        here, there = self.world.members[self.rank].host, self.world.members[rank].host
        place = f"{DAMAGED} between rank {self.rank} on {here} and rank {rank} on {there}"
        return self.report_lost(rank, cause.replace(DAMAGED, place, 1))

    def _give_up(self, rank: int, error: PeerLost) -> None:
        self._mark_lost(rank, error)
        self._operations.peer_lost(rank, error)

    def _lost_error(self, rank: int, cause: str) -> PeerLost:
        host = self.world.members[rank].host
        kind = LinkDamaged if DAMAGED in cause else PeerLost
        return kind(f"rank {rank} on {host} is lost: {cause}", rank=rank, host=host, cause=cause)

    def _behind(self, left: int, culprit: int | None, why: str | None) -> PeerLost:
        """Return the error for operations that need rank ``left``, which left because of ``culprit``."""
        assert culprit is not None
        host, cause = self.world.members[culprit].host, f"{why}; then rank {left} left"
        kind = LinkDamaged if DAMAGED in cause else PeerLost
        return kind(f"rank {culprit} on {host} is lost: {cause}", rank=culprit, host=host, cause=cause)

    def _mark_lost(self, rank: int, error: PeerLost) -> None:
        self.lost[rank] = error
        what = "a rank left" if error.cause == LEFT else "a rank is lost"
        self._record_change(what, peer=rank)
        explained = self.explain(error)
        if rank in self._links:
            self._links[rank].fail(explained)
        for listener in list(self._listeners):
            listener(rank, explained)


def as_reported(cause: str, rank: int) -> str:
    """Return ``cause`` with the reporting rank, unless it is that a rank left, which is true in any report."""
    return cause if cause == LEFT or "(reported by" in cause else f"{cause} (reported by rank {rank})"


def _name_culprit(error: BaseException | None, me: int) -> tuple[Key, bytes]:
    """Return key and payload of the goodbye of rank ``me``, which leaves with ``error``.

    The key's sequence is one more than the rank to blame, 0 if there is none; the payload states its failure.
    """
    peer = None if error is None else find_peer_error(error)
    if not isinstance(peer, PeerLost | PeerTimeout | PeerCancelled) or peer.rank in (None, me) or peer.cause == LEFT:
        return Key(0, 0, 0), b""
    assert peer.rank is not None
    return _goodbye_because_of(peer.rank, peer.cause or str(peer))


def _goodbye_because_of(rank: int, cause: str) -> tuple[Key, bytes]:
    return Key(0, rank + 1, 0), _reason_bytes(cause)


def _reason_bytes(cause: str | None) -> bytes:
    return (cause or "").encode()[:_REASON_BYTES]


def _refuse_message(rank: int, payload: memoryview, release: Callable[[], None]) -> None:  # noqa: ARG001
    """Drop messages for a node that has no actors."""
    release()
