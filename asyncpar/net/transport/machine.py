"""Negotiation of a lane: which of two ranks dials the other, and over which kind.  Sans-I/O.

Either side may dial.  If both do at once, the dial of the lower rank wins: it defers the other, and the higher rank
accepts although it is dialing itself.  A rank that has accepted does not dial but waits for the lane.  So at most one
lane is made, whatever the order in which the calls cross.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec

from asyncpar.net.wire.handshake import WIRE_VERSION, LinkTerms


class Reason(enum.Enum):
    """Reasons to refuse a link."""

    WRONG_WORLD = enum.auto()
    STALE_GENERATION = enum.auto()
    NO_COMMON_LANE = enum.auto()
    LOST = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The request of a dialing rank."""

    job: str
    generation: int
    dialer: int
    listener: int
    lanes: tuple[str, ...]
    connections: int = 1
    checks_payloads: bool = True
    wire_version: int = WIRE_VERSION


class Accept(msgspec.Struct, frozen=True):
    """Acceptance: connect, over the first of ``lanes`` that works."""

    terms: LinkTerms
    lanes: tuple[str, ...]


class Defer(msgspec.Struct, frozen=True):
    """Deferral: do not connect, the link comes from the other side."""


class Refuse(msgspec.Struct, frozen=True):
    """Refusal: there will be no link."""

    reason: Reason
    message: str


Answer = Accept | Defer | Refuse


class Negotiator:
    """The negotiations of one rank.

    ``lanes`` are the kinds that it can use with the ranks in ``near``, best first, ``far`` those for the other ranks
    (None: the same).  A TCP or gRPC lane uses as many ``connections`` as both sides want, and checks payloads if one
    side wants that.
    """

    def __init__(
        self,
        *,
        job: str,
        generation: int,
        rank: int,
        size: int,
        lanes: tuple[str, ...],
        near: frozenset[int] = frozenset(),
        connections: int = 1,
        far: tuple[str, ...] | None = None,
        checks_payloads: bool = True,
    ) -> None:
        self._checks_payloads = checks_payloads
        self._far = lanes if far is None else far
        self._job = job
        self._generation = generation
        self._rank = rank
        self._size = size
        self._lanes = lanes
        self._near = near
        self._connections = connections
        self._dialing: set[int] = set()
        self._accepted: dict[int, LinkTerms] = {}

    def propose(self, rank: int) -> Proposal:
        """Begin to dial ``rank``; until ``end_dial``, the dial of a higher rank is deferred."""
        self._dialing.add(rank)
        return Proposal(
            job=self._job,
            generation=self._generation,
            dialer=self._rank,
            listener=rank,
            lanes=self.lanes_to(rank),
            connections=self._connections,
            checks_payloads=self._checks_payloads,
        )

    def lanes_to(self, rank: int) -> tuple[str, ...]:
        """Return the kinds of lanes that this rank can use with ``rank``, best first."""
        return self._lanes if rank in self._near else self._far

    def end_dial(self, rank: int) -> None:
        """End the dial of ``rank``, with or without success."""
        self._dialing.discard(rank)

    def answer(self, proposal: Proposal, *, token: bytes, is_up: bool, lost: str | None) -> Answer:
        """Decide about ``proposal``; an acceptance gets ``token``, which must be new and random.

        ``is_up``: the link is in service here; ``lost``: why it never will be.
        """
        dialer = proposal.dialer
        refusal = self._refusal(proposal, lost)
        if refusal is not None:
            return refusal
        if is_up or (dialer > self._rank and dialer in self._dialing):
            return Defer()
        terms = LinkTerms(
            job=self._job,
            generation=self._generation,
            dialer=dialer,
            listener=self._rank,
            token=token,
            connections=max(1, min(proposal.connections, self._connections)),
            checks_payloads=proposal.checks_payloads or self._checks_payloads,
        )
        self._accepted[dialer] = terms
        return Accept(terms, self._common(proposal))

    def is_accepting(self, rank: int) -> bool:
        """Return whether ``rank`` has been accepted, but not connected yet."""
        return rank in self._accepted

    def find(self, token: bytes) -> LinkTerms | None:
        """Return the terms agreed on under ``token``."""
        return next((terms for terms in self._accepted.values() if terms.token == token), None)

    def take(self, terms: LinkTerms) -> bool:
        """Use up an agreement, because its lane is there or it has expired; return False if it was used up before."""
        if self._accepted.get(terms.dialer) != terms:
            return False
        del self._accepted[terms.dialer]
        return True

    def _common(self, proposal: Proposal) -> tuple[str, ...]:
        own = self.lanes_to(proposal.dialer)
        return tuple(lane for lane in proposal.lanes if lane in own)

    def _refusal(self, proposal: Proposal, lost: str | None) -> Refuse | None:
        dialer, here = proposal.dialer, self._rank
        if proposal.wire_version != WIRE_VERSION:
            return Refuse(Reason.NO_COMMON_LANE, describe_versions(here, dialer, proposal.wire_version))
        if proposal.job != self._job:
            return Refuse(Reason.WRONG_WORLD, f"rank {here} belongs to job {self._job!r}, not {proposal.job!r}")
        if proposal.generation != self._generation:
            return Refuse(
                Reason.STALE_GENERATION,
                f"rank {here} is in generation {self._generation}, rank {dialer} in {proposal.generation}",
            )
        if proposal.listener != here or dialer == here or not 0 <= dialer < self._size:
            return Refuse(
                Reason.WRONG_WORLD,
                f"this is rank {here} of {self._size}; rank {dialer} asked for rank {proposal.listener}",
            )
        if lost is not None:
            return Refuse(Reason.LOST, lost)
        if not self._common(proposal):
            return Refuse(
                Reason.NO_COMMON_LANE,
                f"transport: rank {dialer} uses {' or '.join(proposal.lanes) or 'nothing'}, "
                f"rank {here} uses {' or '.join(self.lanes_to(dialer)) or 'nothing'}; give both the same",
            )
        return None


def describe_versions(rank: int, peer: int, version: int) -> str:
    """Describe the wire versions of ``rank``, which is this one, and ``peer``; 0 is an earlier one."""
    return (
        f"version of asyncpar: rank {rank} speaks version {WIRE_VERSION} of the wire, rank {peer} "
        f"{version or 'an earlier one'}; install the same version of asyncpar on all hosts"
    )
