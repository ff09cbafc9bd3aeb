"""A job that hangs says who waits for whom, and where the culprit is."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.launch.ways import fixed_first

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
Launcher = Any  # the class lives in conftest.py
Eventually = Callable[[Callable[[], bool]], None]

IN_TURN = """
    import asyncio
    import numpy as np
    import asyncpar as ap

    async def until(name):
        while not os.path.exists(name):
            await asyncio.sleep(0.02)  # sleep

    class Slow(ap.Actor):
        @ap.endpoint
        async def work(self):
            await until("worked")

    async def main():
        async with ap.init() as node:
            world = node.world
            if rank == 1:
                await node.spawn(Slow, name="slow")
            await world.barrier()
            await until("come-over")
            if rank == 1:
                await until("slept")
            await world.all_reduce(np.ones(4))
            await until("slept-over")
            if rank == 0:
                await node.ref("slow", rank=1, actor_class=Slow).work()
            else:
                await until("worked")
            await until("worked-over")
            world.timeout = 3.0
            await world.recv(source=(rank + 1) % world.size)

    while rank >= 1 and not os.path.exists("come"):
        time.sleep(0.02)
    ap.run(main)
"""
"""Ranks wait for one that has not come, for one that sleeps, for an actor, and for each other."""


@fixed_first
def test_each_wait_is_reported_once_with_its_culprit_and_place_and_when_it_is_over(
    launcher: Launcher, eventually: Eventually, hosts: tuple[str, ...]
) -> None:
    printed = launcher.directory / "printed"
    with printed.open("wb") as output:
        options = (*hosts, "--nproc-per-node", "3", launcher.script(IN_TURN))
        process = launcher.start(*options, env={"ASYNCPAR_WAIT_WARNING": "0.5"}, output=output.fileno())
    lines = (launcher.directory / "job.py").read_text().splitlines()
    where = f"), which sleeps at job.py:{next(n for n, line in enumerate(lines, 1) if line.endswith('# sleep'))}"

    def reported(beginning: str, *more: str) -> list[str]:
        found = (line for line in printed.read_text().splitlines() if line.startswith(f"asyncpar launch: {beginning}"))
        return [line for line in found if all(words in line for words in more)]

    waits = {
        "come": ("rank 0 waits for rank 1 (", "which has not called init() so far (nor has 2); joining the world at "),
        "slept": ("ranks 0, 2 wait for rank 1 (", where, "; all_reduce #"),
        "worked": (
            "rank 0 waits for actor 'slow' on rank 1 (",
            where,
            "; work() of actor 'slow' at job.py:",
        ),
    }

    def gone_on() -> list[int]:
        """Return the ranks that were reported to go on, as often as they were."""
        lines = re.findall(r"^asyncpar launch: ranks? ([\d, ]+) go(?:es)? on$", printed.read_text(), re.MULTILINE)
        return [int(rank) for line in lines for rank in line.split(",")]

    for name, words in waits.items():
        eventually(lambda words=words: bool(reported(*words)))  # type: ignore[misc]
        before, who = gone_on(), (0, 2) if name == "slept" else (0,)
        (launcher.directory / name).touch()
        eventually(lambda before=before, who=who: all(gone_on().count(one) > before.count(one) for one in who))  # type: ignore[misc]
        (launcher.directory / f"{name}-over").touch()  # a rank that waits again would not be reported to go on
    launcher.finish(process)
    assert {name: len(reported(*words)) for name, words in waits.items()} == dict.fromkeys(waits, 1), (
        printed.read_text()
    )
    assert process.returncode == 1
    [cycle] = reported("deadlock: ")
    assert "rank 0 waits for rank 1 in recv from rank 1 (tag 0) at job.py:" in cycle
    assert "rank 2 waits for rank 0 in recv from rank 0 (tag 0) at job.py:" in cycle
    summary = printed.read_text().partition("failed first")[2]
    assert "PeerTimeout" in summary
    assert "deadlock: rank 0 waits for rank 1" in summary


HANG = """
    import asyncio
    import numpy as np
    import asyncpar as ap

    async def main():
        async with ap.init() as node:
            world = node.world
            await world.barrier()
            if rank == 1:
                {trouble}
            await world.all_reduce(np.ones(4))
            await asyncio.sleep(3)

    ap.run(main)
"""
STOP = """
                subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)"""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("trouble", "where"),
    [
        ("await asyncio.sleep(3)", "sleeps at job.py:"),
        ("time.sleep(3)", "blocks its event loop at job.py:"),
        (STOP, "is stopped (SIGSTOP, or a debugger), at job.py:"),
    ],
)
def test_the_culprit_is_named_once_with_its_place(launcher: Launcher, trouble: str, where: str) -> None:
    script = launcher.script(HANG.format(trouble=trouble))
    done = launcher.run("--nproc-per-node", "3", script, env={"ASYNCPAR_WAIT_WARNING": "0.8"})
    assert done.returncode == 0, done.stderr
    reported = [line for line in done.stderr.splitlines() if "wait for" in line]
    assert len(reported) == 1, done.stderr
    assert reported[0].startswith("asyncpar launch: ranks 0, 2 wait for rank 1 (")
    assert f"), which {where}" in reported[0]
    assert "; all_reduce #2 at job.py:" in reported[0]
    assert done.stderr.splitlines()[-1] == "asyncpar launch: ranks 0, 2 go on"


def test_a_wrong_threshold_is_refused_at_once(launcher: Launcher) -> None:
    done = launcher.run(launcher.script("pass"), env={"ASYNCPAR_WAIT_WARNING": "soon"})
    assert done.returncode == 2
    assert "ASYNCPAR_WAIT_WARNING: expected seconds" in done.stderr
