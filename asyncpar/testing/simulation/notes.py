"""Notes of simulated processes for the check of the run; they survive when a process is killed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from asyncpar.errors import UsageError
from asyncpar.testing.simulation.loop import SimulationLoop
from asyncpar.testing.simulation.process import CURRENT


@dataclass(frozen=True, slots=True)
class SimulationNote:
    """A note of ``content`` on ``node``, by its process number ``incarnation``, ``at`` a true virtual time."""

    at: float
    node: int
    incarnation: int
    content: Any


def note(content: Any) -> None:
    """Add ``content`` to the ``notes`` of this simulation's result.  Raises ``UsageError`` outside a simulation."""
    loop, process = asyncio.get_running_loop(), CURRENT.get()
    if not isinstance(loop, SimulationLoop) or process is None or process.node is None:
        raise UsageError("note: expected a call in a simulated program, got one outside of any")
    loop.notes.append(SimulationNote(loop.now, process.node, process.incarnation, content))
