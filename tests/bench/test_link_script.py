"""scripts/bench/compare/link.py as people run it: tiny sizes, and namespaces where they are allowed."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from scripts.bench.compare.link_figures import FP32, GLOO, Figure, Speed, show, show_choice
from scripts.bench.namespaces import NoNamespacesError, payload_rate, wire
from scripts.bench.peers import gradients

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "compare" / "link.py"
TINY = ("--size", "100000", "--rounds", "1", "--budget", "0.001", "--megabits", "1000", "--auto")
FORMS = "fp32,bf16,int8,int4,sign,topk:0.01,topk:0.01+int8,powersgd:4"


@pytest.fixture
def allowed() -> None:
    """Skip where namespaces cannot be made."""
    try:
        with wire(1_000_000_000):
            return
    except NoNamespacesError as error:
        pytest.skip(str(error))


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line]


@pytest.mark.soak
@pytest.mark.process
def test_all_forms_are_measured_and_nothing_is_left(allowed: None, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), *TINY, "--envs", str(tmp_path), "--json", str(tmp_path / "link.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        stdout, stderr = process.communicate(timeout=50)
    assert process.returncode == 0, stderr
    assert "Gloo is left out" in stderr
    assert stdout.count("of the line, 0.95 wanted") == 1
    assert stdout.count("picked (*) by what rank 0 measured") == 1
    assert "auto inside one host: nothing to pick from" in stdout
    speeds = json.loads((tmp_path / "link.json").read_text())["speeds"]
    assert [speed["megabits"] for speed in speeds] == [1000]
    assert [list(speed["seconds"]) for speed in speeds] == [[*FORMS.split(","), "auto"]]
    assert [name for name in namespaces() if name.endswith(str(process.pid))] == []


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_leave_nothing_either(allowed: None, number: signal.Signals) -> None:
    command = [sys.executable, str(SCRIPT), "--rounds", "1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while f"apbr{process.pid}" not in namespaces():
            assert process.poll() is None
        process.send_signal(number)
        _, stderr = process.communicate(timeout=50)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert [name for name in namespaces() if name.endswith(str(process.pid))] == []


def test_without_root_it_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoNamespacesError, match="needs root"), wire(1_000_000):
        pass


def test_without_the_tools_it_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(NoNamespacesError, match="there is no ip command"), wire(1_000_000):
        pass


def test_the_line_is_what_tcp_can_carry() -> None:
    assert payload_rate(1e9) == pytest.approx(119.55e6, rel=1e-3)


def speed_of(*rounds: dict[str, float]) -> Speed:
    figures: list[Mapping[str, Figure]] = [
        {form: Figure(seconds=seconds, sent=1e6) for form, seconds in one.items()} for one in rounds
    ]
    return Speed(megabits=1000, size=25_000_000, rounds=figures)


def test_shares_and_ratios_are_judged() -> None:
    least = 25e6 / payload_rate(1e9)
    lines = show(speed_of({FP32: least / 0.96, "int8": 0.060, "topk:0.01": 0.02, "topk:0.01+int8": 0.007, GLOO: 0.210}))
    assert "fp32: 0.960 of the line, 0.95 wanted: ok" in lines
    assert "int8: 3.50x Gloo fp32, 3.7x wanted: short" in lines
    assert "topk:0.01+int8: 30.00x Gloo fp32, 25.0x wanted: ok" in lines
    assert not any(line.startswith("int4") for line in lines)
    assert show(speed_of({FP32: least / 0.5}))[-1] == "fp32: 0.500 of the line, 0.95 wanted: short"


def test_ratios_are_taken_within_rounds() -> None:
    speed = speed_of({"int8": 0.1, GLOO: 0.4}, {"int8": 0.2, GLOO: 0.8}, {"int8": 0.1, GLOO: 0.9})
    assert speed.ratio("int8") == pytest.approx(4.0)
    assert speed.seconds("int8") == pytest.approx(0.1)
    assert speed.ratio(FP32) is None


def test_the_choice_is_shown_or_that_there_was_none() -> None:
    assert show_choice(Figure(seconds=1.0), "here") == [
        "auto here: nothing to pick from, gradients travel as they are",
        "",
    ]
    assert "int4*  1" in show_choice(Figure(seconds=1.0, choice="codec\nint4*  1"), "there")


def test_gradients_have_the_given_size_in_the_given_shapes() -> None:
    for count in (1, 23, 24, 1000, 25_000):
        assert sum(math.prod(shape) for shape in gradients.shapes(count)) == count
        values = gradients.draw(count, 1)
        assert [part.shape for part in gradients.split(values, count)] == gradients.shapes(count)
        np.testing.assert_array_equal(np.concatenate([part.ravel() for part in gradients.split(values, count)]), values)
    expected = (gradients.draw(1000, 0) + gradients.draw(1000, 1)) / 2
    np.testing.assert_allclose(gradients.mean(1000, 2), expected, rtol=1e-6)


@pytest.mark.parametrize(("once", "count"), [(10.0, 3), (0.1, 15), (1e-9, 50)])
def test_iterations_fill_the_budget_within_limits(once: float, count: int) -> None:
    assert gradients.iterations(once, 1.5) == count
