"""Any ``torch.nn.Module`` as a stage for ``PipelineExecutor``, ``ZeroEngine`` and our optimizers.

Theory of operation.  ``forward`` runs the module and keeps autograd's graph, whose memory is in ``saved`` as arrays
(see ``saved_tensors``), so several micro-batches may be in flight, counted or on disk.  ``backward`` runs the graph in
the calling thread; autograd adds to the gradients of parameters where our parameters have them (see ``parameters``).
The two halves of a split backward pass run disjoint parts of the graph (see ``graph``).

torch's layers draw random numbers from one generator per process.  A pass with a seed sets the generator and restores
it afterwards, so the random numbers of a module do not depend on other modules or on the program.  Passes of one
process take turns for that (``alone``).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch.autograd.graph import get_gradient_edge

from asyncpar.errors import UsageError
from asyncpar.nn.parameter import Array, OnGradient, Parameter
from asyncpar.nn.stage import Deferred, Stage, report
from asyncpar.torch.arrays import array_of, tensor_of
from asyncpar.torch.stage.graph import Branch, StageInput, split_graph
from asyncpar.torch.stage.parameters import BoundParameter, ModuleState
from asyncpar.torch.stage.saved_tensors import Blocks, SavedTensors

_PATIENCE: Final = 60.0
_TURN = threading.Lock()
"""Held while torch's generator, of which each process has one, is set."""


@contextmanager
def alone(what: str, *, patience: float = _PATIENCE) -> Iterator[None]:
    """Hold torch's generator exclusively in the block.

    Raises ``UsageError`` naming ``what`` instead of waiting forever, as modules that wait for each other would.
    """
    if not _TURN.acquire(timeout=patience):
        raise UsageError(
            f"{what}: another module of this process has used torch's random numbers for {patience:g} s; modules that "
            "wait for each other within one process cannot draw any: pass seed=None to their stages"
        )
    try:
        yield
    finally:
        _TURN.release()


@contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Seed torch's generator in the block, and restore it afterwards; for a block of ``alone``."""
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


def torch_loss(function: Callable[[Any, Any], Any], *, scale: float = 1.0) -> Callable[[Any, Any], tuple[float, Array]]:
    """Return ``function(output, target)`` of tensors as the ``loss`` of a ``PipelineExecutor``.

    ``scale`` multiplies the gradient, not the loss: one over the number of micro-batches makes gradients of equal
    micro-batches add up to those of the mean loss.  A target may be a tuple of arrays.
    """
    if isinstance(function, torch.nn.Module) and any(one.requires_grad for one in function.parameters()):
        raise UsageError("function: expected a loss without parameters, got one that has some; put it into the module")

    def loss(output: Any, target: Any) -> tuple[float, Array]:
        with torch.inference_mode(False), torch.enable_grad():
            y = tensor_of(output, "output").requires_grad_()
            wanted = tuple(map(tensor_of, target)) if isinstance(target, tuple) else tensor_of(target, "target")
            value = function(y, wanted)
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                raise UsageError(f"function: expected one number as loss, got {got}")
            (gradient,) = torch.autograd.grad(value, [y], torch.full_like(value, scale), allow_unused=True)
        if gradient is None:
            gradient = torch.zeros_like(y)
        return float(value.detach()), array_of(gradient, "gradient of the loss")

    return loss


class Graph:
    """The graph of one forward pass; ``root`` is None if nothing in it has a gradient."""

    __slots__ = ("dtype", "entry", "root", "shape", "tensors")

    def __init__(self, tensors: SavedTensors, entry: StageInput, y: torch.Tensor) -> None:
        self.tensors = tensors
        self.entry = entry
        self.root = get_gradient_edge(y) if y.requires_grad else None
        self.shape = tuple(y.shape)
        self.dtype = y.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSaved:
    """The graph of a forward pass and the memory that it needs."""

    graph: Graph
    blocks: Blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Later:
    """The input of the second half of a backward pass."""

    graph: Graph
    blocks: Blocks
    branches: tuple[tuple[Branch, list[Array | None]], ...]
    """Each branch with the gradients that arrive there."""
    ready: tuple[tuple[torch.Tensor, Array], ...]
    """Parameters with gradients that were computed in the first half."""


