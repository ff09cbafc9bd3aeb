"""The transformer as a model that can be trained in parallel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from asyncpar.config.parallel import ThreeDParallelismConfig
from asyncpar.errors import UsageError
from asyncpar.hybrid.model import Loss, ParallelModel, StageLayers, StagePlace
from asyncpar.nn.half import HalfInitializer
from asyncpar.nn.parameter import Array
from asyncpar.nn.tensor.group import TensorGroup
from asyncpar.nn.tensor.loss import vocab_parallel_cross_entropy
from asyncpar.nn.tensor.transformer import build_stage
from asyncpar.nn.transformer import TransformerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerModel(ParallelModel):
    """The language model of ``config``.

    With ``sequence_parallel`` tensor-parallel ranks also split what lies between their layers (Korthikanti et al.
    2022).  Targets that are ``ignore_index`` do not count: padding.
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
