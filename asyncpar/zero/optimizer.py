"""An optimizer over sharded parameters, for training loops outside the package."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.concurrency.bridge import LoopBridge
from asyncpar.core.config.strategies import ZeROStage
from asyncpar.core.sums import is_narrow
from asyncpar.errors import UsageError
from asyncpar.nn.half import stored_dtype
from asyncpar.nn.optimizers import Rule, clip_factor
from asyncpar.nn.parameter import Array, Parameter
from asyncpar.nn.stage import Stage
from asyncpar.tensors.context import ModelParallelContext
from asyncpar.zero.config import ZeROConfig
from asyncpar.zero.engine import ZeroEngine
from asyncpar.zero.memory import ZeROMemoryStats


class ZeROOptimizer:
    """The rule ``base`` over the replicas of ``context``, sharded according to ``config``.

    All ranks call the same methods in the same order.  Gradients are this rank's own: ``optimizer_step`` reduces them,
    clips their global norm to ``clip_norm``, and updates.  After a failure all ranks await ``engine.resume()``.

    ``learning_rate`` is that of steps that are given none; ``bridge`` reaches the event loop from the compute thread;
    ``name`` distinguishes optimizers of one communicator.
    """

    def __init__(
        self,
        base: Rule,
        config: ZeROConfig,
        context: Communicator | ModelParallelContext,
        *,
        learning_rate: float = 1e-3,
        clip_norm: float | None = None,
        bridge: LoopBridge | None = None,
        name: str = "zero",
    ) -> None:
        self.base = base
        self.config = config
        self.clip_norm = clip_norm
        if clip_norm is not None:
            clip_factor(0.0, clip_norm)
        self.set_lr(learning_rate)
        self._communicator = context.communicator.communicator if isinstance(context, ModelParallelContext) else context
        self._bridge = bridge
        self._name = name
        self._engine: ZeroEngine | None = None
        self._by_name: dict[str, Parameter] = {}
        self._micro_steps: Counter[str] = Counter()
        self._divisor = 1

    @property
    def engine(self) -> ZeroEngine:
        """The engine of the registered parameters, with overlap, norms, checkpoints and recovery."""
        if self._engine is None:
            raise UsageError("parameters: expected register_parameters() to be awaited first, on all ranks")
        return self._engine

    async def register_parameters(
        self, parameters: Iterable[Parameter], *, layers: Sequence[Stage[Any]] = ()
    ) -> tuple[Stage[Any], ...]:
        """Register ``parameters``, in the same order on all ranks, and return ``layers`` such that stage 3 gathers
        theirs.

        Raises ``UsageError`` on every rank, naming the first one whose parameters or settings differ.
        """
        if self._engine is not None:
            raise UsageError("parameters: expected register_parameters() once, got a second call")
        engine = ZeroEngine(
            parameters, self.base, self.config, self._communicator, bridge=self._bridge, name=self._name
        )
        sharded = tuple(engine.shard(layer) for layer in layers)
        await engine.prepare()
        self._engine = engine
        self._by_name = {parameter.name: parameter for parameter in engine.parameters}
        return sharded

    def close(self) -> None:
        """Release the name for another optimizer; this one takes no more steps."""
        if self._engine is not None:
            self._engine.close()

    def get_stage(self) -> ZeROStage:
        """Return the stage of sharding."""
        return self.config.stage

    # -- gradients ---------------------------------------------------------------------------------------------------

    def update_gradients(self, gradients: Mapping[str, Array]) -> None:
        """Use ``gradients``, by parameter, in the next step, in place of the parameters' own."""
        checked = {name: self._checked(name, gradient) for name, gradient in gradients.items()}
        for name, gradient in checked.items():
            parameter = self._by_name[name]
            parameter.zero_grad()
            parameter.accumulate(gradient)
            self._micro_steps[name] = 1

    def accumulate_grad(self, name: str, gradient: Array) -> None:
        """Add the gradient of one micro-batch."""
        checked = self._checked(name, gradient)
        self._by_name[name].accumulate(checked)
        self._micro_steps[name] += 1

    def apply_accumulated_grads(self, accumulation_steps: int) -> None:
        """Use the mean over ``accumulation_steps`` micro-batches in the next step.

        The division is done once, however often this is called.  Raises ``UsageError`` if a parameter has had more.
        """
        if accumulation_steps < 1:
            raise UsageError(f"accumulation_steps: expected 1 or more, got {accumulation_steps}")
        for name, count in self._micro_steps.items():
            if count > accumulation_steps:
                raise UsageError(
                    f"accumulation_steps: expected at least the {count} gradients that {name} has had, "
                    f"got {accumulation_steps}"
                )
        self._divisor = accumulation_steps

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.engine.zero_grad()
        self._micro_steps.clear()
        self._divisor = 1

    # -- steps -------------------------------------------------------------------------------------------------------

    async def optimizer_step(self) -> float:
        """Reduce gradients, clip and update; return their global norm before clipping.  Gradients are dropped
        afterwards.

        Raises ``NonFiniteValue`` on all ranks, with no parameter changed, unless all gradients are finite.
        """
        parameters = self.engine.parameters
        divides_first = any(is_narrow(stored_dtype(parameter)) for parameter in parameters)  # a sum may overflow
        if divides_first and self._divisor != 1:
            for parameter in parameters:
                parameter.scale_grad(1.0 / self._divisor)
        await self.engine.reduce()
        self.engine.scale(1.0 if divides_first else 1.0 / self._divisor)
        norm = await self.engine.global_norm()
        if self.clip_norm is not None and math.isfinite(norm):
            self.engine.scale(clip_factor(norm, self.clip_norm))
        try:
            await self.engine.step(self._learning_rate)
        except UsageError:  # on all ranks alike, with nothing changed
            self.zero_grad()
            raise
        self.zero_grad()
        return norm

    def get_lr(self) -> float:
        """Return the learning rate."""
        return self._learning_rate

    def set_lr(self, learning_rate: float) -> None:
        """Use ``learning_rate`` from the next step on."""
        if not (math.isfinite(learning_rate) and learning_rate >= 0.0):
            raise UsageError(f"learning_rate: expected a finite number >= 0, got {learning_rate}")
        self._learning_rate = learning_rate

    # -- parameters and memory ---------------------------------------------------------------------------------------

    async def gather_parameters(self, names: Iterable[str] | None = None) -> None:
        """Stage 3: give parameters ``names`` (None: all) their whole values.  Raises ``UsageError`` in other stages."""
        await self.engine.gather(names)

    def release_parameters(self) -> None:
        """Stage 3: keep only what this rank owns.  Raises ``UsageError`` in other stages."""
        self.engine.release()

    def get_memory_stats(self) -> ZeROMemoryStats:
        """Return the bytes that this rank currently holds."""
        return self.engine.memory_stats()

    def _checked(self, name: str, gradient: Array) -> Array:
        parameter = self._by_name.get(name)
        if parameter is None:
            raise UsageError(f"name: expected a registered parameter, got {name!r}")
        if gradient.shape != parameter.shape:
            raise UsageError(f"gradient of {name}: expected shape {list(parameter.shape)}, got {list(gradient.shape)}")
        return gradient.astype(parameter.dtype, copy=False)
