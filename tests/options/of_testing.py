"""Effects of options of simulations."""

from __future__ import annotations

from typing import Any

from asyncpar.testing.simulation import Conditions, Fault, simulate
from tests.options.effects import effects
from tests.testing.simulation.programs import sums


def conditions(**settings: Any) -> Any:
    crash = Fault(at=0.0094, kind="crash", node=1)
    seen = [simulate(sums, size=2, conditions=Conditions(**settings), faults=faults) for faults in ((), [crash])]
    return [(result.seconds, result.events) for result in seen]


EFFECTS = [
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
