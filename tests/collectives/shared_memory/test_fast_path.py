"""Short operations in shared memory are recorded whatever else is under way."""

from __future__ import annotations

from asyncpar.collectives.protocol import describe
from asyncpar.collectives.shared_memory.fast_path import _recording
from asyncpar.core.observe.recorder import Recorder, open_recorder
from asyncpar.core.observe.records import CAPACITY, EventKind, RankIdentity
from asyncpar.observe.image import read_image


def record_operations(recorder: Recorder, count: int) -> list[int]:
    """Record so many operations, and return the numbers of those that the ring has."""
    record = _recording(recorder, 7, describe("all_reduce", ["float32[1]", "sum"], "arena"), 4)
    for number in range(count):
        record(number, float(number), number + 0.5, 0)
    events = read_image(recorder.snapshot()).events
    return [event.sequence for event in events if event.kind is EventKind.COLLECTIVE]


def test_an_operation_whose_place_in_the_ring_is_taken_is_recorded_at_the_next_one() -> None:
    recorder = open_recorder(RankIdentity(rank=0, size=2))
    span = recorder.begin(EventKind.SPAN, recorder.name("whole"))
    assert record_operations(recorder, CAPACITY + 9) == list(range(10, CAPACITY + 9))
    assert [event.name for event in read_image(recorder.snapshot()).pending] == ["whole"]
    recorder.end(span)


def test_an_operation_overwrites_an_event_that_is_under_way_where_all_places_are_taken() -> None:
    recorder = open_recorder(RankIdentity(rank=0, size=2))
    spans = [recorder.begin(EventKind.SPAN, recorder.name("open")) for _ in range(CAPACITY)]
    assert record_operations(recorder, 1) == [0]
    for span in spans:
        recorder.end(span)
    image = read_image(recorder.snapshot())
    (operation,) = (event for event in image.events if event.kind is EventKind.COLLECTIVE)
    assert (image.evicted, operation.created, operation.ended) == (1, 0.0, 0.5)


def test_nothing_is_recorded_after_the_end_of_the_node() -> None:
    recorder = open_recorder(RankIdentity(rank=0, size=2))
    recorder.close()
    assert record_operations(recorder, 3) == []
