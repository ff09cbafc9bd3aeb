"""Training on several nodes: gradients are reduced inside each node first, then between nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from asyncpar.backends import BackendConfig, CommunicationRuntime
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.concurrency.bridge import LoopBridge
from asyncpar.errors import UsageError
from asyncpar.gradsync import HostGroups
from asyncpar.multinode.config import MultiNodeConfig
from asyncpar.multinode.flow import NodeFlow, replicated, sharded
from asyncpar.multinode.gradient_buffer import Array, GradientIntake
from asyncpar.multinode.registration import Environment, Registered, TrainerPhase, check_world, register
from asyncpar.multinode.statistics import MultiNodeStats
from asyncpar.nn import Parameter, Stage
from asyncpar.nn.optimizers import Rule
from asyncpar.nn.parameter import OnGradient
from asyncpar.zero.checkpointing import load_flow, save_flow, wanted_by
from asyncpar.zero.memory import MemoryUsage


class MultiNodeTrainer:
    """One rank of data-parallel training on ``config.num_nodes`` nodes.

    Use it as ``async with``, or await ``initialize_environment`` first and ``finalize`` last.  A step is
    ``update_gradients`` after the backward pass of each micro-step; then ``synchronize_gradients``, ``apply_gradients``
    and ``optimizer_step``.  All ranks make the same calls in the same order.  To send gradients during the last
    backward pass of a step, run it in the block of ``synchronization``, in place of its ``update_gradients`` and of
    ``synchronize_gradients``::

        async with trainer.synchronization() as ready:
            await worker.run(model.backward, saved, dy, ready)

    An error that leaves the block of one rank ends the next call of the others in this trainer, and is their reason.

    ``communicator`` joins all ranks.  Without one, the trainer opens ``config.comm_backend`` with ``backend`` settings,
    in ``runtime``, which stays open, or in one of its own, which it finalizes.  ``name`` distinguishes trainers that
    share a communicator, and belongs to one of them until it is finalized.
    """

    def __init__(
        self,
        config: MultiNodeConfig,
        rule: Rule,
        *,
        communicator: Communicator | None = None,
        runtime: CommunicationRuntime | None = None,
        backend: BackendConfig | None = None,
        name: str = "multinode",
    ) -> None:
        self.config = config
        self._rule = rule
        self._environment = Environment(config, communicator, runtime=runtime, backend=backend)
        self._name = name
        self._groups: HostGroups | None = None
        self._registered: Registered | None = None
        self._is_finalized = False
        self._steps = self._micro_steps = 0

    async def __aenter__(self) -> Self:
        await self.initialize_environment()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self._registered is not None and not self._is_finalized:
            await self._registered.flow.leave(error)
        await self.finalize()

    # -- beginning and end -------------------------------------------------------------------------------------------

    async def initialize_environment(self) -> None:
        """Join the world, and check that all ranks are at the places of their configurations.

        Raises ``UsageError``, on every rank, unless the configurations fit the world and each other, and the errors of
        opening the backend.
        """
        if self._groups is not None or self._is_finalized:
            raise UsageError("initialize_environment: it was awaited before")
        world = await self._environment.open()
        try:
            world.claim(self._name, self)
            await check_world(self.config, world, (f"rule {self._rule}",), key=f"{self._name}/environment")
        except BaseException:
            world.release(self._name, self)
            await self._environment.close()
            raise
        self._groups = HostGroups.of(world, self.config.nodes())

    async def register_parameters(self, parameters: Iterable[Parameter]) -> None:
        """Train ``parameters``, initialized with the values of rank 0; in the same order on all ranks.

        Raises ``UsageError``, on every rank, if names, shapes, dtypes or order differ.
        """
        if self.config.zero_config.stage.shards_parameters:
            raise UsageError("register_parameters: stage 3 gathers parameters layer by layer; await register_layers")
        await self._register("register_parameters", parameters, ())

    async def register_layers(
        self, layers: Sequence[Stage[Any]], *, bridge: LoopBridge | None = None
    ) -> tuple[Stage[Any], ...]:
        """Train the parameters of ``layers``, and return the layers to compute with, in the order of the forward pass.

        In stage 3 their parameters exist only while they compute, in a compute thread, which ``bridge`` belongs to; in
        earlier stages the result is ``layers`` themselves.  Otherwise like ``register_parameters``.
        """
        parameters = [parameter for layer in layers for parameter in layer.parameters()]
        return await self._register("register_layers", parameters, layers, bridge=bridge)

    async def barrier(self) -> None:
        """Wait until all ranks have reached the barrier."""
        await self._open("barrier").world.barrier(key=f"{self._name}/barrier")

    async def finalize(self) -> None:
        """Free all buffers, and leave the world if the trainer has opened it.  Idempotent; waits for no other ranks."""
        self._is_finalized = True
        if self._groups is not None:
            self._groups.world.release(self._name, self)
        if self._registered is not None:
            self._registered.intake.clear()
            self._registered = None
        self._groups = None
        await self._environment.close()

    # -- a step ------------------------------------------------------------------------------------------------------

    def update_gradients(self, gradients: Mapping[str, Array] | None = None) -> None:
        """Take the gradients of one micro-step: ``gradients`` by name, or those of the parameters, which are removed.

        They must be of this micro-step alone.  Callable from the compute thread.
        """
        known = self._at(TrainerPhase.GATHERING, "update_gradients")
        known.intake.add(gradients)

    async def synchronize_gradients(self) -> None:
        """Replace the sums over micro-steps by the mean over all ranks.

        Raises ``UsageError``, on every rank, unless all ranks have taken equally many micro-steps, at least one.  An
        error on any rank raises on every rank, and the gradients of the step are dropped.
        """
        async with self._synchronizing("synchronize_gradients"):
            pass

    @asynccontextmanager
    async def synchronization(self) -> AsyncIterator[OnGradient]:
        """Take the last micro-step of a step in this block, and synchronize concurrently.

        Yields a function to call for each parameter whose gradient is final, from any thread; the others are final when
        the block is left.  Without ``overlap_comm_compute`` nothing is sent before that.
        """
        async with self._synchronizing("synchronization", opens=True) as (intake, ready):
            yield partial(intake.take, report=ready)
            intake.complete()

    async def apply_gradients(self, accumulation_steps: int = 1) -> None:
        """Divide the synchronized gradients by the number of micro-steps, and pass them to ``optimizer_step``.

        Synchronizes first if that was not done in this step.  If gradients are not sharded, parameters hold them
        afterwards.  Raises ``UsageError`` unless ``accumulation_steps`` micro-steps were taken.
        """
        await self._synchronize_unless_done("apply_gradients")
        known = self._at(TrainerPhase.SYNCHRONIZED, "apply_gradients")
        taken = known.intake.micro_steps
        if accumulation_steps != taken:
            raise UsageError(f"accumulation_steps: expected {taken}, as were taken in, got {accumulation_steps}")
        await known.flow.apply()
        self._micro_steps += taken
        known.phase = TrainerPhase.APPLIED

    async def optimizer_step(self, learning_rate: float, *, clip_norm: float | None = None) -> float:
        """Move parameters against their gradients, which are zero afterwards; return the global norm of gradients.

        A larger norm than ``clip_norm`` is scaled down to it: the norm is that of the means over all ranks.  Raises
        ``NonFiniteValue``, on every rank and with nothing changed, for gradients that are not finite.

        Synchronizes first if that was not done in this step, and divides by the number of micro-steps if
        ``apply_gradients`` was not called.
        """
        await self._synchronize_unless_done("optimizer_step")
        known = self._known("optimizer_step")
        if known.phase is TrainerPhase.SYNCHRONIZED:
            await self.apply_gradients(known.intake.micro_steps)
        known = self._at(TrainerPhase.APPLIED, "optimizer_step")
        known.phase = TrainerPhase.GATHERING
        try:
            norm = await known.flow.step(learning_rate, clip_norm=clip_norm)
        finally:
            known.drop()
        self._steps += 1
        return norm

    # -- checkpoints -------------------------------------------------------------------------------------------------

    async def save_checkpoint(
        self, folder: Path | str, *, extra: Mapping[str, Any] | None = None, keep: int | None = None
    ) -> Path:
        """Save the complete training state, with ``extra``, and return the checkpoint's folder.

        Call it between steps; all ranks share ``folder``, in which the last ``keep`` checkpoints stay (None: all).  See
        ``asyncpar.checkpoint.save_checkpoint``.  Compression residuals and the order of buckets are part of it: with
        the same configuration training continues with the same bits.  With another one residuals are summed up and
        redistributed; those that cannot be are named in a logged warning.
        """
        known = self._known("save_checkpoint")
        known.check_between_steps("save_checkpoint")
        await known.flow.resume()
        return await save_flow(
            Path(folder),
            known.flow.inner,
            step=self._steps,
            run={"steps": self._steps, "micro_steps": self._micro_steps},
            layout=known.layout,
            model=known.identity,
            communicator=self._open("save_checkpoint").world,
            extra=extra,
            keep=keep,
        )

    async def load_checkpoint(self, folder: Path | str) -> dict[str, Any]:
        """Continue from the last checkpoint in ``folder``, of any numbers of nodes, ranks and stage; return its
        ``extra``.

        Call it between steps.  Raises on all ranks, with parameters unchanged: see
        ``asyncpar.checkpoint.load_checkpoint``.
        """
        known = self._known("load_checkpoint")
        known.check_between_steps("load_checkpoint")
        await known.flow.resume()
        flow, world = known.flow.inner, self._open("load_checkpoint").world
        loaded = await load_flow(
            Path(folder),
            wanted_by(flow),
            flow.parameters,
            layout=known.layout,
            model=known.identity,
            communicator=world,
        )
        await flow.restore(loaded.arrays, loaded.run["steps"], loaded.skipped)
        loaded.restore_reduction(flow)
        self._steps, self._micro_steps = loaded.run["steps"], loaded.run["micro_steps"]
        return loaded.extra

    # -- figures -----------------------------------------------------------------------------------------------------

    def get_memory_usage(self) -> MemoryUsage:
        """Return the bytes of the arrays that this rank currently holds."""
        known = self._known("get_memory_usage")
        return replace(known.flow.inner.memory(), accumulation=known.intake.buffer.nbytes)

    def get_training_stats(self) -> MultiNodeStats:
        """Return a snapshot of this rank's statistics."""
        known, config = self._known("get_training_stats"), self.config
        return MultiNodeStats(
            num_nodes=config.num_nodes,
            devices_per_node=config.devices_per_node,
            node_rank=config.node_rank,
            local_rank=config.local_rank,
            global_rank=config.global_rank,
            zero_stage=config.zero_config.stage,
            communication_backend=str(config.comm_backend),
            gradient_compression_enabled=config.compresses,
            memory_savings=known.flow.memory_savings,
            parameter_count=sum(parameter.size for parameter in known.parameters),
            steps=self._steps,
            micro_steps=self._micro_steps,
            memory=self.get_memory_usage(),
            compression=known.flow.compression,
            synchronization=known.flow.statistics(),
        )

    def should_save_checkpoint(self) -> bool:
        """Return whether this rank holds checkpoint state that no rank before it has.

        That is rank 0 alone if nothing is sharded, else every rank that owns some of the values.  ``save_checkpoint``
        handles that by itself, and is called by all ranks.
        """
        return bool(self.config.is_master) or self._known("should_save_checkpoint").flow.owns_part

    @property
    def groups(self) -> HostGroups:
        """The groups of all ranks, of this node, and of the leaders, which are the first ranks of nodes."""
        return self._open("groups")

    # -- inside ------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _synchronizing(
        self, what: str, *, opens: bool = False
    ) -> AsyncIterator[tuple[GradientIntake, OnGradient]]:
        """Synchronize around a block, which with ``opens`` is one more micro-step."""
        known = self._at(TrainerPhase.GATHERING, what)
        known.phase = TrainerPhase.SYNCHRONIZING
        try:
            if opens:
                known.intake.open()
            async with known.flow.run() as ready:
                yield known.intake, ready
        except BaseException:
            known.drop()
            known.phase = TrainerPhase.GATHERING
            raise
        known.phase = TrainerPhase.SYNCHRONIZED

    async def _synchronize_unless_done(self, what: str) -> None:
        if self._known(what).phase is TrainerPhase.GATHERING:
            async with self._synchronizing(what):
                pass

    async def _register(
        self,
        what: str,
        parameters: Iterable[Parameter],
        layers: Sequence[Stage[Any]],
        *,
        bridge: LoopBridge | None = None,
    ) -> tuple[Stage[Any], ...]:
        groups, config = self._open(what), self.config
        if self._registered is not None:
            raise UsageError(f"{what}: parameters are registered already")
        chosen = await register(parameters, groups, key=f"{self._name}/parameters")
        intake = GradientIntake(chosen)
        flow: NodeFlow
        if config.zero_config.stage.shards_states:
            flow, layers = await sharded(intake, layers, self._rule, config, groups, bridge=bridge, name=self._name)
        else:
            flow = replicated(intake, self._rule, config, groups, name=self._name)
        self._registered = Registered(parameters=chosen, intake=intake, flow=flow, layout=", ".join(config.describe()))
        return tuple(layers)

    def _open(self, what: str) -> HostGroups:
        if self._groups is None:
            state = "after finalize" if self._is_finalized else "before initialize_environment"
            raise UsageError(f"{what}: expected an open environment, but it is called {state}")
        return self._groups

    def _known(self, what: str) -> Registered:
        self._open(what)
        if self._registered is None:
            raise UsageError(f"{what}: expected registered parameters; await register_parameters first")
        return self._registered

    def _at(self, phase: TrainerPhase, what: str) -> Registered:
        known = self._known(what)
        known.check(phase, what)
        return known
