"""What the backward passes of one rank have accumulated since gradients were last averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncpar.errors import UsageError
from asyncpar.parallel.module import Array, Module, OnGradient, Trainable


class LocalGradients:
    """Counts passes, and knows which parameters they have reached.

    Several passes weigh equally: their gradients, which backward passes add up, are divided by their number once, after
    the last of them.  With ``must_reach_all``, a pass that leaves a parameter out is a ``UsageError``.
    """

    def __init__(self, parameters: Sequence[Trainable], *, must_reach_all: bool) -> None:
        self._by_name = {parameter.name: parameter for parameter in parameters}
        self._must_reach_all = must_reach_all
        self._reached: set[str] = set()
        self._in_pass: set[str] = set()
        self.passes = 0

    @property
    def reached(self) -> frozenset[str]:
        """The parameters that have got gradients."""
        return frozenset(self._reached)

    def unreached(self) -> list[str]:
        """Return the other ones, in registration order."""
        return [name for name in self._by_name if name not in self._reached]

    def run_pass(
        self, model: Module, saved: Any, dy: Array, *, is_last: bool, ready: OnGradient | None = None
    ) -> Array | None:
        """Run a backward pass of ``model`` and return the gradient of its input.

        In the last pass before gradients are used, they are finished and handed to ``ready`` as the pass reaches them;
        what only earlier passes have reached is finished in the end.
        """
        self.passes += 1
        self._in_pass = set()

        def on_gradient(name: str) -> None:
            self._reach(name)
            if is_last:
                self._finish(name)
                if ready is not None:
                    ready(name)

        dx = model.backward(saved, dy, on_gradient)
        left_out = [name for name in self._by_name if name not in self._in_pass]
        if left_out and self._must_reach_all:
            raise UsageError(
                f"backward: expected gradients of all parameters, got none of {', '.join(left_out)}; "
                "allow it with DDPConfig(find_unused_parameters=True)"
            )
        if is_last:
            for name in self._reached.intersection(left_out):
                self._finish(name)
        return dx

    def finish(self) -> None:
        """Make what passes have added up the means over them: no other pass comes before gradients are used."""
        for name in self._reached:
            self._finish(name)

    def reset(self) -> None:
        """Begin to count anew."""
        self.passes = 0
        self._reached = set()

    def _reach(self, name: str) -> None:
        if name not in self._by_name:
            raise UsageError(f"on_gradient: expected the name of a parameter, got {name!r}")
        if name in self._in_pass:
            raise UsageError(f"on_gradient: the gradient of {name!r} was reported twice in one backward pass")
        self._in_pass.add(name)
        self._reached.add(name)

    def _finish(self, name: str) -> None:
        """Make the gradient of ``name`` the mean over passes."""
        if self.passes > 1:
            gradient = self._by_name[name].grad
            gradient *= np.asarray(1.0 / self.passes, gradient.dtype)
