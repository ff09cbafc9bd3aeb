"""Collections and the time for which others have the processor are in the ring."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from asyncpar.core.observe.pauses import COLLECTION, TAKEN, PauseRecorder
from asyncpar.core.observe.recorder import open_recorder
from asyncpar.core.observe.records import RankIdentity
from asyncpar.observe.image import read_image


def write_times(folder: Path, **threads: tuple[int, int]) -> None:
    """Say for how many milliseconds each thread has run, and waited for a processor."""
    for name, (ran, waited) in threads.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "schedstat").write_text(f"{ran}000000 {waited}000000 3\n")


def test_collections_are_spans_and_samples_say_what_was_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorder = open_recorder(RankIdentity(rank=0, size=1))
    pauses = PauseRecorder(recorder)
    pauses.start()
    try:
        gc.collect()
        gc.collect(0)
        monkeypatch.setattr("asyncpar.core.observe.pauses._THREADS", str(tmp_path))
        write_times(tmp_path, loop=(5, 1), worker=(0, 0), idle=(9, 9))
        pauses.sample()
        write_times(tmp_path, loop=(8, 31), worker=(1, 20), idle=(9, 9))
        assert pauses.sample() == pytest.approx(0.03)
        assert pauses.sample() == 0.0
        write_times(tmp_path, loop=(9, 35), worker=(500, 27), idle=(9, 9))
        assert pauses.sample() == pytest.approx(0.007), "the one that computes counts"
        for thread in ("loop", "worker", "idle"):
            (tmp_path / thread / "schedstat").unlink()
        assert pauses.sample() == 0.0, "where the system does not say"
    finally:
        pauses.stop()
        pauses.stop()
    gc.collect()
    events = read_image(recorder.snapshot()).events
    assert [event.name for event in events if event.name == COLLECTION] == [COLLECTION]
    taken = [event for event in events if event.name == TAKEN]
    assert [(event.nbytes, event.group) for event in taken[-2:]] == [(30_000, 3_000), (7_000, 499_000)]
    assert taken[-1].sequence >= 0
    assert all(event.is_over for event in events)
