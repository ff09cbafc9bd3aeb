"""Groups split from one by color, like ``MPI_Comm_split``; their NCCL communicators are split from its own."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import numpy as np

from asyncpar.collectives.engine import Engine
from asyncpar.collectives.gathers import exchange_numbers
from asyncpar.collectives.ledger import hash64
from asyncpar.collectives.operation import Closes, Limits, Operation
from asyncpar.collectives.protocol import describe
from asyncpar.collectives.subgroups import make_engine
from asyncpar.errors import UsageError

T = TypeVar("T")


def split(
    engine: Engine, color: object, key: object, name: str | None, wrap: Callable[[Engine], T]
) -> Coroutine[Any, Any, T | None]:
    """Make one group of the ranks that pass equal colors, ordered by key and then by rank; None for color None."""
    if color is not None and (isinstance(color, bool) or not isinstance(color, int | np.integer)):
        raise UsageError(f"color: expected an integer or None, got {color!r}")
    if isinstance(key, bool) or not isinstance(key, int | np.integer):
        raise UsageError(f"key: expected an integer, got {key!r}")
    mine = [0, 0, int(key)] if color is None else [1, int(color), int(key)]
    for name_of, value in (("color", mine[1]), ("key", mine[2])):
        if not -(2**63) <= value < 2**63:
            raise UsageError(f"{name_of}: expected an integer of at most 64 bits, got {value}")

    async def body(operation: Operation) -> T | None:
        rows = (await exchange_numbers(engine, operation, [*mine, _device_epoch(engine)])).tolist()
        groups = _by_color(rows)
        devices = await _split_devices(engine, operation, rows, groups)
        if color is None:
            return None
        world_ranks = tuple(engine.ranks[rank] for rank in next(ranks for ranks in groups if engine.rank in ranks))
        number = hash64("split", engine.group.number, operation.sequence, mine[1])
        made = make_engine(engine, world_ranks, number, name, Limits(engine.group.limits.timeout))
        made.devices = devices
        return wrap(made)

    return engine.start("split", describe("split", (), "bruck"), None, body)


def _by_color(rows: list[list[int]]) -> list[list[int]]:
    """Return the ranks of each color, ordered by key and then by rank, the same list on all ranks."""
    colors = sorted({row[1] for row in rows if row[0]})
    return [
        [rank for _, rank in sorted((row[2], rank) for rank, row in enumerate(rows) if row[:2] == [1, color])]
        for color in colors
    ]


def _device_epoch(engine: Engine) -> int:
    if engine.devices is None:
        return -1
    from asyncpar.collectives.device.splitting import connected_epoch  # needed only with devices

    return connected_epoch(engine)


async def _split_devices(
    engine: Engine, operation: Operation, rows: list[list[int]], groups: list[list[int]]
) -> Closes | None:
    """Split the NCCL communicator as well, if all ranks have the same one; otherwise new ones are created on demand."""
    if rows[0][3] < 0 or any(row[3] != rows[0][3] for row in rows):
        return None
    from asyncpar.collectives.device.splitting import split_communicator  # needed only with devices

    return await split_communicator(engine, operation, groups)
