"""What calling an operation returns: a coroutine that notices when it is ended before it has begun."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

from asyncpar.collectives.ending import thrown

T_co = TypeVar("T_co", covariant=True)


class Call(Coroutine[Any, Any, T_co]):
    """``coroutine``, and ``ended`` called whenever somebody throws into it or closes it.

    If there is ``ended_by``, that is called when somebody throws, with the error.

    A plain coroutine never runs if it is cancelled before its first step, and the traceback of that keeps its
    arguments alive; so neither a ``finally`` nor a finalizer would learn of it in time.
    """

    __slots__ = ("_coroutine", "_ended", "_ended_by", "is_alone")

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, T_co],
        ended: Callable[[], None],
        *,
        ended_by: Callable[[BaseException | None], None] | None = None,
        is_alone: bool = False,
    ) -> None:
        self.is_alone = is_alone
        """Is it of a group of one rank, so that it waits for nothing?"""
        self._coroutine = coroutine
        self._ended = ended
        self._ended_by = ended_by

    def __await__(self) -> Generator[Any, Any, T_co]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        try:
            return self._coroutine.throw(*error)
        finally:
            if self._ended_by is None:
                self._ended()
            else:
                self._ended_by(thrown(error))

    def close(self) -> None:
        try:
            self._coroutine.close()
        finally:
            self._ended()

    def __getattr__(self, name: str) -> Any:
        """Look like the coroutine to whoever shows it: names, code, frame."""
        return getattr(self._coroutine, name)
