"""Agreements of this rank: dispatch of frames, losses and time to them, and results for their callers."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from asyncpar.collectives.control_calls import ControlCalls, Place
from asyncpar.collectives.fault_tolerance.machine import (
    AgreementCalled,
    AgreementEvent,
    AgreementTick,
    DeclareLost,
    MemberExpelled,
    MemberLost,
    MemberSent,
    ReturnOutcome,
    SendToMember,
    SurvivorAgreement,
)
from asyncpar.collectives.fault_tolerance.messages import (
    AgreementKind,
    AgreementMessage,
    AskMember,
    Contribution,
    Outcome,
    ProposeOutcome,
    decode_agreement,
    encode_agreement,
)
from asyncpar.errors import AsyncparError, OperationMismatch, PeerLost, PeerTimeout, ProtocolError
from asyncpar.net.transport.links import Links
from asyncpar.net.wire.frame import FrameKind, Key

_MOST_OPEN: Final = 4096
_REMEMBERED: Final = 256
"""Number of finished agreements kept for ranks that have not learnt of their outcome."""

_LOOK_EVERY: Final = 1.0
"""Seconds between two inspections of the ranks that agreements wait for; less if the timeout is shorter."""

_DEFAULT_TIMEOUT: Final = 300.0
"""Timeout of an agreement that other ranks have called and this one has not: its group may not be known here."""


class SurvivorAgreements:
    """All agreements of the groups of one rank.  One per ``Links``."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._loop = asyncio.get_running_loop()
        self._open: dict[Place, SurvivorAgreement] = {}
        self._over: OrderedDict[Place, SurvivorAgreement] = OrderedDict()
        self._calls = ControlCalls[Outcome](links, FrameKind.AGREE)
        self._timer: asyncio.TimerHandle | None = None
        links.add_loss_listener(self._lost)

    def call(
        self, group: int, number: int, ranks: tuple[int, ...], kind: AgreementKind, flag: int, timeout: float | None
    ) -> asyncio.Future[Outcome]:
        """Take part in agreement ``number`` of ``group``; return the future of its outcome."""
        place = group, number
        agreement = self._find(place, ranks, timeout)
        future = self._calls.open(place)
        if self._links.expelled is not None:
            self._feed(place, agreement, MemberExpelled(str(self._links.expelled)))
        self._feed(place, agreement, AgreementCalled(kind, flag, timeout))
        if self._links.closed is not None:
            self.close(self._links.closed)
        if agreement.outcome is not None:
            self._calls.settle(place, agreement.outcome)
        return future

    def receive(self, rank: int, key: Key, payload: bytes) -> None:
        """Handle an AGREE frame of ``rank``.  Raises ``ProtocolError`` for an invalid one."""
        message = decode_agreement(payload, size=self._links.world.size)
        place = key.group, key.sequence
        agreement = self._open.get(place) or self._over.get(place)
        if agreement is None:
            if not isinstance(message, Contribution | ProposeOutcome | AskMember):
                return  # an answer to an old question of this rank
            self._calls.check_ranks(rank, message.ranks)
            if len(self._open) >= _MOST_OPEN:
                raise ProtocolError(f"AGREE frame: more than {_MOST_OPEN} agreements are open")
            agreement = self._find(place, message.ranks, _DEFAULT_TIMEOUT)
        self._feed(place, agreement, MemberSent(rank, message))

    def close(self, error: PeerLost) -> None:
        """End all waits with ``error``: this rank leaves."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._calls.close(error)
        self._open.clear()
        self._over.clear()

    # -- internals -----------------------------------------------------------------------------------------------------

    def _find(self, place: Place, ranks: tuple[int, ...], timeout: float | None) -> SurvivorAgreement:
        agreement = self._open.get(place) or self._over.get(place)
        if agreement is None:
            links = self._links
            agreement = self._open[place] = SurvivorAgreement(
                me=links.rank, ranks=ranks, lost=links.lost, timeout=timeout, now=self._loop.time()
            )
        return agreement

    def _lost(self, rank: int, error: PeerLost) -> None:  # noqa: ARG002
        if self._links.expelled is not None:
            self._feed_all(MemberExpelled(str(self._links.expelled)))
        self._feed_all(MemberLost(rank))

    def _feed_all(self, event: AgreementEvent) -> None:
        for place, agreement in [*self._open.items(), *self._over.items()]:
            self._feed(place, agreement, event)

    def _feed(self, place: Place, agreement: SurvivorAgreement, event: AgreementEvent) -> None:
        if self._links.closed is not None:
            return
        for command in agreement.handle(event, now=self._loop.time()):
            match command:
                case SendToMember(rank, message):
                    self._send(rank, place, message)
                case DeclareLost(rank, cause):
                    self._links.report_lost(rank, cause)
                case ReturnOutcome(outcome):
                    self._return(place, agreement, outcome)
        self._look_later()

    def _send(self, rank: int, place: Place, message: AgreementMessage) -> None:
        self._calls.send(rank, place, encode_agreement(message))

    def _return(self, place: Place, agreement: SurvivorAgreement, outcome: Outcome) -> None:
        self._open.pop(place, None)
        self._over[place] = agreement
        if len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)
        self._calls.settle(place, outcome)

    def _look_later(self) -> None:
        if self._timer is None:
            waits = [agreement.timeout for agreement in self._open.values() if agreement.is_under_way]
            if waits:
                shortest = min((timeout for timeout in waits if timeout is not None), default=_LOOK_EVERY)
                self._timer = self._loop.call_later(min(shortest / 4, _LOOK_EVERY), self._look)

    def _look(self) -> None:
        self._timer = None
        for place, agreement in list(self._open.items()):
            self._feed(place, agreement, AgreementTick())
        self._look_later()


def fault_of(outcome: Outcome, *, rank: int, label: str, hosts: Sequence[str]) -> AsyncparError | None:
    """Return the error of ``outcome`` for the operation ``label`` of ``rank``; None if it is a result."""
    if outcome.fault is None:
        return None
    message = f"rank {rank}: {label}: {outcome.text}"
    culprit = outcome.culprit
    host = None if culprit is None else hosts[culprit]
    match outcome.fault:
        case "mismatch":
            return OperationMismatch(message)
        case "expelled":
            return PeerLost(message, rank=culprit, host=host, operation=label, cause=outcome.text)
        case "timeout":
            text = f"rank {rank}: {label}: rank {culprit}: {outcome.text}"
            return PeerTimeout(text, rank=culprit, host=host, operation=label, cause=outcome.text)
