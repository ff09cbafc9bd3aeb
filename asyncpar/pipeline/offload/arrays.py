"""The arrays in what a layer has saved, and the memory that they take.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]


def arrays_in(value: object) -> Iterator[Array]:
    """Yield every array in ``value``, each once: in tuples, lists, dicts, dataclasses, partials and closures.

    Other objects are not looked into.
    """
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, np.ndarray):
            yield one
        else:
            waiting.extend(parts_of(one))


def parts_of(value: object) -> Iterable[object]:
    """Return what is directly in a container, () for anything else."""
    if isinstance(value, (tuple, list)):
        return value
    if isinstance(value, Mapping):
        return value.values()
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)]
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return (*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    return ()


def owner_of(array: Array) -> Array:
    """Return the array whose memory ``array`` is a view of: itself, if it is none."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def bytes_of(value: object) -> int:
    """Return the bytes of memory that the arrays in ``value`` keep alive, shared memory counted once."""
    return sum({id(owner): owner.nbytes for owner in map(owner_of, arrays_in(value))}.values())


class ByteLedger:
    """Counts the memory of values that are held, each piece once however many of them share it."""

    def __init__(self) -> None:
        self._uses: Counter[int] = Counter()
        self.current = 0
        self.peak = 0

    def add(self, owners: Iterable[Array]) -> None:
        """Count ``owners``, all different; they must stay alive until they are removed."""
        for owner in owners:
            if not self._uses[id(owner)]:
                self.current += owner.nbytes
            self._uses[id(owner)] += 1
        self.peak = max(self.peak, self.current)

    def remove(self, owners: Iterable[Array]) -> None:
        """Count ``owners``, which were added once more than removed, no more."""
        for owner in owners:
            self._uses[id(owner)] -= 1
            if not self._uses[id(owner)]:
                del self._uses[id(owner)]
                self.current -= owner.nbytes

    def start_anew(self) -> None:
        """Let the peak begin at what is held now."""
        self.peak = self.current


def owners_in(value: object) -> tuple[Array, ...]:
    """Return the memory that the arrays in ``value`` are views of, each piece once."""
    return tuple({id(owner): owner for owner in map(owner_of, arrays_in(value))}.values())


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
