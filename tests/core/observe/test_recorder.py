"""The event ring: an event under way is never lost, at whatever moment it is read, and also after SIGKILL."""

from __future__ import annotations

import inspect
import mmap
import os
import signal
import subprocess
import sys
import time
from itertools import count

import pytest

from asyncpar.core.observe import records
from asyncpar.core.observe.recorder import RING_FD, Recorder, current_recorder, make_ring, open_recorder, read_ring
from asyncpar.core.observe.records import (
    CAPACITY,
    RECORD,
    RECORD_BYTES,
    RECORDS_OFFSET,
    EventKind,
    EventState,
    GroupIdentity,
    RankIdentity,
    image_bytes,
    parse_image,
)
from asyncpar.errors import ProtocolError, UsageError
from asyncpar.observe.image import RankImage, read_image
from tests.soak import chosen

WHO = RankIdentity(rank=1, size=4, host="host-b")


def make_recorder(capacity: int = 8, memory: mmap.mmap | None = None) -> Recorder:
    seconds = count(1)
    memory = memory or mmap.mmap(-1, records.image_bytes(capacity))
    return Recorder(memory, WHO, capacity=capacity, clock=lambda: float(next(seconds)))


def image_of(recorder: Recorder) -> RankImage:
    return read_image(recorder.snapshot())


def test_an_event_is_there_from_its_begin_and_complete_at_its_end() -> None:
    recorder = make_recorder()
    ticket = recorder.begin(
        EventKind.COLLECTIVE,
        recorder.operation("all_reduce(float32[2,3], sum)", "ring", 77),
        peer=3,
        group=1 << 63,
        sequence=7,
        nbytes=24,
        site=recorder.site(inspect.currentframe()),
    )
    (event,) = image_of(recorder).pending
    assert (event.label, event.algorithm, event.arrays) == ("all_reduce #7", "ring", [("float32", (2, 3))])
    assert (event.group, event.peer, event.nbytes, event.fingerprint) == (1 << 63, 3, 24, 77)
    assert event.site is not None
    assert event.site.file == __file__
    recorder.end(ticket, EventState.FAILED)
    (event,) = image_of(recorder).events
    assert (event.state, event.created, event.ended) == (EventState.FAILED, 1.0, 2.0)
    assert image_of(recorder).identity == WHO


def test_an_event_that_is_under_way_outlives_any_number_of_others() -> None:
    recorder = make_recorder()
    name, waits = recorder.name("turn"), recorder.begin(EventKind.SPAN, recorder.name("load", {"path": "a"}))
    for _ in range(1000):
        recorder.end(recorder.begin(EventKind.SPAN, name))
    image = image_of(recorder)
    assert [(event.name, event.text) for event in image.pending] == [("load", "path=a")]
    assert len(image.events) == 8
    assert image.overwritten > 900
    recorder.end(waits)
    assert image_of(recorder).pending == ()


def test_a_ring_full_of_open_events_takes_more_and_counts_what_it_lost() -> None:
    recorder = make_recorder()
    name = recorder.name("open")
    tickets = [recorder.begin(EventKind.SPAN, name) for _ in range(20)]
    for ticket in tickets:
        recorder.end(ticket)
    image = image_of(recorder)
    assert image.evicted == 12
    assert image.pending == ()


def test_torn_records_are_dropped_and_counted() -> None:
    recorder = make_recorder()
    for _ in range(5):
        recorder.end(recorder.begin(EventKind.SPAN, recorder.name("turn")))
    whole = recorder.snapshot()
    for place in range(records.RECORDS_OFFSET, records.RECORDS_OFFSET + 5 * records.RECORD_BYTES):
        torn = bytearray(whole)
        torn[place : place + 3] = b"\xff\xff\xff"
        image = read_image(bytes(torn))  # whatever was torn, the other records are there
        assert len(image.events) + image.torn >= 4


def test_an_image_that_is_cut_off_anywhere_is_read_as_far_as_it_goes() -> None:
    recorder = make_recorder()
    recorder.add_group(GroupIdentity(number=5, name="world", ranks=(0, 1)))
    for number in range(5):
        recorder.end(recorder.begin(EventKind.SPAN, recorder.name(f"span {number}")))
    whole = recorder.snapshot()
    for length in range(0, len(whole), 17):
        try:
            image = read_image(whole[:length])
        except ProtocolError:
            assert length < records.NOTE_OFFSET
        else:
            assert len(image.events) <= 5
    assert read_image(whole).groups[5].ranks == (0, 1)


