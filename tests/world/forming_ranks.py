"""Program of processes of test_killed_rank that are killed between the world and the arena: rank ``sys.argv[1]``.

The others stay until they are killed: one that leaves before another has reached it would be found gone, too.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import sys
from typing import Any

import numpy as np

import asyncpar as ap
from asyncpar.net.arena.formation import form_arena


async def form_or_die(**settings: Any) -> Any:
    if settings["rank"] == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    return await form_arena(**settings)


async def main() -> None:
    async with ap.init() as node:
        try:
            await node.world.all_reduce(np.ones(10))
        except ap.PeerLost as error:
            print(json.dumps({"blamed": error.rank, "message": str(error)}), flush=True)
        await asyncio.sleep(3600.0)


setattr(importlib.import_module("asyncpar.node"), "form_arena", form_or_die)  # noqa: B010 - mypy sees no such name
ap.run(main)
