"""Real agents with certificates: a job with a joiner and a rank that starts again, all of it over mutual TLS."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from asyncpar.errors import AuthenticationError
from asyncpar.net.membership.credentials import read_secret
from asyncpar.net.security.identity import ANY_AGENT
from asyncpar.net.transport.rpc import Credentials
from asyncpar.net.transport.tls_probe import check_tls
from tests.elasticity.rank import encode
from tests.elasticity.training import train
from tests.launch.agents.agent_groups import TRAINING, AgentGroup, eventually

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

UNTIL = 400


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


def test_agents_and_elastic_ranks_speak_mutual_tls_and_a_stranger_is_told_why(group: AgentGroup) -> None:
    wanted = encode(asyncio.run(train(None, until=UNTIL, pause=0.0)))
    group.start_all("one")
    options = ("--nnodes", "1:2", "--nproc-per-node", "1", "--elastic", "ranks", "--max-restarts", "2")
    launcher = group.launch(TRAINING, str(UNTIL), options=(*options, "--last-call", "0.1"))
    eventually(lambda: group.trains(1), "training on one host")
    group.start("two")
    eventually(lambda: group.trains(2, beyond=group.step()), "training with the joiner")

    ports = ports_between(group)
    agents = {name: int(address.rpartition(":")[2]) for name, address in group.addresses.items()}
    assert all(agents[name] in ports[name] for name in ports), "agents are connected with each other"
    assert any(ports[name] - {agents[name]} for name in ports), "so are ranks"
    everyone = [port for name in ports for port in ports[name]]
    assert [port for port in everyone if not asyncio.run(wants_certificates(group, port))] == []

    joiner = group.command(
        "agent",
        "--join",
        group.addresses["one"],
        "--name",
        "three",
        "--secret-file",
        str(group.secret),
        log="three.log",
    )
    assert joiner.wait(timeout=40) == 1
    assert "wants certificates, and this side has none; give all hosts --certs" in group.said("three")

    [pid] = group.pids("two")
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: group.pids("two") not in ([], [pid]), "another start of the rank")
    eventually(lambda: group.trains(2, beyond=group.step()), "training with it again")
    (group.folder / "hurry").touch()
    assert launcher.wait(timeout=60) == 0, group.said("launch")
    numbers = {json.dumps(json.loads(result)[:-1]) for result in group.results() if not json.loads(result)[-1]}
    assert numbers == {json.dumps(json.loads(wanted)[:-1])}
