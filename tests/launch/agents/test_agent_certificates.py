"""Real agents with certificates: a job with a joiner and a rank that starts again, all of it over mutual TLS."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from asyncpar.core.config.world import Member
from asyncpar.errors import AuthenticationError
from asyncpar.net.membership.client import JoinRequest, join_world
from asyncpar.net.membership.credentials import load_certificates, read_secret
from asyncpar.net.security.certificates import Certificates
from asyncpar.net.security.identity import ANY_AGENT, agent_role, rank_role
from asyncpar.net.transport.rpc import Credentials
from asyncpar.net.transport.tls_probe import check_tls
from tests.elasticity.training import encode, train
from tests.launch.agents.agent_groups import TRAINING, AgentGroup, eventually
from tests.launch.agents.conftest import Run
from tests.net.security.parties import JOB, make_homes
from tests.soak import is_soak

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

UNTIL = 150

SUMMING = """
    import asyncio, os, numpy as np
    import asyncpar as ap

    async def main():
        async with ap.init() as node:
            while True:
                x = np.array([node.rank + 1, node.rank == 0 and os.path.exists("end")], np.float32)
                await node.world.all_reduce(x)
                name = f"{os.environ['ASYNCPAR_GENERATION']}-{node.rank}-{node.world.size}"
                with open(f"draft-{os.getpid()}", "w") as file:
                    file.write(f"{x[0]:g} {os.getpid()} {os.environ['ASYNCPAR_CERTIFIED']}")
                os.replace(f"draft-{os.getpid()}", f"sum-{name}")
                if x[1]:
                    return
                await asyncio.sleep(0.05)

    ap.run(main)
