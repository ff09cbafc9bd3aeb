"""A launcher answers commands over its socket; one that does not is named."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from pathlib import Path

import pytest

from asyncpar.errors import LaunchError
from asyncpar.launch.control_socket import ControlReply, ControlRequest, ask_control, serve_control
from asyncpar.observe.summary import JobSummary, RankAnswer


class Watch:
    """Knows one rank."""

    async def status(self) -> JobSummary:
        return JobSummary(job="train", pid=1, time=2.0)

    async def collect(self, kind: str, ranks: Iterable[int] | None) -> list[RankAnswer]:
        return [RankAnswer(rank=0, host="a", content=kind.encode() + str(ranks).encode())]


async def ask(path: Path, request: ControlRequest, within: float = 5.0) -> ControlReply:
    return await asyncio.to_thread(ask_control, path, request, within=within)


@pytest.mark.parametrize("depth", [1, 40])
async def test_status_and_ranks_over_paths_of_any_length(tmp_path: Path, depth: int) -> None:
    path = tmp_path.joinpath(*["deeper"] * depth, "control")
    path.parent.mkdir(parents=True)
    async with serve_control(path, Watch()):
        status = await ask(path, ControlRequest(kind="status"))
        assert status.job == await Watch().status()
        stacks = await ask(path, ControlRequest(kind="stacks", ranks=(0, 2)))
        assert stacks.ranks[0].content == b"stacks(0, 2)"
    assert not path.exists()


async def test_a_job_that_is_gone_is_reported(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="does not answer"):
        await ask(tmp_path / "control", ControlRequest(kind="status"))


async def test_a_launcher_that_is_stopped_is_not_waited_for(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "control"))
        listening.listen()
        with pytest.raises(LaunchError, match="is it stopped"):
            await ask(tmp_path / "control", ControlRequest(kind="status"), within=0.1)


async def test_nonsense_is_refused_and_the_next_command_is_answered(tmp_path: Path) -> None:
    path = tmp_path / "control"
    async with serve_control(path, Watch()):
        for content in (b"", b"\xff" * 100, b"\x00\x00\x00\x02\xc1\xc1"):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(content)
            writer.write_eof()
            await reader.read()
            writer.close()
        assert (await ask(path, ControlRequest(kind="status"))).job is not None
