"""Collections and the time for which others have the processor are in the ring."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from asyncpar.core.observe.pauses import COLLECTION, TAKEN, PauseRecorder
from asyncpar.core.observe.recorder import open_recorder
from asyncpar.core.observe.records import RankIdentity
from asyncpar.observe.image import read_image


def test_collections_are_spans_and_samples_say_what_was_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorder = open_recorder(RankIdentity(rank=0, size=1))
    pauses = PauseRecorder(recorder)
    pauses.start()
    try:
        gc.collect()
        gc.collect(0)
        waits = tmp_path / "schedstat"
        monkeypatch.setattr(pauses, "_waits", str(waits))
        waits.write_text("5 1000000 3\n")
        pauses.sample()
        waits.write_text("5 31000000 3\n")
        assert pauses.sample() == pytest.approx(0.03)
        assert pauses.sample() == 0.0
        waits.unlink()
        assert pauses.sample() == 0.0, "where the system does not say"
    finally:
        pauses.stop()
        pauses.stop()
    gc.collect()
    events = read_image(recorder.snapshot()).events
    assert [event.name for event in events if event.name == COLLECTION] == [COLLECTION]
    taken = [event for event in events if event.name == TAKEN]
    assert taken[-1].nbytes == 30000
    assert taken[-1].sequence >= 0
    assert all(event.is_over for event in events)
