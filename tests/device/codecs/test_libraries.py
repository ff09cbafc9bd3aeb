"""Kernels go into streams and memory of ours by the calls of their library: CuPy's, tried on a stand-in of numpy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from asyncpar.codecs import Codec
from asyncpar.codecs.registry import parse_codec
from asyncpar.device.arrays import DeviceArray
from asyncpar.device.codecs.array_kernels import CupyLibrary
from asyncpar.device.codecs.libraries import kernel_library
from tests.device.fake_devices import FakeCluster, FakeDeviceArray


class StandIn(ModuleType):
    """CuPy in the memory of the host: numpy's functions, and CuPy's ways to memory and streams."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.entered: list[tuple[Any, ...]] = []
        self.cuda = ModuleType("cupy.cuda")
        vars(self.cuda).update(
            Device=lambda index: self._enter("device", index),
            ExternalStream=lambda pointer, index: self._enter("stream", pointer, index),
            UnownedMemory=lambda pointer, nbytes, owner, device: (pointer, nbytes, owner, device),
            MemoryPointer=lambda memory, offset: (memory, offset),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def _enter(self, *what: Any) -> Any:
        self.entered.append(what)
        return nullcontext()

    @staticmethod
    def ndarray(shape: tuple[int, ...], dtype: Any, memory: Any) -> Any:
        (pointer, nbytes, owner, _), offset = memory
        assert owner is not None, "memory must be kept alive"
        buffer = (ctypes.c_ubyte * nbytes).from_address(pointer + offset)
        return np.frombuffer(buffer, np.uint8).view(dtype).reshape(shape)


def described(array: np.ndarray[Any, Any]) -> DeviceArray:
    return DeviceArray(
        pointer=array.ctypes.data,
        shape=array.shape,
        dtype=array.dtype,
        device=3,
        is_writable=True,
        stream=7,
        owner=array,
    )


@pytest.mark.parametrize("name", ["bf16", "fp16", "int8", "topk:0.1", "topk:0.1+int8"])
def test_cupy_encodes_and_decodes_in_the_stream_that_it_is_given(name: str) -> None:
    cupy = StandIn()
    library = CupyLibrary(cupy)
    host = parse_codec(name)
    assert isinstance(host, Codec)
    codec = library.codec(host)
    values = np.random.default_rng(1).normal(size=(50, 100)).astype(np.float32)
    out, decoded = np.zeros(host.encoded_bytes(values.size), np.uint8), np.zeros_like(values)
    there = [library.view(described(array)) for array in (values, out, decoded)]

    def work() -> None:
        codec.encode(there[0], there[1])
        codec.decode(there[1], there[2])

    library.launch(work, device=3, stream=7)
    assert cupy.entered == [("device", 3), ("stream", 7, 3)]
    expected, back = np.zeros_like(out), np.zeros(values.size, np.float32)
    host.encode(values.reshape(-1), expected)
    host.decode(expected, back)
    assert out.tobytes() == expected.tobytes()
    assert decoded.tobytes() == back.tobytes()


def test_cupy_fills_unless_a_flag_is_true() -> None:
    library = CupyLibrary(StandIn())
    values = np.arange(4, dtype=np.uint8)
    library.fill_unless(library.all_finite(np.ones(3, np.float32)), values, 0xFF)
    assert values.tolist() == [0, 1, 2, 3]
    library.fill_unless(library.all_finite(np.array([1, np.inf], np.float32)), values, 0xFF)
    assert values.tolist() == [0xFF] * 4


@pytest.mark.parametrize("name", ["sign", "int4", "randomk:0.1"])
def test_codecs_without_kernels_are_none(name: str) -> None:
    host = parse_codec(name)
    assert isinstance(host, Codec)
    with pytest.raises(KeyError):
        CupyLibrary(StandIn()).codec(host)


def test_arrays_say_which_library_computes_with_them() -> None:
    cluster = FakeCluster()
    array = described(np.ones(3))
    assert kernel_library(array) is None, "numpy has no devices"
    find: Callable[[], Any] = lambda: kernel_library(  # noqa: E731
        DeviceArray(pointer=0, shape=(0,), dtype=np.dtype(float), device=0, is_writable=True, stream=1, owner=owner)
    )
    owner = FakeDeviceArray.of(cluster, np.ones(3))
    assert find() is cluster.kernels
    cluster.kernels = None
    assert find() is None
