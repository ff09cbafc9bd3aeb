"""What a checked run has to come to, by codec and mode."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from asyncpar.codecs import RoundCodec
from asyncpar.codecs.naming import parse_codec
from asyncpar.gradsync.config import AUTO
from asyncpar.train.mode import ModeKind, TrainingMode

EXACT_TOLERANCE = 1e-5
"""Largest relative difference of any loss without compression, in float32, when gradients are averaged every step."""

_CODEC_TOLERANCE: Mapping[str, float] = MappingProxyType(
    {"none": 0.0, "bf16": 0.02, "fp16": 0.02, "int8": 0.02, "int4": 0.03, AUTO: 0.02, "powersgd": 0.1}
)
"""By which the last loss of a short run may differ with these codecs; with others by ``_FEW_VALUES_TOLERANCE``."""

_FEW_VALUES_TOLERANCE = 0.3
"""Error feedback brings what sparse codecs left out, but late: a run of a few hundred steps lags behind."""

_MODE_TOLERANCE = 0.15
"""The same, for ranks that go their own ways: a few dozen rounds do not make up for what each has not seen."""

_OVERHEAD = 1 / 0.954
"""Frame headers and agreements beside encoded values; of int8 it leaves 3.8 of 3.98 times."""

_SPARSE_OVERHEAD = 1.5
"""The same beside codecs that send so little that headers weigh more."""

_SPARSE = 8.0
"""From this ratio on a codec counts as one of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """Largest relative difference of losses, of all or only of the last, and how many times traffic must shrink."""

    every_loss: float | None = None
    last_loss: float | None = None
    least_ratio: float | None = None


def expect(codec: str, mode: TrainingMode, *, shapes: Sequence[tuple[int, ...]], steps: int) -> Expectation:
    """Return what a run with these settings has to come to, against one process; ``shapes`` are of the parameters."""
    if codec == "none" and mode.kind is ModeKind.SYNC:
        return Expectation(every_loss=EXACT_TOLERANCE)
    name = codec.split(":")[0].split("+")[0]
    tolerance = _CODEC_TOLERANCE.get(name, _FEW_VALUES_TOLERANCE) + (0.0 if mode.has_replicas else _MODE_TOLERANCE)
    return Expectation(last_loss=tolerance, least_ratio=_least_ratio(codec, mode, shapes, steps))


def _least_ratio(codec: str, mode: TrainingMode, shapes: Sequence[tuple[int, ...]], steps: int) -> float | None:
    """Return None where traffic is not that of an all-reduce at all, or the codec is not known."""
    if codec == AUTO or mode.kind not in (ModeKind.SYNC, ModeKind.LOCAL, ModeKind.DILOCO):
        return None
    ratio = encoded_ratio(codec, shapes) * steps / mode.rounds(steps)
    return ratio / (_OVERHEAD if ratio < _SPARSE else _SPARSE_OVERHEAD)


def encoded_ratio(codec: str, shapes: Sequence[tuple[int, ...]]) -> float:
    """Return how many times fewer bytes than float32 the encoded gradients are, without any header."""
    made, count = parse_codec(codec), sum(math.prod(shape) for shape in shapes)
    if isinstance(made, RoundCodec):
        return 4 * count / sum(message.nbytes for message in made.encoder(shapes).messages)
    return 4 * count / made.encoded_bytes(count)
