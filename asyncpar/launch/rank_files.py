"""The files and the memory of ranks that outlive them: event rings, stacks, logs, last output."""

from __future__ import annotations

import os
from io import FileIO

from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.core.observe.recorder import make_ring, read_ring
from asyncpar.core.private_files import open_unnamed
from asyncpar.launch.options import Streams
from asyncpar.launch.post_mortem import PostMortem, TailFile
from asyncpar.launch.rank_output import RankLogs
from asyncpar.launch.stack_files import StackFile


class RankFiles:
    """Creates them for the ranks of one generation, by local rank; with ``post_mortem`` they have names there."""

    def __init__(self, logs: RankLogs, post_mortem: PostMortem | None) -> None:
        self._logs = logs
        self._post_mortem = post_mortem
        self._rings: dict[int, int] = {}
        """The memory in which each rank records events, which outlives the rank."""
        self.stacks: dict[int, StackFile] = {}
        """The file for the stacks of a rank that does not answer."""

    @property
    def images(self) -> dict[int, bytes]:
        """The images of all event rings."""
        return {local_rank: read_ring(ring) for local_rank, ring in self._rings.items()}

    def image(self, local_rank: int) -> bytes:
        """Return the image of the event ring of a rank, b"" if it has none."""
        ring = self._rings.get(local_rank)
        return b"" if ring is None else read_ring(ring)

    def make_ring(self, place: LaunchEnvironment) -> int | None:
        """Return memory for the events of a rank; None where the system has none: the rank then uses its own."""
        try:
            if self._post_mortem is None:
                ring = make_ring(f"asyncpar events of rank {place.rank}")
            else:
                ring = self._post_mortem.make_ring(place)
        except OSError:
            return None
        self._rings[place.local_rank] = ring
        return ring

    def make_stacks(self, place: LaunchEnvironment) -> int | None:
        """Return a descriptor of a file for the stacks of a rank; None where the system has none."""
        try:
            if self._post_mortem is None:
                descriptor = open_unnamed(f"asyncpar stacks of rank {place.rank}")
            else:
                descriptor = self._post_mortem.make_stack_file(place)
        except OSError:
            return None
        self.stacks[place.local_rank] = StackFile(descriptor)
        return descriptor

    def open_tails(self, place: LaunchEnvironment) -> dict[Streams, TailFile]:
        """Return the files for the last output of a rank."""
        if self._post_mortem is None:
            return {}
        return {
            Streams.STDOUT: self._post_mortem.open_log(place, "stdout"),
            Streams.STDERR: self._post_mortem.open_log(place, "stderr"),
        }

    def open_logs(self, place: LaunchEnvironment) -> dict[Streams, FileIO]:
        """Return the log files of a rank.  Raises ``OSError``."""
        files = {
            stream: self._logs.open(stream, attempt=place.generation, rank=place.rank)
            for stream in (Streams.STDOUT, Streams.STDERR)
        }
        return {stream: file for stream, file in files.items() if file is not None}

    def close(self) -> None:
        """Close everything; files that have a name stay."""
        while self._rings:
            os.close(self._rings.popitem()[1])
        while self.stacks:
            self.stacks.popitem()[1].close()
