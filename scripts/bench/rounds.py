"""Rounds of jobs: in each round every job runs once, one after the other; one that fails does not stop the others."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.bench.environments import JobFailedError
from scripts.bench.samples import Figures, Record


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


def tell(text: str) -> None:
    """Say how it goes, apart from the results."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


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
