"""What 3D-parallel training asks of a model: that it can be built stage by stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from asyncpar.config.parallel import ThreeDParallelismConfig
from asyncpar.config.slicing import split_layers
from asyncpar.nn.parameter import Array, Parameter
from asyncpar.nn.sequential import Sequential
from asyncpar.nn.stage import Stage
from asyncpar.nn.tensor.group import TensorGroup
from asyncpar.pipeline.schedule import Schedule

Loss: TypeAlias = Callable[[Array, Any], tuple[float, Array]]
"""Takes the last stage's output and targets; returns the summed loss, and the gradient of the output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlace:
    """Which part of the model: the blocks ``layers``, the embedding if ``is_first``, norm and head if ``is_last``.

    ``replica`` is the data-parallel rank.  ``storage`` is None, or the half precision in which parameters are stored.
    ``table`` is the first stage's token table where this rank has both ends of a model with tied embeddings.
    """

    layers: range
    is_first: bool
    is_last: bool
    replica: int = 0
    storage: np.dtype[Any] | None = None
    table: Parameter | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """The layers of a stage, in order.  Only ``blocks`` are recomputed or offloaded."""

    entry: Sequence[Stage[Any]] = ()
    blocks: Sequence[Stage[Any]] = ()
    head: Sequence[Stage[Any]] = ()
    table: Parameter | None = None
    """The token table, on the first stage of tied embeddings."""
    set_training: Callable[[bool], None] = lambda _: None
    """Turns on and off what layers do in training only."""

    def joined(self, wrap: Callable[[Stage[Any]], Stage[Any]] = lambda stage: stage) -> Sequential:
        """Return all layers as one stage, each as ``wrap`` returns it."""
        return Sequential([wrap(layer) for layer in (*self.entry, *self.blocks, *self.head)])


class ParallelModel(ABC):
    """A model of ``num_layers`` blocks between an entry and a head."""

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Number of blocks."""

    @property
    @abstractmethod
    def identity(self) -> Mapping[str, Any]:
        """What tells it from other models: JSON values, part of every checkpoint."""

    @abstractmethod
    def check(self, config: ThreeDParallelismConfig) -> None:
        """Raise ``UsageError`` where the model cannot be spread like that."""

    @abstractmethod
    def build(self, place: StagePlace, group: TensorGroup) -> StageLayers:
        """Return this rank's part of a stage; the first values do not depend on how the model is spread."""

    @abstractmethod
    def make_loss(self, group: TensorGroup, scale: Callable[[], float]) -> Loss:
        """Return the loss of one micro-batch, summed over what counts; gradients are times ``scale()``."""

    @abstractmethod
    def count(self, targets: Any) -> int:
        """Return how many terms the loss of a micro-batch has."""


def stage_ranges(config: ThreeDParallelismConfig, schedule: Schedule) -> tuple[range, ...]:
    """Return the layers of each virtual stage of ``schedule``, as many as ``config.layers_per_stage`` says."""
    sizes = split_layers(config.num_layers, schedule.layout.ranks, config.layers_per_stage)
    ends = list(accumulate(sizes))
    return tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))
