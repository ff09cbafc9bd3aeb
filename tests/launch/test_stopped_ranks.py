"""Ranks of two hosts name the one that is stopped, also those that wait for it through one that came late."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.launch.test_launch_hosts import start_pair

pytestmark = pytest.mark.process

CHAIN = """
    import asyncio
    import asyncpar as ap

    async def main():
        async with ap.init() as node:
            world = node.world
            await world.barrier()
            world.timeout = 8.0
            if rank == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
            if rank == 1:
                await asyncio.sleep(7)
            try:
                await world.recv(rank - 1)
            except ap.PeerError as error:
                os.write(2, json.dumps({"rank": rank, "blames": error.rank, "text": str(error)}).encode() + b"\\n")
                raise

    ap.run(main)
"""


@pytest.mark.soak
@pytest.mark.timeout(90)
def test_survivors_on_two_hosts_name_the_stopped_rank_and_not_the_late_one(launcher: Any) -> None:
    options = ("--nproc-per-node", "2", "--silent-after", "off", "--grace-period", "1")
    leader, follower = start_pair(launcher, launcher.script(CHAIN), *options)
    ends = [launcher.finish(process) for process in (leader, follower)]
    lines = [line.split("] ", 1)[-1] for end in ends for line in end.stderr.splitlines()]
    records = [json.loads(line) for line in lines if line.startswith("{")]
    blames = {record["rank"]: record["blames"] for record in records}
    assert blames.pop(1, 0) == 0, ends  # it may be asked to end before its own time is up
    assert blames == {2: 0, 3: 0}, ends
    last = next(record for record in records if record["rank"] == 3)
    chain = "rank 2 waits for rank 1, which waits for rank 0"  # as rank 2 says, if it has not left by then for that
    assert chain in last["text"] or last["text"].endswith("then rank 2 left"), last["text"]
