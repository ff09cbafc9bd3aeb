"""Judge what ranks under faults have written: is every bit that of the run without faults?"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any


@dataclass
class Logs:
    """What all ranks have written."""

    folder: Path
    lines: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    position: int = 0
    """How many steps are committed somewhere."""
    _read: dict[str, int] = field(default_factory=dict)

    def refresh(self) -> None:
        """Read what is new: nothing else, for a run of many minutes asks for it many times a second."""
        for path in sorted(self.folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path.stem, 0))
                content = file.read()
            end = content.rfind(b"\n") + 1
            self._read[path.stem] = self._read.get(path.stem, 0) + end
            found = [json.loads(line) for line in content[:end].splitlines()]
            self.lines.setdefault(path.stem, []).extend(found)
            steps = [line["step"] + 1 for line in found if line["kind"] == "committed" and not line["replay"]]
            self.position = max([self.position, *steps])

    def of(self, kind: str) -> Iterable[tuple[str, dict[str, Any]]]:
        """Yield the lines of a kind, with who wrote them."""
        for name, lines in self.lines.items():
            yield from ((name, line) for line in lines if line["kind"] == kind)

    @property
    def commits(self) -> list[dict[str, Any]]:
        """The commits of members, not those that newcomers repeat, in order of time."""
        return sorted((line for _, line in self.of("committed") if not line["replay"]), key=lambda line: line["time"])


@dataclass
class Verdict:
    """What was wrong: empty lists if nothing was."""

    different: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    again: list[str] = field(default_factory=list)
    """Steps that were begun twice because of a drain."""
    errors: list[str] = field(default_factory=list)
    """Blocks that a drain has ended with an error."""

    @property
    def is_equal(self) -> bool:
        """Are parameters, losses and samples those of the run without faults?"""
        return not self.different and not self.samples

    @property
    def troubles(self) -> list[str]:
        """All that was wrong."""
        return [*self.different, *self.samples, *self.repeated, *self.failed, *self.again, *self.errors]


def judge(
    logs: Logs,
    wanted: dict[str, Any],
    exits: dict[str, int],
    *,
    steps: int,
    portions: int,
    is_whole: bool = True,
    drained: Collection[int] = (),
) -> Verdict:
    """Compare with the run without faults; ``exits`` are the exit codes of ranks that were left alone.

    Not ``is_whole``: the first ``steps`` of a run that goes on, or was cut.  ``drained`` are the generations that a
    drain has ended, and nothing else.
    """
    verdict = Verdict()
    results = dict(logs.of("result"))
    if not results and is_whole:
        verdict.different.append("nobody has a result")
    for name, result in results.items():
        verdict.different += [
            f"{name}: {what}" for what in ("parameters", "losses", "lineage") if result[what] != wanted[what]
        ]
    committed: dict[int, set[int]] = {}
    for line in logs.commits:
        committed.setdefault(line["step"], set()).add(line["generation"])
    followed = {line["step"] for _, line in logs.of("committed") if line["replay"]}
    for step in range(steps):
        generations = sorted(committed.get(step, ()))
        if len(generations) != 1 and (generations or step not in followed):  # who is killed may have noted nothing
            verdict.repeated.append(f"step {step}: committed in the generations {generations}")
    _judge_samples(logs, verdict, {step: committed[step] for step in range(steps) if step in committed}, portions)
    for name, code in exits.items():
        if code != 0:
            verdict.failed.append(f"{name}: exited with code {code}, and nobody had touched it")
    for name, lines in logs.lines.items():
        own = [line for line in lines if line["kind"] == "committed"]
        verdict.repeated += [f"{name}: {text}" for text in _jumps(own)]
    _judge_drains(logs, verdict, committed, drained)
    return verdict


def _jumps(own: Sequence[dict[str, Any]]) -> list[str]:
    """Return where the steps that one rank has committed do not follow each other.

    A newcomer whose donors are lost is healed anew, and goes on from a later step, which it repeats.
    """
    return [
        f"committed {before['step']}, then {after['step']}"
        for before, after in pairwise(own)
        if after["step"] != before["step"] + 1 and not (after["replay"] and after["step"] > before["step"])
    ]


def _judge_samples(logs: Logs, verdict: Verdict, committed: dict[int, set[int]], portions: int) -> None:
    """Note steps in which not every portion was once."""
    contributed: dict[int, set[int]] = {}
    """Of rounds, which tell how many portions were in them, and not which: their lineages are compared."""
    for line in logs.commits:
        if "contributed" in line:
            contributed.setdefault(line["step"], set()).add(line["contributed"])
    summed: dict[tuple[int, int], list[int]] = {}
    for _, line in logs.of("summed"):
        summed.setdefault((line["step"], line["generation"]), []).extend(range(*line["portions"]))
    for step, generations in committed.items():
        found = sorted(summed.get((step, min(generations)), []))
        if step in contributed:
            if contributed[step] != {portions}:
                verdict.samples.append(f"round {step}: {sorted(contributed[step])} of {portions} portions")
        elif len(generations) == 1 and found != list(range(portions)):
            verdict.samples.append(f"step {step}: {found}")


def _judge_drains(logs: Logs, verdict: Verdict, committed: dict[int, set[int]], drained: Collection[int]) -> None:
    """Note what was begun in worlds that a drain has ended, and was not committed there."""
    for name, line in logs.of("begun"):
        if line["generation"] in drained and line["generation"] not in committed.get(line["step"], ()):
            verdict.again.append(f"{name}: step {line['step']}: done again after a drain")
    for name, line in logs.of("interrupted"):
        if line["generation"] in drained:
            verdict.errors.append(f"{name}: step {line['step']}: {line['error']} because of a drain")
