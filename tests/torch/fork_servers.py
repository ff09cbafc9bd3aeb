"""Processes with torch imported, from which ranks are forked: importing it takes seconds.

Nothing of asyncpar is imported in them but what torch itself imports.
"""

from __future__ import annotations

from functools import cache

from tests.fork_server import ForkServer

PRELOADED = (
    "tests.torch.ranks",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
)


@cache
def fork_servers() -> tuple[ForkServer, ...]:
    """Return what ranks are forked from, in turns, so that those next to each other order sets differently."""
    return _start(), _start()


def close_fork_servers() -> None:
    """End what ``fork_servers`` has started, if it has."""
    if fork_servers.cache_info().currsize:
        for server in fork_servers():
            server.close()
        fork_servers.cache_clear()


def _start() -> ForkServer:
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    return ForkServer(PRELOADED, options=["-X", "faulthandler"], environment=environment)
