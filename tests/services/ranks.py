"""Program of the processes of test_in_a_service: rank 0 doubles what it is sent, rank 1 becomes a web server."""

from __future__ import annotations

import json
import os
import sys

import asyncpar as ap


async def double() -> None:
    async with ap.init() as node:
        try:
            while True:
                await node.world.send(2 * await node.world.recv(1), 1)
        except ap.PeerLost as error:
            print(json.dumps({"rank": error.rank, "cause": error.cause}), flush=True)


def become(complaints: str, command: list[str]) -> None:
    """Run ``python COMMAND`` instead of this, with its stderr in the file ``complaints``."""
    descriptor = os.open(complaints, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 2)
    os.execv(sys.executable, [sys.executable, *command])


if os.environ["RANK"] == "0":
    ap.run(double)
else:
    become(sys.argv[1], sys.argv[2:])
