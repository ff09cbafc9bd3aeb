"""Layers cut over ranks compute what the whole layers do: outputs, input gradients, parameter gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from asyncpar.core.config.placement import Placement, Replication
from asyncpar.nn import (
    Array,
    Block,
    CausalSelfAttention,
    Embedding,
    Initializer,
    Linear,
    Mlp,
    Parameter,
    Stage,
)
from asyncpar.nn.block import BlockOptions
from asyncpar.nn.tensor import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelBlock,
    ParallelMlp,
    RowParallelLinear,
    TensorRegion,
    VocabParallelEmbedding,
)
from asyncpar.shards.plan import split_bounds
from tests.nn.gradients import make_initializer
from tests.nn.tensor.crew import run_ranks, whole_gradients

BATCH, LENGTH, FEATURES, HEADS = 2, 5, 12, 12
X = np.random.default_rng(7).normal(size=(BATCH, LENGTH, FEATURES))
TOKENS = np.random.default_rng(7).integers(0, 11, (3, LENGTH))
TOLERANCE = 1e-12
OPTIONS = BlockOptions(hidden=7)

Make = Callable[[TensorRegion, Initializer], Stage[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A layer and the whole one; how input and output lie over ranks: everything, or cut along the last dimension."""

    whole: Callable[[Initializer], Stage[Any]]
    cut: Make
    takes_tokens: bool = False
    cuts_input: bool = False
    cuts_output: bool = False

    @property
    def x(self) -> Any:
        return TOKENS if self.takes_tokens else X


def column(region: TensorRegion, draw: Initializer, **options: Any) -> Stage[Any]:
    return ColumnParallelLinear("linear", FEATURES, 7, region=region, initializer=draw, **options)


def row(region: TensorRegion, draw: Initializer, **options: Any) -> Stage[Any]:
    return RowParallelLinear("linear", FEATURES, 7, region=region, initializer=draw, **options)


def linear(draw: Initializer, *, has_bias: bool = True) -> Stage[Any]:
    return Linear("linear", FEATURES, 7, initializer=draw, has_bias=has_bias)


CASES: dict[str, Case] = {
    "column": Case(whole=linear, cut=column, cuts_output=True),
    "column without bias": Case(
        whole=lambda draw: linear(draw, has_bias=False),
        cut=lambda region, draw: column(region, draw, has_bias=False),
        cuts_output=True,
    ),
    "column, gathered": Case(whole=linear, cut=lambda region, draw: column(region, draw, gather_output=True)),
    "row": Case(whole=linear, cut=row, cuts_input=True),
    "row without bias": Case(
        whole=lambda draw: linear(draw, has_bias=False),
        cut=lambda region, draw: row(region, draw, has_bias=False),
        cuts_input=True,
    ),
    "row, whole input": Case(whole=linear, cut=lambda region, draw: row(region, draw, input_is_parallel=False)),
    "attention": Case(
        whole=lambda draw: CausalSelfAttention("attention", FEATURES, HEADS, initializer=draw),
        cut=lambda region, draw: ParallelAttention("attention", FEATURES, HEADS, region=region, initializer=draw),
    ),
    "mlp": Case(
        whole=lambda draw: Mlp("mlp", FEATURES, 7, initializer=draw),
        cut=lambda region, draw: ParallelMlp("mlp", FEATURES, 7, region=region, initializer=draw),
    ),
    "block": Case(
        whole=lambda draw: Block("block", FEATURES, HEADS, initializer=draw, options=OPTIONS),
        cut=lambda region, draw: ParallelBlock(
            "block", FEATURES, HEADS, region=region, initializer=draw, options=OPTIONS
        ),
    ),
    "embedding": Case(
        whole=lambda draw: Embedding("embedding", 11, FEATURES, max_length=9, initializer=draw),
        cut=lambda region, draw: VocabParallelEmbedding(
            "embedding", 11, FEATURES, max_length=9, region=region, initializer=draw
        ),
        takes_tokens=True,
    ),
}
SEQUENCE_CASES = ["column", "column, gathered", "row", "attention", "mlp", "block", "embedding"]


def part_of(x: Array, dim: int, rank: int, size: int) -> Array:
    return x[(slice(None),) * dim + (slice(*split_bounds(x.shape[dim], size)[rank]),)].copy()


