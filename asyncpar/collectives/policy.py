"""Which algorithm a group uses: what the user pinned, else what the cost model says.  Pure."""

from __future__ import annotations

from dataclasses import dataclass

from asyncpar.collectives.algorithms.catalog import ARENA, KNOWN
from asyncpar.collectives.cost import CostModel
from asyncpar.collectives.pin import Pin

_SIZES = (4, 64, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20, 128 << 20, 1 << 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Chooses by figures that are equal on all ranks."""

    model: CostModel
    pin: Pin
    has_arena: bool = False

    def choose(self, operation: str, payload: int, *, arena: bool = False) -> str:
        """Return the algorithm for ``payload`` bytes; ``arena`` says whether the arena can be used."""
        pinned = self.pin.find(operation, payload)
        if pinned is not None and (arena or pinned != ARENA):
            return pinned
        return self.model.choose(operation, payload, arena=arena)

    def table(self) -> str:
        """Return the choices and estimates in aligned columns, one line per operation and size.

        ``*`` marks a pinned choice; times are estimates in microseconds.
        """
        rows = [("operation", "bytes", "algorithm", "us", "others (us)")]
        for operation in KNOWN:
            sizes = _SIZES if operation != "barrier" else (0,)
            rows.extend(self._row(operation, payload) for payload in sizes)
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join(_aligned(row, widths) for row in rows)

    def _row(self, operation: str, payload: int) -> tuple[str, str, str, str, str]:
        chosen = self.choose(operation, payload, arena=self.has_arena)
        mark = "*" if self.pin.find(operation, payload) else ""
        times = {
            name: f"{self.model.estimate(operation, name, payload) * 1e6:.0f}"
            for name in (chosen, *self.model.candidates(operation, arena=self.has_arena))
        }
        others = "  ".join(f"{name} {time}" for name, time in times.items() if name != chosen)
        return operation, format_bytes(payload), chosen + mark, times[chosen], others


def _aligned(row: tuple[str, str, str, str, str], widths: list[int]) -> str:
    operation, size, algorithm, time, others = row
    start = f"{operation:<{widths[0]}}  {size:>{widths[1]}}  {algorithm:<{widths[2]}}"
    return f"{start}  {time:>{widths[3]}}  {others}".rstrip()


def format_bytes(count: int) -> str:
    """Return ``count`` with the largest binary unit that divides it."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit and count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count} B"
