"""Measurement of the costs of lanes, and agreement on them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from asyncpar.collectives import reductions
from asyncpar.collectives.algorithms.steps import RankSchedule, Recv, Round, Send, one, schedule
from asyncpar.collectives.engine import Engine
from asyncpar.collectives.execute import InPlace, execute
from asyncpar.collectives.lane_cache import LaneCache
from asyncpar.collectives.lane_estimate import UNKNOWN
from asyncpar.collectives.operation import Operation
from asyncpar.collectives.plan import AlongBuffer
from asyncpar.collectives.protocol import describe
from asyncpar.collectives.rooted import from_root, prepare_broadcast
from asyncpar.core.config.transport import LaneCosts

_Figures: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
"""Latency and bandwidth to each peer, the total rate of a host's ranks, and the speed of reductions.

0 means not measured.
"""

_Peers: TypeAlias = tuple[int | None, ...]
MOST_HOSTS = 8
"""Maximum number of other hosts to which rank 0 measures."""

_SMALL_BYTES = 8
_LARGE_BYTES = 1 << 20
_TRIES = ((1, 2, _SMALL_BYTES), (3, 10, _SMALL_BYTES), (3, 2, _LARGE_BYTES))
"""Tries, round trips in each, and bytes per message; the first tries open the lane."""

_BROADCAST_PHASE = sum(tries for tries, _, _ in _TRIES)
"""The phase after those of the tries.  Tags count per pair of ranks, so all peers have the same phases."""

_TOGETHER_TRIES, _TOGETHER_TRIPS = 3, 2
_BY_CACHE = describe("calibrate", ("by a cache",), "direct")
_MOST_LATENCY = 10.0
"""At least a tenth of a large transfer's time is due to its length: the latency was measured at another time."""


def calibrate(engine: Engine, *, clock: Callable[[], float]) -> Coroutine[Any, Any, None]:
    """Measure between rank 0 and the first other rank of its host, and the first ranks of up to 8 other hosts.

    Then all ranks of the host of rank 0 send to one another at the same time.  Rank 0's figures are broadcast, and all
    ranks choose by them from then on: between hosts, by the slowest.
    """
    return _await_figures(_measure_lanes(engine, clock))


async def _await_figures(measured: Coroutine[Any, Any, _Figures]) -> None:
    await measured


def _measure_lanes(engine: Engine, clock: Callable[[], float]) -> Coroutine[Any, Any, _Figures]:
    """Start the measurements of ``calibrate``; return rank 0's figures."""
    peers = _peers_of(engine)

    async def body(operation: Operation) -> _Figures:
        figures = np.zeros(2 * len(peers) + 2)
        for index, peer in enumerate(peers):
            if peer is not None and engine.rank in (0, peer):
                figures[2 * index : 2 * index + 2] = await _measure(engine, operation, peer, clock)
        if peers[0] is not None and engine.rank in engine.hosts[0]:
            figures[-2] = await _measure_together(engine, operation, clock)
        figures[-1] = _reduction_speed(clock)
        await _share(engine, operation, figures)
        _adopt(engine, figures, has_near=peers[0] is not None)
        return figures

    return engine.start("calibrate", describe("calibrate", (), "direct"), None, body)


def calibrate_by_cache(engine: Engine, cache: LaneCache, *, clock: Callable[[], float]) -> Coroutine[Any, Any, None]:
    """Choose by the figures of ``calibrate`` that the cache of rank 0 has; otherwise measure and store them."""
    peers = _peers_of(engine)

    async def body(operation: Operation) -> bool:
        figures = np.full(2 * len(peers) + 2, np.nan)
        for peer in peers:
            if peer is not None and engine.rank in (0, peer):
                await _exchange(engine, operation, peer, phase=0, trips=1, length=_SMALL_BYTES)  # opens the lane
        if engine.rank == 0:
            _look_up(engine, cache, peers, figures)
        await _share(engine, operation, figures)
        if np.isnan(figures).any():
            return False
        _adopt(engine, figures, has_near=peers[0] is not None)
        return True

    return _measured_where_unknown(engine, cache, engine.start("calibrate", _BY_CACHE, None, body), clock)


