"""A process with few file descriptors that listens for lanes; the test knocks.  Usage: scarce.py asyncio|uvloop."""

from __future__ import annotations

import asyncio
import os
import resource
import sys

import uvloop

from asyncpar.net.transport import handshaking
from asyncpar.net.transport.busy_poll import BusyPoll
from asyncpar.net.transport.connect import TCP, TcpListener
from asyncpar.net.transport.handshaking import Porter
from tests.net.transport.pairs import SECRET, TERMS

SPARE = 12


async def listen() -> None:
    """Print the port, what the first stranger meets who finds no descriptor, and that a peer came in."""
    handshaking.STRANGER_SECONDS = 0.3
    came = asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: None)  # asyncio tells of each failed accept
    porter = Porter(
        TCP,
        secret=SECRET,
        busy_poll=BusyPoll(),
        find_terms=lambda token: TERMS if token == TERMS.token else None,
        on_lane=lambda _, __: came.set(),
    )
    listener = TcpListener(porter, bind="127.0.0.1")
    await listener.start()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + SPARE, hard))
    print(listener.port, flush=True)
    await came.wait()
    print("in", flush=True)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "uvloop":
        uvloop.run(listen())
    else:
        asyncio.run(listen())
