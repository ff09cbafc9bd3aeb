"""Outcomes of tests, and the file that stores them.  Independent of torch and of processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

_NEEDS_RANKS = ("Skipped due to small world size", "Test requires world size", "Test requires an exact world size")


class Status(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    HUNG = "hung"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one test ended for one backend.

    ``detail`` is why it was skipped, the traceback of a failure, or the stacks of a hang.  ``first_detail`` is what a
    first attempt showed, in processes that had played other tests before, when a second one in new processes passed.
    """

    status: Status
    ranks: int
    seconds: float = 0.0
    detail: str = ""
    first_detail: str = ""

    @property
    def needs_other_ranks(self) -> bool:
        """Whether the test was skipped only because of the number of ranks."""
        return self.status is Status.SKIPPED and self.detail.startswith(_NEEDS_RANKS)

    @property
    def needs_mpi(self) -> bool:
        """Whether the test was skipped only because it is not about MPI."""
        return self.status is Status.SKIPPED and self.detail.startswith("Only MPI supports")

    @property
    def last_line(self) -> str:
        """The line of a traceback that says what is wrong."""
        lines = [line for line in self.detail.splitlines() if line.strip() and not line.startswith((" ", "\t"))]
        return lines[-1].strip() if lines else ""


Outcomes = dict[str, Outcome]
"""By the test's name."""


@dataclass(slots=True, kw_only=True)
class Record:
    """All that is known, by backend; ``versions`` says of what."""

    outcomes: dict[str, Outcomes] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def add(self, backend: str, test: str, outcome: Outcome) -> None:
        self.outcomes.setdefault(backend, {})[test] = outcome

    def of(self, backend: str) -> Mapping[str, Outcome]:
        return self.outcomes.get(backend, {})

    def save(self, path: Path) -> None:
        """Replace the file as a whole, so that an interrupt leaves the former one."""
        document = {
            "versions": self.versions,
            "outcomes": {
                backend: {test: asdict(outcomes[test]) for test in sorted(outcomes)}
                for backend, outcomes in self.outcomes.items()
            },
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(document, indent=1) + "\n")
        unfinished.replace(path)

    @staticmethod
    def load(path: Path) -> Record:
        """Return what ``path`` keeps, an empty record if there is no such file."""
        if not path.exists():
            return Record()
        document: dict[str, Any] = json.loads(path.read_text())
        return Record(
            versions=document["versions"],
            outcomes={
                backend: {test: _outcome(entry) for test, entry in entries.items()}
                for backend, entries in document["outcomes"].items()
            },
        )


def _outcome(entry: Mapping[str, Any]) -> Outcome:
    return Outcome(**{**entry, "status": Status(entry["status"])})
