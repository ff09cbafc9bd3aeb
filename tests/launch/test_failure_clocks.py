"""The first failure is found among hosts whose clocks are far apart."""

from __future__ import annotations

import asyncio

import pytest

from asyncpar.launch.coordinator_service import ConnectedAgent
from asyncpar.launch.failure import RankEnd, choose_first
from asyncpar.launch.messages import decode_rank_end, encode_rank_end
from asyncpar.testing.loop import run_virtual

AHEAD = {0: 0.0, 1: 86_400.0, 2: -3_600.0}
"""By host: by how many seconds its clock is ahead of the coordinator's."""


@pytest.mark.parametrize("culprit", AHEAD)
def test_the_first_failure_counts_whatever_the_clocks_of_hosts_say(culprit: int) -> None:
    assert run_virtual(_first(culprit)) == culprit


async def _first(culprit: int) -> int:
    """Return the rank that is taken for the first; ``culprit`` fails 50 ms before the others, and is heard of last."""
    loop = asyncio.get_running_loop()
    agents = {host: ConnectedAgent(host, b"x", host) for host in AHEAD}
    for delay in (0.005, 0.002, 0.03):  # what an agent sends takes its time; the quickest message tells most
        for host, agent in agents.items():
            sent = loop.time() + AHEAD[host]
            await asyncio.sleep(delay)
            agent.compare_clocks(sent)
    failed_at = loop.time()
    ends = [
        encode_rank_end(
            RankEnd(
                generation=0,
                rank=host,
                local_rank=0,
                host=f"host {host}",
                pid=1,
                returncode=1,
                at=failed_at + (0.0 if host == culprit else 0.05) + ahead,
            )
        )
        for host, ahead in AHEAD.items()
    ]
    heard = sorted(range(len(ends)), key=lambda host: host == culprit)
    decoded = [decode_rank_end(ends[host].rank_ended, host="h", offset=agents[host].offset) for host in heard]
    assert all(abs(end.at - failed_at) < 0.06 for end in decoded)
    return choose_first(decoded).rank
