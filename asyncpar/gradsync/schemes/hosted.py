"""Hosts first: uncompressed sums inside each host, a codec between the first ranks of hosts, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncpar.collectives.communicator import Communicator
from asyncpar.gradsync.keys import Name
from asyncpar.gradsync.obligation import Obligation
from asyncpar.gradsync.plan import Bucket
from asyncpar.gradsync.schemes.memory import Memory
from asyncpar.gradsync.schemes.relayed import Relayed
from asyncpar.gradsync.schemes.scheme import Leg, Place, Scheme, scale


class Hosted(Relayed):
    """Adds inside a host, lets ``between`` reduce over hosts, and hands out the result.

    ``inside`` joins the ranks of this host.  Its first rank has ``between``, a scheme over the first ranks of all
    hosts.  Gradients are divided by ``divisor_inside`` before they are added there; ``divisor`` is that of the result.
    """

    def __init__(
        self,
        bucket: Bucket,
        inside: Communicator,
        between: Scheme | None,
        *,
        hosts: int,
        is_mean: bool,
        dtype: np.dtype[Any],
        memory: Memory,
        divisor: int,
        divisor_inside: int,
    ) -> None:
        super().__init__(bucket, between, size=hosts, is_mean=is_mean, dtype=dtype, memory=memory)
        self._inside = inside
        self.divisor = divisor
        self._divisor_inside = divisor_inside

    def legs(self, key: Name, place: Place) -> Sequence[Leg]:
        inside = self._inside
        work = self._divide if self._divisor_inside > 1 else None
        into = Leg(work, Obligation(lambda: inside.all_reduce(self.payload, key=f"{key}/inside")))
        out_of = Leg(self.settle_inner, Obligation(lambda: inside.broadcast(self.reduced, key=f"{key}/outside")))
        between = [] if self._inner is None else self._inner.legs(key / "between", place)
        return [into, *between, out_of]

    def _divide(self) -> None:
        scale(self.payload, 1.0 / self._divisor_inside)
