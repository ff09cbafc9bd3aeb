"""The codecs bf16, fp16, int8 and top-k in numpy's functions, which CuPy has on devices, with the host codecs' bytes.

Nothing here waits for the device: no size depends on values, and no value is read.  If several values are written to
one place the winner is arbitrary on devices, so all unwanted values go to one place after the end.  CuPy has no
bfloat16, which is represented by integers here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs.cast import Cast
from asyncpar.codecs.codec import Codec
from asyncpar.codecs.corrected import BLOCK as TOP_K_BLOCK
from asyncpar.codecs.identity import Identity
from asyncpar.codecs.int8 import BLOCK, LARGEST_SCALE, LEVELS, SMALLEST_SCALE, Int8
from asyncpar.codecs.top_k import TopK
from asyncpar.device.arrays import DeviceArray
from asyncpar.device.codecs.codec import DeviceCodec, KernelLibrary

Floats: TypeAlias = NDArray[np.float32]
Array: TypeAlias = NDArray[Any]
"""Of numpy, or of a library with its functions."""


class ArrayCodec(DeviceCodec[Array]):
    """The kernels common to all codecs: the sum with the residual, the flag, and empty vectors.

    ``xp`` is ``numpy``, or a module with its functions.
    """

    def __init__(self, host: Codec, xp: ModuleType) -> None:
        super().__init__(host)
        self.xp = xp

    def encode(self, values: Array, out: Array, *, residual: Array | None = None, lost: Array | None = None) -> Array:
        x = values if residual is None else values + residual
        is_finite: Array = self.xp.isfinite(x).all()
        if x.size:
            self._write(x, out, lost)
        return is_finite

    def decode(self, encoded: Array, out: Array, *, adds: bool = False) -> Array:
        if not out.size:
            true: Array = self.xp.ones((), bool)
            return true
        return self._read(encoded, out, adds)

    @abstractmethod
    def _write(self, x: Floats, out: Array, lost: Array | None) -> None:
        """Write the encoded form of ``x``, which is not empty, and its error."""

    @abstractmethod
    def _read(self, encoded: Array, out: Array, adds: bool) -> Array:
        """Write or add the values of ``encoded``, and return whether it is in range."""

    def _store(self, values: Array, out: Array, *, adds: bool) -> Array:
        """Write or add ``values``, and return whether they are finite."""
        is_finite: Array = self.xp.isfinite(values).all()
        out[...] = out + values if adds else values
        return is_finite


class ArrayIdentity(ArrayCodec):
    """Unchanged float32."""

    def _write(self, x: Floats, out: Array, lost: Array | None) -> None:
        out[...] = x.view(np.uint8)
        if lost is not None:
            lost[...] = 0

    def _read(self, encoded: Array, out: Array, adds: bool) -> Array:
        return self._store(encoded.view(np.float32), out, adds=adds)


class ArrayCast(ArrayCodec):
    """bf16 and fp16: rounded to nearest, ties to even; the largest finite value instead of infinity."""

    def __init__(self, host: Cast, xp: ModuleType) -> None:
        super().__init__(host, xp)
        self._is_half = host.name == "fp16"
        self._infinity = 0x7C00 if self._is_half else 0x7F80

    def _write(self, x: Floats, out: Array, lost: Array | None) -> None:
        words = self._rounded(x)
        words -= ((words & np.uint16(0x7FFF)) == self._infinity).astype(np.uint16)
        out[...] = words.view(np.uint8)
        if lost is not None:
            lost[...] = x - self._values(words)

    def _read(self, encoded: Array, out: Array, adds: bool) -> Array:
        return self._store(self._values(encoded.view(np.uint16)), out, adds=adds)

    def _rounded(self, x: Floats) -> Array:
        if self._is_half:
            return x.astype(np.float16).view(np.uint16)
        bits = x.view(np.uint32)
        is_odd = (bits >> np.uint32(16)) & np.uint32(1)
        return ((bits + np.uint32(0x7FFF) + is_odd) >> np.uint32(16)).astype(np.uint16)

    def _values(self, words: Array) -> Array:
        if self._is_half:
            return words.view(np.float16).astype(np.float32)
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)


class ArrayInt8(ArrayCodec):
    """A signed byte per value, and a scale per 1,024 of them."""

    def _write(self, x: Floats, out: Array, lost: Array | None) -> None:
        scales, levels = _split_int8(out, x.size)
        for blocks, part, shape in _rows(x.size):
            rows = x[part].reshape(shape)
            scale, steps = self._quantize(rows)
            scales[blocks] = scale
            levels[part] = steps.astype(np.int8).reshape(-1)
            if lost is not None:
                lost[part] = (rows - steps * scale[:, None]).reshape(-1)

    def _read(self, encoded: Array, out: Array, adds: bool) -> Array:
        scales, levels = _split_int8(encoded, out.size)
        for blocks, part, shape in _rows(out.size):
            values = (levels[part].astype(np.float32).reshape(shape) * scales[blocks, None]).reshape(-1)
            out[part] = out[part] + values if adds else values
        is_valid: Any = ((scales >= 0.0) & (scales <= LARGEST_SCALE)).all()
        return is_valid

    def _quantize(self, rows: Floats) -> tuple[Array, Array]:
        """Return the scale of each row, and its levels as float32."""
        xp = self.xp
        scale = xp.minimum(xp.abs(rows).max(axis=1) / np.float32(LEVELS), LARGEST_SCALE)
        zero = xp.zeros_like(scale)
        scale = xp.where(scale < SMALLEST_SCALE, zero, scale)
        divisor = xp.where(scale > 0.0, scale, xp.ones_like(scale))
        inverse = xp.where(scale > 0.0, xp.ones_like(scale) / divisor, zero)
        levels = np.float32(LEVELS)
        return scale, xp.clip(xp.rint(rows * inverse[:, None]), -levels, levels)


class ArrayTopK(ArrayCodec):
    """The values of largest magnitude and their positions."""

    def __init__(self, host: TopK, xp: ModuleType) -> None:
        super().__init__(host, xp)
        self._host = host
        self._values = array_codec(host.values, xp)

    def _write(self, x: Floats, out: Array, lost: Array | None) -> None:
        count, xp = x.size, self.xp
        if self._host.is_dense(count):
            self._values.encode(x, out, lost=lost)
            return
        kept, blocks = self._host.kept(count), -(-count // TOP_K_BLOCK)
        is_chosen = self._largest(x, kept)
        places = xp.where(is_chosen, xp.cumsum(is_chosen) - 1, kept)
        chosen, offsets = xp.zeros(kept + 1, np.float32), xp.zeros(kept + 1, np.uint16)
        chosen[places] = x
        offsets[places] = (xp.arange(count) % TOP_K_BLOCK).astype(np.uint16)
        rows = xp.zeros(blocks * TOP_K_BLOCK, np.uint32)
        rows[:count] = is_chosen
        start = self._host.index_bytes(count)
        out[:start] = 0
        out[: 4 * blocks].view(np.uint32)[...] = rows.reshape(blocks, TOP_K_BLOCK).sum(axis=1, dtype=np.uint32)
        out[4 * blocks : 4 * blocks + 2 * kept].view(np.uint16)[...] = offsets[:kept]
        missed = xp.zeros(kept + 1, np.float32)
        self._values.encode(chosen[:kept], out[start:], lost=missed[:kept])
        if lost is not None:
            lost[...] = xp.where(is_chosen, missed[places], x)

    def _read(self, encoded: Array, out: Array, adds: bool) -> Array:
        count, xp = out.size, self.xp
        if self._host.is_dense(count):
            return self._values.decode(encoded, out, adds=adds)
        kept, blocks = self._host.kept(count), -(-count // TOP_K_BLOCK)
        counts = encoded[: 4 * blocks].view(np.uint32).astype(np.int64)
        offsets = encoded[4 * blocks : 4 * blocks + 2 * kept].view(np.uint16).astype(np.int64)
        chosen = xp.zeros(kept, np.float32)
        are_values = self._values.decode(encoded[self._host.index_bytes(count) :], chosen)
        ends, entries = xp.cumsum(counts), xp.arange(kept)
        is_entry = entries < ends[-1]
        positions = xp.searchsorted(ends, entries, side="right") * TOP_K_BLOCK + offsets
        are_ascending = ((positions[1:] > positions[:-1]) | ~is_entry[1:]).all()
        is_valid: Any = are_values & (ends[-1] <= kept) & are_ascending & (~is_entry | (positions < count)).all()
        positions = xp.where(is_entry & (positions < count), positions, count)
        target = xp.zeros(count + 1, np.float32)
        if adds:
            target[:count] = out
            chosen = chosen + target[positions]
        target[positions] = chosen
        out[...] = target[:count]
        return is_valid

    def _largest(self, x: Floats, kept: int) -> Array:
        """Return a mask of the ``kept`` values of ``x`` of largest magnitude, the first among equals, but no zero."""
        xp = self.xp
        magnitudes = x.view(np.int32) & np.int32(0x7FFFFFFF)
        floor = xp.partition(magnitudes, x.size - kept)[x.size - kept]
        is_larger = magnitudes > floor
        is_equal = (magnitudes == floor) & (magnitudes > 0)
        found: Array = is_larger | (is_equal & (xp.cumsum(is_equal) <= kept - is_larger.sum()))
        return found


_CODECS: Mapping[type[Codec], Callable[[Any, ModuleType], ArrayCodec]] = MappingProxyType(
    {Identity: ArrayIdentity, Cast: ArrayCast, Int8: ArrayInt8, TopK: ArrayTopK}
)


def array_codec(host: Codec, xp: ModuleType) -> ArrayCodec:
    """Return the codec in the functions of ``xp`` with the encoding of ``host``; ``KeyError`` if there is none."""
    return _CODECS[type(host)](host, xp)


class ArrayLibrary(KernelLibrary[Array]):
    """A library with numpy's functions."""

    def __init__(self, xp: ModuleType) -> None:
        self.xp = xp
        self.name = xp.__name__

    def codec(self, host: Codec) -> ArrayCodec:
        return array_codec(host, self.xp)

    def all_finite(self, values: Array) -> Array:
        is_finite: Array = self.xp.isfinite(values).all()
        return is_finite

    def fill_unless(self, flag: Array, values: Array, value: int) -> None:
        values[...] = self.xp.where(flag, values, values.dtype.type(value))


