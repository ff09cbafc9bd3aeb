"""Addresses of hosts: their spelling, the addresses of this host, and the routes to others.

``host:port`` is parsed and formatted only here, so IPv6 works wherever an address is read or written.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from typing import Final

from asyncpar.core.system_errors import os_reason
from asyncpar.errors import UsageError

LOOPBACK_ADVICE: Final = "bring the interface lo up (ip link set lo up), and let a firewall pass 127.0.0.0/8"
"""Advice for a host that does not reach itself; its other addresses use that interface, too."""

ANY_PORT: Final = 9
"""A port for looking up the route to a host; nothing is sent to it."""

_LOOPBACK: Final = "127.0.0.1"
_LOOPBACK_V6: Final = "::1"
_SELF_SECONDS: Final = 1.0
_ELSEWHERE: Final = ("192.0.2.1", "2001:db8::1")
"""Addresses of no host (RFC 5737, RFC 3849): the route to them is the route out."""


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is an address, or the name, of this machine's loopback interface."""
    if host == "localhost":
        return True
    address = _as_number(host)
    return address is not None and address.is_loopback


def spell_host(host: str) -> str:
    """Return ``host`` in canonical form: without brackets, numbers as short as possible, names in lower case."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    address = _as_number(bare)
    return bare.lower() if address is None else str(address)


def _as_number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that ``host`` spells, IPv4 for one that IPv6 only carries; None if it is a name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def is_ipv6(host: str) -> bool:
    """Return whether ``host`` spells an IPv6 address."""
    with contextlib.suppress(ValueError):
        return isinstance(ipaddress.ip_address(host), ipaddress.IPv6Address)
    return False


def family_of(address: str) -> socket.AddressFamily:
    """Return the socket family for the numeric ``address``."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def join_address(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(
    address: str, *, name: str = "address", expected: str = "host:port", default_port: int | None = None
) -> tuple[str, int]:
    """Return host and port of ``host:port`` or ``[v6]:port``.

    With a ``default_port`` the port may be omitted, and then the brackets, too.  Raises ``UsageError`` that begins with
    ``name``, states what was ``expected``, and points out missing brackets.
    """
    if default_port is not None and is_ipv6(address):
        return address, default_port
    head, colon, port = address.rpartition(":")
    if address.endswith("]") or not colon:
        head, port = (address, "") if default_port is None else (address, str(default_port))
    is_bracketed = head.startswith("[") and head.endswith("]")
    host = head[1:-1] if is_bracketed else head
    if ":" in host and not is_bracketed and (is_ipv6(host) or is_ipv6(address)):
        example = join_address(host, int(port)) if is_ipv6(host) and _is_port(port) else f"[{address}]:PORT"
        raise UsageError(f"{name}: expected {expected}, got {address!r}; IPv6 goes into brackets, as in {example}")
    if not host or any(letter in "[]/@" or letter.isspace() for letter in host) or not _is_port(port):
        raise UsageError(f"{name}: expected {expected}, got {address!r}")
    if is_bracketed is not (":" in host) or (is_bracketed and not is_ipv6(host)):
        raise UsageError(f"{name}: expected {expected}, with an IPv6 address in the brackets, got {address!r}")
    return host, int(port)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text) <= 65_535


def host_of_peer(peer: str) -> str:
    """Return the address in gRPC's name of a peer (``ipv4:127.0.0.1:4000``, ``ipv6:%5B::1%5D:4000``)."""
    place = place_of_peer(peer)
    return peer if place is None else place[0]


