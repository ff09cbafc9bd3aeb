"""`asyncpar agent`, `asyncpar drain`, and the text that `asyncpar status` prints about agents."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from asyncpar.core.addresses import loopback
from asyncpar.errors import LaunchError
from asyncpar.launch.agents.agent_options import AgentOptions, check_grace, parse_address, parse_join
from asyncpar.launch.command_line import (
    OneLineCommand,
    exit_with,
    observer_options,
    option,
    parse_observers,
    print_result,
)
from asyncpar.launch.options import parse_seconds

if TYPE_CHECKING:
    from asyncpar.launch.agents.control_client import ControlClient
    from asyncpar.net.transport.rpc import Credentials

_CERTS_HELP = "This host's, from `asyncpar certs init`: use TLS."
_AGENT_HELP = "An agent of the group.  [this host's, 29400]"


@click.command(cls=OneLineCommand)
@option("--join", metavar="HOST:PORT,...", default=None, help="Agents of the group to join; without, found one.")
@option("--listen", metavar="HOST:PORT", default=None, help="Where this agent serves.  [the way to --join, 29400]")
@option("--name", metavar="NAME", default=None, help="What this host is called.  [its name]")
@option("--secret-file", metavar="FILE", default=None, envvar="ASYNCPAR_SECRET_FILE", help="The group's secret.")
@option("--certs", metavar="DIR", default=None, envvar="ASYNCPAR_CERTS", help=_CERTS_HELP)
@option("--state-dir", metavar="DIR", default=None, help="Where votes are stored.  [a temporary one]")
@option("--grace", metavar="SECONDS", default="30", help="What ranks have to leave at SIGTERM or Ctrl-C.  [30]")
@option("--post-mortem", metavar="DIR", default=None, help="Keep in DIR what is left of each job that fails.")
@option("--witness", is_flag=True, help="Vote, and run no ranks: two hosts and a witness survive the loss of one.")
@observer_options
def agent(
    join: str | None,
    listen: str | None,
    name: str | None,
    secret_file: str | None,
    certs: str | None,
    state_dir: str | None,
    grace: str,
    post_mortem: str | None,
    witness: bool,
    **observers: Any,
) -> None:
    """Run ranks of this host, one job after another, for a group of hosts.

    One agent per host; they outlive jobs and each other.  Up to five of them
    vote on who leads, so any may go.  A new one joins at any time.  Jobs come
    from `asyncpar launch --nnodes MIN:MAX`.

    \b
    asyncpar agent --listen first:29400 --secret-file job.secret
    asyncpar agent --join first:29400 --secret-file job.secret
    """

    exit_with(
        "agent",
        lambda: _agent(
            AgentOptions(
                join=parse_join(join),
                listen=None if listen is None else parse_address("--listen", listen),
                name=name,
                secret_file=secret_file,
                certs=certs or None,
                state_dir=state_dir,
                grace=parse_seconds("--grace", grace),
                witness=witness,
                post_mortem=post_mortem,
                observers=parse_observers(observers),
            )
        ),
    )


@click.command(cls=OneLineCommand)
@click.argument("host")
@option("--agent", "address", metavar="HOST:PORT", default=None, help=_AGENT_HELP)
@option("--secret-file", metavar="FILE", default=None, envvar="ASYNCPAR_SECRET_FILE", help="The group's secret.")
@option("--certs", metavar="DIR", default=None, envvar="ASYNCPAR_CERTS", help=_CERTS_HELP)
@option("--grace", metavar="SECONDS", default="30", help="What its ranks have until they are ended.  [30]")
@option("--no-wait", is_flag=True, help="Do not wait until it has left.")
def drain(
    host: str, address: str | None, secret_file: str | None, certs: str | None, grace: str, no_wait: bool
) -> None:
    """Let the ranks of HOST leave at the end of a step, and its agent after them.

    The others go on, and nothing is lost or done twice.
    """
    exit_with("drain", lambda: _drain(host, address, secret_file, certs, grace, waits=not no_wait))


def _agent(options: AgentOptions) -> int:
    environment = dict(os.environ)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # errors that matter are raised as exceptions
    from asyncpar.launch.agents.agent_process import run_agent_process

    return run_agent_process(options, environment)


def show_status(address: str, secret_file: str | None, certs: str | None, *, as_json: bool) -> int:
    """Print an agent's view of its group."""
    import msgspec

    from asyncpar.launch.agents.views import show_group

    client, _ = _client(address, secret_file, certs)
    view = asyncio.run(client.status())
    if as_json:
        print_result("the status", msgspec.json.encode(view) + b"\n")
        return 0
    width = os.get_terminal_size(1).columns if sys.stdout.isatty() else None
    print_result("the status", show_group(view, width=width or None))
    return 0


def _drain(
    host: str, address: str | None, secret_file: str | None, certs: str | None, grace: str, *, waits: bool
) -> int:
    from asyncpar.launch.agents.any_agent import AnyAgent
    from asyncpar.launch.agents.control_client import NoAgent
    from asyncpar.launch.agents.requests import DrainRequest

    client, credentials = _client(address, secret_file, certs)
    seconds = check_grace(parse_seconds("--grace", grace))

    async def run() -> int:
        others = [one.address for one in (await client.status()).hosts if one.name != host]
        await client.drain(DrainRequest(host=host, grace=seconds))
        deadline = asyncio.get_running_loop().time() + seconds + _LEAVE_SECONDS
        agents = AnyAgent(others, credentials)
        while waits:
            try:
                view = await (agents if others else client).status()
            except NoAgent:
                if others:
                    raise
                return 0  # it was the last one
            if host not in [one.name for one in view.hosts]:
                return 0
            if asyncio.get_running_loop().time() > deadline:
                raise LaunchError(f"{host} has not left {_LEAVE_SECONDS:g} s after its grace of {seconds:g} s")
            await asyncio.sleep(_POLL)
        return 0

    return asyncio.run(run())


_LEAVE_SECONDS = 20.0
_POLL = 0.2


def _client(address: str | None, secret_file: str | None, certs: str | None) -> tuple[ControlClient, Credentials]:
    from asyncpar.launch.agents.control_client import ControlClient
    from asyncpar.launch.agents.group_credentials import find_credentials

    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    where = parse_address("--agent", address or loopback())
    credentials = find_credentials(secret_file, certs or None, where).rpc
    return ControlClient(where, credentials), credentials
