"""The inproc lane: ranks of one process hand frames to each other without a byte on any wire."""

from __future__ import annotations

from typing import ClassVar

from asyncpar.errors import PeerLost
from asyncpar.transport.lane import Lane, LaneEvents, Sending
from asyncpar.transport.links import Connector, Links
from asyncpar.wire.header import HEADER_BYTES, FrameHeader


class InprocLane(Lane):
    """One end of an in-process channel.  Delivery happens inside ``send``, so payloads are copied exactly once."""

    kind: ClassVar[str] = "inproc"

    def __init__(self) -> None:
        self._peer: InprocLane | None = None
        self._events: LaneEvents | None = None
        self._early: list[tuple[FrameHeader, bytes]] = []

    @staticmethod
    def pair() -> tuple[InprocLane, InprocLane]:
        """Return the two ends of a new channel."""
        one, other = InprocLane(), InprocLane()
        one._peer, other._peer = other, one
        return one, other

    def start(self, events: LaneEvents) -> None:
        self._events = events
        early, self._early = self._early, []
        for header, payload in early:
            self._deliver(header, memoryview(payload))

    def send(self, header: FrameHeader, payload: memoryview) -> Sending | None:
        self.bytes_sent += HEADER_BYTES + len(payload)
        if self._peer is not None:
            self._peer._deliver(header, payload)
        return None

    def divert(self) -> None:
        """Nothing is ever half delivered here."""

    async def close(self) -> None:
        self.cut("the peer closed its end")
        self._events = None

    def cut(self, cause: str) -> None:
        """End the channel; the other side learns ``cause``."""
        peer, self._peer = self._peer, None
        if peer is not None:
            peer._peer = None
            if peer._events is not None:
                peer._events.lost(cause)

    def _deliver(self, header: FrameHeader, payload: memoryview) -> None:
        if self._events is None:
            self._early.append((header, bytes(payload)))
            return
        self.bytes_received += HEADER_BYTES + len(payload)
        landing = self._events.lend(header)
        if landing is not None:
            landing[:] = payload
            self._events.landed(header)


class InprocFabric:
    """Joins the nodes of one in-process world.  Pass one fabric to all of them."""

    def __init__(self) -> None:
        self._links: dict[int, Links] = {}

    def join(self, links: Links) -> None:
        """Make ``links`` reachable for the other ranks."""
        self._links[links.rank] = links

    def leave(self, rank: int) -> None:
        """Make ``rank`` unreachable: whoever connects from now on learns that it is lost."""
        self._links.pop(rank, None)

    def find(self, rank: int) -> Links | None:
        """Return the links of ``rank``, None if it is not there."""
        return self._links.get(rank)


class InprocConnector(Connector):
    """Connects over a fabric."""

    def __init__(self, fabric: InprocFabric) -> None:
        self._fabric = fabric

    async def connect(self, links: Links, rank: int) -> None:
        if links.is_up(rank):
            return
        peer = self._fabric.find(rank)
        if peer is None:
            raise PeerLost(f"rank {rank} is not in this process any more", rank=rank, cause="it left the process")
        one, other = InprocLane.pair()
        links.adopt(rank, one)
        peer.adopt(links.rank, other)

    def default_lane(self, rank: int) -> str:  # noqa: ARG002
        return "inproc"
