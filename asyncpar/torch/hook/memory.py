"""What a gradient hook keeps between steps: buckets, residuals, and what codecs have learnt.

All but the buckets belongs to parameters: DistributedDataParallel makes other buckets of them after its first step, and
a program that goes on from a checkpoint begins with the first ones again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncpar.codecs import Values
from asyncpar.errors import UsageError
from asyncpar.gradsync.plan import Bucket, GradientSpec, Slot
from asyncpar.gradsync.schemes import Scheme
from asyncpar.torch.hook.bucket import GivenBucket
from asyncpar.torch.hook.names import ParameterNames


@dataclass(slots=True, kw_only=True)
class Seat:
    """A bucket that comes in every step, and ``lossy``, which compresses it, once that is known."""

    bucket: Bucket
    parameters: tuple[torch.Tensor, ...]
    dtype: torch.dtype
    lossy: Scheme | None = None

    def fits(self, given: GivenBucket) -> bool:
        """Is it the bucket that is ``given``?"""
        if self.dtype != given.buffer.dtype or len(self.parameters) != len(given.parameters):
            return False
        return all(mine is other for mine, other in zip(self.parameters, given.parameters, strict=True))

    def lines(self) -> list[str]:
        """Return what ranks must agree upon."""
        dtype = self.bucket.dtype
        return [str(GradientSpec(name=slot.name, shape=slot.shape, dtype=dtype)) for slot in self.bucket.slots]


@dataclass(slots=True, kw_only=True)
class HookMemory:
    """``residuals`` and ``codec_state``, by parameter's name, wait for the seats that their parameters will be in."""

    names: ParameterNames
    seats: dict[int, Seat] = field(default_factory=dict)
    residuals: dict[str, Values] = field(default_factory=dict)
    codec_state: dict[str, Values] = field(default_factory=dict)
    steps: int = 0
    """How many have begun, in earlier runs too."""

    def find(self, given: GivenBucket) -> Seat | None:
        """Return the seat of a bucket that was there before; None for a new one."""
        seat = self.seats.get(given.index)
        return seat if seat is not None and seat.fits(given) else None

    def add(self, given: GivenBucket) -> Seat:
        """Return the seat of a new bucket.

        The old ones from its index on are cleared, as their parameters are elsewhere now.  Raises ``UsageError`` for a
        bucket that cannot be reduced.
        """
        given.check()
        slots: list[Slot] = []
        for parameter in given.parameters:
            start = slots[-1].stop if slots else 0
            shape = tuple(parameter.shape)
            slots.append(Slot(name=self.names.of(parameter), start=start, stop=start + parameter.numel(), shape=shape))
        self.clear(given.index)
        bucket = Bucket(index=given.index, dtype=given.array.dtype, slots=tuple(slots))
        seat = Seat(bucket=bucket, parameters=given.parameters, dtype=given.buffer.dtype)
        self.seats[given.index] = seat
        return seat

    def clear(self, first: int = 0) -> None:
        """Forget the seats from index ``first`` on, but not what belongs to their parameters."""
        for index in [index for index in self.seats if index >= first]:
            scheme = self.seats.pop(index).lossy
            if scheme is not None:
                self.residuals.update((name, values.copy()) for name, values in scheme.residuals())
                self.codec_state.update(scheme.state())

    def settle(self, seat: Seat, scheme: Scheme) -> None:
        """Let ``scheme`` compress the bucket of ``seat`` from now on, and give it what waits for its parameters."""
        for name, residual in scheme.residuals():
            kept = self.residuals.get(name)
            if kept is not None:
                self._check_size(name, kept, residual.size)
                residual[:] = kept
        scheme.restore(self.codec_state)
        for slot in seat.bucket.slots:
            self.residuals.pop(slot.name, None)
            self.codec_state.pop(slot.name, None)
        seat.lossy = scheme

    def waiting(self, seat: Seat) -> list[tuple[Slot, Values]]:
        """Return the residuals that wait for parameters of ``seat``."""
        found = [(slot, self.residuals[slot.name]) for slot in seat.bucket.slots if slot.name in self.residuals]
        for slot, values in found:
            self._check_size(slot.name, values, slot.stop - slot.start)
        return found

    def forget_residuals(self, seat: Seat) -> None:
        """What waited for parameters of ``seat`` has been sent."""
        for slot in seat.bucket.slots:
            self.residuals.pop(slot.name, None)

    # -- for the program ---------------------------------------------------------------------------------------------

    def all_residuals(self) -> Iterator[tuple[str, Values]]:
        """Yield each parameter's residual by name; views."""
        yield from self.residuals.items()
        for seat in self.seats.values():
            if seat.lossy is not None:
                yield from seat.lossy.residuals()

    def residual_norm(self) -> float:
        return math.sqrt(sum(float(np.vdot(values, values)) for _, values in self.all_residuals()))

    def state(self) -> dict[str, Any]:
        """Return a copy of everything as tensors, by parameter's name."""
        schemes = [seat.lossy for seat in self.seats.values() if seat.lossy is not None]
        learnt = self.codec_state | {name: values for scheme in schemes for name, values in scheme.state()}
        return {
            "steps": self.steps,
            "residuals": {name: torch.tensor(values) for name, values in self.all_residuals()},
            "codec_state": {name: torch.tensor(values) for name, values in learnt.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` returned in an earlier run.  Raises ``UsageError``, with nothing changed."""
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
    """Return a float32 vector of its own memory."""
    return np.array(torch.as_tensor(tensor).detach().cpu().float().reshape(-1).numpy())
