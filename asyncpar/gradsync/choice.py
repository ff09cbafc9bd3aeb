"""Choose the codec of ``"auto"``, by the measured speed of the link between hosts and of this machine's codecs."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from asyncpar.agreement.exchanges import OwedCollective
from asyncpar.codecs import AnyCodec, Identity, RoundCodec, automatic_codecs, parse_codec
from asyncpar.collectives.calibration import MOST_HOSTS
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError
from asyncpar.gradsync.config import GradientCompressionConfig
from asyncpar.gradsync.groups import HostGroups, SyncGroups, shares_some_hosts, split_by_host
from asyncpar.gradsync.prediction import CodecSpeed, LinkSpeed, Measured, slowest

_NOMINAL_COUNT = 6_250_000
"""Values (25 MB) by which stages and slices choose: they hold different parameters but must choose alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The codec in force, and the groups of hosts where only what travels between them is encoded.

    ``adds_in_hosts``: some group of replicas has such groups, not necessarily this rank's.  With ``measured`` the codec
    depends on the number of values (see ``settled``), or on ``nominal`` if that is given.  ``count`` is the number by
    which it was chosen.
    """

    codec: AnyCodec
    hosts: HostGroups | None = None
    adds_in_hosts: bool = False
    measured: Measured | None = None
    nominal: int | None = None
    count: int = 0

    def settled(self, count: int) -> Resolved:
        """Return the resolution for ``count`` values."""
        if self.measured is None:
            return self
        chosen = count if self.nominal is None else self.nominal
        codec = parse_codec(self.measured.choose(chosen))
        if codec == Identity():
            return replace(self, codec=codec, hosts=None, adds_in_hosts=False, count=chosen)
        return replace(self, codec=codec, count=chosen)

    def table(self) -> str:
        """Return a table of the measurements, predictions and choice; empty if there was nothing to choose."""
        return "" if self.measured is None or not self.count else self.measured.table(self.count)


async def resolve(
    compression: GradientCompressionConfig,
    groups: SyncGroups,
    *,
    is_hierarchical: bool,
    key: str,
    given: HostGroups | None = None,
    chosen: str | None = None,
) -> Resolved:
    """Resolve ``compression`` to a codec and groups of hosts; the same on all replicas.

    A codec with the hierarchical strategy encodes between hosts only, if there are several, and so does ``"auto"``,
    which resolves to no codec inside a host.  ``given`` groups stand for hosts, even without a codec.  ``chosen`` is
    the choice of ``"auto"`` in the run that this one resumes; nothing is measured then.
    """
    hosts = given or split_by_host(groups.replicas)
    adds_in_hosts = given is not None or any(map(shares_some_hosts, groups.host_patterns))
    if compression.is_automatic and chosen is not None:
        codec = parse_codec(chosen) if any(len(hosts) > 1 for hosts in groups.host_patterns) else Identity()
        is_plain = codec == Identity()
        return Resolved(codec=codec, hosts=None if is_plain else hosts, adds_in_hosts=adds_in_hosts and not is_plain)
    if compression.is_automatic:
        measured = await _measure(groups, key)
        nominal = None if groups.is_data_parallel_only else _NOMINAL_COUNT
        return Resolved(codec=Identity(), hosts=hosts, adds_in_hosts=adds_in_hosts, measured=measured, nominal=nominal)
    codec = compression.make_codec() if compression.is_enabled else Identity()
    if not is_hierarchical:
        return Resolved(codec=codec)
    if isinstance(codec, Identity):
        return Resolved(codec=codec, hosts=given, adds_in_hosts=given is not None)
    return Resolved(codec=codec, hosts=hosts, adds_in_hosts=adds_in_hosts)


async def _measure(groups: SyncGroups, key: str) -> Measured | None:
    """Return the measurements to choose by, the same on all ranks of all groups; None if all replicas share a host.

    All groups must choose alike, or copies of one parameter on different stages and slices would drift apart.
    """
    replicas, everyone = groups.replicas, groups.everyone
    own: Measured | None = None
    alike = OwedCollective(lambda: everyone.all_gather_object(own, key=f"{key}/alike", wanted=Measured | None))
    try:
        if len(replicas.hosts) > 1:
            own = await measure(replicas, key=key, clock=time.perf_counter)
    except BaseException:
        alike.close()
        raise
    if everyone.size == replicas.size:
        return own
    every = await alike.run()
    known = [measured for measured in every if measured is not None]
    return slowest(known) if known else None


Clock = Callable[[], float]
"""Returns monotonic seconds."""

_FIRSTS = "first_of_hosts"
_SMALL_BYTES = 8
_LARGE_BYTES = 1 << 18
_TRIPS = 3
_VALUES = 1 << 18
_LEAST_SECONDS = 1e-9


async def measure(replicas: Communicator, *, key: str, clock: Clock) -> Measured:
    """Measure the link between hosts and the codecs; a collective on ``replicas``, which span two or more hosts.

    The result is the same on all ranks.

    Where the group was calibrated (``Communicator.calibrate``) and has at most nine hosts, the calibrated figures of
    its slowest link are used.  Otherwise the first ranks of all hosts pass a message of 256 KiB around their ring,
    three times after three warm-up rounds: both directions of every link are busy, as in a step, and the slowest link
    counts.  Then rank 0 encodes and decodes with each codec for some milliseconds, in a thread, and sends its figures
    to all ranks.
    """
    firsts = tuple(host[0] for host in replicas.hosts)
    between = replicas.subgroup(firsts, key=_FIRSTS) if replicas.rank in firsts else None
    found: list[Measured] = []
    broadcast = OwedCollective(
        lambda: replicas.broadcast_object(found[0] if found else None, key=f"{key}/measured", wanted=Measured)
    )
    try:
        link = None if between is None else _known_link(replicas) or await measure_link(between, key=key, clock=clock)
        if replicas.rank == 0:
            assert link is not None, "rank 0 is the first of its host"
            codecs = await asyncio.to_thread(
                lambda: tuple(measure_codec(name, clock=clock) for name in automatic_codecs())
            )
            found.append(Measured(ranks=len(firsts), link=link, codecs=codecs))
    except BaseException:
        broadcast.close()
        raise
    agreed: Measured = await broadcast.run()
    return agreed


def _known_link(replicas: Communicator) -> LinkSpeed | None:
    """Return the link speed that the replicas were calibrated with, the same on all; None if hosts were left out."""
    lane = replicas.measured_lane
    if lane is None or len(replicas.hosts) > MOST_HOSTS + 1:
        return None
    return LinkSpeed(latency=lane.latency, bandwidth=lane.bandwidth)


async def measure_link(between: Communicator, *, key: str, clock: Clock) -> LinkSpeed:
    """Return the speed of the slowest link of the ring of ``between``; a collective on its ranks.

    The fastest small message counts, since disturbances only add delay; of large messages the median counts, since
    traffic shapers let the first bytes after a pause through unthrottled.
    """
    small, large_trips = (_trips(between, length, f"{key}/{length}") for length in (_SMALL_BYTES, _LARGE_BYTES))
    try:
        latency = min(await _pass_around(small, between.size, clock=clock))
        large = statistics.median(await _pass_around(large_trips, between.size, clock=clock))
    except BaseException:
        for trip in (*small, *large_trips):
            trip.close()
        raise
    return LinkSpeed(latency=latency, bandwidth=_LARGE_BYTES / max(large - latency, _LEAST_SECONDS))


def _trips(between: Communicator, length: int, key: str) -> list[OwedCollective[Any]]:
    """Return round trips of ``length`` bytes around the ring, warm-up trips first."""
    own, every = np.zeros(length, np.uint8), np.zeros((between.size, length), np.uint8)
    return [
        OwedCollective(lambda: between.all_gather(own, out=every, algorithm="ring", key=key)) for _ in range(2 * _TRIPS)
    ]


async def _pass_around(trips: Sequence[OwedCollective[Any]], size: int, *, clock: Clock) -> list[float]:
    """Return the seconds per message to the neighbour, for each trip that counts."""
    times: list[float] = []
    for trip in trips:
        begun = clock()
        await trip.run()
        times.append(max(clock() - begun, _LEAST_SECONDS) / (size - 1))
    return times[_TRIPS:]


def measure_codec(name: str, *, clock: Clock) -> CodecSpeed:
    """Return the speed of codec ``name`` with error feedback on one core; takes a few milliseconds.

    Uses the best of three attempts each, since disturbances only slow it down.
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
