"""Agents with real ranks, several in one process, in a group over loopback."""

from __future__ import annotations

import asyncio
import os
import signal
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from asyncpar.launch.agents.group_part import GroupPart, take_part
from asyncpar.launch.agents.host_agent import HostAgent
from asyncpar.launch.agents.job_record import ElasticMode, JobEnd, SubmittedJob
from asyncpar.launch.agents.requests import SubmitRequest
from asyncpar.launch.agents.slot_processes import HostPlace
from asyncpar.launch.display import OutputStream, PlainDisplay
from asyncpar.launch.options import ProgramKind
from asyncpar.launch.reaper_client import ReaperClient
from asyncpar.net.membership.credentials import create_secret
from asyncpar.net.transport.rpc import Credentials

pytestmark = pytest.mark.process

PATIENCE = 30.0

ELASTIC = """
    import asyncio, os, sys
    import numpy as np
    import asyncpar as ap
    from asyncpar.nn.optimizers import SGD, Optimizer
    from asyncpar.nn.parameter import Parameter

    async def main():
        weight = Parameter("w", np.zeros(4, np.float32))
        optimizer = Optimizer([weight], SGD())
        async with ap.elastic(portions=4) as job:
            state = job.state([weight], optimizer)
            async for step in job.steps(state, until=100_000):
                async with step:
                    for portion in step.portions:
                        step.add(portion, {"w": np.full(4, portion + step.number, np.float32)})
                    gradients = await step.reduce()
                    await step.update(optimizer, gradients, learning_rate=1e-3)
                if step.number % 5 == 0:
                    with open(f"{os.getpid()}.new", "w") as file:
                        file.write(f"{step.number} {step.world.size}")
                    os.replace(f"{os.getpid()}.new", f"{os.getpid()}.step")
                if os.path.exists("end") and state.step >= int(open("end").read()):
                    break
                await asyncio.sleep(0.03)

    ap.run(main())
"""


class Hosts:
    """Agents of pretended hosts, all in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parts: dict[str, GroupPart] = {}
        self.ends: dict[str, asyncio.Task[JobEnd | None]] = {}
        self._reapers: list[ReaperClient] = []
        self._streams = [
            OutputStream(os.open(folder / "output", os.O_CREAT | os.O_WRONLY | os.O_APPEND), name="output")
        ]
        self._credentials = Credentials(create_secret(folder / "secret"))
        self._stack = AsyncExitStack()

    @property
    def agents(self) -> dict[str, HostAgent]:
        return {name: part.agent for name, part in self.parts.items()}

    async def start(self, name: str) -> None:
        reaper = ReaperClient()
        self._reapers.append(reaper)
        place = HostPlace(
            host=name,
            host_id=name,
            bind="127.0.0.1",
            secret_file=str(self.folder / "secret"),
            environment={**os.environ, "PYTHONPATH": str(Path.cwd())},
        )
        votes = self.folder / f"votes of {name}"
        votes.mkdir()
        part = await take_part(
            self._stack,
            place,
            listen="127.0.0.1:0",
            join=tuple(agent.address for agent in self.agents.values()),
            credentials=self._credentials,
            votes=votes,
            display=PlainDisplay(self._streams[0], self._streams[0]),
            reaper=reaper,
        )
        self.parts[name] = part
        self.ends[name] = asyncio.create_task(part.agent.run())

    async def submit(self, script: str, *, restarts: int) -> None:
        path = self.folder / "job.py"
        path.write_text(textwrap.dedent(script))
        record = SubmittedJob(
            version="1",
            name="job",
            mode=ElasticMode.RANKS,
            program=str(path),
            arguments=(),
            kind=ProgramKind.SCRIPT,
            directory=str(self.folder),
            environment={},
            slots=1,
            least_hosts=1,
            most_hosts=2,
            last_call=PATIENCE,
            max_restarts=restarts,
            restart_window=3600.0,
            grace=5.0,
            timeout=30.0,
            silent_after=30.0,
        )
        await next(iter(self.parts.values())).control.submit(SubmitRequest(record=record))

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not is_so():  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    def pids(self, name: str) -> list[int]:
        return [view.pid for view in self.agents[name].ranks() if view.pid is not None]

    def step(self, name: str) -> tuple[int, int]:
        """Return the last step that a rank of a host has noted, and the size of its world."""
        found = [(-1, 0)]
        for pid in self.pids(name):
            path = self.folder / f"{pid}.step"
            if path.exists():
                number, size = path.read_text().split()
                found.append((int(number), int(size)))
        return max(found)

    async def reaches(self, step: int, *names: str, size: int) -> None:
        await self.until(lambda: all(self.step(name) >= (step, 0) and self.step(name)[1] == size for name in names))

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    async def close(self) -> None:
        for agent in self.agents.values():
            agent.leave("the test is over", grace=0.0)
            agent.leave("the test is over", grace=0.0)
        await asyncio.wait(self.ends.values())
        for part in self.parts.values():
            part.group.leave_at_once()
        await self._stack.aclose()
        for reaper in self._reapers:
            reaper.close()
        for stream in self._streams:
            stream.close(patience=1.0)


@asynccontextmanager
async def hosts(folder: Path, *names: str) -> AsyncIterator[Hosts]:
    made = Hosts(folder)
    try:
        for name in names:
            await made.start(name)
        yield made
    finally:
        await made.close()


async def test_a_killed_rank_starts_again_and_comes_back_into_the_world(tmp_path: Path) -> None:
    async with hosts(tmp_path, "one", "two") as group:
        await group.submit(ELASTIC, restarts=2)
        await group.reaches(10, "one", "two", size=2)
        [survivor] = group.pids("two")
        [victim] = group.pids("one")
        os.kill(victim, signal.SIGKILL)
        await group.until(lambda: group.pids("one") not in ([], [victim]))
        await group.reaches(group.step("two")[0] + 10, "one", "two", size=2)
        assert group.pids("two") == [survivor]
        assert [view.restarts for view in group.agents["one"].ranks()] == [1]
        assert "rank one/0 was killed by SIGKILL; it starts again in 0.25 s (restart 1 of 2)" in group.output
        assert "asyncpar agent two: generation 1; left: one/0/" in group.output
        (tmp_path / "end").write_text("0")
        await group.until(lambda: all(agent.is_idle for agent in group.agents.values()))
        await group.until(lambda: group.output.count("the job is complete") == 2)


GARBLED = """
    import os, socket, time
    LINES = [b"\\xff\\n", b"[1]\\n", b'{"kind": "JoinWorld"}\\n', b"[" * 100_000 + b"\\n"]
    number = len([name for name in os.listdir() if name.startswith("try-")])
    open(f"try-{number}", "w").close()
    socket.socket(fileno=int(os.environ["ASYNCPAR_ELASTIC_FD"])).sendall(LINES[number])
    time.sleep(1000)
"""


async def test_a_rank_whose_messages_cannot_be_read_crashes_instead_of_waiting_for_a_world(tmp_path: Path) -> None:
    async with hosts(tmp_path, "one") as group:
        await group.submit(GARBLED, restarts=3)
        await group.until(lambda: group.agents["one"].is_idle and group.output.count("is killed: its pipe: ") == 4)
        await group.until(lambda: "it may not start again" in group.output)
        assert (tmp_path / "try-3").exists()
        assert "expected a message that ranks send: Expected `object`, got `array`" in group.output
        assert "expected a message that ranks send: Object missing required field `lineage`" in group.output
