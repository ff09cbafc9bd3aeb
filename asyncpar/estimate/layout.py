"""One layout of a job over ranks, with its memory, traffic and time.  Pure.

The time is rough: ranks compute at a constant rate, tensor-parallel all-reduces stop the computation, messages between
stages overlap with it, and gradients are reduced, or values gathered, when it is over.  It serves to rank layouts, not
to predict seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from asyncpar.core.config.checks import check_count
from asyncpar.core.config.parallel import ThreeDParallelismConfig
from asyncpar.core.config.rank_order import RankOrder
from asyncpar.core.config.strategies import ZeROStage
from asyncpar.estimate.activations import ActivationModel
from asyncpar.estimate.job import Job, Machine, VirtualStage, rank_parameters, virtual_stages
from asyncpar.estimate.memory import ActivationPolicy, RankMemory, rank_activations, rank_memories, zero_stage_number
from asyncpar.estimate.pipelining import PipelineFigures, StageWork, pipeline_figures
from asyncpar.pipeline.registry import schedule_of

LAYER_ALL_REDUCES = 4
"""All-reduces of the activations in one layer: one after attention and perceptron each, forward and backward."""

RECOMPUTED_ALL_REDUCES = 2
"""All-reduces of the forward pass, repeated by recomputation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTraffic:
    """Bytes that one rank sends in one step, by purpose.  ``embedding``: gradients of a tied embedding."""

    data: float = 0.0
    tensor: float = 0.0
    pipeline: float = 0.0
    embedding: float = 0.0

    @property
    def total(self) -> float:
        return self.data + self.tensor + self.pipeline + self.embedding


def all_reduce_bytes(payload: float, ranks: int) -> float:
    """Return ``2 P (N - 1)/N``: reduce-scatter, then all-gather, the least possible.

    Source: Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations" (2009).
    """
    return 2 * part_bytes(payload, ranks)


def part_bytes(payload: float, ranks: int) -> float:
    """Return ``P (N - 1)/N``: the bytes sent per rank in a reduce-scatter or all-gather of ``payload`` bytes in all."""
    check_count("ranks", ranks)
    return payload * (ranks - 1) / ranks


def data_parallel_bytes(
    values: float, gradients: float, replicas: int, stage: ZeROStage | int, *, micro_batches: int = 1
) -> float:
    """Return the bytes that ZeRO ``stage`` sends for a rank's ``values`` and ``gradients`` bytes of parameters.

    Stages 0 to 2 send as much as an all-reduce, stage 3 half as much again, since it gathers values for the forward
    pass and for the backward pass.  Source: Rajbhandari et al., "ZeRO" (2020), section 7.  If each replica runs several
    micro-batches, gradients are added up and reduced once, but stage 3 gathers for each of them.

    ``micro_batches`` is the number that each replica runs per step.
    """
    number = zero_stage_number(stage)
    check_count("micro_batches", micro_batches)
    gathers = 2 * micro_batches if number == 3 else 1
    return part_bytes(values, replicas) * gathers + part_bytes(gradients, replicas)


def tensor_parallel_bytes(payload: float, ranks: int, layers: int, *, recomputed: int = 0, ends: int = 0) -> float:
    """Return the bytes that tensor parallelism sends per micro-batch with ``payload`` bytes of activations (``b s h``).

    Four all-reduces for each of ``layers``, two more for each that is ``recomputed``; one for each of the model's
    ``ends`` here: the embedding's output, and the gradient of the head's input.  With sequence parallelism each is a
    reduce-scatter and an all-gather, which together send the same.  Source: Shoeybi et al., "Megatron-LM" (2019),
    section 3; Korthikanti et al. (2022), section 4.2.2.
    """
    count = LAYER_ALL_REDUCES * layers + RECOMPUTED_ALL_REDUCES * recomputed + ends
    return count * all_reduce_bytes(payload, ranks)


