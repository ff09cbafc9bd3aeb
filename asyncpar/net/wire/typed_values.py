"""Values of types that msgpack does not have, such as tuples, sets and dates: their encoding, which keeps types.

In a payload such a value is a code for its type and a content, which is plain data or holds typed values again.  Types
defined by an application (enumerations, named tuples, its own kinds of lists) have the code ``DECLARED``: their content
is the name of the type and the plain value.  Received data never selects the class to use, so only a receiver that
declares a type can restore such a value; all others refuse it by name.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import operator
import pathlib
import uuid
import zoneinfo
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from copy import copy as copy_of
from decimal import Decimal
from types import NoneType
from typing import Any, Final

import msgspec
import numpy as np

from asyncpar.errors import ProtocolError, UsageError
from asyncpar.net.wire.array import SCALARS, find_dtype, type_name

DECLARED: Final = 0
FIELDS: Final = -1
"""Not a code in payloads: queries whether a dataclass or struct, which has no mark there, may be sent."""
SCALAR: Final = 19
"""The code of a numpy scalar; it is separate, because places declared as numbers get its number."""


class CannotKeep(UsageError):  # noqa: N818
    """A value cannot be sent without becoming another; the message begins with a description of it."""


Wrap = Callable[[int, object], object]
"""Returns the representation in a payload of a type's code and a content."""

UNCHANGED: Final = frozenset({NoneType, bool, int, float, str, bytes, np.ndarray})
"""Types whose values arrive unchanged."""
_CONTAINERS: Final = (list, dict, tuple, set, frozenset)
_NESTING: Final = frozenset({list, dict})
_UNCHANGED_OR_NESTING: Final = UNCHANGED | _NESTING
_DEEPEST: Final = 32
_MOST_LOOKED_AT: Final = 1 << 20
"""Values with more parts are examined part by part, so that lists that contain themselves end as they always do."""
_KEYS: Final = frozenset({NoneType, bool, int, float, str, bytes})
_MICROSECOND: Final = datetime.timedelta(microseconds=1)


def keep_types(value: object, wrap: Wrap) -> object:
    """Return ``value`` with each part that msgpack would turn into another type replaced by the result of ``wrap``.

    Values that are neither plain data nor known here, such as arrays, stay.  Raises ``CannotKeep`` for values whose
    content would be lost in part.
    """
    kind = type(value)
    if kind in UNCHANGED or (kind in _NESTING and _is_unchanged(value)):
        return value
    return _keep(value, wrap)


def _keep(value: object, wrap: Wrap) -> object:
    """Do the work of ``keep_types`` part by part."""
    kind = type(value)
    if kind in UNCHANGED:
        return value
    known = _LOWER.get(kind)
    if known is not None:
        return known(value, wrap)
    if isinstance(value, enum.Enum):
        return wrap(DECLARED, [type_name(kind), _value_of(value)])
    for base in _CONTAINERS:
        if isinstance(value, base):
            return wrap(DECLARED, [type_name(kind), _keep(base(value), wrap)])
    if isinstance(value, np.ndarray) and kind is not np.memmap:
        raise CannotKeep(
            f"an array of type {type_name(kind)} cannot be sent, it would become a numpy.ndarray; send numpy.asarray "
            f"of it{' and its mask' if kind.__name__ == 'MaskedArray' else ''}"
        )
    if isinstance(value, msgspec.Struct):
        wrap(FIELDS, [type_name(kind)])
        return _keep_fields(value, value.__struct_fields__, wrap)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        wrap(FIELDS, [type_name(kind)])
        return _keep_fields(value, [field.name for field in dataclasses.fields(value)], wrap)
    return value


def parts_of(value: object) -> Iterable[tuple[str, object]]:
    """Return the parts of ``value``, each with its accessor: ``[0]``, ``['key']`` or ``.field``."""
    if isinstance(value, dict):
        return [(f"[{key!r:.40}]", item) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, msgspec.Struct):
        return [(f".{name}", getattr(value, name, None)) for name in value.__struct_fields__]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{field.name}", getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return []


