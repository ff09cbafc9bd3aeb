"""Choose the algorithm of an operation: the one pinned by the user, else the cheapest by the cost model.  Pure.

A pin selects the algorithm for an operation and a range of sizes:

    all_reduce:0-64k@tree,64k-inf@ring;all_gather@bruck

Operations are separated by ``;``, ranges by ``,``.  A range includes its first size and excludes its last; sizes are
bytes, or numbers with ``k``, ``m`` or ``g`` (powers of 1024), or ``inf``; an algorithm without a range applies to all
sizes.  Device arrays have ``nccl``, ``staged`` and ``hierarchical``, numpy arrays all but the first two.  Sizes in no
range are left to the cost model, and so are those pinned to the arena where a group has none, which the log reports
once for each operation.  A word alone names a preset: ``seed`` is "below 1 MiB a tree, else a ring", ``auto`` leaves
everything to the cost model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

from asyncpar.collectives.algorithms.catalog import (
    ALGORITHMS,
    ARENA,
    DEVICE_ALGORITHMS,
    check_algorithm,
    is_of_devices,
    known_algorithms,
)
from asyncpar.collectives.cost import CostModel
from asyncpar.collectives.device_cost import DeviceCostModel, device_operation
from asyncpar.core.config.device_lanes import BUILT_IN_LANES, DeviceLanes
from asyncpar.errors import UsageError

PRESETS = {"auto": "", "seed": "all_reduce:0-1m@tree,1m-inf@ring"}
_SIZE = re.compile(r"(\d+)([kmg]?)", re.ASCII)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedRange:
    """Pin of ``algorithm`` for payloads from ``low`` to below ``high`` bytes."""

    low: float
    high: float
    algorithm: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """The pinned ranges of each operation, in ascending order."""

    ranges: dict[str, tuple[PinnedRange, ...]]
    device_ranges: dict[str, tuple[PinnedRange, ...]] = field(default_factory=dict)
    """Pinned ranges of device arrays, which have algorithms of their own."""

    def find_device(self, operation: str, payload: int) -> str | None:
        """Return the algorithm pinned for device arrays of ``payload`` bytes, None if there is none."""
        return _found(self.device_ranges, operation, payload)

    def find(self, operation: str, payload: int) -> str | None:
        """Return the algorithm pinned for ``payload`` bytes, None if there is none."""
        return _found(self.ranges, operation, payload)


def _found(ranges: dict[str, tuple[PinnedRange, ...]], operation: str, payload: int) -> str | None:
    for pinned in ranges.get(operation, ()):
        if pinned.low <= payload < pinned.high:
            return pinned.algorithm
    return None


def parse_pin(text: str) -> Pin:
    """Parse the pin in ``text``; an empty text pins nothing.

    Raises ``UsageError`` naming the invalid part.
    """
    text = text.strip()
    if text and not re.search(r"[:;@]", text):
        if text not in PRESETS:
            raise UsageError(
                f"pin: expected a preset ({', '.join(PRESETS)}) or operation:range@algorithm, got {text!r}"
            )
        text = PRESETS[text]
    ranges: dict[str, tuple[PinnedRange, ...]] = {}
    device_ranges: dict[str, tuple[PinnedRange, ...]] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        operation, colon, listed = part.partition(":")
        operation = operation.strip()
        if not colon and operation.count("@") == 1:  # all sizes
            operation, _, algorithm = (word.strip() for word in operation.partition("@"))
            colon, listed = ":", f"0-inf@{algorithm}"
        if not colon:
            raise UsageError(f"pin: expected operation:range@algorithm, got {part!r}")
        if operation not in ALGORITHMS:
            raise UsageError(
                f"pin: expected one of the operations {', '.join(ALGORITHMS)}, got {operation!r} in {part!r}"
            )
        if operation in ranges or operation in device_ranges:
            raise UsageError(f"pin: {operation} is named twice; put its ranges in one part, separated by commas")
        texts = listed.split(",")
        of_devices = [text for text in texts if is_of_devices(operation, _algorithm_in(text))]
        of_both = known_algorithms(operation)
        of_host = [text for text in texts if text not in of_devices or _algorithm_in(text) in of_both]
        if of_devices:
            device_ranges[operation] = _parse_ranges(operation, of_devices)
        if of_host:
            ranges[operation] = _parse_ranges(operation, of_host)
    return Pin(ranges=ranges, device_ranges=device_ranges)


def _algorithm_in(text: str) -> str:
    return text.partition("@")[2].strip()


def _parse_ranges(operation: str, listed: list[str]) -> tuple[PinnedRange, ...]:
    ranges = sorted((_parse_range(operation, text.strip()) for text in listed), key=lambda pinned: pinned.low)
    for one, other in pairwise(ranges):
        if other.low < one.high:
            raise UsageError(f"pin: two ranges of {operation} overlap from {other.low:.0f} bytes on")
    return tuple(ranges)


def _parse_range(operation: str, text: str) -> PinnedRange:
    sizes, at, algorithm = text.partition("@")
    low, dash, high = sizes.partition("-")
    if not at or not dash:
        raise UsageError(f"pin: expected low-high@algorithm for {operation}, got {text!r}")
    try:
        if not is_of_devices(operation, algorithm.strip()):
            check_algorithm(operation, algorithm.strip())
    except UsageError as error:
        raise UsageError(f"pin: {text!r}: {error}") from None
    pinned = PinnedRange(low=_parse_size(low, text), high=_parse_size(high, text), algorithm=algorithm.strip())
    if pinned.low >= pinned.high:
        raise UsageError(f"pin: the range {text!r} is empty")
    return pinned


def _parse_size(text: str, context: str) -> float:
    text = text.strip().lower()
    if text == "inf":
        return math.inf
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"pin: expected a size like 4096, 64k, 1m, 2g or inf, got {text!r} in {context!r}")
    return int(match[1]) * _UNITS[match[2]]


_Row: TypeAlias = tuple[str, str, str, str, str]

_SIZES = (4, 64, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20, 128 << 20, 1 << 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Chooses by figures that are equal on all ranks."""

    model: CostModel
    pin: Pin
    has_arena: bool = False
    device_lanes: DeviceLanes = BUILT_IN_LANES

    @property
    def devices(self) -> DeviceCostModel:
        """The cost model of operations on device arrays."""
        return DeviceCostModel(model=self.model, lanes=self.device_lanes, has_arena=self.has_arena)

    def choose_on_devices(self, operation: str, payload: int, possible: Sequence[str]) -> str:
        """Return the way of device arrays of ``payload`` bytes: the pinned one, else the best of ``possible``."""
        return self.pin.find_device(operation, payload) or self.devices.choose(operation, payload, possible)

    def choose(self, operation: str, payload: int, *, arena: bool = False) -> str:
        """Return the algorithm for ``payload`` bytes; ``arena``: whether the arena can be used."""
        pinned = self.pin.find(operation, payload)
        if pinned is not None and (arena or pinned != ARENA):
            return pinned
        return self.model.choose(operation, payload, arena=arena)

    def table(self) -> str:
        """Return the choices and estimates in aligned columns, one line per operation and size.

        ``*`` marks a pinned choice; times are estimates in microseconds.
        """
        rows = [("operation", "bytes", "algorithm", "us", "others (us)")]
        for operation in ALGORITHMS:
            sizes = _SIZES if operation != "barrier" else (0,)
            rows.extend(self._row(operation, payload) for payload in sizes)
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join(_aligned(row, widths) for row in rows)

    def device_table(self, possible: Mapping[str, Sequence[str]]) -> str:
        """Return the same for device arrays: the operations that have estimates, and the ``possible`` ways of each.

        Ways that are not possible are listed with ``no``.  The last line names the figures behind the estimates.
        """
        rows = [
            self._device_row(operation, payload, ways)
            for operation, ways in possible.items()
            if device_operation(operation) is not None
            for payload in _SIZES
        ]
        if not rows:
            return ""
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        source = " (published, not measured here)" if self.device_lanes.is_built_in else ""
        lanes = f"lanes of devices{source}: {self.device_lanes}"
        return "\n".join([*(_aligned(row, widths) for row in rows), lanes])

    def _device_row(self, operation: str, payload: int, possible: Sequence[str]) -> _Row:
        chosen = self.choose_on_devices(operation, payload, possible)
        mark = "*" if self.pin.find_device(operation, payload) else ""
        name = device_operation(operation) or operation
        times = {
            way: f"{self.devices.estimate(operation, way, payload) * 1e6:.0f}"
            for way in DEVICE_ALGORITHMS
            if is_of_devices(name, way)
        }
        others = "  ".join(
            f"{'' if way in possible else 'no '}{way} {time}" for way, time in times.items() if way != chosen
        )
        return f"{operation} on devices", format_bytes(payload), chosen + mark, times[chosen], others

    def _row(self, operation: str, payload: int) -> _Row:
        chosen = self.choose(operation, payload, arena=self.has_arena)
        mark = "*" if self.pin.find(operation, payload) == chosen else ""
        times = {
            name: f"{self.model.estimate(operation, name, payload) * 1e6:.0f}"
            for name in (chosen, *self.model.candidates(operation, arena=self.has_arena))
        }
        others = "  ".join(f"{name} {time}" for name, time in times.items() if name != chosen)
        return operation, format_bytes(payload), chosen + mark, times[chosen], others


def _aligned(row: _Row, widths: list[int]) -> str:
    operation, size, algorithm, time, others = row
    start = f"{operation:<{widths[0]}}  {size:>{widths[1]}}  {algorithm:<{widths[2]}}"
    return f"{start}  {time:>{widths[3]}}  {others}".rstrip()


def format_bytes(count: int) -> str:
    """Return ``count`` with the largest binary unit that divides it."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit and count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count} B"
