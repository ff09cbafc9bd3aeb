"""Hosts first: uncompressed sums inside each host, a codec between the first ranks of hosts, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from asyncpar.codecs import Values
from asyncpar.collectives.communicator import Communicator
from asyncpar.gradsync.keys import Name
from asyncpar.gradsync.obligation import Obligation
from asyncpar.gradsync.plan import Bucket
from asyncpar.gradsync.schemes.memory import Memory
from asyncpar.gradsync.schemes.scheme import Leg, Place, Scheme, all_finite


class Hosted(Scheme):
    """Adds inside a host, lets ``between`` reduce over hosts, and hands out the result.

    ``inside`` joins the ranks of this host.  Its first rank has ``between``, a scheme over the first ranks of all
    hosts, whose ``is_mean`` and ``dtype`` the others are told.
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
    ) -> None:
        super().__init__(bucket, size=hosts)
        self._inside = inside
        self._between = between
        self._is_mean = is_mean
        if between is not None:
            self.flat, self.result = between.flat, between.result
        else:
            self.flat = memory.shared((bucket.count,), dtype)
            self.result = memory.shared((bucket.count,), dtype) if memory.keeps_input else self.flat

    @property
    def is_mean(self) -> bool:
        return self._is_mean

    def legs(self, key: Name, place: Place) -> Sequence[Leg]:
        inside = self._inside
        into = Leg(None, Obligation(lambda: inside.all_reduce(self.payload, key=f"{key}/inside")))
        out_of = Leg(self._settle_between, Obligation(lambda: inside.broadcast(self.reduced, key=f"{key}/outside")))
        between = [] if self._between is None else self._between.legs(key / "between", place)
        return [into, *between, out_of]

    def settle(self) -> None:
        self.is_finite = all_finite(self.reduced)

    def spoil(self) -> None:
        super().spoil()
        self.reduced.fill(np.nan)
        if self._between is not None:
            self._between.spoil()

    def commit(self) -> None:
        if self._between is not None:
            self._between.commit()

    def swap(self) -> None:
        super().swap()
        if self._between is not None:
            self._between.swap()

    def residuals(self) -> Iterator[tuple[str, Values]]:
        if self._between is not None:
            yield from self._between.residuals()

    def state(self) -> Iterator[tuple[str, Values]]:
        if self._between is not None:
            yield from self._between.state()

    def restore(self, state: Mapping[str, Values]) -> None:
        if self._between is not None:
            self._between.restore(state)

    def _settle_between(self) -> None:
        if self._between is not None:
            self._between.settle()
            if not self._between.is_finite:
                self.reduced.fill(np.nan)
