"""A pipeline stage of a transformer, split over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from asyncpar.core.array_pool import ArrayPool
from asyncpar.core.config.placement import UNPLACED, Placement
from asyncpar.errors import UsageError
from asyncpar.nn.dropout import Dropout
from asyncpar.nn.linear import TiedLinear
from asyncpar.nn.normalization import LayerNorm
from asyncpar.nn.parameter import Array, Initializer, Parameter
from asyncpar.nn.sequential import Sequential
from asyncpar.nn.stage import Stage
from asyncpar.nn.tensor.attention import check_equal_heads
from asyncpar.nn.tensor.block import ParallelBlock
from asyncpar.nn.tensor.embedding import VocabParallelEmbedding
from asyncpar.nn.tensor.group import TensorGroup
from asyncpar.nn.tensor.linear import ColumnParallel, ColumnParallelLinear
from asyncpar.nn.tensor.region import TensorRegion
from asyncpar.nn.transformer import HEAD_GAIN, TIED, TransformerConfig, set_training

Wrap: TypeAlias = Callable[[Stage[Any]], Stage[Any]]
"""Returns a stage that is equivalent to another."""


class TransformerStage(Sequential):
    """Some layers of a ``Transformer``: optionally its embedding, some blocks, optionally its last norm and its head.

    The first takes tokens (batch, length), others the output of the previous one: (batch, length, features), of which
    sequence parallelism leaves every rank its part of the length.  The last returns this rank's part of the logits.
    """

    def __init__(
        self,
        *,
        entry: Sequence[Stage[Any]] = (),
        blocks: Sequence[Stage[Any]] = (),
        head: Sequence[Stage[Any]] = (),
        dropouts: Sequence[Dropout] = (),
        table: Parameter | None = None,
    ) -> None:
        """``dropouts`` are those within the layers; ``table`` is the token table, on the first of tied embeddings."""
        self.entry = tuple(entry)
        self.blocks = tuple(blocks)
        self.head = tuple(head)
        self.table = table
        self._dropouts = tuple(dropouts)
        super().__init__([*self.entry, *self.blocks, *self.head])

    def forward(self, x: Any) -> tuple[Array, list[Any]]:
        return super().forward(np.asarray(x))

    def layers(self) -> tuple[Stage[Any], ...]:
        """Return all layers in order: embedding, blocks, norm, head, if this stage has them."""
        return self.stages

    def local_parameters(self) -> tuple[Parameter, ...]:
        """Return the parameters of this rank."""
        return self.parameters()

    def with_blocks(self, blocks: Sequence[Stage[Any]]) -> TransformerStage:
        """Return the stage with its blocks replaced, for example by recomputed ones."""
        if len(blocks) != len(self.blocks):
            raise UsageError(f"blocks: expected {len(self.blocks)}, one for each there is, got {len(blocks)}")
        return TransformerStage(
            entry=self.entry, blocks=blocks, head=self.head, dropouts=self._dropouts, table=self.table
        )

    def set_training(self, is_training: bool) -> None:
        """Switch dropout on (the default) or off."""
        set_training(self._dropouts, is_training)


def build_stage(
    config: TransformerConfig,
    *,
    layers: range,
    is_first: bool,
    is_last: bool,
    group: TensorGroup,
    sequence_parallel: bool = False,
    replica: int = 0,
    table: Parameter | None = None,
    wrap: Wrap | None = None,
    initializer: Initializer | None = None,
) -> TransformerStage:
    """Return the stage with the blocks ``layers``, cut to this rank's part.

    Parameters have the names and the initial values of the ``Transformer`` of ``config``: every tensor is drawn whole,
    in the order of that model, and its part kept or, for other stages, dropped at once.  ``wrap`` is called with each
    layer as soon as it is created.  ``replica`` (the data-parallel rank) makes dropout differ.  ``table`` is for a rank
    that has both the first and the last stage of tied embeddings, as two stages: the first one's table, which the last
    one then shares.  ``initializer``, a new one of the configuration's seed, creates other parameters (``nn.half``).

    With ``sequence_parallel`` each rank holds a part of every sequence between layers.
    """
    check_stage(config, layers=layers, is_first=is_first, is_last=is_last, size=group.size)
    if replica < 0:
        raise UsageError(f"replica: expected a data-parallel rank, got {replica}")
    if table is not None and not (config.tied_embeddings and is_last and not is_first):
        raise UsageError("table: expected one only for the last stage, and not the first, of tied embeddings")
    region = TensorRegion(group=group, sequence_parallel=sequence_parallel)
    builder = _Builder(config, region, initializer or config.initializer(), replica)
    memory = ArrayPool(None)

    def keep(stage: Stage[Any]) -> Stage[Any]:
        stage.use_memory(memory)
        return stage if wrap is None else wrap(stage)

    embedding = builder.embedding(is_tied=config.tied_embeddings and not (is_first and is_last))
    entry = [keep(layer) for layer in (embedding, *builder.dropout("embedding/dropout"))] if is_first else []
    own_table = embedding.tokens if config.tied_embeddings else None
    del embedding
    blocks = []
    for i in range(config.layers if is_last else layers.stop):
        if i in layers:
            blocks.append(keep(builder.block(i)))
        else:
            builder.pass_over_block(i)
    head = []
    if is_last:
        shared = None if table is None or own_table is None else _shared(table, own_table)
        reports = not is_first and shared is None
        head = [keep(layer) for layer in builder.head(shared or own_table, reports=reports)]
    table = own_table if is_first else None
    return TransformerStage(entry=entry, blocks=blocks, head=head, dropouts=builder.dropouts, table=table)


def check_stage(config: TransformerConfig, *, layers: range, is_first: bool, is_last: bool, size: int) -> None:
    """Raise ``UsageError`` unless ``layers`` are some of the model's, in order, and ``size`` ranks can share them."""
    in_order = layers.step == 1 and 0 <= layers.start <= layers.stop <= config.layers
    if not in_order or (is_first and layers.start != 0) or (is_last and layers.stop != config.layers):
        ends = ", from the first" * is_first + ", to the last" * is_last
        raise UsageError(f"layers: expected a range within 0..{config.layers}{ends}, got {layers}")
    if not layers and not is_first and not is_last:
        raise UsageError("layers: expected at least one on a stage in the middle, got none")
    check_equal_heads("heads", config.heads, size)
    for what, length in (("vocabulary", config.vocabulary), ("mlp_hidden", config.hidden)):
        if length < size:
            raise UsageError(f"{what}: expected one for each of {size} tensor-parallel ranks at least, got {length}")


