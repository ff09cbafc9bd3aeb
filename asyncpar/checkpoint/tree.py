"""Plain nested values as entries of JSON and arrays by name, and back.  Pure.

An entry is a place, as the keys that lead to it, and its content: a container, an array (its dtype and shape; the
values are a tensor of the checkpoint), or a value that JSON preserves.  Containers precede their contents.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from asyncpar.checkpoint.piece import LONGEST_NAME, check_dtype, dtype_named
from asyncpar.core.not_arrays import describe_other
from asyncpar.errors import CheckpointError, UsageError
from asyncpar.parallel.local.outer import OuterState
from asyncpar.parallel.local.rounds import LocalState

Path: TypeAlias = tuple[str | int, ...]

_DEEPEST: Final = 64
_ODD_FLOATS: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, slots=True, eq=False)
class PerRank:
    """``value``, which each rank has for itself, in values that are equal on all ranks otherwise.

    It contains nested values like those around it: ``PerRank(synchronizer.state())``.  The same number of ranks get
    their own values back.  Another number of ranks gets, in each place, the value that was equal on all ranks, or, for
    floating arrays of one shape, the mean over the ranks that saved, so no gradient that error feedback still owes is
    lost.  Anything else is left out, which is logged.
    """

    value: Any


class TreeEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The content of ``path``."""

    path: Path
    kind: Literal["dict", "list", "tuple", "array", "scalar", "plain", "float", "rank"]
    dtype: str = ""
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 60)], ...], Meta(max_length=64)] = ()
    value: Any = None

    @property
    def name(self) -> str:
        """The name of the array in the checkpoint: keys joined by slashes."""
        return name_of(self.path)

    @property
    def has_array(self) -> bool:
        return self.kind in ("array", "scalar")


@dataclass(slots=True)
class Flattened:
    """Entries in order, the arrays of those that have one, and the values of ``PerRank`` by their number."""

    entries: list[TreeEntry] = field(default_factory=list)
    arrays: list[NDArray[Any]] = field(default_factory=list)
    of_rank: list[Any] = field(default_factory=list)


def name_of(path: Path) -> str:
    """Return a unique name of a path: ``layer/w``, with ``~`` and ``/`` inside of keys as ``~0`` and ``~1``.

    An empty key is ``~``.
    """
    return "/".join(f"{key}".replace("~", "~0").replace("/", "~1") or "~" for key in path)


def flatten(values: object, where: str, *, may_split: bool = True) -> Flattened:
    """Return ``values`` as entries.

    Raises ``UsageError`` naming the place of anything that would not be restored as it is.  ``PerRank`` is refused
    within itself (``may_split=False``).
    """
    flat = Flattened()
    _flatten(values, (), where, flat, may_split=may_split)
    return flat


def _flatten(value: object, path: Path, where: str, flat: Flattened, *, may_split: bool) -> None:
    if len(path) > _DEEPEST:
        raise UsageError(f"{_place(where, path)}: expected values nested at most {_DEEPEST} deep")
    match value:
        case LocalState():
            value = {"steps": value.steps, "rounds": value.rounds, "outer": value.outer} | {
                "synchronizer": PerRank(dict(value.synchronizer)) if may_split else dict(value.synchronizer)
            }
        case OuterState():
            value = {"common": dict(value.common), "momentum": dict(value.momentum)}
        case PerRank() if may_split:
            flat.entries.append(TreeEntry(path=path, kind="rank", value=len(flat.of_rank)))
            flat.of_rank.append(value.value)
            return
    if type(value) is dict:
        flat.entries.append(TreeEntry(path=path, kind="dict"))
        items: Iterator[tuple[str | int, object]] = iter(value.items())
    elif isinstance(value, list | tuple) and type(value) in (list, tuple) and not _is_plain(value):
        flat.entries.append(TreeEntry(path=path, kind="list" if isinstance(value, list) else "tuple"))
        items = iter(enumerate(value))
    else:
        flat.entries.append(_leaf(value, path, where, flat))
        return
    for key, item in items:
        if isinstance(value, dict) and type(key) is not str:
            raise UsageError(f"{_place(where, path)}: expected texts as keys, got {key!r:.80}")
        _flatten(item, (*path, key), where, flat, may_split=may_split)


def _leaf(value: Any, path: Path, where: str, flat: Flattened) -> TreeEntry:
    if type(value) in (np.ndarray, np.memmap) or isinstance(value, np.generic):
        place = _place(where, path)
        array = np.asarray(value)
        if len(name_of(path).encode()) > LONGEST_NAME:
            raise UsageError(f"{place:.80}...: expected keys of at most {LONGEST_NAME} characters together")
        flat.arrays.append(array)
        kind: Literal["array", "scalar"] = "scalar" if isinstance(value, np.generic) else "array"
        return TreeEntry(path=path, kind=kind, dtype=check_dtype(array.dtype, place), shape=array.shape)
    if type(value) is float and not math.isfinite(value):
        return TreeEntry(path=path, kind="float", value=str(value))
    if _is_plain(value):
        return TreeEntry(path=path, kind="plain", value=value)
    raise UsageError(
        f"{_place(where, path)}: expected a dict, list or tuple, an array or scalar of numpy, a number, a text, a bool "
        f"or None, got {describe_other(value, 'value')} {value!r:.80}"
    )


