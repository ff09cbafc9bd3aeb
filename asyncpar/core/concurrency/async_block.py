"""Objects opened by an ``async with`` block, and their errors where the block was forgotten."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import wraps
from types import TracebackType
from typing import NoReturn, ParamSpec, TypeVar

from asyncpar.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")


def opened_by(write: str) -> Callable[[Callable[P, AsyncIterator[T]]], Callable[P, AbstractAsyncContextManager[T]]]:
    """Turn a function that yields once into one to be called in the first line of an ``async with`` block.

    Like ``contextlib.asynccontextmanager``, but where the block was forgotten, errors say to ``write`` it.
    """

    def decorate(function: Callable[P, AsyncIterator[T]]) -> Callable[P, AbstractAsyncContextManager[T]]:
        opened = asynccontextmanager(function)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> AbstractAsyncContextManager[T]:
            return AsyncBlock(opened(*args, **kwargs), function.__name__, write)

        return call

    return decorate


class AsyncBlock(AbstractAsyncContextManager[T]):
    """A wrapper of ``block``, to be opened by ``async with``.  Any other use is refused with the line to write."""

    def __init__(self, block: AbstractAsyncContextManager[T], called: str, write: str) -> None:
        self._block = block
        self._advice = f"{called}() is opened by a block: write `{write}`"

    async def __aenter__(self) -> T:
        return await self._block.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._block.__aexit__(kind, error, traceback)

    def __repr__(self) -> str:
        """Return the advice, for a prompt where the block was forgotten."""
        return f"<{self._advice}>"

    def __getattr__(self, name: str) -> NoReturn:
        """Raise ``AttributeError``: attributes belong to the value that the block gives."""
        raise AttributeError(name if name.startswith("_") else f"{name}: {self._advice}")

    def __enter__(self) -> NoReturn:
        raise UsageError(self._advice)

    def __exit__(self, *_: object) -> None: ...

    def __await__(self) -> Generator[None, None, NoReturn]:
        raise UsageError(self._advice)
