"""Deterministic simulation: production code on virtual time, with seeded schedules and faults.

``simulate`` runs a program; everything above lanes and RPC is production code.  ``loop`` explains how the seed decides,
``patches`` what replaces the machine's clocks, random words and threads; ``network`` and ``lane`` are the traffic
between nodes, ``faults`` the possible faults, and ``safeguards`` shows that a simulation would find a missing one.
"""

from asyncpar.testing.simulation.faults import KINDS, Fault, draw_faults
from asyncpar.testing.simulation.network import Conditions
from asyncpar.testing.simulation.notes import SimulationNote, note
from asyncpar.testing.simulation.result import SimulationFailed, SimulationResult
from asyncpar.testing.simulation.runs import SimulatedHang, SimulatedLeak, explore, simulate
from asyncpar.testing.simulation.safeguards import SAFEGUARDS, without

__all__ = [
    "KINDS",
    "SAFEGUARDS",
    "Conditions",
    "Fault",
    "SimulatedHang",
    "SimulatedLeak",
    "SimulationFailed",
    "SimulationNote",
    "SimulationResult",
    "draw_faults",
    "explore",
    "note",
    "simulate",
    "without",
]
