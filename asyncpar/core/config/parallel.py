"""Configuration of 3D-parallel training (data, tensor, pipeline), with the place and the groups of each rank.  Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from asyncpar.core.config.rank_order import RankOrder
from asyncpar.core.config.schedule_type import PipelineScheduleType
from asyncpar.core.config.strategies import CommunicationStrategy, MemoryOptimizationStrategy, MemoryRequirements
from asyncpar.core.config.three_d import DEFAULT_ORDER, ThreeDParallelismConfig
from asyncpar.errors import UsageError

__all__ = [
    "DEFAULT_ORDER",
    "CommunicationStrategy",
    "MemoryOptimizationStrategy",
    "MemoryRequirements",
    "PipelineScheduleType",
    "ProcessGroupIds",
    "RankMapping",
    "ThreeDParallelismConfig",
]


class _From3DCoords:
    """The descriptor of ``from_3d_coords``: on a mapping it knows the configuration, on the class it is passed one."""

    def __get__(self, mapping: RankMapping | None, owner: type[RankMapping]) -> Callable[..., int]:
        return _rank_in if mapping is None else partial(_rank_at, mapping.config)


@dataclass(frozen=True, slots=True)
class RankMapping:
    """The place of one rank among data-parallel replicas, tensor slices and pipeline stages.

    ``local_rank`` is set by the launcher (None without one); it cannot be computed from the rank.
    """

    config: ThreeDParallelismConfig = field(repr=False)
    global_rank: int
    local_rank: int | None = field(default=None, kw_only=True)
    world_size: int = field(init=False)
    dp_rank: int = field(init=False)
    tp_rank: int = field(init=False)
    pp_rank: int = field(init=False)
    _order: RankOrder = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        order = self.config.rank_order()
        place = order.coordinates(self.global_rank)
        object.__setattr__(self, "_order", order)
        object.__setattr__(self, "world_size", self.config.world_size)
        for axis in ("dp", "tp", "pp"):
            object.__setattr__(self, f"{axis}_rank", place[axis])

    from_3d_coords = _From3DCoords()
    """``mapping.from_3d_coords(dp_rank, tp_rank, pp_rank)`` is the rank at these coordinates; so is
    ``RankMapping.from_3d_coords(config, dp_rank, tp_rank, pp_rank)``, also with the configuration last.
    """

    def is_dp_head(self) -> bool:
        """Whether this is the first replica."""
        return self.dp_rank == 0

    def is_tp_head(self) -> bool:
        """Whether this rank holds the first slice."""
        return self.tp_rank == 0

    def is_pp_head(self) -> bool:
        """Whether this rank holds the first stage."""
        return self.pp_rank == 0

    def is_pp_tail(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.pp_rank == self.config.pp_size - 1

    def dp_group_ranks(self) -> tuple[int, ...]:
        """Return the ranks that hold the same slice of the same stage."""
        return self._order.group("dp", self.global_rank)

    def tp_group_ranks(self) -> tuple[int, ...]:
        """Return the ranks that share this rank's stage and batch."""
        return self._order.group("tp", self.global_rank)

    def pp_group_ranks(self) -> tuple[int, ...]:
        """Return the ranks of this rank's pipeline, first stage first."""
        return self._order.group("pp", self.global_rank)

    def next_pp_rank(self) -> int | None:
        """Return the rank of the next stage; None on the last."""
        return None if self.is_pp_tail() else self.pp_group_ranks()[self.pp_rank + 1]

    def prev_pp_rank(self) -> int | None:
        """Return the rank of the previous stage; None on the first."""
        return None if self.is_pp_head() else self.pp_group_ranks()[self.pp_rank - 1]


def _rank_at(config: ThreeDParallelismConfig, dp_rank: int, tp_rank: int, pp_rank: int) -> int:
    return config.rank_order().rank_at({"dp": dp_rank, "tp": tp_rank, "pp": pp_rank})


def _rank_in(*arguments: Any, **named: Any) -> int:
    """Return the rank at the given coordinates; the configuration is the first or the last argument."""
    if len(arguments) > 1 and isinstance(arguments[-1], ThreeDParallelismConfig):
        arguments = (arguments[-1], *arguments[:-1])
    config = arguments[0] if arguments else named.get("config")
    if not isinstance(config, ThreeDParallelismConfig):
        raise UsageError(f"config: expected a ThreeDParallelismConfig beside the coordinates, got {config!r}")
    return _rank_at(*arguments, **named)


