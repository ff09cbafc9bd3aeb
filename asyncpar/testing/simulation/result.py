"""The end of a simulation: its value, or its failure with the settings that reproduce it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from asyncpar.errors import AsyncparError
from asyncpar.testing.simulation.faults import Fault
from asyncpar.testing.simulation.notes import SimulationNote


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """The result of a simulated program.

    ``results`` and ``errors`` are by node, of the newest process there: the result or error of ``main``; a node whose
    process was killed is in neither.  ``trace_hash`` is equal exactly for runs in which the same happened at the same
    virtual times; ``seconds`` is the duration in virtual time, ``events`` counts deliveries and faults.
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
    """The notes of processes, in chronological order, including those of processes that were killed later."""
    lines: tuple[str, ...] = ()
    """The events as text, if ``record`` was requested."""


REMOVED: Final[ContextVar[tuple[str, ...]]] = ContextVar("asyncpar removed safeguards", default=())
"""The safeguards that ``without`` has removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSearch:
    """The arguments of a simulation besides seed, size and faults; ``options`` are those that differ from the defaults.

    A ``main`` or ``check`` that cannot be imported keeps the name of the parameter.
    """

    main: object = None
    check: object = None
    expected: tuple[type[BaseException], ...] | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    removed: tuple[str, ...] = ()

    def as_test(self, failed: SimulationFailed, main: str | None) -> str:
        """Return the text of a test that fails as ``failed``; ``main`` is the name of the program in it."""
        imports = ["import asyncpar as ap"]
        names = {"Fault"} | ({"Conditions"} if "conditions" in self.options else set())
        names |= {"without"} if self.removed else set()
        imports.append(f"from asyncpar.testing.simulation import {', '.join(sorted(names))}")
        given = {"size": str(failed.size), "seed": str(failed.seed), "faults": "faults"}
        given |= {name: repr(value) for name, value in self.options.items()}
        called = _name(self.main, "main", imports) if main is None else main
        if self.check is not None:
            given["check"] = _name(self.check, "check", imports)
        if self.expected is not None:
            kinds = [_name(kind, kind.__name__, imports) for kind in self.expected]
            given["expected"] = f"({', '.join(kinds)}{',' if len(kinds) == 1 else ''})"
        given["shrinks"] = "False"
        listed = "".join(f"        {fault!r},\n" for fault in failed.faults)
        faults = f"[\n{listed}    ]" if failed.faults else "[]"
        lines = [f"    faults = {faults}"]
        if self.removed:
            lines.append(f"    with without({', '.join(map(repr, self.removed))}):")
        indent = "        " if self.removed else "    "
        arguments = "".join(f"{indent}    {name}={value},\n" for name, value in given.items())
        lines.append(f"{indent}ap.testing.simulate(\n{indent}    {called},\n{arguments}{indent})")
        body = "\n".join(lines)
        return "\n".join(imports) + f"\n\n\ndef test_seed_{failed.seed}() -> None:\n{body}\n"


def _name(value: object, otherwise: str, imports: list[str]) -> str:
    """Return the name of ``value``, after adding its import; ``otherwise`` if it cannot be imported."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module == "builtins":
        return str(name)
    if (
        not isinstance(module, str)
        or not name.isidentifier()
        or getattr(sys.modules.get(module), name, None) is not value
    ):
        return otherwise
    if module == "__main__":
        return str(name)
    imports.append(f"from {module} import {name}")
    return str(name)


class SimulationFailed(AsyncparError, AssertionError):  # noqa: N818
    """A simulated program failed; the message has the seed and faults, and how to reproduce it.

    ``cause`` is the error; ``faults`` are those needed for it.
    """

    def __init__(
        self,
        cause: BaseException,
        *,
        seed: int,
        size: int,
        faults: tuple[Fault, ...],
        trace_hash: str,
        search: SimulationSearch | None = None,
    ) -> None:
        super().__init__(seed, size, faults, trace_hash)
        self.cause = cause
        self.seed = seed
        self.size = size
        self.faults = faults
        self.trace_hash = trace_hash
        self._search = search or SimulationSearch()
        self.lines: tuple[str, ...] = ()
        """The events as text, if ``record`` was requested."""
        self.drawn: int | None = None
        """The number of faults before unneeded ones were left out; None: they were not."""

    def __str__(self) -> str:
        shrunk = "" if self.drawn is None else f" (of {self.drawn}; none of these can be left out)"
        listed = "".join(f"\n    {fault!r}," for fault in self.faults) or " none"
        return (
            f"{type(self.cause).__name__}: {self.cause}\n"
            f"seed {self.seed}, {self.size} nodes, trace hash {self.trace_hash}\n"
            f"faults{shrunk}:{listed}\n"
            f"again, as a test (trace: record=True):\n\n{self.as_test()}"
        )

    def as_test(self, main: str | None = None) -> str:
        """Return a test that runs the failing case; ``main`` is the program's name in it (None: as it is imported).

        It has all arguments of the simulation, and the safeguards that were removed.
        """
        return self._search.as_test(self, main)
