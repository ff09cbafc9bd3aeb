"""What users write: actor classes and their endpoints."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Final, TypeVar, overload

from asyncpar.errors import UsageError
from asyncpar.runtime.ref import ActorRef

F = TypeVar("F", bound=Callable[..., Any])

_MARK: Final = "__asyncpar_endpoint__"
RESERVED: Final = frozenset(
    {"on_start", "on_stop", "ref", *(name for name in dir(ActorRef) if not name.startswith("_"))}
)
"""Names that an endpoint cannot have."""


class Actor:
    """Base of actor classes: state that one task guards and others reach by messages.

    Endpoints of one actor run one at a time, in the order in which their messages arrived, all on the node's event
    loop (a plain ``def`` endpoint in the actor's own thread, while nothing else of the actor runs).  So an actor needs
    no locks.  The constructor runs on the loop, too; what must be awaited belongs into ``on_start``.
    """

    _reference: ActorRef[Any] | None = None
    endpoints: ClassVar[frozenset[str]] = frozenset()
    """The names of the methods that others may call."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        names = frozenset(name for name in dir(cls) if is_endpoint(inspect.getattr_static(cls, name)))
        for name in sorted(names):
            if name.startswith("_") or name in RESERVED:
                raise UsageError(f"endpoint: {cls.__qualname__}.{name} cannot be one; the name is private or reserved")
        for base in cls.__mro__[1:]:
            for name in sorted(getattr(base, "endpoints", frozenset()) - names):
                raise UsageError(
                    f"endpoint: {cls.__qualname__}.{name} hides an endpoint of {base.__qualname__}; mark it"
                )
        cls.endpoints = names

    async def on_start(self) -> None:
        """Runs before the first message.  If it raises, ``spawn`` raises that."""

    async def on_stop(self) -> None:
        """Runs after the last message, if ``on_start`` had succeeded."""

    @property
    def ref(self) -> ActorRef[Any]:
        """The reference to this actor, to be handed to others.  There is none before ``on_start``."""
        if self._reference is None:
            raise UsageError(f"ref: {type(self).__qualname__} was not spawned yet; use it from on_start on")
        return self._reference


@overload
def endpoint(function: F, /) -> F: ...
@overload
def endpoint() -> Callable[[F], F]: ...
def endpoint(function: F | None = None, /) -> F | Callable[[F], F]:
    """Mark a method of an actor as one that others may call: ``@endpoint`` or ``@endpoint()``.

    The method stays as it is: called on ``self`` it is a plain method.  Arguments from others are checked against its
    annotations.

    Raises ``UsageError`` for what cannot be an endpoint.
    """
    if function is None:
        return endpoint
    if not inspect.isfunction(function):
        raise UsageError(f"endpoint: expected a method (async def or def), got {function!r}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UsageError(f"endpoint: {function.__qualname__} is a generator; expected async def or def without yield")
    setattr(function, _MARK, True)
    return function


def is_endpoint(attribute: object) -> bool:
    """Is this class attribute marked as an endpoint?"""
    return inspect.isfunction(attribute) and getattr(attribute, _MARK, False) is True
