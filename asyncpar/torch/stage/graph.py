"""The autograd graph of a stage: where its input enters, and its backward pass in two halves (Qi et al. 2023).

Theory of operation.  In the graph of a module, the nodes that lead to the input make up its trunk; gradients of
parameters branch off there.  The first half runs only the trunk, and keeps the gradient that arrives at each node with
a branch.  The second half runs those nodes once more from there, for their branches alone; so nothing of the trunk is
computed twice, and every node sees the same numbers as in a whole backward pass.

A parameter that branches off at several nodes (a tied weight) would be reached from the first one of them through the
trunk, too.  Its whole gradient is computed in the first half and added in the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from asyncpar.errors import UsageError
from asyncpar.nn.parameter import Array
from asyncpar.torch.arrays import array_of, tensor_of


class _Enter(torch.autograd.Function):
    """The identity, which does not keep the memory of its input, unlike a leaf.

    In the backward pass it passes the gradient to ``sink``.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x: torch.Tensor, sink: list[torch.Tensor]) -> torch.Tensor:  # noqa: ARG004
        ctx.sink = sink
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.sink.append(gradient)
        return None, None, None


class StageInput:
    """The ``arguments`` and ``keywords`` of a module that come from ``x``.

    ``node`` and ``edge`` are where the gradient of ``x`` arrives, None if it has none.
    """

    def __init__(self, name: str, x: Any) -> None:
        self._name = name
        self._sink: list[torch.Tensor] = []
        self.node: Any = None
        self.edge: Any = None
        self.arguments: tuple[torch.Tensor, ...] = ()
        self.keywords: dict[str, torch.Tensor] = {}
        self._dtype: torch.dtype | None = None
        self._shape: tuple[int, ...] = ()
        if isinstance(x, tuple):
            self.arguments = tuple(tensor_of(one, f"input {place} of {name}") for place, one in enumerate(x))
        elif isinstance(x, Mapping):
            self.keywords = {key: tensor_of(one, f"input {key!r} of {name}") for key, one in x.items()}
        else:
            self.arguments = (self._enter(tensor_of(x, f"input of {name}")),)
        self._versions = [(one, one._version) for one in (*self.arguments, *self.keywords.values())]

    def _enter(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return x
        anchor = torch.zeros((), requires_grad=True)
        entered: torch.Tensor = _Enter.apply(anchor, x, self._sink)
        self.edge = get_gradient_edge(entered)
        self.node = self.edge.node
        self._dtype, self._shape = x.dtype, tuple(x.shape)
        return entered

    def check_unchanged(self) -> None:
        """Raise ``UsageError`` if the module has changed its input, which belongs to the caller; release the input."""
        is_changed = any(one._version != version for one, version in self._versions)
        self._versions.clear()
        self.arguments, self.keywords = (), {}
        if is_changed:
            raise UsageError(f"{self._name}: expected a module that leaves its input as it is, got one that changes it")

    def take_gradient(self) -> Array | None:
        """Return the accumulated gradient; zeros if none has arrived, None if the input has none."""
        return array_of(self._sink.pop()) if self._sink else self.zeros()

    def zeros(self) -> Array | None:
        """Return the gradient of an input that the output does not depend on; None if the input has none."""
        if self._dtype is None:
            return None
        zeros: np.ndarray[Any, Any] = array_of(torch.zeros(self._shape, dtype=self._dtype))
        return zeros


Node: TypeAlias = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A node of the trunk, where gradients arrive at ``edges``, and the parameters that branch off there alone."""

    node: Node
    edges: tuple[Any, ...]
    parameters: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The branches to run in the second half, in order, and the parameters whose gradients the first half computes."""

    branches: tuple[Branch, ...]
    tied: tuple[torch.Tensor, ...]


def split_graph(root: Any, entry: Node, trainable: Mapping[int, torch.Tensor]) -> Split | None:
    """Return the division of the backward pass from the edge ``root`` to the node ``entry``.

    ``trainable`` are parameters by ``id``.  None if no path leads from the root to ``entry``.
    """
    order, arrivals = _nodes_from(root)
    trunk = _leading_to(order, entry)
    if root.node not in trunk:
        return None
    kept: dict[Node, set[int]] = {}
    for node in order:
        if node not in trunk:
            own = trainable.get(id(getattr(node, "variable", None)))
            kept[node] = {id(own)} if own is not None else set().union(*(kept[child] for child in _children(node)))
    found = []
    uses: dict[int, int] = {}
    for node in reversed(order):
        if node in trunk:
            leaves = set().union(*(kept[child] for child in _children(node) if child not in trunk))
            for leaf in leaves:
                uses[leaf] = uses.get(leaf, 0) + 1
            found.append((node, leaves))
    tied = {leaf for leaf, count in uses.items() if count > 1}
    branches = []
    for node, leaves in found:
        own_leaves = leaves - tied
        if own_leaves:
            edges = tuple(GradientEdge(node, number) for number in sorted(arrivals[node]))
            own_tensors = tuple(tensor for key, tensor in trainable.items() if key in own_leaves)
            branches.append(Branch(node=node, edges=edges, parameters=own_tensors))
    return Split(branches=tuple(branches), tied=tuple(one for key, one in trainable.items() if key in tied))


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _nodes_from(root: Any) -> tuple[list[Node], dict[Node, set[int]]]:
    """Return all nodes, each after those that it leads to, and the inputs of them at which gradients arrive."""
    order: list[Node] = []
    arrivals: dict[Node, set[int]] = {root.node: {root.output_nr}}
    waiting: list[tuple[Node, bool]] = [(root.node, False)]
    seen: set[Node] = set()
    while waiting:
        node, is_expanded = waiting.pop()
        if is_expanded:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            for child, number in node.next_functions:
                if child is not None:
                    arrivals.setdefault(child, set()).add(number)
                    waiting.append((child, False))
    return order, arrivals


def _leading_to(order: list[Node], goal: Node) -> set[Node]:
    """Return the nodes of ``order`` from which a path leads to ``goal``, and ``goal``."""
    found: set[Node] = set()
    for node in order:
        if node is goal or any(child in found for child in _children(node)):
            found.add(node)
    return found
