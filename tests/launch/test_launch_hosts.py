"""Several agents, one world: two launchers on loopback, and two network namespaces."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port

pytestmark = pytest.mark.process
Launcher = Any  # the class lives in conftest.py
Eventually = Callable[[Callable[[], bool]], None]

JOIN = """
    import asyncio
    from asyncpar.core.config.environment import LaunchEnvironment
    from asyncpar.core.config.world import Member
    from asyncpar.net.membership.client import JoinRequest, join_world
    from asyncpar.net.membership.credentials import read_secret
    from asyncpar.net.transport.rpc import Credentials
    place = LaunchEnvironment.from_mapping(os.environ)
    member = Member(rank=rank, host_id=place.host_id, local_rank=place.local_rank, address=f"{place.bind}:1")
    request = JoinRequest(member=member, world_size=place.world_size, generation=place.generation, job=place.job)
    world = asyncio.run(join_world(place.rendezvous, Credentials(read_secret(place.secret_file)), request))
    if rank == 0:
        print([(member.rank, member.local_rank, member.address) for member in world.members], len(world.hosts))
"""
PARKED = """
    register()
    park()
"""


def start_pair(
    launcher: Launcher,
    script: str,
    *options: str,
    first: tuple[str, ...] = (),
    second: tuple[str, ...] = (),
    arguments: tuple[str, ...] = (),
) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    endpoint = f"127.0.0.1:{free_port()}"
    common = ("--nnodes", "2", "--rdzv-endpoint", endpoint, "--rdzv-timeout", "25", *options)
    follower = launcher.start(*common, "--node-rank", "1", *second, script, *arguments)
    leader = launcher.start(*common, "--node-rank", "0", *first, script, *arguments)
    return leader, follower


def run_pair(
    launcher: Launcher,
    script: str,
    *options: str,
    first: tuple[str, ...] = (),
    second: tuple[str, ...] = (),
    arguments: tuple[str, ...] = (),
) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """Run two launchers to their ends."""
    endpoint = f"127.0.0.1:{free_port()}"
    common = ("--nnodes", "2", "--rdzv-endpoint", endpoint, "--rdzv-timeout", "25", *options)
    leader = launcher.start(*common, "--node-rank", "0", *first, script, *arguments)
    follower = launcher.run(*common, "--node-rank", "1", *second, script, *arguments)
    return launcher.finish(leader), follower


def test_two_agents_make_one_world(launcher: Launcher) -> None:
    script = launcher.script(JOIN)
    one, other = run_pair(launcher, script, first=("--nproc-per-node", "2"), second=("--nproc-per-node", "1"))
    assert (one.returncode, other.returncode) == (0, 0), one.stderr + other.stderr
    assert one.stdout == "[(0, 0, '127.0.0.1:1'), (1, 1, '127.0.0.1:1'), (2, 0, '127.0.0.1:1')] 1\n"
    assert other.stdout == ""


def test_agents_without_a_node_rank_find_their_places(launcher: Launcher) -> None:
    script = launcher.script("print(rank, os.environ['GROUP_RANK'], os.environ['WORLD_SIZE'], file=sys.stderr)")
    endpoint = f"127.0.0.1:{free_port()}"
    options = ("--nnodes", "2", "--rdzv-endpoint", endpoint, script)
    other = launcher.start(*options)
    ends = [launcher.run(*options), launcher.finish(other)]
    assert [end.returncode for end in ends] == [0, 0], ends
    lines = [line for end in ends for line in end.stderr.splitlines() if line.startswith("[")]
    shown = sorted(line.split("] ")[1] for line in lines)
    assert shown == ["0 0 2", "1 1 2"]


@pytest.mark.soak
def test_launchers_that_have_only_variables_of_kubeflow_meet(launcher: Launcher) -> None:
    """As in a runtime of its Trainer, with a Secret in a file."""
    script = launcher.script("print(rank, os.environ['GROUP_RANK'], os.environ['WORLD_SIZE'], file=sys.stderr)")
    secret = launcher.directory / "secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    variables = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "localhost"}
    variables |= {"PET_MASTER_PORT": str(free_port()), "ASYNCPAR_SECRET_FILE": str(secret)}
    both = [launcher.start(script, env={**variables, "PET_NODE_RANK": str(place)}) for place in (1, 0)]
    ends = [launcher.finish(process) for process in both]
    assert [end.returncode for end in ends] == [0, 0], ends
    lines = [line for end in ends for line in end.stderr.splitlines() if line.startswith("[")]
    assert sorted(line.split("] ")[1] for line in lines) == ["0 0 4", "1 0 4", "2 1 4", "3 1 4"]


@pytest.mark.soak
def test_a_failure_on_one_host_ends_all_with_its_code(launcher: Launcher) -> None:
    script = launcher.script("""
        register()
        if rank == 1:
            print("no luck", file=sys.stderr)
            sys.exit(9)
        park()
    """)
    leader, follower = start_pair(launcher, script)
    one, other = launcher.finish(leader), launcher.finish(follower)
    assert (one.returncode, other.returncode) == (9, 9)
    assert "rank 1 failed first: exited with code 9" in one.stderr
    assert "no luck" in one.stderr
    assert launcher.ranks_alive() == []


def test_all_hosts_restart_together(launcher: Launcher) -> None:
    script = launcher.script("""
        if os.environ["ASYNCPAR_GENERATION"] == "1":
            print("again", file=sys.stderr)
            sys.exit(0)
        if rank == 1:
            sys.exit(1)
        park()
    """)
    one, other = run_pair(launcher, script, "--max-restarts", "1")
    assert (one.returncode, other.returncode) == (0, 0), one.stderr + other.stderr
    assert "again" in one.stderr
    assert "again" in other.stderr


@pytest.mark.soak
def test_ctrl_c_on_one_host_ends_all(launcher: Launcher, eventually: Eventually) -> None:
    leader, follower = start_pair(launcher, launcher.script(PARKED))
    eventually(lambda: len(launcher.registered()) == 2)
    follower.send_signal(signal.SIGINT)
    one, other = launcher.finish(leader), launcher.finish(follower)
    assert (one.returncode, other.returncode) == (130, 130)
    assert "got SIGINT" in one.stderr
    assert launcher.ranks_alive() == []


def test_a_lost_agent_is_a_failure_of_its_ranks(launcher: Launcher, eventually: Eventually) -> None:
    leader, follower = start_pair(launcher, launcher.script(PARKED), "--reconnect-within", "0.5")
    eventually(lambda: len(launcher.registered()) == 2)
    follower.kill()
    one = launcher.finish(leader)
    assert one.returncode == 1
    assert "rank 1 failed first: was lost with the agent on" in one.stderr
    eventually(lambda: launcher.ranks_alive() == [])


def test_a_lost_coordinator_ends_the_other_agents(launcher: Launcher, eventually: Eventually) -> None:
    leader, follower = start_pair(launcher, launcher.script(PARKED), "--reconnect-within", "0.5")
    eventually(lambda: len(launcher.registered()) == 2)
    leader.kill()
    other = launcher.finish(follower)
    assert other.returncode == 1
    assert "lost the coordinator at 127.0.0.1:" in other.stderr
    eventually(lambda: launcher.ranks_alive() == [])


WAIT_FOR_FILE = """
    import time
    import asyncpar as ap

    async def main():
        async with ap.init() as node:
            register()
            while not os.path.exists(sys.argv[1]):
                time.sleep(0.1)
            await node.world.barrier()

    ap.run(main)
