"""Bad input is refused on every rank, by name, before anything is exchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncpar.errors import UsageError
from asyncpar.nn import Parameter, TransformerConfig
from asyncpar.nn.tensor import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMlp,
    RowParallelLinear,
    SingleRankGroup,
    TensorRegion,
    VocabParallelEmbedding,
    build_stage,
)
from tests.nn.gradients import make_initializer
from tests.nn.tensor.crew import errors_of

CONFIG = TransformerConfig(vocabulary=8, length=6, features=12, layers=4, heads=6)
X = np.zeros((2, 5, 12))
TOKENS: Any = np.zeros((2, 5), np.int64)

Attempt = Callable[[TensorRegion], Any]


def column(region: TensorRegion) -> ColumnParallelLinear:
    return ColumnParallelLinear("linear", 12, 7, region=region, initializer=make_initializer())


def row(region: TensorRegion, **options: Any) -> RowParallelLinear:
    return RowParallelLinear("linear", 12, 7, region=region, initializer=make_initializer(), **options)


def attention(region: TensorRegion, heads: int = 6) -> ParallelAttention:
    return ParallelAttention("attention", 12, heads, region=region, initializer=make_initializer())


def embedding(region: TensorRegion, vocabulary: int = 8) -> VocabParallelEmbedding:
    return VocabParallelEmbedding(
        "embedding", vocabulary, 12, max_length=6, region=region, initializer=make_initializer()
    )


def mlp(region: TensorRegion, hidden: int) -> ParallelMlp:
    return ParallelMlp("mlp", 12, hidden, region=region, initializer=make_initializer())


def refused(size: int, attempt: Attempt, message: str, *, sequence: bool = False) -> None:
    for error in errors_of(size, lambda group: attempt(TensorRegion(group=group, sequence_parallel=sequence))):
        with pytest.raises(UsageError, match=message):
            raise error or AssertionError("nothing was refused")


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda region: attention(region, heads=5), "attention: expected heads that divide 12 features, got 5"),
        (lambda region: attention(region, heads=2), "heads that divide among 4 tensor-parallel ranks, got 2"),
        (lambda region: embedding(region, vocabulary=3), "expected vocabulary >= 4 tensor-parallel ranks, got 3"),
        (lambda region: embedding(region, vocabulary=0), "embedding: vocabulary must be a positive integer"),
        (lambda region: mlp(region, 3), "mlp/widen: expected outputs >= 4 tensor-parallel ranks, got 3"),
        (lambda region: mlp(region, 0), "mlp/widen: outputs must be a positive integer, got 0"),
    ],
)
def test_layers_that_cannot_be_cut_are_refused(attempt: Attempt, message: str) -> None:
    refused(4, attempt, message)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda region: column(region).forward(X[..., :5]), r"linear: expected .* \(\.\.\., 12\), got \(2, 5, 5\)"),
        (
            lambda region: row(region).forward(X),
            r"linear: expected an input of shape \(\.\.\., [46]\), got \(2, 5, 12\)",
        ),
        (lambda region: row(region, input_is_parallel=False).forward(X[..., :6]), r"expected .* \(\.\.\., 12\)"),
        (lambda region: attention(region).forward(X[0]), r"attention: expected shape \(batch, length, 12\)"),
        (lambda region: embedding(region).forward(TOKENS + 8), r"embedding: expected tokens 0\.\.7, got 8\.\.8"),
        (lambda region: embedding(region).forward(TOKENS - 1), r"embedding: expected tokens 0\.\.7, got -1\.\.-1"),
        (lambda region: embedding(region).forward(TOKENS * 1.0), "embedding: expected token numbers"),
        (lambda region: embedding(region).forward(TOKENS[0]), r"embedding: expected shape \(batch, 1\.\.6\)"),
    ],
)
@pytest.mark.parametrize("size", [2, 3])
def test_inputs_of_wrong_shapes_are_refused(attempt: Attempt, message: str, size: int) -> None:
    refused(size, attempt, message)


def test_sequence_parallelism_needs_sequences() -> None:
    refused(2, lambda region: column(region).forward(X[0]), r"\(batch, part of the length, 12\)", sequence=True)
    refused(2, lambda region: row(region).forward(X[0, :, :6]), r"\(batch, length, 6\)", sequence=True)
    refused(2, lambda region: row(region, input_is_parallel=False), "expected a parallel input", sequence=True)


def test_output_gradients_of_wrong_shapes_are_refused() -> None:
    def attempt(region: TensorRegion) -> None:
        stage = column(region)
        _, saved = stage.forward(X)
        stage.backward(saved, X)

    refused(2, attempt, r"linear: expected an output gradient of shape \(2, 5, [34]\), got \(2, 5, 12\)")


def build(region: TensorRegion, config: TransformerConfig = CONFIG, **changes: Any) -> Any:
    options: dict[str, Any] = {"layers": range(4), "is_first": True, "is_last": True, **changes}
    return build_stage(config, group=region.group, **options)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda region: build(region, replace(CONFIG, heads=3)), "heads: expected heads that divide among 2 .* got 3"),
        (
            lambda region: build(region, replace(CONFIG, vocabulary=1)),
            "vocabulary: expected one for each of 2 .* got 1",
        ),
        (
            lambda region: build(region, replace(CONFIG, mlp_hidden=1)),
            "mlp_hidden: expected one for each of 2 .* got 1",
        ),
        (lambda region: build(region, layers=range(5)), r"layers: expected a range within 0\.\.4, from the first"),
        (lambda region: build(region, layers=range(3)), r"layers: expected .*, to the last, got range\(0, 3\)"),
        (lambda region: build(region, layers=range(1, 4)), r"layers: expected .*, from the first"),
        (lambda region: build(region, layers=range(0, 4, 2)), r"layers: expected a range within 0\.\.4"),
        (
            lambda region: build(region, layers=range(2, 2), is_first=False, is_last=False),
            "layers: expected at least one on a stage in the middle",
        ),
        (lambda region: build(region, replica=-1), "replica: expected a data-parallel rank, got -1"),
        (
            lambda region: build(region, table=Parameter("embedding/tokens", np.zeros((8, 12)))),
            "table: expected one only",
        ),
    ],
)
def test_stages_that_cannot_be_are_refused(attempt: Attempt, message: str) -> None:
    refused(2, attempt, message)


def test_another_table_than_the_first_stage_has_is_refused() -> None:
    config = replace(CONFIG, tied_embeddings=True)
    table = Parameter("embedding/tokens", np.zeros((7, 12), np.float32))
    with pytest.raises(UsageError, match=r"table: expected the first stage's .* got .*7, 12"):
        build_stage(config, layers=range(2, 4), is_first=False, is_last=True, group=SingleRankGroup(), table=table)


def test_blocks_are_replaced_one_by_one() -> None:
    stage = build_stage(CONFIG, layers=range(4), is_first=True, is_last=True, group=SingleRankGroup())
    assert stage.with_blocks(stage.blocks).layers() == stage.layers()
    with pytest.raises(UsageError, match="blocks: expected 4, one for each there is, got 3"):
        stage.with_blocks(stage.blocks[:3])
