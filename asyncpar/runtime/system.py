"""The actor system of one rank: its actors, and the messages between them and everyone else's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from asyncpar.errors import PeerLost, UsageError
from asyncpar.runtime import message
from asyncpar.runtime.actor import Actor
from asyncpar.runtime.callee import Callee
from asyncpar.runtime.caller import Caller
from asyncpar.runtime.cell import Cell, Delivery
from asyncpar.runtime.endpoint import EndpointSpec, describe_endpoints
from asyncpar.runtime.message import MessageDecoder
from asyncpar.runtime.post import Post
from asyncpar.runtime.ref import ActorRef, Messenger, RefExtension, Told
from asyncpar.transport.home_loop import check_home_loop
from asyncpar.transport.links import Links
from asyncpar.wire.payload import PayloadDecoder

A = TypeVar("A", bound=Actor)
MAX_NAME = 255


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
        post = Post(links, self._dispatch)
        self._caller = Caller(links.rank, extension=self._extension, post=post)
        self._callee = Callee(links.rank, extension=self._extension, post=post)
        self._decoder = MessageDecoder()
        self._untyped = PayloadDecoder[Any](Any, extension=self._extension)
        self._tasks = asyncio.TaskGroup()
        self._endpoints: dict[type[Actor], dict[str, EndpointSpec]] = {}
        self._names = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_open = False

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._links.on_message = self._receive
        self._links.add_loss_listener(self._peer_lost)
        self._loop = asyncio.get_running_loop()
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
        return self._caller.pending + self._callee.serving

    async def spawn(self, actor: type[A], *args: Any, name: str | None = None, **kwargs: Any) -> ActorRef[A]:
        """Start an actor on this rank and return when its ``on_start`` has.

        The constructor gets ``args`` and ``kwargs`` as they are, not copies.  Without ``name`` the actor gets one of
        its own.  Raises what the constructor or ``on_start`` raised, and ``UsageError`` for a name that is taken.
        """
        _check_actor_class(actor)
        if self._loop is None or not self._is_open:
            raise UsageError(f"spawn: the actor system of rank {self.rank} is not open")
        check_home_loop(self._loop, "spawn")
        name = self._new_name(actor) if name is None else _check_name(name)
        if name in self._callee.cells:
            raise UsageError(f"name: {name!r} is taken by another actor on rank {self.rank}")
        ref = ActorRef(self, name=name, rank=self.rank, actor_class=actor)

        def create() -> A:
            instance = actor(*args, **kwargs)
            instance._reference = ref
            return instance

        cell = self._callee.cells[name] = Cell(
            name, rank=self.rank, create=create, endpoints=self._describe(actor), events=self._callee
        )
        cell.task = self._tasks.create_task(cell.run(), name=f"actor {name} of rank {self.rank}")
        try:
            await cell.started
        except asyncio.CancelledError:
            cell.close()
            raise
        return ref

    @overload
    def ref(self, name: str, rank: int | None = None) -> ActorRef[Any]: ...
    @overload
    def ref(self, name: str, rank: int | None = None, *, actor_class: type[A]) -> ActorRef[A]: ...
    def ref(self, name: str, rank: int | None = None, *, actor_class: type[Any] | None = None) -> ActorRef[Any]:
        """Return the reference to the actor called ``name`` on ``rank`` (default: this one); nothing is sent.

        With ``actor_class`` results come typed, and wrong calls are refused before they are sent.
        """
        if actor_class is not None:
            _check_actor_class(actor_class)
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
        cell = self._callee.cells.get(ref.name)
        if cell is None:
            raise UsageError(f"ref: there is no actor {ref.name!r} on rank {self.rank}")
        if cell.is_current_task():
            raise UsageError(f"ref: {ref!r} cannot wait for its own end")
        cell.stop()
        await cell.wait_ended()
        if cell.stop_error is not None:
            raise cell.stop_error

    async def close(self) -> None:
        """Stop every actor, newest first; then end every ask that still waits.  Idempotent."""
        self._is_open = False
        await self._callee.close()
        self._caller.close()

    # -- references' side (Messenger) ----------------------------------------------------------------------------------

    async def ask(self, ref: ActorRef[Any], endpoint: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        spec = self._check_call(ref, endpoint, arguments, keywords)
        cell = self._callee.cells.get(ref.name) if ref.rank == self.rank else None
        if cell is not None and cell.is_current_task():
            raise UsageError(
                f"{endpoint} of {ref!r}: an actor that asks itself waits for ever; call self.{endpoint}(), or tell"
            )
        result = self._untyped if spec is None else spec.result
        return await self._caller.ask(ref, endpoint, arguments, keywords, result)

    def tell(self, ref: ActorRef[Any], endpoint: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Told:
        self._check_call(ref, endpoint, arguments, keywords)
        return self._caller.tell(ref, endpoint, arguments, keywords)

    # -- links' side ---------------------------------------------------------------------------------------------------

    def _receive(self, rank: int, payload: memoryview, release: Callable[[], None]) -> None:
        """A message came.  Its share of the link's budget goes back at once: see ``window``."""
        release()
        if rank not in self._links.lost:
            self._dispatch(rank, payload)

    def _dispatch(self, rank: int, payload: memoryview) -> None:
        """Hand a message to whom it concerns.  Raises ``ProtocolError``, which ends the connection it came from."""
        received = self._decoder.decode(payload)
        match received:
            case message.Call(call, actor, endpoint, arguments, keywords):
                self._callee.accept(actor, Delivery(rank, call, endpoint, arguments, keywords, payload))
            case message.Tell(actor, endpoint, arguments, keywords):
                self._callee.accept(actor, Delivery(rank, None, endpoint, arguments, keywords, payload))
            case message.Reply():
                self._caller.reply(rank, received, payload)
            case message.Failure():
                self._caller.failure(rank, received)
            case message.Credit():
                self._caller.credit(rank, received)
            case message.Cancel(call):
                self._callee.cancel(rank, call)

    def _peer_lost(self, rank: int, error: PeerLost) -> None:
        self._caller.peer_lost(rank, error)
        self._callee.peer_lost(rank)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _check_call(
        self, ref: ActorRef[Any], endpoint: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> EndpointSpec | None:
        """Refuse a wrong call before it is sent, as far as the actor's class is known here."""
        if self._loop is None:
            raise UsageError(f"{endpoint} of {ref!r}: the actor system of rank {self.rank} is not open yet")
        check_home_loop(self._loop, f"{endpoint} of {ref!r}")
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


def _check_actor_class(actor: object) -> None:
    if not (isinstance(actor, type) and issubclass(actor, Actor)):
        raise UsageError(f"actor class: expected a subclass of Actor, got {actor!r}")


def _check_name(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise UsageError(f"name: expected 1 to {MAX_NAME} printable characters, got {name!r}")
    return name
