"""Rounds of local training: the counting of steps, and the meetings of all ranks.

Between rounds nothing is sent.  A round reduces the differences with a synchronizer, by any codec; the codec's error is
added in the next round, if the synchronizer has error feedback.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from asyncpar.core.concurrency.tasks import off_loop
from asyncpar.errors import UsageError
from asyncpar.gradsync.plan import HasGradient, HasParameters
from asyncpar.gradsync.statistics import StepOutcome
from asyncpar.parallel.local.outer import HasValue, OuterConfig, OuterDifference, OuterOptimizer, OuterState


class Synchronizer(Protocol):
    """Anything that makes gradients equal to their mean over ranks, or raises and leaves them alone.

    ``GradientSynchronizer`` is one, ``HostSynchronizer`` another.
    """

    async def synchronize_gradients(self, model_shards: HasParameters) -> StepOutcome: ...

    def state(self) -> dict[str, NDArray[Any]]: ...

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalState:
    """State of a rank for checkpoints, besides its parameters and its own optimizer.

    ``steps`` were made since the last of ``rounds``.  ``synchronizer`` is the state of the synchronizer on this rank,
    such as residuals.  Everything else is the same on all.
    """

    steps: int
    rounds: int
    outer: OuterState
    synchronizer: Mapping[str, NDArray[Any]]

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Self:
        """Return the state that was saved as a dictionary.  Raises ``UsageError`` for anything else."""
        try:
            outer = OuterState(common=saved["outer"]["common"], momentum=saved["outer"]["momentum"])
            return cls(
                steps=saved["steps"], rounds=saved["rounds"], outer=outer, synchronizer=saved["synchronizer"] or {}
            )
        except (KeyError, TypeError) as error:
            raise UsageError(f"state: expected a saved state of DiLoCo, but it has no {error}") from error


@dataclass(frozen=True, slots=True)
class _Shards:
    """The differences of a round, after an entry without values, whose name states what this rank is about to do.

    Synchronizers compare the names of all ranks, so a difference in counts or starting points is found before anything
    is reduced.
    """

    purpose: str
    differences: Sequence[OuterDifference]

    def parameters(self) -> Iterable[HasGradient]:
        nothing = np.zeros(0, self.differences[0].grad.dtype)
        return [OuterDifference(name=self.purpose, grad=nothing), *self.differences]


class DiLoCo:
    """Every ``every`` steps, moves all ranks to a common point by Nesterov's momentum (Douillard et al. 2023).

    The caller makes its own steps, with any optimizer, and calls ``step`` after each.  ``parameters`` must start equal
    on all ranks; from then on they are equal, to the last bit, after each round.  All ranks make equally many steps;
    ``finish`` ends the last round early.  ``synchronizer`` reduces the differences, and nothing else: give it a
    separate ``name``, and any codec.  With a rate of 1 and no momentum it is local SGD.

    The defaults are the paper's, for rounds of hundreds of steps.  Short rounds need less momentum: with 20 steps 0.7
    does better than both 0.9 and 0.5, see ``scripts/bench/run convergence``.

    ``outer_learning_rate`` and ``outer_momentum`` are those of the step from the old common point along the mean
    movement of the ranks.
    """

    def __init__(
        self,
        parameters: Iterable[HasValue],
        synchronizer: Synchronizer,
        *,
        every: int,
        outer_learning_rate: float = 0.7,
        outer_momentum: float = 0.9,
    ) -> None:
        if every < 1:
            raise UsageError(f"every: expected 1 step or more, got {every}")
        config = OuterConfig(learning_rate=outer_learning_rate, momentum=outer_momentum)
        self.every = every
        self._synchronizer = synchronizer
        self._outer = OuterOptimizer(parameters, config)
        self._origin = self._outer.digest()
        self._steps = 0
        self._rounds = 0

    @property
    def steps(self) -> int:
        """Steps since the last round."""
        return self._steps

    @property
    def rounds(self) -> int:
        """Rounds completed by all ranks."""
        return self._rounds

    async def step(self) -> bool:
        """Count a step of this rank, and meet the others after the last of a round; return whether it was the last.

        When the synchronizer skips the round, because some rank's parameters are not finite (``NonFinitePolicy``), all
        ranks go back to the common point.

        Raises the errors of the synchronizer, such as ``PeerError`` or ``NonFiniteValue`` (on every rank), and
        ``UsageError`` if ranks differ in their steps, settings or initial values.  Then parameters are unchanged and
        the step is not counted, so the call may be repeated on all ranks.
        """
        if self._steps + 1 < self.every:
            self._steps += 1
            return False
        await self._meet(self._steps + 1)
        return True

    async def finish(self) -> bool:
        """End a round that has begun, however few its steps; return whether there was one.  Raises like ``step``."""
        if not self._steps:
            return False
        await self._meet(self._steps)
        return True

    def reset(self) -> None:
        """Reset this rank to the last common point, and count from there: its movement since then is lost.

        To be called on all ranks, for instance after ``NonFiniteValue``.
        """
        self._outer.reset()
        self._steps = 0

    def state(self) -> LocalState:
        """Return copies of the state for ``restore``; not during a round."""
        return LocalState(
            steps=self._steps, rounds=self._rounds, outer=self._outer.state(), synchronizer=self._synchronizer.state()
        )

    def restore(self, state: LocalState | Mapping[str, Any]) -> None:
        """Continue from ``state`` of an earlier run of this rank; the caller has restored its parameters.

        It may be the equivalent dictionary that ``asyncpar.checkpoint.load`` returns.

        To be called on all ranks.  Raises ``UsageError`` for a state of other parameters, or of longer rounds.
        """
        if not isinstance(state, LocalState):
            state = LocalState.of(state)
        if not 0 <= state.steps < self.every:
            raise UsageError(f"state: expected less than {self.every} steps since the last round, got {state.steps}")
        self._outer.restore(state.outer)
        self._synchronizer.restore(state.synchronizer)
        self._origin = self._outer.digest()
        self._steps, self._rounds = state.steps, state.rounds

    async def _meet(self, steps: int) -> None:
        """Run the round that ends with ``steps`` steps."""
        outer, config = self._outer, self._outer.config
        purpose = (
            f"a round of {steps} of {self.every} steps from {self._origin} "
            f"at rate {config.learning_rate:g} and momentum {config.momentum:g}"
        )
        await off_loop(outer.measure, nbytes=outer.nbytes)
        outcome = await self._synchronizer.synchronize_gradients(_Shards(purpose, outer.differences))
        await off_loop(self.reset if outcome.is_skipped else self._advance, nbytes=outer.nbytes)

    def _advance(self) -> None:
        self._outer.advance()
        self._steps = 0
        self._rounds += 1


class LocalSGD(DiLoCo):
    """Every ``every`` steps, moves all ranks to their mean (Stich 2019).

    The mean is taken of the differences from the last common point, which lose less by codecs than the values would.
    Otherwise like ``DiLoCo``.
    """

    def __init__(self, parameters: Iterable[HasValue], synchronizer: Synchronizer, *, every: int) -> None:
        super().__init__(parameters, synchronizer, every=every, outer_learning_rate=1.0, outer_momentum=0.0)
