"""The connector of a simulated rank: the rules of ``Negotiator`` and ``LinkTerms`` over simulated calls."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from random import Random
from typing import Final

from asyncpar.errors import AuthenticationError, PeerLost, StaleGeneration, UsageError
from asyncpar.net.transport.links import LEFT, Connector, Links
from asyncpar.net.transport.machine import Accept, Answer, Defer, Negotiator, Proposal, Reason, Refuse
from asyncpar.net.transport.negotiation import LINK_UP_SECONDS, REACH_SECONDS, WAIT_SECONDS
from asyncpar.net.wire.handshake import TOKEN_BYTES, LinkTerms
from asyncpar.testing.simulation.lane import SimLane
from asyncpar.testing.simulation.network import SimulatedNetwork
from asyncpar.testing.simulation.process import SimulatedProcess

AGREEMENT_SECONDS: Final = 10.0
"""Seconds within which an accepted dial must arrive."""


class SimConnector(Connector):
    """Connects the rank in ``process`` to ranks of the same world; ``node_of`` maps a rank to its node."""

    def __init__(
        self, network: SimulatedNetwork, process: SimulatedProcess, dice: Random, *, node_of: Callable[[int], int]
    ) -> None:
        self._network = network
        self._process = process
        self._dice = dice
        self._node_of = node_of
        self._links: Links | None = None
        self._negotiator: Negotiator | None = None
        self._joined = asyncio.Event()
        self._news = asyncio.Event()
        self._expiries: dict[LinkTerms, asyncio.TimerHandle] = {}

    def serve(self) -> None:
        """Accept dials from now on; they wait until ``join``."""
        self._network.serve("open link", self._open)
        self._network.serve("connect lane", self._accept)

    def leave(self) -> None:
        """Accept no more dials, and answer those that wait for a world that never formed."""
        self._network.withdraw("open link")
        self._network.withdraw("connect lane")
        self._joined.set()
        for expiry in self._expiries.values():
            expiry.cancel()

    def join(self, links: Links) -> None:
        """Answer for ``links`` from now on."""
        world = links.world
        self._links = links
        self._negotiator = Negotiator(
            job=world.job, generation=world.generation, rank=links.rank, size=world.size, lanes=("sim",)
        )
        self._joined.set()

    def default_lane(self, rank: int) -> str:  # noqa: ARG002
        return "sim"

    async def connect(self, links: Links, rank: int) -> None:
        try:
            async with asyncio.timeout(LINK_UP_SECONDS):
                while not links.is_up(rank) and rank not in links.lost and not links.is_closing:
                    assert self._negotiator is not None, "the connector has not joined its links yet"
                    if self._negotiator.is_accepting(rank):
                        await self._wait_for_peer(links, rank)
                    else:
                        await self._dial(links, self._negotiator, rank)
        except TimeoutError as error:
            cause = f"it made no link in {LINK_UP_SECONDS:.0f} s"
            raise PeerLost(f"rank {rank}: {cause}", rank=rank, cause=cause) from error

    async def _dial(self, links: Links, negotiator: Negotiator, rank: int) -> None:
        proposal = negotiator.propose(rank)
        node = self._node_of(rank)
        try:
            await self._network.reach(node, "open link", timeout=REACH_SECONDS)
            answer = await self._network.call(node, "open link", proposal, timeout=LINK_UP_SECONDS)
            match answer:
                case Accept(terms):
                    lane = SimLane(
                        self._network, self._process, self._dice, own_terms(proposal, terms), rank=links.rank
                    )
                    await self._connect(node, lane, own_terms(proposal, terms))
                    links.adopt(rank, lane)
                case Defer():
                    negotiator.end_dial(rank)
                    await self._wait_for_peer(links, rank)
                case Refuse(Reason.STALE_GENERATION, message):
                    raise StaleGeneration(message)
                case Refuse(Reason.LOST, message):
                    raise PeerLost(f"rank {rank}: {message}", rank=rank, cause=message)
                case Refuse(_, message):
                    raise UsageError(message)
        except OSError as error:
            raise _unreachable(rank, error) from error
        finally:
            negotiator.end_dial(rank)

    async def _wait_for_peer(self, links: Links, rank: int) -> None:
        """Wait a while for the lane that the peer connects, and check that the peer is still there."""
        self._news.clear()
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while not links.is_up(rank):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            try:
                await self._network.reach(self._node_of(rank), "open link", timeout=REACH_SECONDS)
            except OSError as error:
                raise _unreachable(rank, error) from error

    async def _connect(self, node: int, lane: SimLane, terms: LinkTerms) -> None:
        is_connected = False
        try:
            await self._network.call(node, "connect lane", (lane, terms), timeout=LINK_UP_SECONDS)
            is_connected = True
        finally:
            if not is_connected:
                lane.abort(PeerLost("the lane was not connected", rank=terms.listener, cause="not connected"))

    async def _open(self, proposal: Proposal) -> Answer:
        await self._joined.wait()
        if self._links is None or self._negotiator is None:
            raise ConnectionResetError("it was stopped before it was in its world")
        lost = self._links.lost.get(proposal.dialer)
        why = LEFT if self._links.is_closing else None if lost is None else str(lost)
        is_up = self._links.is_up(proposal.dialer)
        answer = self._negotiator.answer(proposal, token=os.urandom(TOKEN_BYTES), is_up=is_up, lost=why)
        if isinstance(answer, Accept):
            terms = answer.terms
            self._expiries[terms] = self._network.loop.call_later(AGREEMENT_SECONDS, self._expire, terms)
        return answer

    def _expire(self, terms: LinkTerms) -> None:
        assert self._negotiator is not None
        self._expiries.pop(terms, None)
        self._negotiator.take(terms)

    async def _accept(self, dial: tuple[SimLane, LinkTerms]) -> None:
        """Adopt the other end of a lane, if its terms are those agreed on, which the handshake proves in production."""
        lane, shown = dial
        assert self._links is not None
        assert self._negotiator is not None
        if lane.process.is_dead:
            raise ConnectionResetError("the dialer is gone")
        terms = self._negotiator.find(shown.token)
        check_terms(terms, shown)
        assert terms is not None
        if not self._negotiator.take(terms):
            raise AuthenticationError("the agreement is used up")
        if (expiry := self._expiries.pop(terms, None)) is not None:
            expiry.cancel()
        own = SimLane(self._network, self._process, self._dice, terms, rank=self._links.rank)
        SimLane.join(self._network, lane, own)
        self._links.adopt(terms.dialer, own)
        self._news.set()


def check_terms(agreed: LinkTerms | None, shown: LinkTerms) -> None:
    """Raise ``AuthenticationError`` unless the dialer shows the agreed terms, as ``Handshake`` does."""
    if agreed is None or agreed.encode() != shown.encode():
        raise AuthenticationError("the link's terms are not those that were agreed on")


def _unreachable(rank: int, error: OSError) -> PeerLost:
    cause = f"no connection ({str(error) or type(error).__name__})"
    return PeerLost(f"rank {rank}: {cause}", rank=rank, cause=cause)


def own_terms(proposal: Proposal, agreed: LinkTerms) -> LinkTerms:
    """Return the terms from the dialer's view."""
    return LinkTerms(
        job=proposal.job,
        generation=proposal.generation,
        dialer=proposal.dialer,
        listener=proposal.listener,
        token=agreed.token,
        checks_payloads=agreed.checks_payloads,
    )
