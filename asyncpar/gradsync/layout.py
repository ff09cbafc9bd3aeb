"""The buckets in force, their memory, and the all-reduce that a communication strategy selects."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from asyncpar.agreement.exchanges import digest_of
from asyncpar.codecs import AnyCodec, Identity, RoundCodec, Values
from asyncpar.collectives.algorithms.hierarchical import Hosts
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.names import AllReduceAlgorithm
from asyncpar.core.config.parallel import CommunicationStrategy
from asyncpar.core.config.placement import Placement
from asyncpar.core.config.slicing import ceil_div
from asyncpar.gradsync.groups import HostGroups, SyncGroups
from asyncpar.gradsync.plan import Bucket, BucketPlan, GradientSpec
from asyncpar.gradsync.schemes import (
    PAIR,
    Alone,
    Copies,
    CopyHolders,
    Exact,
    Hosted,
    Pair,
    Rounds,
    Scheme,
    SchemeMemory,
    ShardedReduce,
    Summed,
    headroom,
)
from asyncpar.gradsync.schemes.device import DeviceMean, HostMirrors
from asyncpar.gradsync.schemes.device_encoded import device_scheme
from asyncpar.gradsync.schemes.device_memory import DevicePlace

ARENA: Final = "arena"
HALVING: Final = "halving"

_FIXED: Mapping[CommunicationStrategy, AllReduceAlgorithm] = MappingProxyType(
    {
        CommunicationStrategy.RING_ALL_REDUCE: "ring",
        CommunicationStrategy.TREE_ALL_REDUCE: "tree",
        CommunicationStrategy.HIERARCHICAL_ALL_REDUCE: "hierarchical",
    }
)


def least_bytes(nbytes: int, communicator: Communicator) -> int:
    """Return the bytes that a rank sends in an all-reduce of ``nbytes`` of least traffic.

    In shared memory every rank exposes its array once; otherwise it is 2 (ranks - 1) / ranks of it.
    """
    if ARENA in communicator.algorithms("all_reduce"):
        return nbytes
    return 2 * (communicator.size - 1) * nbytes // communicator.size


def algorithm_of(strategy: CommunicationStrategy, communicator: Communicator) -> AllReduceAlgorithm | None:
    """Return the algorithm of ``strategy`` for whole gradients; None lets the cost model choose for each bucket.

    ALL_REDUCE is one algorithm for all sizes, that of least traffic for the placement of ranks: shared memory where
    they have it in common, hosts first where some share one, else recursive halving and doubling for powers of two and
    the ring for other numbers of ranks; or the pinned algorithm.
    """
    if strategy is CommunicationStrategy.ADAPTIVE:
        return None
    if strategy is not CommunicationStrategy.ALL_REDUCE:
        return _FIXED[strategy]
    if communicator.is_pinned("all_reduce"):
        return None
    if ARENA in communicator.algorithms("all_reduce"):
        return ARENA
    if 1 < len(communicator.hosts) < communicator.size:
        return _FIXED[CommunicationStrategy.HIERARCHICAL_ALL_REDUCE]
    is_power_of_two = communicator.size & (communicator.size - 1) == 0
    return HALVING if is_power_of_two else _FIXED[CommunicationStrategy.RING_ALL_REDUCE]


def is_alike(
    strategy: CommunicationStrategy, communicator: Communicator, patterns: Collection[Hosts], *, codec: AnyCodec
) -> bool:
    """Return whether all groups of replicas get the same bits from the same gradients, with ``codec`` and not by hosts.

    They lie on hosts like ``patterns``; ``communicator`` is that of one group.  Encoded values that owners decode are
    added in the order of ranks.  An all-reduce adds in the same order where it uses the same messages, which a cost
    model, pins and shared memory do not guarantee.
    """
    if not isinstance(codec, Identity | RoundCodec) and not codec.is_summable:
        return True
    if strategy in (CommunicationStrategy.RING_ALL_REDUCE, CommunicationStrategy.TREE_ALL_REDUCE):
        return True
    if strategy is CommunicationStrategy.ADAPTIVE or algorithm_of(strategy, communicator) is None:
        return False
    is_spread = all(len(host) == 1 for pattern in patterns for host in pattern)
    return is_spread or (len(patterns) == 1 and not communicator.may_share_memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """The plan, its description for other ranks, and a scheme for each bucket.

    ``settings`` must be equal on all ranks, ``lines`` on all replicas.  ``is_observed``: the plan follows the order in
    which gradients became final.
    """

    plan: BucketPlan
    settings: tuple[str, ...]
    lines: tuple[str, ...]
    schemes: tuple[Scheme, ...]
    least_bytes: int | None
    """The bytes that this rank would send in all-reduces of least traffic without a codec; None without a codec."""
    is_observed: bool
    digest: bytes
    frozen: Mapping[str, Placement]
    """The parameters that take no part because they are frozen."""
    communicators: tuple[Communicator, ...]
    """All communicators by which buckets are reduced."""
    mirrors: HostMirrors | None = None
    """Copies of gradients on a device, where schemes are those of the host."""

    def describes(self, specs: Sequence[GradientSpec], frozen: Mapping[str, Placement]) -> bool:
        """Return whether this is the layout for gradients like ``specs`` and ``frozen`` parameters."""
        return (self.plan.specs, self.frozen) == (specs, frozen)

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets and of their encoding buffers."""
        return sum(scheme.nbytes for scheme in self.schemes)

    @property
    def residual_nbytes(self) -> int:
        """Bytes used by error feedback."""
        return sum(scheme.residual_nbytes for scheme in self.schemes)

    @property
    def replicated(self) -> tuple[str, ...]:
        """The lines on which tensor-parallel ranks must agree."""
        specs = {spec.name: spec for spec in self.plan.specs}
        buckets = [bucket for bucket in self.plan.buckets if bucket.placement.replicated is not None]
        lines = (f"{specs[slot.name]} in bucket {bucket.index}" for bucket in buckets for slot in bucket.slots)
        return frozen_line(self.frozen), *lines

    @property
    def tied(self) -> tuple[str, ...]:
        """The lines on which the first and the last stage must agree."""
        buckets = [bucket for bucket in self.plan.buckets if bucket.placement.tied is not None]
        ties = sorted(placement.tied for placement in self.frozen.values() if placement.tied is not None)
        return frozen_line(ties), *sorted(f"{bucket.placement} {bucket.dtype} {bucket.shapes}" for bucket in buckets)

    def residuals(self) -> Iterator[tuple[str, Values]]:
        """Yield a view of each parameter's residual, flat, by name."""
        for scheme in self.schemes:
            yield from scheme.residuals()

    def codec_state(self) -> dict[str, Values]:
        """Return the state that codecs keep of each parameter, by name."""
        return {name: kept for scheme in self.schemes for name, kept in scheme.state()}

    def close(self) -> None:
        """Free memory on devices; idempotent."""
        for scheme in self.schemes:
            scheme.close()
        if self.mirrors is not None:
            self.mirrors.close()

    def restore(
        self, residuals: Mapping[str, Values], lacking: Mapping[str, Values], state: Mapping[str, Values]
    ) -> None:
        """Restore what an earlier layout kept, as far as it fits.

        ``lacking`` is the amount missing from means, equal on all replicas; it becomes the residuals of the ranks that
        have any.
        """
        for scheme in self.schemes:
            names = [slot.name for slot in scheme.bucket.slots if slot.name in lacking]
            owed = {name: lacking[name] * np.float32(scheme.residual_gain) for name in names}
            scheme.restore_residuals({**residuals, **owed})
            scheme.restore(state)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeMaker:
    """Makes the schemes of a layout.

    ``hosts`` None: all replicas reduce with each other; else inside hosts first, uncompressed.  ``is_alike``: all
    groups of replicas get the same bits from the same gradients, so copies may be reduced in each of them.
    """

    groups: SyncGroups
    hosts: HostGroups | None
    codec: AnyCodec
    has_feedback: bool
    algorithm: AllReduceAlgorithm | None
    as_views: bool
    is_alike: bool = True
    place: DevicePlace | None = None
    """The device of gradients, if they are on one."""

    def make(self, bucket: Bucket) -> Scheme:
        """Return the scheme of a bucket."""
        scheme = self._make(bucket)
        if not isinstance(scheme, Alone | DeviceMean):
            scheme.codec_name = self.codec.name
        return scheme

    def _make(self, bucket: Bucket) -> Scheme:
        if self.place is not None:
            return self._on_device(bucket, self.place)
        memory = SchemeMemory(empty=self.groups.replicas.empty, keeps_input=self.as_views)
        if self.groups.replicas.size == 1:
            return Alone(bucket, keeps_input=self.as_views)
        holders = None if self.is_alike else CopyHolders.of(bucket, self.groups)
        if holders is None:
            return self._over_replicas(bucket, memory)
        inner = self._over_replicas(bucket, memory) if holders.reduces else None
        size, dtype = self.groups.replicas.size, self._dtype(bucket)
        return Copies(bucket, holders, inner, size=size, dtype=dtype, memory=memory)

    def _on_device(self, bucket: Bucket, place: DevicePlace) -> Scheme:
        replicas, codec = self.groups.replicas, self.codec
        if isinstance(codec, Identity | RoundCodec) or replicas.size == 1:
            return DeviceMean(bucket, replicas, place)
        feedback, divisor = self.has_feedback, self._divisor
        return device_scheme(bucket, replicas, codec, place=place, has_feedback=feedback, divisor=divisor)

    def _over_replicas(self, bucket: Bucket, memory: SchemeMemory) -> Scheme:
        """Return the scheme over the replicas of this rank."""
        if self.hosts is None:
            return self._flat(bucket, self.groups.replicas, self.algorithm, memory)
        between, hosts = self.hosts.between, self.hosts.hosts
        inside = headroom(self._dtype(bucket), self.groups.replicas.size - hosts + 1)
        return Hosted(
            bucket,
            self.hosts.inside,
            None if between is None else self._flat(bucket, between, None, memory),
            hosts=hosts,
            replicas=self.groups.replicas.size,
            is_mean=self._gives_mean(hosts),
            dtype=self._dtype(bucket),
            memory=memory,
            divisor=inside * self._divisor,
            divisor_inside=inside,
            gain=self._gain(bucket, hosts),
        )

    def _gain(self, bucket: Bucket, ranks: int) -> float:
        """Return the gain of the scheme over ``ranks`` ranks: see ``Codec.gain``."""
        codec = self.codec
        if self.has_feedback or isinstance(codec, RoundCodec):
            return 1.0
        is_whole = codec.is_summable or ranks == PAIR
        return codec.gain(bucket.count if is_whole else ceil_div(bucket.count, ranks))

    @property
    def _divisor(self) -> int:
        """The divisor of all replicas before they encode."""
        codec = self.codec
        return 1 if isinstance(codec, RoundCodec) else headroom(codec.sum_dtype, self.groups.replicas.size)

    def _dtype(self, bucket: Bucket) -> np.dtype[Any]:
        """Return the dtype of reduced buckets."""
        return bucket.dtype if isinstance(self.codec, Identity) else np.dtype(np.float32)

    def _gives_mean(self, ranks: int) -> bool:
        """Return whether the scheme over ``ranks`` ranks yields their mean rather than their sum."""
        codec = self.codec
        if isinstance(codec, (Identity, RoundCodec)):
            return True
        return not codec.is_summable and ranks == PAIR

    def _flat(
        self, bucket: Bucket, communicator: Communicator, algorithm: AllReduceAlgorithm | None, memory: SchemeMemory
    ) -> Scheme:
        """Return the scheme over ``communicator``, which depends on the abilities of the codec."""
        codec = self.codec
        if isinstance(codec, Identity):
            return Exact(bucket, communicator, algorithm=algorithm, memory=memory)
        lossy: dict[str, Any] = {"has_feedback": self.has_feedback, "memory": memory}
        if isinstance(codec, RoundCodec):
            return Rounds(bucket, communicator, codec, algorithm=algorithm, **lossy)
        if codec.is_summable:
            return Summed(bucket, communicator, codec, algorithm=algorithm, divisor=self._divisor, **lossy)
        if communicator.size == PAIR:
            return Pair(bucket, communicator, codec, **lossy)
        return ShardedReduce(bucket, communicator, codec, **lossy)


def frozen_line(names: Iterable[str]) -> str:
    """Return the line by which ranks compare their frozen parameters."""
    return f"frozen parameters: {', '.join(names) or 'none'}"


def make_layout(
    plan: BucketPlan,
    settings: tuple[str, ...],
    maker: SchemeMaker,
    *,
    is_observed: bool,
    frozen: Mapping[str, Placement] = MappingProxyType({}),
) -> BucketLayout:
    """Return the layout of ``plan``; all ranks must agree on ``settings``, too."""
    order = (f"buckets in the order {', '.join(plan.order)}",) if is_observed else ()
    lines = (*settings, frozen_line(frozen), *map(str, plan.specs), *order)
    return BucketLayout(
        plan=plan,
        settings=settings,
        lines=lines,
        schemes=tuple(map(maker.make, plan.buckets)),
        least_bytes=None if isinstance(maker.codec, Identity) else least_bytes(plan.nbytes, maker.groups.replicas),
        is_observed=is_observed,
        digest=digest_of(lines),
        frozen=frozen,
        communicators=(*maker.groups.all, *([] if maker.hosts is None else maker.hosts.all)),
    )
