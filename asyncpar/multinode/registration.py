"""The world of a trainer, and the registration of its parameters: equal on all ranks before training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from asyncpar.agreement.exchanges import compare
from asyncpar.backends import BackendConfig, CommunicationBackend, CommunicationRuntime
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError
from asyncpar.gradsync import HostGroups
from asyncpar.multinode.config import MultiNodeConfig
from asyncpar.multinode.flow import NodeFlow
from asyncpar.multinode.gradient_buffer import GradientIntake
from asyncpar.nn import Parameter
from asyncpar.nn.half import stored_value
from asyncpar.nn.optimizers import distinct


async def register(parameters: Iterable[Parameter], groups: HostGroups, *, key: str) -> tuple[Parameter, ...]:
    """Return the parameters, each once, with the values of rank 0 of the world on all ranks.

    Raises ``UsageError``, on every rank, if names, shapes, dtypes or their order differ, and for parameters that cannot
    be trained here.
    """
    given = tuple(parameters)
    problem = _problem(given)
    chosen = () if problem is not None else distinct(given)
    lines = tuple(_describe(parameter) for parameter in chosen)
    await compare(groups.world, (*lines, *([] if problem is None else [f"an error: {problem}"])), key=key)
    if problem is not None:
        raise UsageError(problem)
    await _broadcast(chosen, groups, key=f"{key}/values")
    return chosen


async def _broadcast(parameters: Sequence[Parameter], groups: HostGroups, *, key: str) -> None:
    """Broadcast the values of rank 0 to the leaders of all nodes, then inside each node."""
    for parameter in parameters:
        if groups.between is not None:
            await groups.between.broadcast(stored_value(parameter), key=key)
        await groups.inside.broadcast(stored_value(parameter), key=key)


def _problem(parameters: Sequence[Parameter]) -> str | None:
    try:
        chosen = distinct(parameters)
    except UsageError as error:
        return str(error)
    for parameter in chosen:
        if not parameter.slice.is_whole:
            return (
                f"parameter {parameter.name}: expected a whole tensor, got a slice of {parameter.slice.global_shape}; "
                "sums over slices mean nothing: train tensor-parallel models with ThreeDParallelismCoordinator"
            )
        if parameter.is_released:
            return f"parameter {parameter.name}: expected a value, got one that is released"
        if not stored_value(parameter).flags.writeable:
            return f"parameter {parameter.name}: expected a value that can be written to, got one that is read-only"
    return None


def _describe(parameter: Parameter) -> str:
    return f"{parameter.name} {stored_value(parameter).dtype}{list(parameter.shape)}"


class Environment:
    """The world of ``communicator``, or one opened by ``config.comm_backend``."""

    def __init__(
        self,
        config: MultiNodeConfig,
        communicator: Communicator | None,
        *,
        runtime: CommunicationRuntime | None,
        backend: BackendConfig | None,
    ) -> None:
        if communicator is not None and (runtime is not None or backend is not None):
            raise UsageError("communicator: expected None beside runtime or backend, whose world would not be used")
        if communicator is not None and str(config.comm_backend) != CommunicationBackend.NATIVE:
            raise UsageError(
                f"comm_backend: expected {CommunicationBackend.NATIVE}, the default, beside a communicator, as no "
                f"backend is opened, got {config.comm_backend!r}"
            )
        self._config = config
        self._communicator = communicator
        self._runtime = runtime
        self._settings = backend or BackendConfig()
        self._opened: CommunicationRuntime | None = None

    async def open(self) -> Communicator:
        """Return the communicator over all ranks.  Raises the errors of opening the backend."""
        if self._communicator is not None:
            return self._communicator
        config = self._config
        settings = replace(self._settings, rank=config.global_rank, world_size=config.world_size())
        runtime = self._runtime or CommunicationRuntime()
        try:
            group = await runtime.initialize(config.comm_backend, settings)
        except BaseException:
            if self._runtime is None:
                await runtime.finalize()
            raise
        self._opened = runtime if self._runtime is None else None
        return group.communicator

    async def close(self) -> None:
        """Leave a world that was opened here.  Idempotent."""
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.finalize()


class TrainerPhase(Enum):
    """The phases of a step; the values name the calls that may follow."""

    GATHERING = "update_gradients or synchronize_gradients"
    SYNCHRONIZING = "nothing, until the synchronization under way has ended"
    SYNCHRONIZED = "apply_gradients or optimizer_step"
    APPLIED = "optimizer_step"


@dataclass(slots=True, kw_only=True)
class Registered:
    """The registered parameters and their flow.  ``layout`` describes how, and over which ranks, gradients are
    reduced.
    """

    parameters: tuple[Parameter, ...]
    intake: GradientIntake
    flow: NodeFlow
    layout: str
    phase: TrainerPhase = TrainerPhase.GATHERING

    @property
    def identity(self) -> dict[str, Any]:
        """JSON values that differ for different models."""
        return {"parameters": [[parameter.name, list(parameter.shape)] for parameter in self.parameters]}

    def check(self, phase: TrainerPhase, what: str) -> None:
        """Raise ``UsageError`` unless ``what`` may be called now."""
        if self.phase is not phase:
            raise UsageError(f"{what}: expected {self.phase.value} next")

    def check_between_steps(self, what: str) -> None:
        """Raise ``UsageError`` in the middle of a step."""
        self.check(TrainerPhase.GATHERING, what)
        if self.intake.micro_steps:
            raise UsageError(f"{what}: expected no gradients, got those of {self.intake.micro_steps} micro-steps")

    def drop(self) -> None:
        """Forget all gradients."""
        self.intake.drop()
        self.flow.forget()


async def check_world(config: MultiNodeConfig, world: Communicator, settings: tuple[str, ...], *, key: str) -> None:
    """Raise ``UsageError``, on every rank, unless ``config`` fits ``world`` and is the same on all its ranks.

    ``settings`` must be equal, too.  All ranks of ``world`` call it.
    """
    problem = misfit(config, world)
    lines = (*config.describe(), *settings, "its place in the world" if problem is None else f"an error: {problem}")
    await compare(world, lines, key=key)
    if problem is not None:
        raise UsageError(problem)


def misfit(config: MultiNodeConfig, world: Communicator) -> str | None:
    """Describe the fault of ``config`` in ``world``; None if there is none."""
    if config.world_size != world.size:
        return (
            f"num_nodes, devices_per_node: expected {world.size} ranks in all, as the communicator has, "
            f"got {config.num_nodes} * {config.devices_per_node}"
        )
    if config.global_rank != world.rank:
        return f"global_rank: expected {world.rank}, the communicator's rank, got {config.global_rank}"
    for number, node in enumerate(config.nodes()):
        firsts = [min(here) for host in world.hosts if (here := set(host) & set(node))]
        if len(firsts) > 1:
            return (
                f"devices_per_node: expected the ranks of node {number}, {_listed(node)}, on one host, "
                f"but rank {firsts[0]} and rank {firsts[1]} are on two"
            )
    return None


def _listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]} to {ranks[-1]}"
