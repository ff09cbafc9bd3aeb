"""What the first rank of a node sends to those of others."""

from __future__ import annotations

from asyncpar.gradsync import least_bytes
from asyncpar.gradsync.statistics import SyncTraffic
from asyncpar.multinode.groups import NodeGroups
from asyncpar.multinode.statistics import CompressionInfo


class LeaderTraffic:
    """Reads the counters of the leaders' group; nothing is counted where there is one node, or on other ranks."""

    def __init__(self, groups: NodeGroups, *, is_compressed: bool) -> None:
        self._leaders = groups.leaders if groups.num_nodes > 1 else None
        self._is_compressed = is_compressed
        self._before = SyncTraffic()
        self.info = CompressionInfo()

    def begin(self) -> None:
        """Count from here on."""
        self._before = self._read()

    def end(self, nbytes: int) -> None:
        """Gradients of ``nbytes`` have been all-reduced since ``begin``, uncompressed or not."""
        sent = (self._read() - self._before).payload_bytes
        plain = sent
        if self._is_compressed and self._leaders is not None:
            plain = least_bytes(nbytes, self._leaders)
        known = self.info
        self.info = CompressionInfo(
            original_size=known.original_size + plain, compressed_size=known.compressed_size + sent
        )

    def _read(self) -> SyncTraffic:
        return SyncTraffic.read([] if self._leaders is None else [self._leaders])
