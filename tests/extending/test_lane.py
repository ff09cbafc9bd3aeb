"""A lane from outside the package: one record with its costs, its dialer and its listener carries collectives."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asyncpar.core.config.transport import LaneCosts
from asyncpar.errors import PeerLost, UsageError
from asyncpar.net.transport.connection import as_connection
from asyncpar.net.transport.lane import Lane
from asyncpar.net.transport.lane_kind import LaneDial, LaneListener
from asyncpar.net.transport.lane_kinds import LANES, parse_transport, register_lane, unregister_lane, usable_lanes
from asyncpar.node import Node
from asyncpar.testing import local_world
from tests.extending import file_sockets
from tests.extending.file_sockets import KIND, FileListener


@pytest.fixture
def registered() -> Iterator[None]:
    register_lane(KIND)
    yield
    unregister_lane("filesocket")


async def sum_of_ranks(node: Node) -> np.ndarray:
    return np.asarray(await node.world.all_reduce(np.full(200_000, node.rank + 1.0, np.float32)))


@pytest.mark.usefixtures("registered")
async def test_it_carries_an_all_reduce_of_three_ranks() -> None:
    async with local_world(3, transport="filesocket") as nodes:
        results = await asyncio.gather(*map(sum_of_ranks, nodes))
        assert all((result == 6.0).all() for result in results)
        assert {node.links.lane_kind(rank) for node in nodes for rank in range(3) if rank != node.rank} == {
            "filesocket"
        }
        assert all(node.links.bytes_sent > 800_000 for node in nodes)


async def test_the_quickest_lane_that_ranks_share_is_used_without_a_word() -> None:
    quickest = replace(KIND, costs=LaneCosts(latency=1e-6, bandwidth=1e10))
    with LANES.registered(quickest):
        assert usable_lanes(None) == ("filesocket", "shm", "tcp", "grpc")
        async with local_world(2, transport=None, arena=False) as nodes:
            await asyncio.gather(*map(sum_of_ranks, nodes))
            assert [node.links.lane_kind(1 - node.rank) for node in nodes] == ["filesocket"] * 2


async def test_where_it_does_not_get_through_the_next_one_is_used(caplog: pytest.LogCaptureFixture) -> None:
    async def blocked(wanted: LaneDial) -> Lane:
        raise ConnectionRefusedError(111, "Connection refused")

    kind = replace(KIND, costs=LaneCosts(latency=1e-6, bandwidth=1e10), dial=blocked)
    with LANES.registered(kind):
        async with local_world(2, transport=None, arena=False) as nodes:
            await asyncio.gather(*map(sum_of_ranks, nodes))
            assert [node.links.lane_kind(1 - node.rank) for node in nodes] == ["shm"] * 2
    assert "no filesocket connection to /" in caplog.text
    with LANES.registered(kind):
        async with local_world(2, transport="filesocket") as nodes:
            results = await asyncio.gather(*map(sum_of_ranks, nodes), return_exceptions=True)
    assert [type(result) for result in results] == [PeerLost] * 2


@pytest.mark.usefixtures("registered")
async def test_it_stays_inside_a_host_as_its_record_says() -> None:
    with pytest.raises(UsageError, match="filesocket is pinned, which joins ranks of one host"):
        async with local_world(2, transport="filesocket", hosts="ab"):
            pytest.fail("the world was opened")


async def test_its_name_is_known_as_long_as_it_is_registered() -> None:
    with pytest.raises(UsageError, match="expected one of inproc, shm, tcp, grpc, got 'filesocket'"):
        async with local_world(2, transport="filesocket"):
            pytest.fail("the world was opened")


async def test_a_kind_that_this_machine_has_not_is_not_used() -> None:
    with LANES.registered(replace(KIND, absence=lambda: "it needs a shared folder")):
        assert "filesocket" not in usable_lanes(None)
        with pytest.raises(UsageError, match="filesocket is pinned, but it needs a shared folder; pin another one"):
            async with local_world(2, transport="filesocket"):
                pytest.fail("the world was opened")


async def test_lanes_that_are_no_connection_cannot_be_striped() -> None:
    async with local_world(2) as nodes:
        await asyncio.gather(*map(sum_of_ranks, nodes))
        lane = nodes[0].links.link(1).lane
        assert lane is not None
        with pytest.raises(UsageError, match=r"lane 'inproc': is_striped: .* make them one, or leave it out"):
            as_connection(lane)


PROGRAM = """
import asyncpar as ap
import numpy as np

