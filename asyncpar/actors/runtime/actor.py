"""The base class of actors, and the decorator of their endpoints."""

from __future__ import annotations

from abc import ABC, ABCMeta, abstractmethod
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine
from typing import Any, ClassVar, Concatenate, Final, Generic, ParamSpec, Protocol, Self, TypeVar, cast, overload

from asyncpar.actors.runtime.declaration import EndpointMark, MailboxPolicy, mark_endpoint, read_endpoints
from asyncpar.actors.runtime.ending import Down, DownReason
from asyncpar.actors.runtime.message import MeshPlace
from asyncpar.actors.runtime.ref import ActorRef, Endpoint, StreamingEndpoint
from asyncpar.actors.runtime.watches import Watch
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError

A = TypeVar("A", bound="Actor")
P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class ActorContext(ABC):
    """Services of the actor system to one actor; implemented by its cell."""

    __slots__ = ()

    ref: ActorRef[Any]
    place: MeshPlace | None

    @abstractmethod
    def group(self, axis: str | None) -> Communicator:
        """Implement ``Actor.group``."""

    @abstractmethod
    async def spawn_child(
        self, actor: type[Actor], args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str | None
    ) -> ActorRef[Any]:
        """Implement ``Actor.spawn``."""

    @abstractmethod
    async def stop_child(self, ref: ActorRef[Any]) -> None:
        """Implement ``Actor.stop_child``."""

    @abstractmethod
    async def kill_child(self, ref: ActorRef[Any]) -> None:
        """Implement ``Actor.kill_child``."""

    @abstractmethod
    async def end_child(self, ref: ActorRef[Any], *, within: float | None) -> BaseException | None:
        """Stop a child, if it has not ended yet, and kill it after ``within`` seconds; return the error of ``on_stop``.

        If this actor itself is closed or fails, the child's endpoint is cancelled and its waiting messages are refused.
        """

    @abstractmethod
    def run_soon(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run ``work`` in the actor's task, before waiting messages, like a hook: if it raises, the actor fails."""

    @property
    @abstractmethod
    def is_ending(self) -> bool:
        """Whether the end of this actor has begun.  It may still handle waiting messages."""

    @abstractmethod
    def watch(self, ref: ActorRef[Any]) -> Watch:
        """Implement ``Actor.watch``."""

    @abstractmethod
    def stop(self) -> None:
        """Implement ``Actor.stop_self``."""


class _FromReference(Generic[R_co]):
    """An attribute that an actor takes from its reference, unless it has its own of that name."""

    def __init__(self, read: Callable[[ActorRef[Any]], R_co]) -> None:
        self._read = read

    def __get__(self, instance: Actor | None, owner: type | None = None) -> R_co:
        if instance is None:
            raise AttributeError("only actors that were spawned have it")
        return self._read(instance._require_context().ref)


class ActorType(ABCMeta):
    """The type of actor classes: a reference counts as an instance of its actor's class, as type checkers see it."""

    def __instancecheck__(cls, instance: object) -> bool:
        if isinstance(instance, ActorRef):
            known = instance.actor_class
            return known is None or issubclass(known, cls)
        return super().__instancecheck__(instance)


class Actor(metaclass=ActorType):
    """Base class of actors: state that is guarded by one task, and that others reach by messages.

    Endpoints of one actor run one at a time, in the order in which their messages arrived, all on the node's event loop
    (a plain ``def`` endpoint in the actor's own thread, while nothing else of the actor runs).  So an actor needs no
    locks; only endpoints marked with ``concurrency`` run alongside the others.  The constructor runs on the loop, too;
    asynchronous initialization belongs in ``on_start``.

    An actor *fails* when a told message or one of the hooks raises: it ends, and its owner is notified.  An error of an
    asked endpoint is raised at the caller, and the actor continues.
    """

    endpoints: ClassVar[frozenset[str]] = frozenset()
    """Names of the endpoints."""
    mailbox: ClassVar[MailboxPolicy] = MailboxPolicy()
    """Limit of waiting messages, and treatment of those beyond it."""
    name = _FromReference(lambda ref: ref.name)
    """The actor's name on its rank."""
    rank = _FromReference(lambda ref: ref.rank)
    """The rank on which the actor runs."""
    _actor_context: ActorContext | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        names = read_endpoints(cls, RESERVED)
        if not isinstance(cls.mailbox, MailboxPolicy):
            raise UsageError(f"mailbox: {cls.__qualname__}.mailbox is no Mailbox but {cls.mailbox!r}")
        cls.endpoints = names

    # -- hooks -----------------------------------------------------------------------------------------------------

    async def on_start(self) -> None:
        """Run before the first message.  ``spawn`` raises its errors."""

    async def on_stop(self) -> None:
        """Run after the last message and after the end of all children, if ``on_start`` had succeeded.

        Not when the actor is killed.
        """

    async def on_down(self, down: Down) -> None:
        """Run, before waiting messages, when an actor that this one watches has ended."""

    async def on_child_down(self, down: Down) -> None:
        """Run, before waiting messages, when a child has ended that this actor did not end.

        By default the failure of a child is a failure of its owner.
        """
        if down.reason is DownReason.FAILED and down.error is not None:
            raise down.error

    def _begin(self) -> Coroutine[Any, Any, None]:
        """Run the work before the first message.  It adds no frame: tracebacks begin in the program's code."""
        return self.on_start()

    def _conclude(self) -> Coroutine[Any, Any, None]:
        """Run the work after the last message."""
        return self.on_stop()

    async def _end_children(self) -> None:
        """End the children in an order of the subclass's own.  Does not run when the actor is killed."""

    # -- for subclasses --------------------------------------------------------------------------------------------

    @property
    def ref(self) -> Self:
        """The reference to this actor, for other actors.  Not available before ``on_start``."""
        return cast(Self, self._require_context().ref)

    async def spawn(self, actor: type[A], *args: Any, name: str | None = None, **kwargs: Any) -> A:
        """Start a child on this rank and return its reference when its ``on_start`` has ended.

        The constructor gets ``args`` and ``kwargs`` themselves, not copies.  Without ``name`` a new name is generated.
        Raises the exception of the constructor or ``on_start``, and ``UsageError`` for a name that is taken.  Children
        end with their owner: they are stopped, last started first, before its ``on_stop``.
        """
        return cast(A, await self._require_context().spawn_child(actor, args, kwargs, name=name))

    async def stop_child(self, ref: ActorRef[Any] | Actor) -> None:
        """Stop a child and return after its ``on_stop``; does not call ``on_child_down``."""
        await self._require_context().stop_child(as_reference(ref))

    async def kill_child(self, ref: ActorRef[Any] | Actor) -> None:
        """Kill a child and return when it has ended; does not call ``on_child_down``."""
        await self._require_context().kill_child(as_reference(ref))

    def watch(self, ref: ActorRef[Any] | Actor) -> Watch:
        """Call ``on_down`` exactly once when the actor has ended; one that ended before counts as missing."""
        return self._require_context().watch(as_reference(ref))

    def stop_self(self) -> None:
        """Stop this actor once the waiting messages have been handled."""
        self._require_context().stop()

    def group(self, axis: str | None = None) -> Communicator:
        """Return the communicator over the actors of this one's mesh that differ only along ``axis``, for collectives.

        Without ``axis`` it is over all actors of the mesh.  Returns the same one each time, except after a call of the
        mesh that failed on some actors: such a call ends the groups of all actors called (their collectives raise
        ``PeerCancelled``), and later calls of this method return new ones.  So call it where you use the group.

        Raises ``UsageError`` for an unknown axis, naming the known ones, and if this actor is not on a mesh.
        """
        return self._require_context().group(axis)

    def _require_context(self) -> ActorContext:
        if self._actor_context is None:
            raise UsageError(f"ref: {type(self).__qualname__} was not spawned yet; use it from on_start on")
        return self._actor_context


RESERVED: Final = frozenset(name for kind in (Actor, ActorRef) for name in dir(kind) if not name.startswith("_"))
"""Names that an endpoint cannot have."""


class EndpointMethod(Generic[P, R_co]):
    """Type of an endpoint for type checkers: an ``Endpoint`` on a reference and on ``self``."""

    @abstractmethod
    def __get__(self, instance: object, owner: type | None = None) -> Endpoint[P, R_co]: ...


class StreamingEndpointMethod(Generic[P, R_co]):
    """Like ``EndpointMethod``, for an endpoint that is an async generator."""

    @abstractmethod
    def __get__(self, instance: object, owner: type | None = None) -> StreamingEndpoint[P, R_co]: ...


class _EndpointDecorator(Protocol):
    @overload
    def __call__(self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /) -> EndpointMethod[P, R]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[Any, P], AsyncIterable[R]], /
    ) -> StreamingEndpointMethod[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Any, P], R], /) -> EndpointMethod[P, R]: ...


