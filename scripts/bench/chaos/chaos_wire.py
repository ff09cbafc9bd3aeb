"""At which share of the line rate a newcomer gets the state: the bytes that its wire has carried, over time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from scripts.bench.namespaces import DEVICE

FIRST, LAST = 0.05, 0.95
"""Parts of the state between which time counts: how a copy begins, and what comes with its end, does not."""

_SAMPLE_SECONDS = 0.01

Samples = list[tuple[float, int]]
"""Times, and how many bytes have been received by then."""


def received_bytes(table: str, device: str = DEVICE) -> int:
    """Return what a device has received, from the text of ``/proc/PID/net/dev``."""
    for line in table.splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == device:
            return int(counts.split()[0])
    raise ValueError(f"expected a device {device} in {table!r}")


@asynccontextmanager
async def watched(pid: int, samples: Samples) -> AsyncIterator[None]:
    """Add to ``samples`` what the namespace of a process receives; headers count, as they do on a wire."""
    table = Path(f"/proc/{pid}/net/dev")

    async def sample() -> None:
        while True:
            text = table.read_text(encoding="ascii")
            if DEVICE in text:  # not before the process has entered its namespace
                samples.append((time.monotonic(), received_bytes(text)))
            await asyncio.sleep(_SAMPLE_SECONDS)

    async with asyncio.TaskGroup() as group:
        sampling = group.create_task(sample(), name="sample a wire")
        try:
            yield
        finally:
            sampling.cancel()


def line_share(samples: Sequence[tuple[float, int]], state_bytes: int, bits_per_second: int) -> float | None:
    """Return the share of the line rate at which a state came; None if so many bytes never came."""
    if not samples:
        return None
    before = samples[0][1]
    begun = next((one for one in samples if one[1] - before >= FIRST * state_bytes), None)
    ended = next((one for one in samples if one[1] - before >= LAST * state_bytes), None)
    if begun is None or ended is None or ended[0] <= begun[0]:
        return None
    return 8 * (ended[1] - begun[1]) / (ended[0] - begun[0]) / bits_per_second