async def main():
    async with ap.init() as node:
        result = await node.world.all_reduce(np.full(9, node.rank + 1.0))
        if node.rank == 0:
            print(node.links.lane_kind(1), result[0])

ap.run(main)
"""


def launch(transport: str, folder: Path, *, ranks: int) -> subprocess.CompletedProcess[str]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "asyncpar", "launch", "--nproc-per-node", str(ranks), "--transport", transport]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.run(
        [*command, str(program)], capture_output=True, text=True, timeout=60, env=environment, check=False
    )


@pytest.mark.process
def test_the_launcher_pins_one_that_the_ranks_import(tmp_path: Path) -> None:
    done = launch("file_sockets:KIND", tmp_path, ranks=2)
    assert (done.returncode, done.stdout) == (0, "filesocket 3.0\n"), done.stderr


@pytest.mark.process
def test_one_that_ranks_cannot_import_ends_the_job_with_a_reason(tmp_path: Path) -> None:
    done = launch("no_such_package.lanes:KIND", tmp_path, ranks=1)
    assert done.returncode == 1
    assert "TRANSPORT: no_such_package.lanes:KIND cannot be imported (No module named 'no_such_package')" in done.stderr


@pytest.mark.usefixtures("registered")
def test_a_reference_is_its_name_however_often_it_is_resolved() -> None:
    assert (
        parse_transport(f"{file_sockets.__name__}:KIND")
        == parse_transport(f"{file_sockets.__name__}:KIND")
        == "filesocket"
    )
    assert LANES.get("filesocket") is KIND


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("json:KIND", "json:KIND: the module has no KIND"),
        ("json:dumps", "json:dumps: expected a LaneKind, got function"),
        (
            "json.none:KIND",
            r"json.none:KIND cannot be imported \(No module named 'json.none'\); put its folder on PYTH",
        ),
        ("a b:KIND", "expected one of shm, tcp, grpc, got 'a b:KIND'; package.module:NAME names any other LaneKind"),
        ("json:", "expected one of shm, tcp, grpc, got 'json:'"),
    ],
)
def test_a_reference_to_no_lane_is_refused_and_says_why(reference: str, message: str) -> None:
    before = LANES.names
    with pytest.raises(UsageError, match=f"^transport: {message}"):
        parse_transport(reference)
    assert LANES.names == before


class Unfinished(FileListener):
    stop = LaneListener.stop


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "tcp"}, "the name 'tcp' is taken; choose another name"),
        ({"name": "inproc"}, "the name 'inproc' has a meaning of its own; choose another name"),
        ({"name": "File socket"}, "got 'File socket'; change the name"),
        ({"costs": None}, "lane 'filesocket': costs: expected LaneCosts, got None"),
        ({"dial": None}, "dial: expected a coroutine function that connects a lane, got None"),
        ({"listen": 7}, "listen: expected a function that makes a LaneListener, got 7"),
        ({"listen": Unfinished}, "its listener lacks stop; define what is missing"),
    ],
)
def test_a_wrong_registration_is_refused_and_says_what_to_change(changes: dict[str, object], message: str) -> None:
    before = LANES.names
    with pytest.raises(UsageError, match=message):
        register_lane(replace(KIND, **changes))  # type: ignore[arg-type]
    assert LANES.names == before


def test_costs_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="latency: expected a positive number, got -1"):
        LaneCosts(latency=-1, bandwidth=1e9)
