"""Formation of a host's arena: its ranks meet, exchange descriptors, prove that they share memory; all or none.

Theory of operation.  The ranks whose ``host_id`` is equal are candidates, and the lowest, the leader, listens on an
abstract Unix socket whose name only holders of the job secret can compute.  The others connect.  Both ends check with
the kernel that the other is the same user, and then prove that they hold the secret, before a byte is parsed.  After
that:

    member to leader     Offer, with descriptors of its segment, doorbell and process; or Unable, which states why
    leader to members    Roster: all offers, all descriptors; then every rank maps all segments
    member to leader     Ready, or Unable
    leader to members    Verdict; then every rank closes its socket

A host is proved by reading: each rank finds in each segment it has mapped the random number that the owner wrote there
and sent to the leader by another path.  No rank uses the arena before a good verdict, so either all ranks have it or
none.  (There is one apparent exception: a rank that dies or gives up while the verdict is in transit is seen as lost,
or as having left, by those that have an arena.)

Nothing leaks: memory has no name, sockets are abstract, every descriptor is closed on exec, and its
owner here closes it when the formation ends, in every case, cancellation included.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from asyncpar.core.config.world import World
from asyncpar.errors import AsyncparError, PeerLost, UsageError
from asyncpar.net.arena.arena import Arena, ArenaPeer, Doorbell
from asyncpar.net.arena.formation_machine import (
    DESCRIPTORS_PER_RANK,
    ArenaVerdict,
    Rendezvous,
    SegmentOffer,
    Unable,
    decode_cores,
    describe,
    encode_cores,
)
from asyncpar.net.arena.limits import core_quota, has_unlimited_address_space, may_spin, usable_cores
from asyncpar.net.arena.packet_socket import close_all
from asyncpar.net.arena.rendezvous import RendezvousLeader, RendezvousMember
from asyncpar.net.arena.segment import NONCE_BYTES, Segment, round_to_pages
from asyncpar.net.arena.settings import ArenaSettings

_log = logging.getLogger(__name__)

OnLost = Callable[[int, str], None]
OnLeft = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSegment:
    """The contribution of one rank: ``segment``, ``doorbell``, the ``offer`` that describes them, and descriptors.

    ``descriptors`` are to be sent beside the offer; ``lent`` closes those that only serve for that.
    """

    offer: SegmentOffer
    segment: Segment
    doorbell: Doorbell
    descriptors: tuple[int, ...]
    lent: ExitStack

    def close(self) -> None:
        """Release everything."""
        self.lent.close()
        self.doorbell.close()
        self.segment.close()


def contribute(rank: int, settings: ArenaSettings) -> LocalSegment:
    """Create the contribution of ``rank``.

    Raises ``ArenaFull`` without memory for it, ``UsageError`` or ``OSError`` if the system lacks something.
    """
    missing = [name for name in ("memfd_create", "pidfd_open") if not hasattr(os, name)]
    if missing:
        raise UsageError(f"arena: this Python was built without os.{missing[0]}")
    nonce = os.urandom(NONCE_BYTES)
    with ExitStack() as undo:
        lent = undo.enter_context(ExitStack())
        process = os.pidfd_open(os.getpid())
        lent.callback(os.close, process)
        segment = Segment.create(control_bytes=settings.bytes, heap_bytes=_heap_bytes(), nonce=nonce)
        undo.callback(segment.close)
        memory = segment.open_for_peers()
        lent.callback(os.close, memory)
        doorbell = Doorbell()
        undo.callback(doorbell.close)
        offer = SegmentOffer(
            rank=rank,
            terms=settings.terms,
            nonce=nonce,
            control_bytes=segment.control_bytes,
            heap_bytes=segment.heap_bytes,
            process=f"{os.stat('/proc/self/ns/pid').st_ino}:{os.getpid()}",
            cores=encode_cores(usable_cores()),
            quota=core_quota(),
            maps_heaps=has_unlimited_address_space(),
        )
        undo.pop_all()
        return LocalSegment(
            offer=offer,
            segment=segment,
            doorbell=doorbell,
            descriptors=(memory, doorbell.write_end, process),
            lent=lent,
        )
    raise AssertionError("unreachable")


def assemble(
    own: LocalSegment,
    offers: Sequence[SegmentOffer],
    descriptors: dict[int, list[int]],
    *,
    polls: bool,
    on_lost: OnLost,
    on_left: OnLeft,
) -> Arena:
    """Map the contributions of all ranks and return the arena, which does not watch its peers yet.

    ``descriptors``, of the peers by rank, are removed as they find an owner; close the remaining ones.  Raises
    ``ProtocolError`` for a segment that differs from its offer, ``OSError`` if the system refuses.
    """
    peers: dict[int, ArenaPeer] = {}
    with ExitStack() as undo:
        for offer in offers:
            if offer.rank != own.offer.rank:
                peers[offer.rank] = _open_peer(own.offer, offer, descriptors.pop(offer.rank), undo)
        arena = Arena(
            rank=own.offer.rank,
            segment=own.segment,
            doorbell=own.doorbell,
            peers=peers,
            may_spin=may_spin(
                {offer.rank: decode_cores(offer.cores) for offer in offers},
                {offer.rank: offer.quota for offer in offers},
                {offer.rank: offer.process for offer in offers},
            ),
            polls=polls,
            on_lost=on_lost,
            on_left=on_left,
        )
        limited = [offer.rank for offer in offers if not offer.maps_heaps]
        if limited:
            arena.forbid_buffers(f"the address space of rank {limited[0]} is limited (ulimit -v)")
        undo.pop_all()
        return arena
    raise AssertionError("unreachable")


def _open_peer(own: SegmentOffer, offer: SegmentOffer, descriptors: list[int], undo: ExitStack) -> ArenaPeer:
    """Take ownership of the segment and descriptors of a peer; ``undo`` closes them."""
    assert len(descriptors) == DESCRIPTORS_PER_RANK, "counted when they came"
    memory, doorbell, process = descriptors
    undo.callback(close_all, [doorbell] if offer.process == own.process else [doorbell, process])
    if offer.process == own.process:
        os.close(process)
    segment = Segment.open(memory, control_bytes=offer.control_bytes, heap_bytes=offer.heap_bytes, nonce=offer.nonce)
    undo.callback(segment.close)
    return ArenaPeer(segment=segment, doorbell=doorbell, process=None if offer.process == own.process else process)


def _heap_bytes() -> int:
    """Return the size of this host's memory: no buffer is ever larger, and address space costs nothing."""
    return round_to_pages(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


Contribute = Callable[[int, ArenaSettings], LocalSegment]


async def form_arena(
    *,
    world: World,
    rank: int,
    secret: bytes,
    settings: ArenaSettings,
    on_lost: OnLost,
    on_left: OnLeft,
    contribute: Contribute = contribute,
) -> Arena | None:
    """Return the arena of the host of ``rank``; all its ranks call this with equal ``settings``, and get one or none.

    None: there is none, because it is turned off, the rank is alone on its host, or it is impossible; the lowest rank
    of the host logs why.  If ``settings`` require one, ``UsageError`` or ``PeerLost`` states the reason instead.

    Afterwards ``on_lost`` is called, with a cause, when a peer's process ends, and ``on_left`` when a peer has closed
    its arena: at most one of them, once, per peer, on the event loop.
    """
    rendezvous = Rendezvous.of(world, rank, secret=secret)
    idle = _reason_for_none(rendezvous, settings)
    if idle:
        if settings.required and world.size > 1:
            raise UsageError(f"arena: {idle}")
        if rank == rendezvous.leader:
            _log.info("no arena on host %s: %s", world.members[rank].host, idle)
        return None
    forming = _Forming(rendezvous, rank, settings, on_lost=on_lost, on_left=on_left)
    try:
        arena = await forming.run(contribute)
    except (AsyncparError, OSError) as error:
        if settings.required:
            raise _typed(error, world) from error
        if rank == rendezvous.leader:
            _log.warning("no arena on host %s, lanes will do: %s", world.members[rank].host, describe(error))
        return None
    if rank == rendezvous.leader:
        _log.info(
            "arena on host %s: %d ranks share memory, %s",
            world.members[rank].host,
            len(rendezvous.ranks),
            settings.terms,
        )
    return arena


class _Forming:
    """One rank's part in a formation, and its resources until the verdict."""

    def __init__(
        self, rendezvous: Rendezvous, rank: int, settings: ArenaSettings, *, on_lost: OnLost, on_left: OnLeft
    ) -> None:
        self._rendezvous = rendezvous
        self._rank = rank
        self._settings = settings
        self._on_lost = on_lost
        self._on_left = on_left
        self._contribution: LocalSegment | None = None
        self._arena: Arena | None = None

    async def run(self, contribute: Contribute) -> Arena:
        """Take part.  Raises ``AsyncparError`` or ``OSError`` with the reason why there is no arena."""
        if sys.platform != "linux":
            raise UsageError(f"it needs Linux, this is {sys.platform}")
        try:
            verdict = await self._meet(self._contribute(contribute))
            if verdict.problem:
                raise _error(verdict)
            assert self._arena is not None, "a good verdict needs every rank's Ready"
            assert self._contribution is not None
            self._contribution.lent.close()
            self._arena.watch()
            return self._arena
        except BaseException:
            self._let_go()
            raise

    def _contribute(self, contribute: Contribute) -> SegmentOffer | Unable:
        try:
            self._contribution = contribute(self._rank, self._settings)
        except (AsyncparError, OSError) as error:
            return Unable(describe(error))
        return self._contribution.offer

    async def _meet(self, own: SegmentOffer | Unable) -> ArenaVerdict:
        descriptors = () if self._contribution is None else self._contribution.descriptors
        seconds = self._settings.seconds
        if self._rank == self._rendezvous.leader:
            return await RendezvousLeader(self._rendezvous, own, descriptors, assemble=self._assemble).convene(
                seconds=seconds
            )
        member = RendezvousMember(self._rendezvous, self._rank, own, descriptors, assemble=self._assemble)
        return await member.attend(seconds=seconds)

    def _assemble(self, offers: Sequence[SegmentOffer], descriptors: dict[int, list[int]]) -> None:
        assert self._contribution is not None, "a roster needs every rank's offer"
        self._arena = assemble(
            self._contribution,
            offers,
            descriptors,
            polls=self._settings.polls,
            on_lost=self._on_lost,
            on_left=self._on_left,
        )

    def _let_go(self) -> None:
        """Close everything; peers that have an arena all the same see that this rank has left."""
        if self._arena is not None:
            self._arena.close()
        if self._contribution is not None:
            self._contribution.close()


def _reason_for_none(rendezvous: Rendezvous, settings: ArenaSettings) -> str:
    if settings.is_off:
        return "it is turned off (ASYNCPAR_ARENA_BYTES)"
    if len(rendezvous.ranks) == 1:
        return f"rank {rendezvous.leader} is alone there"
    return ""


def _error(verdict: ArenaVerdict) -> AsyncparError:
    if verdict.culprit is None:
        return UsageError(verdict.problem)
    return PeerLost(verdict.problem, rank=verdict.culprit, operation="forming the arena", cause=verdict.problem)


def _typed(error: Exception, world: World) -> AsyncparError:
    """Return the error of a formation as the caller sees it."""
    problem = f"arena: {describe(error)}"
    if isinstance(error, PeerLost) and error.rank is not None:
        host = world.members[error.rank].host
        return PeerLost(problem, rank=error.rank, host=host, operation=error.operation, cause=error.cause)
    return UsageError(problem)