def _shared(table: Parameter, own: Parameter) -> Parameter:
    """Return ``table``, in place of its equal ``own``, as of a single rank: no other has a part of its gradient."""
    if (table.name, table.slice, table.dtype) != (own.name, own.slice, own.dtype):
        raise UsageError(f"table: expected the first stage's {own!r}, got {table!r}")
    table.placement = replace(table.placement, tied=None)
    return table


class _Builder:
    """Creates the layers of a model; each call draws the initial values of one, so all must be created, in order."""

    def __init__(self, config: TransformerConfig, region: TensorRegion, initializer: Initializer, replica: int) -> None:
        self._config = config
        self._region = region
        self._replica = replica
        self._initializer = initializer
        self.dropouts: list[Dropout] = []
        self._options = config.block_options(self._make_dropout if config.dropout else None)

    def embedding(self, *, is_tied: bool) -> VocabParallelEmbedding:
        config = self._config
        return VocabParallelEmbedding(
            "embedding",
            config.vocabulary,
            config.features,
            max_length=config.length,
            region=self._region,
            initializer=self._initializer,
            std=config.embedding_std,
            table_placement=Placement(tied=TIED) if is_tied else UNPLACED,
        )

    def dropout(self, name: str) -> tuple[Stage[Any], ...]:
        return self._options.dropout(name)

    def block(self, i: int) -> ParallelBlock:
        config = self._config
        return ParallelBlock(
            f"block{i}",
            config.features,
            config.heads,
            region=self._region,
            initializer=self._initializer,
            options=self._options,
        )

    def pass_over_block(self, i: int) -> None:
        """Draw the initial values of block ``i`` and discard them."""
        kept = len(self.dropouts)
        self.block(i)
        del self.dropouts[kept:]

    def head(self, table: Parameter | None, *, reports: bool) -> tuple[Stage[Any], Stage[Any]]:
        config, region = self._config, self._region
        norm = LayerNorm("norm", config.features, initializer=self._initializer, placement=region.placement)
        if table is not None:
            return norm, ColumnParallel(TiedLinear("head", table, reports=reports), region=region)
        return norm, ColumnParallelLinear(
            "head",
            config.features,
            config.vocabulary,
            region=region,
            initializer=self._initializer,
            gain=HEAD_GAIN,
            has_bias=False,
        )

    def _make_dropout(self, name: str) -> Dropout:
        part = self._region.group.rank if self._region.sequence_parallel else 0
        self.dropouts.append(self._config.dropout_layer(name, replica=self._replica, part=part))
        return self.dropouts[-1]
