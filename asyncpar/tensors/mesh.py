"""Devices along named axes: their places, and the groups that they form.  Pure arithmetic.

``meshes.shape`` has the arithmetic of full meshes; this adds places without a device, which a grid of two or three
dimensions over any number of devices has at its end, devices that are not ranks, and the groups of all axes at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import numpy as np

from asyncpar.actors.meshes.shape import Coordinates, MeshShape
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError
from asyncpar.tensors.partition import check_number, check_shape
from asyncpar.tensors.process_groups import MeshCommunicators, make_groups

PIPELINE_AXIS, TENSOR_AXIS = "pp", "tp"
"""The axes of meshes that strategies make."""

TENSOR_AXES = ("tp_row", "tp_column")
"""The axes of TENSOR, where all devices hold parts of each tensor."""


class ModelParallelStrategy(StrEnum):
    """The unit of distribution: the layers (PIPELINE), each tensor (TENSOR), or both (HYBRID)."""

    PIPELINE = "pipeline"
    TENSOR = "tensor"
    HYBRID = "hybrid"


class DeviceMesh:
    """Devices along named axes, row-major: the last axis runs fastest.

    ``devices`` has the device at each place, in any order; by default they are numbered in mesh order.  If there are
    fewer devices than places, the last places are empty.  Immutable; equal if all places are.

    With a ``ModelParallelStrategy`` in place of ``axes``, ``DeviceMesh(ids, strategy)`` is the mesh of these devices
    that ``ModelParallelConfig.mesh`` makes for it.
    """

    __slots__ = ("_places",)

    def __init__(
        self,
        shape: Sequence[int],
        axes: Sequence[str] | ModelParallelStrategy | None = None,
        devices: Iterable[int] | None = None,
    ) -> None:
        self._places: MeshShape
        if isinstance(axes, str):
            self._places = self._of_strategy(shape, axes, devices)._places
            return
        sizes = check_shape(shape, "shape")
        if not sizes:
            raise UsageError("shape: expected at least one axis, got none")
        names = tuple(f"axis{number}" for number in range(len(sizes))) if axes is None else tuple(axes)
        if len(names) != len(sizes):
            raise UsageError(f"axes: expected {len(sizes)} names, one per length of shape, got {list(names)}")
        for name, size in zip(names, sizes, strict=True):
            if size < 1:
                raise UsageError(f"shape: expected at least one place along each axis, got {size} along {name!r}")
        count = math.prod(sizes)
        chosen = tuple(range(count)) if devices is None else check_devices(devices)
        if not 1 <= len(chosen) <= count:
            raise UsageError(f"devices: expected 1..{count}, as many as {list(sizes)} has places, got {len(chosen)}")
        empty = range(-1, len(chosen) - count - 1, -1)
        self._places = MeshShape(tuple(zip(names, sizes, strict=True)), (*chosen, *empty))

    @classmethod
    def linear(cls, devices: int | Iterable[int], axis: str = "device") -> DeviceMesh:
        """Return devices in a row along ``axis``.  ``devices`` are given, or their number."""
        chosen = _chosen(devices)
        return cls((len(chosen),), (axis,), chosen)

    @classmethod
    def two_dimensional(cls, devices: int | Iterable[int], axes: Sequence[str] = ("row", "column")) -> DeviceMesh:
        """Return devices in ``ceil(sqrt(n))`` rows and the fewest possible columns; the last places may be empty.

        ``axes`` are the names of both.
        """
        chosen = _chosen(devices)
        rows = _root_up(len(chosen), 2)
        return cls((rows, -(-len(chosen) // rows)), axes, chosen)

    @classmethod
    def three_dimensional(
        cls, devices: int | Iterable[int], axes: Sequence[str] = ("plane", "row", "column")
    ) -> DeviceMesh:
        """Return devices in ``ceil(cbrt(n))`` planes, each like ``two_dimensional``; the last places may be empty.

        ``axes`` are the names of all three.
        """
        chosen = _chosen(devices)
        planes = _root_up(len(chosen), 3)
        each = -(-len(chosen) // planes)
        rows = _root_up(each, 2)
        return cls((planes, rows, -(-each // rows)), axes, chosen)

    @classmethod
    def _of_strategy(cls, ids: Sequence[int], strategy: str, devices: Iterable[int] | None) -> DeviceMesh:
        if strategy not in list(ModelParallelStrategy):
            raise UsageError(
                f"axes: expected the names of axes, or one of {', '.join(ModelParallelStrategy)}, got {strategy!r}"
            )
        if devices is not None:
            raise UsageError(f"devices: expected none beside a strategy, which {list(ids)} are for, got {devices!r}")
        return cls.of(ids, ModelParallelStrategy(strategy))

    @classmethod
    def of(
        cls, devices: int | Iterable[int], strategy: ModelParallelStrategy, *, stages: int | None = None
    ) -> DeviceMesh:
        """Return the mesh of a strategy.

        PIPELINE is a row along ``pp`` (stages); HYBRID has ``pp`` and ``tp`` (parts of each tensor); TENSOR has
        ``ceil(sqrt(n))`` rows along ``tp_row`` and ``tp_column``, whose last places may be empty.  ``stages`` is the
        size of ``pp`` in HYBRID, by default the least divisor not below the square root.
        """
        chosen = _chosen(devices)
        match strategy:
            case ModelParallelStrategy.PIPELINE:
                return cls.linear(chosen, axis=PIPELINE_AXIS)
            case ModelParallelStrategy.TENSOR:
                return cls.two_dimensional(chosen, axes=TENSOR_AXES)
            case ModelParallelStrategy.HYBRID:
                rows = hybrid_stages(len(chosen)) if stages is None else stages
                return cls((rows, len(chosen) // rows), (PIPELINE_AXIS, TENSOR_AXIS), chosen)

    # -- description -------------------------------------------------------------------------------------------------

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes, slowest first."""
        return self._places.axes

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of places along each axis."""
        return tuple(self._places.sizes.values())

    @property
    def sizes(self) -> dict[str, int]:
        """The number of places along each axis, by name."""
        return self._places.sizes

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices in mesh order."""
        return tuple(device for device in self._places.ranks if device >= 0)

    def __len__(self) -> int:
        return len(self.devices)

    def __contains__(self, device: object) -> bool:
        return device in self.devices

    def __eq__(self, other: object) -> bool:
        return self._places == other._places if isinstance(other, DeviceMesh) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._places)

    def __repr__(self) -> str:
        return f"DeviceMesh({list(self.shape)}, {list(self.axes)}, {list(self.devices)})"

    # -- places ------------------------------------------------------------------------------------------------------

    def device_at(self, coordinates: Sequence[int] | Mapping[str, int]) -> int | None:
        """Return the device at a place, given in the order of the axes or by their names; None if the place is empty.

        Each coordinate must be within its axis; negative ones are not.
        """
        place = self._place(coordinates)
        if any(not 0 <= at < self.sizes[axis] for axis, at in place.items()):
            return None
        device = self._places.at(place)
        return device if device >= 0 else None

    def coordinates_of(self, device: int) -> tuple[int, ...]:
        """Return the place of ``device``, in the order of the axes.  Raises ``UsageError`` if it is not in the mesh."""
        return tuple(self._coordinates(device).values())

    def group(self, axis: str, device: int) -> tuple[int, ...]:
        """Return the devices that differ from ``device`` only along ``axis``, including itself, in that order."""
        self._coordinates(device)
        return tuple(other for other in self._places.group(axis, device) if other >= 0)

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Return all groups along ``axis``, in mesh order."""
        return tuple(dict.fromkeys(self.group(axis, device) for device in self.devices))

    # -- parts -------------------------------------------------------------------------------------------------------

    def slice(self, **chosen: int | slice) -> DeviceMesh:
        """Return the part at the chosen places: an axis with a single place is removed, one with a range stays.

        If all axes are removed, one device along an axis ``device`` is left.  Raises ``UsageError`` for places outside.
        """
        return _part(self._places.slice(chosen))

    def submesh(self, *axes: str, through: int) -> DeviceMesh:
        """Return the devices that differ from device ``through`` only along ``axes``."""
        place = self._coordinates(through)
        for axis in axes:
            if axis not in self.axes:
                raise UsageError(f"axes: expected some of {', '.join(self.axes)}, got {axis!r}")
        return _part(self._places.slice({axis: at for axis, at in place.items() if axis not in axes}))

    # -- groups of ranks ---------------------------------------------------------------------------------------------

    async def communicators(
        self, world: Communicator, *, devices: Sequence[int] | None = None
    ) -> MeshCommunicators | None:
        """Return the communicators along each axis through this rank's device; None if it has none in the mesh.

        All ranks of ``world`` call it with the same mesh: otherwise it raises ``SettingsDiffer`` on all, listing the
        meshes.  ``devices[r]`` is the device of rank ``r`` of ``world``, by default ``r`` itself.  Groups are created
        once: later calls return the same communicators.  Raises ``UsageError`` if a device of the mesh belongs to no
        rank.
        """
        return await make_groups(self._places, world, devices)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _place(self, coordinates: Sequence[int] | Mapping[str, int]) -> dict[str, int]:
        if isinstance(coordinates, Mapping):
            if set(coordinates) != set(self.axes):
                raise UsageError(
                    f"coordinates: expected {', '.join(self.axes)}, got {', '.join(coordinates) or 'none'}"
                )
            return {axis: check_number(at, "coordinates") for axis, at in coordinates.items()}
        if len(coordinates) != len(self.axes):
            raise UsageError(f"coordinates: expected {len(self.axes)}, one per axis, got {list(coordinates)}")
        return {axis: check_number(at, "coordinates") for axis, at in zip(self.axes, coordinates, strict=True)}

    def _coordinates(self, device: int) -> Coordinates:
        if check_number(device, "device") not in self:
            raise UsageError(f"device: expected one of the mesh, {list(self.devices)}, got {device}")
        return self._places.coordinates(device)


def hybrid_stages(devices: int) -> int:
    """Return the least divisor of the number of devices not below its square root."""
    least = _root_up(devices, 2)
    return next(stages for stages in range(least, devices + 1) if devices % stages == 0)


def check_devices(devices: Iterable[int]) -> tuple[int, ...]:
    """Return ``devices`` if they are different numbers of 0 or more."""
    chosen = tuple(check_number(device, "devices") for device in devices)
    if len(set(chosen)) != len(chosen) or any(device < 0 for device in chosen):
        raise UsageError(f"devices: expected different numbers of 0 or more, got {list(chosen)}")
    return chosen


def _chosen(devices: int | Iterable[int]) -> tuple[int, ...]:
    chosen = check_devices(range(devices) if isinstance(devices, int | np.integer) else devices)
    if not chosen:
        raise UsageError(f"devices: expected at least one, got {devices!r}")
    return chosen


def _root_up(number: int, degree: int) -> int:
    """Return the least integer whose power ``degree`` is at least ``number``."""
    root = 1
    while root**degree < number:
        root += 1
    return root


def _part(places: MeshShape) -> DeviceMesh:
    """Return the mesh of ``places``, which may contain empty ones anywhere."""
    if all(device < 0 for device in places.ranks):
        raise UsageError(f"places: expected some with a device, but none of the {places} has one")
    empty = itertools.count(-1, -1)
    devices = tuple(device if device >= 0 else next(empty) for device in places.ranks)
    mesh = DeviceMesh.__new__(DeviceMesh)
    mesh._places = MeshShape(places.dimensions or (("device", 1),), devices)
    return mesh
