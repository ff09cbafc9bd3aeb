"""The registry of codecs, and codecs by name: ``int8``, ``topk:0.01+int8``, ``powersgd:4``.

``register_codec`` makes a codec available to everything that takes the name of one: gradient synchronization,
``"auto"``, ``CompressionAlgorithm``, ``GradientHook``, the training commands.  All ranks register the same codecs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from asyncpar.codecs.cast import Cast
from asyncpar.codecs.codec import Codec, RoundCodec
from asyncpar.codecs.identity import Identity
from asyncpar.codecs.int4 import Int4
from asyncpar.codecs.int8 import Int8
from asyncpar.codecs.powersgd import PowerSgd
from asyncpar.codecs.random_k import RandomK
from asyncpar.codecs.sign import Sign
from asyncpar.codecs.top_k import TopK
from asyncpar.core.config.registry import Registry
from asyncpar.errors import UsageError

AnyCodec: TypeAlias = Codec | RoundCodec

_CHAINS = "a chain is selections (topk, randomk), then at most one codec of their values, such as topk:0.01+int8"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecKind:
    """The record of a codec, for ``register_codec``.

    ``make`` returns the codec for the texts that follow ``name``, separated by colons: ``make("0.01", "7")`` for
    ``name:0.01:7``.  It raises ``ValueError`` (``UsageError`` is one) for texts that it does not accept; ``arguments``
    describes in errors which it does: ``":RATIO[:SEED] with 0 < RATIO <= 1"``.  ``bits`` per value makes the codec the
    one of ``quantization_bits=bits``.  ``is_automatic`` lets ``"auto"`` choose it, which prefers more bits; it requires
    ``bits``, and no arguments.  ``tolerance`` is the permitted relative error of the last loss of a short training run.
    """

    name: str
    make: Callable[..., AnyCodec]
    arguments: str = ""
    bits: int | None = None
    is_automatic: bool = False
    tolerance: float = 0.3

    @property
    def form(self) -> str:
        """The form of the codec in options: ``topk:RATIO``."""
        return self.name + self.arguments.partition(" ")[0]

    def takes(self, *arguments: str) -> bool:
        """Return whether ``make`` accepts this number of arguments."""
        try:
            inspect.signature(self.make).bind(*arguments)
        except TypeError:
            return False
        return True


def register_codec(kind: CodecKind) -> None:
    """Register the codec ``kind`` under its name in this process.

    Raises ``UsageError`` for a name or a number of bits that is taken, and for a codec that lacks a method or has
    another name.
    """
    _check(kind)
    CODECS.register(kind)


def unregister_codec(name: str) -> None:
    """Remove the codec called ``name``.  Raises ``UsageError`` if there is none."""
    CODECS.unregister(name)


def parse_codec(text: str) -> AnyCodec:
    """Return the codec called ``text``, which may be a chain; ``parse_codec(codec.name)`` equals ``codec``.

    Raises ``UsageError`` listing the names, their arguments and possible chains.
    """
    return chain(*[_parse_one(part, text) for part in text.split("+")])


def chain(first: AnyCodec, *rest: AnyCodec) -> AnyCodec:
    """Return the codec that applies ``first`` and then, to the values it selects, the ``rest``.

    Raises ``UsageError`` unless all but the last are selections without a codec of their values.
    """
    if not rest:
        return first
    following = chain(*rest)
    for one in (following, first):
        if isinstance(one, RoundCodec):
            raise UsageError(f"codec: {one.name} stands alone: {_CHAINS}")
    assert isinstance(first, Codec)
    assert isinstance(following, Codec)
    if not first.can_be_followed:
        raise UsageError(f"codec: {following.name} cannot follow {first.name}: {_CHAINS}")
    return first.followed_by(following)


def codec_of_bits(bits: int) -> str:
    """Return the name of the codec with ``bits`` per value."""
    found = next((kind.name for kind in CODECS if kind.bits == bits), None)
    if found is None:
        raise UsageError(f"bits: expected one of {', '.join(map(str, value_bits()))}, got {bits}")
    return found


def value_bits() -> tuple[int, ...]:
    """Return the numbers of bits per value for which there are codecs, ascending."""
    return tuple(sorted(kind.bits for kind in CODECS if kind.bits is not None))


def automatic_codecs() -> tuple[str, ...]:
    """Return the names of the codecs that ``"auto"`` chooses from, those with most bits per value first."""
    kinds = [kind for kind in CODECS if kind.is_automatic]
    return tuple(kind.name for kind in sorted(kinds, key=lambda kind: -(kind.bits or 0)))


def codec_forms() -> tuple[str, ...]:
    """Return the notations of all codecs, those without arguments first."""
    return tuple(kind.form for kind in sorted(CODECS, key=lambda kind: bool(kind.arguments)))


def _parse_one(part: str, text: str) -> AnyCodec:
    """Return the codec called ``part``, which has no ``+`` in it."""
    name, *arguments = part.split(":")
    kind = CODECS.get(name)
    if kind is None or not kind.takes(*arguments):
        written = repr(part) if part == text else f"{part!r} in {text!r}"
        raise UsageError(f"codec: expected one of {', '.join(codec_forms())}, or a chain, got {written}")
    try:
        return _checked(kind, kind.make(*arguments))
    except ValueError as error:
        raise UsageError(f"codec: expected {name}{kind.arguments}, got {part!r} ({error})") from error


def _check(kind: CodecKind) -> None:
    """Raise ``UsageError`` for an invalid record."""
    CODECS.check(kind.name)
    what = f"codec {kind.name!r}"
    if not callable(kind.make):
        raise UsageError(f"{what}: make: expected a function that returns a Codec, got {kind.make!r}")
    if isinstance(kind.make, type) and inspect.isabstract(kind.make):
        lacking = ", ".join(sorted(getattr(kind.make, "__abstractmethods__", ())))
        raise UsageError(f"{what}: {kind.make.__name__} lacks {lacking}; define what is missing")
    if kind.bits is not None and kind.bits < 1:
        raise UsageError(f"{what}: bits: expected 1 or more, got {kind.bits!r}")
    taken = next((one.name for one in CODECS if kind.bits is not None and one.bits == kind.bits), None)
    if taken is not None:
        raise UsageError(f"{what}: bits: {taken} is the codec of {kind.bits} bits; leave bits out")
    if not kind.tolerance >= 0.0:
        raise UsageError(f"{what}: tolerance: expected a number from 0, got {kind.tolerance!r}")
    if kind.is_automatic and (kind.bits is None or not kind.takes()):
        raise UsageError(f"{what}: is_automatic: needs bits and a make without arguments; add bits, or leave it out")
    if kind.takes():
        made = _checked(kind, kind.make())
        if made.name != kind.name:
            raise UsageError(f"{what}: its codec calls itself {made.name!r}; let the two names be equal")


def _checked(kind: CodecKind, made: object) -> AnyCodec:
    if not isinstance(made, AnyCodec):
        raise UsageError(f"codec {kind.name!r}: make: expected a function that returns a Codec, got one of {made!r}")
    return made


def _powersgd(rank: str, seed: str = "0") -> PowerSgd:
    return PowerSgd(int(rank), int(seed))


CODECS: Registry[CodecKind] = Registry(
    "codec",
    (
        CodecKind(name="none", make=Identity, bits=32, is_automatic=True, tolerance=0.0),
        CodecKind(name="bf16", make=lambda: Cast("bfloat16"), bits=16, is_automatic=True, tolerance=0.02),
        CodecKind(name="fp16", make=lambda: Cast("float16"), tolerance=0.02),
        CodecKind(name="int8", make=Int8, bits=8, is_automatic=True, tolerance=0.02),
        CodecKind(name="int4", make=Int4, bits=4, is_automatic=True, tolerance=0.03),
        CodecKind(name="sign", make=Sign, bits=1),
        CodecKind(name="topk", make=lambda ratio: TopK(float(ratio)), arguments=":RATIO with 0 < RATIO <= 1"),
        CodecKind(
            name="randomk",
            make=lambda ratio, seed="0": RandomK(float(ratio), int(seed)),
            arguments=":RATIO[:SEED] with 0 < RATIO <= 1 and an integer SEED",
        ),
        CodecKind(
            name="powersgd",
            make=_powersgd,
            arguments=":RANK[:SEED] with a RANK of 1 or more and an integer SEED",
            tolerance=0.1,
        ),
    ),
    reserved=("auto",),
)
"""The codecs by name; ``with CODECS.registered(kind):`` adds one temporarily."""
