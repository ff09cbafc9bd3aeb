"""The place of one rank in a 3D-parallel world.  Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from asyncpar.core.config.rank_order import RankOrder
from asyncpar.core.config.three_d import ThreeDParallelismConfig
from asyncpar.errors import UsageError


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