async def _measured_where_unknown(
    engine: Engine, cache: LaneCache, known: Coroutine[Any, Any, bool], clock: Callable[[], float]
) -> None:
    if await known:
        return
    figures = await _measure_lanes(engine, clock)
    if engine.rank != 0:
        return
    for index, peer in enumerate(_peers_of(engine)):
        if peer is not None:
            await asyncio.to_thread(cache.put, *_lane_to(engine, peer), _costs_of(figures, index))


async def _share(engine: Engine, operation: Operation, figures: _Figures) -> None:
    """Overwrite ``figures`` with those of rank 0."""
    plan = prepare_broadcast(engine, figures, 0, "tree", phase=_BROADCAST_PHASE).messages
    await from_root(engine, operation, 0, plan, lambda: execute(operation, plan, InPlace(figures)))


def _look_up(engine: Engine, cache: LaneCache, peers: _Peers, figures: _Figures) -> None:
    """Fill in the figures from the cache; missing ones stay NaN."""
    for index, peer in enumerate(peers):
        known = None if peer is None else cache.get(*_lane_to(engine, peer))
        if known is not None:
            figures[2 * index : 2 * index + 2] = known.latency, known.bandwidth
            figures[-1] = known.reduction
        elif peer is None:
            figures[2 * index : 2 * index + 2] = 0.0
        if index == 0:
            figures[-2] = 0.0 if known is None else known.together or 0.0


def _peers_of(engine: Engine) -> _Peers:
    """Return the first other rank of the host of rank 0, if there is one, and the first ranks of other hosts."""
    hosts = engine.hosts
    near = next((rank for rank in hosts[0] if rank != 0), None)
    return near, *(host[0] for host in hosts[1 : MOST_HOSTS + 1])


def _lane_to(engine: Engine, peer: int) -> tuple[str, str, str]:
    """Return this rank's host, that of ``peer``, and the kind of the lane between them, which is open.

    Inside a host the kind includes the number of its ranks: their total rate depends on it.
    """
    links, rank = engine.table.links, engine.ranks[peer]
    lane = links.link(rank).lane
    members = links.world.members
    here, there, kind = members[links.rank].host, members[rank].host, "none" if lane is None else lane.kind
    return here, there, f"{kind}*{len(engine.hosts[0])}" if peer in engine.hosts[0] else kind


async def _exchange(engine: Engine, operation: Operation, peer: int, *, phase: int, trips: int, length: int) -> None:
    """Send ``length`` bytes back and forth between rank 0 and ``peer``."""
    rounds = _ping_pong(trips, 0 if engine.rank else peer, is_first=engine.rank == 0)
    await _pass(engine, operation, schedule(1, rounds), phase=phase, length=length)


async def _pass(engine: Engine, operation: Operation, rounds: RankSchedule, *, phase: int, length: int) -> None:
    """Run a schedule over chunks of ``length`` bytes."""
    plan = engine.bind(rounds, AlongBuffer(count=rounds.chunks, chunks=rounds.chunks, itemsize=1), phase=phase)
    memory = np.zeros(rounds.chunks, np.dtype((np.void, length)))
    await execute(operation, plan, InPlace(memory))


