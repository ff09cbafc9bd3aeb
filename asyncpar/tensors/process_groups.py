"""The groups of ranks in which tensor, pipeline and data parallelism communicate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from asyncpar.actors.meshes.shape import Coordinates, MeshShape
from asyncpar.agreement.settings import compare_settings
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.parallel import ProcessGroupIds, RankMapping, ThreeDParallelismConfig
from asyncpar.errors import UsageError
from asyncpar.tensors.partition import check_number


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroups:
    """The place of this rank, and its groups.

    ``dp`` joins the ranks that hold the same slice of the same stage, ``tp`` the slices of one stage of one replica,
    ``pp`` the stages of one pipeline, first stage first, ``model`` all ranks of one replica, ascending.  A rank's
    number in the first three is its coordinate.  They exist everywhere, even with one rank only.  ``embedding`` joins
    the ranks that hold the first and the last layer of a pipeline, and so share tied embeddings: None on the others, a
    group of one if both are on the same rank.  ``names`` has each by its name of ``ProcessGroupIds``.
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
        """Create the groups of ``config`` from the ranks of ``world``; rank ``r`` of ``world`` is rank ``r`` of
        ``config``.

        All ranks of ``world`` call this.  First they compare ``config`` and, if given, other ``settings`` on which they
        must agree: if they differ, all raise ``SettingsDiffer``.  A configuration that does not fit the world raises
        ``UsageError`` on all, too.  Groups for different ``purpose`` values are separate, so that operations in them
        never meet.
        """
        await compare_settings(world, {"parallelism": config, **(settings or {})}, key=f"{purpose}/settings")
        config.validate(world.size)
        mapping = RankMapping(config, world.rank, local_rank=world.local_rank)
        return cls.of(config, mapping, world, purpose=purpose)

    @classmethod
    def of(
        cls, config: ThreeDParallelismConfig, mapping: RankMapping, world: Communicator, *, purpose: str = "parallel"
    ) -> Self:
        """Return the groups of ``config`` of the rank at ``mapping``.  Nothing is sent or compared.

        Ranks with the same ``purpose`` get the same groups.
        """
        ids, dp, tp, pp = ProcessGroupIds(config), mapping.dp_rank, mapping.tp_rank, mapping.pp_rank
        names: dict[str, Communicator] = {}
        for name, ranks in ids.groups().items():  # members match by the name of the group, so no order can deadlock
            group = world.subgroup(ranks, name=name, key=f"{purpose}/{name}")
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


class MeshCommunicators(Mapping[str, Communicator]):
    """One communicator per axis, by its name: over the ranks that differ from this one only along that axis.

    A rank's number in it is its coordinate along the axis, whatever its number in the world.
    """

    def __init__(self, places: MeshShape, world: Communicator, ranks: Mapping[int, int], device: int) -> None:
        """``ranks`` are the ranks of ``world`` by device, ``device`` is this rank's."""
        self.device = device
        self._places = places
        self._world = world
        self._ranks = ranks
        self._along = {axis: self._communicator(places.group(axis, device), (axis,)) for axis in places.axes}

    @property
    def coordinates(self) -> Coordinates:
        """The place of this rank."""
        return self._places.coordinates(self.device)

    def over(self, *axes: str) -> Communicator:
        """Return the communicator over the ranks that differ from this one only along ``axes``, in mesh order."""
        for axis in axes:
            if axis not in self._places.axes:
                raise UsageError(f"axes: expected some of {', '.join(self._places.axes)}, got {axis!r}")
        fixed = {axis: at for axis, at in self.coordinates.items() if axis not in axes}
        return self._communicator(self._places.slice(fixed).ranks, axes)

    def __getitem__(self, axis: str) -> Communicator:
        return self._along[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self._along)

    def __len__(self) -> int:
        return len(self._along)

    def __repr__(self) -> str:
        return f"MeshCommunicators({self._places}, device {self.device} at {self.coordinates})"

    def _communicator(self, devices: Sequence[int], axes: Sequence[str]) -> Communicator:
        ranks = [self._ranks[device] for device in devices if device >= 0]
        name = "-".join(axis for axis in self._places.axes if axis in axes)
        key = f"{name} of {self._places} with devices {self._places.ranks}"
        group = self._world.subgroup(ranks, name=f"{name} of ranks {','.join(map(str, ranks))}", key=key)
        assert group is not None, "this rank is one of them"
        return group


async def make_groups(
    places: MeshShape, world: Communicator, devices: Sequence[int] | None
) -> MeshCommunicators | None:
    """See ``DeviceMesh.communicators``; ``places`` without a device have negative numbers."""
    mesh = {"shape": str(places), "devices": list(places.ranks)}
    of_ranks = None if devices is None else [str(device) for device in devices]
    await compare_settings(world, {"mesh": mesh, "devices of ranks": of_ranks}, key="mesh communicators")
    chosen = _checked_devices(places, world, devices)
    device = chosen[world.rank]
    if device not in places.ranks:
        return None
    return MeshCommunicators(places, world, {device: rank for rank, device in enumerate(chosen)}, device)


def _checked_devices(places: MeshShape, world: Communicator, devices: Sequence[int] | None) -> list[int]:
    """Return the device of each rank, if they include those of ``places``.  Finds the same fault on all ranks."""
    chosen = list(range(world.size)) if devices is None else [check_number(device, "devices") for device in devices]
    if len(chosen) != world.size or len(set(chosen)) != len(chosen) or min(chosen) < 0:
        raise UsageError(f"devices: expected a device for each of {world.size} ranks, all different, got {chosen}")
    missing = sorted(device for device in places.ranks if device >= 0 and device not in chosen)
    if missing:
        raise UsageError(f"devices: device {missing[0]} of the {places} is that of no rank; the ranks have {chosen}")
    return chosen
