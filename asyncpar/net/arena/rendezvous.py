"""The rendezvous of the ranks of a host: the lowest leads it, the others bring segments and get the verdict."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from asyncpar.core.addresses import split_address
from asyncpar.core.concurrency.streams import close_stream
from asyncpar.errors import AsyncparError, AuthenticationError, ProtocolError
from asyncpar.net.arena.formation_machine import (
    DESCRIPTORS_PER_RANK,
    OFFERS_PER_MESSAGE,
    ArenaVerdict,
    Came,
    Conclude,
    Event,
    Expired,
    Formation,
    Gone,
    Message,
    Ready,
    Rendezvous,
    Roster,
    SegmentOffer,
    SendVerdict,
    Sent,
    ShareOffers,
    Unable,
    check_roster,
    describe,
)
from asyncpar.net.arena.packet_socket import PacketSocket, check_user, close_all, open_socket, wait_readable
from asyncpar.net.wire.handshake import NONCE_BYTES, Handshake

_log = logging.getLogger(__name__)

Assemble = Callable[[Sequence[SegmentOffer], dict[int, list[int]]], None]
"""Maps the contributions of all ranks, and removes the descriptors that it uses from the mapping.

Raises ``OSError`` or ``AsyncparError`` with the reason if it cannot.
"""


class RendezvousLeader:
    """Leads ``rendezvous``, once.

    ``own`` is what this rank brings, with its ``descriptors``, or says why it cannot take part.
    """

    def __init__(
        self, rendezvous: Rendezvous, own: SegmentOffer | Unable, descriptors: Sequence[int], *, assemble: Assemble
    ) -> None:
        self._rendezvous = rendezvous
        self._own = own
        self._own_descriptors = list(descriptors)
        self._assemble = assemble
        self._machine = Formation(rendezvous.ranks)
        self._strangers: set[PacketSocket] = set()
        self._sockets: dict[int, PacketSocket] = {}
        self._descriptors: dict[int, list[int]] = {}
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()
        self._finished: asyncio.Future[ArenaVerdict] = asyncio.get_running_loop().create_future()

    async def convene(self, *, seconds: float) -> ArenaVerdict:
        """Return the verdict, which was sent to all ranks that came, after ``seconds`` at most.

        Raises ``OSError`` if the rendezvous address is not available.
        """
        listener = open_socket()
        timer = asyncio.get_running_loop().call_later(seconds, self._feed, Expired())
        try:
            listener.bind(self._rendezvous.address)
            listener.listen(len(self._rendezvous.ranks))
            async with self._group:
                self._begin(self._accept(listener))
                for rank in self._rendezvous.ranks[1:]:
                    self._begin(self._miss(rank))
                self._feed(Sent(self._rendezvous.leader, self._own))
                verdict = await self._finished
                for task in self._tasks:
                    task.cancel()
            return verdict
        finally:
            timer.cancel()
            listener.close()
            for packets in (*self._strangers, *self._sockets.values()):
                packets.close()
            for descriptors in self._descriptors.values():
                close_all(descriptors)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _feed(self, event: Event) -> None:
        for command in self._machine.handle(event):
            match command:
                case ShareOffers(offers):
                    self._begin(self._share(offers))
                case SendVerdict(rank, verdict):
                    self._sockets[rank].send_now(verdict)
                case Conclude(verdict):
                    if not self._finished.done():  # it may have been cancelled
                        self._finished.set_result(verdict)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            await wait_readable(listener)
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                continue
            except OSError as error:  # too many open files: no rank can connect any more
                self._feed(Sent(self._rendezvous.leader, Unable(describe(error))))
                return
            sock.setblocking(False)
            try:
                check_user(sock)
            except (AuthenticationError, OSError) as error:
                _log.warning("a connection was refused: %s", describe(error))
                sock.close()
                continue
            stranger = PacketSocket(sock)
            self._strangers.add(stranger)
            self._begin(self._attend(stranger))

    async def _miss(self, rank: int) -> None:
        """Detect that ``rank`` ended before it came; after that, its connection shows its end."""
        lookout = ReachabilityProbe(self._rendezvous.servers.get(rank, ""))
        while rank not in self._sockets:
            if await lookout.is_gone():
                self._feed(Gone(rank, "nobody listens at its address any more"))
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def _attend(self, packets: PacketSocket) -> None:
        """Read the messages of a connected rank, until the end."""
        handshake = Handshake.listen(
            self._rendezvous.find_terms, secret=self._rendezvous.secret, nonce=os.urandom(NONCE_BYTES)
        )
        try:
            await packets.shake_hands(handshake)
            rank = handshake.terms.dialer
            if rank in self._sockets:
                raise AuthenticationError(f"arena: rank {rank} is here already")
        except (AuthenticationError, OSError) as error:
            _log.warning("a connection was refused: %s", describe(error))
            self._strangers.discard(packets)
            packets.close()
            return
        self._strangers.discard(packets)
        self._sockets[rank] = packets
        self._feed(Came(rank))
        try:
            while True:
                self._feed(Sent(rank, self._take(rank, *await packets.receive())))
        except (OSError, ProtocolError) as error:
            self._feed(Gone(rank, describe(error)))

    def _take(self, rank: int, message: Message, descriptors: list[int]) -> SegmentOffer | Unable | Ready:
        """Store the descriptors of an offer; other messages have none."""
        if (
            isinstance(message, SegmentOffer)
            and len(descriptors) == DESCRIPTORS_PER_RANK
            and rank not in self._descriptors
        ):
            self._descriptors[rank] = descriptors
            return message
        close_all(descriptors)
        if descriptors or not isinstance(message, Unable | Ready):
            raise ProtocolError(f"arena: rank {rank} sent {type(message).__name__} with {len(descriptors)} descriptors")
        return message

    async def _share(self, offers: tuple[SegmentOffer, ...]) -> None:
        """Distribute the contributions of all ranks, then map them, too."""
        leader = self._rendezvous.leader
        descriptors = {leader: self._own_descriptors, **self._descriptors}
        await asyncio.gather(*(_send_roster(packets, offers, descriptors) for packets in self._sockets.values()))
        try:
            self._assemble(offers, self._descriptors)
        except (OSError, AsyncparError) as error:
            self._feed(Sent(leader, Unable(describe(error))))
        else:
            self._feed(Sent(leader, Ready()))


async def _send_roster(
    packets: PacketSocket, offers: Sequence[SegmentOffer], descriptors: dict[int, list[int]]
) -> None:
    """Send the roster in as many parts as needed; a lost peer is detected elsewhere."""
    for start in range(0, len(offers), OFFERS_PER_MESSAGE):
        part = offers[start : start + OFFERS_PER_MESSAGE]
        try:
            await packets.send(
                Roster(list(part)), [descriptor for offer in part for descriptor in descriptors[offer.rank]]
            )
        except OSError:
            return


RETRY_SECONDS = 0.02
"""Seconds between two attempts to connect to a leader that is not there yet."""


class RendezvousMember:
    """Takes part in ``rendezvous`` as ``rank``, once.

    ``own`` is what this rank brings, with its ``descriptors``, or says why it cannot take part.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        own: SegmentOffer | Unable,
        descriptors: Sequence[int],
        *,
        assemble: Assemble,
    ) -> None:
        self._rendezvous = rendezvous
        self._rank = rank
        self._own = own
        self._own_descriptors = descriptors
        self._assemble = assemble
        self._offers: list[SegmentOffer] = []
        self._descriptors: dict[int, list[int]] = {}

    async def attend(self, *, seconds: float) -> ArenaVerdict:
        """Return the verdict.

        A leader that does not come within ``seconds``, goes away, or is silent for twice that time is a verdict, too.
        Raises ``AuthenticationError`` and ``ProtocolError`` if it is not the right one.
        """
        leader = self._rendezvous.leader
        packets: PacketSocket | None = None
        try:
            async with asyncio.timeout(seconds):
                packets = await self._connect()
            async with asyncio.timeout(2 * seconds):
                await self._offer(packets)
                return await self._listen(packets)
        except TimeoutError:
            what = "did not come" if packets is None else "gave no verdict"
            return ArenaVerdict(f"rank {leader} {what} in time", leader)
        except ConnectionError as error:
            return ArenaVerdict(f"rank {leader} is gone: {describe(error)}", leader)
        finally:
            if packets is not None:
                packets.close()
            for descriptors in self._descriptors.values():
                close_all(descriptors)

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _connect(self) -> PacketSocket:
        """Connect to the leader as soon as it is there, and authenticate each other."""
        lookout = ReachabilityProbe(self._rendezvous.servers.get(self._rendezvous.leader, ""))
        while (sock := self._try_to_connect()) is None:
            if await lookout.is_gone():
                raise ConnectionError("nobody listens at its address any more")
            await asyncio.sleep(RETRY_SECONDS)
        packets = PacketSocket(sock)
        try:
            check_user(sock)
            terms = self._rendezvous.terms(self._rank)
            await packets.shake_hands(
                Handshake.dial(terms, secret=self._rendezvous.secret, nonce=os.urandom(NONCE_BYTES))
            )
        except BaseException:
            packets.close()
            raise
        return packets

    def _try_to_connect(self) -> socket.socket | None:
        """Return a socket connected to the leader, None if it is not there yet, or busy with others."""
        sock = open_socket()
        try:
            sock.connect(self._rendezvous.address)
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
            return  # the verdict may be there already, and the leader gone

    async def _listen(self, packets: PacketSocket) -> ArenaVerdict:
        while True:
            message, descriptors = await packets.receive()
            if isinstance(message, Roster) and len(descriptors) == DESCRIPTORS_PER_RANK * len(message.offers):
                await self._take(packets, message, descriptors)
                continue
            close_all(descriptors)
            if isinstance(message, ArenaVerdict) and not descriptors:
                return message
            raise ProtocolError(
                f"arena: rank {self._rendezvous.leader} sent {type(message).__name__} with "
                f"{len(descriptors)} descriptors"
            )

    async def _take(self, packets: PacketSocket, roster: Roster, descriptors: list[int]) -> None:
        """Collect a part of the roster; once it is complete, map it and report the result."""
        for place, offer in enumerate(roster.offers):
            theirs = descriptors[DESCRIPTORS_PER_RANK * place : DESCRIPTORS_PER_RANK * (place + 1)]
            if offer.rank == self._rank or offer.rank in self._descriptors:
                close_all(theirs)
            else:
                self._descriptors[offer.rank] = theirs
        self._offers += roster.offers
        if len(self._offers) < len(self._rendezvous.ranks):
            return
        answer: Ready | Unable = Ready()
        try:
            self._check()
            self._assemble(self._offers, self._descriptors)
        except (OSError, AsyncparError) as error:
            answer = Unable(describe(error))
        await packets.send(answer)

    def _check(self) -> None:
        assert isinstance(self._own, SegmentOffer), "a rank that is unable gets the verdict at once"
        problem = check_roster(self._offers, ranks=self._rendezvous.ranks, own=self._own)
        if problem:
            raise ProtocolError(f"arena: {problem}")


LOOK_SECONDS: Final = 0.4
"""Seconds between two attempts to reach a rank that has not come."""

_ANSWER_SECONDS: Final = 1.0


class ReachabilityProbe:
    """Tries to connect to ``address``, the server of a rank, every ``LOOK_SECONDS``; never if it is empty."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._due = asyncio.get_running_loop().time() + LOOK_SECONDS
        self._failures = 0

    async def is_gone(self) -> bool:
        """Return whether two connections in a row were refused; try to connect if that is due.

        A stopped rank still listens, by its kernel.
        """
        loop = asyncio.get_running_loop()
        if self._address and loop.time() >= self._due:
            self._failures = 0 if await _is_listening(self._address) else self._failures + 1
            self._due = loop.time() + LOOK_SECONDS
        return self._failures >= 2


async def _is_listening(address: str) -> bool:
    """Return False if the connection is refused; other errors prove nothing about the rank."""
    host, port = split_address(address)
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    await close_stream(writer)
    return True
