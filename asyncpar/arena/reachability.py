"""Notice that a rank of this host ended before it came to the formation of the arena."""

from __future__ import annotations

import asyncio
from typing import Final

from asyncpar.transport.rpc import split_address

LOOK_SECONDS: Final = 0.4
"""Between two looks at a rank that has not come."""

_ANSWER_SECONDS: Final = 1.0


async def until_gone(address: str) -> None:
    """Return when nobody has listened at ``address``, where the server of a rank was, for two looks in a row.

    A rank that is stopped still listens, by its kernel.  Without an address this waits for ever.
    """
    failures = 0
    while failures < 2:
        await asyncio.sleep(LOOK_SECONDS)
        failures = 0 if not address or await _is_listening(address) else failures + 1


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
