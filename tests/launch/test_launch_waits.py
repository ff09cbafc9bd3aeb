"""A job that hangs says who waits for whom, and where the culprit is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.soak import first

pytestmark = pytest.mark.process
Launcher = Any  # the class lives in conftest.py

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


@pytest.mark.parametrize(
    ("trouble", "where"),
    first(
        1,
        [
            ("await asyncio.sleep(3)", "sleeps at job.py:"),
            ("time.sleep(3)", "blocks its event loop at job.py:"),
            (STOP, "is stopped (SIGSTOP, or a debugger), at job.py:"),
        ],
    ),
)
def test_the_culprit_is_named_once_with_its_place(launcher: Launcher, trouble: str, where: str) -> None:
    script = launcher.script(HANG.format(trouble=trouble))
    done = launcher.run("--nproc-per-node", "3", script, env={"ASYNCPAR_WAIT_WARNING": "0.8"})
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "wait for" in line]
    assert len(said) == 1, done.stderr
    assert said[0].startswith("asyncpar launch: ranks 0, 2 wait for rank 1 (")
    assert f"), which {where}" in said[0]
    assert "; all_reduce #2 at job.py:" in said[0]
    assert done.stderr.splitlines()[-1] == "asyncpar launch: ranks 0, 2 go on"


def test_a_deadlock_names_the_cycle_and_its_call_sites(launcher: Launcher) -> None:
    script = launcher.script("""
        import asyncpar as ap

        async def main():
            async with ap.init() as node:
                world = node.world
                world.timeout = 3.0
                await world.recv(source=(rank + 1) % world.size)

        ap.run(main)
    """)
    done = launcher.run("--nproc-per-node", "3", script, env={"ASYNCPAR_WAIT_WARNING": "0.8"})
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("asyncpar launch: deadlock: ")]
    assert len(said) == 1, done.stderr
    assert "rank 0 waits for rank 1 in recv from rank 1 (tag 0) at job.py:" in said[0]
    assert "rank 2 waits for rank 0 in recv from rank 0 (tag 0) at job.py:" in said[0]
    summary = done.stderr[done.stderr.index("failed first") :]
    assert "PeerTimeout" in summary
    assert "deadlock: rank 0 waits for rank 1" in summary


def test_a_wrong_threshold_is_refused_at_once(launcher: Launcher) -> None:
    done = launcher.run(launcher.script("pass"), env={"ASYNCPAR_WAIT_WARNING": "soon"})
    assert done.returncode == 2
    assert "ASYNCPAR_WAIT_WARNING: expected seconds" in done.stderr


def test_an_ask_that_waits_names_the_actor_and_what_it_does(launcher: Launcher) -> None:
    script = launcher.script("""
        import asyncio
        import asyncpar as ap

        class Slow(ap.Actor):
            @ap.endpoint
            async def work(self):
                await asyncio.sleep(2.5)

        async def main():
            async with ap.init() as node:
                if rank == 1:
                    await node.spawn(Slow, name="slow")
                await node.world.barrier()
                if rank == 0:
                    await node.ref("slow", rank=1, actor_class=Slow).work()
                else:
                    await asyncio.sleep(7)

        ap.run(main)
    """)
    done = launcher.run("--nproc-per-node", "2", script, env={"ASYNCPAR_WAIT_WARNING": "0.8"})
    assert done.returncode == 0, done.stderr
    [said] = [line for line in done.stderr.splitlines() if "wait" in line]
    assert said.startswith("asyncpar launch: rank 0 waits for actor 'slow' on rank 1 (")
    assert "), which sleeps at job.py:" in said
    assert "; work() of actor 'slow' at job.py:" in said
    assert done.stderr.splitlines()[-1] == "asyncpar launch: rank 0 goes on"


def test_a_world_that_is_not_complete_names_who_is_missing_and_where_the_others_wait(launcher: Launcher) -> None:
    script = launcher.script("""
        import asyncio
        import time
        import asyncpar as ap

        async def main():
            async with ap.init() as node:
                await node.world.barrier()
                await asyncio.sleep(3)

        if rank >= 1:
            time.sleep(4)
        ap.run(main)
    """)
    done = launcher.run("--nproc-per-node", "3", script, env={"ASYNCPAR_WAIT_WARNING": "0.8"})
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "rank 0 waits for" in line]
    assert len(said) == 1, done.stderr
    assert said[0].startswith("asyncpar launch: rank 0 waits for rank 1 (")
    assert "which has not called init() so far (nor have 2); joining the world at " in said[0]
    assert "asyncpar launch: rank 0 goes on" in done.stderr
