"""Effects of the options of layers, optimizers and models."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncpar.core.config.placement import Placement, Replication
from asyncpar.core.config.slicing import TensorSlice
from asyncpar.nn import (
    Block,
    BlockOptions,
    CausalSelfAttention,
    Dropout,
    Embedding,
    Initializer,
    LayerNorm,
    Linear,
    Mlp,
    Parameter,
    Transformer,
    TransformerConfig,
    WarmupCosine,
)
from asyncpar.nn.optimizers import SGD, Adam, AdamW, Optimizer
from asyncpar.nn.tensor import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelBlock,
    ParallelMlp,
    RowParallelLinear,
    SingleRankGroup,
    TensorRegion,
    VocabParallelEmbedding,
)
from asyncpar.shards import LayerShard, LayerType, ShardStrategy
from tests.options.effects import With, digest, effects

X = np.random.default_rng(3).normal(size=(2, 5, 8))


def initializer(seed: int = 0) -> Initializer:
    return Initializer.from_seed(seed, "float64")


def seen_of(layer: Any, x: Any = X) -> Any:
    """Return output, gradients and values, as far as they can be distinguished, and where parameters are placed."""
    y, saved = layer.forward(x)
    layer.backward(saved, np.cos(y))
    parameters = layer.parameters()
    arrays = [array for one in parameters for array in (one.value, one.grad)]
    return digest(y, *arrays), [(one.name, one.placement, one.slice) for one in parameters]


def linear(**settings: Any) -> Any:
    return seen_of(Linear("layer", 8, 6, initializer=initializer(), **settings))


def mlp(**settings: Any) -> Any:
    return seen_of(Mlp("layer", 8, 6, initializer=initializer(), **settings))


def attention(**settings: Any) -> Any:
    return seen_of(CausalSelfAttention("layer", 8, 2, initializer=initializer(), **settings))


def norm(**settings: Any) -> Any:
    return seen_of(LayerNorm("layer", 8, initializer=initializer(), **settings))


def embedding(**settings: Any) -> Any:
    tokens = np.arange(10).reshape(2, 5)
    return seen_of(Embedding("layer", 11, 8, max_length=5, initializer=initializer(), **settings), tokens)


def block(**settings: Any) -> Any:
    return seen_of(Block("layer", 8, 2, initializer=initializer(), **settings))


def block_of(**settings: Any) -> Any:
    return block(options=BlockOptions(**settings))


def region() -> TensorRegion:
    return TensorRegion(group=SingleRankGroup())


def column(**settings: Any) -> Any:
    return seen_of(ColumnParallelLinear("layer", 8, 6, region=region(), initializer=initializer(), **settings))


def row(**settings: Any) -> Any:
    return seen_of(RowParallelLinear("layer", 8, 6, region=region(), initializer=initializer(), **settings))


def parallel_mlp(**settings: Any) -> Any:
    return seen_of(ParallelMlp("layer", 8, 6, region=region(), initializer=initializer(), **settings))


def parallel_attention(**settings: Any) -> Any:
    return seen_of(ParallelAttention("layer", 8, 2, region=region(), initializer=initializer(), **settings))


def parallel_block(**settings: Any) -> Any:
    return seen_of(ParallelBlock("layer", 8, 2, region=region(), initializer=initializer(), **settings))


def vocab(**settings: Any) -> Any:
    tokens = np.arange(10).reshape(2, 5)
    return seen_of(
        VocabParallelEmbedding("layer", 11, 8, max_length=5, region=region(), initializer=initializer(), **settings),
        tokens,
    )


def parameter(**settings: Any) -> Any:
    one = Parameter("one", np.zeros((2, 3)), **settings)
    return one.slice, one.placement


def transformer(**settings: Any) -> Any:
    config = TransformerConfig(**{"vocabulary": 11, "length": 6, "features": 8, "heads": 2, **settings})
    model = Transformer(config)
    tokens = np.arange(2 * min(6, config.length)).reshape(2, -1) % min(11, config.vocabulary)
    return seen_of(model, tokens), model.forward(tokens)[0].dtype.name


def transformer_of(**settings: Any) -> Any:
    config = TransformerConfig(vocabulary=11, length=6, features=8, heads=2)
    return seen_of(Transformer(config, **settings), np.arange(12).reshape(2, 6) % 11)


def rule_of(kind: Any) -> Any:
    def run(**settings: Any) -> Any:
        one = Parameter("one", np.linspace(1.0, 2.0, 6).reshape(2, 3))
        optimizer = Optimizer([one], kind(**settings))
        for step in range(3):
            optimizer.zero_grad()
            one.accumulate(np.linspace(-1.0, 1.0, 6).reshape(2, 3) * 1e-6 * (step + 1))
            optimizer.step(0.1)
        return digest(one.value)

    return run


def shard(**settings: Any) -> Any:
    layer = LayerShard(layer_id=1, layer_type=LayerType.LINEAR, weight=np.ones((4, 6)), **settings)
    return [(one.name, one.value.shape, one.placement) for one in layer.parameters()]


def warmup(**settings: Any) -> Any:
    schedule = WarmupCosine(peak=1.0, steps=10, **settings)
    return [schedule(step) for step in range(10)]


REPLICATED = Placement(replicated=Replication.WHOLE)
PART = TensorSlice.along((4, 3), 0, 0, 2)
GAINS = {"gain": 2.0, "output_gain": 2.0}

EFFECTS = [
    *effects("nn.Linear", linear, gain=2.0, has_bias=False, part=With(TensorSlice.along((8, 6), 1, 0, 3), {})),
    *effects("nn.Mlp", mlp, **GAINS),
    *effects("nn.CausalSelfAttention", attention, **GAINS),
    *effects("nn.LayerNorm", norm, epsilon=0.1, placement=REPLICATED),
    *effects("nn.Embedding", embedding, std=0.5),
    *effects("nn.Block", block, options=BlockOptions(gain=2.0)),
    *effects("nn.BlockOptions", block_of, hidden=5, make_dropout=lambda name: Dropout(name, 0.5, seed=1), **GAINS),
    *effects("nn.Parameter", parameter, part=PART, placement=REPLICATED),
    *effects(
        "nn.TransformerConfig",
        transformer,
        vocabulary=13,
        length=5,
        features=16,
        layers=1,
        heads=4,
        seed=1,
        dtype="float64",
        tied_embeddings=True,
        dropout=0.5,
        mlp_hidden=7,
    ),
    *effects("nn.Transformer", transformer_of, initializer=initializer(5)),
    *effects("nn.WarmupCosine", warmup, warmup=3, floor=0.5),
    *effects("nn.optimizers.Adam", rule_of(Adam), weight_decay=0.1, beta1=0.5, beta2=0.5, epsilon=1e-3),
    *effects("nn.optimizers.AdamW", rule_of(AdamW), weight_decay=0.1, beta1=0.5, beta2=0.5, epsilon=1e-3),
    *effects("nn.optimizers.SGD", rule_of(SGD), weight_decay=0.1, momentum=0.5, nesterov=With(True, {"momentum": 0.5})),
    *effects("nn.tensor.ColumnParallelLinear", column, gain=2.0, has_bias=False),
    *effects("nn.tensor.RowParallelLinear", row, gain=2.0, has_bias=False),
    *effects("nn.tensor.ParallelMlp", parallel_mlp, **GAINS),
    *effects("nn.tensor.ParallelAttention", parallel_attention, **GAINS),
    *effects("nn.tensor.ParallelBlock", parallel_block, options=BlockOptions(gain=2.0)),
    *effects("nn.tensor.VocabParallelEmbedding", vocab, std=0.5, table_placement=REPLICATED),
    *effects(
        "shards.LayerShard",
        shard,
        bias=np.ones(6),
        down_projection_weight=np.ones((6, 4)),
        strategy=ShardStrategy.REPLICATED,
        replication=With(Replication.PARTIAL, {"strategy": ShardStrategy.REPLICATED}),
        is_tied=True,
    ),
]