def randomize(stage: Stage[Any]) -> None:
    """Give biases and scales other values than zero and one, the same in every part."""
    for parameter in stage.parameters():
        whole = np.random.default_rng(len(parameter.name)).normal(0.0, 0.3, parameter.slice.global_shape)
        parameter.value += parameter.slice.cut(whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    y: Array
    dx: Array | None
    parameters: list[Parameter]


def run_whole(case: Case) -> tuple[Result, Array]:
    stage = case.whole(make_initializer())
    randomize(stage)
    y, saved = stage.forward(case.x)
    dy = np.random.default_rng(2).normal(size=y.shape)
    dx = stage.backward(saved, dy)
    return Result(y=y, dx=dx, parameters=list(stage.parameters())), dy


def run_cut(case: Case, size: int, dy: Array, *, sequence: bool, split: bool) -> list[Result]:
    input_dim = 2 if case.cuts_input else 1 if sequence and not case.takes_tokens else None
    output_dim = 2 if case.cuts_output else 1 if sequence and case is not CASES["column, gathered"] else None

    def run(group: Any) -> Result:
        stage = case.cut(TensorRegion(group=group, sequence_parallel=sequence), make_initializer())
        randomize(stage)
        x = case.x if input_dim is None else part_of(case.x, input_dim, group.rank, size)
        own = dy if output_dim is None else part_of(dy, output_dim, group.rank, size)
        before = x.copy(), own.copy()
        y, saved = stage.forward(x)
        if split:
            dx, deferred = stage.backward_input(saved, own)
            stage.backward_weight(deferred)
        else:
            dx = stage.backward(saved, own)
        np.testing.assert_array_equal(x, before[0])
        np.testing.assert_array_equal(own, before[1])
        return Result(y=y, dx=dx, parameters=list(stage.parameters()))

    results = run_ranks(size, run)
    return [
        Result(
            y=results[0].y if output_dim is None else np.concatenate([one.y for one in results], axis=output_dim),
            dx=results[0].dx
            if input_dim is None
            else np.concatenate([one.dx for one in results if one.dx is not None], axis=input_dim),
            parameters=one.parameters,
        )
        for one in results
    ]


@pytest.mark.parametrize(
    ("name", "sequence"),
    [(name, False) for name in CASES] + [(name, True) for name in SEQUENCE_CASES],
    ids=[*CASES, *(f"{name}, sequence" for name in SEQUENCE_CASES)],
)
@pytest.mark.parametrize("split", [False, True], ids=["", "split"])
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_a_cut_layer_computes_what_the_whole_one_does(name: str, sequence: bool, size: int, split: bool) -> None:
    case = CASES[name]
    whole, dy = run_whole(case)
    results = run_cut(case, size, dy, sequence=sequence, split=split)
    for result in results:
        np.testing.assert_allclose(result.y, whole.y, rtol=TOLERANCE, atol=TOLERANCE)
        if whole.dx is None:
            assert result.dx is None
        else:
            assert result.dx is not None
            np.testing.assert_allclose(result.dx, whole.dx, rtol=TOLERANCE, atol=TOLERANCE)
    gradients = whole_gradients([result.parameters for result in results])
    assert sorted(gradients) == sorted(parameter.name for parameter in whole.parameters)
    for parameter in whole.parameters:
        np.testing.assert_allclose(
            gradients[parameter.name], parameter.grad, rtol=TOLERANCE, atol=TOLERANCE, err_msg=parameter.name
        )


def placements(size: int, *, sequence: bool) -> dict[str, Placement]:
    def run(group: Any) -> dict[str, Placement]:
        region = TensorRegion(group=group, sequence_parallel=sequence)
        draw = make_initializer()
        embedding = CASES["embedding"].cut(region, draw)
        block = CASES["block"].cut(region, draw)
        return {p.name: p.placement for p in (*embedding.parameters(), *block.parameters())}

    return run_ranks(size, run)[0]


REPLICATED = {
    "embedding/positions",
    "block/first_norm/scale",
    "block/first_norm/shift",
    "block/attention/output/bias",
    "block/second_norm/scale",
    "block/second_norm/shift",
    "block/mlp/narrow/bias",
}


@pytest.mark.parametrize(("sequence", "kind"), [(False, Replication.WHOLE), (True, Replication.PARTIAL)])
def test_what_every_rank_has_is_placed_so_and_the_rest_is_not(sequence: bool, kind: Replication) -> None:
    for name, placement in placements(2, sequence=sequence).items():
        assert placement == Placement(replicated=kind if name in REPLICATED else None), name


def test_one_rank_has_nothing_that_another_has() -> None:
    assert set(placements(1, sequence=True).values()) == {Placement()}


def test_reports_come_in_the_order_of_the_whole_layer() -> None:
    orders: list[list[str]] = []
    stage = CASES["block"].whole(make_initializer())
    y, saved = stage.forward(X)
    orders.append([])
    stage.backward(saved, y, orders[-1].append)

    def run(group: Any) -> list[str]:
        stage = CASES["block"].cut(TensorRegion(group=group), make_initializer())
        y, saved = stage.forward(X)
        reported: list[str] = []
        stage.backward(saved, y, reported.append)
        return reported

    assert run_ranks(2, run) == [orders[0], orders[0]]


def test_sequences_shorter_than_the_ranks_leave_some_without_activations() -> None:
    case = CASES["block"]
    whole = case.whole(make_initializer())
    expected, _ = whole.forward(X[:, :2])

    def run(group: Any) -> tuple[Array, Array | None]:
        stage = case.cut(TensorRegion(group=group, sequence_parallel=True), make_initializer())
        y, saved = stage.forward(part_of(X[:, :2], 1, group.rank, 3))
        return y, stage.backward(saved, y)

    results = run_ranks(3, run)
    assert [y.shape[1] for y, _ in results] == [1, 1, 0]
    np.testing.assert_allclose(np.concatenate([y for y, _ in results], axis=1), expected, rtol=1e-12)
