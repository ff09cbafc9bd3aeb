"""For tests, ours and yours: many ranks in one process, virtual time, simulations with faults, conformance suites."""

from asyncpar.core.config.transport import IN_PROCESS_TRANSPORTS as TRANSPORTS
from asyncpar.testing.blocking_world import blocking_world, run_ranks
from asyncpar.testing.guarded_world import GuardedWorld, WorldHung
from asyncpar.testing.loop import VirtualTimeLoop, run_virtual
from asyncpar.testing.simulation import simulate
from asyncpar.testing.world import local_world

__all__ = [
    "TRANSPORTS",
    "GuardedWorld",
    "VirtualTimeLoop",
    "WorldHung",
    "blocking_world",
    "local_world",
    "run_ranks",
    "run_virtual",
    "simulate",
]
