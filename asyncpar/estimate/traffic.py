"""Bytes that a rank sends in one step.  Pure."""

from __future__ import annotations

from asyncpar.core.config.checks import check_count
from asyncpar.core.records import dataclass
from asyncpar.estimate.memory import zero_stage_number
from asyncpar.zero.config import ZeROStage

LAYER_ALL_REDUCES = 4
"""All-reduces of the activations in one layer: one after attention and perceptron each, forward and backward."""

RECOMPUTED_ALL_REDUCES = 2
"""All-reduces of the forward pass, repeated by recomputation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTraffic:
    """Bytes that one rank sends in one step, by what for.  ``embedding``: gradients of an embedding that is tied."""

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
    """Return ``P (N - 1)/N``: what a rank sends in a reduce-scatter or all-gather of ``payload`` bytes in all."""
    check_count("ranks", ranks)
    return payload * (ranks - 1) / ranks


def data_parallel_bytes(
    values: float, gradients: float, replicas: int, stage: ZeROStage | int, *, micro_batches: int = 1
) -> float:
    """Return what ZeRO ``stage`` sends for ``values`` and ``gradients`` bytes of parameters that a rank computes with.

    Stages 0 to 2 send as much as an all-reduce, stage 3 half as much again, as it gathers values for the forward pass
    and for the backward pass.  Source: Rajbhandari et al., "ZeRO" (2020), section 7.  Where each replica runs several
    micro-batches, gradients are added up and reduced once, but stage 3 gathers for each of them.
    """
    number = zero_stage_number(stage)
    check_count("micro_batches", micro_batches)
    gathers = 2 * micro_batches if number == 3 else 1
    return part_bytes(values, replicas) * gathers + part_bytes(gradients, replicas)


def tensor_parallel_bytes(payload: float, ranks: int, layers: int, *, recomputed: int = 0, ends: int = 0) -> float:
    """Return what tensor parallelism sends for one micro-batch with activations of ``payload`` bytes (``b s h``).

    Four all-reduces for each of ``layers``, two more for each that is ``recomputed``; one for each of the model's
    ``ends`` here: the embedding's output, and the gradient of the head's input.  With sequence parallelism each is a
    reduce-scatter and an all-gather, which together send the same.  Source: Shoeybi et al., "Megatron-LM" (2019),
    section 3; Korthikanti et al. (2022), section 4.2.2.
    """
    count = LAYER_ALL_REDUCES * layers + RECOMPUTED_ALL_REDUCES * recomputed + ends
    return count * all_reduce_bytes(payload, ranks)


def boundary_bytes(payload: float) -> float:
    """Return what crosses the boundary of two stages for one micro-batch: activations one way, gradients the other.

    ``2 b s h`` values, where ``payload`` is ``b s h`` of them.  Source: Narayanan et al. (2021), section 3.2.
    """
    return 2 * payload
