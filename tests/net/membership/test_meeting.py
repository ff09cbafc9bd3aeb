"""Ranks that other launchers started meet, by a note of rank 0 or by an address.  Real gRPC, on loopback."""

from __future__ import annotations

import asyncio
import stat
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.core.config.rank_place import ForeignPlace
from asyncpar.core.config.world import Member, World
from asyncpar.errors import LaunchError, UsageError
from asyncpar.net.membership.client import JoinRequest, join_world
from asyncpar.net.membership.credentials import read_credentials, write_secret
from asyncpar.net.membership.meeting import MeetingPoint, meet
from asyncpar.net.membership.private_directory import make_private

FIRST = ForeignPlace(
    launcher="srun",
    rank=0,
    world_size=3,
    local_rank=0,
    local_world_size=3,
    group_rank=0,
    group_world_size=1,
    job="slurm-7.0",
)


def place(rank: int, job: str = "slurm-7.0") -> ForeignPlace:
    return replace(FIRST, rank=rank, local_rank=rank, job=job)


async def join(stack: AsyncExitStack, at: ForeignPlace, environment: dict[str, str], serial: int = 0) -> World:
    meeting = await meet(stack, at, environment, serial=serial)
    found = meeting.environment
    member = Member(
        rank=found.rank,
        host=found.host,
        host_id=found.host_id,
        local_rank=found.local_rank,
        address=f"{found.bind}:{4000 + found.rank}",
    )
    request = JoinRequest(member=member, world_size=found.world_size, job=found.job, timeout=found.timeout)
    world = await join_world(found.rendezvous, read_credentials(found), request)
    meeting.close()
    return world


def by_note(directory: Path) -> dict[str, str]:
    return {"ASYNCPAR_MEETING_DIR": str(directory), "ASYNCPAR_RENDEZVOUS_TIMEOUT": "20"}


async def test_ranks_find_rank_0_by_its_note_which_is_gone_afterwards(tmp_path: Path) -> None:
    environment = by_note(tmp_path / "notes")
    async with AsyncExitStack() as stack:
        worlds = await asyncio.gather(*(join(stack, place(rank), environment) for rank in (2, 1, 0)))
        assert worlds[0] == worlds[1] == worlds[2]
        assert worlds[0].job == "slurm-7.0-0"
        assert list((tmp_path / "notes").iterdir()) == []


async def test_a_note_is_for_this_user_only(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        meeting = await meet(stack, place(0), by_note(tmp_path / "notes"))
        assert meeting.note is not None
        assert stat.S_IMODE(meeting.note.stat().st_mode) == 0o600
        assert stat.S_IMODE((tmp_path / "notes").stat().st_mode) == 0o700
    assert not meeting.note.exists()


async def test_two_jobs_and_two_worlds_of_one_job_do_not_meet_each_other(tmp_path: Path) -> None:
    environment = by_note(tmp_path / "notes")
    async with AsyncExitStack() as stack:
        wanted = [("a", 0), ("b", 0), ("a", 1)]
        worlds = await asyncio.gather(
            *(join(stack, place(rank, job), environment, serial) for job, serial in wanted for rank in (1, 2, 0))
        )
    assert [world.job for world in worlds[::3]] == ["a-0", "b-0", "a-1"]


async def test_a_note_that_a_killed_job_has_left_is_not_believed(tmp_path: Path) -> None:
    environment = by_note(tmp_path / "notes")
    async with AsyncExitStack() as killed:
        left = (await meet(killed, place(0), environment)).note
    assert left is not None
    write_secret(left, b"x" * 32)  # nobody answers at its address any more
    async with AsyncExitStack() as stack:
        waiting = [asyncio.ensure_future(join(stack, place(rank), environment)) for rank in (1, 2)]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in waiting)
        await asyncio.gather(join(stack, place(0), environment), *waiting)
    assert not left.exists()


async def test_a_note_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    environment = by_note(tmp_path / "notes")
    async with AsyncExitStack() as other:
        left = (await meet(other, place(0), environment)).note
        assert left is not None
    draft = left.with_name(f"{left.name}.b8fa4352e1f80b05")  # as ``write_secret`` names it before it is complete
    draft.write_bytes(b"x" * 7)
    async with AsyncExitStack() as stack:
        waiting = [asyncio.ensure_future(join(stack, place(rank), environment)) for rank in (1, 2)]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in waiting)
        await asyncio.gather(join(stack, place(0), environment), *waiting)


async def test_ranks_without_a_common_directory_meet_at_an_address(tmp_path: Path) -> None:
    write_secret(tmp_path / "secret", b"s" * 32)
    async with AsyncExitStack() as stack:
        server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        environment = {"ASYNCPAR_SECRET_FILE": str(tmp_path / "secret"), "MASTER_ADDR": "127.0.0.1"}
        environment["MASTER_PORT"] = str(port)
        worlds = await asyncio.gather(*(join(stack, place(rank), environment) for rank in (2, 1, 0)))
    assert worlds[0] == worlds[1] == worlds[2]


async def test_a_rank_0_that_never_tells_is_named_with_what_to_change(tmp_path: Path) -> None:
    environment = {**by_note(tmp_path / "notes"), "ASYNCPAR_RENDEZVOUS_TIMEOUT": "0.2"}
    async with AsyncExitStack() as stack:
        with pytest.raises(
            LaunchError, match=r"rank 1: rank 0 did not publish its address in .*notes.* there is none; is the dir.*"
        ):
            await meet(stack, place(1), environment)


async def met(environment: dict[str, str], at: ForeignPlace) -> MeetingPoint:
    async with AsyncExitStack() as stack:
        return await meet(stack, at, environment)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"ASYNCPAR_CERTS": "/certs"}, "ASYNCPAR_CERTS: certificates need `asyncpar launch`"),
        ({"ASYNCPAR_RENDEZVOUS_TIMEOUT": "soon"}, "ASYNCPAR_RENDEZVOUS_TIMEOUT: expected a number"),
        ({"ASYNCPAR_SECRET_FILE": "x", "MASTER_ADDR": "h", "MASTER_PORT": "0"}, r"MASTER_PORT: expected 1\.\.65535"),
        ({"ASYNCPAR_MEETING_DIR": "/proc/nowhere/here"}, "ASYNCPAR_MEETING_DIR: .* cannot be made"),
    ],
)
async def test_settings_that_will_not_do_are_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        await met(environment, place(0))


async def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    with pytest.raises(UsageError, match=r"ASYNCPAR_MEETING_DIR: .* is not a private directory"):
        make_private(shared, "ASYNCPAR_MEETING_DIR")


async def test_a_launcher_that_names_no_job_needs_a_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ASYNCPAR_JOB: srun gives the job no name"):
        await met(by_note(tmp_path / "notes"), place(0, job=""))
    named = {**by_note(tmp_path / "notes"), "ASYNCPAR_JOB": "mine"}
    assert (await met(named, place(0, job=""))).environment.job == "mine-0"


async def test_on_several_hosts_servers_are_bound_to_the_address_towards_the_others(tmp_path: Path) -> None:
    several = replace(place(0), local_world_size=1, group_world_size=3, host="a", hosts=("a", "127.0.0.1"))
    environment = by_note(tmp_path / "notes")
    found: LaunchEnvironment = (await met(environment, several)).environment
    assert found.bind == "127.0.0.1"
    assert found.host == "a"
    chosen = await met({**environment, "ASYNCPAR_BIND": "127.0.0.2"}, several)
    assert chosen.environment.rendezvous.startswith("127.0.0.2:")