def place_of_peer(peer: str) -> tuple[str, int] | None:
    """Return address and port of gRPC's ``peer``; None if it is not an internet address."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    host, _, port = rest.rpartition(":")
    return host.replace("%5B", "").replace("%5D", "").strip("[]").replace("%25", "%"), int(port)


def check_bindable(bind: str, port: int, *, what: str = "") -> None:
    """Raise ``UsageError`` that says why ``bind:port`` cannot be bound: in use, or not an address of this host.

    It begins with ``what``, such as the option that set the address.
    """
    try:
        _bind(bind, port)
    except OSError as error:
        where = join_address(bind, port)
        raise UsageError(
            f"{what and f'{what}: '}{where} cannot be bound: {os_reason(error)}; choose another port or address"
        ) from error


def _bind(address: str, port: int) -> int:
    """Bind a socket briefly, and return its port."""
    with socket.socket(family_of(address), socket.SOCK_STREAM) as probe:
        if port:  # a port that was in use a moment ago is fine
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address, port))
        return int(probe.getsockname()[1])


def try_connection(address: str) -> None:
    """Connect to a socket of this process at ``address``, one of this host.  Raises ``OSError`` if that fails."""
    family = family_of(address)
    with socket.socket(family) as listening, socket.socket(family) as calling:
        listening.bind((address, 0))
        listening.listen()
        calling.settimeout(_SELF_SECONDS)
        calling.connect(listening.getsockname())


def check_reaches_itself(address: str, *, what: str = "") -> None:
    """Raise ``UsageError``, which begins with ``what``, if processes of this host cannot connect at ``address``.

    ``address`` is one of this host.  Without the check they would wait for each other until they time out.
    """
    try:
        try_connection(address)
    except OSError as error:
        reason = f"this host does not reach itself at {address} ({os_reason(error)}); {LOOPBACK_ADVICE}"
        raise UsageError(f"{what and f'{what}: '}{reason}") from error


def open_listener(host: str, port: int) -> socket.socket:
    """Return a listening socket bound to ``host``; one at ``::`` accepts IPv4, too.  Raises ``OSError``."""
    family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    is_dual = family == socket.AF_INET6 and spell_host(str(place[0])) == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(place, family=family, dualstack_ipv6=is_dual)


def is_ours(address: str) -> bool:
    """Return whether ``address`` is one of this host."""
    try:
        _bind(address, 0)
    except OSError:
        return False
    return True


def free_port(address: str) -> int:
    """Return a free port of ``address``, or of any address if that is not one of this host."""
    for bind in (address, "", "::"):
        with contextlib.suppress(OSError):
            return _bind(bind, 0)
    raise UsageError(f"port: none is free at {address}")


def loopback() -> str:
    """Return the address at which processes of this host meet: 127.0.0.1, or ::1 if there is only that."""
    return _LOOPBACK_V6 if not is_ours(_LOOPBACK) and is_ours(_LOOPBACK_V6) else _LOOPBACK


def loopback_like(address: str) -> str:
    """Return ``address`` if it is a loopback address of this host, else the one at which its processes meet."""
    return address if is_loopback(address) and is_ours(address) else loopback()


def resolve(name: str) -> str:
    """Return the address of the host ``name``: a reachable one if it has several, preferably IPv4.

    ``localhost`` is loopback (RFC 6761).  Blocks; raises ``OSError`` if the name has no address.
    """
    if name == "localhost":
        return loopback()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a label is empty or too long: no host has such a name
        raise socket.gaierror(socket.EAI_NONAME, f"no name of a host: {error}") from error
    addresses = [_numeric(entry[4]) for entry in sorted(found, key=lambda entry: entry[0] != socket.AF_INET)]
    return next(filter(_is_reachable, addresses), addresses[0]) if len(addresses) > 1 else addresses[0]


def _numeric(place: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]) -> str:
    """Return the address of a socket as a number, with the interface if it is only valid there."""
    address = str(place[0])
    if len(place) == 4 and place[3] and "%" not in address:
        with contextlib.suppress(OSError):
            return f"{address}%{socket.if_indextoname(place[3])}"
    return address


def _is_reachable(address: str) -> bool:
    try:
        route_to(address, ANY_PORT)
    except OSError:
        return False
    return True


def route_to(address: str, port: int = ANY_PORT) -> str:
    """Return the source address of packets from this host to ``address``.  Sends nothing.

    Raises ``OSError`` if there is no route.
    """
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return _numeric(probe.getsockname())


def route_out() -> str:
    """Return the source address of this host's packets to other networks.  Raises ``OSError`` if there is no route."""
    for address in _ELSEWHERE:
        with contextlib.suppress(OSError):
            return route_to(address)
    raise OSError(errno.ENETUNREACH, "there is no way out of this host")