class ModuleStage(Stage[ModuleSaved]):
    """``module``, which takes and returns one tensor in the memory of the CPU.

    Arrays and tensors share memory.  The input is an array, or, for the first stage, a tuple or dict of arrays that
    become the arguments of ``module``; then, and for integers, there is no gradient of the input.  Outputs other than
    one tensor raise ``UsageError``, as does a module that changes its input in place.

    ``parameters`` are those that require gradients when the stage is created, with their names in ``module`` after
    ``name`` and a dot, each once however often it is used, in the order of the module; others are left alone.  To train
    parts that share a parameter on one rank, make their stages by ``module_stages``.

    Passes in training mode (``module.train()``) draw random numbers determined by ``seed``, ``name`` and the number of
    passes before, so they can be repeated (``Recomputed``); passes of one process take turns for it.  Modules without
    randomness can pass ``seed=None``.  A split backward pass gives the same bits as a whole one.  Random numbers that
    ``module`` draws from other sources than torch's generator are not repeated.

    ``shared`` are parameters of the module that belong to another stage, which reports them.
    """

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        *,
        seed: int | None = 0,
        shared: Sequence[BoundParameter] = (),
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise UsageError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
        if seed is not None and seed < 0:
            raise UsageError(f"seed: expected 0 or more, or None, got {seed}")
        self.name = name
        self.module = module
        self._state = ModuleState(name, module, shared, has_seed=seed is not None)
        self._generator: np.random.Generator | None = None
        if seed is not None:
            number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
            self._generator = np.random.default_rng([seed, number])

    def parameters(self) -> tuple[Parameter, ...]:
        return self._state.parameters

    def generators(self) -> tuple[np.random.Generator, ...]:
        return () if self._generator is None else (self._generator,)

    # -- forward -------------------------------------------------------------------------------------------------------

    def forward(self, x: Any) -> tuple[Array, ModuleSaved]:
        return self._forward(x, is_again=False)

    def forward_again(self, x: Any) -> tuple[Array, ModuleSaved]:
        """Compute like ``forward``, but leave buffers, such as running averages, unchanged."""
        return self._forward(x, is_again=True)

    def _forward(self, x: Any, *, is_again: bool) -> tuple[Array, ModuleSaved]:
        self._state.check()
        seed = self._draw_seed()
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            entry = StageInput(self.name, x)
            if seed is not None:
                stack.enter_context(alone(self.name))
                stack.enter_context(drawing(seed))
            buffers = self._state.spare_buffers() if is_again else {}
            tensors = SavedTensors(self.name, (*self._state.tensors(), *buffers.values()))
            with tensors.saving():
                y = self._state.call(buffers, entry.arguments, entry.keywords)
        entry.check_unchanged()
        if not isinstance(y, torch.Tensor):
            raise UsageError(f"{self.name}: expected a module that returns one tensor, got {type(y).__name__}")
        graph = Graph(tensors, entry, y)
        return array_of(y, f"output of {self.name}"), ModuleSaved(graph=graph, blocks=tensors.take_blocks())

    def _draw_seed(self) -> int | None:
        if self._generator is None or not self.module.training:
            return None
        return int(self._generator.integers(1 << 63))

    # -- backward ------------------------------------------------------------------------------------------------------

    def backward(
        self, saved: ModuleSaved, dy: Array, on_gradient: OnGradient | None = None, deferred: Deferred | None = None
    ) -> Array | None:
        graph = saved.graph
        gradient = self._check_gradient(graph, dy)
        if deferred is not None:
            return self._backward_input(saved, gradient, deferred)
        with self._reporting(on_gradient), self._running(), graph.tensors.reading(saved.blocks):
            if graph.root is not None:
                torch.autograd.backward(graph.root, gradient)
        return graph.entry.take_gradient()

    def _backward_input(self, saved: ModuleSaved, gradient: torch.Tensor, deferred: Deferred) -> Array | None:
        graph, node = saved.graph, saved.graph.entry.node
        split = None if graph.root is None or node is None else split_graph(graph.root, node, self._state.trainable)
        if split is None:  # nothing but weights
            deferred.append(partial(self._backward_all, saved, array_of(gradient)))
            return graph.entry.zeros()
        arrivals = [edge for branch in split.branches for edge in branch.edges]
        with self._running(), graph.tensors.reading_once(saved.blocks, [branch.node for branch in split.branches]):
            dx, *found = torch.autograd.grad(
                [graph.root],
                [graph.entry.edge, *arrivals, *split.tied],
                [gradient],
                retain_graph=True,
                allow_unused=True,
            )
        arrived = iter(found[: len(arrivals)])
        later = Later(
            graph=graph,
            blocks=graph.tensors.needed_later(saved.blocks),
            branches=tuple((branch, [_seen(next(arrived)) for _ in branch.edges]) for branch in split.branches),
            ready=tuple(
                (tensor, array_of(one))
                for tensor, one in zip(split.tied, found[len(arrivals) :], strict=True)
                if one is not None
            ),
        )
        deferred.append(partial(self._backward_weight, later))
        return graph.entry.zeros() if dx is None else array_of(dx)

    def _backward_all(self, saved: ModuleSaved, gradient: Array, on_gradient: OnGradient | None) -> None:
        self.backward(saved, gradient, on_gradient)

    def _backward_weight(self, later: Later, on_gradient: OnGradient | None) -> None:
        with self._reporting(on_gradient), self._running(), later.graph.tensors.reading(later.blocks):
            for branch, arrived in later.branches:
                some = [(edge, one) for edge, one in zip(branch.edges, arrived, strict=True) if one is not None]
                if some:
                    edges, gradients = [edge for edge, _ in some], [tensor_of(one) for _, one in some]
                    torch.autograd.backward(edges, gradients, inputs=list(branch.parameters))
            for tensor, gradient in later.ready:
                self._state.trainable_parameter(tensor).accumulate(gradient)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Set up a run of the graph: layers that recompute parts draw random numbers there."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            if self._generator is not None and self.module.training:
                stack.enter_context(alone(self.name))
            yield

    @contextmanager
    def _reporting(self, on_gradient: OnGradient | None) -> Iterator[None]:
        """Report parameters once autograd is done with them, and those that it does not reach at the end."""
        if on_gradient is None:
            yield
            return
        waiting = {parameter.name: parameter for parameter in self._state.reported}

        def notify(name: str, _: torch.Tensor) -> None:
            if waiting.pop(name, None) is not None:
                on_gradient(name)

        hooks = [
            one.tensor.register_post_accumulate_grad_hook(partial(notify, one.name)) for one in self._state.reported
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        report(reversed(waiting.values()), on_gradient)

    def _check_gradient(self, graph: Graph, dy: Any) -> torch.Tensor:
        gradient = tensor_of(dy, f"output gradient of {self.name}")
        if tuple(gradient.shape) != graph.shape:
            raise UsageError(
                f"{self.name}: expected an output gradient of shape {graph.shape}, got {tuple(gradient.shape)}"
            )
        return gradient if gradient.dtype == graph.dtype else gradient.to(graph.dtype)


def module_stages(parts: Mapping[str, torch.nn.Module], *, seed: int | None = 0) -> tuple[ModuleStage, ...]:
    """Return stages of ``parts`` by name, in their order, for one rank.

    A parameter that several of them use is one parameter, of the first one, which reports it.  Its gradient is final if
    that stage's backward pass is the last one of them, as in all schedules that do not split backward passes.

    ``seed`` is that of each stage.
    """
    stages: list[ModuleStage] = []
    for name, module in parts.items():
        known = [one for stage in stages for one in stage.parameters() if isinstance(one, BoundParameter)]
        stages.append(ModuleStage(name, module, seed=seed, shared=known))
    return tuple(stages)


def _seen(gradient: torch.Tensor | None) -> Array | None:
    return None if gradient is None else array_of(gradient)
