"""asyncpar: collectives, actors and parallel training as coroutines.

import asyncpar as ap, numpy as np

async def main():
    async with ap.init() as node:                # alone: a world of one; under `asyncpar launch`: one of many
        x = np.full(1 << 20, node.rank, np.float32)
        await node.world.all_reduce(x)           # in place, bit-identical on every rank

ap.run(main)
"""

from typing import Any

import lazy_loader

from asyncpar.core.loading import without_collection

__version__ = "0.2.0"

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """Import ``name`` on first use: torch imports this package to discover its backend, see ``torch``."""
    with without_collection():
        return _load(name)
