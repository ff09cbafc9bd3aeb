"""The part of a model on each pipeline rank: layers, embedding and head, parameters.  Pure."""

from __future__ import annotations

from asyncpar.core.config.parallel import ThreeDParallelismConfig
from asyncpar.core.records import dataclass
from asyncpar.estimate.job import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualStage:
    """One piece of the model, on pipeline rank ``rank``; the first has the embedding, the last the head."""

    rank: int
    layers: int
    is_first: bool
    is_last: bool

    @property
    def ends(self) -> int:
        """How many of embedding and head this piece has, 0 to 2."""
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
    """Return, for each pipeline rank, the number of values on the tensor-parallel rank that has most.

    A tied embedding is held once where both ends of the model are on the same rank, and else at both.
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
