"""The program of docs/simulation.md has the race that the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from asyncpar.testing.simulation import SimulationFailed

PAGE = Path(__file__).resolve().parents[3] / "docs" / "simulation.md"


def test_the_example_finds_its_race() -> None:
    scope: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0], scope)
    with pytest.raises(SimulationFailed, match="1 updates were lost"):
        scope["test_every_update_counts"]()
