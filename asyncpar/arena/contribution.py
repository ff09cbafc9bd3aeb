"""What a rank brings to the arena, and the arena made of what all of them brought."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from asyncpar.arena.arena import Arena, Peer
from asyncpar.arena.doorbell import Doorbell
from asyncpar.arena.formation_messages import DESCRIPTORS_PER_RANK, Offer, decode_cores, encode_cores
from asyncpar.arena.limits import core_quota, has_unlimited_address_space, may_spin, usable_cores
from asyncpar.arena.packet_socket import close_all
from asyncpar.arena.segment import NONCE_BYTES, Segment, round_to_pages
from asyncpar.arena.settings import ArenaSettings
from asyncpar.errors import UsageError

OnLost = Callable[[int, str], None]
OnLeft = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What one rank brings: its ``segment`` and ``doorbell``, the ``offer`` that describes them, and descriptors.

    ``descriptors`` are to be sent beside the offer; ``lent`` closes those that only serve for that.
    """

    offer: Offer
    segment: Segment
    doorbell: Doorbell
    descriptors: tuple[int, ...]
    lent: ExitStack

    def close(self) -> None:
        """Let go of everything."""
        self.lent.close()
        self.doorbell.close()
        self.segment.close()


def contribute(rank: int, settings: ArenaSettings) -> Contribution:
    """Make what ``rank`` brings.

    Raises ``ArenaFull`` without memory for it, ``UsageError`` or ``OSError`` where the system lacks something.
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
        offer = Offer(
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
        return Contribution(
            offer=offer,
            segment=segment,
            doorbell=doorbell,
            descriptors=(memory, doorbell.write_end, process),
            lent=lent,
        )
    raise AssertionError("unreachable")


def assemble(
    own: Contribution,
    offers: Sequence[Offer],
    descriptors: dict[int, list[int]],
    *,
    polls: bool,
    on_lost: OnLost,
    on_left: OnLeft,
) -> Arena:
    """Map what all ranks brought and return the arena, which watches nobody yet.

    ``descriptors``, of the peers by rank, are taken out as they find an owner; close what is left.  Raises
    ``ProtocolError`` for a segment that is not what was offered, ``OSError`` when the system refuses.
    """
    peers: dict[int, Peer] = {}
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


def _open_peer(own: Offer, offer: Offer, descriptors: list[int], undo: ExitStack) -> Peer:
    """Take over what a peer brought; ``undo`` lets go of it."""
    assert len(descriptors) == DESCRIPTORS_PER_RANK, "counted when they came"
    memory, doorbell, process = descriptors
    undo.callback(close_all, [doorbell] if offer.process == own.process else [doorbell, process])
    if offer.process == own.process:
        os.close(process)
    segment = Segment.open(memory, control_bytes=offer.control_bytes, heap_bytes=offer.heap_bytes, nonce=offer.nonce)
    undo.callback(segment.close)
    return Peer(segment=segment, doorbell=doorbell, process=None if offer.process == own.process else process)


def _heap_bytes() -> int:
    """Return the memory of this host: no buffer is ever larger, and address space costs nothing."""
    return round_to_pages(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
