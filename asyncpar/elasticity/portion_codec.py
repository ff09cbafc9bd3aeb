"""Lossy codecs of gradients in worlds that change: a codec's residual belongs to the portion, and moves with it.

The gradients of a portion are encoded separately, together with the encoding error of its earlier ones (error feedback,
Seide et al. 2014), and their decoded form is what is summed: so the sum does not depend on which rank has the portion.
Ranks send each other either the encoded forms or sums of decoded ones, whichever is less; the bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs import Codec, parse_codec
from asyncpar.elasticity.parts import StateParts
from asyncpar.elasticity.portions import Portions
from asyncpar.elasticity.transfer import PartKind
from asyncpar.errors import UsageError

Array: TypeAlias = NDArray[Any]

RESIDUAL = "residual"


def portion_codec(name: str, what: str) -> Codec:
    """Return the codec ``name``.  Raises ``UsageError`` for one that does not encode vectors independently."""
    codec = parse_codec(name)
    if not isinstance(codec, Codec):
        raise UsageError(
            f"{what}: expected a codec that encodes a portion by itself, such as int8 or topk:0.01; {name} works in "
            "rounds with the means of all ranks"
        )
    return codec


class PortionCodec:
    """Encodes the gradients of portions, ``size`` float32 values each.

    ``kept`` encodes the residual: the mirror of a portion gets as much with every step.  Without it that is float32.
    """

    def __init__(self, codec: Codec, kept: Codec | None, size: int, count: int) -> None:
        self.codec = codec
        self.kept = kept
        self.size = size
        self._count = count

    @property
    def kind(self) -> PartKind:
        """The residual that is kept of each portion."""
        if self.kept is None:
            owed: Array = np.zeros(self.size, np.float32)
        else:
            owed = np.empty(self.kept.encoded_bytes(self.size), np.uint8)
            self.kept.encode(np.zeros(self.size, np.float32), owed)
        lengths = (owed.size,) * self._count
        return PartKind(name=RESIDUAL, dtype=owed.dtype, lengths=lengths, initial=lambda _: owed, is_uniform=True)

    def is_less(self, portions: Portions) -> bool:
        """Return whether receiving the encoded forms of all portions is less than receiving sums of decoded ones."""
        others = portions.size - 1
        encoded = portions.count * self.nbytes * others
        summed = (portions.rounds + 1) * 4 * self.size * others
        return encoded < summed

    @property
    def nbytes(self) -> int:
        """The number of bytes of the encoded form of one portion."""
        return self.codec.encoded_bytes(self.size)


@dataclass(frozen=True, slots=True)
class StepCodec:
    """``codec`` in one step, with its residuals in ``parts``."""

    codec: PortionCodec
    parts: StateParts
    step: int

    def encode(self, portion: int, flats: Sequence[Array]) -> Array:
        """Replace the gradients of a portion by their decoded form, and return the encoded one.

        Raises ``UsageError`` for gradients that cannot be encoded.
        """
        codec = self.codec
        found = sum(flat.size for flat in flats)
        if len(flats) != 1 or flats[0].dtype != np.float32 or found != codec.size:
            shown = ", ".join(f"{flat.dtype}[{flat.size}]" for flat in flats)
            raise UsageError(
                f"gradients: with a codec expected float32 gradients of all parameters of the state, {codec.size} "
                f"values, got {shown}"
            )
        (flat,) = flats
        form, encoded = codec.codec.at(self.step, portion), np.empty(codec.nbytes, np.uint8)
        owed = self.parts.committed(RESIDUAL, portion)
        if codec.kept is None:
            form.encode(flat, encoded, residual=owed, lost=self.parts.open(RESIDUAL, portion))
        else:
            lost = np.empty(flat.size, np.float32)
            codec.kept.decode(owed, lost)
            form.encode(flat, encoded, residual=lost, lost=lost)
            codec.kept.encode(lost, self.parts.open(RESIDUAL, portion))
        form.decode(encoded, flat)
        return encoded

    def decode(self, portion: int, encoded: Array, out: Array) -> None:
        """Decode the gradients that another rank has encoded, into ``out``."""
        self.codec.codec.at(self.step, portion).decode(encoded, out)
