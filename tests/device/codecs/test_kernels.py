"""Codecs of devices give the bits of the host's, both ways: torch on CPU tensors, and CuPy's functions in numpy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from asyncpar.codecs import Bytes, Codec, Values
from asyncpar.codecs.registry import parse_codec
from asyncpar.device.codecs.array_kernels import array_codec
from asyncpar.errors import NonFiniteValue, ProtocolError
from asyncpar.testing.codec_samples import draw, samples
from tests.backends.extras import need

NAMES = ("none", "bf16", "fp16", "int8", "topk:0.01", "topk:0.3", "topk:1.0", "topk:0.05+int8", "topk:0.1+bf16")


class Library:
    """A library of arrays: its codecs, and copies of numpy arrays in it."""

    def __init__(self, name: str) -> None:
        self.is_torch = name == "torch"
        if self.is_torch:
            need("torch", 'pip install "asyncpar[torch]"')

    def codecs(self, name: str) -> tuple[Codec, Any]:
        """Return the codec of the host and that of this library."""
        host = parse_codec(name)
        assert isinstance(host, Codec)
        if self.is_torch:
            from asyncpar.device.codecs.torch_kernels import torch_codec

            return host, torch_codec(host)
        return host, array_codec(host, np)

    def copy(self, array: np.ndarray[Any, Any]) -> Any:
        if self.is_torch:
            import torch

            return torch.from_numpy(array.copy())
        return array.copy()

    @staticmethod
    def back(array: Any) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = array if isinstance(array, np.ndarray) else array.numpy()
        return found


@pytest.fixture(name="library", params=["torch", "cupy"])
def make_library(request: pytest.FixtureRequest) -> Iterator[Library]:
    with np.errstate(all="ignore"):  # devices do not warn
        yield Library(request.param)


def bits(array: Values) -> list[int]:
    return array.view(np.uint32).tolist()  # type: ignore[no-any-return]


def residual_of(values: Values) -> Values:
    """Return small changes of ``values``, which never make them infinite."""
    return (draw(values.size) * np.float32(0.01) * np.minimum(np.abs(values), np.float32(1e30))).astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("has_residual", [False, True])
def test_encoded_bytes_and_what_they_miss_are_those_of_the_host(
    library: Library, name: str, has_residual: bool
) -> None:
    host, device = library.codecs(name)
    for values in samples():
        residual = residual_of(values) if has_residual else None
        out, lost = np.empty(host.encoded_bytes(values.size), np.uint8), np.empty_like(values)
        host.encode(values, out, residual=residual, lost=lost)
        there, missed = library.copy(np.full_like(out, 0xA5)), library.copy(np.zeros_like(values))
        flag = device.encode(
            library.copy(values), there, residual=None if residual is None else library.copy(residual), lost=missed
        )
        assert bool(flag)
        np.testing.assert_array_equal(library.back(there), out)
        assert bits(library.back(missed)) == bits(lost)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("adds", [False, True])
def test_decoded_values_are_those_of_the_host(library: Library, name: str, adds: bool) -> None:
    host, device = library.codecs(name)
    for values in samples():
        out = np.empty(host.encoded_bytes(values.size), np.uint8)
        host.encode(values, out)
        before = draw(values.size)
        decoded, there = before.copy(), library.copy(before)
        (host.decode_add if adds else host.decode)(out, decoded)
        assert bool(device.decode(library.copy(out), there, adds=adds))
        assert bits(library.back(there)) == bits(decoded)


@pytest.mark.parametrize("name", NAMES)
def test_a_residual_may_be_replaced_in_place(library: Library, name: str) -> None:
    host, device = library.codecs(name)
    values = draw(5000)
    residual = residual_of(values)
    there, out = library.copy(residual), np.empty(host.encoded_bytes(values.size), np.uint8)
    host.encode(values, out, residual=residual, lost=residual)
    device.encode(library.copy(values), library.copy(out), residual=there, lost=there)
    assert bits(library.back(there)) == bits(residual)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_flagged(library: Library, name: str, bad: float) -> None:
    host, device = library.codecs(name)
    values = draw(3000)
    values[1777] = bad
    out = np.empty(host.encoded_bytes(values.size), np.uint8)
    with pytest.raises(NonFiniteValue):
        host.encode(values, out)
    assert not bool(device.encode(library.copy(values), library.copy(out)))


@pytest.mark.parametrize("name", NAMES)
def test_bytes_that_the_host_refuses_are_flagged(library: Library, name: str) -> None:
    """Every byte set to its largest, and every one of a sample damaged alone."""
    host, device = library.codecs(name)
    good = np.empty(host.encoded_bytes(2100), np.uint8)
    host.encode(draw(2100), good)
    places = np.random.default_rng(1).integers(0, good.size, 60)
    damaged = [np.full_like(good, 0xFF), *(_with(good, [place, place ^ 1], 0xFF) for place in places)]
    verdicts = [_is_refused(host, form) for form in damaged]
    assert [not bool(device.decode(library.copy(form), library.copy(draw(2100)))) for form in damaged] == verdicts


def _with(form: Bytes, places: list[int], value: int) -> Bytes:
    changed = form.copy()
    changed[[place for place in places if place < form.size]] = value
    return changed


def _is_refused(host: Codec, form: Bytes) -> bool:
    try:
        host.decode(form, draw(2100))
    except ProtocolError:
        return True
    return False
