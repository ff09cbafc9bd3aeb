"""Measure how much pushes of new weights slow down requests to an inference service.

    scripts/bench/run serve --seconds 30 --size 25MB --push-every 0.5

Starts ``scripts/examples/serve_weights.py`` with a trainer and one service, and asks the service over HTTP without a
pause, from this process.  Requests that began during a push, or so shortly before that they should have met it, are
compared with all others, so that both kinds are spread over the same time.  (Who chose all that met a push would choose
slow ones: they meet more.)  Printed are the median and the 99th percentile of both, in milliseconds, and their ratio;
any request that fails ends it with code 1.  It needs the packages of the extra ``serve``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import aiohttp
import numpy as np
from numpy.typing import NDArray

from asyncpar.bench.sizes import parse_size

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve_weights.py"
ADDRESS = re.compile(r"serves on (http://\S+)")
ROWS = 65_536
WARM_UP = 2.0


@dataclass(slots=True)
class Answers:
    """When requests began and ended, by ``time.monotonic``, and what came of them."""

    spans: list[tuple[float, float]] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)


async def ask(session: aiohttp.ClientSession, answers: Answers, until: float, seed: int) -> None:
    """Ask again and again, as soon as there is an answer."""
    generator = np.random.default_rng(seed)
    while (begin := time.monotonic()) < until:
        tokens = generator.integers(0, ROWS, 64).tolist()
        try:
            async with session.post("/predict", json={"tokens": tokens}) as response:
                answer = await response.json()
                if response.status != 200:
                    answers.failures.append(f"{response.status}: {answer}")
                    continue
        except aiohttp.ClientError as error:
            answers.failures.append(repr(error))
            continue
        answers.spans.append((begin, time.monotonic()))
        answers.versions.add(answer["version"])


async def drive(address: str, seconds: float, clients: int) -> tuple[Answers, NDArray[np.float64]]:
    """Return what ``clients`` were answered in that time, and when pushes began and ended."""
    connector = aiohttp.TCPConnector(limit=clients)
    async with aiohttp.ClientSession(address, connector=connector) as session:
        await asyncio.gather(*(ask(session, Answers(), time.monotonic() + WARM_UP, seed) for seed in range(clients)))
        answers, until = Answers(), time.monotonic() + seconds
        await asyncio.gather(*(ask(session, answers, until, seed) for seed in range(clients)))
        async with session.get("/status") as response:
            return answers, np.array((await response.json())["pushes"]).reshape(-1, 2)


def began_during(spans: NDArray[np.float64], pushes: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Say of each request whether a typical one that began with it would have met one of ``pushes``.

    The pushes are in order and do not overlap.
    """
    begins = spans[:, 0]
    typical = float(np.median(spans[:, 1] - begins))
    ended_before = np.searchsorted(pushes[:, 1], begins, side="left")
    begun_before = np.searchsorted(pushes[:, 0], begins + typical, side="right")
    during: NDArray[np.bool_] = begun_before > ended_before
    return during


def report(answers: Answers, pushes: NDArray[np.float64], size: int) -> dict[str, float]:
    """Print the figures, and return them."""
    spans = np.array(answers.spans)
    latencies = 1e3 * (spans[:, 1] - spans[:, 0])
    during = began_during(spans, pushes)
    figures: dict[str, float] = {
        "weights_bytes": size,
        "pushes": int(((pushes[:, 0] > spans[0, 0]) & (pushes[:, 1] < spans[-1, 1])).sum()),
        "push_ms": float(np.median(1e3 * (pushes[:, 1] - pushes[:, 0]))),
        "longest_push_ms": float(np.max(1e3 * (pushes[:, 1] - pushes[:, 0]))),
        "versions": len(answers.versions),
        "failures": len(answers.failures),
    }
    for name, chosen in (("quiet", latencies[~during]), ("push", latencies[during])):
        p50, p99 = (float(np.percentile(chosen, share)) for share in (50, 99))
        print(f"{name:>5}: {len(chosen):6} requests, p50 {p50:6.2f} ms, p99 {p99:6.2f} ms, max {chosen.max():6.2f} ms")
        figures |= {f"{name}_requests": len(chosen), f"{name}_p50_ms": p50, f"{name}_p99_ms": p99}
    figures["p99_ratio"] = figures["push_p99_ms"] / figures["quiet_p99_ms"]
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))
    return figures


def find_address(lines: IO[str]) -> str:
    """Return the address of the service, read from what the launched job prints."""
    for line in lines:
        match = ADDRESS.search(line)
        if match is not None:
            return match[1]
    raise SystemExit("serve: the job ended before it served")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="(default: %(default)s)")
    parser.add_argument("--size", default="25MB", help="of the weights (default: %(default)s)")
    parser.add_argument("--push-every", type=float, default=0.5, metavar="SECONDS", help="(default: %(default)s)")
    parser.add_argument("--clients", type=int, default=2, help="requests under way at a time (default: %(default)s)")
    options = parser.parse_args()
    width = max(1, parse_size("--size", options.size) // (4 * ROWS))
    command = [sys.executable, "-m", "asyncpar", "launch", "--nproc-per-node", "2", str(EXAMPLE), "--port", "0"]
    command += ["--rows", str(ROWS), "--width", str(width), "--push-every", str(options.push_every)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        assert job.stdout is not None
        try:
            address = find_address(job.stdout)
            answers, pushes = asyncio.run(drive(address, options.seconds, options.clients))
        finally:
            job.send_signal(signal.SIGTERM)
            job.communicate()
    figures = report(answers, pushes, 4 * ROWS * width)
    for failure in answers.failures[:3]:
        print(f"serve: a request failed: {failure}", file=sys.stderr)
    return 1 if figures["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
