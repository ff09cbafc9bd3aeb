"""scripts/bench/link.py as people run it: tiny sizes, and namespaces where they are allowed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.link import GLOO, show
from scripts.bench.namespaces import NoNamespacesError, payload_rate, wire

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "link.py"
TINY = ("--size", "100000", "--rounds", "1", "--iterations", "1")


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


@pytest.mark.process
def test_all_forms_are_measured_and_nothing_is_left(allowed: None, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), *TINY, "--envs", str(tmp_path), "--json", str(tmp_path / "link.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        stdout, stderr = process.communicate(timeout=50)
    assert process.returncode == 0, stderr
    assert "Gloo is left out" in stderr
    assert "of the line, 0.95 wanted" in stdout
    assert list(json.loads((tmp_path / "link.json").read_text())["seconds"]) == ["fp32", "bf16", "int8"]
    assert [name for name in namespaces() if name.endswith(str(process.pid))] == []


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


def test_shares_and_ratios_are_judged() -> None:
    least = 25e6 / payload_rate(1e9)
    lines = show({"fp32": [least / 0.96], "int8": [0.060], GLOO: [0.210]}, size=25_000_000, megabits=1000)
    assert "fp32: 0.960 of the line, 0.95 wanted: ok" in lines
    assert "int8: 3.50x Gloo fp32, 3.7x wanted: short" in lines
    alone = show({"fp32": [least / 0.5]}, size=25_000_000, megabits=1000)
    assert alone[-1] == "fp32: 0.500 of the line, 0.95 wanted: short"
