"""Operations on arrays of other libraries in the host's memory: run on numpy's view, with results of the caller's kind.

An operation that is in place leaves its result in ``x`` and returns it, or returns a new array where ``x`` never
changes: a JAX array, a column, a read-only buffer.
"""

from __future__ import annotations

from collections.abc import Coroutine
from functools import partial
from typing import Any

import numpy as np

from asyncpar.collectives.arrays import Array, check_array
from asyncpar.collectives.call import ConvertedCall
from asyncpar.collectives.engine import Engine
from asyncpar.core.foreign_arrays import ForeignArray, foreign_array, is_foreign

_IN_PLACE = frozenset({"all_reduce", "broadcast"})
_ELEMENTWISE = frozenset({"all_reduce", "broadcast", "reduce"})


def start(
    engine: Engine, operations: object, name: str, x: object, *arguments: object, key: str | None, **options: Any
) -> Coroutine[Any, Any, Any]:
    """Start operation ``name`` of ``operations``, a part of the communicator of ``engine``, on ``x``.

    ``x`` is a foreign array; None where only ``out`` is one (``scatter``).
    """
    given = options.get("out")
    try:
        source = foreign_array(given if x is None else x, "out" if x is None else "x")
        view = check_array(source.view, "out" if x is None else "x")
    except Exception as error:
        engine.refuse(name, error, key)
        raise
    if given is x and name in _IN_PLACE and view.flags.writeable:
        options["out"] = given = None
    returned = given
    if x is None:
        options["out"] = view
    if name in _IN_PLACE and given is None:
        if view.flags.writeable:
            returned = x
        elif name == "broadcast":
            view = np.array(view)
        else:
            options["out"] = engine.table.links.memory.empty(view.shape, view.dtype)
    call = getattr(operations, name)(None if x is None else view, *arguments, key=key, **options)
    return ConvertedCall(call, partial(_converted, source, returned, name in _ELEMENTWISE))


def _converted(source: ForeignArray, returned: object, is_elementwise: bool, result: Any) -> Any:
    """Return ``result`` of numpy as the caller gets it: ``returned``, unless that is None."""
    match result:
        case None:
            return None
        case (rows, counts):
            return _converted(source, returned, is_elementwise, rows), counts
    return source.like(result, is_elementwise=is_elementwise) if returned is None else returned


def start_many(
    engine: Engine, operations: Any, arrays: list[Any], *, key: str | None, **options: Any
) -> Coroutine[Any, Any, list[Any]]:
    """Start ``all_reduce_many`` on arrays some of which are foreign."""
    views: list[Array] = []
    kinds: list[ForeignArray | None] = []
    try:
        for place, array in enumerate(arrays):
            kind = foreign_array(array, f"arrays[{place}]") if is_foreign(array) else None
            view = check_array(array if kind is None else kind.view, f"arrays[{place}]")
            is_fixed = kind is not None and not view.flags.writeable
            views.append(np.array(view) if is_fixed else view)
            kinds.append(kind if is_fixed else None)
    except Exception as error:
        engine.refuse("all_reduce_many", error, key)
        raise

    def convert(results: list[Array]) -> list[Any]:
        return [
            array if kind is None else kind.like(result, is_elementwise=True)
            for array, kind, result in zip(arrays, kinds, results, strict=True)
        ]

    return ConvertedCall(operations.all_reduce_many(views, key=key, **options), convert)
