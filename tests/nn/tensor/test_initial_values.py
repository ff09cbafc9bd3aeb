"""One seed fixes the whole model, however it is cut."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncpar.nn import Parameter, Stage, Transformer, TransformerConfig
from asyncpar.nn.tensor import SingleRankGroup, TensorGroup, TransformerStage, build_stage
from tests.nn.tensor.crew import run_ranks, whole_values

CONFIG = TransformerConfig(vocabulary=23, length=7, features=24, layers=3, heads=12, mlp_hidden=17, seed=5)


def build(config: TransformerConfig, split: Sequence[range], group: TensorGroup) -> list[TransformerStage]:
    last = len(split) - 1
    return [
        build_stage(config, layers=layers, is_first=i == 0, is_last=i == last, group=group)
        for i, layers in enumerate(split)
    ]


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("split", [(range(3),), (range(1), range(1, 2), range(2, 3))], ids=["whole", "split"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_parts_put_together_are_the_model_of_one_process(size: int, split: tuple[range, ...], tied: bool) -> None:
    config = replace(CONFIG, tied_embeddings=tied)

    def run(group: TensorGroup) -> list[Parameter]:
        by_name = {p.name: p for stage in build(config, split, group) for p in stage.parameters()}
        return list(by_name.values())

    values = whole_values(run_ranks(size, run))
    expected = Transformer(config).parameters()
    assert sorted(values) == sorted(parameter.name for parameter in expected)
    for parameter in expected:
        np.testing.assert_array_equal(values[parameter.name], parameter.value, err_msg=parameter.name)


def test_queries_keys_and_values_are_each_cut_by_heads() -> None:
    whole = {p.name: p for p in Transformer(CONFIG).parameters()}["block0/attention/project/weight"].value
    parts = run_ranks(2, lambda group: build(CONFIG, [range(3)], group)[0].parameters())
    for rank, parameters in enumerate(parts):
        (part,) = [p.value for p in parameters if p.name == "block0/attention/project/weight"]
        own = slice(12 * rank, 12 * (rank + 1))
        np.testing.assert_array_equal(part, np.hstack([whole[:, i * 24 : (i + 1) * 24][:, own] for i in range(3)]))


def test_an_odd_vocabulary_is_cut_with_the_larger_parts_first() -> None:
    config = replace(CONFIG, vocabulary=101, heads=4)
    shapes = run_ranks(4, lambda group: build(config, [range(3)], group)[0].parameters()[0].shape)
    assert [rows for rows, _ in shapes] == [26, 25, 25, 25]


def test_the_tied_table_is_the_same_at_both_ends() -> None:
    config = replace(CONFIG, tied_embeddings=True)
    first, last = build(config, [range(2), range(2, 3)], SingleRankGroup())
    (table,) = [p for p in first.parameters() if p.name == "embedding/tokens"]
    (head,) = [p for p in last.parameters() if p.name == "embedding/tokens"]
    np.testing.assert_array_equal(head.value, table.value)
    assert table is not head
    assert (first.table, last.table) == (table, None)
    assert table.placement.tied == head.placement.tied == "embedding/tokens"
    assert [p.name for p in first.parameters() if p.placement.tied] == ["embedding/tokens"]
    assert [p.name for p in last.parameters() if p.placement.tied] == ["embedding/tokens"]


def test_where_both_ends_are_on_one_rank_they_share_one_table() -> None:
    config = replace(CONFIG, tied_embeddings=True)
    first = build_stage(config, layers=range(2), is_first=True, is_last=False, group=SingleRankGroup())
    table = first.table
    assert table is not None
    last = build_stage(config, layers=range(2, 3), is_first=False, is_last=True, group=SingleRankGroup(), table=table)
    assert last.parameters()[-1] is table
    assert table.placement.tied is None


def test_a_stage_never_needs_the_memory_of_the_whole_model() -> None:
    config = TransformerConfig(vocabulary=64, length=8, features=32, layers=24, heads=4)
    whole = Transformer(config).parameter_count * 4
    tracemalloc.start()
    try:
        stage = build_stage(config, layers=range(22, 24), is_first=False, is_last=True, group=SingleRankGroup())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    own = sum(parameter.value.nbytes + parameter.grad.nbytes for parameter in stage.parameters())
    assert own < whole / 4
    assert peak < whole / 2


def test_layers_are_wrapped_as_soon_as_they_are_made() -> None:
    made: list[str] = []

    def keep(stage: Stage[Any]) -> Stage[Any]:
        made.append(stage.parameters()[0].name)
        return stage

    build_stage(CONFIG, layers=range(1, 3), is_first=False, is_last=True, group=SingleRankGroup(), wrap=keep)
    assert made == ["block1/first_norm/scale", "block2/first_norm/scale", "norm/scale", "head/weight"]
