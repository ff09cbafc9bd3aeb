"""All-reduce through a codec: owners decode, see ``codecs.rows``."""

from __future__ import annotations

from functools import partial

import numpy as np

from asyncpar.agreement.exchanges import OwedCollective
from asyncpar.codecs import Bytes, Codec
from asyncpar.codecs.rows import ShardedSum
from asyncpar.collectives.arrays import Array
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.concurrency.tasks import off_loop
from asyncpar.errors import NonFiniteValue

_WHAT = "all_reduce"


class CompressedAllReduce:
    """One sum, or mean, of ``x`` of all ranks through ``codec``, into ``out`` (which may be ``x``).

    ``keys`` are used for this call alone.  Whether it succeeds or not, this rank begins or closes both of its
    collectives, so no rank waits in vain.
    """

    def __init__(
        self,
        communicator: Communicator,
        codec: Codec,
        x: Array,
        out: Array,
        *,
        is_mean: bool,
        keys: tuple[str, str],
    ) -> None:
        self._x = x
        self._out = out
        self._is_mean = is_mean
        self._sum = total = ShardedSum(codec, x.size, rank=communicator.rank, size=communicator.size)
        self._exchange: OwedCollective[Bytes] = OwedCollective(
            lambda: communicator.all_to_all(total.outgoing, out=total.incoming, key=keys[0])
        )
        self._gather: OwedCollective[Bytes] = OwedCollective(
            lambda: communicator.all_gather(total.owned, out=total.incoming, key=keys[1])
        )

    async def run(self) -> Array:
        """Return ``out``.  Raises ``NonFiniteValue`` for values that are not finite in float32, and like collectives.

        ``out`` is unchanged if anything is raised.
        """
        work = partial(off_loop, nbytes=self._x.nbytes)
        try:
            await work(self._encode)
            await self._exchange.run()
            await work(self._sum_owned)
            await self._gather.run()
            await work(self._decode)
        except BaseException:
            self.close()
            raise
        return self._out

    def close(self) -> None:
        """Abort, on all ranks, the collectives that this rank has not begun.  Does not wait."""
        self._exchange.close()
        self._gather.close()

    def _encode(self) -> None:
        values = np.zeros(self._sum.padded_count, np.float32)
        with np.errstate(over="ignore"):  # values too large for float32 become infinite, which the codec refuses
            values[: self._x.size] = self._x.reshape(-1)
        _check(self._sum.encode(values), "values: expected finite numbers, got NaN or infinity")

    def _sum_owned(self) -> None:
        is_finite = self._sum.sum_owned(what=_WHAT, is_mean=self._is_mean)
        _check(is_finite, "the sum over ranks: expected finite numbers, got infinity")

    def _decode(self) -> None:
        values = np.empty(self._sum.padded_count, np.float32)
        self._sum.decode(values, what=_WHAT)
        gain = self._sum.gain
        if gain != 1.0:  # unsent values are not sent later
            with np.errstate(over="ignore"):
                values *= np.float32(gain)
        self._out[...] = values[: self._x.size].reshape(self._x.shape)


def _check(is_finite: bool, text: str) -> None:
    """Raise ``NonFiniteValue`` for values that are not finite; the other ranks then get ``PeerCancelled``."""
    if not is_finite:
        raise NonFiniteValue(text)
