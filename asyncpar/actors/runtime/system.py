"""The actor system of one rank: starts and ends actors, and sends their messages."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine
from types import CoroutineType, TracebackType
from typing import Any, Self, SupportsIndex, TypeVar, cast, overload

from asyncpar.actors.runtime import message
from asyncpar.actors.runtime.actor import Actor, as_reference
from asyncpar.actors.runtime.ask_answers import AskAnswers
from asyncpar.actors.runtime.callee import Callee
from asyncpar.actors.runtime.caller import Caller
from asyncpar.actors.runtime.calls import EncodedArguments
from asyncpar.actors.runtime.dead_letters import DeadLetter, DeadLetters
from asyncpar.actors.runtime.ending import Down
from asyncpar.actors.runtime.endpoint import EndpointCatalog, EndpointSpec, describe_constructor
from asyncpar.actors.runtime.executor import EndpointGuard
from asyncpar.actors.runtime.groups import Groups
from asyncpar.actors.runtime.lifecycle import Lifecycle, Requests, check_actor_class
from asyncpar.actors.runtime.message import MeshPlace
from asyncpar.actors.runtime.outbound import Outbound
from asyncpar.actors.runtime.ref import ActorRef, Messenger, RefExtension, Told
from asyncpar.actors.runtime.registry import ActorRegistry, check_name, class_path, describe_actor
from asyncpar.actors.runtime.routing import MessageRouter
from asyncpar.actors.runtime.stream_caller import StreamCaller
from asyncpar.actors.runtime.stream_types import find_stream
from asyncpar.actors.runtime.watches import Watch, Watches
from asyncpar.core.concurrency.tasks import check_home_loop
from asyncpar.core.observe.loop_watch import LoopWatch
from asyncpar.errors import NodeClosed, PeerLost, UsageError
from asyncpar.net.transport.links import Links
from asyncpar.net.wire.payload import PayloadDecoder, PayloadEncoder

A = TypeVar("A", bound=Actor)


class ActorSystem(Messenger):
    """Spawns actors on this rank and carries messages between ranks over ``links``.  Use as ``async with``.

    Enter it after ``links`` and before the first frame can arrive; leaving it stops the actors, newest first, and ends
    every pending ask with ``PeerLost``.  An actor's exceptions never end the system.
    """

    def __init__(self, links: Links, loop_watch: LoopWatch | None = None) -> None:
        self.rank = links.rank
        self.loop_watch = loop_watch or LoopWatch(rank=links.rank, blocked_after=None, describe=describe_actor)
        """Runs from the first actor on; its creator stops it."""
        self._links = links
        self._world_size = links.world.size
        self._extension = RefExtension(self, world_size=links.world.size)
        self._tasks = asyncio.TaskGroup()
        self._registry = ActorRegistry(links.rank)
        outbound = Outbound(links)
        self._caller = Caller(links.rank, extension=self._extension, outbound=outbound)
        self._callee = Callee(rank=links.rank, extension=self._extension, outbound=outbound)
        self._watches = Watches(links, outbound)
        self._endpoints = EndpointCatalog(self._extension)
        self._lifecycle = Lifecycle(
            self._registry,
            self._endpoints,
            messenger=self,
            extension=self._extension,
            tasks=self._tasks,
            callee=self._callee,
            watches=self._watches,
            outbound=outbound,
            on_spawn=self.loop_watch.start,
        )
        self._streams = StreamCaller(
            self._caller, outbound=outbound, extension=self._extension, create_task=self._tasks.create_task
        )
        self._requests = Requests(self._registry, self._lifecycle, tasks=self._tasks, outbound=outbound)
        self._router = MessageRouter(
            links,
            self._registry,
            self._caller,
            self._callee,
            streams=self._streams,
            requests=self._requests,
            watches=self._watches,
            lifecycle=self._lifecycle,
            answers=AskAnswers(self._registry, self._caller, self._callee, outbound),
        )
        outbound.deliver = self._router.dispatch
        self._untyped = PayloadDecoder[Any](Any, extension=self._extension)
        self._plain = PayloadDecoder[Any](Any, extension=self._extension, as_plain=True)
        self._text = PayloadDecoder[Any](str)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_open = False

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._links.on_message = self._router.receive
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

    # -- usage -----------------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return not self._is_open

    @property
    def pending(self) -> int:
        """Number of asks of this rank that wait for their answer, and calls of others that wait for ours."""
        return self._caller.pending + self._callee.serving + self._requests.serving

    @property
    def dead_letters(self) -> DeadLetters:
        """Told messages that were not handled on this rank."""
        return self._callee.dead_letters

    @property
    def groups(self) -> Groups:
        """The communicators of actors on meshes."""
        return self._lifecycle.groups

    async def spawn(self, actor: type[A], *args: Any, name: str | None = None, **kwargs: Any) -> A:
        """Start an actor on this rank and return its reference when its ``on_start`` has ended.

        The constructor gets ``args`` and ``kwargs`` themselves, not copies.  Without ``name`` a new name is generated.
        Type checkers see the reference as the actor's class, so calls are checked.

        Raises the exception of the constructor or ``on_start``, and ``UsageError`` for a name that is taken.
        """
        check_actor_class(actor)
        self._check_here("spawn")
        return cast(A, await self._lifecycle.spawn(actor, lambda: actor(*args, **kwargs), name))

    async def adopt(
        self,
        actor: Actor,
        *,
        name: str,
        place: MeshPlace | None = None,
        guard: EndpointGuard | None = None,
    ) -> ActorRef[Any]:
        """Start an actor on this rank around an existing object, and return its reference.  See ``spawn``.

        ``guard`` is called where each endpoint begins and ends.
        """
        self._check_here("adopt")
        return await self._lifecycle.spawn(type(actor), lambda: actor, name, place=place, guard=guard)

    async def retire(self, names: Collection[str], *, within: float, handles_waiting: bool) -> None:
        """Begin to close this system: the actors of this rank called ``names`` accept no more messages, and end.

        A running endpoint may finish ``within`` seconds.  With ``handles_waiting``, waiting messages are handled, too;
        otherwise they are refused at once.  Callers of refused messages learn that this node is closed.
        """
        await self._lifecycle.retire(names, within=within, handles_waiting=handles_waiting)

    def spawn_on(
        self,
        rank: int,
        actor: type[A],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        name: str | None = None,
        place: MeshPlace | None = None,
    ) -> Coroutine[Any, Any, A]:
        """Start an actor on ``rank``, as ``spawn`` does on this one; its constructor gets copies of the arguments.

        The class must be known to that rank: modules are not imported there, and no code is sent.  Arguments are
        checked and encoded now; the rest happens when the returned coroutine is awaited.  Raises like an ask; an
        exception of the constructor or ``on_start`` becomes ``RemoteError``.
        """
        check_actor_class(actor)
        self._check_here("spawn")
        ref = self._reference(name or actor.__name__, rank, actor)
        encoder, encoded, named = self._caller.encode(actor.__qualname__, args, kwargs or {})
        describe_constructor(actor, self._extension).check(len(args), tuple(kwargs or {}))

        def envelope(call: int) -> message.Spawn:
            return message.Spawn(call, class_path(actor), name or "", encoded, named, place)

        async def spawned() -> A:
            given = await self._caller.request(ref, "spawn", envelope, encoder, self._text)
            return cast(A, self._reference(given, rank, actor))

        return spawned()

    @overload
    def ref(self, name: str, rank: int | None = None) -> ActorRef[Any]: ...
    @overload
    def ref(self, name: str, rank: int | None = None, *, actor_class: type[A]) -> A: ...
    def ref(self, name: str, rank: int | None = None, *, actor_class: type[Any] | None = None) -> Any:
        """Return the reference to the actor called ``name`` on ``rank`` (default: this one); nothing is sent.

        With ``actor_class`` results are typed, and wrong calls are refused before they are sent.
        """
        if actor_class is not None:
            check_actor_class(actor_class)
        return self._reference(name, self.rank if rank is None else rank, actor_class)

    def watch(self, ref: ActorRef[Any] | Actor, on_down: Callable[[Down], None] | None = None) -> Watch:
        """Watch an actor: awaiting the returned watch gives exactly one ``Down``, whatever happens.

        ``on_down`` is called with it, on this loop.
        """
        reference = as_reference(ref)
        self._check_here("watch")
        return self._watches.begin(reference, on_down)

    async def stop(self, ref: ActorRef[Any] | Actor) -> None:
        """Stop an actor, here or elsewhere: messages in its mailbox are handled, later ones are refused.

        Returns after its ``on_stop``, or raises that one's exception.  Cancelling this ends the wait, not the stop.
        """
        await self._end(as_reference(ref), is_kill=False)

    async def kill(self, ref: ActorRef[Any] | Actor) -> None:
        """Kill an actor, here or elsewhere: cancel its work, refuse waiting messages, and do not run ``on_stop``.

        Its children are killed, too.  A plain ``def`` endpoint cannot be interrupted: this waits for its end.  Does
        nothing for an actor that has ended; raises ``UsageError`` if there never was one.
        """
        await self._end(as_reference(ref), is_kill=True)

    def abandon(self, rank: int, abandon: message.Abandon) -> None:
        """Notify ``rank`` that a call of a mesh has failed."""
        self._caller.send_to(rank, abandon)

    def stop_soon(self, ref: ActorRef[Any]) -> None:
        """Stop an actor, here or elsewhere, without waiting for its end; do nothing if it has already ended."""
        self._caller.send_to(ref.rank, message.EndMessage(self._caller.new_call(), ref.name, is_kill=False))

    async def _end(self, ref: ActorRef[Any], *, is_kill: bool) -> None:
        verb = "kill" if is_kill else "stop"
        self._check_here(verb)
        if ref.rank == self.rank:
            await self._requests.end_actor(ref.name, is_kill=is_kill)
            return

        def envelope(call: int) -> message.EndMessage:
            return message.EndMessage(call, ref.name, is_kill)

        await self._caller.request(ref, verb, envelope, PayloadEncoder(), self._untyped)

    async def close(self) -> None:
        """Stop every actor, newest first; then end every pending ask.  Idempotent."""
        self._is_open = False
        self._requests.close()
        try:
            await self._lifecycle.close()
        finally:  # even if this is cancelled: asks and watches must end
            self._watches.close()
            self._caller.close()

    def encode_once(
        self,
        ref: ActorRef[Any],
        endpoint: str,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        *,
        is_told: bool = False,
    ) -> EncodedArguments:
        """Check a call that goes to many actors like ``ref``, and encode its ``arguments`` for all of them.

        Raises ``UsageError`` if the call is wrong.
        """
        self._check_call(ref, endpoint, arguments, keywords, is_told=is_told)
        found = find_stream(arguments, keywords)
        if found is not None:
            raise UsageError(
                f"argument {found!r} of {endpoint}(): a stream can be read once, not by many actors; ask one by one"
            )
        return EncodedArguments.of(arguments, *self._caller.encode(endpoint, arguments, keywords))

    # -- interface of references (Messenger) ---------------------------------------------------------------------------

    def ask(
        self,
        ref: ActorRef[Any],
        endpoint: str,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        *,
        as_plain: bool = False,
    ) -> Coroutine[Any, Any, Any]:
        """Ask as a reference does; ``as_plain``: results of no declared type come as plain data for other languages."""
        spec = self._check_call(ref, endpoint, arguments, keywords)
        if ref.rank == self.rank:
            self._check_not_itself(ref, endpoint)
        result = self._result(spec, as_plain=as_plain)
        if (spec is None or spec.has_streams) and find_stream(arguments, keywords) is not None:
            work = self._streams.ask(ref, endpoint, arguments, keywords, result)
        else:
            work = self._caller.ask(ref, endpoint, arguments, keywords, result)
        named = cast("CoroutineType[Any, Any, Any]", work)
        named.__qualname__ = endpoint if spec is None else spec.title  # for "was never awaited"
        return work

    def tell(self, ref: ActorRef[Any], endpoint: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Told:
        spec = self._check_call(ref, endpoint, arguments, keywords, is_told=True)
        if (spec is None or spec.has_streams) and (found := find_stream(arguments, keywords)) is not None:
            raise UsageError(f"argument {found!r} of {endpoint}(): a told message cannot bring a stream; ask")
        try:
            return self._caller.tell(ref, endpoint, arguments, keywords)
        except PeerLost as error:
            self.dead_letters.add(DeadLetter(self.rank, ref.rank, ref.name, endpoint, str(error.cause)))
            raise

    def stream(
        self,
        ref: ActorRef[Any],
        endpoint: str,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        *,
        as_plain: bool = False,
    ) -> AsyncGenerator[Any, None]:
        """Stream as a reference does; see ``ask`` for ``as_plain``."""
        spec = self._check_call(ref, endpoint, arguments, keywords, wants_stream=True)
        if ref.rank == self.rank:
            self._check_not_itself(ref, endpoint)
        return self._streams.stream(ref, endpoint, arguments, keywords, self._result(spec, as_plain=as_plain))

    def _result(self, spec: EndpointSpec | None, *, as_plain: bool) -> PayloadDecoder[Any]:
        if spec is not None:
            return spec.result
        return self._plain if as_plain else self._untyped

    # -- interface of links --------------------------------------------------------------------------------------------

    def _peer_lost(self, rank: int, error: PeerLost) -> None:
        self._caller.peer_lost(rank, error)
        self._callee.peer_lost(rank, error)
        self._lifecycle.peer_lost(rank)
        self._requests.peer_lost(rank)
        self._watches.peer_lost(rank, error)

    # -- internals -----------------------------------------------------------------------------------------------------

    def _check_call(
        self,
        ref: ActorRef[Any],
        endpoint: str,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        *,
        wants_stream: bool = False,
        is_told: bool = False,
    ) -> EndpointSpec | None:
        """Refuse a wrong call before it is sent, as far as the actor's class is known here."""
        self._check_here(endpoint, ref)
        if ref.actor_class is None:
            return None
        spec = self._endpoints[ref.actor_class][endpoint]
        spec.check(len(arguments), tuple(keywords))
        misuse = spec.misuse(wants_stream=wants_stream, is_told=is_told)
        if misuse is not None:
            raise UsageError(misuse)
        return spec

    def _check_not_itself(self, ref: ActorRef[Any], endpoint: str) -> None:
        cell = self._registry.cells.get(ref.name)
        if cell is None or cell.ref.actor_class is None or not cell.is_current_task():
            return
        spec = self._endpoints[cell.ref.actor_class].get(endpoint)
        if spec is not None and spec.concurrency is None:
            raise UsageError(
                f"{endpoint} of {ref!r}: an actor that asks itself waits for ever; call self.{endpoint}(), or tell"
            )

    def _check_here(self, what: str, ref: ActorRef[Any] | None = None) -> None:
        """Raise ``UsageError`` for a call that comes too early, too late, or on another loop."""
        if asyncio._get_running_loop() is self._loop is not None and (self._is_open or ref is not None):
            return
        title = what if ref is None else f"{what} of {ref!r}"
        if self._loop is None:
            raise UsageError(f"{title}: the actor system of rank {self.rank} is not open")
        if ref is None and not self._is_open:
            raise NodeClosed.of(self.rank, title)
        check_home_loop(self._loop, title)

    def _reference(self, name: str, rank: object, actor_class: type[Any] | None) -> ActorRef[Any]:
        if not isinstance(rank, SupportsIndex) or not 0 <= operator.index(rank) < self._world_size:
            raise UsageError(f"rank: expected 0..{self._world_size - 1}, got {rank!r}")
        return ActorRef(self, name=check_name(name), rank=operator.index(rank), actor_class=actor_class)