@pytest.mark.parametrize("damage", [b"", b"no image at all" * 1000, b"apring01" + bytes(9000)])
def test_other_bytes_are_refused(damage: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_image(damage)


def test_more_names_than_have_room_are_counted_and_harm_nothing() -> None:
    recorder = make_recorder()
    for number in range(1200):
        recorder.end(recorder.begin(EventKind.SPAN, recorder.name(f"{number:01000}")))
    image = image_of(recorder)
    assert image.unnamed > 100
    assert image.events[-1].name == "?"
    assert len(image.events) == 8


def test_a_node_goes_on_where_the_one_before_it_ended() -> None:
    memory = mmap.mmap(-1, records.image_bytes(8))
    first = make_recorder(memory=memory)
    first.begin(EventKind.SPAN, first.name("unfinished"))
    first.end(first.begin(EventKind.SPAN, first.name("done")))
    second = make_recorder(memory=memory)
    second.end(second.begin(EventKind.SPAN, second.name("later")))
    assert [(event.name, event.state) for event in image_of(second).events] == [
        ("unfinished", EventState.CANCELLED),
        ("done", EventState.COMPLETED),
        ("later", EventState.COMPLETED),
    ]


def test_a_new_ring_takes_no_more_memory_than_has_been_written() -> None:
    ring = make_ring("fresh")
    recorder = make_recorder(CAPACITY, mmap.mmap(ring, image_bytes()))
    recorder.end(recorder.begin(EventKind.SPAN, recorder.name("x")))
    written = 512 * os.fstat(ring).st_blocks
    assert recorder.snapshot()
    read = 512 * os.fstat(ring).st_blocks
    os.close(ring)
    assert written <= RECORDS_OFFSET + 3 * mmap.PAGESIZE
    assert read <= RECORDS_OFFSET + CAPACITY * RECORD_BYTES + 3 * mmap.PAGESIZE  # of the names' megabyte, few pages


def test_the_last_note_is_there() -> None:
    recorder = make_recorder()
    recorder.note(b"one")
    recorder.note(b"two" * 10_000)
    assert image_of(recorder).note == (b"two" * 10_000)[: records.NOTE_BYTES]


def test_a_forked_child_leaves_the_ring_alone() -> None:
    recorder = open_recorder(WHO)
    assert current_recorder() is recorder
    child = os.fork()
    if child == 0:
        os._exit(0 if current_recorder() is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    recorder.close()
    assert current_recorder() is not recorder


def test_a_wrong_descriptor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RING_FD, "9999")
    monkeypatch.setattr("asyncpar.core.observe.recorder._rings._is_inherited", True)
    with pytest.raises(UsageError, match="ASYNCPAR_RING_FD: descriptor 9999"):
        open_recorder(WHO)


KILLED = """
import inspect
from asyncpar.core.observe.recorder import open_recorder
from asyncpar.core.observe.records import EventKind, RankIdentity
recorder = open_recorder(RankIdentity(rank=2, size=4))
recorder.begin(EventKind.SPAN, recorder.name("load", {"step": 7}), site=recorder.site(inspect.currentframe()))
print("ready", flush=True)
while True:
    recorder.end(recorder.begin(EventKind.SPAN, recorder.name("turn")))
"""


@pytest.mark.process
def test_the_agent_reads_the_ring_of_a_rank_that_writes_and_of_one_that_was_killed() -> None:
    ring = make_ring("ring of rank 2")
    environment = {**os.environ, RING_FD: str(ring)}
    rank = subprocess.Popen(
        [sys.executable, "-c", KILLED], env=environment, pass_fds=[ring], stdout=subprocess.PIPE, text=True
    )
    assert rank.stdout is not None
    with rank:
        assert rank.stdout.readline() == "ready\n"
        for _ in range(chosen(8, soak=50)):
            assert "load" in [event.name for event in read_image(read_ring(ring)).pending]
        rank.send_signal(signal.SIGKILL)
    image = read_image(read_ring(ring))
    os.close(ring)
    loads = [event for event in image.pending if event.name == "load"]
    assert [(event.text, str(event.site)) for event in loads] == [("step=7", "<string>:6")]
    assert (image.rank, image.identity.pid) == (2, rank.pid)
    assert image.torn <= 1


@pytest.mark.parametrize("count", [0, 5, 64, 150])
@pytest.mark.parametrize("torn", [0, 1])
@pytest.mark.parametrize("latest", [None, 1, 7, 100])
def test_what_is_read_is_what_each_record_says_however_much_is_torn(latest: int | None, torn: int, count: int) -> None:
    memory = mmap.mmap(-1, image_bytes(64))
    recorder = Recorder(memory, RankIdentity(rank=0, size=1), capacity=64, clock=time.perf_counter)
    word = recorder.name("x")
    kept = [recorder.begin(EventKind.SPAN, word, sequence=number) for number in range(3)]
    for number in range(count):
        recorder.end(recorder.begin(EventKind.SPAN, word, sequence=1000 + number))
    image = bytearray(recorder.snapshot())
    if torn:
        image[RECORDS_OFFSET + 9 * RECORD_BYTES] ^= 0xFF
    rows = [RECORD.unpack_from(image, RECORDS_OFFSET + slot * RECORD_BYTES) for slot in range(64)]
    whole = sorted(((row[0] - 1) * 64 + slot, row) for slot, row in enumerate(rows) if row[0] and row[0] == row[-1])
    since = 0 if latest is None else whole[-1][0] - latest + 1
    expected = [(ticket, *row[1:-1]) for ticket, row in whole if ticket >= since or row[3] < EventState.COMPLETED]
    found = parse_image(bytes(image), latest=latest)
    assert [tuple(record) for record in found.records] == expected
    assert found.torn == torn
    assert set(kept) <= {record.ticket for record in found.records}
