"""Memory of sharded training, measured and by formulas.  Pure."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from asyncpar.core.array_pool import ArrayPool
from asyncpar.core.config.strategies import ZeROStage
from asyncpar.core.tables import bytes_text, html_table, text_table
from asyncpar.errors import UsageError
from asyncpar.zero.share import ParameterShare


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUsage:
    """Bytes of the arrays that this rank holds now, by purpose.

    ``accumulation`` are sums of gradients over micro-steps, ``buffers`` the memory for sending and receiving,
    ``residuals`` that of error feedback.
    """

    parameters: int = 0
    gradients: int = 0
    accumulation: int = 0
    optimizer_states: int = 0
    buffers: int = 0
    residuals: int = 0

    @property
    def total(self) -> int:
        kept = self.parameters + self.gradients + self.accumulation + self.optimizer_states
        return kept + self.buffers + self.residuals

    @property
    def components(self) -> dict[str, int]:
        """The bytes by component: ``optimizer``, ``gradient`` (with ``accumulation``), ``parameter``, and
        ``communication`` (``buffers`` and ``residuals``).
        """
        return {
            "optimizer": self.optimizer_states,
            "gradient": self.gradients + self.accumulation,
            "parameter": self.parameters,
            "communication": self.buffers + self.residuals,
        }

    def __getitem__(self, component: str) -> int:
        """Return the bytes of one of ``components``, or ``total``."""
        return (self.components | {"total": self.total})[component]

    def rows(self) -> list[tuple[str, str]]:
        """Return the purposes and amounts of memory, as texts."""
        return [
            ("parameters", bytes_text(self.parameters)),
            ("gradients", bytes_text(self.gradients)),
            ("sums of micro-steps", bytes_text(self.accumulation)),
            ("optimizer states", bytes_text(self.optimizer_states)),
            ("buffers", bytes_text(self.buffers)),
            ("residuals", bytes_text(self.residuals)),
        ]

    def __str__(self) -> str:
        """Return a table of the figures, with units, rounded."""
        return text_table(self._rows(), left=1)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the same table for notebooks."""
        return html_table(self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        return [("memory", "of this rank"), *self.rows(), ("total", bytes_text(self.total))]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeROMemoryStats:
    """Bytes that this rank holds now, counted over its actual arrays.

    ``parameters``, ``gradients``, ``states`` (with master values) and ``residuals`` of compression are permanent;
    ``gathered`` parameters and ``buffers`` are transient, and ``transient_peak`` is the peak of both; ``buffers`` also
    count the idle memory of gradients and gathered values that will be reused.  ``whole`` is the size of parameters,
    gradients and states without sharding.
    """

    parameters: int
    gradients: int
    states: int
    gathered: int
    buffers: int
    transient_peak: int
    whole: int
    values: int
    """Number of values of all parameters."""
    residuals: int = 0

    @property
    def kept(self) -> int:
        """Permanent bytes."""
        return self.parameters + self.gradients + self.states + self.residuals

    @property
    def total(self) -> int:
        """All bytes."""
        return self.kept + self.gathered + self.buffers

    @property
    def reduction(self) -> float:
        """The fraction of ``whole`` that is saved; residuals are in neither.  0 if there is nothing to hold."""
        return 1.0 - (self.kept - self.residuals) / self.whole if self.whole else 0.0

    @property
    def bytes_per_value(self) -> float:
        """Permanent bytes per value of the parameters; 0 if there are none."""
        return self.kept / self.values if self.values else 0.0

    def __str__(self) -> str:
        """Return a table of the figures, with units, rounded."""
        return text_table(self._rows(), left=1)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the same table for notebooks."""
        return html_table(self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        return [
            ("memory", "of this rank"),
            ("parameters", bytes_text(self.parameters)),
            ("gradients", bytes_text(self.gradients)),
            ("optimizer states", bytes_text(self.states)),
            ("residuals", bytes_text(self.residuals)),
            ("there to stay", bytes_text(self.kept)),
            ("gathered parameters", bytes_text(self.gathered)),
            ("buffers", bytes_text(self.buffers)),
            ("most of both so far", bytes_text(self.transient_peak)),
            ("without sharding", bytes_text(self.whole)),
            ("saved", f"{self.reduction:.0%}"),
            ("bytes per value", f"{self.bytes_per_value:.3g}"),
        ]


def held_now(shares: Iterable[ParameterShare], transient: TransientBytes, *, residuals: int) -> ZeROMemoryStats:
    """Return the bytes of ``shares``, and of transient memory."""
    known = tuple(shares)
    transient.add()  # counts idle memory
    return ZeROMemoryStats(
        parameters=sum(share.parameter_bytes for share in known),
        gradients=sum(share.gradient_bytes for share in known),
        states=sum(share.range.nbytes for share in known),
        gathered=transient.gathered,
        buffers=transient.buffers + transient.arrays.idle_bytes,
        transient_peak=transient.peak,
        whole=sum(share.whole_bytes for share in known),
        values=sum(share.parameter.size for share in known),
        residuals=residuals,
    )


def kept_in_a_step(shares: Iterable[ParameterShare], stage: ZeROStage) -> int:
    """Return the bytes of values, states and gradients in a step, including whole gradients until they are reduced."""
    return sum(
        share.parameter_bytes
        + share.range.nbytes
        + share.whole_gradient_bytes
        + (share.own_gradient_bytes if stage.shards_gradients else 0)
        for share in shares
    )


def memory_reduction(
    stage: ZeROStage, size: int, *, parameters: float = 1.0, gradients: float = 1.0, states: float = 1.0
) -> float:
    """Return the fraction of memory saved by sharding over ``size`` ranks, given the division of the whole.

    Equal parts over 4 ranks: 0.25, 0.5 and 0.75 for stages 1 to 3.

    ``parameters``, ``gradients`` and ``states`` are the bytes of each, in any unit.
    """
    if size < 1:
        raise UsageError(f"size: expected 1 or more, got {size}")
    whole = parameters + gradients + states
    if min(parameters, gradients, states) < 0 or not whole > 0:
        raise UsageError(f"parts: expected numbers >= 0, not all zero, got {parameters}, {gradients}, {states}")
    sharded = states * stage.shards_states + gradients * stage.shards_gradients + parameters * stage.shards_parameters
    return sharded / whole * (1.0 - 1.0 / size)


class TransientBytes:
    """Counts transient memory, by kind.  From any thread.

    Whole gradients and gathered values take their memory from ``arrays``.  During a step they keep there as much as
    they had at once, within ``room`` bytes together with the memory counted here; between steps ``idle`` bytes are
    kept.
    """

    def __init__(self, room: int = 0, idle: int = 0) -> None:
        self._lock = threading.Lock()
        self.buffers = 0
        self.gathered = 0
        self.peak = 0
        self.arrays = ArrayPool(self._find_room, is_mapped=True)
        self._room = room
        self._idle = idle

    def add(self, *, buffers: int = 0, gathered: int = 0) -> None:
        """Add to the current bytes, or subtract if negative."""
        with self._lock:
            self.buffers += buffers
            self.gathered += gathered
            self.peak = max(self.peak, self.buffers + self.gathered + self.arrays.idle_bytes)

    def end_step(self) -> None:
        """Release memory that only a step needs."""
        self.arrays.trim(self._idle)

    def _find_room(self) -> int:
        had = self.arrays.most_lent_bytes - self.arrays.lent_bytes
        return min(self._room - self.buffers - self.gathered, had)
