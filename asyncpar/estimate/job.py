"""A training job: model shape and its parts on ranks, machine (rates), and batch.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from asyncpar.collectives.algorithms.catalog import DEVICE_ALGORITHMS, NCCL, STAGED
from asyncpar.core.config.checks import check_choice, check_count, check_positive
from asyncpar.core.config.device_lanes import BUILT_IN_LANES, DeviceLanes
from asyncpar.core.config.parallel import DEFAULT_ORDER, MemoryOptimizationStrategy, ThreeDParallelismConfig
from asyncpar.core.config.rank_order import RankOrder
from asyncpar.errors import UsageError

ADAM_STATES = 2
"""Moments that Adam and AdamW keep for each parameter; SGD keeps 0, with momentum 1."""


class Precision(StrEnum):
    """FP32: everything takes four bytes.

    MIXED: values, gradients and activations take two; the optimizer keeps values of four besides its states.
    """

    FP32 = "fp32"
    MIXED = "mixed"

    @property
    def value_bytes(self) -> int:
        """Bytes of a value, of a gradient and of an activation."""
        return 4 if self is Precision.FP32 else 2


Shapes: TypeAlias = tuple[tuple[int, ...], ...]
"""The shapes of parameters, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder with learned positions, attention and a two-layer perceptron in each layer, and a last normalization.

    The perceptron is ``ffn_multiple`` times as wide as ``hidden``.  ``is_tied``: the head is the embedding.
    ``has_query_bias``: queries, keys and values have biases, as in GPT; those of ``asyncpar.nn`` have none.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    ffn_multiple: int = 4
    is_tied: bool = True
    has_query_bias: bool = True

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocabulary", "sequence", "ffn_multiple"):
            check_count(name, getattr(self, name))
        if self.hidden % self.heads:
            raise UsageError(f"heads: expected a divisor of hidden = {self.hidden}, got {self.heads}")

    def layer_shapes(self, tp_size: int = 1) -> Shapes:
        """Return the shapes of the parameters of one layer on one of ``tp_size`` ranks, the one with most."""
        hidden, share = self.hidden, _largest_share(self.ffn_multiple * self.hidden, tp_size)
        heads = _largest_share(self.heads, tp_size) * (hidden // self.heads)
        query_bias: Shapes = ((3 * heads,),) if self.has_query_bias else ()
        norm: Shapes = ((hidden,), (hidden,))
        attention: Shapes = ((hidden, 3 * heads), *query_bias, (heads, hidden), (hidden,))
        return (*norm, *attention, *norm, (hidden, share), (share,), (share, hidden), (hidden,))

    def layer_parameters(self, tp_size: int = 1) -> int:
        """Return the number of values of one layer on one of ``tp_size`` ranks, the one with most.

        Column-parallel weights and their biases and row-parallel weights are cut; norms and row-parallel biases are
        whole on each rank (Shoeybi et al., "Megatron-LM", 2019).  Whole: ``12 h^2 + 13 h`` for a multiple of 4.
        """
        hidden, wide = self.hidden, self.ffn_multiple * self.hidden
        heads = _largest_share(self.heads, tp_size) * (hidden // self.heads)
        query_bias = 3 * heads if self.has_query_bias else 0
        attention = hidden * 3 * heads + query_bias + heads * hidden + hidden
        share = _largest_share(wide, tp_size)
        perceptron = hidden * share + share + share * hidden + hidden
        return attention + perceptron + 2 * 2 * hidden

    def embedding_parameters(self, tp_size: int = 1) -> int:
        """Return the number of values of the token embedding, or of a head, on one of ``tp_size`` ranks."""
        return _largest_share(self.vocabulary, tp_size) * self.hidden

    @property
    def position_parameters(self) -> int:
        """Number of values of the learned positions, which are whole on each rank."""
        return self.sequence * self.hidden

    @property
    def norm_parameters(self) -> int:
        """Number of values of the last normalization."""
        return 2 * self.hidden

    @property
    def parameters(self) -> int:
        """Number of values of the whole model."""
        embeddings = self.embedding_parameters() * (1 if self.is_tied else 2)
        return self.layers * self.layer_parameters() + embeddings + self.position_parameters + self.norm_parameters

    @property
    def published_parameters(self) -> int:
        """``12 l h^2 (1 + 13/(12 h) + (V + s)/(12 l h))`` for a GPT: ``parameters`` without the last normalization.

        Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
        (2021), equation 2.  Its model is tied, has all biases and a multiple of 4.
        """
        layers, hidden = self.layers, self.hidden
        return 12 * layers * hidden**2 + 13 * layers * hidden + (self.vocabulary + self.sequence) * hidden

    @property
    def layer_flops(self) -> int:
        """Floating-point operations of the forward pass of one layer, for each token.

        Two for each value of a weight, ``8 h^2 + 4 h f``, and ``4 s h`` for attention; ``24 h^2 + 4 s h`` for a
        multiple of 4.  Source: Narayanan et al. (2021), appendix.  A backward pass takes twice as many.
        """
        return 8 * self.hidden**2 + 4 * self.ffn_multiple * self.hidden**2 + 4 * self.sequence * self.hidden

    @property
    def head_flops(self) -> int:
        """Floating-point operations of the forward pass of the head, for each token: ``2 h V`` (same source)."""
        return 2 * self.hidden * self.vocabulary


def _largest_share(length: int, parts: int) -> int:
    """Return the largest of ``parts`` lengths that differ by at most one."""
    return -(-length // parts)


DEFAULT_FLOPS = 50e9
DEFAULT_BANDWIDTH = 1.25e9
DEFAULT_HOST_BANDWIDTH = 4e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Hosts of ``ranks_per_host`` ranks each, rank ``r`` on host ``r // ranks_per_host``.

    ``flops`` is a rank's actual rate of operations per second.  ``bandwidth`` is a host's rate of sending to others, in
    bytes/s, ``host_bandwidth`` a rank's rate of sending to others on its host.
    """

    ranks_per_host: int
    flops: float = DEFAULT_FLOPS
    bandwidth: float = DEFAULT_BANDWIDTH
    host_bandwidth: float = DEFAULT_HOST_BANDWIDTH

    def __post_init__(self) -> None:
        check_count("ranks_per_host", self.ranks_per_host)
        check_positive("flops", self.flops, "operations per second")
        check_positive("bandwidth", self.bandwidth, "bytes per second")
        check_positive("host_bandwidth", self.host_bandwidth, "bytes per second")

    @classmethod
    def of_devices(
        cls,
        ranks_per_host: int,
        *,
        flops: float,
        way: str = NCCL,
        lanes: DeviceLanes = BUILT_IN_LANES,
        bandwidth: float = DEFAULT_BANDWIDTH,
        host_bandwidth: float = DEFAULT_HOST_BANDWIDTH,
    ) -> Machine:
        """Return hosts with a CUDA device for each rank, whose arrays are moved in the ``way`` of ``algorithm_table``.

        ``nccl``: at the speed of ``lanes``, with an adapter for each device between hosts; ``hierarchical``: the same
        inside a host, and between hosts copied to the host and sent at its ``bandwidth``; ``staged``: always copied to
        the host, where ranks send at ``host_bandwidth``.
        """
        if way not in DEVICE_ALGORITHMS:
            raise UsageError(f"way: expected one of {', '.join(DEVICE_ALGORITHMS)}, got {way!r}")
        copy = lanes.copy.bandwidth / 2  # there and back
        return cls(
            ranks_per_host=ranks_per_host,
            flops=flops,
            bandwidth=lanes.between.bandwidth * ranks_per_host if way == NCCL else _one_by_one(bandwidth, copy),
            host_bandwidth=_one_by_one(host_bandwidth, copy) if way == STAGED else lanes.within.bandwidth,
        )

    def rings_bandwidth(self, groups: Iterable[Sequence[int]]) -> float:
        """Return the bytes/s at which a rank of the slowest ring sends when each of ``groups`` runs a ring at once.

        The ranks of a group are ordered in its ring by host, so each of its hosts sends to one other; rings that leave
        a host share its bandwidth.
        """
        leaving = Counter[int]()
        for group in groups:
            if len(group) == 1:
                continue
            hosts = {self._host(rank) for rank in group}
            leaving.update(hosts if len(hosts) > 1 else ())
        return self._shared(leaving)

    def hops_bandwidth(self, hops: Iterable[tuple[int, int]]) -> float:
        """Return the bytes/s of the slowest hop when each of ``hops`` (from, to) is used at once."""
        leaving = Counter(self._host(source) for source, to in hops if self._host(source) != self._host(to))
        return self._shared(leaving)

    def _shared(self, leaving: Counter[int]) -> float:
        most = max(leaving.values(), default=0)
        return min(self.host_bandwidth, self.bandwidth / most) if most else self.host_bandwidth

    def _host(self, rank: int) -> int:
        return rank // self.ranks_per_host


def _one_by_one(*bandwidths: float) -> float:
    """Return the bytes/s of data that pass through each of ``bandwidths`` in turn."""
    return 1 / sum(1 / bandwidth for bandwidth in bandwidths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Training of ``model`` with ``batch`` sequences per step over all replicas, in micro-batches.

    ``optimizer_states`` is the number of values that the optimizer keeps for each parameter.  ``recompute``: every
    layer is recomputed in the backward pass, whatever ``memory_strategy``.  ``order`` lays ranks out along the axes,
    fastest first.

    ``micro_batch_size`` counts sequences, ``precision`` is that of parameters and activations, and with
    ``sequence_parallel`` tensor-parallel ranks divide sequences between layers.
    """

    model: ModelShape
    machine: Machine
    batch: int
    micro_batch_size: int = 1
    precision: Precision = Precision.FP32
    optimizer_states: int = ADAM_STATES
    memory_strategy: MemoryOptimizationStrategy = MemoryOptimizationStrategy.BASIC
    recompute: bool = False
    sequence_parallel: bool = False
    order: str = DEFAULT_ORDER

    def __post_init__(self) -> None:
        check_count("batch", self.batch)
        check_count("micro_batch_size", self.micro_batch_size)
        check_count("optimizer_states", self.optimizer_states, least=0)
        RankOrder.parse(self.order, {"dp": 1, "tp": 1, "pp": 1})
        object.__setattr__(self, "precision", check_choice("precision", Precision, self.precision))
        strategy = check_choice("memory_strategy", MemoryOptimizationStrategy, self.memory_strategy)
        object.__setattr__(self, "memory_strategy", strategy)


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualStage:
    """One piece of the model, on pipeline rank ``rank``; the first has the embedding, the last the head."""

    rank: int
    layers: int
    is_first: bool
    is_last: bool

    @property
    def ends(self) -> int:
        """Number of embedding and head in this piece, 0 to 2."""
        return self.is_first + self.is_last


def virtual_stages(config: ThreeDParallelismConfig) -> tuple[VirtualStage, ...]:
    """Return all pieces, in the order of the model."""
    ranks = config.stage_ranks()
    layers = config.virtual_stage_layers()
    return tuple(
        VirtualStage(rank=rank, layers=count, is_first=stage == 0, is_last=stage == len(ranks) - 1)
        for stage, (rank, count) in enumerate(zip(ranks, layers, strict=True))
    )


def rank_parameters(model: ModelShape, config: ThreeDParallelismConfig) -> tuple[int, ...]:
    """Return, for each pipeline rank, the number of values on the tensor-parallel rank with most.

    A tied embedding is held once if both ends of the model are on the same rank, otherwise at both.
    """
    tp_size = config.tp_size
    counts = [0] * config.pp_size
    for stage in virtual_stages(config):
        counts[stage.rank] += stage.layers * model.layer_parameters(tp_size)
        if stage.is_first:
            counts[stage.rank] += model.embedding_parameters(tp_size) + model.position_parameters
        if stage.is_last:
            is_held = model.is_tied and len(config.end_stages) == 1
            counts[stage.rank] += model.norm_parameters + (0 if is_held else model.embedding_parameters(tp_size))
    return tuple(counts)


def rank_shapes(model: ModelShape, config: ThreeDParallelismConfig) -> tuple[tuple[Shapes, ...], ...]:
    """Return, for each pipeline rank, the parameters of each layer, as ``rank_parameters`` counts them."""
    tp_size = config.tp_size
    layer, table = model.layer_shapes(tp_size), (_largest_share(model.vocabulary, tp_size), model.hidden)
    found: list[list[Shapes]] = [[] for _ in range(config.pp_size)]
    for stage in virtual_stages(config):
        mine = found[stage.rank]
        if stage.is_first:
            mine.append((table, (model.sequence, model.hidden)))
        mine += [layer] * stage.layers
        if stage.is_last:
            mine.append(((model.hidden,), (model.hidden,)))
            if not (model.is_tied and len(config.end_stages) == 1):
                mine.append((table,))
    return tuple(map(tuple, found))
