"""The place of one rank in a 3D-parallel world.  Pure."""

from __future__ import annotations

from asyncpar.config.three_d import ThreeDParallelismConfig


class RankMapping:
    """The place of one rank among data-parallel replicas, tensor slices and pipeline stages.

    ``local_rank`` is what the launcher says it is (None when nobody did): it does not follow from the rank.
    """

    def __init__(self, config: ThreeDParallelismConfig, global_rank: int, *, local_rank: int | None = None) -> None:
        self.config = config
        self._order = config.rank_order()
        place = self._order.coordinates(global_rank)
        self.global_rank = global_rank
        self.local_rank = local_rank
        self.world_size = config.world_size
        self.dp_rank = place["dp"]
        self.tp_rank = place["tp"]
        self.pp_rank = place["pp"]

    def from_3d_coords(self, dp_rank: int, tp_rank: int, pp_rank: int) -> int:
        """Return the rank at the given coordinates."""
        return self._order.rank_at({"dp": dp_rank, "tp": tp_rank, "pp": pp_rank})

    def is_dp_head(self) -> bool:
        """Is this the first replica?"""
        return self.dp_rank == 0

    def is_tp_head(self) -> bool:
        """Does this rank hold the first slice?"""
        return self.tp_rank == 0

    def is_pp_head(self) -> bool:
        """Does this rank hold the first stage?"""
        return self.pp_rank == 0

    def is_pp_tail(self) -> bool:
        """Does this rank hold the last stage?"""
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
