"""The sum by owners on devices has the bits of the host's, rows and results: of torch on CPU tensors, and of numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asyncpar.codecs import Codec, Values
from asyncpar.codecs.registry import parse_codec
from asyncpar.codecs.rows import ShardedSum
from asyncpar.device.codecs.array_kernels import array_codec
from asyncpar.device.codecs.encoded_sum import DeviceShardedSum
from asyncpar.testing.codec_samples import draw
from tests.backends.extras import need

NAMES = ("none", "bf16", "fp16", "int8", "topk:0.05", "topk:0.05+int8")


def codec_of(name: str) -> Codec:
    codec = parse_codec(name)
    assert isinstance(codec, Codec)
    return codec


def vectors(count: int, size: int) -> list[Values]:
    return [draw(count + rank)[:count].copy() * np.float32(1 + rank) for rank in range(size)]


def exchange(outgoing: list[Any], incoming: list[Any]) -> None:
    """Send row ``r`` of each rank to rank ``r``."""
    for rank, rows in enumerate(incoming):
        for source, sent in enumerate(outgoing):
            rows[source] = sent[rank]


def gather(owned: list[Any], incoming: list[Any]) -> None:
    for rows in incoming:
        for source, row in enumerate(owned):
            rows[source] = row


class OnHost:
    def __init__(self, name: str, values: list[Values], *, keeps_lost: bool) -> None:
        size, count = len(values), values[0].size
        sums = [ShardedSum(codec_of(name), count, rank=r, size=size, keeps_lost=keeps_lost) for r in range(size)]
        self.lost = [np.zeros(sums[0].padded_count, np.float32) for _ in values]
        padded = [np.concatenate([one, np.zeros(sums[0].padded_count - count, np.float32)]) for one in values]
        flags = [sums[r].encode(padded[r], lost=self.lost[r]) for r in range(size)]
        self.outgoing = [one.outgoing.copy() for one in sums]
        exchange([one.outgoing for one in sums], [one.incoming for one in sums])
        flags += [sums[r].sum_owned(what="test", lost=self.lost[r]) for r in range(size)]
        gather([one.owned for one in sums], [one.incoming for one in sums])
        self.result = [np.zeros(sums[0].padded_count, np.float32) for _ in values]
        self.are_finite = [one.decode(out, what="test") for one, out in zip(sums, self.result, strict=True)]
        self.flags = flags


def seen(vector: Any) -> np.ndarray[Any, Any]:
    """Return the memory of ``vector`` as an array of numpy."""
    found: np.ndarray[Any, Any] = vector if isinstance(vector, np.ndarray) else vector.numpy()
    return found


class OnDevice:
    def __init__(self, library: str, name: str, values: list[Values], *, keeps_lost: bool) -> None:
        size, count = len(values), values[0].size
        codec, zeros = _library(library, codec_of(name))
        sums = [
            DeviceShardedSum(
                codec,
                count,
                rank=r,
                size=size,
                make=zeros,
                is_valid=zeros(size, np.uint8),
                keeps_lost=keeps_lost,
            )
            for r in range(size)
        ]
        self.lost = [zeros(sums[0].padded_count, np.float32) for _ in values]
        padded = [zeros(sums[0].padded_count, np.float32) for _ in values]
        for one, value in zip(padded, values, strict=True):
            seen(one)[:count] = value
        flags = [sums[r].encode(padded[r], lost=self.lost[r]) for r in range(size)]
        self.outgoing = [seen(one.outgoing).copy() for one in sums]
        exchange([one.outgoing for one in sums], [one.incoming for one in sums])
        flags += [sums[r].sum_owned(lost=self.lost[r]) for r in range(size)]
        gather([one.owned for one in sums], [one.incoming for one in sums])
        self.result = [zeros(sums[0].padded_count, np.float32) for _ in values]
        self.are_finite = [bool(one.decode(out)) for one, out in zip(sums, self.result, strict=True)]
        self.flags = [bool(flag) for flag in flags]
        self.are_valid = [bool(seen(one.is_valid).all()) for one in sums]


def _library(name: str, codec: Codec) -> tuple[Any, Callable[[int, Any], Any]]:
    """Return the codec of a library, and what makes its vectors, whose memory numpy can see."""
    if name == "torch":
        need("torch", 'pip install "asyncpar[torch]"')
        import torch

        from asyncpar.device.codecs.torch_kernels import torch_codec

        return torch_codec(codec), lambda count, dtype: torch.from_numpy(np.zeros(count, dtype))
    return array_codec(codec, np), np.zeros


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_sums_have_the_bits_of_the_host(library: str, name: str, size: int) -> None:
    for count in (1, 5, 1025, 9000):
        values = vectors(count, size)
        host = OnHost(name, values, keeps_lost=True)
        device = OnDevice(library, name, values, keeps_lost=True)
        assert device.are_finite == host.are_finite == [True] * size
        assert device.are_valid == [True] * size
        for rank in range(size):
            np.testing.assert_array_equal(device.outgoing[rank], host.outgoing[rank])
            for there, here in ((device.result, host.result), (device.lost, host.lost)):
                np.testing.assert_array_equal(seen(there[rank]).view(np.uint32), here[rank].view(np.uint32))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_values_that_are_not_finite_are_seen_by_every_rank(library: str, name: str) -> None:
    values = vectors(3000, 3)
    values[1][77] = np.inf
    with np.errstate(all="ignore"):  # devices do not warn
        device = OnDevice(library, name, values, keeps_lost=False)
    host = OnHost(name, values, keeps_lost=False)
    assert device.flags == host.flags
    assert device.are_finite == host.are_finite == [False] * 3
    assert device.are_valid == [True] * 3
