"""Predict the time of a synchronization with each codec, and choose one for ``"auto"``.  Pure.

Theory of operation.  Ranks that exchange encoded gradients send ``2 (n - 1) / n`` of their encoded size each, over
``2 (n - 1)`` message times, as any all-reduce of least traffic does.  Encoding, adding and decoding goes on meanwhile,
bucket after bucket, so that the longer of the two counts whole and of the shorter only what no other bucket hides.
Of codecs in the order of what they lose, the first one is picked that no later one is much faster than.  All figures
are equal on all ranks, so the choice is too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncpar.errors import UsageError

WORTH = 1.2
"""How many times faster a codec must be for more to be lost by it."""

_OVERLAPPED = 8
"""Pieces of a synchronization that are at different stages at the same time."""

_VALUE_BYTES = 4
_PAIR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """Between hosts: seconds of ``latency`` per message, bytes/s of ``bandwidth`` each way; of the slowest link."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        _check_positive("latency", self.latency)
        _check_positive("bandwidth", self.bandwidth)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpeed:
    """``encode`` and ``decode`` in bytes/s of float32 on one core; ``value_bytes`` is what an encoded value takes."""

    name: str
    value_bytes: float
    encode: float
    decode: float

    def __post_init__(self) -> None:
        for name in ("value_bytes", "encode", "decode"):
            _check_positive(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Seconds that one synchronization keeps the wire and a core busy, and takes in all; ``sent`` bytes per rank."""

    name: str
    sent: float
    wire: float
    compute: float

    @property
    def seconds(self) -> float:
        longer, shorter = max(self.wire, self.compute), min(self.wire, self.compute)
        return longer + shorter / _OVERLAPPED


def predict(codec: CodecSpeed, link: LinkSpeed, *, ranks: int, count: int) -> Prediction:
    """Return what ``ranks`` ranks on different hosts need to average ``count`` float32 values."""
    share = 2.0 * (ranks - 1) / ranks
    sent = share * count * codec.value_bytes
    size = count * _VALUE_BYTES
    encodings = 1.0 if ranks == _PAIR else 1.0 + 1.0 / ranks  # owners encode their sums, too
    return Prediction(
        name=codec.name,
        sent=sent,
        wire=sent / link.bandwidth + 2 * (ranks - 1) * link.latency,
        compute=size * encodings / codec.encode + 2 * size / codec.decode,
    )


def pick(predictions: Sequence[Prediction]) -> str:
    """Return the first codec that none behind it is ``WORTH`` times faster than."""
    for place, prediction in enumerate(predictions):
        fastest = min(later.seconds for later in predictions[place:])
        if prediction.seconds < WORTH * fastest or prediction.seconds == fastest:
            return prediction.name
    raise UsageError("predictions: expected at least one, got none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements of rank 0, which all ranks use; ``ranks`` on different hosts exchange what is encoded."""

    ranks: int
    link: LinkSpeed
    codecs: tuple[CodecSpeed, ...]

    def predictions(self, count: int) -> list[Prediction]:
        """Return one for each codec, for ``count`` values."""
        return [predict(codec, self.link, ranks=self.ranks, count=count) for codec in self.codecs]

    def choose(self, count: int) -> str:
        """Return the name of the codec for ``count`` values."""
        return pick(self.predictions(count))

    def table(self, count: int) -> str:
        """Return the figures and the choice in aligned columns; ``*`` marks what is picked."""
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
    """Return the worst of all figures, for groups that must pick the same codec."""
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
