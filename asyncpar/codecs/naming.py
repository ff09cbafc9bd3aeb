"""Codecs by name: ``int8``, ``topk:0.01+int8``, ``powersgd:4``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from asyncpar.codecs.cast import Cast
from asyncpar.codecs.codec import Codec, RoundCodec
from asyncpar.codecs.identity import Identity
from asyncpar.codecs.int4 import Int4
from asyncpar.codecs.int8 import Int8
from asyncpar.codecs.powersgd import PowerSgd
from asyncpar.codecs.random_k import RandomK
from asyncpar.codecs.sign import Sign
from asyncpar.codecs.top_k import TopK
from asyncpar.errors import UsageError

_PLAIN: Mapping[str, Callable[[], Codec]] = MappingProxyType(
    {
        "none": Identity,
        "bf16": lambda: Cast("bfloat16"),
        "fp16": lambda: Cast("float16"),
        "int8": Int8,
        "int4": Int4,
        "sign": Sign,
    }
)
_KNOWN = (*_PLAIN, "topk:RATIO", "randomk:RATIO[:SEED]", "powersgd:RANK[:SEED]")
_CHAINS = "a chain is selections (topk, randomk), then at most one codec of their values, such as topk:0.01+int8"


def parse_codec(text: str) -> Codec | RoundCodec:
    """Return the codec called ``text``, chains included; ``parse_codec(codec.name)`` equals ``codec``.

    Raises ``UsageError`` that tells which names there are, what their arguments are and what can follow what.
    """
    return chain(*[_parse_one(part, text) for part in text.split("+")])


def chain(first: Codec | RoundCodec, *rest: Codec | RoundCodec) -> Codec | RoundCodec:
    """Return the codec that does what ``first`` does and then, with the values it selects, the ``rest``.

    Raises ``UsageError`` unless all but the last are selections without a codec of their values.
    """
    if not rest:
        return first
    following = chain(*rest)
    if isinstance(following, RoundCodec):
        raise UsageError(f"codec: {following.name} stands alone: {_CHAINS}")
    match first:
        case TopK() | RandomK() if first.values == Identity():
            return first.followed_by(following)
        case RoundCodec():
            raise UsageError(f"codec: {first.name} stands alone: {_CHAINS}")
        case _:
            raise UsageError(f"codec: {following.name} cannot follow {first.name}: {_CHAINS}")


def _parse_one(part: str, text: str) -> Codec | RoundCodec:
    """Return the codec called ``part``, which has no ``+`` in it."""
    name, *arguments = part.split(":")
    match name, arguments:
        case _, [] if name in _PLAIN:
            return _PLAIN[name]()
        case "topk", [ratio]:
            return TopK(_ratio(ratio, part, "topk:RATIO with 0 < RATIO <= 1"))
        case "randomk", [ratio, *seed] if len(seed) <= 1:
            expected = "randomk:RATIO[:SEED] with 0 < RATIO <= 1 and an integer SEED"
            return RandomK(_ratio(ratio, part, expected), _seed(seed, part, expected))
        case "powersgd", [rank, *seed] if len(seed) <= 1:
            expected = "powersgd:RANK[:SEED] with a RANK of 1 or more and an integer SEED"
            return PowerSgd(_rank(rank, part, expected), _seed(seed, part, expected))
    written = repr(part) if part == text else f"{part!r} in {text!r}"
    raise UsageError(f"codec: expected one of {', '.join(_KNOWN)}, or a chain, got {written}")


def _seed(arguments: list[str], part: str, expected: str) -> int:
    return _integer(arguments[0], part, expected) if arguments else 0


def _rank(argument: str, part: str, expected: str) -> int:
    rank = _integer(argument, part, expected)
    if rank < 1:
        raise UsageError(f"codec: expected {expected}, got {part!r}")
    return rank


def _integer(argument: str, part: str, expected: str) -> int:
    try:
        return int(argument)
    except ValueError as error:
        raise UsageError(f"codec: expected {expected}, got {part!r}") from error


def _ratio(argument: str, part: str, expected: str) -> float:
    try:
        ratio = float(argument)
    except ValueError as error:
        raise UsageError(f"codec: expected {expected}, got {part!r}") from error
    if not 0.0 < ratio <= 1.0:
        raise UsageError(f"codec: expected {expected}, got {part!r}")
    return ratio
