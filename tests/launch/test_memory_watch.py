"""Ranks that the kernel kills for want of memory are reported as that, with what all ranks held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncpar.launch.host_watch import MemoryWatch
from asyncpar.net.arena.limits import MemoryUse

GIB = 1 << 30


class Kernel:
    """Counts kills, and what is used."""

    def __init__(self) -> None:
        self.kills: int | None = 3
        self.use: MemoryUse | None = MemoryUse(2 * GIB, 8 * GIB, is_group=True)

    def watch(self) -> MemoryWatch:
        return MemoryWatch(lambda: self.kills, lambda: self.use)


def test_a_kill_that_the_kernel_has_counted_is_explained_with_all_sizes() -> None:
    kernel = Kernel()
    watch = kernel.watch()
    watch.update({0: GIB, 1: 5 * GIB + GIB // 2, 2: 0}, now=10.0)
    assert watch.explain(now=10.5) == "", "it was someone else"
    kernel.kills = 4
    assert watch.explain(now=10.5) == (
        "was killed by the kernel (SIGKILL), which was out of memory; the limit is 8 GiB of its control group; "
        "resident last: rank 1 5.5 GiB, rank 0 1 GiB"
    )
    watch.forget(1)
    assert "rank 1" not in watch.explain(now=10.5)


def test_of_many_ranks_the_largest_are_listed() -> None:
    kernel = Kernel()
    watch = kernel.watch()
    watch.update({rank: (rank + 1) << 20 for rank in range(20)}, now=0.0)
    kernel.kills, kernel.use = 4, None
    assert watch.explain(now=0.0).endswith("rank 13 14 MiB, rank 12 13 MiB, 12 more of 12 MiB at most")


def test_an_old_kill_explains_nothing_and_nothing_is_known_without_counts() -> None:
    kernel = Kernel()
    watch = kernel.watch()
    assert watch.explain(now=0.0) == ""
    watch.update({}, now=0.0)
    kernel.kills = 4
    for second in range(1, 8):
        watch.update({}, now=float(second))
    assert watch.explain(now=7.5) == "", "it was seconds ago: of another process"
    kernel.kills = None
    assert watch.explain(now=7.5) == ""


def test_the_growth_is_that_of_the_last_seconds() -> None:
    kernel = Kernel()
    watch = kernel.watch()
    assert kernel.watch().use is None
    for second in range(20):
        kernel.use = MemoryUse(max(0, second - 10) * GIB // 2, 8 * GIB, is_group=False)
        watch.update({}, now=float(second))
    use = watch.use
    assert use is not None
    assert (use.growth, use.owner) == (GIB / 2, "the host")
    assert use.seconds_left == pytest.approx((8 - 4.5) * 2)
    kernel.use = None
    watch.update({}, now=20.0)
    assert watch.use is None


PROGRAM = """
    import asyncio
    import numpy as np
    import asyncpar as ap

    async def main():
        async with ap.init() as node:
            kept = []
            while True:
                await node.world.all_reduce(np.ones(4))
                if rank == 1:
                    kept.append(np.ones(4_000_000))

    ap.run(main)
"""


@pytest.mark.soak
@pytest.mark.process
def test_a_rank_that_the_kernel_kills_is_reported_with_the_limit(launcher: Any, memory_group: Path) -> None:
    job = launcher.start(
        *("--nproc-per-node", "2", launcher.script(PROGRAM)),
        prefix=("sh", "-c", f'echo $$ > {memory_group}/cgroup.procs; exec "$@"', "sh"),
    )
    done = launcher.finish(job)
    assert done.returncode == 137
    first = next(line for line in done.stderr.splitlines() if "rank 1 failed first" in line)
    assert "killed by the kernel (SIGKILL), which was out of memory; the limit is 600 MiB of its control group" in first
    assert "resident last: rank 1 " in first
    assert ", rank 0 " in first
