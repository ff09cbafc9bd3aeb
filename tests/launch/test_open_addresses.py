"""Addresses that others can reach need a secret, however they are spelt and whichever option says them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable

import pytest
from click.testing import CliRunner

import asyncpar.launch.cli as command_line
from asyncpar.core.addresses import is_loopback, route_to, split_address
from asyncpar.errors import UsageError
from asyncpar.launch.agents.agent_options import AgentOptions
from asyncpar.launch.agents.agent_process import listen_at
from asyncpar.launch.agents.group_credentials import find_credentials
from asyncpar.launch.host_placement import find_placement
from asyncpar.launch.job import check_secret_options
from asyncpar.launch.options import LaunchOptions
from asyncpar.net.membership.client import serve_alone
from asyncpar.net.transport.rpc import RpcServer
from asyncpar.net.transport.serving import Serving

PORT = 29_477
EVERYWHERE = ("0.0.0.0", "0", "0.0", "0x0", "::", "::0", "0:0:0:0:0:0:0:0", "::ffff:0.0.0.0", "::ffff:0:0")


def own_addresses() -> tuple[str, ...]:
    with contextlib.suppress(OSError):
        found = route_to("192.0.2.1", 9)
        return () if is_loopback(found) else (found,)
    return ()


def spelt(host: str) -> str:
    return f"[{host}]:{PORT}" if ":" in host else f"{host}:{PORT}"


def launched(*arguments: str, environment: dict[str, str] | None = None) -> None:
    """Do what ``asyncpar launch`` does before anything is served."""
    taken: list[LaunchOptions] = []

    def take(options: LaunchOptions) -> int:
        taken.append(options)
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command_line, "_run", take)
        done = CliRunner().invoke(command_line.main, ["launch", *arguments, "job.py"], env=environment or {})
    if not taken:
        raise UsageError(done.output)
    check_secret_options(taken[0], find_placement(taken[0]))


def served_by_node(host: str) -> None:
    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            await serve_alone(stack, Serving(address=spelt(host)), {}, register=lambda _: None)

    asyncio.run(main())


NODES = ("--nnodes", "2", "--node-rank", "0")
SURFACES: dict[str, Callable[[str], object]] = {
    "--rdzv-endpoint": lambda host: launched(*NODES, "--rdzv-endpoint", spelt(host)),
    "--rdzv-endpoint, no place": lambda host: launched("--nnodes", "2", "--rdzv-endpoint", spelt(host)),
    "--rdzv-endpoint, near ranks": lambda host: launched(
        *NODES, "--rdzv-endpoint", spelt(host), "--local-addr", "127.0.0.1"
    ),
    "--master-addr": lambda host: launched(*NODES, "--master-addr", host, "--master-port", str(PORT)),
    "PET_RDZV_ENDPOINT": lambda host: launched(*NODES, environment={"PET_RDZV_ENDPOINT": spelt(host)}),
    "PET_MASTER_ADDR": lambda host: launched(*NODES, environment={"PET_MASTER_ADDR": host}),
    "--listen of agents": lambda host: find_credentials(None, None, listen_at(AgentOptions(listen=spelt(host)))),
    "--agent": lambda host: find_credentials(None, None, spelt(host)),
    "serve of a node": served_by_node,
    "a server": lambda host: RpcServer(None, bind=host),
}


@pytest.mark.parametrize(("surface", "host"), list(itertools.product(SURFACES, EVERYWHERE + own_addresses())))
def test_an_address_that_others_reach_needs_a_secret(surface: str, host: str) -> None:
    with pytest.raises(UsageError, match=r"secret|no route"):
        SURFACES[surface](host)


def test_loopback_needs_none() -> None:
    launched(*NODES, "--rdzv-endpoint", f"127.0.0.1:{PORT}")
    launched(*NODES, "--rdzv-endpoint", f"localhost:{PORT}")


@pytest.mark.parametrize("text", ["", ":1", "[]:1", "[]", "x", "x:", "x:-1", "x:65536", "x:1:"])
def test_what_has_no_host_or_no_port_is_no_address(text: str) -> None:
    with pytest.raises(UsageError):
        split_address(text)