def boundary_bytes(payload: float) -> float:
    """Return the bytes across the boundary of two stages per micro-batch: activations one way, gradients the other.

    ``2 b s h`` values, where ``payload`` is ``b s h`` of them.  Source: Narayanan et al. (2021), section 3.2.
    """
    return 2 * payload


_KEPT = 32


@lru_cache(maxsize=_KEPT)
def ring_bandwidth(machine: Machine, order: RankOrder, axis: str) -> float:
    """Return the bytes/s at which a rank sends when all groups along ``axis`` run rings at once."""
    return machine.rings_bandwidth(_groups(order, axis))


@lru_cache(maxsize=_KEPT)
def pipeline_ring_bandwidth(machine: Machine, order: RankOrder, stages: tuple[int, ...]) -> float:
    """Return the same for rings over ``stages`` of every pipeline."""
    return machine.rings_bandwidth([[ranks[stage] for stage in stages] for ranks in _groups(order, "pp")])


@lru_cache(maxsize=_KEPT)
def hop_bandwidth(machine: Machine, order: RankOrder, hops: frozenset[tuple[int, int]]) -> float:
    """Return the bytes/s between stages when every pipeline uses ``hops``, from one stage to another, at once."""
    return machine.hops_bandwidth((ranks[one], ranks[other]) for ranks in _groups(order, "pp") for one, other in hops)


