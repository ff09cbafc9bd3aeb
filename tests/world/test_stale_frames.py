"""Nothing that belongs to another generation of the world is taken: on no lane, of no kind."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import numpy as np
import pytest

from asyncpar.collectives.fault_tolerance.messages import DecideOutcome, Outcome, encode_agreement
from asyncpar.collectives.protocol import Abort, encode_control
from asyncpar.collectives.revocation import encode_revocation, revocation_of
from asyncpar.errors import PeerLost
from asyncpar.net.wire.frame import MESSAGE_GROUP, FrameHeader, FrameKind
from asyncpar.node import Node
from asyncpar.testing import local_world
from tests.soak import first
from tests.world.processes import process_world

AWAKENED = Path(__file__).with_name("awakened_ranks.py")
GENERATION = 5


def stale_frame(kind: FrameKind, node: Node, group: int, generation: int) -> tuple[FrameHeader, bytes]:
    """Return a frame that the other rank would act on if it were of its generation."""
    world = node.world
    payload = {
        FrameKind.EAGER: bytes(24),
        FrameKind.ABORT: encode_control(Abort("failed", "stale")),
        FrameKind.NOTICE: b"stale",
        FrameKind.REVOKE: encode_revocation(
            revocation_of("stale", number=world.group, ranks=world.ranks, name="w", generation=GENERATION, me=0)
        ),
        FrameKind.AGREE: encode_agreement(DecideOutcome(Outcome(0, ()))),
        FrameKind.REQUEST: (1 << 20).to_bytes(8, "little"),
        FrameKind.GRANT: (24).to_bytes(8, "little"),
        FrameKind.CREDIT: bytes(8),
    }.get(kind, b"")
    return FrameHeader(kind, generation, group, 2, 0, 0, len(payload)), payload


KINDS = [kind for kind in FrameKind if kind not in (FrameKind.VOID, FrameKind.POSITION, FrameKind.STRIPED)]


async def inject(transport: str, kind: FrameKind, generation: int, *, group: int | None = None) -> None:
    async with local_world(2, transport=transport, arena=False, generation=GENERATION) as nodes:
        zero, one = (node.world for node in nodes)
        await asyncio.gather(*(node.world.all_reduce(np.ones(3), algorithm="ring") for node in nodes))
        waiting = asyncio.ensure_future(one.all_reduce(np.ones(3), algorithm="ring"))
        await asyncio.sleep(0.05)
        lane = nodes[0].links.link(1).lane
        assert lane is not None
        header, payload = stale_frame(kind, nodes[0], zero.group if group is None else group, generation)
        lane.send(header, memoryview(payload))
        with pytest.raises(PeerLost, match=f"frame generation: this world has {GENERATION}, got {generation}"):
            async with asyncio.timeout(45):
                await waiting
        assert not one.is_revoked
        assert one.lost == (0,)


@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm", "grpc"])
@pytest.mark.parametrize("generation", [GENERATION - 1, GENERATION + 1])
async def test_a_frame_of_another_generation_ends_every_lane(transport: str, generation: int) -> None:
    await inject(transport, FrameKind.EAGER, generation)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
async def test_no_kind_of_frame_is_taken_from_another_generation(kind: FrameKind) -> None:
    await inject("inproc", kind, GENERATION - 1)


@pytest.mark.parametrize("transport", ["inproc", "tcp"])
@pytest.mark.parametrize("kind", [FrameKind.EAGER, FrameKind.REQUEST, FrameKind.BULK], ids=lambda kind: kind.name)
async def test_no_message_between_actors_is_taken_from_another_generation(transport: str, kind: FrameKind) -> None:
    """Calls, replies and streams are all messages of this group."""
    await inject(transport, kind, GENERATION - 1, group=MESSAGE_GROUP)


@pytest.mark.parametrize("transport", first(1, [None, "tcp"]))
async def test_a_rank_that_wakes_in_the_next_world_disturbs_nobody(tmp_path: Path, transport: str | None) -> None:
    """It was stopped while it wrote into shared memory, or sent, and goes on with that."""
    async with process_world(3, AWAKENED, tmp_path, transport=transport) as ranks, asyncio.timeout(50):
        for rank in ranks:
            assert await rank.next() == "ready"
        assert ranks[2].rendezvous is not None
        ranks[2].rendezvous.open(generation=1, world_size=2)
        ranks[2].process.send_signal(signal.SIGSTOP)
        for rank in ranks[:2]:
            assert await rank.next() == "in the next world"
        ranks[2].process.send_signal(signal.SIGCONT)
        assert await ranks[2].next() in ("PeerLost", "WorldRevoked", "PeerCancelled", "PeerTimeout", "LinkDamaged")
        for rank in ranks[:2]:
            assert await rank.next() == "all sums were right"
