"""Messages of one turn of the loop travel together, and nothing waits longer than that."""

from __future__ import annotations

import asyncio

from asyncpar.net.transport.stream import GATHERED_BYTES, WriteCoalescer
from asyncpar.net.wire.frame import Segments


class Scene:
    """A gatherer, and what it sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.gatherer = WriteCoalescer(lambda frames: self.sent.append(bytes(frames)))

    def add(self, payload: bytes) -> bool:
        return self.gatherer.add(b"h", memoryview(payload))


async def test_the_first_message_of_a_turn_goes_by_itself_and_the_others_at_its_end() -> None:
    scene = Scene()
    assert not scene.add(b"0")
    assert scene.add(b"1")
    assert scene.add(b"2")
    assert scene.sent == []
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert scene.sent == [b"h1h2"]
    assert not scene.add(b"3")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert scene.sent == [b"h1h2"]


async def test_enough_of_them_do_not_wait_for_the_end() -> None:
    scene = Scene()
    scene.add(b"")
    while not scene.sent:
        assert scene.add(b"x" * 100)
    assert GATHERED_BYTES < len(scene.sent[0]) <= GATHERED_BYTES + 101
    assert scene.gatherer.waiting == b""


async def test_large_messages_are_not_gathered() -> None:
    scene = Scene()
    scene.add(b"")
    assert not scene.add(bytes(GATHERED_BYTES + 1))
    assert scene.add(bytes(GATHERED_BYTES - 1))


async def test_a_caller_that_sends_something_else_can_have_them_sent_before() -> None:
    scene = Scene()
    scene.add(b"")
    scene.add(b"1")
    scene.gatherer.flush()
    scene.gatherer.flush()
    assert scene.sent == [b"h1"]


async def test_what_is_gathered_is_a_copy_also_of_segments() -> None:
    scene = Scene()
    scene.add(b"")
    buffer = bytearray(b"abc")
    assert scene.gatherer.add(b"h", Segments([memoryview(buffer)[:1], memoryview(buffer)[1:]]))
    buffer[:] = b"xyz"
    scene.gatherer.flush()
    assert scene.sent == [b"habc"]