def find_place(value: object, refusal: Callable[[object], str]) -> tuple[str, str]:
    """Return the path to the innermost refused part of ``value``, such as ``['a'][1]``, and its refusal.

    Empty for ``value`` itself, and for values that are too deep, such as those that contain themselves.
    """
    place = why = ""
    for _ in range(_DEEPEST):
        found = next(((step, part, reason) for step, part in parts_of(value) if (reason := refusal(part))), None)
        if found is None:
            return place, why
        step, value, why = found
        place += step
    return "", ""


def restore(code: int, content: Any) -> object:
    """Return the value from which ``keep_types`` made this, except for ``DECLARED`` ones.

    Raises ``ProtocolError`` for anything that it does not make, and ``UsageError`` for an unknown time zone.
    """
    make = _RESTORE.get(code)
    if make is None:
        raise ProtocolError(f"payload: the code {code} of a type is not known here")
    try:
        return make(content)
    except (zoneinfo.ZoneInfoNotFoundError, OSError) as error:
        raise UsageError(f"a time zone cannot be used here: {error}") from error
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise ProtocolError(f"payload: not the content of a value with type code {code}: {error}") from error


def sequence_in(encoded: memoryview) -> memoryview | None:
    """Return the encoded list from which the encoded value with a type is made; None if it is no such value."""
    return encoded[2:] if bytes(encoded[:2]) in _SEQUENCES else None


class Declared:
    """A mixin for a plain value that stands for one of the type ``declared_name``, which its receiver must declare."""

    declared_name: str


def restore_declared(content: Any) -> tuple[str, Any]:
    """Return the name of the type and the plain value.  Raises ``ProtocolError`` for any other content."""
    if type(content) is not list or len(content) != 2 or type(content[0]) is not str:
        raise ProtocolError("payload: a value of a declared type has a name and a plain value")
    if type(content[1]) not in _DECLARED:
        raise ProtocolError(f"payload: {type_name(type(content[1]))} is no plain form of a declared type")
    return content[0], content[1]


def mark_declared(name: str, value: Any) -> Any:
    """Return ``value`` as an object of its type that is ``Declared`` as ``name``."""
    result = _DECLARED[type(value)](value)
    result.declared_name = name
    return result


