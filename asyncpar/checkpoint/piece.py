"""The parts of named tensors that a rank saves or loads, and the dtypes that can be saved.  Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from asyncpar.core.config.slicing import TensorSlice
from asyncpar.core.not_arrays import describe_other
from asyncpar.errors import UsageError

_CODES: Final = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}


_SPECIAL: Final = {"bfloat16": np.dtype(ml_dtypes.bfloat16)}


def check_dtype(dtype: np.dtype[Any], what: str) -> str:
    """Return the name of ``dtype``.  Raises ``UsageError`` naming ``what`` if it cannot be saved."""
    if dtype.name not in _CODES or not dtype.isnative:
        raise UsageError(f"{what}: expected one of the dtypes {', '.join(_CODES)}, got {dtype!r}")
    return dtype.name


def dtype_named(name: str) -> np.dtype[Any] | None:
    """Return the dtype whose name by ``check_dtype`` is ``name``; None if there is none."""
    if name not in _CODES:
        return None
    return _SPECIAL[name] if name in _SPECIAL else np.dtype(name)


def code_of(name: str) -> str:
    """Return safetensors' name of the dtype ``name``."""
    return _CODES[name]


LONGEST_NAME: Final = 512
KIND_PATTERN: Final = "^[A-Za-z_][A-Za-z0-9_.-]{0,63}$"
_KIND = re.compile(KIND_PATTERN)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """Values of one tensor that this rank holds.

    ``name`` is the parameter's, ``kind`` is ``"value"`` or the name of an optimizer's state.  ``slice`` is the part of
    the whole tensor that belongs to this rank's layout, and ``array`` holds the values ``flat[0]`` to ``flat[1]`` of
    that part, C-flattened; its own shape does not matter.
    """

    name: str
    kind: str
    slice: TensorSlice
    flat: tuple[int, int]
    array: NDArray[Any]

    def __post_init__(self) -> None:
        label = _check(self.name, self.kind, self.slice, self.flat)
        if not isinstance(self.array, np.ndarray):
            raise UsageError(f"array: expected a numpy array for {label}, got {describe_other(self.array, 'array')}")
        check_dtype(self.array.dtype, f"array of {label}")
        if self.array.size != self.flat[1] - self.flat[0]:
            raise UsageError(
                f"array: expected the {self.flat[1] - self.flat[0]} values {self.flat[0]}..{self.flat[1]} of {label}, "
                f"got {self.array.size} in shape {self.array.shape}"
            )

    @property
    def label(self) -> str:
        return label_of(self.name, self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Requested values of one tensor; see ``Piece``."""

    name: str
    kind: str
    slice: TensorSlice
    flat: tuple[int, int]
    dtype: np.dtype[Any]
    dtype_name: str = field(init=False)

    def __post_init__(self) -> None:
        label = _check(self.name, self.kind, self.slice, self.flat)
        try:
            dtype = np.dtype(self.dtype)
        except TypeError as error:
            raise UsageError(f"dtype of {label}: expected a dtype, got {self.dtype!r}") from error
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "dtype_name", check_dtype(dtype, f"dtype of {label}"))

    @property
    def label(self) -> str:
        return label_of(self.name, self.kind)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the loaded array: that of the part if all of it is wanted, else flat."""
        return shape_of(self.slice, self.flat)


def label_of(name: str, kind: str) -> str:
    """Return the name of a tensor in messages."""
    return f'tensor "{name}" ({kind})'


def shape_of(part: TensorSlice, flat: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of the values ``flat`` of ``part``: its own if that is all of it."""
    return part.local_shape if flat == (0, math.prod(part.local_shape)) else (flat[1] - flat[0],)


def check_distinct(labels: Iterable[tuple[str, object]], argument: str) -> None:
    """Raise ``UsageError`` if two entries, each a label and an identity, are the same."""
    seen = set()
    for label, identity in labels:
        if identity in seen:
            raise UsageError(f"{argument}: expected each piece once, got {label} with the same range twice")
        seen.add(identity)


def _check(name: object, kind: object, part: object, flat: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not _is_text(name):
        raise UsageError(f"name: expected a text of 1 to {LONGEST_NAME} characters, got {name!r:.80}")
    if not isinstance(kind, str) or not _KIND.match(kind):
        raise UsageError(f'kind: expected a word like "value" or "first" for tensor "{name}", got {kind!r:.80}')
    label = label_of(name, kind)
    if not isinstance(part, TensorSlice):
        raise UsageError(f"slice: expected a TensorSlice for {label}, got {type(part).__name__}")
    size = math.prod(part.local_shape)
    if not (isinstance(flat, tuple) and len(flat) == 2 and all(type(end) is int for end in flat)):
        raise UsageError(f"flat: expected a pair of integers for {label}, got {flat!r:.80}")
    if not 0 <= flat[0] <= flat[1] <= size:
        raise UsageError(f"flat: expected a range within 0..{size} for {label}, got {flat[0]}..{flat[1]}")
    return label


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
