"""One place reads and writes addresses, and it knows IPv6."""

from __future__ import annotations

import ast
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import asyncpar
from asyncpar.core import addresses
from asyncpar.core.addresses import (
    free_port,
    host_of_peer,
    is_loopback,
    is_ours,
    join_address,
    loopback,
    loopback_like,
    open_listener,
    resolve,
    route_out,
    spell_host,
    split_address,
)
from asyncpar.errors import UsageError
from tests.ipv6 import need_ipv6

HOSTS = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.just("fe80::1%eth0"),
    st.from_regex(r"[a-z][a-z0-9-]{0,20}(\.[a-z]{1,5})?", fullmatch=True),
)


@given(HOSTS, st.integers(0, 65_535), st.one_of(st.none(), st.integers(1, 65_535)))
def test_what_is_joined_is_split_as_it_was(host: str, port: int, default: int | None) -> None:
    assert split_address(join_address(host, port), default_port=default) == (host, port)


@given(HOSTS, st.integers(1, 65_535))
def test_a_port_may_be_missing_where_there_is_a_default(host: str, default: int) -> None:
    bracketed = f"[{host}]" if ":" in host else host
    assert split_address(bracketed, default_port=default) == (host, default)
    assert split_address(host, default_port=default) == (host, default)


BAD = [
    "",
    "host",
    "host:",
    ":80",
    "host:port",
    "host:99999",
    "host:-1",
    "host:1:",
    "a:b:1",
    "a b:1",
    "[]:1",
    "[::1",
    "[::1]",
]
BAD += ["[::1]x:1", "::1]:1", "[node]:1", "[127.0.0.1]:1", "user@host:1", "host/path:1", "host:\u0661"]


@pytest.mark.parametrize("address", BAD)
def test_what_is_no_address_is_named(address: str) -> None:
    with pytest.raises(UsageError, match=r"^--listen: expected HOST:PORT") as caught:
        split_address(address, name="--listen", expected="HOST:PORT")
    assert repr(address) in str(caught.value)


@pytest.mark.parametrize(
    ("address", "example"), [("::1:29555", "[::1]:29555"), ("::1", "[::1]:PORT"), ("fd00::2:80", "[")]
)
def test_ipv6_without_brackets_is_answered_with_brackets(address: str, example: str) -> None:
    with pytest.raises(UsageError, match="brackets") as caught:
        split_address(address)
    assert example in str(caught.value)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *((host, True) for host in ("127.0.0.1", "127.8.8.8", "::1", "0:0::1", "::ffff:127.0.0.1", "localhost")),
        *((host, False) for host in ("10.0.0.1", "example.org", "::", "fd00::1", "::ffff:10.0.0.1", "0.0.0.0")),
    ],
)
def test_loopback_is_recognised(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize("host", ["::1", "[::1]", "0:0:0:0:0:0:0:1", "[0::1]"])
def test_one_host_is_spelt_one_way(host: str) -> None:
    assert spell_host(host) == "::1"
    assert spell_host("Node-3") == "node-3"
    assert spell_host("::ffff:10.0.0.1") == "10.0.0.1"


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.1:4000", "10.0.0.1"),
        ("ipv6:%5B::1%5D:4000", "::1"),
        ("ipv6:[fd00::2]:4000", "fd00::2"),
        ("ipv6:%5Bfe80::1%25eth0%5D:4000", "fe80::1%eth0"),
        ("unix:/tmp/socket", "unix:/tmp/socket"),
    ],
)
def test_the_host_in_grpcs_name_of_a_peer(peer: str, host: str) -> None:
    assert host_of_peer(peer) == host


