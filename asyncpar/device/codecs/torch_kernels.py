"""The codecs bf16, fp16, int8 and top-k in operations of torch, with the bytes of the host's codecs.

Nothing here waits for the device: no size depends on values.  Two properties of torch on CUDA matter for equal bits: it
divides by a host number by multiplying with the inverse, so divisors are tensors; and if several values are written to
one place, the winner is arbitrary, so all unwanted values go to one place after the end.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from asyncpar.codecs.cast import Cast
from asyncpar.codecs.codec import Codec
from asyncpar.codecs.corrected import BLOCK as TOP_K_BLOCK
from asyncpar.codecs.identity import Identity
from asyncpar.codecs.int8 import BLOCK, LARGEST_SCALE, LEVELS, SMALLEST_SCALE, Int8
from asyncpar.codecs.top_k import TopK
from asyncpar.device.arrays import DeviceArray
from asyncpar.device.codecs.codec import DeviceCodec, KernelLibrary
from asyncpar.device.fabric import LEGACY_DEFAULT_STREAM

Tensor: TypeAlias = torch.Tensor


class TorchCodec(DeviceCodec[Tensor]):
    """The kernels common to all codecs of tensors: the sum with the residual, the flag, and empty vectors."""

    def encode(
        self, values: Tensor, out: Tensor, *, residual: Tensor | None = None, lost: Tensor | None = None
    ) -> Tensor:
        x = values if residual is None else values + residual
        is_finite = torch.isfinite(x).all()
        if x.numel():
            self._write(x, out, lost)
        return is_finite

    def decode(self, encoded: Tensor, out: Tensor, *, adds: bool = False) -> Tensor:
        if not out.numel():
            return torch.ones((), dtype=torch.bool, device=out.device)
        return self._read(encoded, out, adds)

    @abstractmethod
    def _write(self, x: Tensor, out: Tensor, lost: Tensor | None) -> None:
        """Write the encoded form of ``x``, which is not empty, and its error."""

    @abstractmethod
    def _read(self, encoded: Tensor, out: Tensor, adds: bool) -> Tensor:
        """Write or add the values of ``encoded``, and return whether it is in range."""


class TorchIdentity(TorchCodec):
    """Unchanged float32."""

    def _write(self, x: Tensor, out: Tensor, lost: Tensor | None) -> None:
        out.copy_(x.view(torch.uint8))
        if lost is not None:
            lost.zero_()

    def _read(self, encoded: Tensor, out: Tensor, adds: bool) -> Tensor:
        values = _typed(encoded, torch.float32)
        is_finite = torch.isfinite(values).all()
        _store(values, out, adds=adds)
        return is_finite


class TorchCast(TorchCodec):
    """bf16 and fp16: rounded to nearest, ties to even; the largest finite value instead of infinity."""

    def __init__(self, host: Cast) -> None:
        super().__init__(host)
        is_half = host.name == "fp16"
        self._dtype = torch.float16 if is_half else torch.bfloat16
        self._infinity = 0x7C00 if is_half else 0x7F80

    def _write(self, x: Tensor, out: Tensor, lost: Tensor | None) -> None:
        words = x.to(self._dtype).view(torch.int16)
        words -= ((words & 0x7FFF) == self._infinity).to(torch.int16)
        out.copy_(words.view(torch.uint8))
        if lost is not None:
            torch.sub(x, words.view(self._dtype).to(torch.float32), out=lost)

    def _read(self, encoded: Tensor, out: Tensor, adds: bool) -> Tensor:
        values = _typed(encoded, self._dtype).to(torch.float32)
        is_finite = torch.isfinite(values).all()
        _store(values, out, adds=adds)
        return is_finite


class TorchInt8(TorchCodec):
    """A signed byte per value, and a scale per 1,024 of them."""

    def _write(self, x: Tensor, out: Tensor, lost: Tensor | None) -> None:
        scales, levels = _split_int8(out, x.numel())
        for blocks, part, shape in _rows(x.numel()):
            rows = x[part].view(shape)
            scale, steps = _quantize(rows)
            scales[blocks].copy_(scale.view(torch.uint8).view(-1, 4))
            levels[part].copy_(steps.to(torch.int8).view(-1).view(torch.uint8))
            if lost is not None:
                lost[part].copy_((rows - steps * scale[:, None]).view(-1))

    def _read(self, encoded: Tensor, out: Tensor, adds: bool) -> Tensor:
        packed, levels = _split_int8(encoded, out.numel())
        scales = _typed(packed.reshape(-1), torch.float32)
        for blocks, part, shape in _rows(out.numel()):
            steps = levels[part].view(torch.int8).to(torch.float32).view(shape)
            _store((steps * scales[blocks, None]).view(-1), out[part], adds=adds)
        return ((scales >= 0.0) & (scales <= float(LARGEST_SCALE))).all()


class TorchTopK(TorchCodec):
    """The values of largest magnitude and their positions."""

    def __init__(self, host: TopK) -> None:
        super().__init__(host)
        self._host = host
        self._values = torch_codec(host.values)

    def _write(self, x: Tensor, out: Tensor, lost: Tensor | None) -> None:
        count = x.numel()
        if self._host.is_dense(count):
            self._values.encode(x, out, lost=lost)
            return
        kept = self._host.kept(count)
        is_chosen = _largest(x, kept)
        places = torch.where(is_chosen, torch.cumsum(is_chosen, 0) - 1, kept)
        index = torch.arange(count, device=x.device)
        chosen = torch.zeros(kept + 1, dtype=torch.float32, device=x.device).scatter_(0, places, x)
        offsets = torch.zeros(kept + 1, dtype=torch.int64, device=x.device).scatter_(0, places, index % TOP_K_BLOCK)
        blocks = -(-count // TOP_K_BLOCK)
        counts = torch.zeros(blocks, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, index // TOP_K_BLOCK, is_chosen.to(torch.int64))
        start = self._host.index_bytes(count)
        out[:start].zero_()
        out[: 4 * blocks].copy_(counts.to(torch.int32).view(torch.uint8))
        words = offsets[:kept].to(torch.int32)
        words = torch.where(words < _HALF_WORD, words, words - 2 * _HALF_WORD).to(torch.int16)
        out[4 * blocks : 4 * blocks + 2 * kept].copy_(words.view(torch.uint8))
        missed = torch.zeros(kept + 1, dtype=torch.float32, device=x.device)
        self._values.encode(chosen[:kept], out[start:], lost=missed[:kept])
        if lost is not None:
            lost.copy_(torch.where(is_chosen, missed[places], x))

    def _read(self, encoded: Tensor, out: Tensor, adds: bool) -> Tensor:
        count = out.numel()
        if self._host.is_dense(count):
            return self._values.decode(encoded, out, adds=adds)
        kept, blocks = self._host.kept(count), -(-count // TOP_K_BLOCK)
        counts = _typed(encoded[: 4 * blocks], torch.int32).to(torch.int64) & 0xFFFFFFFF
        offsets = _typed(encoded[4 * blocks : 4 * blocks + 2 * kept], torch.int16).to(torch.int64) & 0xFFFF
        chosen = torch.zeros(kept, dtype=torch.float32, device=out.device)
        is_valid = self._values.decode(encoded[self._host.index_bytes(count) :], chosen)
        ends = torch.cumsum(counts, 0)
        entries = torch.arange(kept, device=out.device)
        is_entry = entries < ends[-1]
        positions = torch.searchsorted(ends, entries, right=True) * TOP_K_BLOCK + offsets
        is_valid &= ends[-1] <= kept
        is_valid &= ((positions[1:] > positions[:-1]) | ~is_entry[1:]).all() & (~is_entry | (positions < count)).all()
        positions = torch.where(is_entry & (positions < count), positions, count)
        target = torch.zeros(count + 1, dtype=torch.float32, device=out.device)
        if adds:
            target[:count].copy_(out)
            chosen += target[positions]
        out.copy_(target.scatter_(0, positions, chosen)[:count])
        return is_valid


_HALF_WORD = 1 << 15


class TorchLibrary(KernelLibrary[Tensor]):
    """torch, with tensors on CUDA devices."""

    name = "torch"

    def codec(self, host: Codec) -> TorchCodec:
        return torch_codec(host)

    def view(self, array: DeviceArray) -> Tensor:
        if isinstance(array.owner, torch.Tensor):
            return array.owner.detach().view(-1)
        bytes_there = torch.as_tensor(_BytesOf(array), device=torch.device("cuda", array.device))
        return bytes_there.view(getattr(torch, array.dtype.name))

    def launch(self, work: Callable[[], None], *, device: int, stream: int) -> None:
        is_default = stream == LEGACY_DEFAULT_STREAM
        on = torch.cuda.default_stream(device) if is_default else torch.cuda.ExternalStream(stream, device=device)
        with torch.cuda.device(device), torch.cuda.stream(on):
            work()

    def all_finite(self, values: Tensor) -> Tensor:
        return torch.isfinite(values).all()

    def fill_unless(self, flag: Tensor, values: Tensor, value: int) -> None:
        values.masked_fill_(~flag, value)


class _BytesOf:
    """The memory of an array as bytes, which torch accepts for any dtype."""

    def __init__(self, array: DeviceArray) -> None:
        self._owner = array
        self.__cuda_array_interface__ = {
            "shape": (array.nbytes,),
            "typestr": "|u1",
            "data": (array.pointer, False),
            "strides": None,
            "version": 3,
        }


def torch_codec(host: Codec) -> TorchCodec:
    """Return the codec of tensors with the encoding of ``host``; ``KeyError`` if there is none."""
    return _CODECS[type(host)](host)


_CODECS: Mapping[type[Codec], Callable[[Any], TorchCodec]] = MappingProxyType(
    {Identity: TorchIdentity, Cast: TorchCast, Int8: TorchInt8, TopK: TorchTopK}
)


def _typed(encoded: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as values of ``dtype``, copied if they are not aligned for it."""
    is_aligned = encoded.storage_offset() % dtype.itemsize == 0
    return (encoded if is_aligned else encoded.clone()).view(dtype)


