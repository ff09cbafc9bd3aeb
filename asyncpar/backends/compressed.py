"""All-reduce through a codec: owners decode.

Encoded values cannot be summed in general.  So each rank owns one slice of the array: all ranks encode all slices, send
each to its owner, the owner decodes and sums what it got in float32, encodes the sum, and everyone gathers and decodes
the sums, the owner too.  Thus all ranks end with the same bits.
"""

from __future__ import annotations

from collections.abc import Coroutine
from functools import partial
from typing import Any

import numpy as np

from asyncpar.codecs import Bytes, Codec, Values
from asyncpar.collectives.arrays import Array
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.concurrency.offload import off_loop


class CompressedAllReduce:
    """One sum, or mean, of ``x`` of all ranks through ``codec``, into ``out`` (which may be ``x``).

    ``keys`` are used for this call alone.  Whether it ends well or not, both of its collectives have been begun on this
    rank, so that no rank waits for one that will not come.
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
        self._communicator = communicator
        self._codec = codec
        self._x = x
        self._out = out
        self._is_mean = is_mean
        self._keys = keys
        size = communicator.size
        self._length = -(-x.size // size)
        encoded = codec.encoded_bytes(self._length)
        self._shards = np.empty((size, encoded), np.uint8)
        self._sum = np.empty(encoded, np.uint8)
        self._begun = 0

    async def run(self) -> Array:
        """Return ``out``.  Raises ``NonFiniteValue`` for values that are not finite in float32, and as collectives do.

        ``out`` is as it was if anything is raised.
        """
        nbytes = self._x.nbytes
        try:
            await off_loop(self._encode, nbytes=nbytes)
            incoming = await self._exchange()
            await off_loop(partial(self._sum_owned, incoming), nbytes=nbytes)
            sums = await self._gather()
            await off_loop(partial(self._decode, sums), nbytes=nbytes)
        except BaseException:
            self.give_up()
            raise
        return self._out

    def give_up(self) -> None:
        """Tell ranks that wait, or will wait, for this one that it will not come, without waiting.  Idempotent."""
        for collective in (self._exchange, self._gather)[self._begun :]:
            collective().close()

    def _exchange(self) -> Coroutine[Any, Any, Bytes]:
        self._begun = 1
        return self._communicator.all_to_all(self._shards, key=self._keys[0])

    def _gather(self) -> Coroutine[Any, Any, Bytes]:
        self._begun = 2
        return self._communicator.all_gather(self._sum, key=self._keys[1])

    def _encode(self) -> None:
        size = self._communicator.size
        values = np.zeros(size * self._length, np.float32)
        with np.errstate(over="ignore"):  # what is too large for float32 is infinite now, which the codec refuses
            values[: self._x.size] = self._x.reshape(-1)
        for rank in range(size):
            self._codec.encode(values[rank * self._length :][: self._length], self._shards[rank])

    def _sum_owned(self, incoming: Bytes) -> None:
        total: Values = np.zeros(self._length, np.float32)
        for encoded in incoming:
            self._codec.decode_add(encoded, total)
        if self._is_mean:
            total /= np.float32(self._communicator.size)
        self._codec.encode(total, self._sum)

    def _decode(self, sums: Bytes) -> None:
        values = np.empty(len(sums) * self._length, np.float32)
        for rank, encoded in enumerate(sums):
            self._codec.decode(encoded, values[rank * self._length :][: self._length])
        self._out[...] = values[: self._x.size].reshape(self._x.shape)
