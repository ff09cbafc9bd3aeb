"""Predict the time of a synchronization with each codec, and choose one for ``"auto"``.  Pure.

Theory of operation.  Ranks that exchange encoded gradients send ``2 (n - 1) / n`` of their encoded size each, over
``2 (n - 1)`` message times, as any all-reduce of least traffic does.  Encoding, adding and decoding run meanwhile,
bucket after bucket, so the longer of the two counts in full and the shorter only as far as no other bucket hides it.
Of codecs ordered by increasing loss, the first is picked than which no later one is much faster.  All figures are equal
on all ranks, so the choice is too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncpar.errors import UsageError

WORTH = 1.2
"""How many times faster a codec must be to justify a larger loss."""

_OVERLAPPED = 8
"""Pieces of a synchronization that are in different stages at the same time."""

_VALUE_BYTES = 4
_PAIR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """Speed between hosts: ``latency`` seconds per message, ``bandwidth`` bytes/s each way; of the slowest link."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        _check_positive("latency", self.latency)
        _check_positive("bandwidth", self.bandwidth)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpeed:
    """``encode`` and ``decode`` in bytes/s of float32 on one core; ``value_bytes`` is the size of an encoded value."""

    name: str
    value_bytes: float
    encode: float
    decode: float

    def __post_init__(self) -> None:
        for name in ("value_bytes", "encode", "decode"):
            _check_positive(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Seconds for which one synchronization occupies the wire and a core, and takes in all; ``sent`` bytes per rank."""

    name: str
    sent: float
    wire: float
    compute: float

    @property
    def seconds(self) -> float:
        longer, shorter = max(self.wire, self.compute), min(self.wire, self.compute)
        return longer + shorter / _OVERLAPPED


def predict(codec: CodecSpeed, link: LinkSpeed, *, ranks: int, count: int) -> Prediction:
    """Predict the time that ``ranks`` ranks on different hosts take to average ``count`` float32 values."""
    share = 2.0 * (ranks - 1) / ranks
    sent = share * count * codec.value_bytes
    size = count * _VALUE_BYTES
    encodings = 1.0 if ranks == _PAIR else 1.0 + 1.0 / ranks  # owners also encode their sums
    return Prediction(
        name=codec.name,
        sent=sent,
        wire=sent / link.bandwidth + 2 * (ranks - 1) * link.latency,
        compute=size * encodings / codec.encode + 2 * size / codec.decode,
    )


def pick(predictions: Sequence[Prediction]) -> str:
    """Return the first codec than which no later one is ``WORTH`` times faster."""
    for place, prediction in enumerate(predictions):
        fastest = min(later.seconds for later in predictions[place:])
        if prediction.seconds < WORTH * fastest or prediction.seconds == fastest:
            return prediction.name
    raise UsageError("predictions: expected at least one, got none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements of rank 0, which all ranks use; ``ranks`` on different hosts exchange encoded values."""

    ranks: int
    link: LinkSpeed
    codecs: tuple[CodecSpeed, ...]

    def predictions(self, count: int) -> list[Prediction]:
        """Return a prediction for each codec, for ``count`` values."""
        return [predict(codec, self.link, ranks=self.ranks, count=count) for codec in self.codecs]

    def choose(self, count: int) -> str:
        """Return the name of the codec for ``count`` values."""
        return pick(self.predictions(count))

    def table(self, count: int) -> str:
        """Return the figures and the choice in aligned columns; ``*`` marks the choice."""
        predictions, chosen = self.predictions(count), self.choose(count)
        speeds: Mapping[str, CodecSpeed] = {codec.name: codec for codec in self.codecs}
        rows = [["codec", "MB sent", "wire ms", "compute ms", "total ms", "encode GB/s", "decode GB/s"]]
        for one in predictions:
            times = (one.wire, one.compute, one.seconds)
            speed = speeds[one.name]
            cells = [f"{one.sent / 1e6:.2f}", *(f"{seconds * 1e3:.1f}" for seconds in times)]
            cells += [f"{speed.encode / 1e9:.1f}", f"{speed.decode / 1e9:.1f}"]
            rows.append([one.name + ("*" if one.name == chosen else ""), *cells])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"{self.ranks} hosts, {self.link.bandwidth * 8e-6:.0f} Mbit/s, {self.link.latency * 1e6:.0f} us:"]
        for name, *cells in rows:
            aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
            lines.append("  ".join([name.ljust(widths[0]), *aligned]))
        return "\n".join(lines)


def slowest(measured: Sequence[Measured]) -> Measured:
    """Return the worst of each figure, for groups that must pick the same codec."""
    links, everything = [one.link for one in measured], [one.codecs for one in measured]
    return Measured(
        ranks=max(one.ranks for one in measured),
        link=LinkSpeed(latency=max(link.latency for link in links), bandwidth=min(link.bandwidth for link in links)),
        codecs=tuple(
            CodecSpeed(
                name=same[0].name,
                value_bytes=same[0].value_bytes,
                encode=min(codec.encode for codec in same),
                decode=min(codec.decode for codec in same),
            )
            for same in zip(*everything, strict=True)
        ),
    )


def _check_positive(name: str, value: float) -> None:
    if not (value > 0.0 and math.isfinite(value)):
        raise UsageError(f"{name}: expected a positive number, got {value!r}")
