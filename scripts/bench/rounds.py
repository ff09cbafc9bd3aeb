"""Rounds of jobs and their figures.

In each round every job runs once, one after the other; one that fails does not stop the others.  Figures are medians
over rounds, and ratios within rounds.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from scripts.bench.jobs import JobFailedError, tell

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Something to run in every round; ``run`` returns records, to which ``marks`` are added."""

    title: str
    run: Callable[[], Iterable[Record]]
    marks: Record = field(default_factory=dict)


def play(jobs: Iterable[Job], figures: Figures, failures: list[str], *, turn: int, rounds: int) -> None:
    """Run the jobs of round ``turn``, from 0; of those that fail ``failures`` get a line."""
    for job in jobs:
        tell(f"round {turn + 1} of {rounds}: {job.title} (load {os.getloadavg()[0]:.1f})")
        try:
            records = list(job.run())
        except JobFailedError as error:
            failures.append(f"{job.title}: {error}")
            tell(failures[-1])
            continue
        for record in records:
            figures.add(turn, {**record, **job.marks})


def report(
    figures: Figures,
    file: Path | None,
    *,
    description: str,
    failures: Sequence[str],
    faults: Sequence[str],
    **more: object,
) -> int:
    """Tell the faults, write everything into ``file`` as JSON, and return how the program ends: 0 if all is well."""
    for fault in faults:
        tell(fault)
    if file is not None:
        records = [{"round": turn, **record} for turn, record in figures.records]
        document = {"description": description, "records": records, **more, "failures": failures, "faults": faults}
        file.write_text(json.dumps(document, indent=1) + "\n")
    return int(bool(failures or faults))
