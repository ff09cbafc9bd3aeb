"""The progress engine of one rank over a process group of torch.

Theory of operation.  ``torch.distributed`` has no descriptor to wait on either, and its operations block in the calling
thread, with the interpreter released.  So each peer has a thread that receives, from the beginning (Gloo joins all
ranks from the beginning, too), and one that sends, from the first message on; both communicate with the event loop.

The process group belongs to the backend alone; that of ``init_process_group`` is neither needed nor used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from asyncpar.backends.gloo.channel import GlooChannel
from asyncpar.backends.message_lane import ProgressEngine

CLOSE_SECONDS = 1.0
_POLL_SECONDS = 0.005
_NEVER_SENT = 2
"""Tag of messages that do not exist; 0 and 1 are openings and rests."""


class TorchPipe:
    """A ``Pipe`` to the rank ``peer`` of a process group of torch."""

    def __init__(self, torch: Any, group: Any, peer: int) -> None:
        self._torch = torch
        self._group = group
        self._peer = peer

    def send(self, piece: memoryview, *, is_rest: bool) -> Any:
        return self._group.send([self._tensor(piece)], self._peer, int(is_rest))

    def receive(self, memory: memoryview, *, is_rest: bool) -> Any:
        return self._group.recv([self._tensor(memory)], self._peer, int(is_rest))

    def _tensor(self, memory: memoryview) -> Any:
        return self._torch.frombuffer(memory, dtype=self._torch.uint8)

    def break_all(self) -> None:
        """End everything in progress in the process group with an error, as Gloo does when a wait takes too long."""
        try:
            waiting = self._group.recv([self._tensor(memoryview(bytearray(1)))], self._peer, _NEVER_SENT)
            waiting.wait(timedelta(milliseconds=1))
        except RuntimeError:
            return


class GlooProgress(ProgressEngine):
    """The channels of ``rank`` in a process group of ``size`` ranks."""

    def __init__(self, torch: Any, group: Any, *, rank: int, size: int) -> None:
        self._pipes = {peer: TorchPipe(torch, group, peer) for peer in range(size) if peer != rank}
        self._channels = {peer: GlooChannel(pipe, name=f"gloo {rank}-{peer}") for peer, pipe in self._pipes.items()}
        self._loop = asyncio.get_running_loop()

    def open(self, *, meet: Callable[[int], None], leave: Callable[[int], None]) -> None:
        for peer, channel in self._channels.items():
            channel.listen(meet=_bound(meet, peer), leave=_bound(leave, peer))

    def channel(self, rank: int) -> GlooChannel:
        return self._channels[rank]

    async def close(self) -> None:
        for channel in self._channels.values():
            channel.end()
            channel.stop()
        deadline = self._loop.time() + CLOSE_SECONDS
        while not self._is_through() and self._loop.time() < deadline:  # noqa: ASYNC110  # threads see to it
            await asyncio.sleep(_POLL_SECONDS)
        await self._loop.run_in_executor(None, self._end_threads, self._is_through())

    def _end_threads(self, is_through: bool) -> None:
        """Wait for the threads, which would abort the process if it ended before them."""
        if not is_through:
            next(iter(self._pipes.values())).break_all()
        for channel in self._channels.values():
            channel.join(CLOSE_SECONDS)

    def _is_through(self) -> bool:
        return all(channel.is_through for channel in self._channels.values())


def _bound(greet: Callable[[int], None], peer: int) -> Callable[[], None]:
    return lambda: greet(peer)
