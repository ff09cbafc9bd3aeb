"""Places in the placement groups of a Ray cluster: an actor of Ray in each bundle runs the agent.

Ray places the bundles of a job all at once or not at all.  This module imports ray; ``ray.py`` does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final

import ray
import ray.exceptions
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncpar.core.config.secret import Secret
from asyncpar.engines.interface import (
    Handle,
    JobSpec,
    Place,
    PlaceCommand,
    PlaceEvent,
    PlaceLost,
    PlacementEngine,
    PlaceOrder,
    encode,
)
from asyncpar.engines.polled_place import ANSWER_SECONDS, check_process, pass_events_on
from asyncpar.engines.ray_actor import RayPlace
from asyncpar.errors import LaunchError, UsageError

PLACEMENTS: Final = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_END_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 0.2


class RayEngine(PlacementEngine):
    """Bundles of ``resources`` for each rank, placed by the strategy ``placement``."""

    def __init__(self, *, placement: str = "PACK", resources: Mapping[str, float] | None = None) -> None:
        if placement not in PLACEMENTS:
            raise UsageError(f"placement: expected one of {', '.join(PLACEMENTS)}, got {placement!r}")
        self._placement = placement
        self._resources = dict(resources or {"CPU": 1.0})
        self._group: Any = None
        self._actors: list[Any] = []
        self._polls: set[asyncio.Task[None]] = set()
        self._lost: asyncio.Queue[PlaceLost] = asyncio.Queue()

    async def allocate(self, spec: JobSpec) -> Sequence[Place]:
        if not ray.is_initialized():
            raise UsageError("ray: expected a connection to a cluster; call ray.init() first")
        per_place = spec.per_place or 1
        size = -(-spec.ranks // per_place)
        bundle = {name: amount * per_place for name, amount in self._resources.items()}
        await self._wait_for_resources(bundle, size, spec)
        self._group = placement_group([bundle] * size, strategy=self._placement)
        await self._wait_for_group(size, spec)
        actor = ray.remote(RayPlace)
        self._actors = [
            actor.options(
                num_cpus=bundle.get("CPU", 0.0),
                num_gpus=bundle.get("GPU", 0.0),
                resources={name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")},
                max_restarts=0,
                max_concurrency=16,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
            ).remote()
            for index in range(size)
        ]
        seconds = spec.timeout + spec.wait
        return [await self._describe(index, actor, per_place, seconds) for index, actor in enumerate(self._actors)]

    async def start(self, place: Place, order: PlaceOrder, take: Callable[[PlaceEvent], None]) -> Handle:
        actor = self._actors[order.number]
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await actor.start.remote(Secret(encode(order)))
        except TimeoutError as error:
            raise LaunchError(f"{place.name} gives no answer within {ANSWER_SECONDS:g} s") from error
        except ray.exceptions.RayError as error:
            raise LaunchError(f"{place.name} is not reached: {error}") from error
        poll = asyncio.create_task(self._poll(order.number, actor, take), name=f"asyncpar events of {place.name}")
        self._polls.add(poll)
        poll.add_done_callback(self._polls.discard)
        return RayHandle(actor)

    async def failures(self) -> AsyncIterator[PlaceLost]:
        """Yield the actors that die, which polling them reveals."""
        while True:
            yield await self._lost.get()

    async def release(self) -> None:
        for poll in self._polls:
            poll.cancel()
        actors, self._actors = self._actors, []
        if actors:
            ends = [asyncio.ensure_future(self._end(actor)) for actor in actors]
            _, stopped = await asyncio.wait(ends, timeout=_END_SECONDS)
            for end in stopped:
                end.cancel()
            for actor in actors:
                ray.kill(actor)
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)

    async def _end(self, actor: Any) -> None:
        try:
            await actor.end.remote()
        except ray.exceptions.RayError:  # it is gone, with everything that it started
            return

    async def _wait_for_resources(self, bundle: Mapping[str, float], size: int, spec: JobSpec) -> None:
        """Return when the cluster's total resources suffice for the job, in use or not."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + spec.wait
        while True:
            total = ray.cluster_resources()
            name = next((name for name, amount in bundle.items() if total.get(name, 0.0) < amount * size), None)
            if name is None:
                return
            if loop.time() >= deadline:
                raise UsageError(
                    f"ranks: {spec.ranks} need {bundle[name] * size:g} {name} in {size} bundles, this cluster of Ray "
                    f"has {total.get(name, 0.0):g}; wait=SECONDS waits for more, resources= asks for less"
                )
            await asyncio.sleep(_LOOK_SECONDS)

    async def _wait_for_group(self, size: int, spec: JobSpec) -> None:
        """Return when Ray has placed all bundles; other jobs may hold their resources until then."""
        try:
            async with asyncio.timeout(spec.timeout + spec.wait):
                await self._group.ready()
        except TimeoutError as error:
            raise UsageError(
                f"placement: Ray has not placed {size} bundles as {self._placement} within "
                f"{spec.timeout + spec.wait:g} s (timeout= and wait=); PACK asks for less than STRICT_SPREAD"
            ) from error

    async def _describe(self, index: int, actor: Any, slots: int, seconds: float) -> Place:
        """Return the place, once the actor has started; before that Ray may have to set up an environment for it."""
        try:
            async with asyncio.timeout(seconds):
                seen = await actor.describe.remote()
        except TimeoutError as error:
            raise LaunchError(
                f"Ray's bundle {index} gives no answer within {seconds:g} s (timeout= and wait=)"
            ) from error
        except ray.exceptions.RayError as error:
            raise LaunchError(f"Ray's bundle {index} cannot run asyncpar: {error}") from error
        check_process(f"Ray's bundle {index}", seen)
        return Place(name=f"Ray's bundle {index}", host=seen["host"], address=seen["address"], slots=slots)

    async def _poll(self, number: int, actor: Any, take: Callable[[PlaceEvent], None]) -> None:
        await pass_events_on(actor.events.remote, take, lambda cause: self._lost.put_nowait(PlaceLost(number, cause)))


class RayHandle(Handle):
    """An agent in an actor of Ray."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def send(self, command: PlaceCommand) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._actor.send.remote(encode(command))
        except ray.exceptions.RayError as error:
            raise OSError(str(error)) from error
