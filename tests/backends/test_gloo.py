"""The Gloo backend, in one process and in two."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.backends.extras import need, pytest_command
from tests.backends.forked import forked_outputs, open_server
from tests.fork_server import ForkServer

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", name="server", autouse=True)
def keep_server() -> Iterator[ForkServer]:
    """A process that has imported torch, from which the programs are forked."""
    need("torch", 'pip install "asyncpar[gloo]"')
    server = open_server()
    yield server
    server.close()


def exercise(server: ForkServer, home: Path, what: str, *, statuses: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    """Run both ranks; they meet in a file."""
    command = ["run_module", "tests.backends.exercise", "gloo", what, "--size", "2"]
    command += ["--rendezvous", f"file://{home}/meeting"]
    ranks = [[*command, "--rank", str(rank)] for rank in range(2)]
    outputs = forked_outputs(server, *ranks, home=home, statuses=statuses)
    found: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return found


def test_communicators_keep_their_promises(server: ForkServer, tmp_path: Path) -> None:
    _, _, *arguments = pytest_command("over_gloo")
    [output] = forked_outputs(server, ["run_module", *arguments], home=tmp_path, timeout=280)
    assert " passed" in output
    assert "skipped" not in output


def test_a_runtime_opens_the_backend_again_and_again(server: ForkServer, tmp_path: Path) -> None:
    found = exercise(server, tmp_path, "work")
    assert found == {"sums": [3.0, 3.0], "lane": "gloo", "alone": 1, "cancelled_by": [0, 0], "bytes": 1_600_000}


def test_a_rank_that_leaves_early_is_named(server: ForkServer, tmp_path: Path) -> None:
    found = exercise(server, tmp_path, "leave")
    assert found["lost"] == 1
    assert found["cause"] == "it left the world"


def test_a_rank_that_dies_is_named_soon(server: ForkServer, tmp_path: Path) -> None:
    found = exercise(server, tmp_path, "die", statuses=(0, 3))
    assert found["lost"] == 1
    assert "by peer" in found["cause"], "not the timeout"


def test_a_rank_that_hangs_keeps_nobody_from_ending(server: ForkServer, tmp_path: Path) -> None:
    assert exercise(server, tmp_path, "hang") == {"lost": None, "late": 1}


def test_ranks_that_do_not_come_are_named(server: ForkServer, tmp_path: Path) -> None:
    program = (
        "import asyncpar as ap\n"
        "from asyncpar.backends import BackendConfig, CommunicationRuntime\n"
        "async def main():\n"
        "    config = BackendConfig(rank=0, world_size=3, timeout=0.5, rendezvous='file://meeting')\n"
        "    async with CommunicationRuntime() as runtime:\n"
        "        await runtime.initialize('gloo', config)\n"
        "ap.run(main)\n"
    ).replace("meeting", f"{tmp_path}/meeting")
    [output] = forked_outputs(server, ["run_source", program], home=tmp_path, statuses=[1])
    assert "PeerTimeout: rank 0: waited 0.5 s for ranks 1, 2 to open the gloo backend" in output


def test_a_place_or_meeting_place_that_is_not_given_is_refused(server: ForkServer, tmp_path: Path) -> None:
    refusals = {
        "rank=0": "world_size: expected it in the configuration or as WORLD_SIZE in the environment, got ''",
        "world_size=2": "rank: expected it in the configuration or as RANK in the environment, got ''",
        "rank=0, world_size=2": "rendezvous: ",
        "rank=0, world_size=2, rendezvous='pigeon://'": "rendezvous: ",
        "rank=0, world_size=2, transport='tcp'": "transport: the gloo backend has no use for it, got 'tcp'",
    }
    program = (
        "import asyncpar as ap\n"
        "from asyncpar.backends import BackendConfig, CommunicationRuntime\n"
        "async def main():\n"
        f"    for settings in {list(refusals)!r}:\n"
        "        try:\n"
        "            await CommunicationRuntime().initialize('gloo', eval(f'BackendConfig({settings})'))\n"
        "        except ap.UsageError as error:\n"
        "            print(' '.join(str(error).split()))\n"
        "ap.run(main)\n"
    )
    [output] = forked_outputs(server, ["run_source", program], home=tmp_path)
    lines = output.splitlines()
    assert len(lines) == len(refusals)
    assert all(line.startswith(refusal) for line, refusal in zip(lines, refusals.values(), strict=True)), lines
