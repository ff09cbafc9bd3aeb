"""The search finds the right layouts in order, and reports why others are left out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from asyncpar.core.config.parallel import PipelineScheduleType
from asyncpar.errors import UsageError
from asyncpar.estimate.job import Job, Machine, ModelShape
from asyncpar.estimate.search import Findings, Misfit, Search, factorizations, find_layouts
from asyncpar.zero import ZeROStage

MODEL = ModelShape(layers=4, hidden=64, heads=4, vocabulary=101, sequence=32)
JOB = Job(model=MODEL, machine=Machine(ranks_per_host=4), batch=32)
ROOMY = 1e12
ONE_SCHEDULE = (PipelineScheduleType.ONE_FORWARD_ONE_BACKWARD,)


def find(job: Job = JOB, *, world: int = 8, memory: float = ROOMY, **settings: Any) -> Findings:
    return find_layouts(job, Search(world=world, memory=memory, **settings))


def considered(findings: Findings) -> int:
    return len(findings.layouts) + sum(findings.misfits.values())


@pytest.mark.parametrize(("world", "count"), [(1, 1), (7, 3), (8, 10), (16, 15), (12, 18)])
def test_factorizations_are_complete_and_different(world: int, count: int) -> None:
    found = list(factorizations(world))
    assert len(set(found)) == len(found) == count
    assert all(math.prod(sizes) == world for sizes in found)


def test_every_layout_is_counted_once_whatever_becomes_of_it() -> None:
    everything = considered(find())
    assert considered(find(memory=1e7)) == everything
    assert considered(find(replace(JOB, batch=4))) == everything
    shapes = [(4 if dp > 1 else 1) * (8 if pp > 1 else 1) for dp, _, pp in factorizations(8)]
    assert everything == sum(shapes)


def test_without_a_choice_of_zero_and_schedule_there_is_one_layout_for_each_factorization() -> None:
    found = find(schedules=ONE_SCHEDULE, zero_stages=(ZeROStage.NONE,))
    assert considered(found) == 10
    assert len(found.layouts) == 8
    assert dict(found.misfits) == {Misfit.HEADS: 1, Misfit.FEW_LAYERS: 1}


def test_layouts_that_come_to_the_same_are_one() -> None:
    found = find(world=2)
    without_pipeline = [layout for layout in found.layouts if layout.config.pp_size == 1]
    assert sorted((one.config.dp_size, one.zero.number) for one in without_pipeline) == [
        (1, 0),
        (2, 0),
        (2, 1),
        (2, 2),
        (2, 3),
    ]


def test_the_best_come_first_and_need_little_where_they_are_equally_quick() -> None:
    layouts = find().layouts
    assert len(layouts) > 50
    order = [(float(f"{one.step_seconds:.9g}"), one.memory.total) for one in layouts]
    assert order == sorted(order)


def test_all_that_is_found_fits_and_belongs_to_the_world() -> None:
    limit = sorted(one.memory.total for one in find().layouts)[20]
    found = find(memory=limit)
    assert len(found.layouts) >= 21
    for layout in found.layouts:
        assert layout.memory.total <= limit
        layout.config.validate(8, hidden=64, heads=4, batch=32)
        assert layout.micro_batches * layout.config.dp_size == 32


def test_when_nothing_fits_the_least_that_is_needed_is_reported() -> None:
    roomy = find()
    found = find(memory=1000.0)
    assert found.layouts == ()
    assert found.least is not None
    assert found.least.memory.total == min(one.memory.total for one in roomy.layouts)
    assert found.misfits[Misfit.MEMORY] == len(roomy.layouts)
    assert roomy.least is None


def test_heads_that_do_not_divide_are_counted() -> None:
    found = find(replace(JOB, model=replace(MODEL, heads=2)), schedules=ONE_SCHEDULE, zero_stages=(ZeROStage.NONE,))
    assert found.misfits[Misfit.HEADS] == 3


def test_more_pieces_than_layers_are_counted() -> None:
    found = find(world=4, schedules=(PipelineScheduleType.ZBV,), zero_stages=(ZeROStage.NONE,))
    assert dict(found.misfits) == {Misfit.FEW_LAYERS: 1}


def test_layers_that_do_not_divide_are_counted_unless_stages_may_differ() -> None:
    job = replace(JOB, model=replace(MODEL, layers=7))
    even, uneven = find(job, world=2), find(job, world=2, is_uneven=True)
    assert even.misfits[Misfit.UNEVEN_LAYERS] == 8
    assert Misfit.UNEVEN_LAYERS not in uneven.misfits
    splits = {one.config.virtual_stage_layers() for one in uneven.layouts if one.config.pp_size == 2}
    assert splits == {(4, 3), (2, 2, 2, 1)}


def test_batches_that_do_not_divide_are_counted() -> None:
    found = find(replace(JOB, batch=6), world=4, schedules=ONE_SCHEDULE, zero_stages=(ZeROStage.NONE,))
    assert dict(found.misfits) == {Misfit.BATCH: 1}


def test_a_world_of_one_has_one_layout() -> None:
    (only,) = find(world=1).layouts
    assert (only.config.world_size, only.zero, only.traffic.total) == (1, ZeROStage.NONE, 0.0)


def test_odd_vocabularies_do_not_stand_in_the_way() -> None:
    assert any(layout.config.tp_size == 4 for layout in find().layouts)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"world": 0}, "world: expected a positive number, got 0"),
        ({"world": 1_000_001}, "world: expected at most 1000000 ranks, got 1000001"),
        ({"memory": 0.0}, "memory: expected a positive number of bytes"),
        ({"chunks": 1}, "chunks: expected 2 or more, got 1"),
        ({"schedules": ()}, "schedules, zero_stages: expected at least one of each"),
    ],
)
def test_impossible_searches_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Search(**{"world": 8, "memory": ROOMY, **settings})
