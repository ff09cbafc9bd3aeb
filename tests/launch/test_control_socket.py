"""A launcher answers commands over its socket; one that does not is named."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from pathlib import Path

import pytest

from asyncpar._proto.asyncpar.v1 import membership_pb2 as pb
from asyncpar.errors import LaunchError
from asyncpar.launch.control_socket import ControlReply, ControlRequest, ask_control, serve_control
from asyncpar.launch.job_view import WholeJob
from asyncpar.observe.summary import HostSummary, JobSummary, RankAnswer, RankReport, pack
from asyncpar.testing import run_virtual


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


# -- the view over several hosts ---------------------------------------------------------------------------------------


def observed(host: str, *ranks: int) -> pb.AgentEvent:
    reports = tuple(RankReport(rank=rank, host=host, pid=rank + 1) for rank in ranks)
    return pb.AgentEvent(observed=pb.HostObserved(summary=pack(HostSummary(host=host, ranks=reports))))


def collected(request: int, rank: int, *, is_last: bool = False) -> pb.AgentEvent:
    answer = pack(RankAnswer(rank=rank, host="a", content=b"here"))
    return pb.AgentEvent(collected=pb.HostCollected(request=request, answer=answer, is_last=is_last))


def test_a_view_puts_hosts_together_and_names_those_that_are_silent() -> None:
    run_virtual(look_at_hosts_of_which_one_is_silent())


async def look_at_hosts_of_which_one_is_silent() -> None:
    view = WholeJob(JobSummary(job="train", pid=1, time=0.0))
    asked: list[int] = []

    def answer(command: pb.AgentCommand) -> None:
        asked.append(command.collect.request)
        for rank in (1, 0):
            loop.call_soon(view.take, 7, collected(command.collect.request, rank, is_last=rank == 0))

    loop = asyncio.get_running_loop()
    view.arrived(7, "a", answer)
    view.arrived(8, "b", lambda _: None)
    assert view.take(7, observed("a", 0, 1))
    assert view.take(8, observed("b", 2, 3))
    assert not view.take(8, pb.AgentEvent(stopped=pb.AgentStopped(generation=0)))
    assert [report.rank for report in view.summary().ranks] == [0, 1, 2, 3]
    began = loop.time()
    answers = await view.collect("stacks", None)
    assert loop.time() - began == pytest.approx(1.2), "those that are silent are not waited for for ever"
    assert [(one.rank, one.error) for one in answers] == [
        (0, ""),
        (1, ""),
        (2, "its agent does not answer"),
        (3, "its agent does not answer"),
    ]
    assert len(asked) == 1


def test_an_agent_that_is_lost_meanwhile_is_not_waited_for() -> None:
    run_virtual(lose_an_agent_that_is_asked())


async def lose_an_agent_that_is_asked() -> None:
    view = WholeJob(JobSummary(job="train", pid=1, time=0.0))
    loop = asyncio.get_running_loop()

    def be_lost(_: pb.AgentCommand) -> None:
        loop.call_soon(view.left, 7)

    view.arrived(7, "a", be_lost)
    began = loop.time()
    assert await view.collect("stacks", None) == []
    assert loop.time() == began


async def test_torn_messages_of_an_agent_are_dropped() -> None:
    view = WholeJob(JobSummary(job="train", pid=1, time=0.0))
    view.arrived(7, "a", lambda _: None)
    assert view.take(7, pb.AgentEvent(observed=pb.HostObserved(summary=b"\xc1")))
    assert view.take(7, collected(99, 0))
    assert view.summary().ranks == []
