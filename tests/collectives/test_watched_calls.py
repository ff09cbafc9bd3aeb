"""A call that awaits more after something was thrown into it, to clean up, is left to do so."""

from __future__ import annotations

import asyncio

import pytest

from asyncpar.collectives.call import WatchedCall


class Refused(Exception):
    pass


async def _cleans_up(waiting: asyncio.Future[None], noted: list[str]) -> None:
    try:
        await waiting
    except Refused:
        await asyncio.sleep(0.01)
        noted.append("cleaned up")
        raise


async def test_it_ends_after_its_cleaning_up() -> None:
    """A task throws the error of the future that it awaits; the call was told at once that it had ended."""
    noted: list[str] = []
    waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    inner = _cleans_up(waiting, noted)

    async def outer() -> None:
        await inner

    def end() -> None:
        noted.append("ended")
        inner.close()

    task = asyncio.ensure_future(WatchedCall(outer(), end))
    await asyncio.sleep(0)
    waiting.set_exception(Refused())
    async with asyncio.timeout(30):
        with pytest.raises(Refused):
            await task
    assert noted == ["cleaned up"]