"""


@pytest.mark.soak
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_launcher_that_is_stopped_is_waited_for(
    launcher: Launcher, eventually: Eventually, tmp_path: Path, stopped: int
) -> None:
    options, go_on = ("--reconnect-within", "1"), tmp_path / "go on"
    pair = start_pair(launcher, launcher.script(WAIT_FOR_FILE), *options, arguments=(str(go_on),))
    eventually(lambda: len(launcher.registered()) == 2)
    said: list[str] = []
    other = pair[1 - stopped].stderr
    assert other is not None
    reading = threading.Thread(target=lambda: said.extend(iter(other.readline, "")), daemon=True)
    reading.start()
    pair[stopped].send_signal(signal.SIGSTOP)
    try:
        eventually(lambda: any("as if it were stopped; waiting for it" in line for line in said))
    finally:
        pair[stopped].send_signal(signal.SIGCONT)
    eventually(lambda: any("answers again" in line for line in said))
    go_on.touch()
    assert [process.wait(30) for process in pair] == [0, 0], said
    reading.join()


@pytest.mark.soak
def test_an_agent_that_never_comes_is_named(launcher: Launcher) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    script = launcher.script("pass")
    done = launcher.run(
        "--nnodes", "3", "--node-rank", "0", "--rdzv-endpoint", endpoint, "--rdzv-timeout", "0.5", script
    )
    assert done.returncode == 1
    assert "missing: --node-rank 1, 2" in done.stderr


def test_a_coordinator_that_never_comes_is_named(launcher: Launcher) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    script = launcher.script("pass")
    done = launcher.run(
        "--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", endpoint, "--rdzv-timeout", "0.5", script
    )
    assert done.returncode == 1
    assert f"no coordinator answered at {endpoint} for 0.5 s" in done.stderr


def test_agents_that_disagree_are_refused(launcher: Launcher) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    script = launcher.script("pass")
    common = ("--rdzv-endpoint", endpoint, "--rdzv-timeout", "25")
    leader = launcher.start(*common, "--nnodes", "2", "--node-rank", "0", script)
    stranger = launcher.run(*common, "--nnodes", "3", "--node-rank", "1", script)
    assert stranger.returncode == 2
    assert "--nnodes: the coordinator expects 2, this agent says 3" in stranger.stderr
    assert launcher.run(*common, "--nnodes", "2", "--node-rank", "1", script).returncode == 0
    assert launcher.finish(leader).returncode == 0


@pytest.mark.soak
def test_another_secret_is_refused(launcher: Launcher, tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).write_bytes(os.urandom(32))
        (tmp_path / name).chmod(0o600)
    endpoint = f"127.0.0.1:{free_port()}"
    script = launcher.script("pass")
    common = ("--nnodes", "2", "--rdzv-endpoint", endpoint, "--rdzv-timeout", "25")
    leader = launcher.start(*common, "--node-rank", "0", "--secret-file", "one", script)
    stranger = launcher.run(*common, "--node-rank", "1", "--secret-file", "other", script)
    assert stranger.returncode == 1
    assert "did not accept our secret" in stranger.stderr
    leader.send_signal(signal.SIGTERM)
    assert launcher.finish(leader).returncode == 143


@pytest.mark.soak
def test_two_network_namespaces_make_one_world(launcher: Launcher, namespaces: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(os.urandom(32))
    (tmp_path / "secret").chmod(0o600)
    script = launcher.script(JOIN)
    common = ("--nnodes", "2", "--rdzv-endpoint", "10.213.7.1:29400", "--secret-file", "secret")
    prefixes = [("ip", "netns", "exec", name) for name in namespaces]
    follower = launcher.start(*common, "--node-rank", "1", script, prefix=prefixes[1])
    leader = launcher.start(*common, "--node-rank", "0", script, prefix=prefixes[0])
    one, other = launcher.finish(leader), launcher.finish(follower)
    assert (one.returncode, other.returncode) == (0, 0), one.stderr + other.stderr
    assert one.stdout == "[(0, 0, '10.213.7.1:1'), (1, 0, '10.213.7.2:1')] 2\n"


REDUCE = """
    import asyncio, numpy as np, asyncpar as ap
    def left():
        with open("/proc/net/dev") as table:
            return sum(int(line.split(":")[1].split()[8]) for line in table if line.lstrip().startswith("ap"))
    async def main():
        async with ap.init() as node:
            comm = node.world
            await comm.all_reduce(np.ones(8), algorithm="hierarchical")
            await comm.barrier()
            before = left()
            x = np.full(1 << 20, rank + 1.0)
            await comm.all_reduce(x, algorithm="hierarchical")
            await comm.barrier()
            report = dict(rank=rank, left=left() - before, right=bool((x == 10).all()), has_arena=node.has_arena)
            with open(f"report-{rank}.json", "w") as file:
                json.dump(report, file)
            await comm.barrier()
    ap.run(main)
"""


@pytest.mark.soak
def test_hosts_of_two_ranks_send_each_other_only_what_must_leave_a_host(
    launcher: Launcher, namespaces: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(os.urandom(32))
    (tmp_path / "secret").chmod(0o600)
    script = launcher.script(REDUCE)
    common = (
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--rdzv-endpoint",
        "10.213.7.1:29400",
        "--secret-file",
        "secret",
    )
    prefixes = [("ip", "netns", "exec", name) for name in namespaces]
    follower = launcher.start(*common, "--node-rank", "1", script, prefix=prefixes[1])
    leader = launcher.start(*common, "--node-rank", "0", script, prefix=prefixes[0])
    one, other = launcher.finish(leader), launcher.finish(follower)
    assert (one.returncode, other.returncode) == (0, 0), one.stderr + other.stderr
    reports = [json.loads((tmp_path / f"report-{rank}.json").read_text()) for rank in range(4)]
    assert [(report["right"], report["has_arena"]) for report in reports] == [(True, True)] * 4
    payload = 8 << 20
    for first in (0, 2):
        left = max(report["left"] for report in reports[first : first + 2])
        assert payload <= left < 1.1 * payload, "2 (2 - 1) / 2 of the payload, headers and acknowledgements"
