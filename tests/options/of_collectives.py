"""Effects of the options of operations that do not wait for all."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import numpy as np

from asyncpar import Deadline, Quorum
from asyncpar.collectives.communicator import Communicator
from asyncpar.testing import local_world, run_virtual
from tests.options.effects import effects


def contributors(policy: Any, **settings: Any) -> Any:
    """Return who contributes where three ranks come a second after each other."""

    async def one(communicator: Communicator) -> tuple[int, ...]:
        await asyncio.sleep(float(communicator.rank))
        result = await communicator.all_reduce(np.ones(1), until=policy(**settings))
        chosen: tuple[int, ...] = result.contributors
        return chosen

    async def main() -> list[tuple[int, ...]]:
        async with local_world(3) as nodes:
            return list(await asyncio.gather(*(one(node.world) for node in nodes)))

    return run_virtual(main())


def probe(policy: Any, **always: Any) -> Any:
    async def run(**settings: Any) -> Any:
        return await asyncio.to_thread(partial(contributors, policy, **always, **settings))

    return run


EFFECTS = [
    *effects("Quorum", probe(Quorum, fraction=0.6), wait=5.0),
    *effects("Deadline", probe(Deadline, seconds=1.5), at_least=1.0),
]