def _is_plain(value: object) -> bool:
    """Return whether JSON preserves ``value``."""
    if type(value) is list:
        return all(_is_plain(item) for item in value)
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


def _place(where: str, path: Path) -> str:
    return where + "".join(f"[{key!r}]" for key in path)


# -- back --------------------------------------------------------------------------------------------------------------


def decode_entries(found: object, where: object) -> list[TreeEntry]:
    """Return the entries that were read.  Raises ``CheckpointError`` naming ``where`` for invalid ones."""
    try:
        entries = msgspec.convert(found, list[TreeEntry])
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{where}: the values' description is damaged: {error}") from error
    for entry in entries:
        if entry.has_array and dtype_named(entry.dtype) is None:
            raise CheckpointError(f"{where}: {entry.name}: dtype {entry.dtype!r:.80} is unknown")
    return entries


def unflatten(
    entries: Sequence[TreeEntry], arrays: Sequence[NDArray[Any]], of_rank: Sequence[Any], where: object
) -> Any:
    """Return the values of ``entries``.  Raises ``CheckpointError`` naming ``where`` if they are inconsistent."""
    made: dict[Path, Any] = {}
    tuples: list[Path] = []
    given = iter(arrays)
    try:
        for entry in entries:
            made[entry.path] = value = _value(entry, given, of_rank)
            if entry.kind == "tuple":
                tuples.append(entry.path)
            if entry.path:
                _put(made[entry.path[:-1]], entry.path[-1], value)
        for path in reversed(tuples):  # inner ones first
            made[path] = tuple(made[path])
            if path:
                made[path[:-1]][path[-1]] = made[path]
        return made[()]
    except (KeyError, IndexError, TypeError, StopIteration) as error:
        raise CheckpointError(f"{where}: the values' description is damaged: {error!r}") from error


def _value(entry: TreeEntry, arrays: Iterator[NDArray[Any]], of_rank: Sequence[Any]) -> Any:
    match entry.kind:
        case "dict":
            return {}
        case "list" | "tuple":
            return []
        case "array":
            return next(arrays)
        case "scalar":
            return next(arrays)[()]
        case "float":
            return _ODD_FLOATS[entry.value]
        case "rank":
            return of_rank[entry.value]
    return entry.value


def _put(container: Any, key: str | int, value: Any) -> None:
    if isinstance(container, list):
        if key != len(container):
            raise IndexError(key)
        container.append(value)
    else:
        container[key] = value


# -- another number of ranks -------------------------------------------------------------------------------------------


class _Nothing:
    pass


_NOTHING: Final = _Nothing()


def merge(values: Sequence[Any], dropped: list[str]) -> Any:
    """Return one value for all ranks in place of each rank's; see ``PerRank``.

    Adds to ``dropped`` the names of places that are left out; returns None if that is everything.
    """
    merged = _merge(values, (), dropped)
    return None if merged is _NOTHING else merged


def _merge(values: Sequence[Any], path: Path, dropped: list[str]) -> Any:
    first = values[0]
    if all(type(value) is dict for value in values):
        keys = list(dict.fromkeys(key for value in values for key in value))
        merged = {}
        for key in keys:
            held = [value[key] for value in values if key in value]
            found = _merge(held, (*path, key), dropped) if len(held) == len(values) else _drop((*path, key), dropped)
            if found is not _NOTHING:
                merged[key] = found
        return merged
    if all(isinstance(value, np.ndarray | np.generic) for value in values):
        if any((value.shape, value.dtype) != (first.shape, first.dtype) for value in values):
            return _drop(path, dropped)
        if all(value.tobytes() == first.tobytes() for value in values):
            return first
        return _mean(values, first) if _is_floating(first.dtype) else _drop(path, dropped)
    if all(type(value) is type(first) for value in values):
        ours = flatten(first, "", may_split=False)
        others = [flatten(value, "", may_split=False) for value in values[1:]]
        if not ours.arrays and all(other.entries == ours.entries and not other.arrays for other in others):
            return first
    return _drop(path, dropped)


def _mean(values: Sequence[Any], first: Any) -> Any:
    total = np.zeros(first.shape, np.promote_types(first.dtype, np.float32))
    for value in values:
        total += np.asarray(value, total.dtype)
    mean = (total / len(values)).astype(first.dtype)
    return mean[()] if isinstance(first, np.generic) else mean


def _is_floating(dtype: np.dtype[Any]) -> bool:
    return bool(np.issubdtype(dtype, np.floating)) or dtype.name == "bfloat16"


def _drop(path: Path, dropped: list[str]) -> _Nothing:
    dropped.append(name_of(path) or "everything")
    return _NOTHING


def check_root(values: object, where: str) -> None:
    """Raise ``UsageError`` unless ``values`` is a dictionary."""
    if type(values) is not dict and not isinstance(values, Mapping):
        raise UsageError(f'{where}: expected a dict such as {{"w": array}}, got {type(values).__name__}')
