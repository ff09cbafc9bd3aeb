"""Schemes in which some ranks reduce and broadcast the result to the others.

``Copies``: copies of one parameter lie on several slices or stages.  Groups of replicas that lie differently on hosts
add in different orders and would get different means of the same gradients, so copies would drift apart.  Hence one of
the ranks that hold copies reduces over the replicas, and the others take its result.

``Hosted``: uncompressed sums inside each host, a codec between the first ranks of hosts, and back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncpar.codecs import Values
from asyncpar.collectives.communicator import Communicator
from asyncpar.gradsync.groups import Name, SyncGroups
from asyncpar.gradsync.plan import Bucket
from asyncpar.gradsync.schemes.scheme import Place, ReductionStep, Scheme, SchemeMemory, all_finite, scale


class Relayed(Scheme):
    """``inner`` reduces; ranks where it is None receive its result.

    ``size``, ``is_mean`` and ``dtype`` are those of the inner scheme, also on ranks that do not have it.
    """

    def __init__(
        self,
        bucket: Bucket,
        inner: Scheme | None,
        *,
        size: int,
        is_mean: bool,
        dtype: np.dtype[Any],
        memory: SchemeMemory,
    ) -> None:
        super().__init__(bucket, size=size)
        self._inner = inner
        self._is_mean = is_mean
        if inner is not None:
            self.flat, self.result = inner.flat, inner.result
        else:
            self.flat = memory.shared((bucket.count,), dtype)
            self.result = memory.shared((bucket.count,), dtype) if memory.keeps_input else self.flat

    @property
    def is_mean(self) -> bool:
        return self._is_mean

    def settle(self) -> None:
        self.is_finite = all_finite(self.reduced)

    def commit(self) -> None:
        if self._inner is not None:
            self._inner.commit()

    def swap(self) -> None:
        super().swap()
        if self._inner is not None:
            self._inner.swap()

    @property
    def nbytes(self) -> int:
        return super().nbytes if self._inner is None else self._inner.nbytes

    @property
    def residual_nbytes(self) -> int:
        return 0 if self._inner is None else self._inner.residual_nbytes

    @property
    def residual_gain(self) -> float:
        return 1.0 if self._inner is None else self._inner.residual_gain

    def residuals(self) -> Iterator[tuple[str, Values]]:
        if self._inner is not None:
            yield from self._inner.residuals()

    def state(self) -> Iterator[tuple[str, Values]]:
        if self._inner is not None:
            yield from self._inner.state()

    def restore(self, state: Mapping[str, Values]) -> None:
        if self._inner is not None:
            self._inner.restore(state)

    def settle_inner(self) -> None:
        """Complete the inner reduction; NaN informs the others of a non-finite result."""
        if self._inner is not None:
            self._inner.settle()
            if not self._inner.is_finite:
                self.reduced.fill(np.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyHolders:
    """The groups that hold copies of a bucket, in the order in which its mean is broadcast in them.

    The first rank of all of them ``reduces``.  A tensor that is tied and replicated goes to the other end first, then
    to the tensor-parallel ranks there.
    """

    groups: tuple[tuple[str, Communicator], ...]
    reduces: bool

    @classmethod
    def of(cls, bucket: Bucket, groups: SyncGroups) -> CopyHolders | None:
        """Return the holders of ``bucket`` on this rank; None if no other rank of its replica has a copy."""
        tp = groups.tp if bucket.placement.replicated is not None else None
        embedding = groups.embedding if bucket.placement.tied is not None else None
        if tp is None and embedding is None:
            return None
        is_first_slice = tp is None or tp.rank == 0
        found: list[tuple[str, Communicator]] = []
        if embedding is not None and is_first_slice:
            found.append(("embedding", embedding))
        if tp is not None:
            found.append(("tp", tp))
        return cls(groups=tuple(found), reduces=is_first_slice and (embedding is None or embedding.rank == 0))


class Copies(Relayed):
    """Broadcasts the mean over ``size`` replicas, which ``inner`` reduces, from the first of ``holders``."""

    def __init__(
        self,
        bucket: Bucket,
        holders: CopyHolders,
        inner: Scheme | None,
        *,
        size: int,
        dtype: np.dtype[Any],
        memory: SchemeMemory,
    ) -> None:
        super().__init__(bucket, inner, size=size, is_mean=True, dtype=dtype, memory=memory)
        self._holders = holders

    def settle_inner(self) -> None:
        """Complete the mean: other holders do not know how the replicas of the first are placed on hosts."""
        super().settle_inner()
        factor = 1.0 if self._inner is None else self._inner.factor(self.size)
        if factor != 1.0:
            scale(self.reduced, factor)

    def reduction_steps(self, key: Name, place: Place) -> Sequence[ReductionStep]:
        inner = [] if self._inner is None else self._inner.reduction_steps(key, place)
        return [*inner, *(self._distribution(kind, group, key) for kind, group in self._holders.groups)]

    def _distribution(self, kind: str, group: Communicator, key: Name) -> ReductionStep:
        name = key.other(f"copies/{kind}/{self.bucket.shared_name}")
        is_first = kind == self._holders.groups[0][0]
        work = self.settle_inner if is_first else None
        return ReductionStep(work, lambda: group.broadcast(self.reduced, key=str(name)))


class Hosted(Relayed):
    """Adds inside a host, reduces over hosts by ``between``, and distributes the result.

    ``inside`` joins the ranks of this host.  Its first rank has ``between``, a scheme over the first ranks of all
    hosts.  Gradients are divided by ``divisor_inside`` before they are added inside; ``divisor`` and ``gain`` are those
    of the result.  ``replicas`` are the ranks of all hosts together.
    """

    def __init__(
        self,
        bucket: Bucket,
        inside: Communicator,
        between: Scheme | None,
        *,
        hosts: int,
        replicas: int,
        is_mean: bool,
        dtype: np.dtype[Any],
        memory: SchemeMemory,
        divisor: int,
        divisor_inside: int,
        gain: float,
    ) -> None:
        super().__init__(bucket, between, size=hosts, is_mean=is_mean, dtype=dtype, memory=memory)
        self._inside = inside
        self.divisor = divisor
        self.gain = gain
        self._divisor_inside = divisor_inside
        self._residual_gain = replicas / hosts / divisor_inside

    @property
    def residual_gain(self) -> float:
        return self._residual_gain  # the first ranks of hosts have the residuals of all

    def reduction_steps(self, key: Name, place: Place) -> Sequence[ReductionStep]:
        inside = self._inside
        work = self._divide if self._divisor_inside > 1 else None
        into = ReductionStep(work, lambda: inside.all_reduce(self.payload, key=f"{key}/inside"))
        out_of = ReductionStep(self.settle_inner, lambda: inside.broadcast(self.reduced, key=f"{key}/outside"))
        between = [] if self._inner is None else self._inner.reduction_steps(key / "between", place)
        return [into, *between, out_of]

    def _divide(self) -> None:
        scale(self.payload, 1.0 / self._divisor_inside)
