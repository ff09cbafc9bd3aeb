"""Bytes per parameter with ZeRO."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from asyncpar.errors import UsageError
from asyncpar.estimate.job import Precision
from asyncpar.estimate.memory import bytes_per_parameter
from asyncpar.zero import ZeROStage

ANCHORS = json.loads((Path(__file__).parents[1] / "goldens" / "memory_anchors.json").read_text())["zero_GB"]
FIGURES = [(billions, int(ranks), row) for billions, rows in ANCHORS.items() for ranks, row in rows.items()]
FORMULAS: dict[Precision, list[tuple[int, int]]] = {
    Precision.FP32: [(16, 0), (8, 8), (4, 12), (0, 16)],
    Precision.MIXED: [(16, 0), (4, 12), (2, 14), (0, 16)],
}


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("replicas", [1, 2, 3, 7, 64])
def test_bytes_per_parameter_are_those_of_the_formulas(precision: Precision, stage: int, replicas: int) -> None:
    whole, spread = FORMULAS[precision][stage]
    assert bytes_per_parameter(stage, replicas, precision).total == pytest.approx(
        float(whole + Fraction(spread, replicas)), rel=1e-15
    )


@pytest.mark.parametrize(("billions", "ranks", "row"), FIGURES)
def test_figures_of_the_zero_paper_come_out(billions: str, ranks: int, row: list[float]) -> None:
    found = [bytes_per_parameter(stage, ranks, Precision.MIXED).total * float(billions) for stage in (1, 2, 3)]
    assert found == pytest.approx(row, abs=5.1e-5)


def test_stages_may_be_named_or_numbered() -> None:
    for number, stage in enumerate(ZeROStage):
        assert bytes_per_parameter(stage, 4) == bytes_per_parameter(number, 4)


@pytest.mark.parametrize(("states", "single", "mixed"), [(0, 8, 8), (1, 12, 12), (2, 16, 16)])
def test_other_optimizers_keep_less(states: int, single: float, mixed: float) -> None:
    assert bytes_per_parameter(0, 1, "fp32", optimizer_states=states).total == single
    assert bytes_per_parameter(0, 1, "mixed", optimizer_states=states).total == mixed


def test_each_stage_spreads_one_thing_more() -> None:
    rows = [bytes_per_parameter(stage, 4) for stage in range(4)]
    assert [(row.values, row.gradients, row.optimizer) for row in rows] == [(4, 4, 8), (4, 4, 2), (4, 1, 2), (1, 1, 2)]


def test_bytes_for_many_parameters_are_that_many_times_more() -> None:
    assert bytes_per_parameter(1, 4).times(1000).total == 10_000


@pytest.mark.parametrize(
    ("stage", "replicas", "precision", "message"),
    [
        (4, 1, "fp32", "stage: expected 0 to 3, got 4"),
        (-1, 1, "fp32", "stage: expected 0 to 3, got -1"),
        (1, 0, "fp32", "replicas: expected a positive number, got 0"),
        (1, 1, "fp8", "precision: expected one of fp32, mixed, got 'fp8'"),
    ],
)
def test_what_does_not_exist_is_refused(stage: int, replicas: int, precision: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bytes_per_parameter(stage, replicas, precision)