async def _measure(engine: Engine, operation: Operation, peer: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Return the latency in seconds and the bytes/s between rank 0 and ``peer``, from the fastest of several tries."""
    quickest: list[float] = []
    for kind, (tries, trips, length) in enumerate(_TRIES):
        seconds = math.inf
        for attempt in range(tries):
            begun = clock()
            phase = sum(tries for tries, _, _ in _TRIES[:kind]) + attempt
            await _exchange(engine, operation, peer, phase=phase, trips=trips, length=length)
            seconds = min(seconds, max(clock() - begun, 1e-9) / (2 * trips))
        quickest.append(seconds)
    _, latency, large = quickest
    return latency, _LARGE_BYTES / max(large - latency, large / _MOST_LATENCY, 1e-9)


async def _measure_together(engine: Engine, operation: Operation, clock: Callable[[], float]) -> float:
    """Return the total bytes/s when all ranks of the host of rank 0 send, each to the next one, at the same time."""
    ranks = engine.hosts[0]
    place = ranks.index(engine.rank)
    onward: Round = (Send(ranks[(place + 1) % len(ranks)], one(0)), Recv(ranks[place - 1], one(1)))
    seconds = math.inf
    for attempt in range(_TOGETHER_TRIES):
        begun = clock()
        phase = _BROADCAST_PHASE + 1 + attempt
        await _pass(engine, operation, schedule(2, [onward] * _TOGETHER_TRIPS), phase=phase, length=_LARGE_BYTES)
        seconds = min(seconds, max(clock() - begun, 1e-9))
    return len(ranks) * _TOGETHER_TRIPS * _LARGE_BYTES / seconds


def _ping_pong(trips: int, peer: int, *, is_first: bool) -> list[Round]:
    trip: list[Round] = [(Send(peer, one(0)),), (Recv(peer, one(0)),)]
    return (trip if is_first else trip[::-1]) * trips


def _reduction_speed(clock: Callable[[], float]) -> float:
    """Return the bytes/s of numpy's addition."""
    one_buffer, other = np.zeros(_LARGE_BYTES // 4, np.float32), np.zeros(_LARGE_BYTES // 4, np.float32)
    np.add(one_buffer, other, out=one_buffer)
    begun = clock()
    for _ in range(4):
        np.add(one_buffer, other, out=one_buffer)
    return 4 * _LARGE_BYTES / max(clock() - begun, 1e-9)


def calibrate_from_operations(engine: Engine) -> Coroutine[Any, Any, None]:
    """Choose, on all ranks alike, by the times of finished operations of all ranks; nothing is sent to measure.

    The least latency and the highest bandwidth of all ranks count: the last rank to enter an operation has waited for
    no other.  A figure that no rank has stays as it is.
    """
    combined = reductions.all_reduce(engine, engine.lanes.figures(), op="max", out=None, algorithm=None, key=None)
    return _adopt_combined(engine, combined)


async def _adopt_combined(engine: Engine, combined: Coroutine[Any, Any, np.ndarray[Any, Any]]) -> None:
    negative_latency, bandwidth = map(float, await combined)
    model = engine.policy.model.learn(
        latency=-negative_latency if negative_latency > UNKNOWN else None,
        bandwidth=bandwidth if bandwidth > UNKNOWN else None,
        is_measured=True,
    )
    if model is not engine.policy.model:
        _use(engine, model.lane, model.local)


def _adopt(engine: Engine, figures: _Figures, *, has_near: bool) -> None:
    local, lane = engine.policy.model.local, engine.policy.model.lane
    if has_near:
        local = _costs_of(figures, 0)
    between = [_costs_of(figures, index) for index in range(1, len(figures) // 2 - 1)]
    if between:
        lane = replace(
            between[0],
            latency=max(costs.latency for costs in between),
            bandwidth=min(costs.bandwidth for costs in between),
        )
    elif has_near:
        lane = local
    _use(engine, lane, local)


def _costs_of(figures: _Figures, index: int) -> LaneCosts:
    """Return the measured costs of the lane to one of the peers."""
    latency, bandwidth = map(float, figures[2 * index : 2 * index + 2])
    together = float(figures[-2]) or None if index == 0 else None
    return LaneCosts(
        latency=latency, bandwidth=bandwidth, reduction=float(figures[-1]), is_measured=True, together=together
    )


def _use(engine: Engine, lane: LaneCosts, local: LaneCosts) -> None:
    """Choose by these figures from now on; they are equal on all ranks."""
    engine.measured_lane = lane if lane.is_measured else None
    engine.policy = replace(engine.policy, model=replace(engine.policy.model, lane=lane, local=local))
    engine.forget_prepared()
