"""The engine below a communicator, for tests that look at its state."""

from __future__ import annotations

from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.engine import Engine


def engine_of(communicator: Communicator) -> Engine:
    """Return the engine: a communicator shows users no arena, ledger, table of operations or lanes, so tests ask it."""
    return communicator._engine  # noqa: SLF001  # the one access to it, for the reason above
