"""The end of a simulation: its value, or its failure with the settings that reproduce it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncpar.errors import AsyncparError
from asyncpar.testing.simulation.faults import Fault
from asyncpar.testing.simulation.notes import SimulationNote


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """The result of a simulated program.

    ``results`` and ``errors`` are by node, of the newest process there: what ``main`` returned or raised; a node whose
    process was killed is in neither.  ``trace_hash`` is equal exactly for runs in which the same happened at the same
    virtual times; ``seconds`` is how long it took in virtual time, ``events`` counts deliveries and faults.
    """

    seed: int
    size: int
    faults: tuple[Fault, ...]
    results: Mapping[int, Any]
    errors: Mapping[int, BaseException]
    trace_hash: str
    seconds: float
    events: int
    notes: tuple[SimulationNote, ...] = ()
    """What processes have noted, in the order of time, those that were killed later included."""
    lines: tuple[str, ...] = ()
    """What happened, as text, if ``record`` was asked for."""


class SimulationFailed(AsyncparError, AssertionError):  # noqa: N818
    """A simulated program failed; the message says with which seed and faults, and how to see it again.

    ``cause`` is what went wrong; ``faults`` are those that are needed for that.
    """

    def __init__(self, cause: BaseException, *, seed: int, size: int, faults: tuple[Fault, ...], trace_hash: str):
        super().__init__(seed, size, faults, trace_hash)
        self.cause = cause
        self.seed = seed
        self.size = size
        self.faults = faults
        self.trace_hash = trace_hash
        self.lines: tuple[str, ...] = ()
        """What happened, as text, if ``record`` was asked for."""
        self.drawn: int | None = None
        """How many faults there were before those that are not needed were left out; None: they were not."""

    def __str__(self) -> str:
        shrunk = "" if self.drawn is None else f" (of {self.drawn}; none of these can be left out)"
        listed = "".join(f"\n    {fault!r}," for fault in self.faults) or " none"
        return (
            f"{type(self.cause).__name__}: {self.cause}\n"
            f"seed {self.seed}, {self.size} nodes, trace hash {self.trace_hash}\n"
            f"faults{shrunk}:{listed}\n"
            f"again, as a test (trace: record=True):\n\n{self.as_test()}"
        )

    def as_test(self, main: str = "main") -> str:
        """Return a test that runs the failing case; ``main`` is the program's name in it."""
        listed = "".join(f"        {fault!r},\n" for fault in self.faults)
        faults = f"[\n{listed}    ]" if self.faults else "[]"
        return (
            "import asyncpar as ap\n"
            "from asyncpar.testing.simulation import Fault\n\n\n"
            f"def test_seed_{self.seed}() -> None:\n"
            f"    faults = {faults}\n"
            f"    ap.testing.simulate({main}, size={self.size}, seed={self.seed}, faults=faults)\n"
        )
