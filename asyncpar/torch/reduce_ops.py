"""torch's reduce operations as ours."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from asyncpar.errors import UsageError

_Kind = dist.ReduceOp.RedOpType
_NAMES = {
    int(kind): name
    for kind, name in (
        (dist.ReduceOp.SUM, "sum"),
        (dist.ReduceOp.AVG, "mean"),
        (dist.ReduceOp.PRODUCT, "prod"),
        (dist.ReduceOp.MIN, "min"),
        (dist.ReduceOp.MAX, "max"),
        (dist.ReduceOp.BAND, "band"),
        (dist.ReduceOp.BOR, "bor"),
        (dist.ReduceOp.BXOR, "bxor"),
    )
}
"""By number: torch's enumeration is slow to hash and to compare."""


def reduce_op(options: Any) -> tuple[str, Any]:
    """Return our name of the operation that ``options`` (or an operation itself, or None: sum) asks for.

    With it comes what to multiply the inputs by first, None for nothing (``PREMUL_SUM`` has a factor).
    """
    operation = getattr(options, "reduceOp", options)
    if operation is None:
        return "sum", None
    kind = getattr(operation, "op", operation)
    if isinstance(kind, _Kind):
        name = _NAMES.get(kind.value)
        if name is not None:
            return name, None
    if kind == dist.ReduceOp.PREMUL_SUM:
        return "sum", operation.__getstate__()[1]
    raise UsageError(f"op: expected a torch.distributed.ReduceOp, got {operation!r}")
