"""Measure what ``"auto"`` goes by: the link between hosts, and how fast this machine encodes and decodes."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from asyncpar.codecs import Identity, RoundCodec, parse_codec
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError
from asyncpar.gradsync.obligation import Obligation
from asyncpar.gradsync.prediction import CANDIDATES, CodecSpeed, LinkSpeed, Measured

Clock = Callable[[], float]
"""Returns seconds that only grow."""

_FIRSTS = "first_of_hosts"
_SMALL_BYTES = 8
_LARGE_BYTES = 1 << 18
_TRIPS = 3
_VALUES = 1 << 18
_LEAST_SECONDS = 1e-9


async def measure(replicas: Communicator, *, key: str, clock: Clock) -> Measured:
    """Return what the replicas go by, the same on all of them; to be called on all of them, which are on two hosts
    or more.

    The first ranks of all hosts pass a message of 256 KiB around their ring, three times after three that do not count:
    so both directions of every link are busy, as they are in a step, and the slowest link counts.  Then rank 0 encodes
    and decodes with each codec for some milliseconds, in a thread, and tells everyone.
    """
    firsts = tuple(host[0] for host in replicas.hosts)
    between = replicas.subgroup(firsts, key=_FIRSTS) if replicas.rank in firsts else None
    found: list[Measured] = []
    told = Obligation(
        lambda: replicas.broadcast_object(found[0] if found else None, key=f"{key}/measured", wanted=Measured)
    )
    try:
        link = None if between is None else await measure_link(between, key=key, clock=clock)
        if replicas.rank == 0:
            assert link is not None, "rank 0 is the first of its host"
            codecs = await asyncio.to_thread(lambda: tuple(measure_codec(name, clock=clock) for name in CANDIDATES))
            found.append(Measured(ranks=len(firsts), link=link, codecs=codecs))
    except BaseException:
        await told.give_up()
        raise
    agreed: Measured = await told.run()
    return agreed


async def measure_link(between: Communicator, *, key: str, clock: Clock) -> LinkSpeed:
    """Return the speed of the slowest link of the ring of ``between``; to be called on all of its ranks.

    Of small messages the fastest counts, as what disturbs only ever delays; of large ones the median, as shapers let
    the first bytes after a pause through for nothing.
    """
    small, large_trips = (_trips(between, length, f"{key}/{length}") for length in (_SMALL_BYTES, _LARGE_BYTES))
    try:
        latency = min(await _pass_around(small, between.size, clock=clock))
        large = statistics.median(await _pass_around(large_trips, between.size, clock=clock))
    except BaseException:
        for trip in (*small, *large_trips):
            await trip.give_up()
        raise
    return LinkSpeed(latency=latency, bandwidth=_LARGE_BYTES / max(large - latency, _LEAST_SECONDS))


def _trips(between: Communicator, length: int, key: str) -> list[Obligation[Any]]:
    """Return trips of ``length`` bytes all around, those that do not count first."""
    own, every = np.zeros(length, np.uint8), np.zeros((between.size, length), np.uint8)
    return [
        Obligation(lambda: between.all_gather(own, out=every, algorithm="ring", key=key)) for _ in range(2 * _TRIPS)
    ]


async def _pass_around(trips: Sequence[Obligation[Any]], size: int, *, clock: Clock) -> list[float]:
    """Return the seconds of one message to the neighbour, of each trip that counts."""
    times: list[float] = []
    for trip in trips:
        begun = clock()
        await trip.run()
        times.append(max(clock() - begun, _LEAST_SECONDS) / (size - 1))
    return times[_TRIPS:]


def measure_codec(name: str, *, clock: Clock) -> CodecSpeed:
    """Return how fast one core works with the codec ``name`` and error feedback; takes a few milliseconds.

    The best of three attempts each, as what disturbs only ever slows down.
    """
    codec = parse_codec(name)
    if isinstance(codec, RoundCodec):
        raise UsageError(f"name: expected a codec of vectors, got {name!r}")
    values = np.random.default_rng(0).standard_normal(_VALUES, np.float32)
    encoded = np.zeros(codec.encoded_bytes(_VALUES), np.uint8)
    decoded = np.zeros_like(values)
    feedback = {} if codec == Identity() else {"residual": np.zeros_like(values), "lost": np.zeros_like(values)}
    encode = _best(lambda: codec.encode(values, encoded, **feedback), clock)
    decode = _best(lambda: codec.decode_add(encoded, decoded), clock)
    return CodecSpeed(
        name=name,
        value_bytes=encoded.nbytes / _VALUES,
        encode=values.nbytes / encode,
        decode=values.nbytes / decode,
    )


def _best(work: Callable[[], None], clock: Clock) -> float:
    times: list[float] = []
    for _ in range(_TRIPS):
        begun = clock()
        work()
        times.append(clock() - begun)
    return max(min(times), _LEAST_SECONDS)
