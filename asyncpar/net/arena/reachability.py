"""Notice that a rank of this host ended before it came to the formation of the arena."""

from __future__ import annotations

import asyncio
from typing import Final

from asyncpar.net.transport.rpc import split_address

LOOK_SECONDS: Final = 0.4
"""Between two looks at a rank that has not come."""

_ANSWER_SECONDS: Final = 1.0


class Lookout:
    """Looks at ``address``, where the server of a rank was, every ``LOOK_SECONDS``; empty: there is nothing to see."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._due = asyncio.get_running_loop().time() + LOOK_SECONDS
        self._failures = 0

    async def is_gone(self) -> bool:
        """Has nobody listened for two looks in a row?  Looks if that is due.

        A rank that is stopped still listens, by its kernel.
        """
        loop = asyncio.get_running_loop()
        if self._address and loop.time() >= self._due:
            self._failures = 0 if await _is_listening(self._address) else self._failures + 1
            self._due = loop.time() + LOOK_SECONDS
        return self._failures >= 2


async def _is_listening(address: str) -> bool:
    """Return False if the connection is refused; whatever else goes wrong says nothing about the rank."""
    host, port = split_address(address)
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    writer.close()
    return True
