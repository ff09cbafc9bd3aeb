"""Figures of several sides by round: medians over rounds, ratios within rounds.  Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Record: TypeAlias = Mapping[str, Any]
"""What was measured once; its kind is under ``what``."""

Key: TypeAlias = tuple[str, ...]


@dataclass(slots=True)
class Samples:
    """Figures by key and round."""

    rounds: dict[Key, dict[int, float]] = field(default_factory=dict)

    def add(self, turn: int, key: Key, figure: float) -> None:
        self.rounds.setdefault(key, {})[turn] = figure

    def median(self, key: Key) -> float | None:
        """Return the median over rounds; None without a figure."""
        return statistics.median(self.rounds[key].values()) if key in self.rounds else None

    def ratio(self, key: Key, base: Key) -> float | None:
        """Return how many times ``base`` a figure is: the median of what it is within each round."""
        ours, theirs = self.rounds.get(key, {}), self.rounds.get(base, {})
        ratios = [ours[turn] / theirs[turn] for turn in ours if theirs.get(turn)]
        return statistics.median(ratios) if ratios else None


@dataclass(slots=True)
class Figures:
    """All records, each with the number of its round."""

    records: list[tuple[int, Record]] = field(default_factory=list)

    def add(self, turn: int, record: Record) -> None:
        self.records.append((turn, record))

    def of(self, *kinds: str) -> list[tuple[int, Record]]:
        """Return the records of some kinds."""
        return [(turn, record) for turn, record in self.records if record["what"] in kinds]

    def samples(self, what: str, names: Sequence[str], figure: str) -> Samples:
        """Return ``figure`` of all records of one kind, by what they have under ``names``."""
        samples = Samples()
        for turn, record in self.of(what):
            if figure in record:
                samples.add(turn, tuple(str(record[name]) for name in names), record[figure])
        return samples