class CupyLibrary(ArrayLibrary):
    """CuPy."""

    def view(self, array: DeviceArray) -> Array:
        """Return a CuPy array over the memory of ``array``, which it keeps alive."""
        memory = self.xp.cuda.UnownedMemory(array.pointer, array.nbytes, array.owner, array.device)
        vector: Array = self.xp.ndarray((array.size,), array.dtype, self.xp.cuda.MemoryPointer(memory, 0))
        return vector

    def launch(self, work: Callable[[], None], *, device: int, stream: int) -> None:
        with self.xp.cuda.Device(device), self.xp.cuda.ExternalStream(stream, device):
            work()


def _rows(count: int) -> Iterator[tuple[slice, slice, tuple[int, int]]]:
    """Yield the whole blocks of ``count`` values, then a short last one: their numbers, their values, their shape."""
    whole = count // BLOCK
    if whole:
        yield slice(0, whole), slice(0, whole * BLOCK), (whole, BLOCK)
    if count % BLOCK:
        yield slice(whole, whole + 1), slice(whole * BLOCK, count), (1, count % BLOCK)


def _split_int8(encoded: Array, count: int) -> tuple[Array, Array]:
    """Return views of the scales and of the levels."""
    size = 4 * -(-count // BLOCK)
    return encoded[:size].view(np.float32), encoded[size:].view(np.int8)
