"""Measure xoscar; started by ``actors.py``.  Two pools of one host, which talk over Unix sockets, on uvloop."""

from __future__ import annotations

import asyncio

import xoscar
from actor_rules import Array, Subject, expected, measure, parse_options, print_record


class Echo(xoscar.Actor):
    async def add(self, number: int) -> int:
        return number + 1

    async def take(self, array: Array) -> int:
        return expected(array)


class Xoscar(Subject):
    def __init__(self, address: str, remote: xoscar.ActorRef, local: xoscar.ActorRef) -> None:
        self._address = address
        self._remote = remote
        self._local = local
        self._idle: list[xoscar.ActorRef] = []

    async def ask(self, number: int) -> int:
        return await self._remote.add(number)

    async def take(self, array: Array) -> int:
        return await self._remote.take(array)

    async def ask_local(self, number: int) -> int:
        return await self._local.add(number)

    async def spawn_idle(self, count: int) -> None:
        here = xoscar.allocate_strategy.ProcessIndex(0)
        for _ in range(count):
            self._idle.append(await xoscar.create_actor(Echo, address=self._address, allocate_strategy=here))


async def main() -> None:
    pool = await xoscar.create_actor_pool("127.0.0.1", n_process=1)
    address = pool.external_address
    remote, local = [
        await xoscar.create_actor(
            Echo, address=address, uid=f"echo-{place}", allocate_strategy=xoscar.allocate_strategy.ProcessIndex(place)
        )
        for place in (1, 0)
    ]
    try:
        await measure(Xoscar(address, remote, local), parse_options(), print_record)
    finally:
        await pool.stop()


if __name__ == "__main__":
    try:
        import uvloop
    except ImportError:
        asyncio.run(main())
    else:
        uvloop.run(main())