def find_declared(value: object) -> Declared | None:
    """Return a ``Declared`` value inside ``value``, None if there is none."""
    if isinstance(value, Declared):
        return value
    inner: Iterable[object] = ()
    if isinstance(value, dict):
        inner = [*value, *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        inner = value
    elif isinstance(value, msgspec.Struct):
        inner = [getattr(value, name, None) for name in value.__struct_fields__]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return next((found for item in inner if (found := find_declared(item)) is not None), None)


def has_any(kind: Any) -> bool:
    """Return whether a value of the type ``kind`` may hold values of any type."""
    return _has_any(msgspec.inspect.type_info(kind), set())


def _has_any(info: Any, seen: set[Any]) -> bool:
    if isinstance(info, msgspec.inspect.AnyType | msgspec.inspect.CustomType):  # such as ``object`` and ``Hashable``
        return True
    if isinstance(info, list | tuple):
        return any(_has_any(item, seen) for item in info)
    if not isinstance(info, msgspec.inspect.Type | msgspec.inspect.Field):
        return False
    cls = getattr(info, "cls", None)
    if cls is not None and cls in seen:
        return False
    seen.add(cls)
    return any(_has_any(getattr(info, name), seen) for name in info.__struct_fields__)


# -- to a payload ------------------------------------------------------------------------------------------------------


def _is_unchanged(value: Any) -> bool:
    """Return whether ``value``, a list or dict, is plain data at all depths; False if it is too deep or large.

    A whole level of nesting is examined at once, which takes a fraction of the time of a call per list and dict.
    """
    level = value if type(value) is list else [*value.values()]
    if level is not value and not _are_all(value, _KEYS):
        return False
    looked_at = 0
    for _ in range(_DEEPEST):
        types = [*map(type, level)]
        if not types or (types[0] in UNCHANGED and types.count(types[0]) == len(types)):  # quicker than a set
            return True
        kinds = set(types)
        if kinds <= UNCHANGED:
            return True
        looked_at += len(types)
        if looked_at > _MOST_LOOKED_AT or not kinds <= _UNCHANGED_OR_NESTING:
            return False
        inner: list[Any] = []
        for part, kind in zip(level, types, strict=True):
            if kind is list:
                inner += part
            elif kind is dict:
                if not _are_all(part, _KEYS):
                    return False
                inner += part.values()
        level = inner
    return False


def _are_all(values: Collection[object], kinds: frozenset[type]) -> bool:
    return kinds.issuperset(map(type, values))


def _keep_list(value: Any, wrap: Wrap) -> object:
    if _are_all(value, UNCHANGED):
        return value
    kept = [_keep(item, wrap) for item in value]
    return kept if any(map(operator.is_not, kept, value)) else value


def _keep_tuple(value: Any, wrap: Wrap) -> object:
    return wrap(_CODES[tuple], value if _are_all(value, UNCHANGED) else _keep(list(value), wrap))


def _keep_dict(value: Any, wrap: Wrap) -> object:
    if not _are_all(value, _KEYS):
        return wrap(_CODES[dict], _keep_list([list(pair) for pair in value.items()], wrap))
    kept = {key: _keep(item, wrap) for key, item in value.items()}
    return kept if any(map(operator.is_not, kept.values(), value.values())) else value


def _keep_fields(value: Any, names: Iterable[str], wrap: Wrap) -> object:
    """Return a dataclass or struct with such fields: itself, or a copy of which only the fields are valid."""
    fields = {name: getattr(value, name) for name in names}
    kept = {name: _keep(item, wrap) for name, item in fields.items()}
    if not any(map(operator.is_not, kept.values(), fields.values())):
        return value
    if isinstance(value, msgspec.Struct):
        copy, put = copy_of(value), msgspec.structs.force_setattr
    else:
        copy, put = object.__new__(type(value)), object.__setattr__
    for name, item in kept.items():
        put(copy, name, item)
    return copy


def _value_of(member: enum.Enum) -> int | str:
    value = int(member) if isinstance(member, int) else member.value
    if type(value) not in (int, str):
        raise CannotKeep(
            f"a member of {type_name(type(member))} cannot be sent: its value is of type {type_name(type(value))}, "
            "expected int or str; send its name"
        )
    result: int | str = value
    return result


def _bytes_of(view: memoryview) -> bytes:
    if view.format != "B" or view.ndim != 1:
        raise CannotKeep(
            f"a memoryview of {view.ndim} dimensions and format {view.format!r} cannot be sent; send numpy.asarray(it)"
        )
    return view.tobytes()


def _moment(value: datetime.datetime | datetime.time) -> list[object]:
    return [value.replace(tzinfo=None, fold=0).isoformat(), value.fold, _zone(value.tzinfo)]


def _zone(zone: datetime.tzinfo | None) -> object:
    if zone is None:
        return None
    if type(zone) is datetime.timezone:
        offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]  # absent from the stubs
        return [offset // _MICROSECOND, *name]
    if type(zone) is zoneinfo.ZoneInfo and zone.key:
        return zone.key
    raise CannotKeep(
        f"a time zone of type {type_name(type(zone))} cannot be sent; expected datetime.timezone or zoneinfo.ZoneInfo"
    )


# -- from a payload ----------------------------------------------------------------------------------------------------


def _read(kind: Any, content: Any) -> Any:
    if type(content) is not kind:
        raise TypeError(f"expected {type_name(kind)}, got {type_name(type(content))}")
    return content


def _read_list(content: Any) -> list[Any]:
    items: list[Any] = _read(list, content)
    return items


def _read_pairs(content: Any) -> list[tuple[Any, Any]]:
    return [(key, value) for key, value in _read_list(content)]


def _read_moment(kind: Any) -> Callable[[Any], object]:
    def read(content: Any) -> object:
        text, fold, zone = _read_list(content)
        return kind.fromisoformat(text).replace(fold=fold, tzinfo=_read_zone(zone))

    return read


def _read_zone(zone: Any) -> datetime.tzinfo | None:
    if zone is None:
        return None
    if isinstance(zone, str):
        return zoneinfo.ZoneInfo(zone)
    offset, *name = _read_list(zone)
    if name == [] and offset == 0:
        return datetime.UTC
    return datetime.timezone(offset * _MICROSECOND, *name)


def _read_complex(content: Any) -> complex:
    real, imag = _read_list(content)
    return complex(_read(float, real), _read(float, imag))


def _read_counter(content: Any) -> Counter[Any]:
    return Counter(dict(_read_pairs(content)))


def _lower_scalar(value: Any, wrap: Wrap) -> object:
    return wrap(SCALAR, [value.dtype.name, value.tobytes()])


def restore_scalar(content: Any) -> Any:
    """Return the numpy scalar.  Raises ``ProtocolError`` for any other content."""
    if type(content) is list and len(content) == 2 and type(content[0]) is str and type(content[1]) is bytes:
        dtype = find_dtype(content[0])
        if dtype is not None and dtype.itemsize == len(content[1]):
            return np.frombuffer(content[1], dtype)[0]
    raise ProtocolError("payload: a scalar of numpy has the name of a dtype and as many bytes")


def _read_deque(content: Any) -> deque[Any]:
    items, most = _read_list(content)
    return deque(_read_list(items), most if most is None else _read(int, most))


_TYPES: Final[dict[type, tuple[int, Callable[[Any], object], Callable[[Any], object]]]] = {
    tuple: (1, list, lambda content: tuple(_read_list(content))),
    set: (2, list, lambda content: set(_read_list(content))),
    frozenset: (3, list, lambda content: frozenset(_read_list(content))),
    dict: (4, lambda value: [list(pair) for pair in value.items()], lambda content: dict(_read_pairs(content))),
    OrderedDict: (5, lambda value: [list(pair) for pair in value.items()], lambda c: OrderedDict(_read_pairs(c))),
    Counter: (6, lambda value: [list(pair) for pair in value.items()], _read_counter),
    datetime.datetime: (7, _moment, _read_moment(datetime.datetime)),
    datetime.date: (8, datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: (9, _moment, _read_moment(datetime.time)),
    datetime.timedelta: (
        10,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda content: datetime.timedelta(*_read_list(content)),
    ),
    Decimal: (11, str, lambda content: Decimal(_read(str, content))),
    uuid.UUID: (12, lambda value: value.bytes, lambda content: uuid.UUID(bytes=_read(bytes, content))),
    bytearray: (13, bytes, lambda content: bytearray(_read(bytes, content))),
    memoryview: (14, _bytes_of, lambda content: memoryview(_read(bytes, content))),
    complex: (15, lambda value: [value.real, value.imag], _read_complex),
    range: (16, lambda value: [value.start, value.stop, value.step], lambda content: range(*_read_list(content))),
    pathlib.PurePosixPath: (17, str, lambda content: pathlib.PurePosixPath(_read(str, content))),
    pathlib.PosixPath: (18, str, lambda content: pathlib.PosixPath(_read(str, content))),
    deque: (20, lambda value: [list(value), value.maxlen], _read_deque),
}
"""The closed table of types: code, to a content, from a content.  Part of the protocol: codes are never reused."""

RESTORED: Final = frozenset(_TYPES)
"""Types of values that are restored by their codes."""
_CODES: Final = {kind: code for kind, (code, _, _) in _TYPES.items()}
_RESTORE: Final = {code: make for code, _, make in _TYPES.values()}
_SEQUENCES: Final = frozenset(bytes([0x92, _CODES[kind]]) for kind in (tuple, set, frozenset))
"""Their first bytes in msgpack: lists of two, of which the first is the code."""


def _lower_known(code: int, lower: Callable[[Any], object]) -> Callable[[Any, Wrap], object]:
    return lambda value, wrap: wrap(code, _keep(lower(value), wrap))


_LOWER: Final[dict[type, Callable[[Any, Wrap], object]]] = {
    **{kind: _lower_known(code, lower) for kind, (code, lower, _) in _TYPES.items()},
    list: _keep_list,
    dict: _keep_dict,
    tuple: _keep_tuple,
    **dict.fromkeys(SCALARS, _lower_scalar),
}

_DECLARED: Final[dict[type, Any]] = {
    kind: type(f"Declared{kind.__name__}", (Declared, kind), {}) for kind in (int, str, *_CONTAINERS)
}
