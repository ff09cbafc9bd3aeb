"""Measure what the dashboard costs the launcher's process, in processor time and memory, with a job of many ranks.

The job is synthetic, one summary a second for each rank as the agents send them; a browser is a client that reads the
whole stream.  Everything that the launcher does for the page is counted: unpacking the summaries of the hosts, the
picture, its encoding, and serving it.  Seconds of the job pass as fast as they can be worked off, so that hours can be
looked at; the share of a core is processor time over seconds of the job.

    scripts/bench/run dashboard [--ranks 64] [--seconds 1800] [--browsers 1]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time

import msgspec
import psutil

from asyncpar.dashboard.page_file import live_page
from asyncpar.dashboard.picture import Painter
from asyncpar.dashboard.server import DashboardServer
from asyncpar.observe.summary import HostSummary, JobSummary, pack, unpack
from asyncpar.testing.jobs import SyntheticJob, Trouble


class Browsers:
    """Clients in a process of their own; ``read`` counts nothing of them."""

    def __init__(self, url: str, token: str, count: int) -> None:
        self._url, self._token, self._count = url, token, count

    async def __aenter__(self) -> Browsers:
        program = (
            "import asyncio, aiohttp, sys\n"
            "async def main(url, token):\n"
            "    async with aiohttp.ClientSession(headers={'Authorization': 'Bearer ' + token}) as session:\n"
            "        async with session.get(url) as answer:\n"
            "            async for _ in answer.content.iter_any(): pass\n"
            "asyncio.run(main(*sys.argv[1:]))\n"
        )
        self._clients = [
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                program,
                self._url,
                self._token,
            )
            for _ in range(self._count)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients:
            if client.returncode is None:
                client.kill()
            await client.wait()


def packed(job: JobSummary) -> list[bytes]:
    """Return the messages of the agents for one second."""
    return [pack(host) for host in job.hosts]


async def measure(ranks: int, seconds: int, browsers: int) -> dict[str, float]:
    """Return the figures of a job."""
    process, painter = psutil.Process(), Painter()
    jobs = SyntheticJob(ranks, trouble=Trouble.ROUNDS).summaries(seconds)
    used, sizes, resident = 0.0, [], []
    async with (
        DashboardServer("127.0.0.1", 0) as server,
        Browsers(f"http://{server.address}/events", server.token, browsers),
    ):
        for second, job in enumerate(jobs):
            messages = packed(job)
            begun = time.process_time()
            hosts = tuple(unpack(message, HostSummary) for message in messages)
            picture = painter.paint(msgspec.structs.replace(job, hosts=hosts))
            await server.show(picture)
            await asyncio.sleep(0.01)  # the browser takes it
            used += time.process_time() - begun
            if second % max(1, seconds // 10) == 0:
                gc.collect()
                resident.append(process.memory_info().rss / 1e6)
                sizes.append(len(json.dumps(picture)))
        looking = server.dashboard.browsers
    return {
        "ranks": ranks,
        "seconds": seconds,
        "browsers": looking,
        "page_bytes": len(live_page().html.encode()),
        "core_percent": round(100 * used / seconds, 2),
        "picture_bytes": max(sizes),
        "resident_mb_after_a_fifth": round(resident[2], 1),
        "resident_mb_at_the_end": round(resident[-1], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--seconds", type=int, default=1800)
    parser.add_argument("--browsers", type=int, default=1)
    given = parser.parse_args()
    for name, value in asyncio.run(measure(given.ranks, given.seconds, given.browsers)).items():
        print(f"{name:28} {value}")


if __name__ == "__main__":
    main()
