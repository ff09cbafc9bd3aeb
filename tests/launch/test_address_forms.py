"""Every option and argument that takes an address takes every form of one, and says what is wrong with any other."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

import asyncpar.launch.cli as command_line
import asyncpar.launch.commands.doctor as doctor
import asyncpar.launch.doctor.peer_checks as peer_checks
from asyncpar.core.addresses import join_address, spell_host, split_address
from asyncpar.engines.connect import JobConnection
from asyncpar.errors import UsageError
from asyncpar.launch.agents import agent_process
from asyncpar.launch.agents.agent_options import AgentOptions, parse_address, parse_join
from asyncpar.launch.agents.agent_process import listen_at
from asyncpar.launch.doctor.peer_service import DOCTOR_PORT
from asyncpar.launch.host_placement import find_placement
from asyncpar.launch.options import LaunchOptions, ObserverOptions
from asyncpar.net.transport.serving import Serving
from tests.ipv6 import need_ipv6

PORT = 29_477
FORMS = ("127.0.0.1", "localhost", "::1", "0:0:0:0:0:0:0:1")


def spelt(host: str) -> str:
    return join_address(host, PORT)


def launched(*arguments: str, environment: dict[str, str] | None = None) -> LaunchOptions:
    """Return what `asyncpar launch` understands."""
    taken: list[LaunchOptions] = []

    def take(options: LaunchOptions) -> int:
        find_placement(options)
        taken.append(options)
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command_line, "_run", take)
        done = CliRunner().invoke(command_line.main, ["launch", *arguments, "job.py"], env=environment or {})
    if not taken:
        raise UsageError(done.output)
    return taken[0]


def met_at(*arguments: str, environment: dict[str, str] | None = None) -> str:
    """Return the address at which the launcher of the first host serves."""
    serves = find_placement(launched(*arguments, environment=environment)).serve_at
    assert serves is not None
    return join_address(*serves)


def bound_at(*arguments: str, environment: dict[str, str] | None = None) -> str:
    """Return the address of this host that its ranks bind to, with a port, which they choose themselves."""
    return spelt(find_placement(launched(*arguments, environment=environment)).bind)


def shown_at(option: str, text: str) -> str:
    found: ObserverOptions = launched(f"{option}={text}").observers
    shown = found.dashboard if option == "--dashboard" else found.metrics
    assert shown is not None
    return shown


def connected_to(text: str) -> str:
    return JobConnection(text, b"s" * 32).address


def listened_at(text: str) -> str:
    """Return where `asyncpar doctor --listen` answers."""
    return called(doctor, "serve_doctor", ("doctor", "--listen", text))


def asked_at(text: str) -> str:
    """Return where `asyncpar doctor --hosts` asks."""
    return called(peer_checks, "meet", ("doctor", "--hosts", text))


def called(module: Any, name: str, arguments: tuple[str, ...]) -> str:
    taken: list[str] = []

    async def take(address: str, port: int, *_: object, **__: object) -> None:
        taken.append(join_address(address, port))
        raise ConnectionRefusedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asyncpar.launch.doctor.peer_service.serve_doctor", take)
        patch.setattr(module, name, take, raising=False)
        done = CliRunner().invoke(command_line.main, arguments)
    if not taken:
        raise UsageError(done.output)
    return taken[0]


TWO = ("--nnodes", "2", "--node-rank", "0")
WITH_PORT: dict[str, Callable[[str], str]] = {
    "--rdzv-endpoint": lambda text: met_at("--rdzv-endpoint", text),
    "--rdzv-endpoint of two hosts": lambda text: met_at(*TWO, "--rdzv-endpoint", text),
    "ranks of --rdzv-endpoint": lambda text: bound_at("--rdzv-endpoint", text),
    "PET_RDZV_ENDPOINT": lambda text: met_at(environment={"PET_RDZV_ENDPOINT": text}),
    "--listen of agents": lambda text: listen_at(AgentOptions(listen=parse_address("--listen", text))),
    "--join": lambda text: parse_join(f"first:1,{text}")[1],
    "--agent": lambda text: parse_address("--agent", text),
    "--dashboard": lambda text: shown_at("--dashboard", text),
    "--metrics": lambda text: shown_at("--metrics", text),
    "doctor --listen": listened_at,
    "doctor --hosts": asked_at,
    "serve=": lambda text: join_address(*Serving(address=text).place(bind="")),
    "ap.connect": connected_to,
}
WITHOUT_PORT: dict[str, Callable[[str], str]] = {
    "--master-addr": lambda text: met_at("--master-addr", text, "--master-port", str(PORT)),
    "--local-addr": lambda text: bound_at("--local-addr", text),
    "--local-addr of two hosts": lambda text: bound_at(
        *TWO, "--rdzv-endpoint", spelt("127.0.0.1"), "--local-addr", text
    ),
    "ASYNCPAR_BIND": lambda text: bound_at(environment={"ASYNCPAR_BIND": text}),
}
DEFAULT_PORTS: dict[str, int] = {
    "--rdzv-endpoint": 29_400,
    "--listen of agents": 29_400,
    "--join": 29_400,
    "--agent": 29_400,
    "doctor --hosts": DOCTOR_PORT,
}


def is_of(found: str, host: str, port: int) -> bool:
    """Is ``found`` what ``host`` stands for, which a name server may have spelt as a number?"""
    got, at = split_address(found)
    names = {spell_host(host)} | ({"127.0.0.1"} if host == "localhost" else set())
    return spell_host(got) in names and at == port


@pytest.mark.parametrize(("surface", "host"), list(itertools.product(WITH_PORT, FORMS)))
def test_an_address_with_a_port(surface: str, host: str) -> None:
    if ":" in host:
        need_ipv6()
    assert is_of(WITH_PORT[surface](spelt(host)), host, PORT)


@pytest.mark.parametrize(
    ("surface", "host", "is_bracketed"), list(itertools.product(WITHOUT_PORT, FORMS, (False, True)))
)
def test_an_address_without_a_port(surface: str, host: str, is_bracketed: bool) -> None:
    if ":" in host:
        need_ipv6()
    found = WITHOUT_PORT[surface](f"[{host}]" if ":" in host and is_bracketed else host)
    assert is_of(found, "127.0.0.1" if "two hosts" in surface else host, PORT)


@pytest.mark.parametrize(
    ("surface", "host", "is_bracketed"), list(itertools.product(DEFAULT_PORTS, FORMS, (False, True)))
)
def test_a_port_that_may_be_missing(surface: str, host: str, is_bracketed: bool) -> None:
    if ":" in host:
        need_ipv6()
    found = WITH_PORT[surface](f"[{host}]" if ":" in host and is_bracketed else host)
    assert is_of(found, host, DEFAULT_PORTS[surface])


@pytest.mark.parametrize(("surface", "text"), list(itertools.product(WITH_PORT, ("::1:29477", "fd00::2:29477"))))
def test_ipv6_without_brackets_is_answered_with_the_right_form(surface: str, text: str) -> None:
    with pytest.raises(UsageError, match="brackets") as caught:
        WITH_PORT[surface](text)
    assert f"[{text.removesuffix(':29477')}]:29477" in str(caught.value)


@pytest.mark.parametrize(
    ("surface", "text"),
    list(itertools.product(WITH_PORT, ("[::1", "[node]:1", "::1]:1", "node:1:", "node:99999", "a b:1"))),
)
def test_what_is_no_address_is_named(surface: str, text: str) -> None:
    with pytest.raises(UsageError, match=r"expected .*(host:port|PORT)") as caught:
        WITH_PORT[surface](text)
    assert repr(text) in str(caught.value)


def test_agents_that_join_by_ipv6_serve_there(monkeypatch: pytest.MonkeyPatch) -> None:
    need_ipv6()
    assert listen_at(AgentOptions(join=("[::1]:29400",))) == "[::1]:0"
    monkeypatch.setattr(agent_process, "resolve", lambda name: "fd00::1")
    monkeypatch.setattr(agent_process, "route_to", lambda address, port: "fd00::2")
    assert listen_at(AgentOptions(join=("first:29400",))) == "[fd00::2]:29400"
