"""Measure Ray; started by ``actors.py``.  One actor in a worker process of this host, few resources, no dashboard.

Calls are made the fast way, with ``ray.get``: one for each ask, and one for every hundred of the concurrent ones.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from actor_rules import IN_FLIGHT, Array, Subject, expected, measure, parse_options, print_record

STORE_BYTES = 512 << 20


@ray.remote(num_cpus=0)
class Echo:
    def add(self, number: int) -> int:
        return number + 1

    def take(self, array: Array) -> int:
        return expected(array)


class Ray(Subject):
    has_local = has_idle = False

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def ask(self, number: int) -> int:
        return ray.get(self._actor.add.remote(number))

    async def ask_many(self, count: int, in_flight: int = IN_FLIGHT) -> int:
        total = 0
        for start in range(0, count, in_flight):
            numbers = range(start, min(start + in_flight, count))
            total += sum(ray.get([self._actor.add.remote(number) for number in numbers]))
        return total

    async def take(self, array: Array) -> int:
        return ray.get(self._actor.take.remote(array))


def main() -> None:
    options = parse_options()
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(num_cpus=2, object_store_memory=STORE_BYTES, **quiet)
    try:
        asyncio.run(measure(Ray(Echo.remote()), options, print_record))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
