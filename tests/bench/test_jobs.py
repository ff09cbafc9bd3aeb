"""Processes of jobs: none is left, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from scripts.bench.jobs import JobFailedError, records_of, run_ranks, run_together

SLEEPER = [sys.executable, "-c", "import time; time.sleep(1000)"]


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_is_interrupted_while_it_starts_a_process_ends_that_too(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)
            if len(started) == 2:
                os.kill(os.getpid(), number)

    monkeypatch.setattr("scripts.bench.jobs.subprocess.Popen", Interrupted)
    before = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_together([SLEEPER] * 3, [os.environ] * 3)
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
        alive = [process for process in started if process.poll() is None]
        for process in alive:
            process.kill()
            process.wait()
    assert alive == []


@pytest.mark.process
def test_a_job_that_fails_says_how_it_ended_and_what_it_wrote() -> None:
    program = "import sys; sys.exit('no such peer')"
    with pytest.raises(JobFailedError, match=r"ended with 1\nno such peer"):
        run_together([[sys.executable, "-c", program]], [os.environ])


@pytest.mark.process
def test_ranks_know_who_they_are_and_where_they_meet() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "RENDEZVOUS", "MORE")
    program = f"import json, os; print('ready'); print(json.dumps({{name: os.environ[name] for name in {names}}}))"
    output = run_ranks([[sys.executable]] * 2, ["-c", program], limit=50, environment={"MORE": "yes"})
    (record,) = records_of(output)
    assert record.pop("RENDEZVOUS").endswith("/rendezvous")
    assert record == {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MORE": "yes"}
