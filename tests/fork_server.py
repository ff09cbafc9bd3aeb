"""Processes that have imported what takes long, from which others are forked: tests need many of them.

A server imports and waits; it never has a second thread, so that its children start as whole as a new interpreter
does.  Children of one server have one seed of hashes, so those that must not depend on the order of sets are to come
from different servers.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import resource
import selectors
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]

_LARGEST_REQUEST = 1 << 17


class ForkedProcess:
    """A child of a server, whose end this process learns of through ``news``."""

    def __init__(self, news: socket.socket) -> None:
        self._news = news
        self._status: int | None = None
        self.pid = int(self._read())

    def _read(self) -> str:
        received = self._news.recv(64).decode()
        if not received:
            raise RuntimeError("the server that it is forked from has ended")
        return received

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status, negative for a signal; raise ``TimeoutError`` after ``timeout`` seconds."""
        if self._status is None:
            self._news.settimeout(timeout)
            try:
                self._status = int(self._read())
            except BlockingIOError:  # of a timeout of 0
                raise TimeoutError(f"process {self.pid} has not ended") from None
            self._news.close()
        return self._status

    async def until_ended(self) -> int:
        """Return its exit status, as ``wait`` does; the event loop goes on meanwhile."""
        loop = asyncio.get_running_loop()
        while not self.has_ended():
            has_news = asyncio.Event()
            loop.add_reader(self._news, has_news.set)
            try:
                await has_news.wait()
            finally:
                loop.remove_reader(self._news)
        return self.wait()

    def has_ended(self) -> bool:
        with suppress(TimeoutError):
            self.wait(0)
        return self._status is not None

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has ended, and the news of it is under way
            if not self.has_ended():
                os.kill(self.pid, number)


class ForkServer:
    """A process from which others are forked; it ends when it is closed, or this process ends."""

    def __init__(
        self, preloaded: Sequence[str], *, options: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        """Start it with ``options`` of the interpreter; it imports the modules ``preloaded``."""
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = f"from tests.fork_server import main; main({theirs.fileno()}, {list(preloaded)})"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *options, "-c", program],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def start(
        self, target: str, arguments: Sequence[str], *, environment: Mapping[str, str], log: int, channel: int
    ) -> ForkedProcess:
        """Run ``target``, a ``module:function``, with the socket ``channel`` and ``arguments``.

        What it prints goes to ``log``.
        """
        order = json.dumps({"target": target, "arguments": list(arguments), "environment": dict(environment)}).encode()
        news, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._requests, [order], [log, channel, theirs.fileno()])
        return ForkedProcess(news)

    def close(self) -> None:
        self._requests.close()
        self._process.wait(timeout=30)


# -- in the server -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Child:
    pid: int
    news: socket.socket


def main(number: int, preloaded: Sequence[str]) -> None:
    """Serve until the other side hangs up; in a child, be what was asked for."""
    for name in preloaded:
        importlib.import_module(name)
    if "grpc" in sys.modules:
        raise RuntimeError(f"{', '.join(preloaded)}: one of them imports grpc, after which no process may be forked")
    gc.collect()
    gc.freeze()  # nothing of it is garbage, in children either
    with socket.socket(fileno=number) as requests, selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        call = _serve(requests, selector)
    if call is None:
        os._exit(0)  # taking down what was imported may take seconds
    call()


def _serve(requests: socket.socket, selector: selectors.BaseSelector) -> Callable[[], None] | None:
    """Return in a child what it is to do, and None at the end."""
    while True:
        for key, _ in selector.select():
            if isinstance(key.data, _Child):
                selector.unregister(key.fd)
                _report_end(key.fd, key.data)
                continue
            message, files, _, _ = socket.recv_fds(requests, _LARGEST_REQUEST, 3)
            if not message:
                return None
            log, channel, number = files
            news = socket.socket(fileno=number)
            assert len(os.listdir("/proc/self/task")) == 1, "a server with threads cannot fork"
            if not (pid := os.fork()):
                news.close()
                _close_children(selector)
                return partial(_be, **json.loads(message), log=log, channel=channel)
            os.close(log)
            os.close(channel)
            news.send(str(pid).encode())
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, _Child(pid, news))


def _report_end(number: int, child: _Child) -> None:
    os.close(number)
    _, status = os.waitpid(child.pid, 0)
    with child.news, suppress(BrokenPipeError):  # nobody wants to know
        child.news.send(str(os.waitstatus_to_exitcode(status)).encode())


def _close_children(selector: selectors.BaseSelector) -> None:
    for key in selector.get_map().values():
        if isinstance(key.data, _Child):
            key.data.news.close()
            os.close(key.fd)


def _be(target: str, arguments: Sequence[str], environment: Mapping[str, str], *, log: int, channel: int) -> None:
    os.setsid()
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # ranks that hang are aborted
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    module, _, name = target.partition(":")
    getattr(importlib.import_module(module), name)(socket.socket(fileno=channel), *arguments)
