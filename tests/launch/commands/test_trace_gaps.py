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


def test_lost_events_arrows_and_an_early_end_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_MOST_EVENTS", 3)
    images = exchanged((0, 1.0, 1, 1.2), (0, 2.0, 1, 4.5))
    images[1] = replace(images[1], lost=12345)
    assert trace.describe_gaps(images, make_timeline(images), 5.0) == [
        "it has as many events as a trace may have, 3, and may end before 5 s are over",
        "12,345 events of rank 1 are missing: others took their places in the ring, which has room for 4,096, before "
        "they were read",
        "arrows that are left out, since they are shorter than the clocks are certain: 1",
    ]


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
