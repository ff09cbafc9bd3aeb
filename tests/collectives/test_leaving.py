"""A rank that announces that it leaves ends what others would wait for in vain, and nothing else."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from asyncpar.collectives.communicator import announce_leaving
from asyncpar.errors import PeerLost
from asyncpar.testing import run_virtual
from tests.collectives.conftest import OpenRanks


def test_what_waits_for_more_calls_of_a_rank_that_leaves_ends(open_ranks: OpenRanks) -> None:
    async def main() -> None:
        async with open_ranks(3) as ranks:
            waiting, leaving, third = ranks.communicators
            parts = [world.subgroup((0, 1)) for world in (waiting, leaving)]
            assert parts[0] is not None
            await asyncio.gather(*(world.all_reduce(np.ones(1)) for world in ranks.communicators))
            await asyncio.gather(leaving.send(np.ones(1), 0, tag=5), waiting.recv(1, tag=5))
            sent = asyncio.ensure_future(leaving.send(np.full(2, 3.0), 0, tag=3))
            anybody = asyncio.ensure_future(waiting.recv())
            calls = [
                waiting.all_reduce(np.ones(3)),
                parts[0].barrier(),
                waiting.recv(1),
                waiting.recv(1, tag=5),
                waiting.recv(1, tag=9),
            ]
            ends = [asyncio.ensure_future(call) for call in calls]
            await asyncio.sleep(0.01)
            announce_leaving(leaving)
            for end in ends:
                with pytest.raises(PeerLost, match=r"rank 1 on .* is lost: it left the world") as raised:
                    await end
                assert raised.value.rank == 1
            assert (await waiting.recv(1, tag=3)).tolist() == [3.0, 3.0]
            await sent
            await third.send(np.full(2, 4.0), 0)
            assert (await anybody).tolist() == [4.0, 4.0]

    run_virtual(main())


async def test_a_receive_from_any_rank_ends_when_all_have_left(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        waiting, leaving = ranks.communicators
        await asyncio.gather(*(world.all_reduce(np.ones(1)) for world in ranks.communicators))
        anybody = asyncio.ensure_future(waiting.recv())
        await asyncio.sleep(0.01)
        announce_leaving(leaving)
        with pytest.raises(PeerLost, match="rank 1 "):
            await waiting.barrier()
        assert not anybody.done()
        await ranks.links[1].close()
        with pytest.raises(PeerLost, match="it left the world"):
            await anybody
