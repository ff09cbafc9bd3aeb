"""asyncpar: collectives, actors and parallel training as coroutines.

import asyncpar as ap, numpy as np

async def main():
    async with ap.init() as node:                # alone: a world of one; under `asyncpar launch`: one of many
        x = np.full(1 << 20, node.rank, np.float32)
        await node.world.all_reduce(x)           # in place, bit-identical on every rank

ap.run(main)
"""

import lazy_loader

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
"""Names are imported on first use: torch imports this package to discover its backend, see ``torch``."""