@overload
def endpoint(function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /) -> EndpointMethod[P, R]: ...
@overload
def endpoint(  # type: ignore[overload-overlap]
    function: Callable[Concatenate[Any, P], AsyncIterable[R]], /
) -> StreamingEndpointMethod[P, R]: ...
@overload
def endpoint(function: Callable[Concatenate[Any, P], R], /) -> EndpointMethod[P, R]: ...
@overload
def endpoint(*, concurrency: int | None = None) -> _EndpointDecorator: ...
def endpoint(function: Any = None, /, *, concurrency: int | None = None) -> Any:
    """Mark a method of an actor as one that others may call: ``@endpoint`` or ``@endpoint(concurrency=8)``.

    ``async def`` runs on the loop, plain ``def`` in a thread (from which other actors cannot be asked or told), and an
    async generator is a stream of items.  Called on ``self`` it is a plain method.  Arguments from others are checked
    against its annotations.

    With ``concurrency``, up to that many calls of this endpoint run at once, alongside the actor's other work.

    Raises ``UsageError`` for a function that cannot be an endpoint.

    ``function`` is the decorated method.
    """
    mark = EndpointMark(concurrency)
    return (lambda function: mark_endpoint(function, mark)) if function is None else mark_endpoint(function, mark)


def as_reference(value: object) -> ActorRef[Any]:
    """Return ``value``, which type checkers may know as the actor's class, typed as the reference that it is.

    Raises ``UsageError`` if it is not a reference.
    """
    if not isinstance(value, ActorRef):
        raise UsageError(f"ref: expected the reference of an actor (as spawn returns it), got {value!r}")
    return value
