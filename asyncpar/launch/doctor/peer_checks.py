"""Checks between this host and others: names, connections, ports, MTU, clocks, secret, versions."""

from __future__ import annotations

import asyncio
import importlib.metadata
import socket
from collections.abc import Iterable
from functools import partial
from typing import Final

import psutil

from asyncpar.core.addresses import ANY_PORT, family_of, resolve, route_to, split_address
from asyncpar.core.system_errors import os_reason
from asyncpar.launch.doctor.findings import Finding, fail, warn, well
from asyncpar.launch.doctor.host_checks import LEAST_MTU, ask_name_server
from asyncpar.launch.doctor.peer_service import BULK_BYTES, DOCTOR_PORT, PeerReport, PortWays, meet, try_ports

CLOCK_SECONDS: Final = 1.0
"""The largest acceptable clock difference: more confuses readers of logs, and certificates that were just made."""

_MEET_SECONDS: Final = 2.0
_IP_MTU: Final = 14
_IPV6_MTU: Final = 24
_SLOW_BYTES_PER_SECOND: Final = 1e6


async def examine_hosts(names: Iterable[str], secret: bytes) -> list[Finding]:
    """Return the findings on the connections to other hosts, all checked concurrently."""
    found = await asyncio.gather(*(_examine(name, secret) for name in names))
    return [finding for findings in found for finding in findings]


async def _examine(name: str, secret: bytes) -> list[Finding]:
    host, port = split_address(name, name="--hosts", default_port=DOCTOR_PORT)
    try:
        address = await ask_name_server(partial(resolve, host))
    except OSError as error:
        advice = f"add {host} to /etc/hosts or DNS on this host, or name it by its address"
        return [fail("name", f"it cannot be resolved ({os_reason(error)})", advice, host=host)]
    try:
        own = route_to(address, port)
    except OSError as error:
        advice = f"ip route get {address}; bring the interface up, or add a route"
        return [fail("way", f"there is none to {address} ({error.strerror})", advice, host=host)]
    findings = [_check_mtu(host, address, own)]
    try:
        report = await meet(address, port, secret, within=_MEET_SECONDS)
        ways = await try_ports(address, port, own, within=_MEET_SECONDS)
    except ConnectionRefusedError:
        advice = f"run `asyncpar doctor --listen :{port}` there, to compare clocks, secrets and versions, too"
        return [*findings, warn("port", f"{address} is there, but no doctor at port {port}", advice, host=host)]
    except (OSError, ValueError) as error:
        advice = f"let a firewall pass TCP between all hosts of the job, and see whether {host} runs (ping {address})"
        why = f"within {_MEET_SECONDS:g} s" if isinstance(error, TimeoutError) else f"({error})"
        return [*findings, fail("way", f"nothing answers at {address}, port {port} {why}", advice, host=host)]
    return [*findings, *compare(host, report), check_ports(host, ways)]


def compare(host: str, report: PeerReport) -> list[Finding]:
    """Return the findings from a conversation with the doctor of ``host``."""
    return [
        _check_bulk(host, report),
        _check_clock(host, report),
        _check_secret(host, report),
        _check_version(host, report),
    ]


def check_ports(host: str, ways: PortWays) -> Finding:
    """Check whether ranks reach each other where they listen: at ports that the system chooses."""
    if ways.forth is None or ways.back is None:
        return warn("rank ports", "that doctor is of an older asyncpar, and cannot try them", "update it", host=host)
    blocked = [
        f"from {source} to {', '.join(map(str, missed))} {target} ({next(iter(missed.values()))})"
        for missed, source, target in ((ways.forth, "here", "there"), (ways.back, "there", "here"))
        if missed
    ]
    if not blocked:
        return well("rank ports", "TCP passes both ways between ports such as ranks listen at", host=host)
    both = len(blocked) > 1
    at = "both hosts" if both else "that host" if ways.forth else "this host"
    advice = (
        f"ranks listen at ports that the system chooses (sysctl net.ipv4.ip_local_port_range): let the firewall of "
        f"{at} pass TCP to them {'from each other' if both else 'from the other'}"
    )
    return fail("rank ports", f"TCP does not pass {' and '.join(blocked)}", advice, host=host)


def _check_bulk(host: str, report: PeerReport) -> Finding:
    if report.bulk_seconds is None:
        return fail(
            "MTU",
            f"small messages come through, {BULK_BYTES >> 10} KB do not: packets of full size are lost on the way",
            "set the same MTU on all hosts and switches (ip link set NAME mtu 1500), or let ICMP pass",
            host=host,
        )
    rate = 2 * BULK_BYTES / max(report.bulk_seconds, 1e-6)
    text = f"round trip {report.round_trip * 1e3:.2f} ms, {rate / 1e6:.0f} MB/s in a short test"
    if rate < _SLOW_BYTES_PER_SECOND:
        return warn("way", text, "that is slow: look for a wrong link, or one that others use", host=host)
    return well("way", text, host=host)


def _check_clock(host: str, report: PeerReport) -> Finding:
    offset = report.clock_offset
    if abs(offset) > CLOCK_SECONDS + report.round_trip:
        found = f"its clock is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} ours"
        return fail("clock", found, "synchronize both with NTP (chronyc makestep; timedatectl set-ntp true)", host=host)
    return well("clock", f"it differs by {abs(offset) * 1e3:.1f} ms at most", host=host)


def _check_secret(host: str, report: PeerReport) -> Finding:
    if report.has_same_secret is None:
        advice = "give --secret-file to the doctors of both hosts"
        return warn("secret", "it was not compared: one of both has none", advice, host=host)
    if not report.has_same_secret:
        return fail("secret", "it has another one than this host", "copy the same secret file to all hosts", host=host)
    return well("secret", "the same", host=host)


def _check_version(host: str, report: PeerReport) -> Finding:
    own = importlib.metadata.version("asyncpar")
    if report.version != own:
        found = f"asyncpar {report.version} there, {own} here"
        return fail("versions", found, f"pip install asyncpar=={own} on all hosts", host=host)
    return well("versions", f"asyncpar {report.version}, Python {report.python}", host=host)


def _check_mtu(host: str, address: str, own: str) -> Finding:
    """Compare the kernel's MTU for the route with that of the interface that leads there."""
    mtu = _path_mtu(address)
    interface = next(
        (
            name
            for name, entries in psutil.net_if_addrs().items()
            if any(entry.address.partition("%")[0] == own.partition("%")[0] for entry in entries)
        ),
        "",
    )
    if mtu is None:
        return well("MTU", "the system does not report it", host=host)
    if mtu < LEAST_MTU:
        advice = f"ip link set {interface or 'NAME'} mtu 1500, or what the network takes, the same on all hosts"
        return fail("MTU", f"the way to {address} takes packets of {mtu} bytes", advice, host=host)
    return well("MTU", f"{mtu} bytes" + (f" over {interface}" if interface else ""), host=host)


def _path_mtu(address: str) -> int | None:
    level, option = (socket.IPPROTO_IPV6, _IPV6_MTU) if ":" in address else (socket.IPPROTO_IP, _IP_MTU)
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, ANY_PORT))
            return probe.getsockopt(level, option)
        except OSError:
            return None
