"""Measure what observing costs per step of `train_lm.py`: recording and summaries on and off in turns, in one job.

    scripts/bench/run observe_cost --steps 400 --dp 2
    scripts/bench/run --dashboard=127.0.0.1:8787 observe_cost --steps 400 --dp 2

Arguments are those of `scripts/examples/train_lm.py`.  Of each pair of steps one is observed and one is not, in an
order drawn anew, the same on all ranks.  Without observation no event is written and no summary is made.  The last line
on stdout is one JSON object: the median of the relative differences of pairs in percent, its quartiles, and the median
seconds of a step.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import sys
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any, SupportsFloat

from asyncpar.core.observe.recorder import Recorder, current_recorder
from asyncpar.observe import Progress
from asyncpar.observe.service import provide

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "train_lm.py"
WARM_UP = 10


class Switch:
    """Switches observation after each step, and keeps how long steps took."""

    def __init__(self) -> None:
        self._dice = random.Random(18)
        self._order: list[bool] = []
        self._is_on = True
        self._owners: list[int] = []
        self._withdraw: Any = None
        self._begun = 0.0
        self._recorder: Recorder | None = None
        self.seconds: list[tuple[bool, float]] = []

    def step(self) -> None:
        """Take the end of a step, and choose how the next one runs."""
        now = time.perf_counter()
        if self._begun:
            self.seconds.append((self._is_on, now - self._begun))
        if not self._order:
            self._order = self._dice.sample([True, False], 2)
        wanted = self._order.pop()
        if wanted != self._is_on:
            self._turn(on=wanted)
        self._begun = time.perf_counter()

    def finish(self) -> None:
        """Observe what comes after the last step."""
        if not self._is_on:
            self._turn(on=True)

    def _turn(self, *, on: bool) -> None:
        self._is_on = on
        recorder = self._recorder = self._recorder or current_recorder()
        assert recorder is not None, "there is a node while it trains"
        if on:
            recorder.owners[:] = self._owners
            recorder.is_closed = False
            self._withdraw()
            return
        self._owners = list(recorder.owners)
        recorder.is_closed = True
        recorder.owners[:] = [-1] * len(recorder.owners)
        self._withdraw = provide("summary", lambda: b"")


def report(seconds: list[tuple[bool, float]]) -> dict[str, float]:
    """Return the figures of pairs of steps."""
    pairs = [dict(seconds[place : place + 2]) for place in range(WARM_UP, len(seconds) - 1, 2)]
    differences = [100.0 * (pair[True] / pair[False] - 1.0) for pair in pairs]
    low, _, high = quantiles(differences, n=4)
    return {
        "pairs": len(pairs),
        "percent": median(differences),
        "low": low,
        "high": high,
        "step_seconds": median(pair[False] for pair in pairs),
        "percent_of_medians": 100.0
        * (median(pair[True] for pair in pairs) / median(pair[False] for pair in pairs) - 1.0),
    }


def _step_after_shows(switch: Switch) -> None:
    """Let each step whose progress is shown be one of ``switch``."""
    show = Progress.show

    def show_and_switch(progress: Progress, completed: SupportsFloat, **figures: object) -> None:
        show(progress, completed, **figures)
        switch.step()

    Progress.show = show_and_switch  # type: ignore[method-assign,assignment]


def main() -> None:
    """Train, and say what it cost."""
    switch = Switch()
    _step_after_shows(switch)
    sys.argv = [str(PROGRAM), *sys.argv[1:]]
    try:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    finally:
        switch.finish()
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(report(switch.seconds)))


if __name__ == "__main__":
    main()