@lru_cache(maxsize=_KEPT)
def _groups(order: RankOrder, axis: str) -> tuple[tuple[int, ...], ...]:
    return order.groups(axis)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The cost of ``config`` with ZeRO stage ``zero``.

    ``memory`` is that of the fullest rank, ``traffic`` that of the one that sends most in a step; ``pipeline`` is the
    part of the step with the forward and backward passes, ``step_seconds`` the whole step.
    """

    config: ThreeDParallelismConfig
    zero: ZeROStage
    micro_batches: int
    memory: RankMemory
    traffic: RankTraffic
    pipeline: PipelineFigures
    step_seconds: float


def estimate_layouts(job: Job, config: ThreeDParallelismConfig, stages: Iterable[ZeROStage]) -> Iterator[Layout]:
    """Yield the layout for each of ``stages``.

    Raises ``UsageError`` if the configuration does not fit model or batch.
    """
    model = job.model
    config.validate(config.world_size, hidden=model.hidden, heads=model.heads)
    estimate = _Estimate(job, config)
    for stage in stages:
        yield estimate.layout(stage)


def rank_traffics(job: Job, config: ThreeDParallelismConfig, stage: ZeROStage) -> tuple[RankTraffic, ...]:
    """Return the traffic of each pipeline rank in a step, except for a few numbers per token and step.

    The exceptions are the maxima and sums of a vocabulary-parallel cross-entropy, and the exchange of losses.  Raises
    ``UsageError`` if the configuration does not fit model or batch.
    """
    config.validate(config.world_size, hidden=job.model.hidden, heads=job.model.heads)
    return tuple(_Estimate(job, config).traffics(stage))


class _Estimate:
    """Parts of the estimate common to all ZeRO stages of one configuration."""

    def __init__(self, job: Job, config: ThreeDParallelismConfig) -> None:
        self._job = job
        self._config = config
        self._micro_batches = config.micro_batches(job.batch)
        self._pieces = virtual_stages(config)
        self._policy = ActivationPolicy(strategy=job.memory_strategy, recompute_all=job.recompute)
        self._payload = job.precision.value_bytes * job.model.sequence * config.micro_batch_size * job.model.hidden
        activations = ActivationModel.of(
            job.model,
            config,
            value_bytes=job.precision.value_bytes,
            sequence_parallel=job.sequence_parallel,
        )
        self._activations = rank_activations(config, activations, self._policy, micro_batches=self._micro_batches)
        self._order = config.rank_order()
        self._reduction = all_reduce_bytes(self._payload, config.tp_size) / self._ring_bandwidth("tp")
        hops = frozenset((one.rank, other.rank) for one, other in self._boundaries())
        self._pipeline = pipeline_figures(
            schedule_of(config, self._micro_batches),
            [self._work(piece) for piece in self._pieces],
            latency=self._payload / hop_bandwidth(job.machine, self._order, hops),
        )

    def layout(self, stage: ZeROStage) -> Layout:
        job = self._job
        memories = rank_memories(
            job.model,
            self._config,
            self._activations,
            stage=stage,
            precision=job.precision,
            optimizer_states=job.optimizer_states,
        )
        traffics = self.traffics(stage)
        ends_bandwidth = pipeline_ring_bandwidth(job.machine, self._order, self._config.end_stages)
        after = max(traffic.data for traffic in traffics) / self._ring_bandwidth("dp")
        after += max(traffic.embedding for traffic in traffics) / ends_bandwidth
        return Layout(
            config=self._config,
            zero=stage,
            micro_batches=self._micro_batches,
            memory=max(memories, key=lambda memory: memory.total),
            traffic=max(traffics, key=lambda traffic: traffic.total),
            pipeline=self._pipeline,
            step_seconds=self._pipeline.makespan + after,
        )

    def _work(self, piece: VirtualStage) -> StageWork:
        """Return the seconds of each pass: the same arithmetic in all three, plus the waits for tensor parallelism."""
        job, tp_size = self._job, self._config.tp_size
        rate = job.machine.flops * tp_size / (job.model.sequence * self._config.micro_batch_size)
        layer = job.model.layer_flops / rate
        head = job.model.head_flops / rate if piece.is_last else 0.0
        reduction = self._reduction
        each_way = piece.layers * LAYER_ALL_REDUCES / 2
        again = self._recomputed(piece)
        return StageWork(
            forward=piece.layers * layer + head + (each_way + piece.is_first) * reduction,
            backward_input=piece.layers * layer
            + head
            + (each_way + piece.is_last) * reduction
            + again * (layer + RECOMPUTED_ALL_REDUCES * reduction),
            backward_weight=piece.layers * layer + head,
        )

    def _recomputed(self, piece: VirtualStage) -> int:
        return piece.layers - self._policy.kept(piece.layers)

    def traffics(self, stage: ZeROStage) -> list[RankTraffic]:
        job, config = self._job, self._config
        tied = job.model.is_tied and len(config.end_stages) > 1
        owners = config.dp_size if stage.shards_states else 1
        shared = job.model.embedding_parameters(config.tp_size) * job.precision.value_bytes / owners
        found = []
        for rank, parameters in enumerate(rank_parameters(job.model, config)):
            mine = [piece for piece in self._pieces if piece.rank == rank]
            size = parameters * job.precision.value_bytes
            found.append(
                RankTraffic(
                    data=data_parallel_bytes(size, size, config.dp_size, stage, micro_batches=self._micro_batches),
                    tensor=self._micro_batches * sum(map(self._tensor_bytes, mine)),
                    pipeline=self._micro_batches * self._payload * self._sends(rank),
                    embedding=all_reduce_bytes(shared, 2) if tied and rank in config.end_stages else 0.0,
                )
            )
        return found

    def _tensor_bytes(self, piece: VirtualStage) -> float:
        return tensor_parallel_bytes(
            self._payload,
            self._config.tp_size,
            piece.layers,
            recomputed=self._recomputed(piece),
            ends=piece.ends,
        )

    def _sends(self, rank: int) -> int:
        """Return the number of sends of a rank to another per micro-batch: activations on, gradients back."""
        return sum((one.rank == rank) + (other.rank == rank) for one, other in self._boundaries())

    def _boundaries(self) -> list[tuple[VirtualStage, VirtualStage]]:
        return [(one, other) for one, other in pairwise(self._pieces) if one.rank != other.rank]

    def _ring_bandwidth(self, axis: str) -> float:
        return ring_bandwidth(self._job.machine, self._order, axis)
