"""File of the measured costs of lanes between hosts, for later jobs on the same hosts.

The file is JSON, and is replaced as a whole.  A file that is damaged, of another version or unreadable counts as empty,
and one that cannot be written is left alone: then lanes are measured again.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from asyncpar.core.config.transport import LaneCosts
from asyncpar.errors import UsageError

_VERSION: Final = 1
_MOST_ENTRIES: Final = 512
_MOST_BYTES: Final = 1 << 20
KEPT_SECONDS: Final = 7 * 24 * 3600.0
"""Figures that are older are measured again."""


class _Entry(msgspec.Struct, frozen=True):
    latency: float
    bandwidth: float
    reduction: float
    measured_at: float
    together: float | None = None


class _Content(msgspec.Struct, frozen=True):
    version: int
    lanes: dict[str, _Entry]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLanes:
    """Figures of one host: between its ranks, and of the slowest of the lanes to ``hosts`` others.  None: no figures.

    For two hosts the latest figures count, whatever the kind of the lane.
    """

    within: LaneCosts | None
    between: LaneCosts | None
    hosts: int


def default_path() -> Path:
    """Return the file in the user's cache directory: that of ``XDG_CACHE_HOME``, else ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "asyncpar" / "lanes.json"
    except RuntimeError as error:
        raise UsageError("cache: this user has no home directory; name a file, or set XDG_CACHE_HOME") from error


class LaneCache:
    """The file at ``path``.  Each entry is for two hosts, in either order, and a kind of lane between them."""

    def __init__(self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.time) -> None:
        try:
            self._path = Path(path)
        except TypeError as error:
            raise UsageError(f"cache: expected the path of a file, or True, got {path!r}") from error
        self._clock = clock

    def get(self, host: str, other: str, kind: str) -> LaneCosts | None:
        """Return the costs measured in the last week, None if there are none."""
        entry = self._read().get(_name(host, other, kind))
        return None if entry is None else self._costs(entry)

    def of_host(self, host: str) -> HostLanes:
        """Return the costs measured in the last week between ranks of ``host``, and between it and others."""
        newest: dict[tuple[str, ...], tuple[float, LaneCosts]] = {}
        for name, entry in self._read().items():
            pair, costs = tuple(name.split(" ")[:2]), self._costs(entry)
            if host in pair and costs is not None:
                newest[pair] = max(newest.get(pair, (0.0, costs)), (entry.measured_at, costs), key=lambda at: at[0])
        others = [costs for pair, (_, costs) in newest.items() if pair != (host, host)]
        return HostLanes(
            within=newest[host, host][1] if (host, host) in newest else None,
            between=min(others, key=lambda costs: costs.bandwidth, default=None),
            hosts=len(others),
        )

    def _costs(self, entry: _Entry) -> LaneCosts | None:
        if not 0.0 <= self._clock() - entry.measured_at < KEPT_SECONDS:
            return None
        try:
            return LaneCosts(
                latency=entry.latency,
                bandwidth=entry.bandwidth,
                reduction=entry.reduction,
                is_measured=True,
                together=entry.together,
            )
        except UsageError:  # impossible figures
            return None

    def put(self, host: str, other: str, kind: str, costs: LaneCosts) -> None:
        """Store ``costs``; do nothing if the file cannot be written."""
        entries = self._read()
        name = _name(host, other, kind)
        entries.pop(name, None)
        entries[name] = _Entry(costs.latency, costs.bandwidth, costs.reduction, self._clock(), costs.together)
        newest = sorted(entries.items(), key=lambda item: item[1].measured_at)[-_MOST_ENTRIES:]
        with suppress(OSError):
            self._write(msgspec.json.encode(_Content(version=_VERSION, lanes=dict(newest))))

    def _read(self) -> dict[str, _Entry]:
        try:
            with self._path.open("rb") as file:
                content = msgspec.json.decode(file.read(_MOST_BYTES), type=_Content)
        except (OSError, msgspec.DecodeError):
            return {}
        return content.lanes if content.version == _VERSION else {}

    def _write(self, content: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=self._path.parent, prefix=".lanes-")
        try:
            with os.fdopen(number, "wb") as file:
                file.write(content)
            os.replace(name, self._path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise


def _name(host: str, other: str, kind: str) -> str:
    return " ".join((*sorted((host, other)), kind))
