"""Checks of this host alone.  Each returns one finding, within a second."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.metadata
import os
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, TypeVar

import psutil

from asyncpar.core.addresses import LOOPBACK_ADVICE, is_loopback, is_ours, loopback, open_listener, try_connection
from asyncpar.core.concurrency.worker import call_in_daemon_thread
from asyncpar.core.system_errors import os_reason
from asyncpar.errors import AsyncparError, UsageError
from asyncpar.launch.doctor.findings import Finding, fail, warn, well
from asyncpar.net.arena.limits import available_memory, core_quota, count_cores
from asyncpar.net.membership.credentials import read_secret
from asyncpar.net.membership.host import host_name

LEAST_FILES: Final = 1024
LEAST_MTU: Final = 1280
NAME_SECONDS: Final = 2.0
"""Seconds that a lookup may take; a silent name server keeps its callers waiting for ten seconds and more."""

_LEAST_SHM: Final = 64 << 20
_LEAST_TEMPORARY: Final = 256 << 20
_LEAST_MEMORY: Final = 512 << 20
_LEAST_LOCKED: Final = 8 << 20
_LEAST_PORTS: Final = 1024
_SYNCHRONIZED: Final = 0x40
"""STA_UNSYNC of adjtimex(2)."""

_PORTS: Final = {29400: "agents and launchers of several hosts", 29500: "MASTER_PORT"}
_REQUIRED: Final = ("grpcio", "protobuf", "msgspec", "numpy", "psutil", "click")

T = TypeVar("T")


def examine_host(environment: Mapping[str, str], *, secret_file: str | None, with_hosts: bool) -> list[Finding]:
    """Return the findings on this host; ``with_hosts``: it is to work with others."""
    checks: list[Callable[[], Finding]] = [
        check_versions,
        lambda: check_name(with_hosts=with_hosts),
        check_loopback,
        lambda: check_links(with_hosts=with_hosts),
        check_ports,
        check_port_range,
        lambda: check_clock(with_hosts=with_hosts),
        lambda: check_secret(secret_file, with_hosts=with_hosts),
        check_shared_memory,
        lambda: check_temporary(environment),
        check_files,
        check_locked,
        check_processors,
        check_memory,
    ]
    return [_run(check) for check in checks]


def _run(check: Callable[[], Finding]) -> Finding:
    """Return the finding of ``check``; a check that fails to inspect is no reason to stop."""
    try:
        return check()
    except OSError as error:
        name = getattr(check, "__name__", "check").removeprefix("check_")
        return warn(name, f"it cannot be inspected: {error}", "see whether /proc and /sys are mounted")


def check_versions() -> Finding:
    """Check that the required libraries are installed, in versions that this version works with."""
    version = importlib.metadata.version("asyncpar")
    found, missing = [], []
    for name in _REQUIRED:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return fail(
            "versions", f"asyncpar {version}, without {', '.join(missing)}", "pip install --force-reinstall asyncpar"
        )
    return well("versions", f"asyncpar {version}, {', '.join(found[:3])}")


def check_name(*, with_hosts: bool) -> Finding:
    """Check that the name of this host can be resolved, and that others reach it by that name."""
    name = host_name()
    try:
        entries = asyncio.run(ask_name_server(lambda: socket.getaddrinfo(socket.gethostname(), None)))
    except OSError as error:
        found = f"the name of this host, {socket.gethostname()!r}, cannot be resolved ({os_reason(error)})"
        advice = f"add it to /etc/hosts (<address> {name}), or give --local-addr and --rdzv-endpoint as numbers"
        return fail("name", found, advice) if with_hosts else warn("name", found, advice)
    addresses = sorted({str(entry[4][0]) for entry in entries})
    if with_hosts and all(map(is_loopback, addresses)):
        return warn(
            "name",
            f"{name} is {', '.join(addresses)}: others who ask for this host by that address get to themselves",
            f"let {name} be its address in the network in /etc/hosts, or give --local-addr",
        )
    return well("name", f"{name} is {', '.join(addresses[:3])}")


async def ask_name_server(look_up: Callable[[], T]) -> T:
    """Return the result of ``look_up``, which may ask name servers.

    Raises its errors, and ``TimeoutError`` if it takes longer than ``NAME_SECONDS``; its thread is left behind then.
    """
    try:
        async with asyncio.timeout(NAME_SECONDS):
            return await call_in_daemon_thread(look_up, "asyncpar doctor names")
    except TimeoutError as error:
        raise TimeoutError(f"no name server answers within {NAME_SECONDS:g} s") from error


def check_loopback() -> Finding:
    """Check that processes of this host can connect over 127.0.0.1, or over ::1 where there is nothing else."""
    address = loopback()
    try:
        try_connection(address)
    except OSError as error:
        return fail("loopback", f"no connection over {address} ({os_reason(error)})", LOOPBACK_ADVICE)
    return well("loopback", f"{address} connects")


def check_links(*, with_hosts: bool) -> Finding:
    """Check that the network interfaces are up and free of errors, and have the same, usual MTU."""
    up: dict[str, int] = {}
    down: list[str] = []
    for name, state in psutil.net_if_stats().items():
        if name == "lo" or name.startswith(("docker", "veth", "virbr", "br-")):
            continue
        if state.isup:
            up[name] = state.mtu
        else:
            down.append(name)
    if not up:
        found = f"no interface besides lo is up ({', '.join(down) or 'there is none'})"
        advice = "bring one up (ip link set NAME up) before a job of several hosts"
        return fail("links", found, advice) if with_hosts else well("links", found)
    small = {name: mtu for name, mtu in up.items() if mtu < LEAST_MTU}
    if small:
        name, mtu = next(iter(small.items()))
        return fail(
            "links",
            f"{name} has an MTU of {mtu} bytes",
            f"ip link set {name} mtu 1500, or what the network takes, the same on all hosts",
        )
    text = ", ".join(f"{name} (MTU {mtu})" for name, mtu in up.items())
    broken = _link_errors(up)
    if broken:
        return warn("links", f"{text}; {broken}", "look at the cable and the switch (ethtool -S NAME)")
    return well("links", text)


def _link_errors(names: Iterable[str]) -> str:
    counters = psutil.net_io_counters(pernic=True)
    for name in names:
        one = counters.get(name)
        if one is not None:
            packets, errors = one.packets_recv + one.packets_sent, one.errin + one.errout
            if errors > max(100, packets // 10_000):
                return f"{errors} of {packets} packets on {name} were broken"
    return ""


def check_ports() -> Finding:
    """Check that the default ports of jobs are free."""
    taken = [port for port in _PORTS if not _is_free(port)]
    if taken:
        text = ", ".join(f"{port} ({_PORTS[port]}, held by {_holder(port)})" for port in taken)
        return warn(
            "ports", f"taken: {text}", "that is well if it is an agent of yours; else give another --rdzv-endpoint"
        )
    return well("ports", f"{', '.join(map(str, _PORTS))} are free")


def _is_free(port: int) -> bool:
    """Return whether ``port`` is free at all addresses of this host, IPv6 included."""
    try:
        open_listener("::" if is_ours("::") else "0.0.0.0", port).close()
    except OSError:
        return False
    return True


def _holder(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                if connection.pid is None:
                    break
                return f"{psutil.Process(connection.pid).name()}, pid {connection.pid}"
    except psutil.Error:
        pass
    return "a process of another user"


def check_port_range() -> Finding:
    """Check that there are enough ports for connections between ranks."""
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except FileNotFoundError:
        return well("port range", "the system does not report which ports outgoing connections get")
    if high - low < _LEAST_PORTS:
        return fail(
            "port range",
            f"only {high - low + 1} ports for outgoing connections ({low}-{high})",
            "sysctl net.ipv4.ip_local_port_range='32768 60999'",
        )
    return well("port range", f"{low}-{high}")


def check_clock(*, with_hosts: bool) -> Finding:
    """Check that the clock is synchronized, by NTP or the like."""
    state, offset = _adjtimex()
    if state is None or not state & _SYNCHRONIZED:
        return well("clock", "it is synchronized" if state is not None else "the system does not report how it is kept")
    found = "it is not synchronized: times of hosts cannot be compared"
    if with_hosts:
        return warn("clock", found, "start chronyd or systemd-timesyncd")
    return well("clock", f"not synchronized, which matters with several hosts only ({offset:+d} us)")


def _adjtimex() -> tuple[int | None, int]:
    """Return the status bits and the offset of adjtimex(2)."""
    fields = (ctypes.c_long * 64)()
    try:
        result = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(fields))
    except AttributeError:
        return None, 0
    return (None, 0) if result < 0 else (int(fields[5]) & 0xFFFF, int(fields[1]))


def check_secret(secret_file: str | None, *, with_hosts: bool) -> Finding:
    """Check that the file with the secret exists, is private, and long enough."""
    if secret_file is None:
        if with_hosts:
            return warn(
                "secret",
                "no --secret-file (nor ASYNCPAR_SECRET_FILE): jobs over a network need one",
                "(umask 077; head -c 32 /dev/urandom > job.secret), copied to every host",
            )
        return well("secret", "none is needed on one host")
    try:
        read_secret(secret_file, what="--secret-file")
        mode = stat.S_IMODE(os.stat(secret_file).st_mode)
    except (AsyncparError, OSError) as error:
        return fail("secret", str(error), "make it with (umask 077; head -c 32 /dev/urandom > job.secret), copy it")
    if mode & 0o077:
        return fail("secret", f"{secret_file}: others can read it (mode {mode:o})", f"chmod 600 {secret_file}")
    return well("secret", f"{secret_file} is private")


def check_shared_memory() -> Finding:
    """Check that there is room in /dev/shm, which data loaders and other libraries use."""
    path = Path("/dev/shm")
    if sys.platform != "linux":
        return well("/dev/shm", "this system has none, so ranks exchange arrays over sockets")
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        return fail("/dev/shm", "it is not there, or cannot be written", "mount -t tmpfs tmpfs /dev/shm")
    free = shutil.disk_usage(path).free
    if free < _LEAST_SHM:
        return fail(
            "/dev/shm",
            f"{_size(free)} free: loaders and other libraries that share memory end with SIGBUS",
            "give the container --shm-size=8g (Docker) or an emptyDir with medium: Memory (Kubernetes), or remove "
            "files there",
        )
    return well("/dev/shm", f"{_size(free)} free")


def check_temporary(environment: Mapping[str, str]) -> Finding:
    """Check that there is room for temporary files, and a private directory for jobs."""
    from asyncpar.launch.job_directory import jobs_directory

    path = tempfile.gettempdir()
    free = shutil.disk_usage(path).free
    if free < _LEAST_TEMPORARY:
        return fail("temporary files", f"{path}: {_size(free)} free", f"remove files in {path}, or set TMPDIR")
    try:
        jobs = jobs_directory(environment)
    except (OSError, UsageError) as error:
        private = f"{path}/asyncpar-{os.geteuid()}"
        advice = f"remove {private}" if os.path.lexists(private) else "set TMPDIR to a folder where files can be made"
        return fail("temporary files", f"no private directory: {error}", advice)
    return well("temporary files", f"{path}: {_size(free)} free; jobs are in {jobs}")


def check_files() -> Finding:
    """Check that a process may open enough files and connections."""
    try:
        import resource
    except ImportError:  # Windows
        return well("open files", "this system limits them by memory alone")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < LEAST_FILES:
        most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        return fail(
            "open files",
            f"a process may open {soft} files (hard limit {most}): a rank needs one per connection",
            f"ulimit -n {min(65536, hard) if hard >= LEAST_FILES else 65536}; for good: LimitNOFILE= of the service, "
            "or /etc/security/limits.conf",
        )
    return well("open files", f"{soft} per process")


def check_locked() -> Finding:
    """Check that a process may lock memory, as NCCL and InfiniBand require."""
    try:
        import resource
    except ImportError:  # Windows
        return well("locked memory", "this system has no limit of that kind")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and soft < _LEAST_LOCKED:
        return warn(
            "locked memory",
            f"a process may lock {_size(soft)}: GPUs and InfiniBand want more",
            "ulimit -l unlimited; for good: LimitMEMLOCK=infinity, or /etc/security/limits.conf",
        )
    return well("locked memory", "unlimited" if soft == resource.RLIM_INFINITY else _size(soft))


def check_processors() -> Finding:
    """Check that the control group grants as much time as there are processors."""
    cores, quota = count_cores(), core_quota()
    if quota < 1.0:
        return fail(
            "processors",
            f"the control group grants {quota:.2f} processors: each rank stands still for most of every 100 ms",
            "raise the CPU limit of the container (--cpus, resources.limits.cpu) to one per rank or more",
        )
    if quota < cores:
        return warn(
            "processors",
            f"{cores} processors, of which the control group grants {quota:.1f}",
            f"start {max(1, int(quota))} ranks here: --nproc-per-node auto would start {cores}",
        )
    return well("processors", f"{cores}, without a quota below that")


def check_memory() -> Finding:
    """Check that there is enough free memory."""
    free = min(available_memory(), psutil.virtual_memory().available)
    if free < _LEAST_MEMORY:
        return fail("memory", f"{_size(free)} available", "end other processes, or raise the container's limit")
    return well("memory", f"{_size(free)} available")


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1024 or unit == "GB":
            return f"{count:.0f} {unit}" if count >= 10 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return ""
