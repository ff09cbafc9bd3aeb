"""A process that runs out of file descriptors because of strangers lets peers in when there are some again."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncpar.errors import PeerLost
from asyncpar.net.transport.busy_poll import BusyPoll
from asyncpar.net.transport.connect import dial_tcp
from asyncpar.net.transport.stream import StreamLane
from tests.net.transport.pairs import SECRET, TERMS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "hostile" / "scarce.py"


@contextmanager
def scarce_process(loop: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the listener; kill it at the end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, str(SCRIPT), loop], stdout=subprocess.PIPE, env=environment) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_a_listener_outlives_a_lack_of_descriptors(loop: str) -> None:
    with scarce_process(loop) as child:
        assert child.stdout is not None
        port = int(await asyncio.to_thread(child.stdout.readline))
        strangers = []
        for _ in range(25):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            strangers.append(writer)
        for writer in strangers:
            writer.close()
        async with asyncio.timeout(30):
            lane = await dial_until_in(port)
        assert await asyncio.to_thread(child.stdout.readline) == b"in\n"
        lane.abort(PeerLost("the test is over"))
        await asyncio.sleep(0)


async def dial_until_in(port: int) -> StreamLane:
    """Dial again while the other side lacks descriptors."""
    while True:
        try:
            return await dial_tcp("127.0.0.1", port, TERMS, secret=SECRET, busy_poll=BusyPoll())
        except OSError:
            await asyncio.sleep(0.1)
