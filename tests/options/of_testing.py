"""Effects of options of simulations."""

from __future__ import annotations

import asyncio
from typing import Any

from asyncpar.node import Node
from asyncpar.testing import GuardedWorld, WorldHung
from asyncpar.testing.simulation import Conditions, Fault, simulate
from tests.options.effects import effects
from tests.testing.simulation.programs import sums


def conditions(**settings: Any) -> Any:
    crash = Fault(at=0.0094, kind="crash", node=1)
    seen = [simulate(sums, size=2, conditions=Conditions(**settings), faults=faults) for faults in ((), [crash])]
    return [(result.seconds, result.events) for result in seen]


def guarded(**settings: Any) -> Any:
    """Return how a program ends that waits for ever, and whether that took virtual time."""
    loops: set[str] = set()

    async def wait(node: Node) -> None:
        loops.add(type(asyncio.get_running_loop()).__name__)
        await asyncio.Event().wait()

    try:
        GuardedWorld(1, **{"timeout": 0.2} | settings).run(wait)
    except WorldHung as error:
        return str(error).splitlines()[0], loops
    return None


EFFECTS = [
    *effects("testing.GuardedWorld", guarded, timeout=0.1, virtual=True),
    *effects(
        "testing.simulation.Conditions",
        conditions,
        latency=1e-3,
        spread=0.0,
        bandwidth=1e6,
        window=100,
        link_timeout=2.0,
    ),
]