def _store(values: Tensor, out: Tensor, *, adds: bool) -> None:
    if adds:
        out += values
    else:
        out.copy_(values)


def _rows(count: int) -> Iterator[tuple[slice, slice, tuple[int, int]]]:
    """Yield the whole blocks of ``count`` values, then a short last one: their numbers, their values, their shape."""
    whole = count // BLOCK
    if whole:
        yield slice(0, whole), slice(0, whole * BLOCK), (whole, BLOCK)
    if count % BLOCK:
        yield slice(whole, whole + 1), slice(whole * BLOCK, count), (1, count % BLOCK)


def _split_int8(encoded: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return views of the scales, four bytes a row, and of the levels."""
    size = 4 * -(-count // BLOCK)
    return encoded[:size].view(-1, 4), encoded[size:]


def _quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale of each row, and its levels as float32."""
    levels = torch.full((), LEVELS, dtype=torch.float32, device=rows.device)
    scale = (rows.abs().amax(1) / levels.expand(rows.shape[0])).clamp(max=float(LARGEST_SCALE))
    zero = torch.zeros_like(scale)
    scale = torch.where(scale < float(SMALLEST_SCALE), zero, scale)
    inverse = torch.where(scale > 0.0, torch.ones_like(scale) / scale, zero)
    return scale, torch.round(rows * inverse[:, None]).clamp(-LEVELS, LEVELS)


def _largest(x: Tensor, kept: int) -> Tensor:
    """Return a mask of the ``kept`` values of ``x`` of largest magnitude, the first among equals, but no zero."""
    magnitudes = x.view(torch.int32) & 0x7FFFFFFF
    floor = torch.topk(magnitudes, kept, sorted=True).values[-1]
    is_larger = magnitudes > floor
    is_equal = (magnitudes == floor) & (magnitudes > 0)
    return is_larger | (is_equal & (torch.cumsum(is_equal, 0) <= kept - is_larger.sum()))
