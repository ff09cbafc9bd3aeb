"""Measure Monarch; started by ``actors.py``.  One actor in a process of this host, and one in our own."""

from __future__ import annotations

import asyncio
from typing import Any

from actor_rules import Array, Subject, expected, measure, parse_options, print_record
from monarch.actor import Actor, endpoint, this_host, this_proc


class Echo(Actor):
    @endpoint
    async def add(self, number: int) -> int:
        return number + 1

    @endpoint
    async def take(self, array: Array) -> int:
        return expected(array)


class Monarch(Subject):
    has_idle = False  # a thousand take a minute and 290 MB

    def __init__(self, remote: Any, local: Any) -> None:
        self._remote = remote
        self._local = local

    async def ask(self, number: int) -> int:
        return await self._remote.add.call_one(number)

    async def take(self, array: Array) -> int:
        return await self._remote.take.call_one(array)

    async def ask_local(self, number: int) -> int:
        return await self._local.add.call_one(number)


async def main() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 1})
    remote, local = procs.spawn("echo", Echo), this_proc().spawn("local", Echo)
    try:
        await measure(Monarch(remote, local), parse_options(), print_record)
    finally:
        await procs.stop()


if __name__ == "__main__":
    asyncio.run(main())
