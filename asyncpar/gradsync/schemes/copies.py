"""Copies of one parameter: one of the ranks that hold them reduces over the replicas, and the others take its result.

Groups of replicas that lie differently on hosts add in different orders, so each would come to another mean of the same
gradients, and the copies would drift apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncpar.collectives.communicator import Communicator
from asyncpar.gradsync.groups import SyncGroups
from asyncpar.gradsync.keys import Name
from asyncpar.gradsync.obligation import Obligation
from asyncpar.gradsync.plan import Bucket
from asyncpar.gradsync.schemes.memory import Memory
from asyncpar.gradsync.schemes.relayed import Relayed
from asyncpar.gradsync.schemes.scheme import Leg, Place, Scheme, scale


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
        """Return those of ``bucket`` on this rank; None if no other rank of its replica has a copy."""
        slices = groups.slices if bucket.placement.replicated is not None else None
        ends = groups.ends if bucket.placement.tied is not None else None
        if slices is None and ends is None:
            return None
        is_first_slice = slices is None or slices.rank == 0
        found: list[tuple[str, Communicator]] = []
        if ends is not None and is_first_slice:
            found.append(("ends", ends))
        if slices is not None:
            found.append(("slices", slices))
        return cls(groups=tuple(found), reduces=is_first_slice and (ends is None or ends.rank == 0))


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
        memory: Memory,
    ) -> None:
        super().__init__(bucket, inner, size=size, is_mean=True, dtype=dtype, memory=memory)
        self._holders = holders

    def settle_inner(self) -> None:
        """Complete the mean: other holders do not know how the replicas of the first lie on hosts."""
        super().settle_inner()
        factor = 1.0 if self._inner is None else self._inner.factor(self.size)
        if factor != 1.0:
            scale(self.reduced, factor)

    def legs(self, key: Name, place: Place) -> Sequence[Leg]:
        inner = [] if self._inner is None else self._inner.legs(key, place)
        return [*inner, *(self._handing_out(kind, group, key) for kind, group in self._holders.groups)]

    def _handing_out(self, kind: str, group: Communicator, key: Name) -> Leg:
        name = key.other(f"copies/{kind}/{self.bucket.shared_name}")
        is_first = kind == self._holders.groups[0][0]
        work = self.settle_inner if is_first else None
        return Leg(work, Obligation(lambda: group.broadcast(self.reduced, key=str(name))))
