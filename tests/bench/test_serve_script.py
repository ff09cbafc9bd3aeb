"""scripts/bench/figures/serve.py: which requests met a push, and a short run of all of it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("aiohttp", reason="aiohttp (extra test) is not installed")
pytest.importorskip("fastapi", reason="fastapi (extra test) is not installed")
pytest.importorskip("uvicorn", reason="uvicorn (extra test) is not installed")

from scripts.bench.figures.serve import began_during, find_address

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "figures" / "serve.py"


def test_a_request_met_a_push_if_it_began_in_it_or_a_typical_time_before() -> None:
    pushes = np.array([[10.0, 12.0], [20.0, 21.0]])
    begins = np.array([8.9, 9.1, 11.0, 12.1, 18.9, 19.5, 20.5, 21.5])
    spans = np.stack([begins, begins + 1.0], axis=1)
    assert began_during(spans, pushes).tolist() == [False, True, True, False, False, True, True, False]


def test_a_request_that_took_long_met_no_push_that_began_long_after_it() -> None:
    spans = np.array([[1.0, 2.0], [2.0, 3.0], [3.0, 100.0]])
    assert began_during(spans, np.array([[50.0, 51.0]])).tolist() == [False, False, False]


def test_the_address_is_read_from_what_the_job_prints() -> None:
    lines = "starting\n[here:1] rank 1 serves on http://127.0.0.1:8000 once it has weights\nmore\n"
    assert find_address(io.StringIO(lines)) == "http://127.0.0.1:8000"
    with pytest.raises(SystemExit, match="the job ended before it served"):
        find_address(io.StringIO("Traceback\n"))


@pytest.mark.soak
@pytest.mark.process
def test_requests_are_measured_with_and_without_pushes_and_none_fails() -> None:
    command = [sys.executable, str(SCRIPT), "--seconds", "2", "--size", "1MB", "--push-every", "0.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["failures"] == 0
    assert figures["pushes"] >= 1
    assert figures["push_requests"] >= 1
    assert figures["p99_ratio"] > 0
