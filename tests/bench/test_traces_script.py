"""The check of traces: it finds all of a good one, and counts an arrow that is missing or points backwards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncpar.core.observe.records import EventKind
from asyncpar.observe.perfetto import encode_perfetto
from asyncpar.observe.timeline import Timeline, make_timeline
from asyncpar.testing.loop import run_virtual
from scripts.bench.goals import traces
from tests.observe.test_timeline import images_of_a_run, on_two_hosts


async def _timeline() -> Timeline:
    return make_timeline(on_two_hosts(await images_of_a_run()))


def test_every_arrow_of_a_good_trace_is_found_and_one_that_is_missing_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traces, "EDGE_SECONDS", -1.0)
    timeline = run_virtual(_timeline())
    found = traces.check(encode_perfetto(timeline))
    assert (found["slices"], found["arrows"]) == (len(timeline.slices), len(timeline.arrows))
    assert found["messages"] == 20
    assert found["messages_without_arrow"] == found["arrows_without_begin"] == found["arrows_backwards"] == 0

    messages = [arrow for arrow in timeline.arrows if arrow.sink.event.kind is EventKind.RECEIVE]
    lacking = replace(timeline, arrows=tuple(arrow for arrow in timeline.arrows if arrow is not messages[7]))
    assert traces.check(encode_perfetto(lacking))["messages_without_arrow"] == 1


def test_an_arrow_that_points_backwards_is_counted() -> None:
    timeline = run_virtual(_timeline())
    first, *others = timeline.arrows
    late = replace(first.source, begun=first.sink.ended + 1.0, ended=first.sink.ended + 2.0)
    turned = replace(timeline, arrows=(replace(first, source=late), *others))
    assert traces.check(encode_perfetto(turned))["arrows_backwards"] == 1