"""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[AgentGroup]:
    made = AgentGroup(tmp_path, certified=("one", "two"))
    yield made
    made.close()


def ports_between(group: AgentGroup) -> dict[str, set[int]]:
    """Return the ports of each host to which processes of another host are connected now."""
    serving: dict[int, str] = {}
    calling: list[tuple[str, int]] = []
    for name, agent in group.agents.items():
        for pid in [agent.pid, *group.pids(name)]:
            for connection in psutil.Process(pid).net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    serving[connection.laddr.port] = name
                elif connection.status == psutil.CONN_ESTABLISHED:
                    calling.append((name, connection.raddr.port))
    found: dict[str, set[int]] = {name: set() for name in group.agents}
    for name, port in calling:
        if serving.get(port, name) != name:
            found[serving[port]].add(port)
    return found


async def wants_certificates(group: AgentGroup, port: int) -> bool:
    try:
        await check_tls(f"127.0.0.1:{port}", Credentials(read_secret(group.secret)), ANY_AGENT)
    except AuthenticationError as error:
        return "wants certificates, and this side has none" in str(error)
    return False


def test_agents_and_elastic_ranks_speak_mutual_tls_and_a_stranger_learns_why(group: AgentGroup, run: Run) -> None:
    wanted = encode(asyncio.run(train(None, until=UNTIL, pause=0.0)))
    group.start_all("one")
    options = ("--nnodes", "1:2", "--nproc-per-node", "1", "--elastic", "ranks", "--max-restarts", "2")
    launcher = group.launch(TRAINING, str(UNTIL), options=(*options, "--last-call", "0.1"))
    eventually(lambda: group.trains(1), "training on one host")
    group.start("two")
    group.train_on(2, "training with the joiner")

    ports = ports_between(group)
    agents = {name: int(address.rpartition(":")[2]) for name, address in group.addresses.items()}
    assert all(agents[name] in ports[name] for name in ports), "agents are connected with each other"
    assert any(ports[name] - {agents[name]} for name in ports), "so are ranks"
    everyone = [port for name in ports for port in ports[name]]
    assert [port for port in everyone if not asyncio.run(wants_certificates(group, port))] == []

    joiner = run("agent", "--join", group.addresses["one"], "--name", "three", "--secret-file", str(group.secret))
    assert joiner.returncode == 1
    assert "wants certificates, and this side has none; give all hosts --certs" in joiner.stderr

    if is_soak():
        [pid] = group.pids("two")
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: group.pids("two") not in ([], [pid]), "another start of the rank")
        group.train_on(2, "training with it again")
    (group.folder / "hurry").touch()
    assert launcher.wait(timeout=60) == 0, group.output("launch")
    numbers = {json.dumps(json.loads(result)[:-1]) for result in group.results() if not json.loads(result)[-1]}
    assert numbers == {json.dumps(json.loads(wanted)[:-1])}


@dataclass
class SeenWorld:
    """A world, as its ranks have noted it: the sums of their numbers from 1 on, process numbers and certificates."""

    generation: int
    sums: set[str]
    pids: dict[int, int]
    certified: set[str]


def seen_world(group: AgentGroup, size: int, *, after: int = -1) -> SeenWorld | None:
    """Return the newest world of ``size``, later than ``after``, that all its ranks have noted."""
    found: dict[int, dict[int, list[str]]] = {}
    for path in group.folder.glob("sum-*"):
        generation, rank, of = map(int, path.name.removeprefix("sum-").split("-"))
        if of == size and generation > after:
            found.setdefault(generation, {})[rank] = path.read_text().split()
    whole = [generation for generation, ranks in found.items() if len(ranks) == size]
    if not whole:
        return None
    noted = found[max(whole)]
    return SeenWorld(
        generation=max(whole),
        sums={total for total, _, _ in noted.values()},
        pids={rank: int(pid) for rank, (_, pid, _) in noted.items()},
        certified={certified for _, _, certified in noted.values()},
    )


def wait_for_world(group: AgentGroup, size: int, *, after: int = -1) -> SeenWorld:
    eventually(lambda: seen_world(group, size, after=after) is not None, f"a world of {size}")
    seen = seen_world(group, size, after=after)
    assert seen is not None
    return seen


@pytest.mark.soak
def test_ranks_that_start_again_with_every_world_prove_themselves_in_each(group: AgentGroup) -> None:
    group.start_all("one", "two")
    options = ("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "2", "--last-call", "30")
    launcher = group.launch(SUMMING, options=options)
    first = wait_for_world(group, 2)
    os.kill(first.pids[1], signal.SIGKILL)
    second = wait_for_world(group, 2, after=first.generation)
    assert (first.sums, second.sums) == ({"3"}, {"3"})
    assert set(first.pids.values()).isdisjoint(second.pids.values())
    assert second.certified <= {"0,2", "2,0"}

    assert asyncio.run(wants_certificates(group, int(group.addresses["two"].rpartition(":")[2])))
    drain = group.command("drain", "one", "--agent", group.addresses["two"], *group.proof("two"), "--grace", "10")
    assert drain.wait(timeout=60) == 0, (group.folder / "output").read_text()
    third = wait_for_world(group, 1, after=second.generation)
    assert third.certified == {"2"}, "the rank has the certificate of its slot, not that of rank 0"

    strangers = make_homes(group.folder / "others", hosts=2, job="other")
    rank_0 = JoinRequest(member=Member(rank=0), world_size=1, generation=third.generation, job=JOB, timeout=20.0)

    def join(certificates: Certificates) -> None:
        credentials = Credentials(read_secret(group.secret), certificates)
        asyncio.run(join_world(group.addresses["two"], credentials, rank_0, served_by=agent_role(1)))

    with pytest.raises(AuthenticationError, match=r"has the certificate rank-2: .* but its certificate is for rank 0"):
        join(load_certificates(group.homes["one"], rank_role(0)))
    with pytest.raises(AuthenticationError, match="of the same `asyncpar certs init`"):
        join(load_certificates(strangers[1], rank_role(2)))

    (group.folder / "end").touch()
    assert launcher.wait(timeout=60) == 0, group.output("launch")
