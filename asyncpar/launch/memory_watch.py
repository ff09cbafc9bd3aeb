"""Out of memory: whether the kernel has killed a rank for it, and the sizes of all ranks before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from asyncpar.net.arena.limits import MemoryUse, count_memory_kills, read_memory_use
from asyncpar.observe.summary import MemorySummary, spell_bytes

EVERY_SECONDS: Final = 1.0
RECENT_SECONDS: Final = 5.0
"""The age in seconds up to which a counted kill may be that of a rank that is found dead."""

_MOST_SIZES: Final = 8


class _MemorySample(NamedTuple):
    time: float
    kills: int | None
    use: MemoryUse | None


class MemoryWatch:
    """Records the kernel's counts, and the resident bytes of ranks at the last inspection."""

    def __init__(
        self,
        count_kills: Callable[[], int | None] = count_memory_kills,
        read_use: Callable[[], MemoryUse | None] = read_memory_use,
    ) -> None:
        self._count_kills = count_kills
        self._read_use = read_use
        self._samples: deque[_MemorySample] = deque()
        self._sizes: dict[int, int] = {}

    def update(self, sizes: Mapping[int, int], *, now: float) -> None:
        """Record the resident bytes of the ranks that live; read the kernel's files once a second."""
        self._sizes |= {rank: size for rank, size in sizes.items() if size}
        if self._samples and now - self._samples[-1].time < EVERY_SECONDS:
            return
        self._samples.append(_MemorySample(now, self._count_kills(), self._read_use()))
        while now - self._samples[0].time > RECENT_SECONDS:
            self._samples.popleft()

    def forget(self, rank: int) -> None:
        """Drop the size of a rank whose place another process takes."""
        self._sizes.pop(rank, None)

    @property
    def use(self) -> MemorySummary | None:
        """The nearest limit, its use at the last inspection, and how fast that grows."""
        if not self._samples or self._samples[-1].use is None:
            return None
        first, last, use = self._samples[0], self._samples[-1], self._samples[-1].use
        growth = 0.0
        if first.use is not None and first.use.limit == use.limit and last.time > first.time:
            growth = max(0.0, (use.used - first.use.used) / (last.time - first.time))
        return MemorySummary(used=use.used, limit=use.limit, is_group=use.is_group, growth=growth)

    def explain(self, *, now: float) -> str:
        """Explain why a rank was killed by SIGKILL just now, if the kernel did it for lack of memory; else ""."""
        kills = self._count_kills()
        before = [
            sample.kills for sample in self._samples if sample.kills is not None and now - sample.time <= RECENT_SECONDS
        ]
        if kills is None or not before or kills <= before[0]:
            return ""
        largest = sorted(self._sizes.items(), key=lambda item: (-item[1], item[0]))
        sizes = [f"rank {rank} {spell_bytes(size)}" for rank, size in largest[:_MOST_SIZES]]
        if len(largest) > _MOST_SIZES:
            sizes.append(f"{len(largest) - _MOST_SIZES} more of {spell_bytes(largest[_MOST_SIZES][1])} at most")
        use = self.use
        limit = "" if use is None else f"; the limit is {spell_bytes(use.limit)} of {use.owner}"
        resident = f"; resident last: {', '.join(sizes)}" if sizes else ""
        return f"was killed by the kernel (SIGKILL), which was out of memory{limit}{resident}"
