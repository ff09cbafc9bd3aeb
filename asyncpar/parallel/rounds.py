"""Rounds in which the gradients that backward passes have added up are averaged over all ranks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from asyncpar.agreement.exchanges import Ballot
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.placement import is_frozen
from asyncpar.errors import UsageError
from asyncpar.gradsync import GradientSynchronizer, StepOutcome
from asyncpar.gradsync.plan import gradient_of
from asyncpar.parallel.config import DDPConfig
from asyncpar.parallel.gradients import scale, zero
from asyncpar.parallel.module import Array, Module, OnGradient, Trainable


class LocalGradients:
    """Counts passes, and records the parameters that they have reached.

    Several passes have equal weights: their gradients, which backward passes add up, are divided by their number once,
    after the last of them, unless ``sums``.  With ``must_reach_all``, a pass that leaves out a parameter that is not
    frozen raises ``UsageError``.
    """

    def __init__(self, parameters: Sequence[Trainable], *, must_reach_all: bool, sums: bool = False) -> None:
        self._by_name = {parameter.name: parameter for parameter in parameters}
        self._must_reach_all = must_reach_all
        self._sums = sums
        self._reached: set[str] = set()
        self._in_pass: set[str] = set()
        self.passes = 0

    @property
    def reached(self) -> frozenset[str]:
        """The parameters that have received gradients."""
        return frozenset(self._reached)

    def unreached(self) -> list[str]:
        """Return the other ones that are not frozen, in registration order."""
        return [name for name in self._trained() if name not in self._reached]

    def run_pass(
        self, model: Module, saved: Any, dy: Array, *, is_last: bool, ready: OnGradient | None = None
    ) -> Array | None:
        """Run a backward pass of ``model`` and return the gradient of its input.

        In the last pass before gradients are used, they are finished and passed to ``ready`` as the pass reaches them;
        gradients that only earlier passes have reached are finished at the end.
        """
        self.passes += 1
        self._in_pass = set()

        def on_gradient(name: str) -> None:
            if is_frozen(self._by_name.get(name)):
                return
            self._reach(name)
            if is_last:
                self._finish(name)
                if ready is not None:
                    ready(name)

        dx = model.backward(saved, dy, on_gradient)
        expected = self._trained()
        left_out = [name for name in expected if name not in self._in_pass]
        if expected and not self._in_pass and self._must_reach_all:
            raise UsageError(
                "backward: expected it to call on_gradient(name) for each parameter whose gradient is final, "
                f"{', '.join(left_out)}, but it called it for none; without the parameter on_gradient it need not"
            )
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
        """Turn the accumulated gradients into means or sums: no other pass comes before gradients are used."""
        for name in self._reached:
            self._finish(name)

    def reset(self) -> None:
        """Start counting again."""
        self.passes = 0
        self._reached = set()

    def _trained(self) -> list[str]:
        return [name for name, parameter in self._by_name.items() if not is_frozen(parameter)]

    def _reach(self, name: str) -> None:
        if name not in self._by_name:
            raise UsageError(f"on_gradient: expected the name of a parameter, got {name!r}")
        if name in self._in_pass:
            raise UsageError(f"on_gradient: the gradient of {name!r} was reported twice in one backward pass")
        self._in_pass.add(name)
        self._reached.add(name)

    def _finish(self, name: str) -> None:
        """Make the gradient of ``name`` the mean over passes, or leave the sum."""
        if self.passes > 1 and not self._sums:
            scale(self._by_name[name].grad, 1.0 / self.passes)


T = TypeVar("T")

PutBack = Callable[[Array], None]


class GradientRounds:
    """Averages the gradients of ``parameters`` over the ranks of ``communicator``, one round after another.

    Unless the configuration requires more, and once the graph is known to be static, only gradients are exchanged.
    Otherwise ranks vote, after their backward passes, on which parameters were reached.  One that this rank has not
    reached counts as zero; one that no rank has reached keeps its gradient, and is among ``unused``.
    """

    def __init__(
        self,
        communicator: Communicator,
        synchronizer: GradientSynchronizer,
        parameters: Sequence[Trainable],
        config: DDPConfig,
        *,
        key: str,
    ) -> None:
        self.synchronizer = synchronizer
        self.unused: tuple[str, ...] = ()
        self.outcome = StepOutcome()
        """The outcome of the last round."""
        self._communicator = communicator
        self._by_name = {parameter.name: parameter for parameter in parameters}
        self._config = config
        self._key = f"{key}/used"
        self._known: frozenset[str] | None = None
        """In a static graph, the parameters that some rank reaches."""
        self._known_here: frozenset[str] | None = None
        """In a static graph, the parameters that this rank reaches."""

    async def run(
        self, local: LocalGradients, compute: Callable[[OnGradient], Awaitable[T]], *, is_shadow: bool = False
    ) -> T:
        """Run ``compute`` with a callback for final gradients; then average, and return its result.

        A shadow computes nothing: all of its gradients count as zero, and are the mean of the others afterwards.
        """
        ballot = self._open_ballot()
        kept: dict[str, PutBack] = {}
        try:
            async with self.synchronizer.step(self._taking_part()) as step:
                result = await compute(step.ready)
                if not is_shadow:
                    self._check_static(local)
                unused = await self._find_unused(ballot, local)
                self._zero(local.unreached(), kept)
        except BaseException:
            self._put_back(kept, kept)
            if ballot is not None:
                ballot.close()
            raise
        self.outcome = step.outcome
        self._put_back(kept, kept if step.outcome.is_skipped else unused)
        self._learn(local, unused, is_shadow=is_shadow)
        return result

    # -- inside ------------------------------------------------------------------------------------------------------

    def _open_ballot(self) -> Ballot | None:
        is_open = self._known is None if self._config.static_graph else self._config.find_unused_parameters
        return Ballot(self._communicator, count=len(self._by_name), key=self._key) if is_open else None

    def _taking_part(self) -> list[Trainable]:
        """Return the parameters whose gradients are exchanged: all except those known to have none."""
        return [p for name, p in self._by_name.items() if self._known is None or name in self._known]

    async def _find_unused(self, ballot: Ballot | None, local: LocalGradients) -> list[str]:
        """Return the parameters that no rank has reached."""
        if ballot is None:
            return [name for name in self._by_name if self._known is not None and name not in self._known]
        reached = await ballot.cast(np.array([name in local.reached for name in self._by_name], np.bool_))
        found = (name for name, is_reached in zip(self._by_name, reached, strict=True) if not is_reached)
        return [name for name in found if not is_frozen(self._by_name[name])]

    def _zero(self, names: Sequence[str], kept: dict[str, PutBack]) -> None:
        """Zero the gradients of ``names``; store in ``kept`` the functions that restore them."""
        gradients = [gradient_of(self._by_name[name], writes=True) for name in names]
        for name, gradient in zip(names, gradients, strict=True):
            kept[name] = zero(gradient)

    def _put_back(self, kept: dict[str, PutBack], names: Iterable[str]) -> None:
        for name in names:
            if name in kept:
                kept[name](self._by_name[name].grad)

    def _check_static(self, local: LocalGradients) -> None:
        expected = self._known_here
        if expected is None and self._known is not None and not local.reached <= self._known:
            expected = self._known & local.reached
        if expected is None or expected == local.reached:
            return
        new, missing = sorted(local.reached - expected), sorted(expected - local.reached)
        found = [f"reached {', '.join(new)}"] if new else []
        found += [f"left out {', '.join(missing)}"] if missing else []
        raise UsageError(
            "static_graph: expected every step to reach the same parameters, but this one " + " and ".join(found)
        )

    def _learn(self, local: LocalGradients, unused: Sequence[str], *, is_shadow: bool) -> None:
        self.unused = tuple(unused)
        if self._config.static_graph:
            self._known = frozenset(self._by_name) - frozenset(unused)
            if not is_shadow:
                self._known_here = local.reached
