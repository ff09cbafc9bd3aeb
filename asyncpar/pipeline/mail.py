"""Messages between the stages of a pipeline: receptions posted ahead, sends in the background."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from numpy.typing import NDArray

from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.ledger import LARGEST_TAG
from asyncpar.collectives.standing import receive_ahead
from asyncpar.errors import PeerError, UsageError
from asyncpar.nn.stage import Stage
from asyncpar.pipeline.device import DeviceMessages, Sendable
from asyncpar.pipeline.errors import ActionFailed
from asyncpar.pipeline.operation import Content, Message, PipelineOp
from asyncpar.pipeline.result import TrafficCount
from asyncpar.pipeline.schedule import Schedule

Array: TypeAlias = NDArray[Any]
Tags: TypeAlias = Mapping[tuple[int, Content], int]
"""For the messages of one virtual stage, the tag of that of micro-batch 0."""

Route: TypeAlias = Communicator | DeviceMessages
"""The transport of messages: that of devices if the stages are on them."""

RECEIVE_AHEAD: Final = 4
"""Number of receptions that are posted before they are needed."""


def make_tags(schedule: Schedule) -> Tags:
    """Return tags such that no two messages of one rank to another in one run have the same.

    Raises ``UsageError`` if there are not enough tags.
    """
    used: dict[tuple[int, int], int] = {}
    tags: dict[tuple[int, Content], int] = {}
    for before in range(schedule.num_virtual_stages - 1):
        there, back = schedule.rank_of(before), schedule.rank_of(before + 1)
        for stage, content, way in (
            (before, Content.ACTIVATION, (there, back)),
            (before + 1, Content.GRADIENT, (back, there)),
        ):
            tags[stage, content] = used.get(way, 0)
            used[way] = tags[stage, content] + schedule.num_microbatches
    if used and max(used.values()) > LARGEST_TAG + 1:
        raise UsageError(
            f"num_microbatches: {schedule.num_microbatches} micro-batches make {max(used.values())} messages from one "
            f"rank to another, expected at most {LARGEST_TAG + 1}; use fewer micro-batches or model chunks"
        )
    return tags


class Mail:
    """The messages of one run on one rank; ``operations`` are all its sends and receives in order.

    ``stages`` are those of the rank by chunk; if they are on devices, so are the arrays.

    Receptions are posted in the order in which they are needed, at most ``ahead`` of them in advance, so their memory
    is bounded; none counts as a wait before its array is needed.  Sends hold their array until it may be reused.  All
    of them are tasks of ``tasks``.
    """

    def __init__(
        self,
        operations: Iterable[PipelineOp],
        tags: Tags,
        *,
        tasks: asyncio.TaskGroup,
        rank: int,
        ahead: int,
        stages: Sequence[Stage[Any]],
    ) -> None:
        self._tags = tags
        self._tasks = tasks
        self._rank = rank
        self._ahead = ahead
        self._stages = stages
        self._to_post = deque(operation for operation in operations if operation.kind.is_receive)
        self._posted: dict[Message, asyncio.Task[Sendable]] = {}
        self._needed: Message | None = None
        """The message that this rank waits for."""
        self._need: dict[Message, Callable[[], None]] = {}
        """By posted reception: a function that turns it into a wait."""
        self._group: asyncio.Future[Route] = asyncio.get_running_loop().create_future()
        self.sent = TrafficCount()
        self.received = TrafficCount()

    def open(self, group: Route) -> None:
        """Start sending and receiving, through ``group``; until then, messages wait."""
        self._group.set_result(group)
        self._post()

    async def receive(self, operation: PipelineOp) -> Sendable:
        """Return the array of a receive; each is requested once, in order."""
        await asyncio.shield(self._group)
        self._needed = operation.message
        if need := self._need.get(operation.message):
            need()
        array = await self._posted[operation.message]
        self._needed = None
        del self._posted[operation.message]
        self._post()
        self.received.add(operation.message, array.nbytes)
        return array

    def send(self, operation: PipelineOp, array: Sendable) -> None:
        """Start sending ``array``, which must not be changed until the run is over."""
        self._tasks.create_task(self._send(operation, array), name=f"send {operation}")

    def _post(self) -> None:
        while self._to_post and len(self._posted) < self._ahead:
            operation = self._to_post.popleft()
            self._posted[operation.message] = self._tasks.create_task(
                self._receive(operation), name=f"recv {operation}"
            )

    async def _receive(self, operation: PipelineOp) -> Sendable:
        group, tag = self._group.result(), self._tag(operation)
        assert operation.peer is not None, "a receive has a peer"
        try:
            if isinstance(group, DeviceMessages):
                return await group.recv(operation.peer, self._stages[operation.chunk], tag=tag)
            call, need = receive_ahead(group, operation.peer, tag=tag)
            self._need[operation.message] = need
            if self._needed == operation.message:
                need()
            return await call
        except PeerError as error:
            error.add_note(_place(self._rank, operation))
            raise
        finally:
            self._need.pop(operation.message, None)

    async def _send(self, operation: PipelineOp, array: Any) -> None:
        group = await asyncio.shield(self._group)
        assert operation.peer is not None, "a send has a peer"
        try:
            await group.send(array, operation.peer, tag=self._tag(operation))
        except PeerError as error:
            error.add_note(_place(self._rank, operation))
            raise
        except UsageError as error:
            raise ActionFailed(self._rank, operation, error) from error
        self.sent.add(operation.message, array.nbytes)

    def _tag(self, operation: PipelineOp) -> int:
        message = operation.message
        return self._tags[message.stage, message.content] + message.micro_batch


def messages_in(operations: Sequence[PipelineOp]) -> list[PipelineOp]:
    """Return the sends and receives among ``operations``."""
    return [operation for operation in operations if not operation.kind.is_compute]


def _place(rank: int, operation: PipelineOp) -> str:
    what = f"{operation.kind} of virtual stage {operation.stage}, micro-batch {operation.micro_batch}"
    return f"rank {rank} was doing {what}"
