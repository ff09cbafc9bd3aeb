"""scripts/bench/compare/torch_ddp.py as people run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "compare" / "torch_ddp.py"
STEPS = {"ddp": "ddp", "fsdp": "fsdp"}


@pytest.mark.process
@pytest.mark.timeout(180)
@pytest.mark.parametrize("parts", [{"calls": "call"}, pytest.param(STEPS, marks=pytest.mark.soak)], ids=",".join)
def test_calls_and_steps_are_measured(parts: dict[str, str], tmp_path: Path) -> None:
    target = tmp_path / "torch.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--parts", ",".join(parts), "--sides", "asyncpar"]
    done = subprocess.run([*command, "--json", str(target)], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    records = json.loads(target.read_text())["records"]
    assert {record["what"] for record in records} == set(parts.values())
    assert all(record.get("seconds", record.get("step")) > 0.0 for record in records)
    assert ("the binding adds" in done.stdout) == ("calls" in parts)