class ProcessGroupIds:
    """Names of the sub-groups, each unique in the world.  A group id contains the coordinates that its ranks share."""

    def __init__(self, config: ThreeDParallelismConfig) -> None:
        self._config = config
        self._sizes = {"dp": config.dp_size, "tp": config.tp_size, "pp": config.pp_size}

    @property
    def dp_groups(self) -> tuple[str, ...]:
        """The names of the replicas' groups, by slice, then by stage."""
        return tuple(self.get_dp_group_id(*place) for place in self._places("tp", "pp"))

    @property
    def tp_groups(self) -> tuple[str, ...]:
        """The names of the slices' groups, by replica, then by stage."""
        return tuple(self.get_tp_group_id(*place) for place in self._places("dp", "pp"))

    @property
    def pp_groups(self) -> tuple[str, ...]:
        """The names of the pipelines, by replica, then by slice."""
        return tuple(self.get_pp_group_id(*place) for place in self._places("dp", "tp"))

    def get_dp_group_id(self, tp_rank: int, pp_rank: int) -> str:
        """Return the name of the replicas' group at the given slice and stage."""
        self._check(tp=tp_rank, pp=pp_rank)
        return f"dp_group_tp{tp_rank}_pp{pp_rank}"

    def get_tp_group_id(self, dp_rank: int, pp_rank: int) -> str:
        """Return the name of the slices' group of the given replica and stage."""
        self._check(dp=dp_rank, pp=pp_rank)
        return f"tp_group_dp{dp_rank}_pp{pp_rank}"

    def get_pp_group_id(self, dp_rank: int, tp_rank: int) -> str:
        """Return the name of the pipeline of the given replica and slice."""
        self._check(dp=dp_rank, tp=tp_rank)
        return f"pp_group_dp{dp_rank}_tp{tp_rank}"

    def get_model_group_id(self, dp_rank: int) -> str:
        """Return the name of the group that holds one whole model: all slices of all stages of the given replica."""
        self._check(dp=dp_rank)
        return f"model_group_dp{dp_rank}"

    def get_embedding_group_id(self, dp_rank: int, tp_rank: int) -> str:
        """Return the name of the group of the ends of a pipeline, which share tied embeddings."""
        self._check(dp=dp_rank, tp=tp_rank)
        return f"embedding_group_dp{dp_rank}_tp{tp_rank}"

    def groups(self) -> dict[str, tuple[int, ...]]:
        """Return the ranks of every group by its name, in an order that is the same on all ranks.

        Ranks are listed in the order of the axis, and in ascending order if the group holds a whole model.
        """
        order, found = self._config.rank_order(), dict[str, tuple[int, ...]]()
        for axis in ("dp", "tp", "pp"):
            for ranks in order.groups(axis):
                found[self._name(axis, order.coordinates(ranks[0]))] = ranks
        for ranks in order.blocks(("tp", "pp")):
            found[self.get_model_group_id(order.coordinates(ranks[0])["dp"])] = ranks
        for ranks in order.groups("pp"):
            place = order.coordinates(ranks[0])
            name = self.get_embedding_group_id(place["dp"], place["tp"])
            found[name] = tuple(ranks[stage] for stage in self._config.end_stages)
        return found

    def _places(self, outer: str, inner: str) -> Iterable[tuple[int, int]]:
        return itertools.product(range(self._sizes[outer]), range(self._sizes[inner]))

    def _name(self, axis: str, place: Mapping[str, int]) -> str:
        match axis:
            case "dp":
                return self.get_dp_group_id(place["tp"], place["pp"])
            case "tp":
                return self.get_tp_group_id(place["dp"], place["pp"])
            case _:
                return self.get_pp_group_id(place["dp"], place["tp"])

    def _check(self, **place: int) -> None:
        for axis, at in place.items():
            if not 0 <= at < self._sizes[axis]:
                raise UsageError(f"{axis}_rank: expected 0..{self._sizes[axis] - 1}, got {at}")
