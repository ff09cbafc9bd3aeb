"""One rank of a world of ``tests.torch.worlds``: runs the functions that it receives, and sends their outcomes."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import itertools
import json
import logging
import socket
import sys
import threading
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=40)
"""Of operations: shorter than what tests may take, so that they say more than that they hang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this process is: all that ``initialize`` needs."""

    rank: int
    size: int
    backend: str
    meeting: str


_places: list[Place] = []


def place() -> Place:
    """Return where this process is."""
    return _places[0]


def initialize(**settings: Any) -> None:
    """``dist.init_process_group`` for this rank, with the backend under test; ``settings`` replace the usual ones."""
    here = place()
    usual: dict[str, Any] = {"backend": here.backend, "rank": here.rank, "world_size": here.size, "timeout": TIMEOUT}
    dist.init_process_group(**{"init_method": here.meeting, **usual, **settings})


class Losses(logging.Handler):
    """Keeps what would otherwise only be seen by who reads logs: errors in threads, in finalizers, in tasks."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []
        threading.excepthook = lambda args: self._keep(f"in thread {args.thread}", args.exc_value)
        sys.unraisablehook = lambda args: self._keep(f"in {args.object!r}", args.exc_value)
        for name in ("asyncio", "asyncpar"):
            logging.getLogger(name).addHandler(self)

    def _keep(self, where: str, error: BaseException | None) -> None:
        lines = traceback.format_exception(error) if error is not None else []
        self.texts.append(f"lost {where}: {''.join(lines)}")

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"logged by {record.name}: {self.format(record)}")

    def take(self) -> str:
        texts, self.texts = self.texts, []
        return "\n".join(texts)


def await_others(rank: int) -> None:
    """Return on ``rank``, which is going to die, after all other ranks have called this.

    They have left all operations before then; after a barrier some may still be in it.
    """
    if dist.get_rank() != rank:
        dist.send(torch.ones(1), rank)
    else:
        for other in set(range(dist.get_world_size())) - {rank}:
            dist.recv(torch.empty(1), other)


def run(order: dict[str, Any], losses: Losses) -> dict[str, Any]:
    """Do what one line of the test process asks for and return the answer: a value or an error."""
    try:
        value = find(order["function"])(**order["arguments"])
        if dist.is_initialized():
            check_in_step(order["function"])  # another rank may still connect a group that this one has
            destroy_groups()
        json.dumps(value)
    except BaseException as error:
        if isinstance(error, SystemExit | KeyboardInterrupt):
            raise
        return {"error": "".join(traceback.format_exception(error)) + losses.take()}
    lost = losses.take()
    return {"error": lost} if lost else {"value": value}


def find(name: str) -> Any:
    """Return the function of ``module:name``; of a test that is made by ``on_ranks`` its body."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return getattr(found, "__wrapped__", found)


def destroy_groups() -> None:
    """Destroy all groups but the default one."""
    world = dist.distributed_c10d._world  # noqa: SLF001  # torch: the table of all groups (pg_map), which torch shows nowhere else
    for group in [group for group in world.pg_map if group is not dist.group.WORLD]:
        if group in world.pg_map:
            dist.destroy_process_group(group)


def check_in_step(name: str) -> None:
    """Assert that the default group still works, and that no rank has operations left that others do not know of."""
    word = torch.tensor(list(name.encode()), dtype=torch.uint8)
    words = [torch.zeros_like(word) for _ in range(dist.get_world_size())]
    dist.all_gather(words, word)
    for rank, other in enumerate(words):
        assert torch.equal(other, word), f"rank {rank} is at {bytes(other.tolist())!r} when this one is at {name}"


def main(channel: socket.socket, rank: str, backend: str, size: str, meeting: str, joins: str) -> None:
    """Serve the test process, at the other end of ``channel``, until it hangs up."""
    _places.append(Place(rank=int(rank), size=int(size), backend=backend, meeting=meeting))
    torch.set_num_threads(1)
    losses = Losses()
    warnings.filterwarnings("error", module=r"asyncpar(\.|$)")
    with channel, channel.makefile("rb") as lines:
        beginning = {"function": f"{__name__}:begin", "arguments": {"joins": joins == "1"}, "limit": 60}
        for order in itertools.chain([beginning], map(json.loads, lines)):
            faulthandler.dump_traceback_later(order["limit"] + 30, exit=True)  # should the test process be gone
            answer = run(order, losses)
            faulthandler.cancel_dump_traceback_later()
            channel.sendall(json.dumps(answer).encode() + b"\n")
        if dist.is_initialized():
            dist.destroy_process_group()
    gc.freeze()  # no last search for garbage through all of torch
    lost = losses.take()
    if lost:
        sys.exit(lost)


def begin(joins: bool) -> None:
    """Register the backend, and join the default group."""
    here = place()
    if here.backend == "asyncpar":
        importlib.import_module("asyncpar.torch")
    if joins:
        initialize()


def send_backends(channel: socket.socket) -> None:
    """Send the backends that torch has without being asked for any, and whether gRPC is imported."""
    with channel:
        channel.sendall(json.dumps([dist.Backend.backend_list, "grpc" in sys.modules]).encode())
