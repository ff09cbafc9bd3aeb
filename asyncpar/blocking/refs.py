"""References to actors for blocking programs."""

from __future__ import annotations

from typing import Any, TypeVar

from asyncpar.actors.runtime import ref
from asyncpar.blocking.items import Items
from asyncpar.blocking.node_handle import NodeHandle, check_timeout
from asyncpar.blocking.pending import Pending

A = TypeVar("A")


class Ref(ref.ActorRef[A]):
    """Reference to the actor ``name`` on ``rank``; every other public attribute is an endpoint.

    ``ref.add(3)`` asks and waits for the answer, ``ref.add.tell(3)`` tells, ``for item in ref.items.stream(3)``
    streams; ``ref.add.start(3)`` asks without waiting.  It may be sent to actors like any reference.
    """

    __slots__ = ("_handle",)

    def __init__(self, handle: NodeHandle, target: ref.ActorRef[A]) -> None:
        super().__init__(
            target._messenger,
            name=target.name,
            rank=target.rank,
            actor_class=target.actor_class,
            class_name=target.class_name,
        )
        self._handle = handle

    def __getattr__(self, name: str) -> Endpoint:  # type: ignore[override]
        return Endpoint(self._handle, super().__getattr__(name))


class Endpoint:
    """One endpoint of one actor.  A result that is a reference is returned in its blocking form."""

    __slots__ = ("_endpoint", "_handle", "_timeout")

    def __init__(self, handle: NodeHandle, endpoint: ref.Endpoint[..., Any], timeout: float | None = None) -> None:
        self._handle = handle
        self._endpoint = endpoint
        self._timeout = timeout

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Ask: send the call and return its result.  Ctrl-C and a timeout also cancel the endpoint there.

        Raises ``UsageError`` if the call is wrong, ``RemoteError`` if the endpoint raised, ``PeerCancelled`` if the
        actor was stopped first, and ``PeerLost`` if its rank is gone.
        """
        result = self._handle.wait(self._what, lambda: self._endpoint(*args, **kwargs), self._timeout)
        return blocking(self._handle, result)

    def within(self, timeout: float) -> Endpoint:
        """Return the endpoint for asks that raise ``TimeoutError`` after ``timeout`` seconds."""
        check_timeout(timeout)
        return Endpoint(self._handle, self._endpoint, timeout)

    def start(self, *args: Any, **kwargs: Any) -> Pending[Any]:
        """Ask, and return the pending result."""
        return self._handle.start(self._what, lambda: self._endpoint(*args, **kwargs))

    def tell(self, *args: Any, **kwargs: Any) -> Told:
        """Send the call now and do not wait for its result.  Messages to one actor are handled in their order.

        Raises ``UsageError`` if the arguments cannot be sent or far too many messages wait, ``PeerLost`` if the rank is
        known to be gone.
        """
        return Told(self._handle, self._handle.do(self._what, lambda: self._endpoint.tell(*args, **kwargs)))

    def stream(self, *args: Any, **kwargs: Any) -> Stream:
        """Send the call when iteration begins, and iterate over the items of the endpoint, an async generator."""
        return Stream(self._handle, f"stream of {self._endpoint!r}", lambda: self._endpoint.stream(*args, **kwargs))

    @property
    def _what(self) -> str:
        return repr(self._endpoint)

    def __repr__(self) -> str:
        return f"<blocking {repr(self._endpoint)[1:]}"


class Told:
    """A message in transit.  Waiting for it is optional; a caller that waits is slowed down by a slow actor."""

    __slots__ = ("_handle", "_told")

    def __init__(self, handle: NodeHandle, told: ref.Told) -> None:
        self._handle = handle
        self._told = told

    def wait(self, timeout: float | None = None) -> None:
        """Return when the actor's mailbox has room and the message has left; raise ``PeerLost`` if it never will."""
        self._handle.wait("tell", lambda: _awaited(self._told), timeout)


class Stream(Items[Any]):
    """The items that an endpoint yields.

    Leaving a loop over it early, closing or dropping it ends the endpoint's generator.
    """

    def _shown(self, item: Any) -> Any:
        return blocking(self._handle, item)


def blocking(handle: NodeHandle, value: Any) -> Any:
    """Return ``value`` for blocking code: a reference is replaced by its blocking form."""
    return Ref(handle, value) if type(value) is ref.ActorRef else value


async def _awaited(told: ref.Told) -> None:
    await told
