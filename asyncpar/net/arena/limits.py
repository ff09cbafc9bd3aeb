"""Limits of this process: processors and memory, by affinity and by control groups."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/")
_UNLIMITED_MEMORY = 1 << 60


def usable_cores() -> frozenset[int]:
    """Return the numbers of the processors that this process may run on; empty if the system does not report them."""
    ask = getattr(os, "sched_getaffinity", None)
    return frozenset() if ask is None else frozenset(ask(0))


def count_cores() -> int:
    """Return the number of processors that this process may run on, at least 1; all of the host if not known."""
    return len(usable_cores()) or os.cpu_count() or 1


def core_quota(root: Path = _ROOT) -> float:
    """Return the processors' worth of time that control groups grant this process; infinity without a limit."""
    quota = math.inf
    for directory in _control_groups(root, "cpu"):
        content = _read(directory / "cpu.max").split()
        if not content:
            content = [_read(directory / "cpu.cfs_quota_us"), _read(directory / "cpu.cfs_period_us")]
        if len(content) == 2 and content[0].isdecimal() and content[1].isdecimal():
            quota = min(quota, int(content[0]) / max(1, int(content[1])))
    return quota


def available_memory(root: Path = _ROOT) -> int:
    """Return the bytes that can be allocated before this host, or a control group of this process, runs out.

    This is an estimate: free memory, and memory that the kernel would give up.
    """
    available = _parse_table(_read(root / "proc/meminfo")).get("MemAvailable:", _UNLIMITED_MEMORY >> 10) << 10
    for directory in _control_groups(root, "memory"):
        limit = _read_number(directory, "memory.max", "memory.limit_in_bytes")
        if limit is None or limit >= _UNLIMITED_MEMORY:
            continue
        used = _read_number(directory, "memory.current", "memory.usage_in_bytes")
        if used is None or limit - used >= available:
            continue
        table = _parse_table(_read(directory / "memory.stat"))
        caches = table.get("total_inactive_file", table.get("inactive_file", 0))
        available = min(available, max(0, limit - used + caches))
    return available


class MemoryUse(NamedTuple):
    """The nearest memory limit: ``used`` of ``limit`` bytes, those of a control group or of the host.

    Memory that the kernel would give up is not counted as used.
    """

    used: int
    limit: int
    is_group: bool


def read_memory_use(root: Path = _ROOT) -> MemoryUse | None:
    """Return the use of the memory that this process and those beside it may use; None if it is not known."""
    host = _parse_table(_read(root / "proc/meminfo"))
    found = []
    if "MemTotal:" in host and "MemAvailable:" in host:
        total = host["MemTotal:"] << 10
        found.append(MemoryUse(max(0, total - (host["MemAvailable:"] << 10)), total, is_group=False))
    for directory in _control_groups(root, "memory"):
        limit = _read_number(directory, "memory.max", "memory.limit_in_bytes")
        used = _read_number(directory, "memory.current", "memory.usage_in_bytes")
        if limit is None or used is None or limit >= _UNLIMITED_MEMORY:
            continue
        table = _parse_table(_read(directory / "memory.stat"))
        caches = table.get("total_inactive_file", table.get("inactive_file", 0))
        found.append(MemoryUse(max(0, used - caches), limit, is_group=True))
    return min(found, key=lambda use: use.limit - use.used, default=None)


def count_memory_kills(root: Path = _ROOT) -> int | None:
    """Return the number of processes that the kernel has killed so far for lack of memory; None if it is not known.

    Those of this process's control group if it counts them, else those of the host.
    """
    for directory in _control_groups(root, "memory"):
        for name in ("memory.events", "memory.oom_control"):
            kills = _parse_table(_read(directory / name)).get("oom_kill")
            if kills is not None:
                return kills
    return _parse_table(_read(root / "proc/vmstat")).get("oom_kill")


def has_unlimited_address_space() -> bool:
    """Return whether this process may map unlimited memory (``ulimit -v``)."""
    import resource  # not on every system that this module is imported on

    return resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


def may_spin(cores: Mapping[int, frozenset[int]], quotas: Mapping[int, float], processes: Mapping[int, str]) -> bool:
    """Return whether a rank may busy-wait without keeping others of its host from their work.

    All arguments are by rank: the processors it may run on, its processor time, its process.  True if no two ranks
    share a process, no processor has more than one rank when each is spread evenly over those it may use, and the
    scarcest quota is enough for all.  This is cautious: ranks whose sets overlap unevenly do not spin.
    """
    if len(set(processes.values())) < len(processes) or min(quotas.values()) < len(quotas):
        return False
    load: dict[int, float] = {}
    for usable in cores.values():
        if not usable:
            return False
        for core in usable:
            load[core] = load.get(core, 0.0) + 1 / len(usable)
    return max(load.values()) < 1 + 1e-9


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of this process's control groups that may limit ``controller``, innermost first.

    Inside a container the path of the group may be the host's, which does not exist here; then its parents, of which
    the top is the container's own group, still count.
    """
    yield from _directories(root, _read(root / "proc/self/cgroup"), controller)


@lru_cache(maxsize=8)  # the files are read whenever a world forms
def _directories(root: Path, groups: str, controller: str) -> tuple[Path, ...]:
    """Return the existing directories of ``groups``, the content of a file ``cgroup``."""
    found: list[Path] = []
    for line in groups.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            tops: Sequence[Path] = (root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified")
        elif controller in controllers.split(","):
            tops = (root / "sys/fs/cgroup" / controller, root / "sys/fs/cgroup" / controllers)
        else:
            continue
        for top in tops:
            group = Path(os.path.normpath("/" + path.lstrip("/"))).relative_to("/")
            found += (top / part for part in (group, *group.parents))
    return tuple(directory for directory in found if directory.is_dir())


def _read(path: Path) -> str:
    """Return the content of a small kernel file; empty if it does not exist."""
    try:
        with open(path, "rb", buffering=0) as file:  # a third of the time of Path.read_text
            return file.read().decode().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _read_number(directory: Path, *names: str) -> int | None:
    contents = (_read(directory / name) for name in names)
    return next((int(content) for content in contents if content.isdecimal()), None)


def _parse_table(text: str) -> dict[str, int]:
    lines = (line.split() for line in text.splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) >= 2 and words[1].isdecimal()}
