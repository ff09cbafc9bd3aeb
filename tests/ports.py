"""Ports for servers that tests start later."""

from __future__ import annotations

import random
import socket
from typing import Final

_FIRST: Final = 10_000
_COUNT: Final = 10_000
_next = random.randrange(_COUNT)  # processes of the tests begin at different ones


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port that is free at ``address``, and stays so until a server takes it.

    It is none that the kernel gives to connections, or to servers that ask for any port: until the server of a test
    has started, one of those could be taken by whatever else runs.  No other test of this process gets it, either.
    """
    global _next
    for _ in range(_COUNT):
        port, _next = _FIRST + _next % _COUNT, _next + 1
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
        return port
    raise RuntimeError(f"no port from {_FIRST} to {_FIRST + _COUNT} is free at {address}")
