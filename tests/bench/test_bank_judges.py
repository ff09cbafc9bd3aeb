"""The judges of bank.py find what they are for in journals and samples that are bad, and nothing in a good run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.chaos.bank import main
from scripts.bench.chaos.bank_judge import (
    LEAST_SAMPLES,
    MOST_DESCRIPTORS,
    MOST_MEGABYTES,
    UNANSWERED,
    BankVerdict,
    Sample,
    judge_bank,
    largest_growth,
)
from scripts.bench.chaos.bank_rank import TOTAL
from scripts.bench.chaos.chaos_judge import Logs
from scripts.bench.chaos.siege_judge import Hit, Line
from tests.bench.refusals import refusal_of

STEPS = 6
UNTIL = 7.0
HITS = [Hit(0, "host1", "kill", 2.5, 2.5)]
Journals = dict[str, list[dict[str, Any]]]


def undisturbed() -> Journals:
    """Six steps of two ranks, one per second, each with a transfer; the second rank reads all of them."""
    journals: Journals = {}
    for rank, name in enumerate(("rank-1", "rank-2")):
        journals[name] = []
        for step in range(STEPS):
            place = {"step": step, "generation": step // 3, "time": float(step)}
            journals[name] += [
                {"kind": "asked", "name": f"{rank}-{step}", "bank": "first", "by": "transfer", "time": step + 0.1},
                {"kind": "answered", "name": f"{rank}-{step}", "time": step + 0.2},
                {"kind": "summed", **place, "portions": [2 * rank, 2 * rank + 2]},
                {"kind": "committed", **place, "replay": False, "lineage": f"l{step}"},
            ]
            names = [f"{other}-{step}" for other in range(2)]
            if rank == 1:
                read = {"bank": "first", "total": TOTAL, "done": 2 * (step + 1), "names": names, "time": step + 0.3}
                journals[name].append({"kind": "read", **read})
    return journals


def judged(
    change: Callable[[Journals], Any] | None = None,
    *,
    printed: tuple[str, ...] = (),
    samples: tuple[Sample, ...] = (),
    until: float = UNTIL,
) -> BankVerdict:
    journals = undisturbed()
    if change is not None:
        change(journals)
    logs = Logs(Path())
    logs.lines, logs.position = journals, STEPS
    lines = [Line(3.0, "host1", number, text) for number, text in enumerate(printed)]
    return judge_bank(logs, HITS, samples, lines, portions=4, until=until)


def of_kind(journals: Journals, kind: str, name: str = "rank-2") -> list[dict[str, Any]]:
    return [line for line in journals[name] if line["kind"] == kind]


def one_call(end: str | None, *, time: float = 2.0, error: str = "WorldChanged") -> Callable[[Journals], Any]:
    """Add a call that ends so; its rank logs on for longer than callers wait."""

    def change(journals: Journals) -> None:
        lines = [{"kind": "asked", "name": "x", "bank": "first", "by": "transfer", "time": time}]
        if end is not None:
            lines.append({"kind": end, "name": "x", "time": time + 0.1, "error": error, "text": ""})
        journals["rank-1"][:0] = lines
        journals["rank-1"].append({"kind": "concluded", "time": time + UNANSWERED + 1.0})

    return change


def by_another(journals: Journals, *, read_at: float = 5.0) -> None:
    """Let the first call have another bank do a transfer, which nobody finds there at ``read_at``."""
    of_kind(journals, "asked")[0].update(by="by_another")
    read = {"bank": "second", "total": TOTAL, "done": 0, "names": [], "time": read_at}
    journals["rank-2"].append({"kind": "read", **read})


def test_a_transfer_that_nobody_could_read_of_yet_is_not_forgotten() -> None:
    assert judged(lambda journals: by_another(journals, read_at=0.1)).troubles == {}


def test_nothing_is_found_in_a_run_without_trouble() -> None:
    assert judged().troubles == {}


def test_a_call_that_was_refused_may_be_done_or_not() -> None:
    assert judged(one_call("refused")).troubles == {}


def test_who_was_killed_while_it_waited_needs_no_answer() -> None:
    killed = {"kind": "asked", "name": "x", "bank": "first", "by": "transfer", "time": 5.5}
    assert judged(lambda journals: journals["rank-1"].append(killed)).troubles == {}


@pytest.mark.parametrize(
    ("judge", "change"),
    [
        ("totals", lambda journals: of_kind(journals, "read")[2].update(total=TOTAL - 7)),
        (
            "totals",
            lambda journals: journals["rank-1"].append({"kind": "half", "name": "x", "total": 1, "time": 2.0}),
        ),
        ("twice", lambda journals: of_kind(journals, "read")[2].update(names=["1-2", "1-2"])),
        ("forgotten", lambda journals: of_kind(journals, "read")[2].update(names=["0-2"])),
        ("forgotten", lambda journals: of_kind(journals, "read")[3].update(done=7)),
        ("forgotten", one_call("answered")),
        ("forgotten", by_another),
        ("silent", one_call(None)),
        ("errors", one_call("refused", error="KeyError")),
        ("steps", lambda journals: of_kind(journals, "committed")[4].update(lineage="another")),
        ("steps", lambda journals: of_kind(journals, "summed")[4].update(portions=[0, 2])),
    ],
)
def test_what_is_wrong_is_found_by_its_judge(judge: str, change: Callable[[Journals], Any]) -> None:
    assert judge in judged(change).troubles


def test_a_gap_without_a_commit_is_found() -> None:
    assert judged(until=UNTIL + 60.0).gaps == ["no commit for 62.0 s after fault 0 had healed"]


@pytest.mark.parametrize(
    ("text", "is_bad"),
    [
        ("rank host1/0 was killed by SIGKILL; it starts again in 0.25 s", False),
        ("rank host1/0 exited with code 1; it starts again in 0.25 s", True),
        ("Traceback (most recent call last):", True),
        ("all members are lost", True),
    ],
)
def test_ranks_may_be_killed_and_must_not_crash(text: str, is_bad: bool) -> None:
    assert bool(judged(printed=(text,)).ended) == is_bad


def life(*, megabytes: float = 0.0, descriptors: float = 0.0, children: int = 1) -> tuple[Sample, ...]:
    """A process that grows by so much in each of its samples."""
    return tuple(
        Sample(10.0 * n, "launcher", 7, 80.0 + n * megabytes, 20 + int(n * descriptors), 1 if n == 0 else children)
        for n in range(4 * LEAST_SAMPLES)
    )


@pytest.mark.parametrize(
    ("samples", "leak"),
    [
        (life(), ""),
        (life(megabytes=MOST_MEGABYTES / (4 * LEAST_SAMPLES)), ""),
        (life(megabytes=MOST_MEGABYTES / LEAST_SAMPLES), "MB"),
        (life(descriptors=MOST_DESCRIPTORS / LEAST_SAMPLES), "descriptors"),
        (life(children=5), "children"),
    ],
)
def test_processes_that_grow_are_found(samples: tuple[Sample, ...], leak: str) -> None:
    found = judged(samples=samples).leaks
    assert leak in " ".join(found)
    assert bool(found) == bool(leak)


def test_two_processes_of_one_number_are_two_lives() -> None:
    later = [replace(one, time=one.time + 1000.0, megabytes=one.megabytes + MOST_MEGABYTES * 2) for one in life()]
    assert judged(samples=(*life(), *later)).leaks == []


def test_the_largest_growth_is_that_of_a_role() -> None:
    assert largest_growth(life(megabytes=1.0))["launcher"] == {
        "megabytes": 2.0 * LEAST_SAMPLES,
        "descriptors": 0,
        "minutes": pytest.approx(7.8, abs=0.1),
        "rss": 80.0 + 4 * LEAST_SAMPLES - 1,
    }


def test_options_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = refusal_of(main, ["--hosts=3"], capsys)
    assert code == 2
    assert "expected 4 hosts or more" in printed
