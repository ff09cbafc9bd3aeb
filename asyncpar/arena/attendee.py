"""A rank goes to the meeting of its host, hands over what it brings, maps what the others bring, hears the verdict."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence

from asyncpar.arena.convener import Assemble
from asyncpar.arena.formation_machine import check_roster
from asyncpar.arena.formation_messages import (
    DESCRIPTORS_PER_RANK,
    Offer,
    Ready,
    Roster,
    Unable,
    Verdict,
    describe,
)
from asyncpar.arena.meeting import Meeting
from asyncpar.arena.packet_socket import PacketSocket, check_user, close_all, open_socket
from asyncpar.arena.reachability import Lookout
from asyncpar.errors import AsyncparError, ProtocolError
from asyncpar.wire.handshake import NONCE_BYTES, Handshake

RETRY_SECONDS = 0.02
"""Between two attempts to connect to a convener that is not there yet."""


class Attendee:
    """Attends ``meeting`` as ``rank``, once.

    ``own`` is what this rank brings, with its ``descriptors``, or says why it cannot take part.
    """

    def __init__(
        self, meeting: Meeting, rank: int, own: Offer | Unable, descriptors: Sequence[int], *, assemble: Assemble
    ) -> None:
        self._meeting = meeting
        self._rank = rank
        self._own = own
        self._own_descriptors = descriptors
        self._assemble = assemble
        self._offers: list[Offer] = []
        self._descriptors: dict[int, list[int]] = {}

    async def attend(self, *, seconds: float) -> Verdict:
        """Return the verdict.

        A convener that does not come within ``seconds``, goes away, or says nothing for twice that time is a verdict,
        too.  Raises ``AuthenticationError`` and ``ProtocolError`` when it is not who it should be.
        """
        convener = self._meeting.convener
        packets: PacketSocket | None = None
        try:
            async with asyncio.timeout(seconds):
                packets = await self._connect()
            async with asyncio.timeout(2 * seconds):
                await self._offer(packets)
                return await self._listen(packets)
        except TimeoutError:
            what = "did not come" if packets is None else "gave no verdict"
            return Verdict(f"rank {convener} {what} in time", convener)
        except ConnectionError as error:
            return Verdict(f"rank {convener} is gone: {describe(error)}", convener)
        finally:
            if packets is not None:
                packets.close()
            for descriptors in self._descriptors.values():
                close_all(descriptors)

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _connect(self) -> PacketSocket:
        """Connect to the convener as soon as it is there, and prove each other."""
        lookout = Lookout(self._meeting.servers.get(self._meeting.convener, ""))
        while (sock := self._try_to_connect()) is None:
            if await lookout.is_gone():
                raise ConnectionError("nobody listens at its address any more")
            await asyncio.sleep(RETRY_SECONDS)
        packets = PacketSocket(sock)
        try:
            check_user(sock)
            terms = self._meeting.terms(self._rank)
            await packets.shake_hands(Handshake.dial(terms, secret=self._meeting.secret, nonce=os.urandom(NONCE_BYTES)))
        except BaseException:
            packets.close()
            raise
        return packets

    def _try_to_connect(self) -> socket.socket | None:
        """Return a socket to the convener, None if it is not there yet, or busy with others."""
        sock = open_socket()
        try:
            sock.connect(self._meeting.address)
        except (ConnectionRefusedError, BlockingIOError):
            sock.close()
            return None
        except BaseException:
            sock.close()
            raise
        return sock

    async def _offer(self, packets: PacketSocket) -> None:
        try:
            await packets.send(self._own, self._own_descriptors)
        except ConnectionError:
            return  # the verdict may be there already, and the convener gone

    async def _listen(self, packets: PacketSocket) -> Verdict:
        while True:
            message, descriptors = await packets.receive()
            if isinstance(message, Roster) and len(descriptors) == DESCRIPTORS_PER_RANK * len(message.offers):
                await self._take(packets, message, descriptors)
                continue
            close_all(descriptors)
            if isinstance(message, Verdict) and not descriptors:
                return message
            raise ProtocolError(
                f"arena: rank {self._meeting.convener} sent {type(message).__name__} with "
                f"{len(descriptors)} descriptors"
            )

    async def _take(self, packets: PacketSocket, roster: Roster, descriptors: list[int]) -> None:
        """Collect a part of the roster; once it is whole, map it and say how that went."""
        for place, offer in enumerate(roster.offers):
            theirs = descriptors[DESCRIPTORS_PER_RANK * place : DESCRIPTORS_PER_RANK * (place + 1)]
            if offer.rank == self._rank or offer.rank in self._descriptors:
                close_all(theirs)
            else:
                self._descriptors[offer.rank] = theirs
        self._offers += roster.offers
        if len(self._offers) < len(self._meeting.ranks):
            return
        answer: Ready | Unable = Ready()
        try:
            self._check()
            self._assemble(self._offers, self._descriptors)
        except (OSError, AsyncparError) as error:
            answer = Unable(describe(error))
        await packets.send(answer)

    def _check(self) -> None:
        assert isinstance(self._own, Offer), "who is unable is told the verdict at once"
        problem = check_roster(self._offers, ranks=self._meeting.ranks, own=self._own)
        if problem:
            raise ProtocolError(f"arena: {problem}")
