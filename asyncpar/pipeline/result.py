"""The result of a pipeline's run on one rank.  Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from asyncpar.pipeline.operation import Content, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryTraffic:
    """Bytes of arrays sent from virtual stage ``before`` to ``before + 1``, and of their gradients sent back."""

    before: int
    activation_bytes: int
    gradient_bytes: int
    messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineResult:
    """Result of a run; ``losses`` are those of the micro-batches on the rank with the last virtual stage, () on others.

    A micro-batch is in flight in a chunk from its forward until its backward, or its weight gradients, are done:
    ``peak_in_flight`` counts these, ``peak_bytes`` measures their arrays in memory.  ``seconds`` is the time of the
    whole run, of which this rank computed for ``seconds_busy`` and had to wait for messages for ``seconds_waiting``.
    ``sent`` and ``received`` list the boundaries to other ranks; transfers within a rank are not counted.
    """

    losses: tuple[float, ...]
    peak_in_flight: int
    peak_bytes: int
    seconds: float
    seconds_busy: float
    seconds_waiting: float
    sent: tuple[BoundaryTraffic, ...]
    received: tuple[BoundaryTraffic, ...]

    @property
    def bytes_sent(self) -> int:
        return sum(one.activation_bytes + one.gradient_bytes for one in self.sent)

    @property
    def bytes_received(self) -> int:
        return sum(one.activation_bytes + one.gradient_bytes for one in self.received)


class TrafficCount:
    """Adds up messages by the boundary that they cross."""

    def __init__(self) -> None:
        self._bytes: Counter[tuple[int, Content]] = Counter()
        self._messages: Counter[int] = Counter()

    def add(self, message: Message, nbytes: int) -> None:
        before = message.stage - (message.content is Content.GRADIENT)
        self._bytes[before, message.content] += nbytes
        self._messages[before] += 1

    def boundaries(self) -> tuple[BoundaryTraffic, ...]:
        """Return the boundaries in the order of the model."""
        return tuple(
            BoundaryTraffic(
                before=before,
                activation_bytes=self._bytes[before, Content.ACTIVATION],
                gradient_bytes=self._bytes[before, Content.GRADIENT],
                messages=self._messages[before],
            )
            for before in sorted(self._messages)
        )
