"""Work on many blocks of memory by a few threads at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

S = TypeVar("S")
T = TypeVar("T")

_THREADS: Final = 2
_FEW: Final = 2


def for_each(function: Callable[[S], T], items: Sequence[S]) -> list[T]:
    """Return what ``function`` returns for each of ``items``, in order; the first error cancels the rest.

    The threads gain where the function frees the interpreter, as reading and hashing do; for a few items they are not
    worth it.
    """
    if len(items) <= _FEW:
        return [function(item) for item in items]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="asyncpar-checkpoint") as threads:
        return list(threads.map(function, items))
