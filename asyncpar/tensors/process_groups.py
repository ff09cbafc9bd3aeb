"""The groups of ranks that tensor, pipeline and data parallelism communicate in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from asyncpar.collectives.communicator import Communicator
from asyncpar.config.parallel import ProcessGroupIds, RankMapping, ThreeDParallelismConfig
from asyncpar.tensors.settings import compare_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroups:
    """The place of this rank, and the groups that it is in.

    ``dp`` joins the ranks that hold the same slice of the same stage, ``tp`` the slices of one stage of one replica,
    ``pp`` the stages of one pipeline, first stage first, ``model`` all ranks of one replica, ascending.  A rank's
    number in the first three is its coordinate.  They exist everywhere, if with one rank only.  ``embedding`` joins
    the ranks that hold the first and the last layer of a pipeline, and so share tied embeddings: None on the others,
    a group of one where both are on the same rank.  ``names`` has each by its name of ``ProcessGroupIds``.
    """

    mapping: RankMapping
    world: Communicator
    dp: Communicator
    tp: Communicator
    pp: Communicator
    model: Communicator
    embedding: Communicator | None
    names: Mapping[str, Communicator]

    @classmethod
    async def create(
        cls,
        config: ThreeDParallelismConfig,
        world: Communicator,
        *,
        settings: Mapping[str, object] | None = None,
        purpose: str = "parallel",
    ) -> Self:
        """Make the groups of ``config`` out of the ranks of ``world``, its rank ``r`` being rank ``r`` there.

        All ranks of ``world`` call this.  First they compare ``config`` and, if given, other ``settings`` by which they
        must agree: ranks that differ get ``SettingsDiffer``, all of them.  A configuration that does not fit the world
        is a ``UsageError`` on all, too.  Groups made for another ``purpose`` are other ones, so that operations in them
        never meet.
        """
        await compare_settings(world, {"parallelism": config, **(settings or {})}, key=f"{purpose}/settings")
        config.validate(world.size)
        mapping = RankMapping(config, world.rank, local_rank=world.local_rank)
        ids, dp, tp, pp = ProcessGroupIds(config), mapping.dp_rank, mapping.tp_rank, mapping.pp_rank
        names: dict[str, Communicator] = {}
        for name, ranks in ids.groups().items():
            group = _member(world, ranks, name, purpose)
            if group is not None:
                names[name] = group
        return cls(
            mapping=mapping,
            world=world,
            dp=names[ids.get_dp_group_id(tp, pp)],
            tp=names[ids.get_tp_group_id(dp, pp)],
            pp=names[ids.get_pp_group_id(dp, tp)],
            model=names[ids.get_model_group_id(dp)],
            embedding=names.get(ids.get_embedding_group_id(dp, tp)),
            names=names,
        )


def _member(world: Communicator, ranks: Sequence[int], name: str, purpose: str) -> Communicator | None:
    """Members meet by the name of the group: nothing is sent, so no order can deadlock."""
    return world.subgroup(ranks, name=name, key=f"{purpose}/{name}")
