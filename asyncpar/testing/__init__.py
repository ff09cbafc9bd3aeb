"""For tests, ours and yours: many ranks in one process, virtual time, conformance suites."""

from asyncpar.testing.loop import VirtualTimeLoop, run_virtual
from asyncpar.testing.world import TRANSPORTS, local_world

__all__ = ["TRANSPORTS", "VirtualTimeLoop", "local_world", "run_virtual"]
