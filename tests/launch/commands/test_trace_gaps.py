"""Sentences about gaps in a trace, and files that are written whole or not at all."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import pytest

from asyncpar.errors import LaunchError
from asyncpar.launch.command_line import write_result
from asyncpar.launch.commands import trace
from asyncpar.observe.timeline import make_timeline
from asyncpar.testing.loop import run_virtual
from tests.observe.test_timeline import exchanged, images_of_a_run


def test_a_whole_trace_lacks_nothing() -> None:
    images = run_virtual(images_of_a_run())
    assert trace.describe_gaps(images, make_timeline(images), 5.0) == []


def test_lost_events_arrows_and_an_early_end_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_MOST_EVENTS", 3)
    images = exchanged((0, 1.0, 1, 1.2), (0, 2.0, 1, 4.5))
    images[1] = replace(images[1], lost=12345)
    assert trace.describe_gaps(images, make_timeline(images), 5.0, is_full=True) == [
        "it has as many events as a trace may have, 3, and may end before 5 s are over",
        "12,345 events of rank 1 are missing: others took their places in the ring, which has room for 4,096, before "
        "they were read",
        "arrows that are left out, since they are shorter than the clocks are certain: 1",
    ]


@pytest.mark.parametrize("here", ["host of rank 1", "elsewhere"])
def test_a_recording_begins_with_its_first_request_on_every_clock(here: str) -> None:
    images = exchanged((0, 1.0, 1, 6.001), (1, 6.5, 0, 1.503), (0, 9.0, 1, 14.001))  # rank 1 is 5 s ahead
    first = {rank: replace(image, events=image.events[:2]) for rank, image in images.items()}
    recording = trace.Recording(started=8.0, wall=3.0, first=first, images=images)
    assert recording.begin(make_timeline(images), here) == pytest.approx(3.0, abs=0.01)


@pytest.mark.parametrize(("wall", "begun"), [(-60.0, 1.503), (60.0, 9.0)])
def test_where_the_time_of_the_day_is_wrong_a_recording_has_all_that_is_new_and_nothing_old(
    wall: float, begun: float
) -> None:
    images = exchanged((0, 1.0, 1, 6.001), (1, 6.5, 0, 1.503), (0, 9.0, 1, 14.001))
    first = {rank: replace(image, events=image.events[:2]) for rank, image in images.items()}
    recording = trace.Recording(started=0.0, wall=wall, first=first, images=images)
    assert recording.begin(make_timeline(images), "elsewhere") == pytest.approx(begun, abs=0.01)


def test_old_events_leave_the_room_of_a_trace_to_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_MOST_EVENTS", 2)
    images = exchanged((0, 1.0, 1, 1.2), (0, 2.0, 1, 2.2), (0, 3.0, 1, 3.2))
    recording = trace.record(lambda: (images, {0: "it answered later", 7: "silent"}), 0.0)
    assert (dict(recording.images), dict(recording.silent)) == (images, {7: "silent"})
    assert not recording.is_full
    assert replace(recording, first={}).is_full


def test_a_full_disk_leaves_the_file_of_before_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "t.pftrace"
    write_result(path, b"before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(LaunchError, match=r"t\.pftrace cannot be written: File too large"):
            write_result(path, bytes(2 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("t.pftrace", b"before")]


def test_a_device_stays_what_it_is() -> None:
    with pytest.raises(LaunchError, match="/dev/full cannot be written: No space left on device"):
        write_result(Path("/dev/full"), b"x")
    assert Path("/dev/full").is_char_device()
    write_result(Path("/dev/null"), b"x")
