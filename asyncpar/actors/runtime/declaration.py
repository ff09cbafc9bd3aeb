"""Declarations in the body of an actor class: endpoint marks, hooks, mailbox policies; mistakes are refused.

Everything here runs when a class is defined, so that a mistake is shown at the line that made it.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

from asyncpar.errors import UsageError

HOOKS: Final = ("on_start", "on_stop", "on_down", "on_child_down")
_MARK: Final = "__asyncpar_endpoint__"


@dataclass(frozen=True, slots=True)
class EndpointMark:
    """Options of ``@endpoint``.  ``concurrency`` is None for an endpoint that runs alone."""

    concurrency: int | None = None

    def __post_init__(self) -> None:
        given: object = self.concurrency
        if given is not None and (not isinstance(given, int) or isinstance(given, bool) or given < 1):
            raise UsageError(f"concurrency: expected at least 1, got {given!r}")


def mark_endpoint(function: Any, mark: EndpointMark) -> Any:
    """Mark ``function`` as an endpoint, and return it.  Raises ``UsageError`` if it cannot be one."""
    if not inspect.isfunction(function):
        raise UsageError(f"endpoint: expected a method (async def or def), got {function!r}")
    if inspect.isgeneratorfunction(function):
        raise UsageError(f"endpoint: {function.__qualname__} is a plain generator; expected async def for a stream")
    first = next(iter(inspect.signature(function).parameters.values()), None)
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        raise UsageError(f"endpoint: {function.__qualname__} cannot be a method: expected self as its first parameter")
    setattr(function, _MARK, mark)
    return function


def is_endpoint(attribute: object) -> bool:
    """Whether this class attribute is marked as an endpoint."""
    return inspect.isfunction(attribute) and isinstance(getattr(attribute, _MARK, None), EndpointMark)


def endpoint_mark(function: Callable[..., Any]) -> EndpointMark:
    """Return the mark of the endpoint ``function``."""
    mark = getattr(function, _MARK)
    assert isinstance(mark, EndpointMark)
    return mark


def read_endpoints(actor_class: type[Any], reserved: Collection[str]) -> frozenset[str]:
    """Return the names of the endpoints of a class that is being defined.

    Raises ``UsageError``, naming what to change, for declarations that cannot work.
    """
    names = frozenset(name for name in dir(actor_class) if is_endpoint(inspect.getattr_static(actor_class, name)))
    title = actor_class.__qualname__
    for name in sorted(names):
        if name.startswith("_") or name in reserved:
            raise UsageError(f"endpoint: {title}.{name} cannot be one; the name is private or reserved")
    for base in actor_class.__mro__[1:]:
        for name in sorted(getattr(base, "endpoints", frozenset()) - names):
            raise UsageError(f"endpoint: {title}.{name} hides an endpoint of {base.__qualname__}; mark it")
    for name, attribute in vars(actor_class).items():
        _check_attribute(f"{title}.{name}", name, attribute)
    return names


def _check_attribute(title: str, name: str, attribute: object) -> None:
    inner = attribute.fget if isinstance(attribute, property) else getattr(attribute, "__func__", None)
    if is_endpoint(inner):
        raise UsageError(f"endpoint: expected a method (async def or def), {title} is a {type(attribute).__name__}")
    if not inspect.isfunction(attribute):
        return
    is_async = inspect.iscoroutinefunction(inspect.unwrap(attribute))
    if name in HOOKS and not is_async:
        raise UsageError(f"{name}: expected async def, {title} is none")
    if name == "__init__" and is_async:
        raise UsageError(f"__init__: expected def, {title} is async; what must be awaited belongs into on_start")


DEFAULT_LIMIT: Final = 1000


class WhenFull(enum.StrEnum):
    """Treatment of a message that finds the mailbox full."""

    WAIT = "wait"
    """It waits at its sender: asks by themselves, tells if they are awaited."""
    FAIL = "fail"
    """It is refused: an ask raises ``MailboxFull``, a tell becomes a dead letter."""
    DROP_OLDEST = "drop_oldest"
    """It takes the place of the oldest waiting message, which is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MailboxPolicy:
    """The policy of an actor class: ``mailbox = Mailbox(limit=100, when_full="drop_oldest")`` in its body.

    ``limit`` is the number of messages that may wait (default 1000); with ``wait`` there is none, since senders are
    slowed down by bytes.
    """

    limit: int | None = None
    when_full: WhenFull | str = WhenFull.WAIT

    def __post_init__(self) -> None:
        try:
            policy = WhenFull(self.when_full)
        except ValueError:
            words = ", ".join(repr(str(word)) for word in WhenFull)
            raise UsageError(f"when_full: expected one of {words}, got {self.when_full!r}") from None
        object.__setattr__(self, "when_full", policy)
        if policy is WhenFull.WAIT:
            if self.limit is not None:
                raise UsageError(
                    f"limit: expected None with when_full='wait', got {self.limit!r}: senders wait by bytes; choose "
                    "'fail' or 'drop_oldest' for a limit in messages"
                )
        elif self.limit is None:
            object.__setattr__(self, "limit", DEFAULT_LIMIT)
        elif not _is_count(self.limit):
            raise UsageError(f"limit: expected at least 1 message, got {self.limit!r}")


Mailbox = MailboxPolicy
"""The public name of the policy: ``asyncpar.Mailbox``."""


def _is_count(limit: object) -> bool:
    return isinstance(limit, int) and limit >= 1
