"""scripts/bench/figures/zero_memory.py: what the system has given processes is what is estimated."""

from __future__ import annotations

import pytest

from scripts.bench.figures import zero_memory

SMALLER = ["--ranks", "2", "--layers", "3"]
"""10 million parameters on two ranks: 77 MB and more, beside which what Python and libraries take is little."""


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.parametrize(
    ("stage", "extra"),
    [(0, ["--codec", "int8"]), (3, []), (3, ["--codec", "int8"])],
    ids=["int8", "stage3", "stage3-int8"],
)
def test_processes_hold_what_is_estimated(stage: int, extra: list[str]) -> None:
    found = zero_memory.measure(stage, [*SMALLER, *extra], ranks=2)
    assert found["counted"] == pytest.approx(found["held"], rel=0.1)
    assert found["pss"] == pytest.approx(found["between_steps"], rel=0.1)


@pytest.mark.soak
@pytest.mark.process
def test_stages_of_a_pipeline_hold_what_is_estimated() -> None:
    found = zero_memory.measure(1, ["--ranks", "2", "--layers", "6", "--pp", "2", "--micro-batches", "4"], ranks=2)
    assert found["counted"] == pytest.approx(found["held"], rel=0.1)
    assert found["pss"] == pytest.approx(found["between_steps"], rel=0.1)
