"""A codec from outside the package: one registration, and every place that takes a codec's name has it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from asyncpar.backends import CommunicationBackend, CommunicationRuntime, CompressionAlgorithm, ThreadBackend
from asyncpar.backends.config import BackendConfig
from asyncpar.codecs import (
    CODECS,
    Bytes,
    Codec,
    CodecKind,
    Identity,
    TopK,
    Values,
    automatic_codecs,
    parse_codec,
    register_codec,
    unregister_codec,
)
from asyncpar.codecs.codec import check_decode, check_encode
from asyncpar.core.config.names import Name
from asyncpar.errors import NonFiniteValue, ProtocolError, UsageError
from asyncpar.gradsync import GradientCompressionConfig, GradientSynchronizer
from asyncpar.nn import Parameter
from asyncpar.node import Node
from asyncpar.testing import local_world
from asyncpar.testing.codecs import CodecConformance

COUNT = 1000
THIRDS = np.arange(COUNT, dtype=np.float32) / 3


class Truncated(Codec):
    """The ``kept`` upper bytes of each float32: 24 bits per value by default."""

    def __init__(self, kept: int = 3) -> None:
        self.name = "truncated" if kept == 3 else f"truncated:{kept}"
        self._kept = kept

    def encoded_bytes(self, count: int) -> int:
        return self._kept * count

    def error_bound(self, values: Values) -> float:
        return float(np.abs(values).max(initial=0.0)) * 2.0 ** (9 - 8 * self._kept) + 2.0**-125

    def contraction(self, count: int) -> float:
        return 0.999

    def encode(self, values: Values, out: Bytes, *, residual: Values | None = None, lost: Values | None = None) -> None:
        check_encode(self, values, out, residual=residual, lost=lost)
        with np.errstate(over="ignore", invalid="ignore"):
            wanted = values.copy() if residual is None else values + residual
        if not np.isfinite(wanted).all():
            raise NonFiniteValue("values: expected finite numbers")
        upper = wanted.astype("<f4").view(np.uint8).reshape(-1, 4)[:, 4 - self._kept :]
        out[:] = upper.reshape(-1)
        if lost is not None:
            decoded = np.empty_like(wanted)
            self.decode(out, decoded)
            np.subtract(wanted, decoded, out=lost)

    def decode(self, encoded: Bytes, out: Values) -> None:
        check_decode(self, encoded, out)
        words = np.zeros((out.size, 4), np.uint8)
        words[:, 4 - self._kept :] = encoded.reshape(-1, self._kept)
        values = words.reshape(-1).view("<f4")
        if not np.isfinite(values).all():
            raise ProtocolError(f"{self.name}: expected finite values")
        out[:] = values


def make_truncated(kept: str = "3") -> Truncated:
    if int(kept) not in (2, 3):
        raise UsageError(f"kept: expected 2 or 3, got {kept}")
    return Truncated(int(kept))


TRUNCATED = CodecKind(name="truncated", make=make_truncated, arguments="[:BYTES] with 2 or 3 BYTES", bits=24)


@pytest.fixture
def registered() -> Iterator[None]:
    register_codec(TRUNCATED)
    yield
    unregister_codec("truncated")


class TestTruncated(CodecConformance):
    def make(self) -> Codec:
        return Truncated()

    contracts_within = (1e-30, 1e39)


async def reduce_gradients(node: Node, codec: str) -> np.ndarray:
    """Return the gradient of this rank after a step of synchronization."""
    parameter = Parameter("weight", np.zeros(COUNT, np.float32))
    parameter.grad[...] = THIRDS * (node.rank + 1)
    synchronizer = GradientSynchronizer.data_parallel(
        node.world, compression=GradientCompressionConfig(codec=Name(codec))
    )
    async with synchronizer.step([parameter]) as step:
        step.ready(parameter.name)
    synchronizer.close()
    return parameter.grad


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("codec", ["truncated", "truncated:2", "topk:0.9+truncated"])
async def test_it_reduces_gradients_of_three_ranks(codec: str) -> None:
    async with local_world(3) as nodes:
        results = await asyncio.gather(*(reduce_gradients(node, codec) for node in nodes))
    mean = THIRDS * 2
    assert all(result.tobytes() == results[0].tobytes() for result in results)
    assert 0.0 < np.abs(results[0] - mean).max() < COUNT / 10


@pytest.mark.usefixtures("registered")
async def test_a_backend_takes_it_by_its_bits() -> None:
    backend, compression = ThreadBackend(2), CompressionAlgorithm.quantization(24)
    assert compression.codec_for(COUNT) == Truncated()

    async def rank(number: int) -> np.ndarray:
        async with CommunicationRuntime() as runtime:
            runtime.register_backend(CommunicationBackend.THREAD, backend)
            await runtime.initialize("thread", BackendConfig(rank=number, world_size=2, compression=compression))
            result = await runtime.collective_op("all_reduce", np.linspace(-1.0, 1.0, COUNT, dtype=np.float32))
            assert result.value is not None
            return np.asarray(result.value)

    results = await asyncio.gather(rank(0), rank(1))
    expected = 2 * np.linspace(-1.0, 1.0, COUNT)
    assert 0.0 < np.abs(results[0] - expected).max() < 0.001


def test_settings_take_it_by_its_bits() -> None:
    with CODECS.registered(TRUNCATED):
        config = GradientCompressionConfig(enable_compression=True, compression_ratio=1.0, quantization_bits=24)
        assert config.make_codec() == Truncated()
    with pytest.raises(UsageError, match="quantization_bits: expected one of 1, 4, 8, 16, 32, got 24"):
        GradientCompressionConfig(quantization_bits=24)


def test_automatic_choice_tries_it_in_the_order_of_bits() -> None:
    with CODECS.registered(CodecKind(name="truncated", make=Truncated, bits=24, is_automatic=True)):
        assert automatic_codecs() == ("none", "truncated", "bf16", "int8", "int4")


def test_its_name_is_known_as_long_as_it_is_registered() -> None:
    with pytest.raises(UsageError, match=r"expected one of none, .*, got 'truncated'"):
        parse_codec("truncated")
    with CODECS.registered(TRUNCATED):
        assert parse_codec("topk:0.1+truncated") == TopK(0.1, Truncated())
        with pytest.raises(UsageError, match=r"expected one of .*truncated\[:BYTES\].*, got 'zip'"):
            parse_codec("zip")
        with pytest.raises(UsageError, match=r"expected truncated\[:BYTES\] with 2 or 3 BYTES, got 'truncated:0'"):
            parse_codec("truncated:0")
    assert "truncated" not in CODECS


class Unfinished(Truncated):
    name = "unfinished"

    encode = Codec.encode


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (CodecKind(name="int8", make=Truncated), "the name 'int8' is taken; choose another name"),
        (CodecKind(name="auto", make=Truncated), "the name 'auto' has a meaning of its own; choose another name"),
        (CodecKind(name="trun:cated", make=lambda scale: Truncated(int(scale))), "got 'trun:cated'; change the name"),
        (CodecKind(name="other", make=Truncated), "calls itself 'truncated'; let the two names be equal"),
        (CodecKind(name="unfinished", make=Unfinished), "Unfinished lacks encode; define what is missing"),
        (CodecKind(name="truncated", make=lambda: 3), "make: expected a function that returns a Codec, got one of 3"),  # type: ignore[arg-type, return-value]
        (CodecKind(name="truncated", make=None), "make: expected a function that returns a Codec, got None"),  # type: ignore[arg-type]
        (CodecKind(name="truncated", make=Truncated, bits=8), "bits: int8 is the codec of 8 bits; leave bits out"),
        (CodecKind(name="truncated", make=Truncated, bits=0), "bits: expected 1 or more, got 0"),
        (CodecKind(name="truncated", make=Truncated, is_automatic=True), "is_automatic: needs bits .*; add bits"),
        (CodecKind(name="truncated", make=Truncated, tolerance=-1.0), "tolerance: expected a number from 0, got -1.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_registration_is_refused_and_says_what_to_change(kind: CodecKind, message: str) -> None:
    before = CODECS.names
    with pytest.raises(UsageError, match=message):
        register_codec(kind)
    assert CODECS.names == before


def test_what_is_not_registered_cannot_be_taken_back() -> None:
    with pytest.raises(UsageError, match=r"codec: expected one of none, .*, got 'zip'"):
        unregister_codec("zip")


def test_only_selections_are_followed() -> None:
    with pytest.raises(UsageError, match="none cannot follow truncated, which selects no values"):
        Truncated().followed_by(Identity())
