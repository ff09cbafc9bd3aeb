"""Very many openings, mutations and payloads that nobody would send: a link takes or refuses them and keeps nothing.

A hundred thousand; a million with ``--soak``.
"""

from __future__ import annotations

import asyncio
import gc
import random
import struct
from collections.abc import Callable

import psutil
import pytest

from asyncpar.errors import ProtocolError
from asyncpar.net.transport.flow_control import EAGER_WINDOW
from asyncpar.net.wire.frame import FrameKind
from tests.hostile.inputs import mutated
from tests.hostile.victim import GENERATION, Victim, drop, every_frame
from tests.soak import chosen

INPUTS = chosen(100_000, soak=1_000_000)
PER_LINK = 500
GROWTH = 8 << 20
OBJECTS = 1_000
_HEADER = struct.Struct("<2sBBIQQIIQ")


class Sources:
    """Ways to make an input, each with its share."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._valid = list(every_frame().values())
        self._kinds = list(FrameKind)
        self.ways: list[Callable[[], bytes]] = [self.noise, self.payload, self.payload, self.change, self.change]

    def draw(self) -> bytes:
        """Return the next input."""
        return self.ways[self._dice.randrange(len(self.ways))]()

    def noise(self) -> bytes:
        """Bytes that mean nothing; every other time behind a good magic and version."""
        noise = self._dice.randbytes(self._dice.randrange(96))
        return noise if self._dice.getrandbits(1) else b"ap\x01" + noise

    def payload(self) -> bytes:
        """A good header, around the keys that the link knows, and any payload; sometimes more or less of it."""
        dice = self._dice
        length = dice.randrange(64)
        declared = length if dice.getrandbits(3) else dice.getrandbits(dice.randrange(1, 65))
        kind = self._kinds[dice.randrange(len(self._kinds))]
        keys = dice.getrandbits(5), dice.getrandbits(2), dice.getrandbits(2)
        head = _HEADER.pack(b"ap", 1, kind, GENERATION, *keys, dice.getrandbits(1), declared)
        return head + dice.randbytes(length)

    def change(self) -> bytes:
        """A valid frame, mutated."""
        return mutated(self._valid[self._dice.randrange(len(self._valid))], self._dice)


@pytest.mark.timeout(240)  # 10 s, and several times that where branches are counted
@pytest.mark.parametrize("seed", [4])
async def test_hostile_inputs_raise_nothing_but_protocol_errors_and_leave_no_memory(seed: int) -> None:
    process, sources = psutil.Process(), Sources(seed)
    whole = cut = refused = before = objects = 0
    for turn in range(INPUTS // PER_LINK):
        victim = Victim()
        reader = victim.reader
        for _ in range(PER_LINK):
            try:
                assert len(reader.feed(sources.draw())) == 0
            except ProtocolError:
                refused += 1
            else:
                if reader.is_between_frames:
                    whole += 1
                    continue
                cut += 1
            reader = victim.new_reader()  # every input meets a reader that expects a frame
        assert victim.early_bytes <= EAGER_WINDOW
        drop(victim.received, None if victim.unsent is None else victim.unsent.done)
        await asyncio.sleep(0)
        if turn == INPUTS // PER_LINK // 10:  # pools and caches have their size by now
            gc.collect()
            before, objects = process.memory_info().rss, len(gc.get_objects())
    gc.collect()
    assert len(gc.get_objects()) - objects <= OBJECTS
    assert process.memory_info().rss - before <= GROWTH
    assert whole + cut + refused == INPUTS
    assert min(whole, cut, refused) > INPUTS // 20, (whole, cut, refused)
