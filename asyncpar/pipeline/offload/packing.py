"""Decomposition of saved values into memory blocks, and their reassembly.  Pure.

Arrays are replaced by holes in a copy of their containers; everything else stays the same object.  All views of one
piece of memory become views of one block again, so shared memory is shared afterwards.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from types import FunctionType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class _Hole:
    """The place of an array: a view into block ``block``."""

    block: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    is_writeable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """A value without its memory: ``sizes`` are the bytes of the blocks that ``fill`` needs."""

    value: object
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def fill(self, blocks: Sequence[Array]) -> Any:
        """Return the value again, with ``blocks`` (arrays of bytes) as its memory."""
        return _rebuilt(self.value, lambda leaf: _view(leaf, blocks) if isinstance(leaf, _Hole) else leaf)


def take_apart(value: object) -> tuple[Skeleton, list[Array]]:
    """Return the skeleton of ``value`` and its memory, as arrays of bytes that are views of it: nothing is copied.

    Arrays of objects, and arrays inside objects other than tuples, lists, dicts and dataclasses, stay where they are.
    """
    blocks: list[Array] = []
    places: dict[int, int] = {}

    def make_hole(leaf: object) -> object:
        if not isinstance(leaf, np.ndarray) or leaf.dtype.hasobject or type(leaf) is not np.ndarray:
            return leaf
        owner = owner_of(leaf)
        if not _is_dense(owner):
            owner = leaf = np.ascontiguousarray(leaf)
        if id(owner) not in places:
            places[id(owner)] = len(blocks)
            blocks.append(_bytes_of(owner))
        block = places[id(owner)]
        offset = leaf.ctypes.data - owner.ctypes.data
        return _Hole(block, offset, leaf.shape, leaf.strides, leaf.dtype, leaf.flags.writeable)

    skeleton = _rebuilt(value, make_hole)
    return Skeleton(value=skeleton, sizes=tuple(block.nbytes for block in blocks)), blocks


def _is_dense(owner: Array) -> bool:
    """Return whether the elements fill one range of memory, beginning with the first one."""
    expected = owner.itemsize
    for stride, length in sorted(zip(owner.strides, owner.shape, strict=True)):
        if length > 1:
            if stride != expected:
                return False
            expected *= length
    return not owner.dtype.hasobject and type(owner) is np.ndarray


def _bytes_of(owner: Array) -> Array:
    """Return the memory of a dense array in the order of addresses."""
    if owner.size == 0:
        return np.empty(0, np.uint8)
    flat = np.lib.stride_tricks.as_strided(owner, (owner.size,), (owner.itemsize,), writeable=False)
    return flat.view(np.uint8)


def _view(hole: _Hole, blocks: Sequence[Array]) -> Array:
    if 0 in hole.shape:
        return np.empty(hole.shape, hole.dtype)
    view: Array = np.ndarray(hole.shape, hole.dtype, blocks[hole.block], hole.offset, hole.strides)
    view.flags.writeable = hole.is_writeable
    return view


def _rebuilt(value: object, change: Callable[[object], object]) -> object:
    """Return ``value`` with its leaves changed; containers without changes stay the same objects."""
    return _visit(value, change, {})


def _visit(one: object, change: Callable[[object], object], known: dict[int, object]) -> object:
    """Return ``one`` after ``change``, from ``known`` if it was visited before.

    No closure refers to itself here: such a cycle would keep visited objects in memory until Python collects cycles.
    """
    if id(one) not in known:
        known[id(one)] = one  # for containers that contain themselves
        known[id(one)] = _rebuild(one, change, lambda item: _visit(item, change, known))
    return known[id(one)]


def _rebuild(one: object, change: Callable[[object], object], visit: Callable[[object], object]) -> object:
    if isinstance(one, (tuple, list)):
        items = [visit(item) for item in one]
        return one if _are_same(items, one) else _sequence_like(one, items)
    if isinstance(one, Mapping):
        values = [visit(item) for item in one.values()]
        if _are_same(values, list(one.values())) or not isinstance(one, dict):
            return one
        changed = copy.copy(one)
        changed.update(zip(one, values, strict=True))
        return changed
    if is_dataclass(one) and not isinstance(one, (type, _Hole)):
        return _rebuilt_dataclass(one, visit)
    return change(one)


def _are_same(items: Sequence[object], others: Sequence[object]) -> bool:
    return all(item is other for item, other in zip(items, others, strict=True))


def _sequence_like(one: tuple[Any, ...] | list[Any], items: list[object]) -> object:
    if isinstance(one, list):
        changed = copy.copy(one)
        changed[:] = items
        return changed
    make: Any = type(one)
    return make(*items) if hasattr(one, "_fields") else make(items)


def _rebuilt_dataclass(one: Any, visit: Callable[[object], object]) -> object:
    changes = {}
    for field in fields(one):
        if hasattr(one, field.name):
            before = getattr(one, field.name)
            after = visit(before)
            if after is not before:
                changes[field.name] = after
    if not changes:
        return one
    changed = copy.copy(one)
    for name, after in changes.items():
        object.__setattr__(changed, name, after)  # frozen ones, too
    return changed


Array: TypeAlias = NDArray[Any]


def arrays_in(value: object) -> Iterator[Array]:
    """Yield every array in ``value``, each once: in tuples, lists, dicts, dataclasses, partials and closures.

    Other objects are not searched.
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
    """Return the direct parts of a container, () for anything else."""
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
    """Return the array whose memory ``array`` is a view of: itself if it is not a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def bytes_of(value: object) -> int:
    """Return the bytes of memory that the arrays in ``value`` keep alive, shared memory counted once."""
    return sum({id(owner): owner.nbytes for owner in map(owner_of, arrays_in(value))}.values())


class ByteLedger:
    """Counts the memory of held values, each piece once however many of them share it."""

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
        """Stop counting ``owners``, each of which was added once more than removed."""
        for owner in owners:
            self._uses[id(owner)] -= 1
            if not self._uses[id(owner)]:
                del self._uses[id(owner)]
                self.current -= owner.nbytes

    def start_anew(self) -> None:
        """Restart the peak from the current figure."""
        self.peak = self.current


def owners_in(value: object) -> tuple[Array, ...]:
    """Return the arrays whose memory the arrays in ``value`` are views of, each piece once."""
    return tuple({id(owner): owner for owner in map(owner_of, arrays_in(value))}.values())


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
