"""A frozen parameter is a constant in all engines, and a run in which it was frozen goes on as torch's does."""

from __future__ import annotations

import numpy as np
import pytest

from asyncpar.errors import AsyncparError
from asyncpar.nn.optimizers import SGD, Adam, AdamW, Rule
from asyncpar.zero import ZeROStage
from tests.frozen.engines import ENGINES, NAMES, Plan, Values, synchronized, train_alone, zero
from tests.products import in_turn
from tests.soak import chosen

RULES: dict[str, Rule] = {
    "sgd": SGD(momentum=0.9, weight_decay=0.1),
    "adam": Adam(weight_decay=0.1),
    "adamw": AdamW(weight_decay=0.1),
}


def assert_equal(got: Values, expected: Values, *, tolerance: float = 0.0) -> None:
    for name, values in expected.items():
        if name == "norms" and not got[name].size:  # the engine shows none
            continue
        np.testing.assert_allclose(got[name], values, rtol=tolerance, atol=tolerance, err_msg=name)


FROZEN = [("one",), ("norm", "two"), ("three",), tuple(sorted(set(NAMES) - {"two"}))]


@pytest.mark.parametrize(
    ("engine", "frozen"),
    in_turn(chosen(list(ENGINES)[1::2], soak=ENGINES), FROZEN),
    ids=lambda part: part if isinstance(part, str) else "-".join(part),
)
async def test_a_run_with_frozen_layers_equals_one_of_a_model_where_they_are_constants(
    engine: str, frozen: tuple[str, ...]
) -> None:
    layers = frozenset(frozen)
    rule = AdamW(weight_decay=0.1)
    whole = await ENGINES[engine](Plan(rule=rule, frozen=lambda _: layers))
    reduced = await ENGINES[engine](Plan(rule=rule, constant=layers))
    first = train_alone(Plan(rule=rule, frozen=lambda _: frozenset(NAMES), steps=1))
    for got, expected in zip(whole, reduced, strict=True):
        assert_equal(got, expected)
        for name in got.keys() - expected.keys():
            np.testing.assert_array_equal(got[name], first[name], err_msg=name)


def turns(step: int) -> frozenset[str]:
    """Return what is frozen in a step: something else in each, everything in one, and then nothing."""
    return frozenset([{"one"}, {"two", "norm"}, set(NAMES), set(), {"three", "two"}, set()][step])


@pytest.mark.parametrize(("engine", "rule"), in_turn(ENGINES, RULES))
async def test_layers_are_frozen_and_go_on_in_mid_run(engine: str, rule: str) -> None:
    plan = Plan(rule=RULES[rule], frozen=turns, steps=6)
    alone = train_alone(plan)
    results = await ENGINES[engine](plan)
    for got in results:
        assert_equal(got, alone, tolerance=1e-9)
        assert_equal(got, results[0])


@pytest.mark.parametrize("engine", chosen(list(ENGINES)[::2], soak=list(ENGINES)))
async def test_ranks_that_differ_in_what_is_frozen_all_get_an_error_that_says_so(engine: str) -> None:
    plan = Plan(
        rule=AdamW(),
        steps=3,
        frozen_of=lambda rank, step: frozenset({"two"} if rank == 1 and step == 2 else {"one"} if step else set()),
    )
    with pytest.raises(ExceptionGroup) as failure:
        await ENGINES[engine](plan)
    assert len(failure.value.exceptions) == plan.size
    for error in failure.value.exceptions:
        assert isinstance(error, AsyncparError)
        assert "frozen" in str(error)
        assert "two/weight" in str(error) or "one/weight" in str(error)


@pytest.mark.parametrize("codec", ["int8", "topk:0.5", "powersgd:2", "sign"])
async def test_residuals_of_frozen_layers_wait_for_them(codec: str) -> None:
    plan = Plan(rule=SGD(), frozen=lambda step: frozenset({"two"} if step in (2, 3) else set()), steps=6)
    results = await synchronized(codec)(plan)
    assert_equal(results[1], results[0])


@pytest.mark.parametrize("stage", ZeROStage)
async def test_zero_with_compression_leaves_frozen_layers_alone(stage: ZeROStage) -> None:
    engine = zero(stage, dtype="float32", gradient_compression=True)
    plan = Plan(rule=AdamW(), frozen=lambda step: frozenset({"two"} if step else set()), steps=3)
    results = await engine(plan)
    first = await engine(Plan(rule=AdamW(), steps=1))
    for got in results:
        np.testing.assert_array_equal(got["two/weight"], first[0]["two/weight"])
