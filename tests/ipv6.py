"""Hosts with other addresses than this one, as network namespaces."""

from __future__ import annotations

import functools
import shutil
import socket
import subprocess
from typing import Final

import pytest

_ONLY_IPV6: Final = 'ip link set lo up && ip addr del 127.0.0.1/8 dev lo && exec "$@"'


@functools.cache
def only_ipv6() -> tuple[str, ...]:
    """Return what runs the command after it on a host with no address but ``::1``; skip where that is not to be had."""
    prefix = ("unshare", "-rn", "sh", "-c", _ONLY_IPV6, "sh")
    if not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("there is no `unshare` or no `ip` to make a network namespace with")
    command = (*prefix, "ip", "-6", "address", "show", "lo")
    tried = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    if tried.returncode:
        pytest.skip(f"no network namespace can be made: {tried.stderr.strip()}")
    if "::1" not in tried.stdout:
        pytest.skip("this machine has no ::1")
    return prefix


def need_ipv6() -> None:
    """Skip unless this machine has ``::1``."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"this machine has no ::1 ({error})")
