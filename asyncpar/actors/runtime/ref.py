"""References: handles of actors for callers.  They are plain values, cheap to make, and can be sent as arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Generator, Iterable
from typing import Any, Final, Generic, NoReturn, ParamSpec, TypeVar, get_args, get_origin

import msgspec
from msgspec.msgpack import Ext

from asyncpar.core.tables import html_table
from asyncpar.errors import NotFound, ProtocolError, UsageError
from asyncpar.net.wire.array import type_name
from asyncpar.net.wire.payload import FIRST_EXTENSION, Extension

A = TypeVar("A")
P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)

_REFERENCE: Final = FIRST_EXTENSION
STREAM: Final = FIRST_EXTENSION + 1
"""Stands for a stream among the arguments of a call (see ``stream_types``)."""


class NoSuchEndpoint(NotFound, AttributeError):  # noqa: N818
    """The reference has no such endpoint."""


class Told(ABC):
    """A message in transit.  Awaiting it is optional, and slows the sender down if the actor is slow."""

    __slots__ = ()

    @abstractmethod
    def __await__(self) -> Generator[Any, None, None]:
        """Return when the actor's mailbox has room and the message has left.  Raises ``PeerLost`` if it never will."""


class Messenger(ABC):
    """Carries the messages of references."""

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Whether its node has been stopped, so that its references name actors of a world that is over."""

    @abstractmethod
    def ask(
        self, ref: ActorRef[Any], endpoint: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Coroutine[Any, Any, Any]:
        """Send a call and return its result."""

    @abstractmethod
    def tell(self, ref: ActorRef[Any], endpoint: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Told:
        """Send a call without an answer."""

    @abstractmethod
    def stream(
        self, ref: ActorRef[Any], endpoint: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        """Send a call and return the items that its endpoint yields."""


class Endpoint(Generic[P, R_co]):
    """One endpoint of one actor, from the view of its callers."""

    __slots__ = ("_messenger", "_name", "_ref")

    def __init__(self, messenger: Messenger, ref: ActorRef[Any], name: str) -> None:
        self._messenger = messenger
        self._ref = ref
        self._name = name

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R_co]:
        """Ask: send the call when awaited, and return the result.  Arrays are lent until then: do not modify them.

        Cancelling takes effect here at once and then cancels the endpoint there.

        Raises ``UsageError`` if the call is wrong (no such actor or endpoint, arguments that do not match),
        ``RemoteError`` if the endpoint raised, ``PeerCancelled`` if the actor was stopped first, and ``PeerLost`` if
        its rank is gone.
        """
        return self._messenger.ask(self._ref, self._name, args, kwargs)

    def tell(self, *args: P.args, **kwargs: P.kwargs) -> Told:
        """Send the call now and do not wait for its result; the returned object may be awaited, but need not.

        Messages of one rank to one actor are handled in the order in which they were sent, at most once.  If the
        endpoint raises, the actor fails.  A message that no actor handles is a dead letter (``Node.dead_letters``).

        Raises ``UsageError`` if the arguments cannot be sent or far too many messages wait, ``PeerLost`` if the rank is
        known to be gone.
        """
        return self._messenger.tell(self._ref, self._name, args, kwargs)

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[R_co, None]:
        """Send the call when iteration begins, and iterate over the items of the endpoint, an async generator.

        The generator is at most a window of items ahead of the loop.  Leaving the loop early ends it; if the iterator
        is kept in a variable, closing or dropping it does (``contextlib.aclosing`` is made for this).  Raises like an
        ask.
        """
        return self._messenger.stream(self._ref, self._name, args, kwargs)

    def __repr__(self) -> str:
        return f"<endpoint {self._name} of {self._ref!r}>"


class StreamingEndpoint(Endpoint[P, R_co]):
    """An endpoint that is an async generator, from the view of type checkers.

    ``async for item in ref.items.stream(5)``; on ``self`` it is the plain async generator function.
    """

    __slots__ = ()

    @abstractmethod
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[R_co]:  # type: ignore[override]
        """Return the generator itself; only on ``self``."""


class ActorRef(Generic[A]):
    """Reference to the actor ``name`` on ``rank``; every other public attribute is an endpoint.

    ``await ref.add(3)`` asks, ``ref.add.tell(3)`` tells, ``async for item in ref.items.stream(3)`` streams.  Where
    ``actor_class`` is known, type checkers see a reference as an instance of that class, wrong calls are refused before
    they are sent, and results are typed.  Where it is None, only the name is known: endpoint names are checked only by
    the actor's rank, and results are untyped: dataclasses become dicts, while enum members and other types of an
    application's own are refused by name.
    """

    __slots__ = ("_messenger", "actor_class", "class_name", "name", "rank")

    def __init__(
        self, messenger: Messenger, *, name: str, rank: int, actor_class: type[A] | None = None, class_name: str = ""
    ) -> None:
        self._messenger = messenger
        self.name = name
        self.rank = rank
        self.actor_class = actor_class
        self.class_name = class_name if actor_class is None else actor_class.__qualname__

    def __getattr__(self, name: str) -> Endpoint[..., Any]:
        if name.startswith("_"):
            raise NoSuchEndpoint(f"{name}: private names of an actor cannot be called from outside")
        if self.actor_class is not None and name not in getattr(self.actor_class, "endpoints", ()):
            raise NoSuchEndpoint(f"{name}: {self.class_name} has no endpoint of this name; {self._hint(name)}")
        return Endpoint(self._messenger, self, name)

    def _hint(self, name: str) -> str:
        if callable(getattr(self.actor_class, name, None)):
            return "it is a method, but not marked with @endpoint"
        return f"it has {', '.join(sorted(getattr(self.actor_class, 'endpoints', ()))) or 'none'}"

    def __dir__(self) -> Iterable[str]:
        """Return attributes and endpoints, for completion in shells."""
        return [*super().__dir__(), *getattr(self.actor_class, "endpoints", ())]

    def __copy__(self) -> ActorRef[A]:
        return self

    def __deepcopy__(self, memo: object) -> ActorRef[A]:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be pickled; send it to an actor, or give node.ref() its name and rank")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorRef) and (self.rank, self.name) == (other.rank, other.name)

    def __hash__(self) -> int:
        return hash((self.rank, self.name))

    def __repr__(self) -> str:
        return f"<{self.class_name or 'actor'} {self.name!r} on rank {self.rank}>"

    def _repr_html_(self) -> str:
        """Return the same for notebooks, with the endpoints."""
        endpoints = ", ".join(sorted(getattr(self.actor_class, "endpoints", ()))) or "unknown here"
        rows = [(self.class_name or "actor", self.name), ("rank", str(self.rank)), ("endpoints", endpoints)]
        return html_table(rows)


def _mistaken(value: object) -> str | None:
    """Describe ``value``, if it is something that people send in place of a reference."""
    if isinstance(value, Endpoint):
        return "an endpoint"
    kind = value if isinstance(value, type) else type(value)
    if not isinstance(getattr(kind, "endpoints", None), frozenset):
        return None
    return f"the class {type_name(kind)}" if kind is value else f"an actor itself ({type_name(kind)})"


class RefExtension(Extension):
    """Lets references travel in payloads; they arrive bound to the receiver's ``messenger``."""

    def __init__(self, messenger: Messenger, *, world_size: int) -> None:
        self._messenger = messenger
        self._world_size = world_size
        self._decoder = msgspec.msgpack.Decoder(tuple[int, str, str])

    def encode(self, value: object) -> Ext | None:
        if not isinstance(value, ActorRef):
            mistaken = _mistaken(value)
            if mistaken is not None:
                raise UsageError(
                    f"{mistaken} cannot be sent; send the actor's reference: what spawn returned, or self.ref"
                )
            return None
        if value._messenger.is_closed:
            raise UsageError(
                f"{value!r} is of a world that is over: its rank may be another's now; get a new reference"
            )
        return Ext(_REFERENCE, msgspec.msgpack.encode((value.rank, value.name, value.class_name)))

    def decode(self, code: int, content: memoryview) -> object:
        if code == STREAM:
            raise ProtocolError("expected a plain value, got a stream")
        if code != _REFERENCE:
            raise ProtocolError(f"payload: extension type {code} is not known here")
        try:
            rank, name, class_name = self._decoder.decode(content)
        except ValueError as error:
            raise ProtocolError(f"actor reference: {error}") from error
        if not 0 <= rank < self._world_size:
            raise ProtocolError(f"actor reference: expected a rank of 0..{self._world_size - 1}, got {rank}")
        return ActorRef[Any](self._messenger, name=name, rank=rank, class_name=class_name)

    def convert(self, wanted: Any, value: object) -> object:
        kind = get_origin(wanted) or wanted
        if isinstance(value, ActorRef) and hasattr(kind, "endpoints"):  # an actor's class stands for references to it
            return ActorRef(self._messenger, name=value.name, rank=value.rank, actor_class=kind)
        if not isinstance(kind, type) or not isinstance(value, kind):
            raise TypeError(f"Expected `{type_name(wanted)}`, got `{type_name(type(value))}`")
        if isinstance(value, ActorRef):
            for actor_class in get_args(wanted):
                if hasattr(actor_class, "endpoints"):
                    return ActorRef(self._messenger, name=value.name, rank=value.rank, actor_class=actor_class)
        return value
