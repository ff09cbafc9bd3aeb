"""Names of the groups of a 3D-parallel world, and their members.  Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from asyncpar.core.config.three_d import ThreeDParallelismConfig
from asyncpar.errors import UsageError


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
