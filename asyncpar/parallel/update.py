"""Updates: the movements of parameters, in the form in which ranks send them to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.errors import NonFiniteValue, UsageError
from asyncpar.parallel.module import Array, Trainable

_HEADER_BYTES = 8
_ALIGNMENT = 8


class UpdateLayout:
    """The place of each parameter in an update: parameters of one dtype are adjacent."""

    def __init__(self, parameters: Sequence[Trainable]) -> None:
        if not parameters:
            raise UsageError("parameters: expected at least one parameter, got none")
        self.parameters = tuple(parameters)
        self.spans: list[tuple[np.dtype[Any], int, int]] = []
        self.places: list[tuple[int, int]] = [(0, 0)] * len(self.parameters)
        """For each parameter the number of its span and its first value in it."""
        start = _HEADER_BYTES
        for dtype in dict.fromkeys(parameter.value.dtype for parameter in self.parameters):
            count = 0
            for index, parameter in enumerate(self.parameters):
                if parameter.value.dtype == dtype:
                    self.places[index] = (len(self.spans), count)
                    count += parameter.value.size
            self.spans.append((dtype, start, count))
            start += -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = start


class AsyncUpdate:
    """One message: the number of the last step that it contains, and the addend of each parameter.

    A new one is step 0 and zero.  ``nbytes`` is nearly that of the parameters.
    """

    def __init__(self, layout: UpdateLayout) -> None:
        self.layout = layout
        self.bytes: NDArray[np.uint8] = np.zeros(layout.nbytes, np.uint8)
        self._header = self.bytes[:_HEADER_BYTES].view(np.int64)
        self.spans: tuple[Array, ...] = tuple(
            self.bytes[start : start + count * dtype.itemsize].view(dtype) for dtype, start, count in layout.spans
        )

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    @property
    def step(self) -> int:
        return int(self._header[0])

    @step.setter
    def step(self, step: int) -> None:
        self._header[0] = step

    def views(self) -> list[Array]:
        """Return the part of each parameter, in its shape."""
        shaped = zip(self.layout.parameters, self.layout.places, strict=True)
        return [
            self.spans[span][start : start + parameter.value.size].reshape(parameter.value.shape)
            for parameter, (span, start) in shaped
        ]

    def add(self, other: AsyncUpdate) -> None:
        """Add ``other``, which is later."""
        for mine, more in zip(self.spans, other.spans, strict=True):
            mine += more
        self.step = max(self.step, other.step)

    def apply(self) -> None:
        """Add this to the parameters."""
        for parameter, change in zip(self.layout.parameters, self.views(), strict=True):
            parameter.value[...] += change

    def check_finite(self) -> None:
        """Raise ``NonFiniteValue`` that names the parameters whose change is NaN or infinite."""
        if all(np.isfinite(span).all() for span in self.spans):
            return
        named = zip(self.layout.parameters, self.views(), strict=True)
        broken = [parameter.name for parameter, change in named if not np.isfinite(change).all()]
        raise NonFiniteValue(f"update: expected finite parameters, got NaN or infinity in {', '.join(broken)}")


def merged(earlier: AsyncUpdate, later: AsyncUpdate) -> AsyncUpdate:
    """Return one update equivalent to both; neither is changed."""
    total = AsyncUpdate(earlier.layout)
    total.add(earlier)
    total.add(later)
    return total


class Mover:
    """Lets an optimizer move the parameters, but keeps only a share of the movement."""

    def __init__(self, layout: UpdateLayout, *, share: float) -> None:
        self._layout = layout
        self._share = share
        self._before = [parameter.value.copy() for parameter in layout.parameters]

    def remember(self) -> None:
        """Record the current parameters as the starting point of the next movement."""
        for before, parameter in zip(self._before, self._layout.parameters, strict=True):
            np.copyto(before, parameter.value)

    def restore(self) -> None:
        """Reset the parameters to that point."""
        for before, parameter in zip(self._before, self._layout.parameters, strict=True):
            np.copyto(parameter.value, before)

    def measure(self) -> AsyncUpdate:
        """Return the share of the movement since; the parameters are left at its end.

        Raises ``NonFiniteValue``, with the parameters reset, if they are not finite.
        """
        update = AsyncUpdate(self._layout)
        changes = update.views()
        for change, before, parameter in zip(changes, self._before, self._layout.parameters, strict=True):
            with np.errstate(over="ignore", invalid="ignore"):
                np.subtract(parameter.value, before, out=change)
                change *= np.asarray(self._share, change.dtype)
        self.restore()
        update.check_finite()
        update.apply()
        return update
