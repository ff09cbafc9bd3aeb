"""Runs of pipelines as their ranks recorded them, put on one clock."""

from __future__ import annotations

import json

import msgspec
import pytest

from asyncpar.core.observe.records import EventKind, EventState, GroupIdentity, RankIdentity
from asyncpar.observe.image import Event, RankImage
from asyncpar.observe.pipeline_runs import MOST_ACTIONS, MOST_ROWS, PipelineSummary, draw_run, summarize_pipeline
from asyncpar.testing.jobs import record_pipeline

GROUP = 77


def action(ticket: int, name: str, run: int, batch: int, begun: float, **fields: object) -> Event:
    made = Event(
        ticket=ticket,
        kind=EventKind.PIPELINE,
        state=EventState.COMPLETED,
        created=begun,
        ended=begun + 1.0,
        name=name,
        text=f"stage=0, micro-batch={batch}",
        group=GROUP,
        sequence=run,
    )
    return msgspec.structs.replace(made, **fields)


def image(*events: Event) -> RankImage:
    group = GroupIdentity(number=GROUP, name="pipeline", ranks=(4, 6))
    return RankImage(identity=RankIdentity(rank=4, size=8, clock_domain="a"), events=events, groups={GROUP: group})


def test_a_rank_reports_the_last_runs_of_its_last_pipeline() -> None:
    runs = [action(run * 2 + batch, "forward", run, batch, run * 10.0 + batch) for run in range(9) for batch in (0, 1)]
    other = action(0, "forward", 1, 0, 0.0, group=5)
    under_way = action(99, "backward", 8, 0, 95.0, ended=None, state=EventState.STARTED)
    reported = summarize_pipeline(image(other, *runs, under_way))
    assert reported.ranks == (4, 6)
    assert [(run.number, len(run.actions)) for run in reported.runs] == [(6, 2), (7, 2), (8, 2)]
    assert reported.runs[-1].actions[1].micro_batch == 1
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(reported), type=PipelineSummary) == reported
    assert summarize_pipeline(image()).runs == ()


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (4, 1), (4, 2), (16, 1)])
def test_all_actions_of_a_run_are_drawn_in_the_order_of_stages(stages: int, chunks: int) -> None:
    run = draw_run(record_pipeline(stages, micro_batches=2 * stages, chunks=chunks)[::-1])
    assert run is not None
    assert [row["rank"] for row in run["rows"]] == list(range(stages))
    assert run["rows"][0]["stages"] == list(range(0, stages * chunks, stages))
    kinds = [run["kinds"][kind] for row in run["rows"] for kind, *_ in row["actions"]]
    assert {name: kinds.count(name) for name in set(kinds)} == dict.fromkeys(
        ("forward", "backward"), 2 * stages * stages * chunks
    )
    ends = [begun + took for row in run["rows"] for *_, begun, took in row["actions"]]
    assert max(ends) == pytest.approx(run["seconds"] * 1e6, abs=1.0)
    assert all(0.0 < row["busy"] <= 1.0 for row in run["rows"])
    assert (run["left"], run["total"]) == (0, stages)
    json.dumps(run, allow_nan=False)


def test_clocks_that_are_seconds_apart_are_put_together_by_what_stages_hand_on() -> None:
    reported = record_pipeline(4, micro_batches=8)
    straight = draw_run(reported)
    apart = draw_run([moved(one, 5.0 * place) for place, one in enumerate(reported)])
    assert straight is not None
    assert apart is not None
    assert apart["seconds"] == pytest.approx(straight["seconds"], rel=0.2)
    begun = {(row["rank"], *one[:3]): one[3] for row in apart["rows"] for one in row["actions"]}
    took = {(row["rank"], *one[:3]): one[4] for row in apart["rows"] for one in row["actions"]}
    for (rank, kind, stage, batch), at in begun.items():
        if kind == 0 and stage > 0:
            before = (rank - 1, 0, stage - 1, batch)
            assert at >= begun[before] + took[before] - 2, "no stage begins before the one before it has ended"


def moved(reported: PipelineSummary, seconds: float) -> PipelineSummary:
    runs = tuple(
        msgspec.structs.replace(
            run,
            actions=tuple(
                msgspec.structs.replace(one, begun=one.begun + seconds, ended=one.ended + seconds)
                for one in run.actions
            ),
        )
        for run in reported.runs
    )
    identity = msgspec.structs.replace(reported.identity, clock_domain=f"host {seconds}", clock=0.0, wall=0.0)
    return msgspec.structs.replace(reported, identity=identity, runs=runs)


def test_the_last_run_that_all_have_done_whole_is_drawn() -> None:
    first, second = record_pipeline(2, micro_batches=4, runs=3)
    torn = msgspec.structs.replace(second.runs[2], actions=second.runs[2].actions[:3])
    run = draw_run([first, msgspec.structs.replace(second, runs=(*second.runs[:2], torn))])
    assert run is not None
    assert run["run"] == second.runs[1].number
    alone = draw_run([first, msgspec.structs.replace(second, runs=())])
    assert alone is not None
    assert len(alone["rows"]) == 1
    assert draw_run([]) is None
    assert draw_run([msgspec.structs.replace(first, runs=())]) is None


def test_large_runs_are_cut_and_it_is_reported() -> None:
    run = draw_run(record_pipeline(16, micro_batches=256))
    assert run is not None
    assert sum(len(row["actions"]) for row in run["rows"]) <= MOST_ACTIONS
    assert run["left"] == 16 * 512 - MOST_ACTIONS
    many = draw_run(record_pipeline(MOST_ROWS + 6, micro_batches=4))
    assert many is not None
    assert (len(many["rows"]), many["total"]) == (MOST_ROWS, MOST_ROWS + 6)
