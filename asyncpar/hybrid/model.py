"""The interface of models that are built stage by stage, and the transformer that implements it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from asyncpar.core.config.parallel import ThreeDParallelismConfig
from asyncpar.core.config.slicing import split_layers
from asyncpar.errors import UsageError
from asyncpar.nn.half import HalfInitializer
from asyncpar.nn.parameter import Array, Parameter
from asyncpar.nn.sequential import Sequential
from asyncpar.nn.stage import Stage
from asyncpar.nn.tensor.group import TensorGroup
from asyncpar.nn.tensor.loss import vocab_parallel_cross_entropy
from asyncpar.nn.tensor.transformer import build_stage
from asyncpar.nn.transformer import TransformerConfig
from asyncpar.pipeline.schedule import Schedule

Loss: TypeAlias = Callable[[Array, Any], tuple[float, Array]]
"""Takes the last stage's output and targets; returns the summed loss, and the gradient of the output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlace:
    """A part of the model: the blocks ``layers``, the embedding if ``is_first``, norm and head if ``is_last``.

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
    """Switches the training behaviour of layers on and off."""

    def joined(self, wrap: Callable[[Stage[Any]], Stage[Any]] = lambda stage: stage) -> Sequential:
        """Return all layers as one stage, each wrapped by ``wrap``."""
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
        """JSON values that differ for different models; part of every checkpoint."""

    @abstractmethod
    def check(self, config: ThreeDParallelismConfig) -> None:
        """Raise ``UsageError`` if the model cannot be distributed like that."""

    @abstractmethod
    def build(self, place: StagePlace, group: TensorGroup) -> StageLayers:
        """Return this rank's part of a stage; initial values do not depend on the distribution of the model."""

    @abstractmethod
    def make_loss(self, group: TensorGroup, scale: Callable[[], float]) -> Loss:
        """Return the loss of one micro-batch, summed over terms that count; gradients are multiplied by ``scale()``."""

    @abstractmethod
    def count(self, targets: Any) -> int:
        """Return the number of terms in the loss of a micro-batch."""


def stage_ranges(config: ThreeDParallelismConfig, schedule: Schedule) -> tuple[range, ...]:
    """Return the layers of each virtual stage of ``schedule``, as many as in ``config.layers_per_stage``."""
    sizes = split_layers(config.num_layers, schedule.layout.ranks, config.given_layers)
    ends = list(accumulate(sizes))
    return tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerModel(ParallelModel):
    """The language model of ``config``.

    With ``sequence_parallel`` tensor-parallel ranks also split the activations between their layers (Korthikanti et al.
    2022).  Targets equal to ``ignore_index``, such as padding, do not count.
    """

    config: TransformerConfig
    sequence_parallel: bool = False
    ignore_index: int | None = None

    @property
    def num_layers(self) -> int:
        return self.config.layers

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"kind": "transformer", **asdict(self.config)}

    def check(self, config: ThreeDParallelismConfig) -> None:
        model = self.config
        if config.num_layers != model.layers:
            raise UsageError(f"num_layers: expected the model's {model.layers} layers, got {config.num_layers}")
        config.validate(config.world_size, heads=model.heads)
        for name, length in (("vocabulary", model.vocabulary), ("mlp_hidden", model.hidden)):
            if length < config.tp_size:
                raise UsageError(f"tp_size: expected at most {name} = {length}, got {config.tp_size}")

    def build(self, place: StagePlace, group: TensorGroup) -> StageLayers:
        initializer = None
        if place.storage is not None:
            initializer = HalfInitializer.from_seed(self.config.seed, self.config.dtype, place.storage)
        stage = build_stage(
            self.config,
            layers=place.layers,
            is_first=place.is_first,
            is_last=place.is_last,
            group=group,
            sequence_parallel=self.sequence_parallel and group.size > 1,
            replica=place.replica,
            table=place.table,
            initializer=initializer,
        )
        return StageLayers(
            entry=stage.entry,
            blocks=stage.blocks,
            head=stage.head,
            table=stage.table,
            set_training=stage.set_training,
        )

    def make_loss(self, group: TensorGroup, scale: Callable[[], float]) -> Loss:
        def loss(logits: Array, targets: Any) -> tuple[float, Array]:
            return vocab_parallel_cross_entropy(
                logits,
                np.asarray(targets),
                vocabulary=self.config.vocabulary,
                group=group,
                scale=scale(),
                ignore_index=self.ignore_index,
            )

        return loss

    def count(self, targets: Any) -> int:
        counted = np.asarray(targets)
        return int(counted.size if self.ignore_index is None else (counted != self.ignore_index).sum())
