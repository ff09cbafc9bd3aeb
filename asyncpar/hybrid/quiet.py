"""Computing without warnings of what is found out anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import numpy as np

from asyncpar.parallel.worker import ComputeWorker

T = TypeVar("T")
Args = TypeVarTuple("Args")


class QuietWorker(ComputeWorker):
    """Numbers that overflow or make no sense raise no warnings: all ranks hear of them when they look at the norm."""

    async def run(self, function: Callable[[*Args], T], *args: *Args) -> T:
        return await super().run(_quietly, function, args)


def _quietly(function: Callable[[*Args], T], args: tuple[*Args]) -> T:
    with np.errstate(over="ignore", invalid="ignore"):
        return function(*args)
