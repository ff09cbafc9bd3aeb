"""Measure what lanes cost, and agree on it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import numpy as np

from asyncpar.collectives import reductions
from asyncpar.collectives.algorithms.steps import Recv, Round, Send, one, schedule
from asyncpar.collectives.engine import Engine
from asyncpar.collectives.execute import InPlace, execute
from asyncpar.collectives.lane_estimate import UNKNOWN
from asyncpar.collectives.operation import Operation
from asyncpar.collectives.plan import AlongBuffer
from asyncpar.collectives.protocol import describe
from asyncpar.collectives.rooted import from_root, prepare_broadcast
from asyncpar.core.config.transport import LaneCosts

_SMALL_BYTES = 8
_LARGE_BYTES = 1 << 20
_SMALL_TRIPS = 30
_LARGE_TRIPS = 6
_MOST_LATENCY = 10.0
"""At least a tenth of a large transfer's time is due to its length: the latency was measured at another time."""


def calibrate(engine: Engine, *, clock: Callable[[], float]) -> Coroutine[Any, Any, None]:
    """Measure between rank 0 and the first other rank of its host, and the first rank of another host.

    Rank 0's figures are broadcast, and all ranks choose by them from then on.
    """
    hosts = engine.hosts
    near = next((rank for rank in hosts[0] if rank != 0), None)
    far = hosts[1][0] if len(hosts) > 1 else None

    async def body(operation: Operation) -> None:
        figures = np.zeros(5)
        for index, peer in enumerate((near, far)):
            if peer is not None and engine.rank in (0, peer):
                figures[2 * index : 2 * index + 2] = await _measure(engine, operation, peer, index, clock)
        figures[4] = _reduction_speed(clock)
        plan = prepare_broadcast(engine, figures, 0, "tree", phase=6).messages
        await from_root(engine, operation, 0, plan, lambda: execute(operation, plan, InPlace(figures)))
        _adopt(engine, figures, has_near=near is not None, has_far=far is not None)

    return engine.start("calibrate", describe("calibrate", (), "direct"), None, body)


async def _measure(
    engine: Engine, operation: Operation, peer: int, index: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """Return seconds of latency and bytes/s between rank 0 and ``peer``."""
    times: list[float] = []
    for phase, (trips, length) in enumerate(
        ((2, _SMALL_BYTES), (_SMALL_TRIPS, _SMALL_BYTES), (_LARGE_TRIPS, _LARGE_BYTES))
    ):
        rounds = _ping_pong(trips, 0 if engine.rank else peer, is_first=engine.rank == 0)
        layout = AlongBuffer(count=1, chunks=1, itemsize=1)
        plan = engine.bind(schedule(1, rounds), layout, phase=3 * index + phase)
        memory = np.zeros(1, np.dtype((np.void, length))) if length > 1 else np.zeros(1, np.uint8)
        begun = clock()
        await execute(operation, plan, InPlace(memory))
        times.append(max(clock() - begun, 1e-9) / (2 * trips))
    latency = times[1]
    return latency, _LARGE_BYTES / max(times[2] - latency, times[2] / _MOST_LATENCY, 1e-9)


def _ping_pong(trips: int, peer: int, *, is_first: bool) -> list[Round]:
    trip: list[Round] = [(Send(peer, one(0)),), (Recv(peer, one(0)),)]
    return (trip if is_first else trip[::-1]) * trips


def _reduction_speed(clock: Callable[[], float]) -> float:
    """Return the bytes/s that numpy adds."""
    one_buffer, other = np.zeros(_LARGE_BYTES // 4, np.float32), np.zeros(_LARGE_BYTES // 4, np.float32)
    np.add(one_buffer, other, out=one_buffer)
    begun = clock()
    for _ in range(4):
        np.add(one_buffer, other, out=one_buffer)
    return 4 * _LARGE_BYTES / max(clock() - begun, 1e-9)


def calibrate_from_operations(engine: Engine) -> Coroutine[Any, Any, None]:
    """Choose by what finished operations of all ranks have taken, on all ranks alike; nothing is sent to measure.

    The least latency and the most bandwidth of all ranks count: the rank that came last to an operation has waited for
    nobody.  A figure that no rank has stays as it is.
    """
    told = reductions.all_reduce(engine, engine.lanes.figures(), op="max", out=None, algorithm=None, key=None)
    return _adopt_told(engine, told)


async def _adopt_told(engine: Engine, told: Coroutine[Any, Any, np.ndarray[Any, Any]]) -> None:
    negative_latency, bandwidth = map(float, await told)
    lane = engine.policy.model.lane
    if negative_latency > UNKNOWN:
        lane = replace(lane, latency=-negative_latency, is_measured=True)
    if bandwidth > UNKNOWN:
        lane = replace(lane, bandwidth=bandwidth, is_measured=True)
    if lane is not engine.policy.model.lane:
        _use(engine, lane, lane if len(engine.hosts) == 1 else engine.policy.model.local)


def _adopt(engine: Engine, figures: np.ndarray[Any, np.dtype[np.float64]], *, has_near: bool, has_far: bool) -> None:
    model = engine.policy.model
    reduction = float(figures[4])
    local, lane = model.local, model.lane
    if has_near:
        local = LaneCosts(latency=float(figures[0]), bandwidth=float(figures[1]), reduction=reduction, is_measured=True)
    if has_far:
        lane = LaneCosts(latency=float(figures[2]), bandwidth=float(figures[3]), reduction=reduction, is_measured=True)
    elif has_near:
        lane = local
    _use(engine, lane, local)


def _use(engine: Engine, lane: LaneCosts, local: LaneCosts) -> None:
    """Choose by these figures from now on; they are equal on all ranks."""
    engine.measured_lane = lane if lane.is_measured else None
    engine.policy = replace(engine.policy, model=replace(engine.policy.model, lane=lane, local=local))
    engine.forget_prepared()