class Host:
    """A host that has the addresses ``ours``, and ways to addresses that begin with one of ``ways``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ours: str, ways: tuple[str, ...] = ()) -> None:
        def route_to(address: str, port: int = 0) -> str:
            if not address.startswith(ways):
                raise OSError(f"no way to {address}")
            return f"way to {address}"

        monkeypatch.setattr(addresses, "is_ours", lambda address: address in ours)
        monkeypatch.setattr(addresses, "route_to", route_to)

    @staticmethod
    def knows(monkeypatch: pytest.MonkeyPatch, *found: str) -> None:
        def look_up(name: str, port: None, *, type: int) -> list[Any]:  # noqa: A002 - the name of socket's
            return [
                (
                    socket.AF_INET6 if ":" in one else socket.AF_INET,
                    type,
                    6,
                    "",
                    (one, 0, 0, 0)[: 4 if ":" in one else 2],
                )
                for one in found
            ]

        monkeypatch.setattr(socket, "getaddrinfo", look_up)


def test_loopback_is_ipv6_only_where_there_is_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    Host(monkeypatch, "127.0.0.1", "::1")
    assert (loopback(), resolve("localhost")) == ("127.0.0.1", "127.0.0.1")
    assert (loopback_like("::1"), loopback_like("10.0.0.1")) == ("::1", "127.0.0.1")
    Host(monkeypatch, "::1")
    assert (loopback(), resolve("localhost")) == ("::1", "::1")
    assert loopback_like("127.0.0.1") == "::1"
    Host(monkeypatch)
    assert loopback() == "127.0.0.1"


@pytest.mark.parametrize(
    ("ways", "chosen"),
    [(("10.", "fd"), "10.0.0.7"), (("fd",), "fd00::7"), (("10.",), "10.0.0.7"), ((), "10.0.0.7")],
)
def test_a_host_with_two_addresses_is_reached_by_the_one_to_which_there_is_a_way(
    monkeypatch: pytest.MonkeyPatch, ways: tuple[str, ...], chosen: str
) -> None:
    Host(monkeypatch, ways=ways)
    Host.knows(monkeypatch, "fd00::7", "10.0.0.7")
    assert resolve("dual") == chosen


def test_the_way_out_may_be_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    Host(monkeypatch, ways=("2001:",))
    assert route_out() == "way to 2001:db8::1"
    Host(monkeypatch)
    with pytest.raises(OSError, match="no way out"):
        route_out()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "203.0.113.7"])
def test_a_free_port_is_of_the_family_of_its_address(address: str) -> None:
    if address == "::1":
        need_ipv6()
    port = free_port(address)
    with open_listener(address if is_ours(address) else "127.0.0.1", port) as listener:
        assert listener.getsockname()[1] == port


def test_a_listener_everywhere_takes_both_families() -> None:
    need_ipv6()
    with open_listener("::", 0) as listener:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, listener.getsockname()[1]), timeout=30).close()


_SUSPECT = re.compile(r"127\.0\.0\.1|0\.0\.0\.0|::|localhost|AF_INET")
_LITERALS = ("127.0.0.1", "0.0.0.0", "::1", "::")
_KNOWN = {
    "core/addresses.py": "reads and writes addresses",
    "dashboard/app.py": "names by which browsers ask",
    "launch/doctor/host_checks.py": "is a port free at all addresses of this host",
    "net/transport/connection_watch.py": "is a descriptor a connection of either family",
    "torch/functional_operators.py": "namespace::operator",
}


def test_no_other_module_knows_loopback_or_families() -> None:
    """Each that does has forgotten the hosts whose addresses are others."""
    root = Path(asyncpar.__file__).parent
    found = {
        f"{path.relative_to(root)}"
        for path in root.rglob("*.py")
        if _SUSPECT.search(text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if _names_loopback(node) or _names_family(node)
    }
    assert found == set(_KNOWN)


def _names_loopback(node: ast.AST) -> bool:
    """Is ``node`` text that is an address, or begins with one and a colon, as ``127.0.0.1:{port}``?"""
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return False
    return node.value in _LITERALS or node.value.startswith(("127.0.0.1:", "localhost:", "[::1]:"))


def _names_family(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("AF_INET", "AF_INET6")
