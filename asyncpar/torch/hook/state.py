"""The state of a gradient hook between steps: buckets, residuals, state of codecs, and its figures.

All of the state but the buckets belongs to parameters.  DistributedDataParallel makes other buckets of them after its
first step, and a program that continues from a checkpoint begins with the first buckets again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncpar.codecs import Values
from asyncpar.core.tables import bytes_text, html_table, seconds_text, text_table
from asyncpar.errors import UsageError
from asyncpar.gradsync.plan import Bucket, GradientSpec, Slot
from asyncpar.gradsync.schemes import Scheme
from asyncpar.gradsync.statistics import SyncTraffic, merge_intervals
from asyncpar.gradsync.step import RunTimes
from asyncpar.torch.hook.bucket import HookBucket

_WRAPPED = "module."
"""The prefix of names in a model that DistributedDataParallel has wrapped."""


class ParameterNames:
    """Names of parameters: those ``given``, or else numbers in the order in which parameters are first looked up."""

    def __init__(self, given: Iterable[tuple[str, torch.Tensor]] | None) -> None:
        pairs = [(str(name), tensor) for name, tensor in given or ()]
        if all(name.startswith(_WRAPPED) for name, _ in pairs):
            pairs = [(name.removeprefix(_WRAPPED), tensor) for name, tensor in pairs]
        self._are_given = given is not None
        self._known = {id(tensor): (name, tensor) for name, tensor in pairs}  # a live tensor keeps its id

    def of(self, parameter: torch.Tensor) -> str:
        """Return the name of ``parameter``.  Raises ``UsageError`` if it is not among the given ones."""
        found = self._known.get(id(parameter))
        if found is not None:
            return found[0]
        if self._are_given:
            raise UsageError(
                "parameters: expected all of the model's, as model.named_parameters() gives them, but there is none "
                f"for a tensor of shape {list(parameter.shape)}"
            )
        name = str(len(self._known))
        self._known[id(parameter)] = name, parameter
        return name

    def check(self, names: Iterable[str]) -> None:
        """Raise ``UsageError`` for a name that no parameter has, if names were given."""
        known = {name for name, _ in self._known.values()}
        unknown = sorted(set(names) - known)
        if self._are_given and unknown:
            raise UsageError(f"state: expected names of parameters, such as {min(known)!r}, got {unknown[0]!r}")


@dataclass(slots=True, kw_only=True)
class BucketState:
    """The state of one bucket between steps; ``lossy`` is the scheme that compresses it, None until it is known."""

    bucket: Bucket
    parameters: tuple[torch.Tensor, ...]
    dtype: torch.dtype
    lossy: Scheme | None = None

    def fits(self, given: HookBucket) -> bool:
        """Return whether it has the parameters and dtype of ``given``."""
        if self.dtype != given.buffer.dtype or len(self.parameters) != len(given.parameters):
            return False
        return all(mine is other for mine, other in zip(self.parameters, given.parameters, strict=True))

    def lines(self) -> list[str]:
        """Return descriptions of the gradients, which must be equal on all ranks."""
        dtype = self.bucket.dtype
        return [str(GradientSpec(name=slot.name, shape=slot.shape, dtype=dtype)) for slot in self.bucket.slots]


@dataclass(slots=True, kw_only=True)
class HookMemory:
    """``residuals`` and ``codec_state``, by parameter's name, are kept until buckets with these parameters come."""

    names: ParameterNames
    buckets: dict[int, BucketState] = field(default_factory=dict)
    residuals: dict[str, Values] = field(default_factory=dict)
    codec_state: dict[str, Values] = field(default_factory=dict)
    steps: int = 0
    """The number of steps begun, including earlier runs."""

    def find(self, given: HookBucket) -> BucketState | None:
        """Return the state of a bucket that earlier steps had; None for a new one."""
        bucket_state = self.buckets.get(given.index)
        return bucket_state if bucket_state is not None and bucket_state.fits(given) else None

    def add(self, given: HookBucket) -> BucketState:
        """Return the state of a new bucket.

        Buckets from its index on are cleared, since their parameters are in other buckets now.  Raises ``UsageError``
        for a bucket that cannot be reduced.
        """
        given.check()
        slots: list[Slot] = []
        for parameter in given.parameters:
            start = slots[-1].stop if slots else 0
            shape = tuple(parameter.shape)
            slots.append(Slot(name=self.names.of(parameter), start=start, stop=start + parameter.numel(), shape=shape))
        self.clear(given.index)
        bucket = Bucket(index=given.index, dtype=given.array.dtype, slots=tuple(slots))
        bucket_state = BucketState(bucket=bucket, parameters=given.parameters, dtype=given.buffer.dtype)
        self.buckets[given.index] = bucket_state
        return bucket_state

    def clear(self, first: int = 0) -> None:
        """Forget the buckets from index ``first`` on, but not the state of their parameters."""
        for index in [index for index in self.buckets if index >= first]:
            scheme = self.buckets.pop(index).lossy
            if scheme is not None:
                self.residuals.update((name, values.copy()) for name, values in scheme.residuals())
                self.codec_state.update(scheme.state())

    def settle(self, bucket_state: BucketState, scheme: Scheme) -> None:
        """Compress the bucket by ``scheme`` from now on, which takes over the state kept for its parameters."""
        for name, residual in scheme.residuals():
            kept = self.residuals.get(name)
            if kept is not None:
                self._check_size(name, kept, residual.size)
                residual[:] = kept
        scheme.restore(self.codec_state)
        for slot in bucket_state.bucket.slots:
            self.residuals.pop(slot.name, None)
            self.codec_state.pop(slot.name, None)
        bucket_state.lossy = scheme

    def waiting(self, bucket_state: BucketState) -> list[tuple[Slot, Values]]:
        """Return the residuals that are kept for parameters of the bucket."""
        found = [(slot, self.residuals[slot.name]) for slot in bucket_state.bucket.slots if slot.name in self.residuals]
        for slot, values in found:
            self._check_size(slot.name, values, slot.stop - slot.start)
        return found

    def forget_residuals(self, bucket_state: BucketState) -> None:
        """Drop the residuals of the bucket's parameters, which have been sent."""
        for slot in bucket_state.bucket.slots:
            self.residuals.pop(slot.name, None)

    # -- for the program ---------------------------------------------------------------------------------------------

    def all_residuals(self) -> Iterator[tuple[str, Values]]:
        """Yield each parameter's residual by name; views."""
        yield from self.residuals.items()
        for bucket_state in self.buckets.values():
            if bucket_state.lossy is not None:
                yield from bucket_state.lossy.residuals()

    def residual_norm(self) -> float:
        return math.sqrt(sum(float(np.vdot(values, values)) for _, values in self.all_residuals()))

    def state(self) -> dict[str, Any]:
        """Return a copy of everything as tensors, by parameter's name."""
        schemes = [bucket_state.lossy for bucket_state in self.buckets.values() if bucket_state.lossy is not None]
        learnt = self.codec_state | {name: values for scheme in schemes for name, values in scheme.state()}
        return {
            "steps": self.steps,
            "residuals": {name: torch.tensor(values) for name, values in self.all_residuals()},
            "codec_state": {name: torch.tensor(values) for name, values in learnt.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of ``state`` of an earlier run.  Raises ``UsageError`` with nothing changed."""
        try:
            steps = int(state["steps"])
            residuals = {str(name): _values(tensor) for name, tensor in state["residuals"].items()}
            codec_state = {str(name): _values(tensor) for name, tensor in state["codec_state"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"state: expected what state_dict() of a gradient hook returned: {error!r}") from error
        self.names.check([*residuals, *codec_state])
        self.clear()
        self.steps, self.residuals, self.codec_state = steps, residuals, codec_state

    def _check_size(self, name: str, kept: NDArray[Any], size: int) -> None:
        if kept.size != size:
            raise UsageError(
                f"state: expected a residual of {size} values for parameter {name}, got {kept.size}; "
                "load the state of the same model"
            )


def _values(tensor: Any) -> Values:
    """Return a float32 vector with its own memory."""
    return np.array(torch.as_tensor(tensor).detach().cpu().float().reshape(-1).numpy())


@dataclass(frozen=True, slots=True, kw_only=True)
class HookStatistics:
    """Totals over the steps that this rank has completed since the last reset; times in seconds.

    ``bytes_sent`` is the payload that this rank's communicators sent for the hook, measurements of the codec ``"auto"``
    included.  ``bytes_uncompressed`` is the payload of all-reduces with the least traffic and no codec: 2 (ranks - 1) /
    ranks of the gradients' size, or in shared memory their size.  ``encode``, ``exchange`` and ``decode`` add up over
    buckets, which are reduced concurrently, and exclude waits for a thread.  ``under_way`` is the time in which at
    least one bucket was being reduced; ``exposed`` is the time for which backward waited at its end.
    ``buckets_not_finite`` counts results with NaN or infinity.  ``residual_norm`` is the current norm of the residuals.
    """

    codec: str
    ranks: int
    steps: int = 0
    buckets: int = 0
    buckets_compressed: int = 0
    buckets_not_finite: int = 0
    bytes_sent: int = 0
    bytes_uncompressed: int = 0
    encode: float = 0.0
    exchange: float = 0.0
    decode: float = 0.0
    under_way: float = 0.0
    exposed: float = 0.0
    residual_norm: float = 0.0

    @property
    def compression_ratio(self) -> float:
        """Bytes of all-reduces with least traffic and no codec, divided by the bytes sent; 1 if none were sent."""
        return self.bytes_uncompressed / self.bytes_sent if self.bytes_sent else 1.0

    def __str__(self) -> str:
        """Return a table of the figures, with units, rounded."""
        return text_table(self._rows(), left=1)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the same table for notebooks."""
        return html_table(self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        return [
            ("gradient hook", f"codec {self.codec}, {self.ranks} ranks"),
            ("steps", f"{self.steps:,}"),
            ("buckets", f"{self.buckets:,}"),
            ("buckets compressed", f"{self.buckets_compressed:,}"),
            ("buckets not finite", f"{self.buckets_not_finite:,}"),
            ("sent", bytes_text(self.bytes_sent)),
            ("without a codec", bytes_text(self.bytes_uncompressed)),
            ("compression", f"{self.compression_ratio:.4g} x"),
            ("encode", seconds_text(self.encode)),
            ("exchange", seconds_text(self.exchange)),
            ("decode", seconds_text(self.decode)),
            ("under way", seconds_text(self.under_way)),
            ("backward waited", seconds_text(self.exposed)),
            ("residual norm", f"{self.residual_norm:.3g}"),
        ]


@dataclass(slots=True, kw_only=True)
class HookTally:
    """Adds up the figures of completed steps."""

    codec: str
    ranks: int
    total: HookStatistics = field(init=False)
    _sent: int = 0
    """Payload bytes that the communicators have sent so far."""
    _base: int = 0
    """Payload bytes sent before the last reset."""

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Set all totals to zero."""
        self.total = HookStatistics(codec=self.codec, ranks=self.ranks)
        self._base = self._sent

    def statistics(self, *, residual_norm: float) -> HookStatistics:
        """Return the figures so far."""
        return replace(self.total, residual_norm=residual_norm)

    def add_step(self, step: StepTally, traffic: SyncTraffic) -> None:
        """Add a completed step; ``traffic`` is everything sent so far."""
        before, merged = self.total, merge_intervals(step.intervals)
        self._sent = traffic.payload_bytes
        self.total = replace(
            before,
            steps=before.steps + 1,
            buckets=before.buckets + len(step.intervals),
            buckets_compressed=before.buckets_compressed + step.compressed,
            buckets_not_finite=before.buckets_not_finite + step.not_finite,
            bytes_sent=self._sent - self._base,
            bytes_uncompressed=before.bytes_uncompressed + step.bytes_uncompressed,
            encode=before.encode + step.encode,
            exchange=before.exchange + step.exchange,
            decode=before.decode + step.decode,
            under_way=before.under_way + sum(stop - start for start, stop in merged),
        )

    def add_wait(self, seconds: float) -> None:
        """Add the time for which backward has waited at its end."""
        self.total = replace(self.total, exposed=self.total.exposed + seconds)


@dataclass(slots=True, kw_only=True)
class StepTally:
    """Figures of one step."""

    intervals: list[tuple[float, float]] = field(default_factory=list)
    compressed: int = 0
    not_finite: int = 0
    bytes_uncompressed: int = 0
    encode: float = 0.0
    exchange: float = 0.0
    decode: float = 0.0

    def add(self, interval: tuple[float, float], times: RunTimes) -> None:
        """Add a bucket that has been reduced."""
        self.intervals.append(interval)
        self.encode += times.sending
        self.exchange += times.exchanging
        self.decode += times.receiving
