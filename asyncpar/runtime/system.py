"""The actor system of one rank: its actors, and the messages between them and everyone else's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from asyncpar.errors import PeerLost, ProtocolError, UsageError
from asyncpar.runtime import message
from asyncpar.runtime.actor import Actor
from asyncpar.runtime.caller import Caller
from asyncpar.runtime.cell import Cell, Delivery
from asyncpar.runtime.endpoint import EndpointSpec, describe_endpoints
from asyncpar.runtime.failure import describe_failure
from asyncpar.runtime.message import MessageDecoder
from asyncpar.runtime.ref import ActorRef, Messenger, RefExtension, Told
from asyncpar.runtime.window import ReceiveWindow
from asyncpar.transport.links import MAX_MESSAGE_BYTES, Links
from asyncpar.wire.payload import PayloadDecoder, PayloadEncoder

A = TypeVar("A", bound=Actor)
MAX_NAME = 255

_LOG = logging.getLogger(__name__)


class ActorSystem(Messenger):
    """Spawns actors on this rank and carries messages between ranks over ``links``.  Use as ``async with``.

    Enter it after ``links`` and before the first frame can arrive; leaving it stops the actors, newest first, and ends
    every ask that still waits with ``PeerLost``.  What an actor raises never ends the system.
    """

    def __init__(self, links: Links) -> None:
        self.rank = links.rank
        self._links = links
        self._world_size = links.world.size
        self._extension = RefExtension(self, world_size=links.world.size)
        self._caller = Caller(links.rank, extension=self._extension, post=self._post)
        self._decoder = MessageDecoder()
        self._untyped = PayloadDecoder[Any](Any, extension=self._extension)
        self._tasks = asyncio.TaskGroup()
        self._cells: dict[str, Cell] = {}
        self._serving: dict[tuple[int, int], tuple[Cell, Delivery]] = {}
        self._windows: dict[tuple[int, str], ReceiveWindow] = {}
        self._endpoints: dict[type[Actor], dict[str, EndpointSpec]] = {}
        self._names = 0
        self._is_open = False
        self._is_closing = False

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._links.on_message = self._receive
        self._links.add_loss_listener(self._peer_lost)
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except BaseException as failure:
            await self._tasks.__aexit__(type(failure), failure, failure.__traceback__)
            raise
        await self._tasks.__aexit__(None, None, None)

    # -- use -------------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Asks of this rank that wait for their answer, and calls of others that wait for ours."""
        return self._caller.pending + len(self._serving)

    async def spawn(self, actor: type[A], *args: Any, name: str | None = None, **kwargs: Any) -> ActorRef[A]:
        """Start an actor on this rank and return when its ``on_start`` has.

        The constructor gets ``args`` and ``kwargs`` as they are, not copies.  Without ``name`` the actor gets one of
        its own.  Raises what the constructor or ``on_start`` raised, and ``UsageError`` for a name that is taken.
        """
        if not (isinstance(actor, type) and issubclass(actor, Actor)):
            raise UsageError(f"actor: expected a subclass of Actor, got {actor!r}")
        if not self._is_open or self._is_closing:
            raise UsageError(f"spawn: the actor system of rank {self.rank} is not open")
        name = self._new_name(actor) if name is None else _check_name(name)
        if name in self._cells:
            raise UsageError(f"name: {name!r} is taken by another actor on rank {self.rank}")
        ref = ActorRef(self, name=name, rank=self.rank, actor_class=actor)

        def create() -> A:
            instance = actor(*args, **kwargs)
            instance._reference = ref
            return instance

        cell = self._cells[name] = Cell(name, create, self._describe(actor), self)
        cell.task = self._tasks.create_task(cell.run(), name=f"actor {name} of rank {self.rank}")
        try:
            await cell.started
        except asyncio.CancelledError:
            cell.close()
            raise
        return ref

    def ref(self, name: str, rank: int | None = None, actor_class: type[A] | None = None) -> ActorRef[A]:
        """Return the reference to the actor called ``name`` on ``rank`` (default: this one); nothing is sent.

        With ``actor_class`` results come typed, and wrong calls are refused before they are sent.
        """
        rank = self.rank if rank is None else rank
        if not 0 <= rank < self._world_size:
            raise UsageError(f"rank: expected 0..{self._world_size - 1}, got {rank}")
        return ActorRef(self, name=_check_name(name), rank=rank, actor_class=actor_class)

    async def stop(self, ref: ActorRef[Any]) -> None:
        """Stop an actor of this rank: its current message is finished, the rest of its mailbox is refused.

        Returns after its ``on_stop``, or raises what that raised.  Cancelling this stops waiting, not stopping.
        """
        if ref.rank != self.rank:
            raise UsageError(f"ref: {ref!r} can only be stopped on its own rank, this is rank {self.rank}")
        cell = self._cells.get(ref.name)
        if cell is None or cell.task is None:
            raise UsageError(f"ref: there is no actor {ref.name!r} on rank {self.rank}")
        if cell.is_current_task():
            raise UsageError(f"ref: {ref!r} cannot wait for its own end")
        cell.stop()
        await asyncio.wait({cell.task})
        if cell.stop_error is not None:
            raise cell.stop_error

    async def close(self) -> None:
        """Stop every actor, newest first; then end every ask that still waits.  Idempotent."""
        self._is_closing = True
        for cell in reversed(list(self._cells.values())):
            cell.close()
            if cell.task is not None:
                await asyncio.wait({cell.task})
            if cell.stop_error is not None:
                _LOG.error("rank %d: on_stop of actor %r raised", self.rank, cell.name, exc_info=cell.stop_error)
        self._caller.close()

    # -- references' side (Messenger) ----------------------------------------------------------------------------------

    async def ask(self, ref: ActorRef[Any], endpoint: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        spec = self._check_call(ref, endpoint, arguments, keywords)
        if ref.rank == self.rank and (cell := self._cells.get(ref.name)) is not None and cell.is_current_task():
            raise UsageError(
                f"{endpoint} of {ref!r}: an actor that asks itself waits for ever; call self.{endpoint}(), or tell"
            )
        result = self._untyped if spec is None else spec.result
        return await self._caller.ask(ref, endpoint, arguments, keywords, result)

    def tell(self, ref: ActorRef[Any], endpoint: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Told:
        self._check_call(ref, endpoint, arguments, keywords)
        return self._caller.tell(ref, endpoint, arguments, keywords)

    # -- cells' side (CellEvents) --------------------------------------------------------------------------------------

    def taken(self, cell: Cell, delivery: Delivery) -> None:
        self._return_credit(delivery.sender, cell.name, self._window(delivery.sender, cell.name).take(delivery.cost))

    def answered(self, cell: Cell, delivery: Delivery, value: object) -> None:
        if delivery.call is None or not self._finish(delivery):
            return
        encoder = PayloadEncoder(extension=self._extension, limit=MAX_MESSAGE_BYTES)
        what = f"the result of {delivery.endpoint}()"
        try:
            reply = message.Reply(delivery.call, encoder.part(value, what=what))
            payload = encoder.finish(reply, what=what)
        except UsageError as error:
            self._say(delivery.sender, describe_failure(delivery.call, error))
        else:
            self._post_quietly(delivery.sender, payload)

    def raised(self, cell: Cell, delivery: Delivery, error: BaseException) -> None:
        if delivery.call is None:
            where = (self.rank, cell.name, delivery.endpoint, delivery.sender)
            _LOG.error("rank %d: actor %r: %s, told by rank %d, raised", *where, exc_info=error)
        elif self._finish(delivery):
            self._say(delivery.sender, describe_failure(delivery.call, error))

    def refused(self, cell: Cell, delivery: Delivery, reason: str, text: str) -> None:
        self._refuse(cell.name, delivery, reason, text)

    def ended(self, cell: Cell) -> None:
        del self._cells[cell.name]
        for place in [place for place in self._windows if place[1] == cell.name]:
            self._return_credit(*place, self._windows.pop(place).settle())

    # -- links' side ---------------------------------------------------------------------------------------------------

    def _receive(self, rank: int, payload: memoryview, release: Callable[[], None]) -> None:
        """A message came.  Its share of the link's budget goes back at once: see ``window``."""
        release()
        if rank not in self._links.lost:
            self._dispatch(rank, payload)

    def _dispatch(self, rank: int, payload: memoryview) -> None:
        received = self._decoder.decode(payload)
        match received:
            case message.Call(call, actor, endpoint, arguments, keywords):
                if (rank, call) in self._serving:
                    raise ProtocolError(f"actor message: rank {rank} sent call {call} twice")
                self._accept(actor, Delivery(rank, call, endpoint, arguments, keywords, payload))
            case message.Tell(actor, endpoint, arguments, keywords):
                self._accept(actor, Delivery(rank, None, endpoint, arguments, keywords, payload))
            case message.Reply():
                self._caller.reply(rank, received, payload)
            case message.Failure():
                self._caller.failure(rank, received)
            case message.Credit():
                self._caller.credit(rank, received)
            case message.Cancel(call):
                serving = self._serving.pop((rank, call), None)
                if serving is not None:
                    cell, delivery = serving
                    cell.cancel(delivery)

    def _accept(self, actor: str, delivery: Delivery) -> None:
        window = self._window(delivery.sender, actor)
        window.receive(delivery.cost)
        cell = self._cells.get(actor)
        if cell is not None and not cell.is_stopping:
            if delivery.call is not None:
                self._serving[delivery.sender, delivery.call] = cell, delivery
            cell.put(delivery)
            return
        if cell is None:
            del self._windows[delivery.sender, actor]
        self._return_credit(delivery.sender, actor, delivery.cost)
        if self._is_closing:
            self._refuse(actor, delivery, message.CLOSED, "the node was closed")
        elif cell is not None:
            self._refuse(actor, delivery, message.STOPPED, "the actor was stopped")
        else:
            self._refuse(actor, delivery, message.USAGE, f"there is no actor {actor!r} on rank {self.rank}")

    def _peer_lost(self, rank: int, error: PeerLost) -> None:
        self._caller.peer_lost(rank, error)
        for sender, call in [place for place in self._serving if place[0] == rank]:
            cell, delivery = self._serving.pop((sender, call))
            cell.cancel(delivery)

    def _post(self, rank: int, payload: memoryview) -> None:
        if rank == self.rank:
            self._dispatch(rank, payload)
            return
        sending = self._links.send_message(rank, payload)
        if sending is not None:
            sending.done.add_done_callback(_retrieve)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _check_call(
        self, ref: ActorRef[Any], endpoint: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> EndpointSpec | None:
        """Refuse a wrong call before it is sent, as far as the actor's class is known here."""
        if ref.actor_class is None:
            return None
        spec = self._describe(ref.actor_class)[endpoint]
        spec.check(len(arguments), tuple(keywords))
        return spec

    def _describe(self, actor_class: type[Actor]) -> dict[str, EndpointSpec]:
        described = self._endpoints.get(actor_class)
        if described is None:
            described = self._endpoints[actor_class] = describe_endpoints(actor_class, self._extension)
        return described

    def _new_name(self, actor: type[Actor]) -> str:
        self._names += 1
        return f"{actor.__name__}-{self._names}"

    def _window(self, sender: int, actor: str) -> ReceiveWindow:
        return self._windows.setdefault((sender, actor), ReceiveWindow())

    def _return_credit(self, rank: int, actor: str, amount: int) -> None:
        if amount:
            self._say(rank, message.Credit(actor, amount))

    def _finish(self, delivery: Delivery) -> bool:
        """The call is over; does anybody wait for the answer?"""
        if delivery.call is not None:
            self._serving.pop((delivery.sender, delivery.call), None)
        return not delivery.is_cancelled

    def _refuse(self, actor: str, delivery: Delivery, reason: str, text: str) -> None:
        if delivery.call is None:
            where = (self.rank, actor, delivery.endpoint, delivery.sender)
            _LOG.warning("rank %d: actor %r: %s, told by rank %d, was not done: %s", *where, text)
        elif self._finish(delivery):
            self._say(delivery.sender, message.Failure(delivery.call, reason, text))

    def _say(self, rank: int, envelope: message.Message) -> None:
        self._post_quietly(rank, PayloadEncoder().finish(envelope, what="actor message"))

    def _post_quietly(self, rank: int, payload: memoryview) -> None:
        try:
            self._post(rank, payload)
        except PeerLost:
            return  # nobody is left to hear it; those who wait for that rank are told by _peer_lost


def _retrieve(done: asyncio.Future[None]) -> None:
    """Look at how a send ended: if the peer was lost, whoever waits for it is told by the loss listener."""
    if not done.cancelled():
        done.exception()


def _check_name(name: str) -> str:
    if not isinstance(name, str) or not 0 < len(name.encode(errors="replace")) <= MAX_NAME or not name.isprintable():
        raise UsageError(f"name: expected 1 to {MAX_NAME} bytes of printable text, got {name!r}")
    return name
